"""What the studies of DynaExq share: every expert in memory in one of two tiers, the hot ones high,
and a text of which one half says what is hot."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from gguf_tools.experts import ExpertModel
from orchestrator.allocation.pools import nominal_bits
from orchestrator.cache import profile
from orchestrator.engine.engine import Engine
from orchestrator.errors import ConfigError
from orchestrator.lab.eval.compare import Reference
from orchestrator.lab.eval.text import Window
from orchestrator.lab.study.policies import Counts
from orchestrator.lab.study.subject import Score, Subject
from orchestrator.memory.footprint import model_shape
from orchestrator.policy.dynaexq import HIGH, LOW, DynaExq, resident_plan

# Of hot sets that are chosen at random.
SEEDS = (1, 2, 3)


def halves(windows: Sequence[Window]) -> tuple[list[Window], list[Window]]:
    """Each domain's first half, for the hotness, and its second one, to be scored; both in the
    text's order. Raises ConfigError where a domain is a single window."""
    left = {window.domain: 0 for window in windows}
    for window in windows:
        left[window.domain] += window.n_scored
    total, most = dict(left), {window.domain: window for window in windows}
    parts: tuple[list[Window], list[Window]] = ([], [])
    seen: set[str] = set()
    for window in windows:
        domain = window.domain
        if window is most[domain] and domain not in seen:
            named = f"the domain '{domain}'" if domain else "the text"
            raise ConfigError(
                f"{named} is one window, which cannot be both measured for hotness and scored: "
                f"raise --max-tokens or lower --window"
            )
        # the last window is always scored, the first one never
        first = window is not most[domain] and (
            domain not in seen or 2 * left[domain] > total[domain]
        )
        parts[0 if first else 1].append(window)
        left[domain] -= window.n_scored
        seen.add(domain)
    return parts


class Residency:
    """What a study of DynaExq does with its subject: the high and the low tier of it, all experts
    in memory in one of the two, whatever --ram says."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        with self._model() as model:
            names = [tier.name for tier in model.tiers]
            tiers = (names.index(subject.high), names.index(subject.low))
            self.shape = model_shape(model, tiers)

    @classmethod
    def of_second_half(cls, subject: Subject) -> tuple[Residency, list[Window]]:
        """(the second halves of the subject's text, the windows of the first ones)."""
        first, second = halves(subject.windows)
        return cls(subject.on(second)), first

    def _model(self) -> ExpertModel:
        return ExpertModel.open(self.subject.config.model, self.subject.config.low)

    @property
    def n_expert(self) -> int:
        return self.shape.n_expert

    def uniform_bytes(self, tier: int) -> int:
        """Slot bytes of every expert in one of the two tiers."""
        return self.shape.all_slot_bytes(tier)

    def budget_bytes(self, n_high: int) -> int:
        """The least budget that holds n_high experts of each layer high, and what swaps need."""
        found = resident_plan(self.shape, 2 * self._plenty, n_high)
        if found is None:
            raise ConfigError("the model has no experts to hold in two precisions")
        return found[0].plan().total_bytes

    @cached_property
    def _plenty(self) -> int:
        return self.uniform_bytes(HIGH) + self.uniform_bytes(LOW)

    @contextmanager
    def open(self, n_high: int, hotness: np.ndarray | None, **settings: Any) -> Iterator[Engine]:
        """An engine with the n_high hottest experts of each layer high, the first ones without a
        hotness. hotness [n_layers, n_expert]."""
        wanted: dict[str, Any] = {
            "policy": "dynaexq",
            "high_tier": self.subject.high,
            "low_tier": self.subject.low,
            "ram": None,
            "expert_ram": self.budget_bytes(n_high),
            "hot_experts": n_high,
            **settings,
        }
        with tempfile.TemporaryDirectory() as folder:
            if hotness is not None:
                wanted["profile"] = Path(folder) / "hotness.json"
                with self._model() as model:
                    profile.save(wanted["profile"], model, hotness)
            with self.subject.open(wanted) as engine:
                yield engine

    def placed(self, n_high: int, hotness: np.ndarray | None) -> AbstractContextManager[Engine]:
        """As open, in the same bytes, with the policy that places experts by each prompt: as many
        of them high as fit, n_high at most."""
        bits = float(nominal_bits(self.subject.low))
        return self.open(n_high, hotness, policy="context", hot_experts=None, near_bits=bits)

    def fixed(
        self,
        label: str,
        n_high: int,
        hotness: np.ndarray | None,
        against: Reference | None = None,
    ) -> Score:
        """The subject's text with a hot set that never changes."""
        with self.open(n_high, hotness, update_steps=0) as engine:
            return self.subject.score_open(engine, label, against=against)

    def hotness(self, windows: Sequence[Window]) -> np.ndarray:
        """S as the policy would have it on the average over the windows, with every expert high:
        the share of the tokens that use each expert, float64 [n_layers, n_expert]."""
        whole = [replace(window, prompt=False) for window in windows]
        with self.open(self.n_expert, None, update_steps=0) as engine:
            counts = Counts(engine.policy)
            self.subject.on(whole).score_open(engine, "hotness", lambda own: counts)
        return counts.per_step

    def random(self, seed: int) -> np.ndarray:
        """A hotness that says nothing: an order of each layer's experts by chance."""
        rng = np.random.default_rng(seed)
        layers = range(self.shape.n_layers)
        return np.stack([rng.permutation(self.n_expert) + 1.0 for _ in layers])


def has_prompts(subject: Subject) -> bool:
    """Whether its text is read as prompts and answers, by which experts are placed."""
    return any(window.prompt for window in subject.windows)


def update_steps(subject: Subject) -> int:
    """Decode steps between two updates of the hot sets."""
    return DynaExq.Settings.of(subject.config.of_policies).update_steps


def high_share(score: Score) -> float:
    """The share of the routed experts that were high."""
    return (score.usage.high or 0.0) if score.usage else 0.0
