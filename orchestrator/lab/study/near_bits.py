"""Table 3 of the near-data paper: few bits for the experts that are not hot, given by the prompt or
alike to all of them, on texts and on questions behind a prompt."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial

import numpy as np

from gguf_tools.units import format_size
from orchestrator.allocation.placement import MAX_WIDTHS, PLAIN, best_of_each_width
from orchestrator.allocation.pools import nominal_bits, shares
from orchestrator.errors import ConfigError
from orchestrator.lab.study.context import Usage, read_usages, with_prompts
from orchestrator.lab.study.figures import ANSWERS, above, four_digits, quality
from orchestrator.lab.study.plot import Panel
from orchestrator.lab.study.policies import Placed
from orchestrator.lab.study.study import Case, Findings, ScoredStudy, Scores, lines
from orchestrator.lab.study.subject import Part, Settings, Subject, Uses, parts_of
from orchestrator.lab.table import Column, Row, Table
from orchestrator.policy.context import OWN, SHARED

BITS = (3.0, 2.0)
HOT = (0.25, 0.5)  # shares of the experts of a layer; the paper's is one half
PAPER, OURS = "prompt, losses alone (the paper)", "prompt and profile"
STATIC, RANDOM = "profile alone", "random"
UNIFORM = "prompt and profile, uniform bits"
FIXED = "prompt and profile, so many experts of each width"
JUDGED, ASKED = "judged", "asked"
_SEED = 1


@dataclass(frozen=True, slots=True)
class NearTiers:
    """The near tiers of a file, the widest first: names, and nominal bits, all different."""

    names: tuple[str, ...]
    bits: tuple[int, ...]

    @classmethod
    def of(cls, tiers: Sequence[str]) -> NearTiers:
        """Of a file's tiers, best first: the best one of each width below the best tier."""
        names = best_of_each_width(tiers[1:])[-MAX_WIDTHS:]
        return cls(tuple(names), tuple(map(nominal_bits, names)))

    def uniform(self, bits: float) -> str | None:
        """The tier in which every expert has so many bits; None where the file has none."""
        return self.names[self.bits.index(int(bits))] if bits in self.bits else None


