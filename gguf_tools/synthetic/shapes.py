"""Shapes of synthetic models: real models with fewer layers, and tiny models of each kind."""

from dataclasses import dataclass, replace

from gguf_tools.errors import TensorShapeError
from gguf_tools.file.layout import GGMLType


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a synthetic model, which has random weights.

    n_ff, n_ff_exp: feed-forward width of a dense layer and of one expert.
    n_dense: number of dense layers at the start.
    n_shared: number of shared experts.
    n_groups, n_groups_used: expert groups of the router and groups used per token.
    fused: whether gate and up matrices are fused.
    """

    arch: str
    n_layer: int
    n_embd: int
    n_ff_exp: int
    n_expert: int
    n_expert_used: int
    n_head: int
    n_head_kv: int
    head_dim: int
    n_vocab: int
    dense_type: GGMLType = GGMLType.Q8_0
    n_ff: int = 0
    n_dense: int = 0
    n_shared: int = 0
    n_groups: int = 0
    n_groups_used: int = 0
    fused: bool = False
    context: int = 4096


_TINY = Shape("", 3, 256, 256, 8, 2, 4, 2, 64, 320, context=2048)
PRESETS = {
    "olmoe": Shape("olmoe", 8, 2048, 1024, 64, 8, 16, 16, 128, 4096, GGMLType.Q4_K),
    "mixtral": Shape("llama", 4, 4096, 14336, 8, 2, 32, 8, 128, 4096, GGMLType.Q4_K),
    "qwen3-30b": Shape("qwen3moe", 6, 2048, 768, 128, 8, 32, 4, 128, 4096, GGMLType.Q4_K),
    "tiny-qwen3moe": replace(_TINY, arch="qwen3moe"),
    "tiny-qwen2moe": replace(_TINY, arch="qwen2moe", n_head_kv=4, n_shared=1),
    "tiny-olmoe": replace(_TINY, arch="olmoe", n_head_kv=4),
    "tiny-mixtral": replace(_TINY, arch="llama"),
    "tiny-deepseek": replace(_TINY, arch="deepseek", n_ff=512, n_dense=1, n_shared=2),
    "tiny-deepseek2": replace(
        _TINY, arch="deepseek2", n_ff=512, n_dense=1, n_shared=1, n_groups=4, n_groups_used=2
    ),
    "tiny-deepseek2-fused": replace(
        _TINY, arch="deepseek2", n_ff=512, n_dense=1, n_shared=1, fused=True
    ),
    "tiny-phimoe": replace(_TINY, arch="phimoe"),
}


# Ranks and head lengths of the latent attention of deepseek2 in the tiny presets.
Q_RANK, KV_RANK, ROPE_DIM, NOPE_DIM, V_DIM = 64, 64, 32, 32, 32


def preset(name: str) -> Shape:
    """Return the predefined sizes of a synthetic model, by name, such as "olmoe".

    Raises TensorShapeError if there is no preset of this name.
    """
    if name not in PRESETS:
        raise TensorShapeError(f"unknown shape '{name}': known shapes are {', '.join(PRESETS)}")
    return PRESETS[name]
