"""Random-weight Mixture-of-Experts GGUFs of a chosen shape, for tests and benchmarks.

Such a file loads in unpatched llama.cpp, its activations stay finite, its experts are as large
as a real model's, and how often each expert is used is known. Equal arguments give equal bytes.
"""

from gguf_tools.synthetic.shapes import PRESETS, Shape, preset
from gguf_tools.synthetic.writing import ROUTINGS, file_bytes, write

__all__ = ["PRESETS", "ROUTINGS", "Shape", "file_bytes", "preset", "write"]
