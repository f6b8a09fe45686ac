"""Tiny random checkpoints of every model family, made with transformers' classes.

Weights are rounded to half precision and stored as float32, so F16 and F32 tiers hold the same
numbers. Router rows are long, so the choice of experts does not depend on rounding.
"""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import MethodType
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs the extra `convert`")
pytest.importorskip("transformers", reason="needs the extra `convert`")

import torch
import transformers
from safetensors.torch import load_file, save_file

VOCAB = 384
END = "<|endoftext|>"
SPECIAL = {"glm": ["[gMASK]", "<|user|>", "<|observation|>"], "solar": ["<unk>", "<|startoftext|>"]}
TEXT = (
    "The experts of a model lie on disk. A router asks for 2 of 8; what isn't there is read, "
    "and they've 512 MB to live in.\nNext line: 12345 tokens, naïve café, ΑΒΓ.\n"
)
PROMPT = "A router asks for 37 experts; they've been read.\nNext"


@dataclass(frozen=True)
class Family:
    """A model family and how its checkpoint is made.

    model: transformers' class. config: settings that SIZES lacks or that differ. tokenizer: its
    kind. adapt: changes a model so that it computes the same as llama.cpp. config_class: only if it
    is not named like the model. publish: changes the folder to the published form if transformers
    writes another form.
    """

    model: str
    config: dict[str, Any]
    tokenizer: str
    adapt: Callable[[Any], None] | None = None
    config_class: str | None = None
    publish: Callable[[Path], None] | None = None

    def build(self):
        name = self.config_class or self.model.replace("ForCausalLM", "Config")
        config_class = getattr(transformers, name)
        torch.manual_seed(1)  # for weights that randomise does not set
        sizes = {} if "text_config" in self.config else SIZES
        config = config_class(**{**sizes, **self.config})
        config._attn_implementation = "eager"
        return randomise(getattr(transformers, self.model)(config).eval())


# fmt: off
SIZES = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
    "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None, "tie_word_embeddings": False,
}
SENTENCEPIECE_ENDS = {"bos_token_id": 1, "eos_token_id": 2}
EIGHT_EXPERTS = {"moe_intermediate_size": 96, "num_experts": 8, "num_experts_per_tok": 2}
EIGHT_LOCAL = {"num_local_experts": 8, "num_experts_per_tok": 2}
EIGHT_ROUTED = {"moe_intermediate_size": 96, "n_routed_experts": 8, "num_experts_per_tok": 2}
DEEPSEEK = {
    **EIGHT_ROUTED, "n_shared_experts": 2, "first_k_dense_replace": 1, "num_key_value_heads": 4,
    "kv_lora_rank": 32, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32,
}
GRANITE = {
    **EIGHT_LOCAL, "shared_intermediate_size": 96, "embedding_multiplier": 3.0,
    "logits_scaling": 2.0, "residual_multiplier": 0.5, "attention_multiplier": 0.2,
}
# A sliding window in some layers.
WINDOWED = {"num_hidden_layers": 4, "head_dim": 32, "sliding_window": 8}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
IN_GROUPS = {
    "n_group": 4, "topk_group": 2, "norm_topk_prob": True, "routed_scaling_factor": 2.5,
}
INDEXED = {"index_head_dim": 64, "index_n_heads": 4}
QWEN3_NEXT = {
    **EIGHT_EXPERTS, "num_hidden_layers": 4, "shared_expert_intermediate_size": 96, "head_dim": 32,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}
# fmt: on


