"""What a resident plan over all tiers wins over one type for all experts in the same memory, and
what the unevenness of use times loss allows at most."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from gguf_tools.experts import ExpertModel
from gguf_tools.units import format_size
from orchestrator.allocation.hull import Hull, lost
from orchestrator.allocation.slots import ModelShape
from orchestrator.cache import profile
from orchestrator.cost import losses
from orchestrator.lab.eval import arithmetic
from orchestrator.lab.eval.arithmetic import Estimate, pair
from orchestrator.lab.eval.compare import Reference, ReferencePart
from orchestrator.lab.eval.report import share_with_error, with_error
from orchestrator.lab.eval.text import Window
from orchestrator.lab.study import plot
from orchestrator.lab.study.figures import distances
from orchestrator.lab.study.policies import Counts
from orchestrator.lab.study.residency import halves
from orchestrator.lab.study.study import Study
from orchestrator.lab.study.subject import Score, Subject
from orchestrator.lab.study.uniform import tiers_of
from orchestrator.lab.table import Column, Row, Table, percent
from orchestrator.memory.footprint import model_shape
from orchestrator.policy.mixed import nominal, slot_sizes

EVERYTHING = "all"


def unevenness(weights: np.ndarray) -> float:
    """The arithmetic over the geometric mean of w L in one tier, over the experts that are used: by
    so much less would an allocation lose than the same bits for all, were bits divisible and each
    one more to divide every loss by the same."""
    used = weights[weights > 0]
    return float(used.mean() / np.exp(np.log(used).mean())) if used.size else 1.0


@dataclass(frozen=True, slots=True)
class Uniform:
    """Every expert in one type: its slots, and KL of each token that is scored."""

    label: str
    slot_bytes: int
    kl: np.ndarray


@dataclass(frozen=True, slots=True)
class Part:
    """A text that is judged, with a plan of its own: places int [n] of its tokens among all that
    are scored; before and uses, float64 [n_layers, n_expert], the share of tokens that uses each
    expert in what the plan knows, and in what is judged."""

    name: str
    subject: Subject
    places: np.ndarray
    before: np.ndarray
    uses: np.ndarray


@dataclass(slots=True)
class Found:
    """What came of all. losses_from: the table, None where losses are nominal."""

    subject: Subject
    losses_from: str | None
    uniform: list[Uniform] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)


class AllocationStudy(Study[Found]):
    """Resident plans against uniform types of the same bytes, and the bound."""

    name = "allocation"
    rivals = True
    policies = ("mixed",)

    def n_passes(self, on: Subject) -> int:
        """Those of a domain are shorter than those of all of the text."""
        n_domains = len({window.domain for window in on.windows})
        n_parts = 1 + (n_domains if n_domains > 1 else 0)
        n_files = on.uniform_types.n_files
        # A plan of all of the text for each file, which comes to nothing where the sizes do not do.
        return 1 + len(on.tiers) + 2 * n_files + n_parts * (2 + len(on.tiers[1:-1]))

    def measure(self, on: Subject) -> Found:
        """Each domain's first half says how its experts are used, and its second half is judged."""
        first, second = halves(on.windows)
        scored = on.on(second)
        with ExpertModel.open(on.config.model, on.config.low) as model:
            shape = model_shape(model, tuple(range(len(model.tiers))))
        of_losses, source = _losses(on, shape)
        found = Found(scored, source)
        parts = list(_parts(on, first, second))
        with scored.reference() as reference:
            found.uniform = sorted(_uniform(scored, shape, reference), key=lambda at: at.slot_bytes)
            sizes = [shape.all_slot_bytes(tier) for tier in range(len(shape.tiers))]
            for part in parts:
                for tier, n_bytes in enumerate(sizes[:-1]):
                    if tier:
                        found.rows.append(
                            _row(found, part, n_bytes, tier, reference, shape, of_losses)
                        )
            others = {each.slot_bytes for each in found.uniform} - set(sizes)
            found.rows += [
                _row(found, parts[0], n_bytes, None, reference, shape, of_losses)
                for n_bytes in sorted(others, reverse=True)
                if sizes[-1] <= n_bytes <= sizes[0]
            ]
        return found

    def tables(self, found: Found) -> list[Table]:
        best = found.subject.tiers[0]
        with_kl = Column(f"KL from {best}", "kl", lambda each: with_error(each, digits=4))
        columns = (
            Column("text", "domain", left=True),
            Column("slots", "bytes", format_size),
            Column("best uniform type", "uniform", left=True),
            Column(f"its KL from {best}", "uniform_kl", lambda each: with_error(each, digits=4)),
            replace(with_kl, name="KL of the plan"),
            Column("less by the plan", "gain", share_with_error),
            Column("expected", "expected", percent(1, " %")),
            Column("at most", "possible", percent(1, " %")),
            Column("of that", "reached", lambda each: share_with_error(each, digits=0)),
            Column("by unevenness", "uneven", percent(1, " %")),
            Column("experts", "experts", _counts, left=True),
        )
        source = found.losses_from or "nominal losses"
        note = (
            f"The plan: every expert in memory, each in a tier of the file, started with what the "
            f"first half of the text was routed to, and not changed after that, so that nothing is "
            f"held in reserve. Losses: {source}. "
            f"Expected, and at most: of the sum of use times loss of all experts in the type of "
            f"these slots, as the judged text uses them; at most is the exact bound, which a plan "
            f"reaches that knows that use beforehand and can divide an expert. By unevenness: one "
            f"less the geometric over the arithmetic mean of use times loss, which bits without "
            f"steps would gain. Uniform types take slots too, and the one with the least KL of "
            f"those that fit is the rival."
        )
        uniform = [
            {
                "configuration": each.label,
                "bytes": each.slot_bytes,
                "kl": pair(arithmetic.mean(each.kl)),
            }
            for each in found.uniform
        ]
        head = Column("configuration", "configuration", left=True)
        slots = Column("slots", "bytes", format_size)
        return [
            Table(f"Uniform types: {found.subject.basis}", (head, slots, with_kl), uniform),
            Table(f"Resident plans: {found.subject.basis}", columns, found.rows, [note]),
        ]

    def draw(self, found: Found, folder: Path) -> list[Path]:
        mib = 1 << 20
        lines = {
            "uniform": [(at.slot_bytes, pair(arithmetic.mean(at.kl))) for at in found.uniform],
            "resident plan": [
                (row["bytes"], row["kl"]) for row in found.rows if row["domain"] == EVERYTHING
            ],
        }
        with plot.figure(folder, self.name) as (axis,):
            for number, (label, points) in enumerate(lines.items()):
                x = [n_bytes / mib for n_bytes, _ in points]
                y, errors = ([kl[i] or 0.0 for _, kl in points] for i in (0, 1))
                plot.line(axis, x, y, label, number, errors)
            axis.set_xlabel("slots of the experts, MiB")
            axis.set_ylabel(f"KL from {found.subject.tiers[0]}, nats")
            axis.set_yscale("log")
            axis.set_title(found.subject.basis, fontsize=9)
            axis.legend(fontsize=7)
        return plot.files(folder, self.name)


