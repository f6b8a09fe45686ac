"""Each family's checkpoint is made and converted once."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest


@pytest.fixture(scope="session")
def case(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """case(name): a family's checkpoint, converted, and what transformers makes of it."""
    from .running import make_case  # needs the extra `convert`

    made: dict[str, Any] = {}

    def make(name: str) -> Any:
        if name not in made:
            made[name] = make_case(name, tmp_path_factory.mktemp(name))
        return made[name]

    return make


@pytest.fixture
def float32_attention(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Call it for keys and values in float32, and no flash attention, which rounds them to half."""
    from .running import use_float32_attention

    return partial(use_float32_attention, monkeypatch)
