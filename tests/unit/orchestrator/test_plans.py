"""The plans for one memory size, the Pareto frontier of time and loss, and the plan that --max-loss
chooses."""

from contextlib import nullcontext
from dataclasses import dataclass, replace
from types import SimpleNamespace

import numpy as np
import pytest
from asking import request_of
from tables import cases

from gguf_tools import synthetic
from gguf_tools.experts import ExpertModel
from orchestrator.cli.pictures import draw_plans
from orchestrator.cli.plan import render
from orchestrator.config import Config
from orchestrator.cost.losses import Foreseen, foreseen
from orchestrator.cost.planner import Planner, ResolvedPlan
from orchestrator.cost.plans import (
    AS_FAST,
    LENGTHS,
    REPLACES,
    Candidate,
    Frontier,
    TakenPlans,
    choose,
    context_speeds_text,
)
from orchestrator.cost.speeds import DISTURBED
from orchestrator.errors import ConfigError
from orchestrator.events import SKIP
from orchestrator.plan.planning import plan, plan_memory
from orchestrator.plan.records import Machine, Needs, Plan, PlanRequest
from orchestrator.policy import ALLOWED_LOSS

TIERS = ("q8_0", "q4_k", "q2_k")

# Nats per use in each tier of the file, and of a skipped expert.
NATS = {0: 0.0, 1: 0.001, 2: 0.01, SKIP: 0.1}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("frontier") / "three.gguf"
    return ExpertModel.open(synthetic.write(path, "tiny-qwen3moe", tiers=TIERS))


class Nats:
    """An estimate by which each use costs the nats of its tier."""

    def of_uses(self, uses, tiers):
        return float((uses * np.vectorize(NATS.__getitem__)(tiers)).sum())


@dataclass
class Takes:
    """Predicted times by which absent bytes take ten times as long as resident ones."""

    plan: Plan
    residency = SimpleNamespace(hit_rate=1.0)

    @property
    def read_bytes(self):
        return float(self.plan.absent_bytes)

    def token_s(self, cells=0):
        plan = self.plan
        there = plan.slots.total_bytes if plan.slots else plan.expert_bytes
        return (there + 10 * plan.absent_bytes) * 1e-9

    def prompt_s(self, n_tokens, first=False):
        return n_tokens * self.token_s() * (2 if first else 1)


class Played(Planner):
    """A planner for a machine with 64 GiB, with the times of Takes and without the history of
    earlier runs."""

    def __init__(self, model, estimate, needs=Needs()):  # noqa: B008
        self.request, self._model = PlanRequest(Config.build(model=model.path), needs), model
        self.gpu, self.machine = None, Machine(1 << 36)
        self._probe = nullcontext()
        self._uses = np.full((model.n_layers, model.n_expert), model.n_expert_used / model.n_expert)
        self.losses = SimpleNamespace(
            of_file=(estimate, "" if estimate else "calibrate first"),
            foreseen=lambda plan, uses: foreseen(plan, uses, estimate, TIERS[0]),
            skip_budget=lambda plan: None,
            needed=self._needed,
            estimate=lambda names: estimate,
        )
        self._times = SimpleNamespace(
            of_plan=lambda plan, *_: Takes(plan),
            speeds=SimpleNamespace(disturbed=False),
            profiled=True,
        )

    def _needed(self, names):
        if self.losses.of_file[1]:
            raise ConfigError(self.losses.of_file[1])

    def _try(self, config, more_scratch=0):
        return plan(self._asked(config), self._model, self.machine)

    def times(self, measures=True):
        return nullcontext(self._times)


def frontier(config, model, estimate=Nats()):  # noqa: B008
    return Played(model, estimate).frontier(config)


def ask(model, share, **settings):
    """Settings with slots for this share of the best tier."""
    slots = int(
        share
        * plan_memory(
            request_of(model=model.path, policy="lru", high_tier="q8_0", expert_ram=1 << 40),
            model,
            Machine(1 << 36),
        ).slots.total_bytes
    )
    return Config.build(model=model.path, expert_ram=slots, **settings)


def test_speeds_are_shown_for_several_context_lengths(model):
    """Speeds are shown after 8k, 32k and 128k tokens, up to the length of the context."""
    assert LENGTHS == (8192, 32768, 131072)
    config, played = ask(model, 0.6), Played(model, None)
    plan, loses = played.plan(config), Foreseen(0.0, False, "q8_0")
    for n_ctx, n in ((4096, 0), (8192, 1), (40960, 2), (131072, 3)):
        runs = ResolvedPlan(played.request, replace(plan, n_ctx=n_ctx), loses)
        shown = played.candidate(played.times().enter_result, runs)
        assert list(shown.token_ms_behind) == [str(each) for each in LENGTHS[:n]]
    said = context_speeds_text(dict(zip(LENGTHS, (100, 200, 400), strict=True)))
    assert said.endswith(
        "10.0 tokens/s after 8192 tokens, 5.0 tokens/s after 32768 tokens, 2.5 tokens/s after "
        "131072 tokens."
    )
    assert context_speeds_text({}) == ""