def _counts(experts: dict[str, int]) -> str:
    return ", ".join(f"{n} {name}" for name, n in experts.items() if n)


def _losses(on: Subject, shape: ModelShape) -> tuple[np.ndarray, str | None]:
    """Losses as the policy has them, and where they are from."""
    path = on.config.given("losses") or losses.default_path(on.config.model)
    if path.exists():
        with ExpertModel.open(on.config.model) as model:
            table = losses.load(path, model)
        known = table.per_use(shape.tiers)
        if known is not None:
            return known, f"{path.name} ({table.calibration})"
    return nominal(shape), None


def _parts(on: Subject, first: list[Window], second: list[Window]) -> Iterator[Part]:
    """All of the text, and each domain where there are several."""
    domains = np.repeat(
        [window.domain for window in second], [window.n_scored for window in second]
    )
    every = np.arange(len(domains))
    yield Part(EVERYTHING, on.on(second), every, _uses(on, first), _uses(on, second))
    names = dict.fromkeys(window.domain for window in second)
    for name in names if len(names) > 1 else ():
        before, mine = (
            [window for window in some if window.domain == name] for some in (first, second)
        )
        places = every[domains == name]
        yield Part(name, on.on(mine), places, _uses(on, before), _uses(on, mine))


def _uses(on: Subject, windows: Sequence[Window]) -> np.ndarray:
    """The share of these tokens that uses each expert, with every expert in the best tier."""
    settings = {**on.uniform(on.tiers[0]), "policy": "mixed", "ram": None, "expert_ram": 1 << 48}
    whole = [replace(window, prompt=False) for window in windows]
    with on.open(settings) as engine:
        counts = Counts(engine.policy)
        on.on(whole).score_open(engine, "uses", lambda own: counts)
    return counts.per_step


