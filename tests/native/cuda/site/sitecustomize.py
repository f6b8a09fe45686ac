"""With this folder on PYTHONPATH, every Python process has the emulated GPU.

MOE_EDGE_TEST_BACKEND names a libggml-cuda.so, which ggml loads before it lists its devices.
"""

import ctypes
import importlib.util
import os
from pathlib import Path

backend = os.environ.get("MOE_EDGE_TEST_BACKEND")
package = importlib.util.find_spec("llama_cpp") if backend else None
if backend and package is not None and package.origin is not None:
    ggml = ctypes.CDLL(str(Path(package.origin).parent / "lib" / "libggml.so"))
    ggml.ggml_backend_load.restype = ctypes.c_void_p
    if not ggml.ggml_backend_load(backend.encode()):
        raise SystemExit(f"{backend} is not a backend")
