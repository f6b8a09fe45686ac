"""`moe-edge plan`, and runtimes that follow the plan that `--max-loss` chooses."""

import json
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from gguf_tools.experts import ExpertModel
from orchestrator.chat.console import Console
from orchestrator.cli import machine
from orchestrator.cli.main import cli
from orchestrator.cli.options import open_runtime
from orchestrator.config import Config
from orchestrator.cost import losses, planner
from orchestrator.cost.disk import Bandwidth
from orchestrator.cost.planner import Planner
from orchestrator.errors import ConfigError
from orchestrator.plan.records import Plan, PlanRequest
from orchestrator.runtime.load import Loader
from orchestrator.runtime.runtime import Runtime

from .conftest import save_losses

MIB = 1 << 20
LITTLE = ("--expert-ram", "2MiB")


@dataclass
class PlanTimes:
    """Predicted times of a plan, in proportion to its bytes.

    A token takes 1 ns per resident byte and `slower` ns per absent byte.
    """

    plan: Plan
    slower: float = 10.0
    residency = SimpleNamespace(hit_rate=1.0)
    read_bytes: float = 0.0

    def token_s(self, cells=0):
        plan = self.plan
        there = plan.slots.total_bytes if plan.slots else plan.expert_bytes
        return (there + self.slower * plan.absent_bytes) * 1e-9

    def prompt_s(self, n_tokens, first=False):
        return n_tokens * self.token_s()


class Predicts:
    """Replacement of cost.time.TimeModel, which would measure this machine."""

    speeds, profiled = SimpleNamespace(disturbed=True), False

    def __init__(self, model, disk, *_):
        assert disk.bytes_per_s == pytest.approx(1e9)

    def of_plan(self, plan, config, skips, uses=None):
        """Skips halve the cost of absent bytes. A usage history halves it too."""
        return PlanTimes(plan, (5.0 if skips else 10.0) / (1 if uses is None else 2))


LOOKUP = "token_embd.weight (85 KiB)"


@pytest.fixture
def model(three, monkeypatch):
    monkeypatch.setattr(planner, "TimeModel", Predicts)
    for module in (planner, machine):
        monkeypatch.setattr(module, "kept_bandwidth", lambda *_, **__: Bandwidth(1e9))
    return three


def run(model, *args):
    return CliRunner().invoke(cli, ["plan", "-m", str(model), "--device", "cpu", *args])


def candidates(model, *args):
    shown = json.loads(run(model, *args, "--json").stdout)
    return shown


def build(model, **asked):
    return Config.build(model=model, expert_ram=2 * MIB, device="cpu", **asked)


def test_the_frontier_is_printed_and_drawn(model, tmp_path, monkeypatch):
    """Without `--max-loss`, `plan` shows what a chat would run.

    Without a loss table, only lossless plans have a known KL.
    """
    monkeypatch.setattr(ExpertModel, "lookup_text", "rows (4 GiB)")
    shown = run(model, *LITTLE)
    assert shown.exit_code == 0, shown.output
    assert "These tensors stay on disk, except with --policy plain: rows (4 GiB)" in shown.stderr
    assert "`chat` and `serve` use dymoe" in shown.stdout
    assert "quality loss (KL) is unknown" in shown.stderr and "calibrate" in shown.stderr
    assert "Other programs used the processor" in shown.stdout
    found = candidates(model, *LITTLE)
    assert found["disturbed"] is True
    ranges = {each["policy"]: each["token_ms_skewed"] for each in found["candidates"]}
    assert ranges["lru"] is not None and ranges["dynaexq"] is None  # dynaexq: all resident
    assert "This model has no usage history on this machine" in shown.stdout
    monkeypatch.setattr(Predicts, "profiled", True)
    assert "no usage history" not in run(model, *LITTLE).stdout
    names = {each["policy"] for each in found["candidates"]}
    assert names == {"lru", "dymoe", "dynaexq", "firm", "mixed"}
    more = candidates(model, "--expert-ram", "3MiB")["candidates"]
    assert {each["policy"] for each in more} == names | {"context"}
    taken = found["candidates"][found["taken"]]
    with Runtime.open(build(model)) as runtime, runtime.evaluator() as e:
        assert taken["policy"] == e.inside.policy.name
        assert tuple(taken["tiers"]) == e.plan.tier_names
    assert {each["kl"] for each in found["candidates"]} == {None, 0.0}
    pytest.importorskip("matplotlib", reason="needs matplotlib: pip install -e '.[plot]'")
    assert run(model, *LITTLE, "--plot", str(tmp_path / "plans.svg")).exit_code == 0
    assert b"predicted ms per token" in (tmp_path / "plans.svg").read_bytes()


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--policy", "lru", "--retention", "0.5"), "no effect with --policy lru"),
        (("--ram", "1MiB"), "too little"),
        (("--plot", "plans.txt"), "must end in .png or .svg"),
    ],
)
def test_refusals(model, args, said):
    refused = run(model, *args)
    assert refused.exit_code == 1 and said in refused.stderr


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"policy": "lru", "retention": 0.5}, "--retention has no effect with --policy lru"),
        ({"policy": "lru", "low_tier": "q2_k"}, "--low-tier has no effect with --policy lru"),
        ({"losses": Path("t.json")}, "--losses is for --policy context or floor or mixed"),
    ],
)
def test_plan_and_chat_refuse_the_same(model, asked, said):
    """`plan` notes the settings with which a chat would be refused."""
    config = build(model, **asked)
    with pytest.raises(ConfigError, match=said):
        Runtime.open(config)
    assert said in machine.examine(PlanRequest(config))[0]["plan_note"]


