"""Architectures for which managed experts are proven to be exact.

Tests compare them bit for bit with llama.cpp's own path.

Models of other architectures are managed too, if their graph reads experts in the usual way.
"""

# By architecture name: the reason why policies cannot predict the experts of later layers, or an
# empty string if they can.
PROVEN: dict[str, str] = dict.fromkeys(
    "afmoe arctic bailingmoe bailingmoe2 bailingmoe3 cohere2moe dbrx deepseek deepseek2"
    " deepseek32 deepseek4 dots1 dots3note ernie4_5-moe exaone-moe glm-dsa glm4moe glm5-next"
    " gpt-oss granite granitehybrid granitemoe grok grovemoe hunyuan-moe hy_v3 hy_v4 kimi-k3"
    " kimi-linear laguna lfm2moe llama llama4 maple mellum mimo2 minicpm minimax-01 minimax-m2"
    " minimax-m3 mistral3 mistral4 nemotron_h_moe olmoe phimoe qwen2moe qwen35moe qwen3moe"
    " qwen3next qwen3vlmoe qwen4exp smallthinker step35".split(),
    "",
)
PROVEN["gemma4"] = "because each layer scales its router's input"
