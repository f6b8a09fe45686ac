"""What studies measure on: one model, one text, one set of questions, many configurations."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np

from gguf_tools.experts import ExpertModel
from orchestrator.config import Config
from orchestrator.engine.engine import Engine
from orchestrator.errors import ConfigError
from orchestrator.events import Phase
from orchestrator.lab.eval import arithmetic
from orchestrator.lab.eval.arithmetic import Estimate
from orchestrator.lab.eval.choices import ChoiceScores, Question, read_questions, score_choices
from orchestrator.lab.eval.compare import Reference, ReferencePart
from orchestrator.lab.eval.judge import Judge
from orchestrator.lab.eval.perplexity import TextScores, score_text
from orchestrator.lab.eval.run import (
    LOADING,
    EvalOptions,
    Report,
    best_config,
    eval_config,
    loading,
    read_reference,
)
from orchestrator.lab.eval.text import Window, cut_windows, read_documents
from orchestrator.lab.eval.usage import StoreUsage, counters, usage_between
from orchestrator.lab.study.policies import Wrapper
from orchestrator.lab.study.uniform import UniformFile, UniformTypes
from orchestrator.policy import Policy

# So many passes have ended when the time of all is estimated: the first one opens the model anew.
_ESTIMATE_AFTER = 2


class Passes:
    """Counts passes over the text and names each of them in its bar. They take about as long as
    each other. begun: how many there were; total: how many there will be, 0 for unknown."""

    def __init__(
        self,
        report: Report,
        note: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._report, self._note, self._clock = report, note, clock
        self.total = self.begun = 0
        self._start_s = 0.0

    def expect(self, total: int, n_tokens: int) -> None:
        """There will be so many, over about so many tokens each; that is said."""
        self.total = total
        self._note(f"{total} passes over up to {n_tokens} tokens of the text")

    def begin(self, label: str) -> Callable[[float], None]:
        """What gets the share of the next pass that is done."""
        done, now_s = self.begun, self._clock()
        if not done:
            self._start_s = now_s
        self.begun += 1
        named = f"{label}, pass {self.begun}"
        if self.total >= self.begun:
            named += f" of {self.total}"
            if done >= _ESTIMATE_AFTER:
                left_s = (now_s - self._start_s) / done * (self.total - done)
                named += f", {duration(left_s)} left in all"
                if done == _ESTIMATE_AFTER:
                    self._note(
                        f"The first {done} of {self.total} passes took "
                        f"{duration(now_s - self._start_s)}: about {duration(left_s)} more"
                    )
        return lambda share: self._report(named, share)


def duration(seconds: float) -> str:
    """ "40 s", "12 min", "3 h 20 min"."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60} min"


SKIP = "skip"


@dataclass(frozen=True, slots=True)
class Score:
    """One configuration's scores. realised: mean share of critical experts by the policy's own
    counts for decode steps, None where it has none; critical: those counts, of each layer.
    choices: None where no questions were put."""

    text: TextScores
    choices: ChoiceScores | None
    usage: StoreUsage | None
    realised: float | None
    critical: tuple[int, ...] = ()

    def against(self, base: Score) -> Estimate:
        """Relative change of the perplexity from base, paired."""
        return arithmetic.change(self.text.nll, base.text.nll)

    def averaged(self, others: Sequence[Score]) -> Score:
        """This one with the figures of each token averaged over it and others."""
        texts = [row.text for row in (self, *others)]
        means = {
            "nll": np.mean([text.nll for text in texts], axis=0),
            "kl": _mean([text.kl for text in texts]),
            "agrees": _mean([text.agrees for text in texts]),
        }
        return replace(self, text=replace(self.text, **means))


