"""What a resident plan over all tiers wins over one type for all experts in the same memory, and
how much of the bound that is: the exact one, which a plan reaches that knows beforehand how the
judged text uses the experts, and can divide one."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial

import numpy as np

from gguf_tools.experts import ExpertModel
from gguf_tools.units import format_size
from orchestrator.allocation.hull import Hull
from orchestrator.allocation.slots import ModelShape
from orchestrator.cost import losses
from orchestrator.lab.eval import arithmetic
from orchestrator.lab.eval.arithmetic import Estimate, pair
from orchestrator.lab.eval.report import share_with_error
from orchestrator.lab.study.figures import LABEL, SLOTS, four_digits, share
from orchestrator.lab.study.plot import Panel
from orchestrator.lab.study.study import (
    UNIFORM,
    Case,
    Findings,
    HalvedStudy,
    Scored,
    Scores,
    lines,
    uniform_cases,
)
from orchestrator.lab.study.subject import (
    ALL,
    Part,
    Subject,
    Uses,
    first_uses,
    parts_of,
)
from orchestrator.lab.table import Column, Table
from orchestrator.memory.footprint import model_shape
from orchestrator.policy.mixed import nominal, slot_sizes

PLANS = "plans"


class AllocationStudy(HalvedStudy):
    """Resident plans against uniform types of the same bytes, and the bound. Each domain's first
    half says how its experts are used, and its second half is judged."""

    name = "allocation"
    rivals = True
    policies = ("mixed",)

    def n_before(self, on: Subject) -> int:
        """Uses of the first halves and of the second ones."""
        return 2 * len(parts_of(on))

    def cases(self, on: Subject) -> list[Case]:
        shape, parts = _shape(on), parts_of(on)
        known = first_uses(on, parts, on.best)
        tiers = range(1, len(shape.tiers) - 1)
        return [
            *uniform_cases(on, on.tiers),
            *(
                _plan(part, shape.all_slot_bytes(tier), known[part], tier)
                for part in parts
                for tier in tiers
            ),
        ]

    def show(self, found: Scores, on: Subject) -> Findings:
        scored, shape = found.on, _shape(on)
        table_of, source = _losses(on, shape)
        alone = found.by_size()
        judged = cache(lambda part: on.uses(part.second, on.best))
        rows = []
        for case, score in found.of(PLANS):
            assert case.part is not None and score.resident is not None
            rival, theirs = _rival(alone, case)
            gain = arithmetic.share(theirs - score.kl, theirs)
            possible = _possible(judged(case.part)[..., None] * table_of, shape, case)
            rows.append(
                {
                    "domain": case.part.name,
                    "tokens": len(case.part.places),
                    "slots": case.row["slots"],
                    "plan_bytes": score.slot_bytes,
                    "uniform": rival,
                    "uniform_kl": pair(arithmetic.mean(theirs)),
                    "kl": pair(score.mean_kl),
                    "gain": pair(gain),
                    "possible": possible,
                    "reached": _of(possible, gain),
                    "experts": {
                        name: int((score.resident == at).sum())
                        for at, name in enumerate(shape.tiers)
                    },
                }
            )
        kl = Column(f"KL from {on.best}", "kl", four_digits)
        note = (
            f"The plan: every expert in memory, each in a tier of the file, started with what the "
            f"first half of the text was routed to, and not changed after that, so that nothing is "
            f"held in reserve. At most: the exact bound by losses ({source}), which a plan reaches "
            f"that knows beforehand how the judged text uses the experts, and can divide one. The "
            f"rival is the uniform type with the least KL of those that fit."
        )
        columns = (
            Column("text", "domain", left=True),
            SLOTS,
            Column("best uniform type", "uniform", left=True),
            Column(f"its KL from {on.best}", "uniform_kl", four_digits),
            replace(kl, name="KL of the plan"),
            Column("less by the plan", "gain", share_with_error),
            Column("at most", "possible", share),
            Column("of that", "reached", partial(share_with_error, digits=0)),
            Column("experts", "experts", _counts, left=True),
        )
        whole = [each for each in found.of(PLANS) if each[0].part and each[0].part.name == ALL]
        drawn = lines(
            [*alone, *whole],
            lambda case, _: case.row["slots"] / (1 << 20),
            lambda _, score: score.mean_kl,
            lambda case: UNIFORM if case.group == UNIFORM else "resident plan",
        )
        x, y = "slots of the experts, MiB", f"KL from {on.best}, nats"
        uniform = found.rows(alone, found.tier(on.best))
        return Findings(
            [
                Table(f"Uniform types: {scored.basis}", (LABEL, SLOTS, kl), uniform),
                Table(f"Resident plans: {scored.basis}", columns, rows, [note]),
            ],
            [Panel(x, y, drawn, scored.basis, scale="log")],
        )


def _plan(part: Part, n_bytes: int, used: Uses, tier: int) -> Case:
    """The plan of one text in the slots that every expert in one tier takes."""
    settings = {
        "policy": "mixed",
        "high_tier": None,
        "low_tier": None,
        "ram": None,
        "expert_ram": n_bytes,
        "update_steps": 0,
    }
    label = f"plan in {format_size(n_bytes)}"
    return Case(label, settings, PLANS, {"slots": n_bytes, "of": tier}, part, used)


def _rival(alone: list[Scored], plan: Case) -> tuple[str, np.ndarray]:
    """(label, KL of each token) of the uniform type with the least KL of those that fit."""
    assert plan.part is not None
    places = plan.part.places
    fits = {
        case.label: score.kl[places]
        for case, score in alone
        if case.row["slots"] <= plan.row["slots"]
    }
    return min(fits.items(), key=lambda each: float(each[1].mean()))


def _possible(weighted: np.ndarray, shape: ModelShape, plan: Case) -> float:
    """The share of the sum of use times loss of all experts in the type of these slots that can be
    won at most. weighted [n_layers, n_expert, n_tiers]."""
    alone = float(weighted[..., plan.row["of"]].sum())
    return 1 - Hull(weighted, slot_sizes(shape)).bound(plan.row["slots"]) / alone


def _of(possible: float, gain: Estimate) -> list[float | None] | None:
    """A gain and its standard error as parts of what is possible: a short text tells less of small
    gains than they are. None where nothing is possible."""
    if possible <= 0:
        return None
    return pair(Estimate(gain.value / possible, gain.error / possible))


def _counts(experts: dict[str, int]) -> str:
    return ", ".join(f"{n} {name}" for name, n in experts.items() if n)


def _shape(on: Subject) -> ModelShape:
    with on.model() as model:
        return model_shape(model, tuple(range(len(model.tiers))))


def _losses(on: Subject, shape: ModelShape) -> tuple[np.ndarray, str]:
    """Losses as the policy has them, and where they are from."""
    path = on.config.given("losses") or losses.default_path(on.config.model)
    if path.exists():
        with ExpertModel.open(on.config.model) as model:
            table = losses.load(path, model)
        known = table.per_use(shape.tiers)
        if known is not None:
            return known, f"{path.name}, {table.calibration}"
    return nominal(shape), "nominal"
