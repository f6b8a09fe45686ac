"""The contract of policies, and that planning creates no policy object."""

import ast
import copy
import inspect
import re
from pathlib import Path

import pytest
from recorded_plans import model, rows
from shapes import five_tiers, make_shape, placed
from tables import cases

import orchestrator
from gguf_tools.experts import ExpertModel
from orchestrator.config import Config
from orchestrator.errors import BudgetError
from orchestrator.plan.planning import plan, planned
from orchestrator.plan.records import Machine, PlanRequest, Refusal
from orchestrator.policy import POLICIES
from orchestrator.policy.base import About, Placement, Policy
from orchestrator.runtime.load import Loader

ROOT = Path(orchestrator.__file__).parent
# Attributes that a policy inherits from its placement and its declaration.
GIVEN = {*(About.__dataclass_fields__), "placement", "shape", "settings", "rules"}
OPTIONAL = {"recall", "learned", "save_sequence", "restore_sequence"}


def members(kind):
    return {name for name in vars(kind) if not name.startswith("_")}


def test_the_contract_has_eight_members_and_four_optional_ones():
    """`Policy` has at most eight required members and four optional ones, and its docstring lists
    all of them in one table."""
    every = members(Policy) - GIVEN | {"about"}
    assert every >= OPTIONAL and len(every - OPTIONAL) <= 8, every
    listed = re.findall(r"^\s*\| (\w[\w, ]*) \|", inspect.getdoc(Policy), re.M)[1:]
    assert {each.strip() for line in listed for each in line.split(",")} == every


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_has_the_members_of_the_contract_under_their_names(name):
    """Overridden methods have the parameter names of the contract."""
    for each in members(POLICIES[name]) & (members(Policy) - GIVEN):
        own, base = (getattr(kind, each, None) for kind in (POLICIES[name], Policy))
        if callable(base):
            names = [list(inspect.signature(function).parameters) for function in (own, base)]
            assert names[0] == names[1], each


@cases(
    "forbidden",
    r"\bdeepcopy\b",
    r"is(instance|subclass)\((\w+\.)*policy, (?!Policy\)|\(str, type\)|type\))",
)
def test_policies_are_not_copied_and_no_code_checks_their_class(forbidden):
    """No code outside of studies of one policy copies policies or checks their class."""
    paths = [path for path in ROOT.rglob("*.py") if path.parent.name != "study"]
    assert [str(path) for path in paths if re.search(forbidden, path.read_text())] == []


def test_planning_does_not_use_exceptions_as_control_flow():
    """Planning returns refusals as values and raises or catches no BudgetError. Only `pack
    --for-ram` raises it."""
    places = []
    for room in ("plan", "allocation", "policy", "cost"):
        for path in sorted((ROOT / room).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                names = []
                if isinstance(node, ast.Raise):
                    names = [node.exc]
                if isinstance(node, ast.ExceptHandler):
                    names = [node.type]
                if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "suppress":
                    names = node.args
                if any("BudgetError" in ast.dump(each) for each in names if each):
                    places.append(f"{room}/{path.name}")
    assert places == ["plan/tiers_for.py"]


@pytest.mark.parametrize("name", POLICIES)
def test_a_placement_is_pure(name):
    """Equal arguments give equal placements, and the arguments do not change."""
    several = POLICIES[name].precisions.least > 1
    shape = five_tiers() if name in ("mixed", "context") else make_shape()
    if not several:
        shape = make_shape(tiers=("q4_k",))
    before = copy.deepcopy(shape)
    one, other = (placed(POLICIES[name], shape, budget=shape.all_slot_bytes()) for _ in range(2))
    assert isinstance(one, Placement) and one.slots == other.slots and one.wants == other.wants
    assert one.text == other.text and shape == before


def test_planning_creates_no_policy(monkeypatch):
    def refuse(self, placement):
        raise AssertionError("a policy was created")

    monkeypatch.setattr(Policy, "__init__", refuse)
    of = model("three")
    for row in rows(60):
        for name in POLICIES:
            config = Config.build(model=of.path, policy=name, ram=(60 + row["row"]) << 20)
            plan(PlanRequest(config), of, Machine(1 << 40))


@pytest.mark.parametrize("name", [None, "dymoe", "mixed"])
def test_loading_a_model_creates_one_policy(bindings, tiny_model, monkeypatch, name):
    """Comparing plans creates no policy."""
    path, made = tiny_model("qwen3moe", "q4_k", "q2_k"), []
    begin = Policy.__init__
    monkeypatch.setattr(
        Policy, "__init__", lambda self, placement: (made.append(self), begin(self, placement))[1]
    )
    config = Config.build(model=path, policy=name, ctx=256, threads=1, force_managed=True)
    with ExpertModel.open(path) as opened:
        loader = Loader(PlanRequest(config), opened)
        runs = loader.planner.runs(config)
        loader.planner.least(config)
        assert made == []
        loaded = loader.load(runs)
        try:
            assert made == [loaded.driver.policy]
        finally:
            loaded.close()


def test_a_refusal_names_the_limit_that_works_and_the_option():
    of = model("three")

    def asked(**settings):
        config = Config.build(model=of.path, policy="dymoe", ctx=512, **settings)
        return plan(PlanRequest(config), of, Machine(1 << 40))

    for option, settings in (("--ram", {"ram": 1 << 20}), ("--expert-ram", {"expert_ram": 1000})):
        refused = asked(**settings)
        assert isinstance(refused, Refusal) and refused.option == option
        with pytest.raises(BudgetError, match=option) as raised:
            planned(refused)
        needed = {next(iter(settings)): raised.value.needed_bytes}
        assert not isinstance(asked(**needed), Refusal)
        assert isinstance(asked(**{name: size - 1 for name, size in needed.items()}), Refusal)
