"""Locate a model's experts in its files and read its hyperparameters."""

from gguf_tools.experts.model import DEFAULT_KV, KV_TYPES, ExpertModel
from gguf_tools.experts.proven import PROVEN
from gguf_tools.experts.slices import Slice, Tier

__all__ = ["DEFAULT_KV", "KV_TYPES", "PROVEN", "ExpertModel", "Slice", "Tier"]
