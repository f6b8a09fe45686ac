"""Convert Hugging Face checkpoints to packed models, with every expert in several precisions."""

from gguf_tools.convert.converting import check_arguments, convert

__all__ = ["check_arguments", "convert"]
