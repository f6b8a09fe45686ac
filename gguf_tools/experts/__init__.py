"""Where the experts of a model lie on disk, and what its metadata says of them."""

from gguf_tools.experts.model import ExpertModel
from gguf_tools.experts.slices import Slice, Tier

__all__ = ["ExpertModel", "Slice", "Tier"]
