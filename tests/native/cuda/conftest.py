"""ggml's CUDA backend on an emulated GPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from patches import tree
from patches.upstream import cache_dir, cached_sdist, locked, read_upstream

from .emulation import build


@pytest.fixture(scope="session")
def emulated_backend(library_folder: Path, llama_source: Path) -> Callable[..., Path]:
    """emulated_backend(types, more): libggml-cuda.so for the emulated GPU, cached by content."""
    compiler = build.find_compiler()
    if compiler is None:
        pytest.skip("the emulated GPU needs g++ and nm")
    upstream = read_upstream()
    sdist = cached_sdist(upstream)
    assert sdist is not None
    with locked(cache_dir() / "lock"):
        tree.sync_tree(sdist, upstream)
        texts = build.read_tree(llama_source)
    store = cache_dir() / "emulation"

    def make(types: tuple[str, ...], more: tuple[str, ...] = ()) -> Path:
        sources = [*build.CORE, *build.mmq_instances(types), *more]
        return build.build_backend(compiler, texts, llama_source, library_folder, sources, store)

    return make