def _uniform(scored: Subject, shape: ModelShape, reference: Reference) -> Iterator[Uniform]:
    of_files = tiers_of(scored.config)
    for tier, name in enumerate(shape.tiers):
        score = scored.score(name, scored.uniform(name), against=reference)
        yield Uniform(of_files[name].label, shape.all_slot_bytes(tier), distances(score))
    for file, score in scored.uniform_files(reference):
        with ExpertModel.open(file.path) as model:
            n_bytes = model_shape(model, (0,)).all_slot_bytes()
        yield Uniform(file.label, n_bytes, distances(score))


def _row(
    found: Found,
    part: Part,
    n_bytes: int,
    tier: int | None,
    reference: Reference,
    shape: ModelShape,
    of_losses: np.ndarray,
) -> Row:
    """The plan of one text in the slots that every expert in one type takes. tier: this type, None
    for one that the file does not hold, whose losses nobody knows."""
    score, tiers, taken = _planned(part, n_bytes, ReferencePart(reference, part.places))
    fits = [each for each in found.uniform if each.slot_bytes <= n_bytes]
    rival = min(fits, key=lambda each: float(each.kl[part.places].mean()))
    theirs, ours = rival.kl[part.places], distances(score)
    weighted = part.uses[..., None] * of_losses
    gain = arithmetic.share(theirs - ours, theirs)
    foreseen: Row = dict.fromkeys(("expected", "possible", "reached", "uneven"))
    if tier is not None:
        alone = float(weighted[..., tier].sum())
        possible = 1 - Hull(weighted, slot_sizes(shape)).bound(n_bytes) / alone
        foreseen = {
            "expected": 1 - lost(weighted, tiers) / alone,
            "possible": possible,
            "reached": _of(possible, gain),
            "uneven": 1 - 1 / unevenness(weighted[..., tier]),
        }
    return {
        **foreseen,
        "domain": part.name,
        "tokens": len(part.places),
        "bytes": n_bytes,
        "plan_bytes": taken,
        "uniform": rival.label,
        "uniform_kl": pair(arithmetic.mean(theirs)),
        "kl": pair(arithmetic.mean(ours)),
        "gain": pair(gain),
        "experts": {name: int((tiers == at).sum()) for at, name in enumerate(shape.tiers)},
    }


def _of(possible: float, gain: Estimate) -> list[float | None] | None:
    """A gain and its standard error as parts of what is possible: a short text tells less of small
    gains than they are. None where nothing is possible."""
    return pair(Estimate(gain.value / possible, gain.error / possible)) if possible > 0 else None


def _planned(part: Part, n_bytes: int, against: ReferencePart) -> tuple[Score, np.ndarray, int]:
    """The score of a plan in so many bytes of slots; its tiers [n_layers, n_expert]; its slots."""
    subject = part.subject
    wanted: dict[str, Any] = {
        "policy": "mixed",
        "high_tier": None,
        "low_tier": None,
        "ram": None,
        "expert_ram": n_bytes,
        "update_steps": 0,
    }
    with tempfile.TemporaryDirectory() as folder:
        wanted["profile"] = Path(folder) / "profile.json"
        with ExpertModel.open(subject.config.model, subject.config.low) as model:
            profile.save(wanted["profile"], model, part.before)
        with subject.open(wanted) as engine:
            label = f"{part.name}: plan in {format_size(n_bytes)}"
            score = subject.score_open(engine, label, against=against)
            slots = engine.plan.slots
            taken = slots.total_bytes if slots else 0
            tiers = np.array(engine.plan.tiers, np.uint8)[engine.store.resident()]
            return score, tiers, taken