class Subject:
    """Opens an engine for each configuration and scores the same tokens with each.

    high, low: the tiers of a two-tier plan; tiers: all of the file, best first.
    """

    def __init__(
        self,
        config: Config,
        options: EvalOptions,
        report: Report,
        note: Callable[[str], None] = lambda _: None,
    ) -> None:
        """note gets what the passes over the text say. Raises ConfigError where the text, the
        questions or the tiers do not do."""
        if options.text is None:
            raise ConfigError("a study needs a text: give --text FILE")
        if options.prefill or options.reuse or options.kl:
            raise ConfigError(
                "a study chooses how it judges: no --prefill, --reuse or --kl with it"
            )
        for name in ("policy", "retention"):
            if config.given(name) is not None:
                raise ConfigError(f"a study chooses what it compares: leave out --{name}")
        documents = read_documents(options.text, options.text_tokens)
        self.questions: list[Question] = read_questions(options.choices) if options.choices else []
        self.report = report
        self.passes = Passes(report, note)
        self._low_tiers = _tier_names(config.low) if config.low else ()
        self.config = eval_config(config, options)
        # Any configuration tokenizes alike; the settings are for the policies that a study names.
        unset = dict.fromkeys(self.config.of_policies)
        with Engine.open(self.config.with_changes(**unset)) as engine:
            self.tiers = tuple(tier.name for tier in engine.model.tiers)
            self.name = config.model.name
            self.n_layers = engine.model.n_layers
            self.layer_ids = list(engine.model.layer_ids)
            self.n_expert_used = engine.model.n_expert_used
            self.n_expert = engine.model.n_expert
            window = min(options.window, engine.n_ctx)
            self.windows = cut_windows(
                engine, documents, window, options.tokens, options.text, options.prompt_tokens
            )
        self.uniform_types = UniformTypes(config, options)
        self.high = config.high_tier or ("q4_k" if "q4_k" in self.tiers[:-1] else self.tiers[0])
        self.low = config.low_tier or self.tiers[-1]
        if len(self.tiers) < 2:
            raise ConfigError(
                f"{config.model} holds one precision, {self.tiers[0]}: a study compares several, "
                f"of a file packed with them or of --low FILE"
            )

    @property
    def n_tokens(self) -> int:
        """Tokens that each configuration is scored on."""
        return sum(window.n_scored for window in self.windows)

    @property
    def basis(self) -> str:
        """What the figures rest on, for the title of a table."""
        questions = f", {len(self.questions)} questions" if self.questions else ""
        return f"{self.name}, {self.n_layers} layers, {self.n_tokens} tokens{questions}, one run"

    def on(self, windows: Sequence[Window]) -> Subject:
        """The same with some of the windows alone."""
        other = copy(self)
        other.windows = list(windows)
        return other

    def reference(self) -> Reference:
        """What the best tier says, decided token by token. The caller closes it."""
        step = self.passes.begin("Reading with the best tier")

        def report(label: str, share: float) -> None:
            if label == LOADING:
                self.report(label, share)
            else:
                step(share)

        config = best_config(self.config, self.tiers[0])
        with Engine.open(config, loading(report)) as engine:
            return read_reference(engine, self.windows, False, report)

    def uniform(self, tier: str) -> dict[str, Any]:
        """Settings: every expert in one tier."""
        settings: dict[str, Any] = {
            "policy": "lru",
            "high_tier": tier,
            "low_tier": None,
            "low": None,
            "renormalize": False,
        }
        if tier in self._low_tiers:
            settings["model"] = self.config.low
        return settings

    def uniform_files(
        self, against: Reference, ask: bool = False
    ) -> Iterator[tuple[UniformFile, Score]]:
        """The uniform types to compare with, all in memory, each scored as `score` does."""
        for each in self.uniform_types.files(self.report):
            settings = {**self.uniform(""), "model": each.path, "high_tier": None}
            yield each, self.score(each.label, settings, against=against, ask=ask)

    def mixed(self, low: str, retention: float, **more: Any) -> dict[str, Any]:
        """Settings: critical experts in the high tier, the others in low, or "skip"."""
        return {
            "policy": "dymoe",
            "high_tier": self.high,
            "low_tier": low,
            "retention": retention,
            "renormalize": self.config.renormalize and low == SKIP,
            **more,
        }

    def score(
        self,
        label: str,
        settings: dict[str, Any],
        *,
        wrap: Callable[[Policy], Wrapper] | None = None,
        prefill: bool = False,
        against: Reference | ReferencePart | None = None,
        ask: bool = False,
    ) -> Score:
        """One configuration. wrap: what decides in the place of its policy. ask: put the
        questions too."""
        with self.open(settings) as engine:
            return self.score_open(engine, label, wrap, prefill, against, ask)

    def open(self, settings: dict[str, Any]) -> Engine:
        """An engine of the configuration with these settings."""
        return Engine.open(self.config.compared(**settings))

    def score_open(
        self,
        engine: Engine,
        label: str,
        wrap: Callable[[Policy], Wrapper] | None = None,
        prefill: bool = False,
        against: Reference | ReferencePart | None = None,
        ask: bool = False,
    ) -> Score:
        """As score, with an engine that stays open; its own policy is put back."""
        own = engine.policy
        if wrap is not None:
            engine.driver.policy = cast(Policy, wrap(own))
        try:
            judge = Judge(engine, prefill)
            before = counters(engine)
            step = self.passes.begin(label)
            text = score_text(judge, self.windows, against=against, progress=step)
            phase = Phase.PREFILL if prefill else Phase.DECODE
            usage = usage_between(before, counters(engine), phase)
            asked: Sequence[Question] = self.questions if ask else ()
            choices = (
                score_choices(judge, asked, lambda x: self.report(f"{label}, questions", x))
                if asked
                else None
            )
        finally:
            engine.driver.policy = own
        realised = None if prefill else getattr(own, "realised", None)
        return Score(text, choices, usage, realised, tuple(getattr(own, "critical", ())))


def _mean(parts: list[np.ndarray | None]) -> np.ndarray | None:
    """The mean of each token; None where one has no figures."""
    known = [part for part in parts if part is not None]
    return np.mean(known, axis=0) if len(known) == len(parts) else None


def _tier_names(path: Path) -> tuple[str, ...]:
    with ExpertModel.open(path) as model:
        return tuple(tier.name for tier in model.tiers)
