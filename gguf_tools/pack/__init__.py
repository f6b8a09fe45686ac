"""Model files with every expert in several precisions: made, and taken apart again."""

from gguf_tools.pack.exporting import export
from gguf_tools.pack.packing import pack
from gguf_tools.pack.report import PackReport

__all__ = ["PackReport", "export", "pack"]
