"""The architectures whose experts are managed in tests, bit for bit as llama.cpp's plain path has
them. A model of another one is managed as well, where its graph reads experts in the common way."""

# By their names in GGUF files: why nobody looks ahead there, empty where the policies do.
PROVEN: dict[str, str] = dict.fromkeys(
    "afmoe arctic bailingmoe bailingmoe2 bailingmoe3 cohere2moe dbrx deepseek deepseek2"
    " deepseek32 deepseek4 dots1 dots3note ernie4_5-moe exaone-moe glm-dsa glm4moe glm5-next"
    " gpt-oss granite granitehybrid granitemoe grok grovemoe hunyuan-moe hy_v3 hy_v4 kimi-k3"
    " kimi-linear laguna lfm2moe llama llama4 maple mellum mimo2 minicpm minimax-01 minimax-m2"
    " minimax-m3 mistral3 mistral4 nemotron_h_moe olmoe phimoe qwen2moe qwen35moe qwen3moe"
    " qwen3next qwen3vlmoe qwen4exp smallthinker step35".split(),
    "",
)
PROVEN["gemma4"] = "since each layer scales what its router reads"