class NearBits(ScoredStudy):
    """What choosing bits by the prompt wins over the same bits for all. Each domain's first half
    says how its experts are used, and its second half is judged."""

    name = "near-bits"
    policies = ("context",)

    def scored(self, on: Subject) -> Subject:
        return on.on(parts_of(on.on(with_prompts(on.windows)))[0].second)

    def cases(self, on: Subject) -> list[Case]:
        on = on.on(with_prompts(on.windows))
        near, (everything, *domains) = NearTiers.of(on.tiers), parts_of(on)
        bits, hot = _bits(on, near), _hot_counts(on)
        # One reading of all texts, when it is first asked for.
        usages = cache(lambda: dict(zip(map(id, on.windows), read_usages(on), strict=True)))
        listed = []
        for part in domains or [everything]:
            listed.append(_alone(on, on.best, None, part, JUDGED))
            known = cache(partial(_profile, usages, part))
            for n_hot in hot:
                for width in bits:
                    name = near.uniform(width)
                    if name is not None:
                        listed.append(_alone(on, name, width, part, JUDGED))
                    listed += _cases(on, near, width, n_hot, part, known, JUDGED)
        if on.questions:
            whole = self.scored(on).windows[:1]
            part = Part("", np.arange(whole[0].n_scored), [], whole)
            known = cache(partial(_profile, usages, everything))
            listed.append(_alone(on, on.best, None, part, ASKED))
            n_hot = on.config.given("hot_experts") or max(1, on.n_expert // 2)
            for width in bits:
                listed += _cases(on, near, width, n_hot, part, known, ASKED)
        return listed

    def show(self, found: Scores, on: Subject) -> Findings:
        scored, rows = found.on, []
        # By text, hot experts and bits: all in the best tier, and uniform bits.
        bases = {case.row["domain"]: s for case, s in found.of(JUDGED) if not case.row["bits"]}
        equal = {_place(case): s for case, s in found.of(JUDGED) if case.label == UNIFORM}
        for case, score in found.of(JUDGED):
            (row,) = found.rows([(case, score)], bases[case.row["domain"]])
            rival = equal.get(_place(case))
            rows.append(
                {
                    **row,
                    "slots": score.slot_bytes if row["hot"] else None,
                    "above": None if rival is None else above(score, rival),
                }
            )
        head = (
            Column("text", "domain", left=True),
            Column("bits", "bits", "{:g}".format),
            Column("hot", "hot"),
            Column("bits chosen by", "configuration", left=True),
        )
        columns = (
            *head,
            Column("slots", "slots", format_size),
            *quality(on.best, on.best),
            Column("KL above uniform bits", "above", four_digits),
        )
        note = (
            f"Hot experts are in {on.best}. Each domain is judged on its second half; the profile "
            f"is its first half. {STATIC} and {RANDOM}: placed before the first prompt, and never "
            f"again. Near experts share slots of the widest tier, so that each prompt has its own "
            f"bits; where so many of each width are fixed, each has slots of its own. KL above "
            f"uniform bits: paired, of the same hot experts; below 0 is better."
        )
        tables = [
            Table(f"Near experts in few bits (Table 3): {scored.basis}", columns, rows, [note])
        ]
        if asked := found.of(ASKED):
            title = f"Multiple choice (Table 3): {scored.basis}"
            answers = found.rows(asked, asked[0][1])
            tables.append(Table(title, (*head[1:], *ANSWERS), answers))
        panels = []
        for name in bases:
            drawn = lines(
                [
                    (case, score)
                    for case, score in found.of(JUDGED)
                    if case.row["domain"] == name and case.row["hot"]
                ],
                lambda case, _: case.row["bits"],
                lambda _, score: score.mean_kl,
                lambda case: f"{case.label}, {case.row['hot']} hot",
            )
            x, y = "nominal bits of the near experts", f"KL from {on.best}, nats"
            panels.append(Panel(x, y, drawn, f"{name}: {scored.basis}"))
        return Findings(tables, panels)


def _place(case: Case) -> tuple[str, int | None, float | None]:
    return case.row["domain"], case.row["hot"], case.row["bits"]


def _bits(on: Subject, near: NearTiers) -> list[float]:
    """Mean nominal bits that are looked at: those asked for, else the paper's that the file allows.
    Raises ConfigError where there are none."""
    asked = on.config.given("near_bits")
    wanted = BITS if asked is None else (float(asked),)
    found = [bits for bits in wanted if bits >= near.bits[-1]]
    if not found:
        raise ConfigError(
            f"{on.name} holds nothing below {near.names[-1]}: pack it with a tier of "
            f"{min(wanted):g} bits or less"
        )
    return found


def _hot_counts(on: Subject) -> list[int]:
    asked = on.config.given("hot_experts")
    return [asked] if asked else sorted({max(1, round(share * on.n_expert)) for share in HOT})


def _profile(usages: Callable[[], dict[int, Usage]], part: Part) -> np.ndarray:
    """How much the first half of a text used each expert. usages: by the window's id."""
    mean: np.ndarray = np.mean([shares(usages()[id(each)].all) for each in part.first], axis=0)
    return mean


def _alone(on: Subject, tier: str, bits: float | None, part: Part, group: str) -> Case:
    """Every expert in one tier."""
    row: Row = {"domain": part.name, "bits": bits, "hot": None}
    ask = group == ASKED
    return Case(f"all in {tier}", on.uniform(tier), group, row, part, ask=ask)


def _cases(
    on: Subject, near: NearTiers, bits: float, n_hot: int, part: Part, known: Uses, group: str
) -> list[Case]:
    """What is compared with so many hot experts and bits. To questions, each with a prompt of its
    own, only what places its experts by that."""
    memory = {"policy": "context", "high_tier": None, "low_tier": None, "ram": None}
    usual = {**memory, "expert_ram": None, "hot_experts": n_hot, "near_bits": bits}
    by_prompt = {**usual, "near_slots": SHARED}
    by_chance = partial(on.random_uses, _SEED)
    ways: list[tuple[str, Settings, Uses, bool]] = [
        (PAPER, {**by_prompt, "near_weights": PLAIN, "prior_tokens": 0.0}, known, False),
        (OURS, by_prompt, known, False),
        (FIXED, {**usual, "near_slots": OWN}, known, False),
        (STATIC, by_prompt, known, True),
        (RANDOM, by_prompt, by_chance, True),
    ]
    name = near.uniform(bits)
    if name is not None:
        ways.insert(0, (UNIFORM, {**usual, "near_tiers": name}, known, False))
    row = {"domain": part.name, "bits": bits, "hot": n_hot}
    return [
        Case(
            label,
            settings,
            group,
            row,
            part,
            used,
            decider=Placed if stays else None,
            ask=group == ASKED,
        )
        for label, settings, used, stays in ways
        if not (stays and group == ASKED)
    ]
