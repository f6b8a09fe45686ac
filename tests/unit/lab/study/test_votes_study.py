"""The votes studies of FIRM-MoE: what is compared, by hand, and the loss of a made-up trace."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from orchestrator.cli.main import cli
from orchestrator.events import Phase
from orchestrator.lab.replay import write_trace

sys.path.append(str(Path(__file__).parents[2] / "replay"))
from traces import make_trace


def test_the_loss_of_a_trace(library, tmp_path: Path) -> None:
    """Layer 2 is predicted rightly by the layer before and wrongly by the one before that: one
    layer is the best vote, which tuning finds."""
    pytest.importorskip("matplotlib", reason="needs matplotlib: pip install -e '.[plot]'")
    rng = np.random.default_rng(0)
    steps, ahead = [], []
    for _ in range(40):
        chosen = [rng.permutation(8)[:2] for _ in range(3)]
        steps.append((Phase.DECODE, [each[None] for each in chosen]))
        wrong = np.array([e for e in range(8) if e not in chosen[2]])[:2]
        ahead.append([np.stack([chosen[1], wrong])[:, None], chosen[2][None, None], []])
        ahead[-1][2] = np.zeros((0, 1, 2))
    trace, out = tmp_path / "t.npz", tmp_path / "out"
    write_trace(trace, make_trace(steps, ahead))
    arguments = ["replay", str(trace), "--study", "votes-loss", "--policy", "firm"]
    done = CliRunner().invoke(cli, [*arguments, "--out", str(out)])
    assert done.exit_code == 0, done.output
    assert (out / "votes-loss.png").read_bytes()[1:4] == b"PNG"
    shown = (out / "votes-loss.md").read_text()
    assert "Off-policy: " in shown and "In-sample: " in shown
    (table,) = json.loads((out / "votes-loss.json").read_text())["tables"]
    deep = next(row for row in table["rows"] if row["group"] == "deep")
    losses = deep["losses"]
    assert losses[0][1] == 0.0 < losses[0][0] < losses[1][1]
    assert deep["all"] == [2, 1]
    refused = CliRunner().invoke(cli, arguments)
    assert refused.exit_code == 1 and "give --out DIR" in refused.stderr
    refused = CliRunner().invoke(cli, [*arguments, "--out", str(out), "--expert-ram", "64MiB"])
    assert "everything was in memory" not in refused.stderr  # each was loaded once
    refused = CliRunner().invoke(cli, ["replay", str(trace), "--out", str(out)])
    assert refused.exit_code == 2 and "give --study NAME" in refused.stderr
