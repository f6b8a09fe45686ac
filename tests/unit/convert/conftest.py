"""Each family's checkpoint is made and converted once."""

from functools import partial

import pytest


@pytest.fixture(scope="session")
def case(tmp_path_factory):
    """case(name): a family's checkpoint, converted, and what transformers makes of it."""
    from .running import make_case  # needs the extra `convert`

    made = {}

    def make(name):
        if name not in made:
            made[name] = make_case(name, tmp_path_factory.mktemp(name))
        return made[name]

    return make


@pytest.fixture
def float32_attention(monkeypatch):
    """Call it for keys and values in float32, and no flash attention, which rounds them to half."""
    from .running import use_float32_attention

    return partial(use_float32_attention, monkeypatch)
