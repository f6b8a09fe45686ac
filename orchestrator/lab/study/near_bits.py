"""Table 3 of the near-data paper: few bits for the experts that are not hot, given by the prompt or
alike to all of them, on texts and on questions behind a prompt."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from gguf_tools.experts import ExpertModel
from gguf_tools.units import format_size
from orchestrator.allocation.placement import MAX_WIDTHS, PLAIN, best_of_each_width
from orchestrator.allocation.pools import nominal_bits, shares
from orchestrator.allocation.slots import Transition
from orchestrator.cache import profile
from orchestrator.engine.engine import Engine
from orchestrator.errors import ConfigError
from orchestrator.events import StepReport
from orchestrator.lab.eval import arithmetic
from orchestrator.lab.eval.arithmetic import pair
from orchestrator.lab.eval.compare import Reference, ReferencePart
from orchestrator.lab.eval.report import with_error
from orchestrator.lab.study import plot
from orchestrator.lab.study.context import read_usages, with_prompts
from orchestrator.lab.study.figures import ANSWERS, answers_of, distances, quality, quality_of
from orchestrator.lab.study.policies import Wrapper
from orchestrator.lab.study.residency import halves
from orchestrator.lab.study.study import Study
from orchestrator.lab.study.subject import Score, Subject
from orchestrator.lab.table import Column, Row, Table
from orchestrator.policy.context import OWN, SHARED, ContextSettings

BITS = (3.0, 2.0)
HOT = (0.25, 0.5)  # shares of the experts of a layer; the paper's is one half
PAPER, OURS = "prompt, losses alone (the paper)", "prompt and profile"
STATIC, RANDOM = "profile alone", "random"
UNIFORM = "prompt and profile, uniform bits"
FIXED = "prompt and profile, so many experts of each width"
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


class Placed(Wrapper):
    """A policy that keeps every expert where it started."""

    def step_done(self, report: StepReport) -> Sequence[Transition]:
        """No transitions."""
        return ()

    def before_answer(self, resident: np.ndarray, target: np.ndarray) -> None:
        """Nor behind a prompt."""


@dataclass(frozen=True, slots=True)
class Text:
    """The second half of a domain, to be judged: places int [m] of its tokens among all that are
    scored; profile [n_layers, n_expert]: how much its first half used each expert."""

    name: str
    subject: Subject
    places: np.ndarray
    profile: np.ndarray


@dataclass(slots=True)
class Found:
    """judged: what was computed, for each text; asked: the same of questions."""

    subject: Subject
    judged: list[Row] = field(default_factory=list)
    asked: list[Row] = field(default_factory=list)


class NearBits(Study[Found]):
    """What choosing bits by the prompt wins over the same bits for all."""

    name = "near-bits"
    policies = ("context",)

    def n_passes(self, on: Subject) -> int:
        """Those of a domain are shorter than those of all of the text."""
        on = on.on(with_prompts(on.windows))
        near, (_, second) = NearTiers.of(on.tiers), halves(on.windows)
        each, answered = 0, 0
        for bits in _bits(on, near):
            stay = [stays for _, _, stays in _cases(near, bits)]
            each += len(stay) + (near.uniform(bits) is not None)
            answered += stay.count(False)
        by_domain = 1 + len(_hot_counts(on, on.n_expert)) * each
        of_questions = 1 + answered if on.questions else 0
        return 1 + len({window.domain for window in second}) * by_domain + of_questions

    def measure(self, on: Subject) -> Found:
        """Each domain's first half says how its experts are used, and its second half is judged.
        Raises ConfigError where the file has no precision of so few bits."""
        on = on.on(with_prompts(on.windows))
        near, asked = NearTiers.of(on.tiers), _settings(on)
        texts = list(_texts(on))
        scored = on.on([window for text in texts for window in text.subject.windows])
        found = Found(scored)
        n_expert = texts[0].profile.shape[1]
        with scored.reference() as reference:
            for text in texts:
                part = ReferencePart(reference, text.places)
                best = text.subject.score(on.tiers[0], on.uniform(on.tiers[0]), against=part)
                found.judged.append(
                    _row(text, f"all in {on.tiers[0]}", None, None, None, best, best)
                )
                for n_hot in _hot_counts(on, n_expert):
                    for bits in _bits(on, near):
                        of = replace(asked, hot_experts=n_hot, near_bits=bits)
                        found.judged += _judged(text, near, of, part, best)
            if on.questions:
                everything = np.mean([text.profile for text in texts], axis=0)
                found.asked += _asked(scored, near, asked, everything, reference, n_expert)
        return found

    def tables(self, found: Found) -> list[Table]:
        subject = found.subject
        tier = subject.tiers[0]
        head = (
            Column("text", "domain", left=True),
            Column("bits", "bits", "{:g}".format),
            Column("hot", "hot"),
            Column("bits chosen by", "configuration", left=True),
        )
        columns = (
            *head,
            Column("slots", "bytes", format_size),
            *quality(tier, tier),
            Column("KL above uniform bits", "above", lambda each: with_error(each, digits=4)),
        )
        note = (
            f"Hot experts are in {tier}. Each domain is judged on its second half; the profile is "
            f"its first half. {STATIC} and {RANDOM}: placed before the first prompt, and never "
            f"again. Near experts share slots of the widest tier, so that each prompt has its own "
            f"bits; where so many of each width are fixed, each has slots of its own. KL above "
            f"uniform bits: paired, of the same hot experts; below 0 is better."
        )
        title = f"Near experts in few bits (Table 3): {subject.basis}"
        tables = [Table(title, columns, found.judged, [note])]
        if found.asked:
            title = f"Multiple choice (Table 3): {subject.basis}"
            tables.append(Table(title, (*head[1:], *ANSWERS), found.asked))
        return tables

    def draw(self, found: Found, folder: Path) -> list[Path]:
        names = list(dict.fromkeys(row["domain"] for row in found.judged))
        with plot.figure(folder, self.name, len(names)) as axes:
            for axis, name in zip(axes, names, strict=True):
                rows = [row for row in found.judged if row["domain"] == name and row["hot"]]
                lines = dict.fromkeys((row["configuration"], row["hot"]) for row in rows)
                for number, key in enumerate(lines):
                    mine = [row for row in rows if (row["configuration"], row["hot"]) == key]
                    x = [row["bits"] for row in mine]
                    kl = [row["kl"] for row in mine]
                    label = f"{key[0]}, {key[1]} hot"
                    errors = [each[1] for each in kl]
                    plot.line(axis, x, [each[0] for each in kl], label, number, errors)
                axis.set_xlabel("nominal bits of the near experts")
                axis.set_ylabel(f"KL from {found.subject.tiers[0]}, nats")
                axis.set_title(name or found.subject.basis, fontsize=9)
                axis.legend(fontsize=6)
        return plot.files(folder, self.name)


def _settings(on: Subject) -> ContextSettings:
    """The policy's settings as the user has them."""
    return ContextSettings.of(on.config.of_policies)


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


