"""A study refuses a text with too few tokens."""

import pytest
from click.testing import CliRunner

from orchestrator.cli.main import cli
from orchestrator.lab.study import study


def test_a_text_that_is_too_short_is_refused(model, text, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib", reason="needs matplotlib: pip install -e '.[plot]'")
    monkeypatch.setattr(study, "LEAST_TOKENS", 512)
    words = ["-m", model, "--threads", "1", "--ctx", "128", "--text", text, "--max-tokens", "78"]
    words += ["--study", "accuracy", "--out", tmp_path / "out"]
    result = CliRunner().invoke(cli, ["eval", *map(str, words)])
    assert result.exit_code == 1
    assert "78 tokens are too few for a study, the minimum is 512" in result.stderr
    assert not (tmp_path / "out").exists()