def as_llama_cpp(model):
    """Change Phi-3.5-MoE to llama.cpp's version, which differs from the trained one.

    Norms do not subtract the mean. The router takes the softmax over all experts, normalised over
    the two chosen ones, instead of SparseMixer.
    """

    def route(self, x):
        logits = torch.nn.functional.linear(x, self.weight)
        weights, chosen = logits.softmax(-1).topk(self.top_k)
        return logits, weights / weights.sum(-1, keepdim=True), chosen

    def norm(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight + self.bias

    for module in model.modules():
        if isinstance(module, torch.nn.LayerNorm):
            module.forward = MethodType(norm, module)
        elif type(module).__name__ == "PhimoeTopKRouter":
            module.forward = MethodType(route, module)


def with_a_table_of_gelu(model):
    """ggml takes GELU from a table in half precision."""

    def gelu(x):
        found = torch.nn.functional.gelu(x.half().float(), approximate="tanh").half().float()
        return torch.where(x.abs() < 10, found, x.clamp(min=0))

    for module in model.modules():
        if hasattr(module, "act_fn"):
            module.act_fn.forward = gelu


def with_columns_first(folder):
    """Store experts as [experts, columns, rows]. transformers transposes them when loading."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for name in [name for name in tensors if ".experts." in name]:
        tensors[name] = tensors[name].transpose(1, 2).contiguous()
    save_file(tensors, path, metadata={"format": "pt"})


def with_open_gates(model):
    """Change Qwen2-MoE to DeepSeek-MoE-16B, for which transformers has no class: the gate before
    the shared experts is always open (arXiv 2401.06066, section 3)."""

    def always(x):
        return torch.full((len(x), 1), math.inf)

    for module in model.modules():
        if hasattr(module, "shared_expert_gate"):
            del module.shared_expert_gate
            module.shared_expert_gate = always


def as_deepseek_moe(folder):
    """Rename tensors and settings as in the published checkpoint."""
    tensors = load_file(folder / "model.safetensors")
    renamed = {
        name.replace("shared_expert.", "shared_experts."): values
        for name, values in tensors.items()
        if "shared_expert_gate" not in name
    }
    save_file(renamed, folder / "model.safetensors", metadata={"format": "pt"})
    config = {
        **SIZES,
        **EIGHT_ROUTED,
        "architectures": ["DeepseekForCausalLM"],
        "model_type": "deepseek",
        "intermediate_size": 160,
        "num_key_value_heads": 4,
        "n_shared_experts": 2,
        "num_experts_per_tok": 3,
        "first_k_dense_replace": 1,
        "norm_topk_prob": False,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
    }
    (folder / "config.json").write_text(json.dumps(config))


def as_mimo2(folder):
    """Use the settings of the published checkpoint."""
    path = folder / "config.json"
    config = {
        **json.loads(path.read_text()),
        "hybrid_layer_pattern": [0, 1, 0, 1],
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "swa_head_dim": 32,
        "swa_v_head_dim": 16,
        "topk_method": "noaux_tc",
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 5000000.0,
            "partial_rotary_factor": 0.334,
        },
        "swa_rope_theta": 10000.0,
    }
    path.write_text(json.dumps(config))


# llama.cpp derives this number from the two context lengths below. Published configs contain it.
PHI_MSCALE = math.sqrt(1 + math.log(512 / 256) / math.log(256))
# fmt: off
FAMILIES = {
    "mixtral": Family("MixtralForCausalLM", {**EIGHT_LOCAL, **SENTENCEPIECE_ENDS}, "sentencepiece"),
    "qwen2-moe": Family("Qwen2MoeForCausalLM", {
        **EIGHT_EXPERTS, "shared_expert_intermediate_size": 160, "num_key_value_heads": 4,
    }, "qwen2"),
    "qwen3-moe": Family("Qwen3MoeForCausalLM", {
        **EIGHT_EXPERTS, "norm_topk_prob": True, "head_dim": 32,
    }, "qwen2"),
    "qwen3-next": Family("Qwen3NextForCausalLM", QWEN3_NEXT, "qwen2"),
    "olmoe": Family("OlmoeForCausalLM", {
        "num_experts": 8, "num_experts_per_tok": 2, "num_key_value_heads": 4,
    }, "neox"),
    "deepseek-v2": Family("DeepseekV2ForCausalLM", {
        # llama.cpp recognises the variant without a query rank by its number of layers.
        **DEEPSEEK, "num_hidden_layers": 27, "n_routed_experts": 4, "q_lora_rank": None,
        "topk_method": "greedy", "n_group": 1, "topk_group": 1, "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
    }, "llama3"),
    "deepseek-v3": Family("DeepseekV3ForCausalLM", {
        **DEEPSEEK, **IN_GROUPS, "q_lora_rank": 48,
    }, "llama3"),
    "phi-moe": Family("PhimoeForCausalLM", {
        **SENTENCEPIECE_ENDS, **EIGHT_LOCAL, "attention_bias": True, "lm_head_bias": True,
        "sliding_window": 512,
        "rope_parameters": {
            "rope_type": "longrope", "rope_theta": 10000.0,
            "short_factor": [1.0 + 0.1 * i for i in range(8)],
            "long_factor": [2.0 + 0.1 * i for i in range(8)], "short_mscale": PHI_MSCALE,
            "long_mscale": PHI_MSCALE, "original_max_position_embeddings": 256,
        },
    }, "sentencepiece", as_llama_cpp),
    "deepseek-moe": Family("Qwen2MoeForCausalLM", {
        **EIGHT_EXPERTS, "intermediate_size": 160, "shared_expert_intermediate_size": 2 * 96,
        "num_experts_per_tok": 3, "mlp_only_layers": [0], "qkv_bias": False,
        "num_key_value_heads": 4,
    }, "llama3", with_open_gates, publish=as_deepseek_moe),
    # Attention to tokens chosen by an indexer. This text is short, so all are chosen.
    "deepseek-v3.2": Family("DeepseekV32ForCausalLM", {
        **DEEPSEEK, **IN_GROUPS, **INDEXED, "q_lora_rank": 48,
    }, "deepseek"),
    "dots1": Family("Dots1ForCausalLM", {
        **EIGHT_ROUTED, **IN_GROUPS, "n_group": 1, "topk_group": 1, "n_shared_experts": 2,
        "first_k_dense_replace": 1, "num_key_value_heads": 4,
    }, "qwen2"),
    # One tensor for all experts of a layer, with gate and up joined.
    "granite-moe": Family(
        "GraniteMoeForCausalLM",
        {k: v for k, v in GRANITE.items() if k != "shared_intermediate_size"}, "neox",
    ),
    "minimax-m2": Family("MiniMaxM2ForCausalLM", {
        **EIGHT_LOCAL, "head_dim": 32, "rotary_dim": 16,
    }, "qwen2"),
    # Expert biases, attention sinks, and a sliding window in every other layer.
    "gpt-oss": Family("GptOssForCausalLM", {
        "num_hidden_layers": 4, **EIGHT_LOCAL, "head_dim": 32, "sliding_window": 8,
        # llama.cpp blends frequencies between whole dimensions.
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 150000.0, "factor": 4.0,
            "original_max_position_embeddings": 128, "beta_fast": 32.0, "beta_slow": 1.0,
            "truncate": True,
        },
    }, "llama3"),
    # Experts next to a dense part, each scaled; a router with its own norm and scale; an embedding
    # for each layer; in some layers a sliding window and another head length.
    "gemma4": Family("Gemma4ForCausalLM", {
        **WINDOWED, "layer_types": ["sliding_attention", "full_attention"] * 2,
        "global_head_dim": 64, "hidden_size_per_layer_input": 16,
        "vocab_size_per_layer_input": VOCAB, "enable_moe_block": True, "moe_intermediate_size": 96,
        "num_experts": 8, "top_k_experts": 2, "final_logit_softcapping": 30.0,
        "tie_word_embeddings": True,
    }, "gemma", with_a_table_of_gelu, config_class="Gemma4TextConfig"),
    "glm4-moe": Family("Glm4MoeForCausalLM", {
        **EIGHT_ROUTED, "routed_scaling_factor": 2.5, "head_dim": 32, "attention_bias": True,
        "use_qk_norm": True,
    }, "glm"),
    "glm4-moe-lite": Family("Glm4MoeLiteForCausalLM", {
        **{k: v for k, v in DEEPSEEK.items() if k != "first_k_dense_replace"}, "q_lora_rank": 48,
        "n_shared_experts": 1,
    }, "glm"),
    # Upstream sets the shared experts' width to this one divided by the number of key heads.
    "ernie4.5-moe": Family("Ernie4_5_MoeForCausalLM", {
        **SENTENCEPIECE_ENDS, "moe_intermediate_size": 96, "moe_num_experts": 8, "moe_k": 2,
        "moe_num_shared_experts": 2, "intermediate_size": 2 * 2 * 96,
    }, "sentencepiece"),
    "exaone-moe": Family("ExaoneMoeForCausalLM", {
        **EIGHT_EXPERTS, "num_hidden_layers": 4, "head_dim": 32, "sliding_window": 8,
    }, "qwen2"),
    "qwen3.5-moe": Family(
        "Qwen3_5MoeForCausalLM", QWEN3_NEXT, "qwen2", config_class="Qwen3_5MoeTextConfig",
    ),
    "afmoe": Family("AfmoeForCausalLM", {
        **EIGHT_EXPERTS, **WINDOWED, "num_dense_layers": 1, "num_shared_experts": 1,
        "route_scale": 2.5, "mup_enabled": True,
    }, "qwen2"),
    # Attention and experts in parallel, and norms that subtract the mean.
    "cohere2-moe": Family("Cohere2MoeForCausalLM", {
        **WINDOWED, "num_experts": 8, "num_experts_per_tok": 2, "num_shared_experts": 1,
        "tie_word_embeddings": True, "logit_scale": 1.0,
    }, "qwen2"),
    "dbrx": Family("DbrxForCausalLM", {
        "d_model": 64, "n_heads": 4, "n_layers": 3, "max_seq_len": 512,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
        "ffn_config": {
            "hidden_size": 64, "ffn_hidden_size": 96, "moe_num_experts": 8, "moe_top_k": 2,
        },
    }, "llama3"),
    # Attention to tokens chosen by an indexer. This text is short, so all are chosen.
    "glm-dsa": Family("GlmMoeDsaForCausalLM", {
        **DEEPSEEK, **INDEXED, "mlp_layer_types": ["dense", "sparse", "sparse"], "q_lora_rank": 48,
    }, "glm"),
    # Mamba in every other layer.
    "granite-hybrid": Family("GraniteMoeHybridForCausalLM", {
        **GRANITE, "num_hidden_layers": 4, "layer_types": ["mamba", "attention"] * 2,
        "position_embedding_type": "nope", "mamba_n_heads": 4, "mamba_d_state": 32,
        "mamba_d_head": 32,
    }, "neox"),
    "granite-shared": Family("GraniteMoeSharedForCausalLM", GRANITE, "neox"),
    "hy-v3": Family("HYV3ForCausalLM", {
        **EIGHT_EXPERTS, "mlp_layer_types": ["dense", "sparse", "sparse"],
        "first_k_dense_replace": 1, "num_shared_experts": 1, "head_dim": 32,
        "router_scaling_factor": 2.5,
    }, "qwen2"),
    "laguna": Family("LagunaForCausalLM", {
        **EIGHT_EXPERTS, **WINDOWED, "layer_types": ["full_attention", *["sliding_attention"] * 3],
        "shared_expert_intermediate_size": 96, "moe_routed_scaling_factor": 2.5,
    }, "qwen2"),
    # Short convolutions instead of attention.
    "lfm2-moe": Family("Lfm2MoeForCausalLM", {
        **EIGHT_EXPERTS, "num_dense_layers": 1, "layer_types": ["conv", "full_attention", "conv"],
        "tie_word_embeddings": True,
    }, "qwen2"),
    # Gate weights multiply the input of an expert.
    "llama4": Family("Llama4ForCausalLM", {
        "num_hidden_layers": 4, "num_local_experts": 8, "num_experts_per_tok": 1,
        "intermediate_size_mlp": 96, "interleave_moe_layer_step": 1, "head_dim": 32,
        "attention_chunk_size": 256,
    }, "llama3", config_class="Llama4TextConfig"),
    "mellum": Family("MellumForCausalLM", {
        **EIGHT_EXPERTS, **WINDOWED, "layer_types": [*["sliding_attention"] * 3, "full_attention"],
        "rope_parameters": dict.fromkeys(("full_attention", "sliding_attention"), ROPE),
    }, "qwen2"),
    "mimo2": Family("MiMoV2FlashForCausalLM", {
        **EIGHT_ROUTED, **WINDOWED, "layer_types": ["full_attention", "sliding_attention"] * 2,
        "v_head_dim": 16,
    }, "qwen2", publish=as_mimo2),
    # Layers of Mamba, of attention, and of experts without a gate matrix.
    "nemotron-h": Family("NemotronHForCausalLM", {
        **EIGHT_ROUTED, "layers_block_type": ["mamba", "moe", "attention", "moe"], "head_dim": 32,
        "mamba_num_heads": 4, "mamba_head_dim": 32, "ssm_state_size": 32, "n_groups": 2,
        # llama.cpp has no minimum
        "moe_shared_expert_intermediate_size": 96, "time_step_min": 1e-9,
    }, "llama3"),
    "solar-open": Family("SolarOpenForCausalLM", {
        **EIGHT_ROUTED, "head_dim": 32, "routed_scaling_factor": 2.5,
        "rope_parameters": {**ROPE, "partial_rotary_factor": 1.0},
    }, "solar"),
    "qwen3-vl-moe": Family("Qwen3VLMoeForConditionalGeneration", {
        "text_config": {
            **SIZES, **EIGHT_EXPERTS, "norm_topk_prob": True, "head_dim": 32,
            "rope_parameters": {**ROPE, "mrope_section": [6, 5, 5], "mrope_interleaved": True},
        },
        "vision_config": {
            "depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2,
            "out_hidden_size": 64, "num_position_embeddings": 16, "deepstack_visual_indexes": [0],
        },
    }, "qwen2", config_class="Qwen3VLMoeConfig", publish=with_columns_first),
}
# fmt: on


def randomise(model, seed=7):
    """Set random weights so that every part affects the logits: matrices with unit gain, norms and
    biases that are not neutral."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, values in model.named_parameters():
            noise = torch.randn(values.shape, generator=generator)
            if "e_score_correction" in name:
                values.copy_(0.1 * noise)
            elif values.dim() > 1:
                gain = 8.0 if is_router(name) else 1.0
                values.copy_(noise * gain / math.sqrt(values.shape[-1]))
            elif "norm" in name or "bias" in name:
                values.add_(0.2 * noise)
            values.copy_(values.half().float())
        for name, buffer in model.named_buffers():
            if "e_score_correction" in name:
                buffer.copy_((0.1 * torch.randn(buffer.shape, generator=generator)).half().float())
    return model


def is_router(name):
    return name.endswith(("gate.weight", "router.weight")) and "shared" not in name