def _hot_counts(on: Subject, n_expert: int) -> list[int]:
    asked = on.config.given("hot_experts")
    return [asked] if asked else sorted({max(1, round(share * n_expert)) for share in HOT})


def _texts(on: Subject) -> Iterator[Text]:
    """Each domain, with what its first half used. The second halves are scored one after the
    other."""
    first, second = halves(on.windows)
    used = dict(zip(map(id, on.windows), read_usages(on), strict=True))
    at = 0
    for name in dict.fromkeys(window.domain for window in second):
        windows = [window for window in second if window.domain == name]
        part = on.on(windows)
        before = [used[id(window)] for window in first if window.domain == name]
        profile = np.mean([shares(each.all) for each in before], axis=0)
        places = np.arange(at, at + part.n_tokens)
        at += part.n_tokens
        yield Text(name, part, places, profile)


def _cases(near: NearTiers, bits: float) -> Iterator[tuple[str, dict[str, Any], bool]]:
    """(name, settings beside those asked for, whether experts stay where they start)."""
    name = near.uniform(bits)
    if name is not None:
        yield UNIFORM, {"near_tiers": name}, False
    by_prompt = {"near_slots": SHARED}
    yield PAPER, {"near_weights": PLAIN, "prior_tokens": 0.0, **by_prompt}, False
    yield OURS, by_prompt, False
    yield FIXED, {"near_slots": OWN}, False
    yield STATIC, by_prompt, True
    yield RANDOM, by_prompt, True


