"""Few bits for near experts: the arithmetic of expected losses by hand, and the studies behind
prompts from end to end."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from gguf_tools.experts import ExpertModel
from orchestrator.allocation.placement import PlacementSettings
from orchestrator.cli.main import cli
from orchestrator.cost import losses
from orchestrator.cost.losses import LossTable, TablePrecision
from orchestrator.lab.study.context import Usage
from orchestrator.lab.study.expected_loss import (
    FORMS,
    NO_PRIOR,
    ORACLE,
    OURS,
    PAPER,
    STATIC,
    Losses,
    NearTiers,
    expected_loss,
    least_loss,
)
from orchestrator.lab.study.near_bits import UNIFORM

TWO = NearTiers(("q4_k", "q2_k"), (4, 2))


def table(n_layers: int, n_expert: int) -> LossTable:
    names = (("q8_0", 8.5), ("q4_k", 4.5), ("q2_k", 2.625))
    rng = np.random.default_rng(1)
    loss = np.sort(rng.random((n_layers, n_expert, 3)), axis=2)
    ones = np.ones((n_layers, n_expert))
    candidates = [TablePrecision(name, bits, True) for name, bits in names]
    return LossTable(candidates, loss, 2 * ones, ones.astype(np.int64), "r", "rtn", "text", 1)


def test_near_tiers_are_one_of_each_width() -> None:
    five = NearTiers.of(("q8_0", "q4_k", "q3_k", "iq3_xxs", "q2_k"))
    assert five == NearTiers(("q4_k", "q3_k", "q2_k"), (4, 3, 2))
    assert five.uniform(3.0) == "q3_k" and five.uniform(2.5) is None


def test_losses_of_a_table_by_name() -> None:
    made = table(2, 3)
    found = Losses.of(made, "q8_0", TWO)
    assert found is not None
    assert (found.near == made.loss[:, :, 1:]).all() and (found.best == made.loss[:, :, 0]).all()
    full = Losses.of(made, "f16", TWO)
    assert full is not None and not full.best.any()
    assert Losses.of(made, "q8_0", NearTiers(("q3_k",), (3,))) is None


def test_the_expected_loss_is_that_of_the_experts_that_are_used() -> None:
    """Three experts, one hot; of the two near ones the more important one has 4 bits of 3 on
    average."""
    counts, answer = np.array([[5.0, 3.0, 1.0]]), np.array([[1.0, 2.0, 3.0]])
    usage = Usage("", 9, 6, counts, counts, answer)
    near = np.array([[[0.1, 1.0], [0.2, 2.0], [0.3, 3.0]]])
    of = Losses(near, np.array([[0.01, 0.02, 0.03]]), np.full((1, 3), 2.0))
    profile = np.array([[1.0, 1.0, 9.0]])

    def chosen(form: str, bits: float, prior: float = 64.0) -> float:
        asked = PlacementSettings(near_bits=bits, prior_tokens=prior)
        return expected_loss(form, [usage], profile, TWO, of, 1, asked, 1).chosen

    assert chosen(PAPER, 3.0) == pytest.approx((0.01 + 2 * 0.2 + 3 * 3.0) / 12)
    assert chosen(NO_PRIOR, 3.0) == chosen(PAPER, 3.0)
    assert chosen(ORACLE, 3.0) == pytest.approx((3 * 0.03 + 2 * 0.2 + 1.0) / 12)
    assert chosen(STATIC, 3.0) == pytest.approx((3 * 0.03 + 0.1 + 2 * 2.0) / 12)
    # With a profile that counts as 64 tokens, the last expert is hot, and the first comes next.
    assert chosen(OURS, 3.0) == chosen(STATIC, 3.0)
    assert chosen(OURS, 3.0, prior=0.0) == chosen(PAPER, 3.0)
    asked = PlacementSettings(near_bits=2.0)
    found = expected_loss(PAPER, [usage, usage], profile, TWO, of, 1, asked, 1)
    assert found.chosen == found.uniform == pytest.approx((0.01 + 2 * 2.0 + 3 * 3.0) / 12)
    assert found.gain is not None and found.gain.value == pytest.approx(0.0)
    assert found.possible == pytest.approx(0.0)


def test_a_gain_is_stated_with_its_error_by_text_and_beside_the_best_one() -> None:
    """Two near experts with 3 bits on average. The prompt gives 4 and 2 of them, which is right for
    the first answer; with the second one 3 bits for both, or the other way round, lose half of
    what it loses."""
    counts = np.array([[9.0, 5.0, 1.0]])
    answers = [np.array([[4.0, 3.0, 1.0]]), np.array([[4.0, 1.0, 2.0]])]
    usages = [Usage("", 9, 6, counts, counts, answer) for answer in answers]
    of = Losses(np.tile([0.0, 0.5, 1.5], (1, 3, 1)), np.zeros((1, 3)), np.ones((1, 3)))
    near = NearTiers(("q4_k", "q3_k", "q2_k"), (4, 3, 2))
    asked = PlacementSettings(near_bits=3.0, prior_tokens=0.0)
    found = expected_loss(OURS, usages, counts, near, of, 1, asked, 1)
    assert found.chosen == pytest.approx((1.5 + 3.0) / 15)
    assert found.uniform == pytest.approx((2.0 + 1.5) / 15)
    assert found.best == pytest.approx((1.5 + 1.5) / 15)
    assert found.gain is not None and found.possible is not None
    assert found.gain.value == pytest.approx(-1 / 3.5)
    assert found.gain.error == pytest.approx(1.875 / 3.0625)
    assert found.possible == pytest.approx(0.5 / 3.5)
    assert found.reached == pytest.approx(-2.0)


@pytest.mark.parametrize("seed", range(8))
def test_the_best_choice_equals_brute_force(seed: int) -> None:
    rng = np.random.default_rng(seed)
    bits = (8, 4, 3, 1)[: rng.integers(1, 5)]
    n = int(rng.integers(1, 6))
    loss = rng.random((n, len(bits)))
    budget = n * bits[-1] + int(rng.integers(0, 3 * n))
    choices = itertools.product(range(len(bits)), repeat=n)
    least = min(
        loss[np.arange(n), list(each)].sum()
        for each in choices
        if sum(bits[way] for way in each) <= budget
    )
    assert least_loss(loss, bits, budget) == pytest.approx(least)


def run(study: str, model: Path, text: Path, out: Path, *more: str) -> list[list[dict[str, Any]]]:
    pytest.importorskip("matplotlib", reason="needs matplotlib: pip install -e '.[plot]'")
    options = ["-m", str(model), "--threads", "1", "--ctx", "128", "--window", "16"]
    options += ["--text", str(text), "--study", study, "--out", str(out), *more]
    result = CliRunner().invoke(cli, ["eval", *options])
    assert result.exit_code == 0, result.output
    tables = json.loads((out / f"{study}.json").read_text())["tables"]
    return [each["rows"] for each in tables]


def test_a_loss_table_beside_the_model_gives_expected_losses(
    model: Path, domains: Path, tmp_path: Path
) -> None:
    own = tmp_path / "model.gguf"
    shutil.copyfile(model, own)
    with ExpertModel.open(own) as opened:
        losses.save(losses.default_path(own), opened, table(opened.n_layers, opened.n_expert))
    more = ("--near-bits", "2", "--hot-experts", "2", "--prior-tokens", "0")
    expected, judged = run("near-bits", own, domains, tmp_path / "out", *more)
    names = {row["domain"] for row in judged}
    assert len(expected) == len(names) * len(FORMS)
    assert {row["bits"] for row in expected} == {2.0} and {row["hot"] for row in expected} == {2}
    for row in expected:
        # Two bits for all near experts leave nothing to choose.
        assert 0 < row["loss"] == pytest.approx(row["uniform"])
    rows = {(row["domain"], row["configuration"]): row for row in judged}
    for name in names:
        # Without a prior, and with nothing to choose, all that are placed by the prompt are alike.
        kls = [rows[name, form]["kl"] for form in (UNIFORM, PAPER, OURS)]
        assert kls[0] == kls[1] == kls[2] and kls[0][0] > 0
        assert rows[name, "all in q8_0"]["kl"][0] == pytest.approx(0, abs=1e-6)


def test_settings_are_for_the_studies_that_name_their_policy(model: Path, text: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs matplotlib: pip install -e '.[plot]'")
    options = ["eval", "-m", str(model), "--text", str(text), "--study", "depth", "--out", "o"]
    result = CliRunner().invoke(cli, [*options, "--near-bits", "3"])
    assert result.exit_code == 1
    assert "--near-bits is for context: the study depth has no use for it" in result.stderr
