"""`moe-edge bench paired`: settings of the two sides, their turns, and the ratio."""

from pathlib import Path

import pytest

from orchestrator.errors import ConfigError, MoeEdgeError
from orchestrator.lab.bench.paired import (
    HERE,
    STEPS,
    WARM_UP,
    Paired,
    PairedOptions,
    Side,
    in_turns,
)
from orchestrator.lab.eval.arithmetic import median_interval

MODEL = Path("m.gguf")


def test_settings_of_a_side_are_parsed_like_options():
    options = PairedOptions(prompt=512, threads=1)
    parsed = options.side(("policy=dymoe", "retention=0.8", "expert_ram=1MiB"), MODEL)
    assert parsed == {
        "model": "m.gguf",
        "ctx": 4096,
        "ubatch": 512,
        "threads": 1,
        "policy": "dymoe",
        "retention": 0.8,
        "expert_ram": 2**20,
    }


def test_upstream_runs_with_its_best_flags_by_default():
    parsed = PairedOptions(threads=1).side(("upstream", "extra_bufts=false"), MODEL)
    assert parsed["upstream"] and parsed["mmap"] is False and parsed["extra_bufts"] is False
    assert (parsed["n_ubatch"], parsed["threads"]) == (64, 1)
    assert PairedOptions(threads=1).side(("upstream",), MODEL)["extra_bufts"] is True


@pytest.mark.parametrize("word", ["polcy=lru", "policy", "upstream=1"])
def test_words_that_are_not_settings_are_refused(word):
    with pytest.raises(ConfigError, match=f"'{word}' is not a setting in the form NAME=VALUE"):
        PairedOptions().side((word,), MODEL)


class Played:
    """A side that computes nothing and records its calls."""

    def __init__(self, name, asked, steps):
        self.name, self.asked, self.steps, self.ms = name, asked, steps, []

    def run(self, steps, prompt):
        self.asked.append(self.name)
        self.steps.append(steps)
        return [1.0] * (steps - 1)


def test_sides_alternate_and_warm_up_does_not_count():
    asked, steps = [], []
    sides = {name: Played(name, asked, steps) for name in "ab"}
    in_turns(sides, prompt=0, turns=3)
    assert "".join(asked) == "ab" + "ab" + "ba" + "ab"
    assert steps == [WARM_UP] * 2 + [STEPS] * 6
    assert [len(side.ms) for side in sides.values()] == [3 * (STEPS - 1)] * 2


def test_the_interval_of_a_median():
    assert median_interval([2.0]) == (2.0, 2.0, 2.0)
    median, low, high = median_interval([1.0, 1.1, 0.9, 1.05, 0.95, 3.0])
    assert median == pytest.approx(1.025)
    assert 0.9 <= low < median < high <= 3.0


def test_both_sides_run(real_engine):
    report = Paired().run(PairedOptions(quick=True, threads=1, layers=2))
    (row,) = report.rows
    assert row["ratio"] == row["theirs_ms"] / row["ours_ms"]
    assert f"median ratio is {row['ratio']:.4f}" in report.text()


def test_a_side_that_cannot_run_is_reported(real_engine, tmp_path):
    import sys

    parsed = {"model": str(tmp_path / "no.gguf"), "policy": "lru"}
    with (
        pytest.raises(
            MoeEdgeError,
            match=r"the process of one of the compared configurations failed: .*no\.gguf",
        ),
        Side.started(HERE, sys.executable, parsed),
    ):
        pass
