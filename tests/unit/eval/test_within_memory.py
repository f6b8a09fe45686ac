"""The best tier, with which others are compared, is not loaded at the same time as them."""

import pytest

from orchestrator.config import Config
from orchestrator.lab.eval import EvalOptions, evaluate
from orchestrator.lab.study.dymoe import Depth
from orchestrator.lab.study.subject import Subject
from orchestrator.runtime.runtime import Runtime

RAM = 400 << 20


@pytest.fixture
def loaded(monkeypatch):
    """A list of (configuration, number of other loaded models) for each model that is loaded."""
    opened: list[tuple[Config, int]] = []
    alive = 0
    make, close = Runtime.__init__, Runtime.close

    def counted(self, config, *rest):
        nonlocal alive
        make(self, config, *rest)
        opened.append((config, alive))
        alive += 1

    def uncounted(self):
        nonlocal alive
        alive -= 1
        close(self)

    monkeypatch.setattr(Runtime, "__init__", counted)
    monkeypatch.setattr(Runtime, "close", uncounted)
    return opened


@pytest.fixture
def config(library, tiny_model):
    model = tiny_model("qwen3moe", "q8_0", "q4_k", "q2_k")
    return Config.build(model=model, ram=RAM, ctx=128, threads=1)


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("some words of a text, " * 20)
    return path


def test_the_best_tier_is_read_first_and_within_the_cap(config, text, loaded):
    options = EvalOptions(text=text, tokens=40, window=32, kl=True)
    asked = config.with_changes(policy="dymoe", high_tier="q4_k", low_tier="q2_k")
    found = evaluate(asked, options, lambda _what, _share: None)
    assert found["text"]["best_tier"] == "q8_0"
    assert [(each.config.policy, each.config.ram, others) for each, others in loaded] == [
        ("lru", RAM, 0),
        ("dymoe", RAM, 0),
    ]


def test_the_studies_keep_the_cap(config, text, loaded):
    options = EvalOptions(text=text, tokens=40, window=32)
    Depth().measure(Subject(config, options, lambda _what, _share: None))
    assert len(loaded) > 2
    assert all(each.config.ram == RAM and others == 0 for each, others in loaded)
