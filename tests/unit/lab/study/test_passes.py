"""A study says how long it takes, and refuses a text that says nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from orchestrator.cli.main import cli
from orchestrator.lab.study import study
from orchestrator.lab.study.subject import Passes, duration


def test_a_pass_says_which_it_is_and_what_is_left() -> None:
    now, shown, notes = [0.0], [], []
    passes = Passes(lambda *what: shown.append(what), notes.append, lambda: now[0])
    passes.expect(4, 600)
    for label in "abcde":
        passes.begin(label)(0.5)
        now[0] += 60
    assert shown == [
        ("a, pass 1 of 4", 0.5),
        ("b, pass 2 of 4", 0.5),
        ("c, pass 3 of 4, 2 min left in all", 0.5),
        ("d, pass 4 of 4, 60 s left in all", 0.5),
        ("e, pass 5", 0.5),
    ]
    assert notes == [
        "4 passes over up to 600 tokens of the text",
        "The first 2 of 4 passes took 2 min: about 2 min more",
    ]


@pytest.mark.parametrize(
    ("seconds", "said"), [(0, "0 s"), (99, "99 s"), (120, "2 min"), (6060, "1 h 41 min")]
)
def test_durations(seconds: float, said: str) -> None:
    assert duration(seconds) == said


def test_a_text_that_is_too_short_is_refused(
    model: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib", reason="needs matplotlib: pip install -e '.[plot]'")
    monkeypatch.setattr(study, "LEAST_TOKENS", 512)
    words = ["-m", model, "--threads", "1", "--ctx", "128", "--text", text, "--max-tokens", "78"]
    words += ["--study", "accuracy", "--out", tmp_path / "out"]
    result = CliRunner().invoke(cli, ["eval", *map(str, words)])
    assert result.exit_code == 1
    assert "78 tokens are too few for a study, whose figures would be noise: 512" in result.stderr
    assert not (tmp_path / "out").exists()