def test_settings_of_another_policy_are_ignored(model):
    """Settings of one policy do not exclude others from the table or from a later change of policy.

    With `--policy`, only the named policy is in the table.
    """
    config = build(model, retention=0.5, low_tier="q2_k")
    found, _ = machine.examine(PlanRequest(config))
    assert {"dymoe", "lru", "firm"} <= {each["policy"] for each in found["candidates"]}
    alone = candidates(model, *LITTLE, "--policy", "lru")
    assert [each["policy"] for each in alone["candidates"]] == ["lru"]
    assert "chosen by --policy" in alone["why"]
    with Runtime.open(config) as runtime:
        runtime.set(policy="lru")
        assert (runtime.inside.policy.name, runtime.config.given("retention")) == ("lru", 0.5)


@pytest.fixture
def fitted(model):
    """A model with a loss table.

    One use of an expert loses 0, 0.001 and 0.01 nats in the file's tiers, and 0.1 nats if skipped.
    """
    path = losses.default_path(model)
    save_losses(path, model, [0.0, 0.001, 0.01], power=0.1, gates=1.0, fit=(1.0, ("q8_0",)))
    yield model
    path.unlink(missing_ok=True)


@pytest.mark.parametrize("table", [True, False])
@pytest.mark.parametrize(
    ("asked", "tiers", "said"),
    [
        ({}, ("q8_0",), ""),
        ({"policy": "dymoe"}, ("q8_0",), ""),
        ({"retention": 1.0}, ("q8_0",), ""),
        ({"low_tier": "q2_k"}, ("q8_0", "q2_k"), "0.01"),
        ({"high_tier": "q4_k"}, ("q4_k",), "0.006"),
        ({"policy": "dynaexq"}, ("q4_k", "q2_k"), "0.0"),
    ],
)
def test_runtime_status_line_and_plan_agree(fitted, asked, tiers, said, table):
    """The evaluator, the status line and `plan` agree on tiers and quality loss."""
    if not table:
        losses.default_path(fitted).unlink()
    config = build(fitted, **asked)
    with Runtime.open(config) as runtime, runtime.evaluator() as e:
        assert e.plan.tier_names == tiers
        mode = runtime.mode
    health, _ = machine.examine(PlanRequest(config))
    with ExpertModel.open(fitted) as model:
        runs = Planner(PlanRequest(config), model).runs(config)
        if config.policy is None:
            found = Planner(PlanRequest(config), model).frontier(config)
            assert ((*found.taken.tiers,), found.taken.kl) == (tiers, runs.loses.kl)
    assert runs.plan.tier_names == tiers and health["kl"] == runs.loses.kl
    for line in (mode, health["plan"]):
        if not said:
            assert runs.loses.kl == 0.0 and "nats" not in line and "no table" not in line
        elif table:
            assert (
                f", estimated quality loss {said}" in line
                and "nats per token relative to q8_0" in line
            )
        else:
            assert "quality loss of answers relative to q8_0 unknown" in line


