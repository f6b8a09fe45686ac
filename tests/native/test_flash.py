"""Whether attention is flash is the backend's own answer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from gguf_tools.experts import ExpertModel
from orchestrator.memory.machine import runs_flash
from orchestrator.native import Library
from orchestrator.native.llama import Bindings


def test_a_library_without_a_gpu_has_none(
    library: Library, tiny_model: Callable[..., Path]
) -> None:
    with ExpertModel.open(tiny_model("qwen3moe", "q4_k")) as model:
        assert not runs_flash(Bindings.load(), 0, model, "f16")
