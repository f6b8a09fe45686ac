"""Reading a text within a memory limit gives the same numbers, with experts read from the file."""

import re

import numpy as np
import pytest
from click.testing import CliRunner

from gguf_tools.experts import ExpertModel
from gguf_tools.file.layout import DOWN
from gguf_tools.pack import pack
from orchestrator.cli.main import cli
from orchestrator.errors import BudgetError, MoeEdgeError
from orchestrator.lab.calibrate.capture import Capture
from orchestrator.lab.observe import CalibrationBudget
from orchestrator.settings import parse_size

TEXT = "Once upon a time an owl lived in an oak, and it was never at home. " * 40
OWN = 1 << 20
WINDOWS = [[int(t) for t in row] for row in np.random.default_rng(2).integers(0, 250, (2, 96))]


def seen_in(path, budget):
    found = {}

    def keep(layer, number, seen):
        found[layer, number] = seen

    with Capture(path, threads=1, budget=budget) as capture:
        capture.read(WINDOWS, range(3), keep)
    return found


def least(path):
    """The smallest limit that works, in bytes."""
    with pytest.raises(BudgetError) as caught:
        seen_in(path, CalibrationBudget(OWN + 1, OWN))
    return caught.value.needed_bytes


def test_a_memory_limit_does_not_change_the_inputs(model):
    """The captured inputs are equal bit for bit with the smallest limit that works. The error of a
    smaller limit names it."""
    small = least(model)
    with pytest.raises(BudgetError, match="including 1 MiB for the calibration itself"):
        seen_in(model, CalibrationBudget(small - 1, OWN))
    plain, within = seen_in(model, None), seen_in(model, CalibrationBudget(small, OWN))
    assert plain.keys() == within.keys()
    for key, whole in plain.items():
        for one, other in zip(whole, within[key], strict=True):
            assert np.array_equal(one, other), key


def test_a_damaged_expert_is_named(model, tmp_path):
    path = pack(model, tmp_path / "packed.gguf", ["q8_0"], threads=1).path
    with ExpertModel.open(path) as facts:
        down = facts.slices[1][DOWN][0]
        n = facts.n_expert
    assert down is not None
    small = least(path)
    data = bytearray(path.read_bytes())
    for expert in range(n):
        data[down.offset + expert * down.expert_bytes] ^= 1
    path.write_bytes(data)
    with pytest.raises(MoeEdgeError, match=r"blk\.1\.ffn_down_exps.*damaged"):
        seen_in(path, CalibrationBudget(small, OWN))


@pytest.mark.parametrize("more", [("calibrate",), ("calibrate", "--save-imatrix", "i.gguf")])
def test_a_limit_that_is_too_small_is_refused(model, tmp_path, more):
    text = tmp_path / "t.txt"
    text.write_text(TEXT)
    command, *rest = more
    out = [*rest[:1], str(tmp_path / rest[1])] if rest else ["--out", str(tmp_path / "c.json")]
    result = CliRunner().invoke(
        cli, [command, str(model), "--calib", str(text), "--ram=20MiB", *out]
    )
    assert result.exit_code == 1
    assert (
        result.stderr.strip()
        .splitlines()[-1]
        .startswith("Error: --ram 20 MiB is too small. The minimum is ")
    )
    assert [path.name for path in tmp_path.iterdir()] == ["t.txt"]


def test_a_limit_without_a_text_is_refused(model, tmp_path):
    result = CliRunner().invoke(
        cli, ["pack", str(model), str(tmp_path / "p.gguf"), "--tiers=q4_k", "--ram=1GiB"]
    )
    assert result.exit_code == 2
    assert "--ram has no effect without a calibration text: give --calib TEXT" in result.stderr


@pytest.mark.parametrize("command", ["calibrate", "gptq"])
def test_the_minimum_that_a_refusal_names_works(model, tmp_path, command):
    """The minimum works although with more memory several experts would be handled at once."""
    text = tmp_path / "t.txt"
    text.write_text(TEXT)
    if command == "gptq":
        pytest.importorskip("torch")
        args = ["pack", str(model), str(tmp_path / "p.gguf"), "--tiers=q4_k", "--method=gptq"]
    else:
        args = ["calibrate", str(model), "--types=q2_k", "--out", str(tmp_path / "c.json")]
    args += ["--calib", str(text), "--calib-tokens=512", "--threads=3"]
    named = ["1 B"]
    # A process that refused keeps a little memory, so the next refusal may name a little more.
    for _ in range(4):
        done = CliRunner().invoke(cli, [*args, f"--ram={named[-1]}"])
        if done.exit_code == 0:
            break
        named += re.findall(r"The minimum is ([\d.]+ \w+)", done.stderr)
    assert done.exit_code == 0, done.stderr
    assert parse_size(named[-1]) < 1.05 * parse_size(named[1])
