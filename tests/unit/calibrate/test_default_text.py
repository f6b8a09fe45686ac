"""`moe-edge calibrate` without further options: its text, its table, and the offer of chat."""

from types import SimpleNamespace

import click
import pytest
from click.testing import CliRunner
from tables import cases

from gguf_tools.experts import ExpertModel
from gguf_tools.pack import pack
from orchestrator.cli import chat
from orchestrator.cli.main import cli
from orchestrator.config import Config
from orchestrator.cost.losses import LossModel
from orchestrator.errors import ConfigError, NoLossTableError
from orchestrator.lab.calibrate import table as tables
from orchestrator.lab.calibrate.default import KINDS, default_calibration


def letters(text):
    """A tokenizer whose texts begin with the token 1."""
    return [1, *map(ord, text)]


def test_windows_of_the_kinds_alternate():
    found = default_calibration(letters, 3000, 256)
    assert len(found.windows) == 3000 // 256
    assert {len(each) for each in found.windows} == {256} and {w[0] for w in found.windows} == {1}
    beginnings = ["".join(map(chr, each[1:])) for each in found.windows[: len(KINDS)]]
    assert len(set(beginnings)) == len(KINDS) and "Halvorsund" in beginnings[0]
    every = default_calibration(letters, 1 << 20, 256)
    assert len(every.windows) > 90 and every.sha256 == found.sha256
    with pytest.raises(ConfigError, match="--calib-tokens 200 is too few"):
        default_calibration(letters, 200, 256)


def test_a_table_is_made_without_options(model, ggml, tmp_path):
    """The table is at the place that --max-loss reads."""
    packed = pack(model, tmp_path / "m.gguf", ["q8_0", "q2_k"], ggml=ggml).path
    result = CliRunner().invoke(cli, ["calibrate", "-m", str(packed), "--calib-tokens", "512"])
    assert result.exit_code == 0, result.output
    assert "Calibrating takes about " in result.stderr
    assert "m.gguf.calib.json: the default text, 512 tokens, sha256 " in result.stdout
    with ExpertModel.open(packed) as facts:
        assert LossModel(Config.build(model=packed), facts).needed(["q8_0", "q2_k"]).base == "q8_0"
    refused = CliRunner().invoke(cli, ["calibrate", str(packed), "--save-imatrix", "i.gguf"])
    assert refused.exit_code == 2 and "give --calib TEXT" in refused.stderr


@cases("answer, runs", ("", True), ("Y", True), ("yes ", True), ("n", False), (None, False))
def test_chat_offers_to_make_the_table(answer, runs, monkeypatch):
    made, said = [], []
    monkeypatch.setattr("orchestrator.cli.measure.make_table", lambda *args: made.append(args))
    console = SimpleNamespace(note=said.append, ask=lambda _: answer)
    config = Config.build(model="m.gguf", ram=5 << 30, threads=3)
    with click.Context(chat.chat):
        try:
            chat.offer_table(NoLossTableError("run it (about 9 s, once)"), config, console)
        except click.exceptions.Exit as left:
            assert left.exit_code == 1
    assert said == ["run it (about 9 s, once)."]
    assert [(file, method.ram, method.threads) for _, method, file in made] == [
        (config.model, 5 << 30, 3)
    ] * runs


def test_progress_goes_on_between_reports(monkeypatch):
    """A part takes as long as foreseen, and is complete only when it says so."""
    now = [0.0]
    monkeypatch.setattr(tables, "monotonic", lambda: now[0])
    parts = tables.Parts({"a": 10.0, "b": 30.0})
    assert (parts.total_s, parts.share()) == (40.0, 0.0)
    report = parts.begin("a")
    shares = []
    for now[0], said in ((5.0, None), (20.0, None), (21.0, 1.0)):
        if said is not None:
            report(said)
        shares.append(parts.share())
    parts.begin("b")
    now[0] = 36.0
    assert [*shares, parts.share()] == pytest.approx([0.125, 0.2375, 0.25, 0.625])
