"""Where the experts of a model lie on disk, and what its metadata says of them."""

from gguf_tools.experts.model import DEFAULT_KV, KV_TYPES, ExpertModel
from gguf_tools.experts.proven import PROVEN
from gguf_tools.experts.slices import Slice, Tier

__all__ = ["DEFAULT_KV", "KV_TYPES", "PROVEN", "ExpertModel", "Slice", "Tier"]
