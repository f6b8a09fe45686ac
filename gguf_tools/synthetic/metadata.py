"""Metadata of synthetic models."""

from typing import Any

from gguf_tools.file.layout import (
    FORMAT_VERSION,
    KEY_CALIBRATION,
    KEY_FORMAT_VERSION,
    KEY_QUANTIZATION,
    KEY_TIER_BPW,
    KEY_TIERS,
    GGMLType,
    bits_per_weight,
)
from gguf_tools.synthetic.shapes import KV_RANK, NOPE_DIM, Q_RANK, ROPE_DIM, V_DIM, Shape
from gguf_tools.synthetic.vocab import bpe, spm


def synthetic_metadata(s: Shape, tiers: list[GGMLType]) -> dict[str, Any]:
    """Return the GGUF metadata of a synthetic model, including its vocabulary.

    s: sizes of the model.
    tiers: types of its precisions, the best first.
    """
    a = s.arch
    meta: dict[str, Any] = {
        "general.architecture": a,
        "general.name": f"random {a} {s.n_layer}x{s.n_expert}",
        f"{a}.context_length": s.context,
        f"{a}.embedding_length": s.n_embd,
        f"{a}.block_count": s.n_layer,
        f"{a}.feed_forward_length": s.n_ff or s.n_ff_exp,
        f"{a}.attention.head_count": s.n_head,
        f"{a}.attention.head_count_kv": s.n_head_kv,
        f"{a}.attention.layer_norm_rms_epsilon": 1e-5,
        f"{a}.rope.freq_base": 10000.0,
        f"{a}.expert_count": s.n_expert,
        f"{a}.expert_used_count": s.n_expert_used,
    }
    if a in ("qwen3moe", "qwen2moe", "deepseek", "deepseek2"):
        meta[f"{a}.expert_feed_forward_length"] = s.n_ff_exp
    if a == "qwen2moe":
        meta[f"{a}.expert_shared_feed_forward_length"] = s.n_shared * s.n_ff_exp
    if a in ("deepseek", "deepseek2"):
        meta[f"{a}.leading_dense_block_count"] = s.n_dense
        meta[f"{a}.expert_shared_count"] = s.n_shared
        meta[f"{a}.expert_weights_scale"] = 1.0
    if a == "deepseek2":
        meta |= {
            f"{a}.attention.head_count_kv": 1,
            f"{a}.attention.q_lora_rank": Q_RANK,
            f"{a}.attention.kv_lora_rank": KV_RANK,
            f"{a}.attention.key_length": KV_RANK + ROPE_DIM,
            f"{a}.attention.value_length": KV_RANK,
            f"{a}.attention.key_length_mla": NOPE_DIM + ROPE_DIM,
            f"{a}.attention.value_length_mla": V_DIM,
            f"{a}.rope.dimension_count": ROPE_DIM,
            f"{a}.expert_gating_func": 2,
            f"{a}.expert_weights_norm": True,
        }
    else:
        meta[f"{a}.attention.key_length"] = s.head_dim
        meta[f"{a}.attention.value_length"] = s.head_dim
        meta[f"{a}.rope.dimension_count"] = s.head_dim
    if s.n_groups:
        meta[f"{a}.expert_group_count"] = s.n_groups
        meta[f"{a}.expert_group_used_count"] = s.n_groups_used
    if len(tiers) > 1:
        meta |= {
            KEY_FORMAT_VERSION: FORMAT_VERSION,
            KEY_TIERS: [tier.tier_name for tier in tiers],
            KEY_TIER_BPW: [bits_per_weight(tier) for tier in tiers],
            KEY_QUANTIZATION: "random",
            KEY_CALIBRATION: "none",
        }
    return meta | (spm(s.n_vocab) if a == "llama" else bpe(s.n_vocab))
