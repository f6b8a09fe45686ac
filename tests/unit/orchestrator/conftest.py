"""Fixtures for tests of measured speeds and of predictions that use them."""

import pytest

from orchestrator.native.llama import Bindings


@pytest.fixture
def model(tiny_model):
    return tiny_model("olmoe", "q4_k", "q2_k")


@pytest.fixture
def bindings(library):
    return Bindings.load()
