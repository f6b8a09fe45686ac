"""Pack model files with every expert in several precisions, and export single tiers from them."""

from gguf_tools.pack.exporting import export
from gguf_tools.pack.packing import pack
from gguf_tools.pack.report import PackReport

__all__ = ["PackReport", "export", "pack"]