def test_max_loss_chooses_the_plan(fitted):
    """`max_loss` chooses the fastest plan within the loss, and the note gives the reason.

    A token uses six experts: 0.006 nats in q4_k, 0.06 nats in q2_k. Between them, a resident plan
    runs.
    """
    ran = {}
    for allowed in (0.0, 0.05, 1.0):
        with Runtime.open(build(fitted, max_loss=allowed)) as runtime, runtime.evaluator() as e:
            ran[allowed] = e.inside.policy.name, e.plan.tier_names
            assert f"at most {allowed:g} nats per token relative to q8_0" in str(runtime.note)
    assert ran[0.0][1][0] == "q8_0" and ran[0.0][0] in ("lru", "dymoe")
    assert ran[0.05] in ((name, ("q4_k", "q2_k")) for name in ("mixed", "dynaexq"))
    assert ran[1.0] == ("lru", ("q2_k",))
    shown = run(fitted, *LITTLE, "--max-loss", "0.05")
    assert shown.exit_code == 0 and f"use {ran[0.05][0]} (" in shown.stdout
    assert shown.stderr.splitlines() == [
        f"These tensors stay on disk, except with --policy plain: {LOOKUP}"
    ]
    assert sum(line.startswith("*") for line in shown.stdout.splitlines()) == 1
    found = candidates(fitted, *LITTLE, "--max-loss", "0.05")["candidates"]
    floor = next(each for each in found if each["policy"] == "floor")
    high = floor["settings"]["high_tier"]
    lossless = next(
        each for each in found if each["policy"] == "lru" and each["settings"]["high_tier"] == high
    )
    assert floor["token_ms"] < 0.8 * lossless["token_ms"]
    assert floor["kl"] == 0.05 and floor["settings"]["max_loss"] <= 0.05


def test_a_named_table_chooses_a_plan(fitted, tmp_path):
    """Without the default loss table, `plan` and a chat use the one of `--losses`."""
    named = losses.default_path(fitted).rename(tmp_path / "named.json")
    for more in ((), ("--max-loss", "0.05")):
        shown = run(fitted, *LITTLE, "--losses", str(named), *more)
        assert shown.exit_code == 0
        assert shown.stderr.splitlines() == [
            f"These tensors stay on disk, except with --policy plain: {LOOKUP}"
        ]
    with Runtime.open(build(fitted, losses=named, max_loss=0.05)) as runtime:
        assert "estimated quality loss" in runtime.mode


def test_the_predicted_loss_is_that_of_the_start(fitted, monkeypatch):
    """The predicted loss of a resident policy is computed once, at the start.

    It is not computed again for the status line, or when a change to another policy fails and the
    old one returns.
    """
    load = Loader._load

    def fails(loader, runs, progress):
        if runs.plan.placement is not None and runs.plan.placement.name == "lru":
            raise MemoryError
        return load(loader, runs, progress)

    with Runtime.open(build(fitted, policy="dynaexq")) as runtime:
        mode = runtime.mode
        assert "estimated quality loss" in mode
        loses = Planner.loses
        monkeypatch.setattr(Loader, "_load", fails)
        monkeypatch.setattr(
            Planner,
            "loses",
            lambda self, plan: None if plan.placement.wants.all_resident else loses(self, plan),
        )
        with pytest.raises(MemoryError):
            runtime.set(policy="lru")
        assert (runtime.mode, runtime.config.policy) == (mode, "dynaexq")


def test_measurements_are_announced_first(model, fitted, monkeypatch):
    """Each measurement of this machine is announced before it starts.

    `plan` measures, and so does a runtime with `max_loss`.
    """
    said = []

    def measures(*_):
        assert said
        raise ConfigError("measured")

    monkeypatch.setattr(Planner, "times", measures)
    monkeypatch.setattr(Console, "bar", lambda _console, label, share, *_: said.append(label))
    assert "measured" in run(model).stderr
    assert said == [f"Measuring {what}" for what in ("the disk", "the memory", "this machine")]
    said.clear()
    with pytest.raises(ConfigError, match="measured"):
        open_runtime(build(fitted, max_loss=0.1), Console())
    assert said == ["Measuring this machine"]


def test_a_slow_disk_is_reported_when_a_runtime_opens(model, monkeypatch, capsys):
    """The disk is measured once, before the model fills the memory."""
    said, loads = "The model is on a USB disk.", Loader.load
    asked = []
    monkeypatch.setattr(planner, "slow_disk", lambda *_: asked.append(_) or said)
    monkeypatch.setattr(Loader, "load", lambda *args: asked and loads(*args))
    open_runtime(build(model), Console()).close()
    assert said in capsys.readouterr().err and len(asked) == 1