def by_label(found):
    return {each.label: each for each in found.candidates}


@pytest.fixture(scope="module")
def found(model):
    return frontier(ask(model, 0.6), model)


def test_all_policies_and_uniform_types_are_candidates(model, found):
    """Without an allowed loss the default plan is used, even if others are faster. All policies and
    uniform types are candidates."""
    usual = plan_memory(PlanRequest(ask(model, 0.6)), model, Machine(1 << 36))
    assert usual.placement is not None and found.taken.policy == usual.placement.name
    assert found.taken.tiers == [*usual.tier_names, *(["skip"] if usual.skip else [])]
    assert found.taken.tiers == ["q8_0"] and found.taken.kl == 0.0
    assert found.why.endswith("a lossless plan, because no option allows a quality loss.")
    labels, uses = by_label(found), model.n_layers * model.n_expert_used
    assert {each.policy for each in found.candidates} >= {"lru", "dymoe", "dynaexq", "mixed"}
    for tier in ("q4_k", "q2_k"):
        uniform = labels[f"lru, high-tier {tier}"]
        assert uniform.resident and uniform.tiers == [tier]
        assert uniform.kl == pytest.approx(NATS[TIERS.index(tier)] * uses)
    lossless = labels["lru, high-tier q8_0"]
    assert not lossless.resident and lossless.kl == 0.0
    # Plans that compute the same appear once.
    assert not any(
        each.resident and len(each.tiers) == 1 and each.policy != "lru" for each in found.candidates
    )
    mixed = labels["mixed"]
    assert labels["lru, high-tier q2_k"].kl > mixed.kl > 0 and not mixed.kl_at_most
    skips = labels["dymoe, high-tier q4_k, low-tier skip"]
    # One of the six experts per token is skipped.
    assert skips.kl_at_most and skips.kl == pytest.approx(NATS[SKIP] + 5 * NATS[1])


def test_plans_on_the_frontier_are_not_dominated(found):
    candidates = found.candidates
    assert [each.token_ms for each in candidates] == sorted(each.token_ms for each in candidates)
    for each in candidates:
        beats = [
            other.token_ms <= each.token_ms
            and other.kl <= each.kl
            and (other.token_ms, other.kl) != (each.token_ms, each.kl)
            for other in candidates
        ]
        alike = [
            other.best
            for other in candidates
            if (other.token_ms, other.kl) == (each.token_ms, each.kl)
        ]
        assert any(alike) != any(beats) and sum(alike) <= 1


@pytest.mark.parametrize("allowed", [0.0, 0.004, 0.02, 1.0])
def test_a_loss_chooses_the_fastest_within_it(model, allowed):
    config = ask(model, 0.4, max_loss=allowed)
    found = frontier(config, model)
    within = [each for each in found.candidates if each.kl <= allowed]
    assert found.taken in within
    fastest = min(each.token_ms for each in within)
    assert found.taken.token_ms <= AS_FAST * fastest
    assert f"at most {allowed:g} nats per token relative to q8_0" in found.why
    runs = config.compared(**{ALLOWED_LOSS: None, **found.taken.settings})
    assert runs.policy == found.taken.policy and runs.given(ALLOWED_LOSS) != allowed
    plan = plan_memory(PlanRequest(runs), model, Machine(1 << 36))
    name = plan.placement.name if plan.placement else "plain"
    assert name == found.taken.policy
    assert [*plan.tier_names] == found.taken.tiers[: len(plan.tier_names)]
    # A policy with a loss budget gets what its best tier leaves of the allowed loss.
    spent = {
        each.tiers[0]: each.settings[ALLOWED_LOSS]
        for each in found.candidates
        if each.policy == "floor"
    }
    total = model.n_layers * model.n_expert_used
    for tier, left in spent.items():
        assert left == pytest.approx(allowed - NATS[TIERS.index(tier)] * total)
        assert left > 0


def test_a_loss_without_a_table_is_refused(model):
    """--max-loss above 0 needs a loss table. 0 does not, because lossless plans are known without
    it."""
    config = ask(model, 0.4, max_loss=0.1)
    with pytest.raises(ConfigError, match="calibrate first"):
        frontier(config, model, None)
    assert TakenPlans(PlanRequest(config), model).recall() is None
    found = frontier(ask(model, 0.4, max_loss=0.0), model, None)
    lossless = [each for each in found.candidates if each.kl == 0.0]
    assert found.taken in lossless and found.why_not == "calibrate first"
    assert {each.kl for each in found.candidates} == {0.0, None}
    assert "?" in render(found, "q8_0")


