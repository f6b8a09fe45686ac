"""`moe-edge bench paired`: what the two sides are told, their turns, and the ratio."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from orchestrator.errors import ConfigError, MoeEdgeError
from orchestrator.lab.bench import paired
from orchestrator.lab.eval.arithmetic import median_interval

MODEL = Path("m.gguf")


def test_a_side_is_told_settings_as_options_write_them():
    options = paired.PairedOptions(prompt=512, threads=3)
    told = options.side(("policy=dymoe", "retention=0.8", "expert_ram=1MiB"), MODEL)
    assert told == {
        "model": "m.gguf",
        "ctx": 4096,
        "ubatch": 512,
        "threads": 3,
        "policy": "dymoe",
        "retention": 0.8,
        "expert_ram": 2**20,
    }


def test_upstream_runs_at_its_best_flags_unless_others_are_asked_for():
    told = paired.PairedOptions(threads=3).side(("upstream", "extra_bufts=false"), MODEL)
    assert told["upstream"] and told["mmap"] is False and told["extra_bufts"] is False
    assert (told["n_ubatch"], told["threads"]) == (64, 3)
    assert paired.PairedOptions(threads=3).side(("upstream",), MODEL)["extra_bufts"] is True


@pytest.mark.parametrize("word", ["polcy=lru", "policy", "upstream=1"])
def test_what_is_no_setting_is_refused(word):
    with pytest.raises(ConfigError, match=f"'{word}' is no NAME=VALUE"):
        paired.PairedOptions().side((word,), MODEL)


def test_who_begins_changes_from_turn_to_turn_and_warm_up_counts_nowhere():
    asked, steps = [], []

    def played(name):
        def run(n, prompt):
            asked.append(name)
            steps.append(n)
            return [1.0] * (n - 1)

        return SimpleNamespace(name=name, ms=[], run=run)

    sides = {name: played(name) for name in "ab"}
    paired.in_turns(sides, prompt=0, turns=3)
    assert "".join(asked) == "ab" + "ab" + "ba" + "ab"
    assert steps == [paired.WARM_UP] * 2 + [paired.STEPS] * 6
    assert [len(side.ms) for side in sides.values()] == [3 * (paired.STEPS - 1)] * 2


def test_the_interval_of_a_median():
    assert median_interval([2.0]) == (2.0, 2.0, 2.0)
    median, low, high = median_interval([1.0, 1.1, 0.9, 1.05, 0.95, 3.0])
    assert median == pytest.approx(1.025)
    assert 0.9 <= low < median < high <= 3.0


def test_both_sides_really_run(real_engine):
    report = paired.Paired().run(paired.PairedOptions(quick=True, threads=1, layers=2))
    (row,) = report.rows
    assert row["ratio"] == row["theirs_ms"] / row["ours_ms"]
    assert f"median ratio {row['ratio']:.4f}" in report.text()


def test_a_side_that_cannot_run_says_why(real_engine, tmp_path):
    import sys

    told = {"model": str(tmp_path / "no.gguf"), "policy": "lru"}
    with (
        pytest.raises(MoeEdgeError, match=r"a side ended: .*no\.gguf"),
        paired.Side.started(paired.HERE, sys.executable, told),
    ):
        pass
