"""`make cuda-check` fails on warnings in our files, and on those alone."""

from __future__ import annotations

from patches.build import our_warnings

LOG = """[1/3] Building CUDA object moe-edge-cuda.cu.o
/src/llama.cpp/moe-edge/moe-edge-cuda.cu(12): warning #177-D: variable "x" is never used
/src/llama.cpp/moe-edge/moe-edge-launch.h:7:9: warning: unused parameter [-Wunused-parameter]
/src/llama.cpp/moe-edge/moe-edge-launch.h:7:9: warning: unused parameter [-Wunused-parameter]
/src/llama.cpp/ggml/src/ggml-cuda/mmq.cuh(30): warning #221-D: floating-point value does not fit
/src/llama.cpp/moe-edge/moe-edge-cuda.cu(40): note: in a call
"""


def test_only_our_warnings_count() -> None:
    found = our_warnings(LOG)
    assert len(found) == 2
    assert "#177-D" in found[0] and "launch.h:7" in found[1]