def made(name, token_ms, kl):
    return Candidate(name, {"policy": name}, ["q4_k"], 1, True, token_ms, 1.0, 1.0, 1.0, 0.0, kl)


def test_equally_fast_plans_are_ordered_by_loss():
    fast, near, far = made("a", 1.0, 0.01), made("b", 1.015, 0.002), made("c", 1.03, 0.0)
    assert choose([fast, near, far], 0.1) is near
    assert choose([fast, near, far], 0.001) is far
    unknown = made("d", 0.1, None)
    with pytest.raises(
        ConfigError, match=r"quality loss of 0.001 nats per token is too small.* 0.01"
    ):
        choose([unknown, fast], 0.001)


def test_the_previous_plan_stays_until_another_is_clearly_faster():
    """The previous plan is kept unless another is more than REPLACES times as fast. Its remaining
    loss budget may differ, because that depends on the routing."""
    fast = made("a", 1.0, 0.01)
    for name, token_ms, kl, stays in (
        ("b", 1.0 * REPLACES, 0.02, True),
        ("b", 1.01 * REPLACES, 0.02, False),
        ("b", 1.1, 0.2, False),  # its loss is now above the allowed one
        ("c", 1.1, 0.02, False),  # not the previous plan
    ):
        other = made(name, token_ms, kl)
        other = replace(other, settings={"policy": name, "high_tier": "q4_k", ALLOWED_LOSS: 0.05})
        before = {"policy": "b", "high_tier": "q4_k"}
        taken = other if stays else fast
        assert choose([fast, other], 0.1, before) is taken, (name, token_ms, kl)
    assert choose([fast], 0.1, {"policy": "gone"}) is fast


@cases(
    "asked, taken, kl",
    ({}, ("q8_0",), 0.0),
    ({"retention": 1.0}, ("q8_0",), 0.0),
    ({"retention": 0.7}, ("q8_0", "q4_k"), None),
    ({"low_tier": "q2_k"}, ("q8_0", "q2_k"), None),
    ({"low_tier": "q2_k", "retention": 1.0}, ("q8_0",), 0.0),
    ({"high_tier": "q4_k"}, ("q4_k",), None),
)
def test_lossy_plans_are_used_only_if_an_option_asks_for_them(model, asked, taken, kl):
    """A lossy plan is used only if an option asks for less precision. Lossless plans have a loss of
    0 without a loss table."""
    config = ask(model, 0.6, **asked)
    found = frontier(config, model, None)
    assert ((*found.taken.tiers,), found.taken.kl) == (taken, kl)
    assert ("lossless" in found.why) == (kl == 0.0)
    fitted = frontier(config, model).taken
    assert (fitted.kl == 0.0) == (kl == 0.0)
    for each in found.candidates:
        if each.settings.get("retention") == 1.0 and each.tiers[0] == "q8_0":
            assert each.kl == 0.0


class Skipping(Takes):
    """Times by which a policy with a loss budget takes half as long."""

    def token_s(self, cells=0):
        spends = self.plan.placement.spends is not None if self.plan.placement else False
        return super().token_s(cells) * (0.5 if spends else 1.0)


# No option of a command that holds no conversation.
COMMAND = dict[str, object]()


@cases(
    "settings, fitted, measured, says",
    ({}, True, True, "With --max-loss 0.01, decoding would be about 2.0x as fast"),
    ({}, False, True, None),
    ({}, True, False, None),
    ({"policy": "lru"}, True, True, None),
    ({"policy": "floor", "max_loss": 0.01}, True, True, None),
    ({"low_tier": "q2_k"}, True, True, None),
    (COMMAND, True, True, None),
)
def test_a_lossless_chat_notes_the_gain_of_max_loss(
    settings, fitted, measured, says, model, monkeypatch
):
    """The note appears only for a lossless chat without further options, if the loss table and the
    measured speeds are known."""

    times = SimpleNamespace(of_plan=lambda plan, *_: Skipping(plan), profiled=True)

    def taken(measures):
        assert not measures
        if not measured:
            raise OSError
        return nullcontext(times)

    played = Played(model, Nats(), Needs(conversations=settings is not COMMAND))
    played.times = taken
    played.losses.estimate = lambda _: Nats() if fitted else None
    played.compared(ask(model, 0.5, **settings))
    assert played.brings is None if says is None else says in str(played.brings)


