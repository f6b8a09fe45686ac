"""What tests of speeds and of the predictions by them want: a model in two tiers, and a llama.cpp
beside which no speed is kept yet."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from orchestrator.native import Library
from orchestrator.native.llama import Bindings


@pytest.fixture
def model(tiny_model: Callable[..., Path]) -> Path:
    return tiny_model("olmoe", "q4_k", "q2_k")


@pytest.fixture
def bindings(library: Library) -> Bindings:
    return Bindings.load()
