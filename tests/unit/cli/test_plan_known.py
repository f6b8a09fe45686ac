"""`moe-edge plan` without a model: the table of known models, and how it is cached."""

import json
from dataclasses import replace
from functools import partial

import pytest
from command_line import run
from simulated_machine import simulate
from tables import cases

from gguf_tools.known import known_models
from orchestrator.cost.known import Known, Row
from orchestrator.cost.outlook import FITS, NO_ROOM, NOT, STREAMS, WELL


@pytest.fixture
def machine(monkeypatch, tmp_path):
    return simulate(monkeypatch, tmp_path)


plan = partial(run, "plan")


def plan_as_json(ram):
    result = plan("--ram", ram, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_known_models_are_listed_and_kept(machine):
    """Models that run well come first, larger ones first. Models that are too slow follow. The
    second run measures nothing, and another --ram gives another table."""
    first = plan("--ram", "12GiB")
    assert first.exit_code == 0, first.output
    assert "Qwen3-Next-80B-A3B" in first.stdout and "2.00 GB/s" in first.stdout
    assert all(len(line) <= 100 for line in first.stdout.splitlines())
    assert "disk" in machine and "processor" in machine
    machine.clear()
    again = plan("--ram", "12GiB")
    assert again.stdout.splitlines()[1:] == first.stdout.splitlines()[1:] and not machine
    small = plan_as_json("1GiB")
    assert "processor" not in machine
    found = plan_as_json("12GiB")
    assert len(found["best"]) == len(known_models())
    assert len(found["rows"]) == sum(len(each.precisions) for each in known_models())
    runs = {(row["model"], row["precision"]): row for row in found["rows"]}
    large, fits = runs["Kimi-K2", "Q8_0"], runs["OLMoE-1B-7B", "Q8_0"]
    assert large["runs"] in (STREAMS, NOT) and fits["runs"] == FITS
    assert fits["tokens_s"] > fits["tokens_s_long"] if fits["tokens_s_long"] else True
    assert fits["tokens_s"] > (large["tokens_s"] or 0.0)
    for row in found["rows"]:
        assert (row["tokens_s_skewed"] or 1.0) >= 0.999 * (row["tokens_s"] or 0.0), row
    assert fits["tokens_s_skewed"] == fits["tokens_s"]
    assert any((row["tokens_s_skewed"] or 0) > (row["tokens_s"] or 1) for row in found["rows"])
    assert {row["runs"] for row in small["rows"]} >= {NOT}


def test_the_order_of_the_table():
    row = Row(
        model="a",
        precision="Q8_0",
        total_b=10.0,
        active_b=1.0,
        disk_bytes=100,
        runs=FITS,
        ram_bytes=50,
        tokens_s=20.0,
    )
    rows = (
        row,
        replace(row, precision="Q2_K", disk_bytes=30, tokens_s=40.0),
        replace(row, model="larger", total_b=80.0, runs=STREAMS, tokens_s=WELL),
        replace(row, model="slow", tokens_s=1.0),
        replace(row, model="slow", precision="Q2_K", disk_bytes=30, tokens_s=2.0),
        replace(row, model="huge", total_b=1000.0, disk_bytes=10**6),
        replace(row, model="never", total_b=900.0, runs=NOT, tokens_s=None),
    )
    known = Known(rows, 60, 1000, 1e9, 2, "cpu", 512, "")
    assert " ".join(each.model for each in known.best()) == "larger a slow never huge"
    assert [each.precision for each in known.best()] == ["Q8_0", "Q8_0", "Q2_K", "Q8_0", "Q8_0"]
    assert known.runs(rows[5]) == NO_ROOM


@cases(
    "args, said",
    (["--low-tier", "skip"], "--low-tier needs a model"),
    (["--max-loss", "0.1"], "--max-loss needs a model"),
    (["--vram", "1GiB"], "covers only the CPU"),
    (["--plot", "x.png"], "--plot draws the plans of one model"),
    (["x.gguf", "-m", "y.gguf"], "the model is given twice"),
)
def test_options_that_need_a_model_are_refused(args, said, machine):
    result = plan(*args)
    assert result.exit_code != 0 and said in result.stderr and not machine
