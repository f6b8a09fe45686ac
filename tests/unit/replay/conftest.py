"""The built library; tests of arithmetic alone do without."""

from __future__ import annotations

import pytest

from orchestrator.errors import NativeError
from orchestrator.llama import Bindings
from orchestrator.native import Library


@pytest.fixture(scope="session")
def library() -> Library:
    try:
        return Bindings.load().library()
    except NativeError as error:
        pytest.skip(f"no built llama.cpp: {error}")