def test_plans_as_text_and_as_a_picture(found, tmp_path):
    text = render(found, TIERS[0])
    rows = text.splitlines()
    assert sum(row.startswith("*") for row in rows) == 1
    assert "`chat` and `serve` use " + found.why in text
    assert len(rows) == len(found.candidates) + 6
    assert "0.012 nats per token with all experts in Q4_K" in text
    busy = render(replace(found, disturbed=True), TIERS[0])
    assert busy == f"{text}\n{DISTURBED}"
    pytest.importorskip("matplotlib", reason="needs matplotlib: pip install -e '.[plot]'")
    draw_plans(found, "three.gguf", tmp_path / "a.svg")
    draw_plans(found, "three.gguf", tmp_path / "b.svg")
    drawn = (tmp_path / "a.svg").read_bytes()
    assert drawn == (tmp_path / "b.svg").read_bytes() and b"mixed" in drawn


def taken_plans(model, **asked):
    return TakenPlans(request_of(model=model.path, **asked), model)


@cases(
    "asked, same",
    ({"max_loss": 0.01}, True),
    ({"max_loss": 0.01, "temp": 0.1, "max_tokens": 9}, True),
    ({"max_loss": 0.01, "prompt_cache_limit": 1 << 20}, True),
    ({"max_loss": 0.01, "conversations": True}, False),
    ({"max_loss": 0.01, "sequences": 4}, False),
    ({"max_loss": 0.01, "scored": 4}, False),
    ({"max_loss": 0.01, "extra_bytes": 1 << 20}, False),
    ({"max_loss": 0.01, "extra_token_bytes": 8}, False),
    ({"max_loss": 0.01, "cache_ram": 0}, False),
    ({"max_loss": 0.01, "logits_all": True}, False),
    ({"max_loss": 0.02}, False),
    ({"max_loss": 0.01, "ram": 1 << 30}, False),
    ({"max_loss": 0.01, "threads": 1}, False),
)
def test_a_stored_plan_belongs_to_the_settings_that_affect_it(model, asked, same):
    settings = {"policy": "floor", "high_tier": "q4_k", "max_loss": 0.008, "low_tier": None}
    taken_plans(model, max_loss=0.01).keep(settings)
    found = taken_plans(model, **asked).recall()
    kept = {"policy": "floor", "high_tier": "q4_k", "low_tier": None}
    assert found == (kept if same else None)


def test_a_damaged_stored_plan_is_ignored(model, user_folder):
    taken = taken_plans(model)
    taken.keep({"policy": "lru"})
    (path,) = (user_folder / "cache" / "moe-edge" / "plans").iterdir()
    for text in ("", "[]", '{"format": "moe-edge plans 1", "taken": 3}', "{"):
        path.write_text(text)
        assert taken.recall() is None
        taken.keep({"policy": "lru"})
        assert taken.recall() == {"policy": "lru"}


AS_ASKED = "a lossless plan, because no option allows a quality loss"


@cases(
    "dymoe_ms, lru_ms, may_switch, taken, why",
    (157.8, 156.2, True, "dymoe", f"{AS_ASKED}. The default plan dymoe is kept"),
    (150.0, 156.2, True, "dymoe", f"{AS_ASKED}."),
    (165.0, 156.2, True, "lru", "a lossless plan, predicted to be 5.6% faster than dymoe."),
    (165.0, 156.2, False, "dymoe", f"{AS_ASKED}."),
)
def test_the_marked_plan_is_the_one_that_runs(dymoe_ms, lru_ms, may_switch, taken, why):
    """The default plan runs, unless another lossless plan is more than 5 % faster and a switch is
    allowed."""
    usual, other = made("dymoe", dymoe_ms, 0.0), made("lru", lru_ms, 0.0)
    lossy = made("mixed", 1.0, 0.1)
    shown = Frontier.of([lossy, other, usual], usual, "q4_k", may_switch=may_switch)
    assert shown.taken.policy == taken and why in shown.why


@cases(
    "dymoe_takes, asked, policy",
    (1.04, {}, "dymoe"),
    (1.06, {}, "lru"),
    (1.06, COMMAND, "dymoe"),
    (1.06, {"seed": 7}, "dymoe"),
    (1.06, {"policy": "dymoe"}, "dymoe"),
    (1.06, {"n_ahead": 2}, "dymoe"),
)
def test_a_chat_runs_the_plan_that_plan_marks(model, dymoe_takes, asked, policy):
    class TakesLonger(Takes):
        def token_s(self, cells=0):
            name = self.plan.placement.name if self.plan.placement else "plain"
            return super().token_s() * (dymoe_takes if name != "lru" else 1.0)

    played = Played(model, Nats(), Needs(conversations=asked is not COMMAND))
    played._times.of_plan = lambda plan, *_: TakesLonger(plan)
    played.losses.spent = lambda names: None
    config = ask(model, 0.5, **asked)
    assert played.compared(config).plan.placement.name == policy
    assert played.frontier(config).taken.policy == policy
