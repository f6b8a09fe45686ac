"""Fixtures that write and convert each family's checkpoint once."""

from functools import partial

import pytest


@pytest.fixture(scope="session")
def case(tmp_path_factory):
    """case(name): a family's converted checkpoint, with transformers' tokens and logits."""
    from .running import make_case  # needs the extra `convert`

    made = {}

    def make(name):
        if name not in made:
            made[name] = make_case(name, tmp_path_factory.mktemp(name))
        return made[name]

    return make


@pytest.fixture
def float32_attention(monkeypatch):
    """Function that switches to a float32 KV cache without flash attention, both of which would
    round to half precision."""
    from .running import use_float32_attention

    return partial(use_float32_attention, monkeypatch)
