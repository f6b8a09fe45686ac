"""Generate Mixture-of-Experts GGUF files with random weights, for tests and benchmarks.

A generated file loads in unpatched llama.cpp and its activations stay finite. Its experts can be as
large as those of a real model, and the frequency with which each expert is used is known. Equal
arguments give identical files.
"""

from gguf_tools.synthetic.shapes import PRESETS, Shape, preset
from gguf_tools.synthetic.writing import ROUTINGS, file_bytes, write

__all__ = ["PRESETS", "ROUTINGS", "Shape", "file_bytes", "preset", "write"]
