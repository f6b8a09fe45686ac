"""Notation of the sampling settings."""

import pytest

from orchestrator.config import Config, Sampling
from orchestrator.errors import SettingError


def test_a_config_has_the_settings_of_sampling():
    config = Config.build(model="m", temp=0.5, top_k=3, min_p=0.1, stop=("a", "b"))
    assert config.sampling == Sampling(temp=0.5, top_k=3, min_p=0.1, stop=("a", "b"))
    assert set(Sampling.declared()) <= set(Config.declared())


def test_stop_texts_are_quoted_as_in_a_shell():
    stop = Sampling.declared()["stop"]
    assert stop.parse("'the end' User:") == ("the end", "User:")
    assert stop.parse("-") == ()
    for wrong in ("'a", "''"):
        with pytest.raises(SettingError):
            stop.parse(wrong)