@contextmanager
def _open(subject: Subject, settings: dict[str, Any], used: np.ndarray) -> Iterator[Engine]:
    """An engine of the policy that has this profile, used [n_layers, n_expert]."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "profile.json"
        with ExpertModel.open(subject.config.model) as model:
            profile.save(path, model, used)
        wanted = {"policy": "context", "high_tier": None, "low_tier": None, "profile": path}
        memory = {"ram": None, "expert_ram": None}
        with subject.open(wanted | memory | settings) as engine:
            yield engine


def _judged(
    text: Text,
    near: NearTiers,
    asked: ContextSettings,
    reference: ReferencePart,
    best: Score,
) -> Iterator[Row]:
    """What was computed with so many hot experts and bits; and of all experts in one tier."""
    subject, bits = text.subject, asked.near_bits
    uniform: Score | None = None
    name = near.uniform(bits)
    if name is not None:
        label = f"all in {name}"
        score = subject.score(f"{text.name}: {label}", subject.uniform(name), against=reference)
        yield _row(text, label, bits, None, None, score, best)
    for label, more, stays in _cases(near, bits):
        used = text.profile if label != RANDOM else _random(text.profile)
        own = {"hot_experts": asked.hot_experts, "near_bits": bits, **more}
        with _open(subject, own, used) as engine:
            what = f"{text.name}: {label}, {bits:g} bits"
            score = subject.score_open(engine, what, Placed if stays else None, against=reference)
            slots = engine.plan.slots
        uniform = score if label == UNIFORM else uniform
        n_bytes = slots.total_bytes if slots else None
        yield _row(text, label, bits, asked.hot_experts, n_bytes, score, best, uniform)


def _row(
    text: Text,
    label: str,
    bits: float | None,
    n_hot: int | None,
    n_bytes: int | None,
    score: Score,
    best: Score,
    uniform: Score | None = None,
) -> Row:
    above = None
    if uniform is not None and uniform is not score:
        above = pair(arithmetic.mean(distances(score) - distances(uniform)))
    return {
        "domain": text.name,
        "bits": bits,
        "hot": n_hot,
        "configuration": label,
        "bytes": n_bytes,
        **quality_of(score, best),
        "above": above,
    }


def _random(used: np.ndarray) -> np.ndarray:
    """A profile that says nothing."""
    rng = np.random.default_rng(_SEED)
    return np.stack([rng.permutation(used.shape[1]) + 1.0 for _ in used])


def _asked(
    subject: Subject,
    near: NearTiers,
    asked: ContextSettings,
    used: np.ndarray,
    reference: Reference,
    n_expert: int,
) -> Iterator[Row]:
    """Questions, as many experts hot as the paper has, their text the prompt."""
    n_hot = asked.hot_experts or max(1, n_expert // 2)
    whole = subject.on(subject.windows[:1])

    def row(label: str, bits: float | None, hot: int | None, score: Score) -> Row:
        return {"bits": bits, "hot": hot, "configuration": label, **answers_of(score)}

    best = subject.tiers[0]
    part = ReferencePart(reference, np.arange(whole.n_tokens))
    score = whole.score(best, subject.uniform(best), against=part, ask=True)
    yield row(f"all in {best}", None, None, score)
    for bits in _bits(subject, near):
        for label, more, stays in _cases(near, bits):
            if stays:
                continue
            own = {"hot_experts": n_hot, "near_bits": bits, **more}
            with _open(whole, own, used) as engine:
                score = whole.score_open(engine, label, against=part, ask=True)
            yield row(label, bits, n_hot, score)
