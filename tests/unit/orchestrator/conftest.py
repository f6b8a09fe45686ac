"""What tests of speeds and of the predictions by them want: a model in two tiers, and a llama.cpp
beside which no speed is kept yet."""

import pytest

from orchestrator.native.llama import Bindings


@pytest.fixture
def model(tiny_model):
    return tiny_model("olmoe", "q4_k", "q2_k")


@pytest.fixture
def bindings(library):
    return Bindings.load()
