"""Few bits for near experts: their tiers, and the options of the study."""

import pytest
from click.testing import CliRunner

from orchestrator.cli.main import cli
from orchestrator.lab.study.near_data import near_tiers


def test_near_tiers_are_one_of_each_width():
    five = near_tiers(("q8_0", "q4_k", "q3_k", "iq3_xxs", "q2_k"))
    assert list(five.items()) == [(4, "q4_k"), (3, "q3_k"), (2, "q2_k")]
    assert five.get(3.0) == "q3_k" and five.get(2.5) is None


def test_settings_are_for_the_studies_that_name_their_policy(model, text):
    pytest.importorskip("matplotlib", reason="needs matplotlib: pip install -e '.[plot]'")
    options = ["eval", "-m", str(model), "--text", str(text), "--study", "depth", "--out", "o"]
    result = CliRunner().invoke(cli, [*options, "--near-bits", "3"])
    assert result.exit_code == 1
    assert (
        "--near-bits has no effect on the study depth: it is a setting of context" in result.stderr
    )
