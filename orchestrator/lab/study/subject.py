"""The subject of a study: one model, one text and optional questions.

Wrappers replace parts of a loaded model's policy for comparison. A study sets one as
`Driver.policy`; the slots stay as planned.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import numpy as np

from gguf_tools.experts import ExpertModel
from orchestrator.allocation.slots import Transition
from orchestrator.cache import profile
from orchestrator.config import Config
from orchestrator.errors import ConfigError
from orchestrator.events import DecisionBuffer, Phase, RouteEvent, StepReport, StoreView
from orchestrator.lab.eval.judge import (
    ChoiceScores,
    Judge,
    Reference,
    TextScores,
    read_questions,
    score_choices,
    score_text,
)
from orchestrator.lab.eval.run import (
    EvalOptions,
    best_config,
    counters,
    eval_config,
    read_reference,
    usage_between,
)
from orchestrator.lab.eval.text import Window, read_documents
from orchestrator.lab.study.uniform import UniformTypes
from orchestrator.policy import Policy
from orchestrator.runtime.evaluator import Evaluator
from orchestrator.runtime.load import Progress
from orchestrator.runtime.runtime import Runtime


class Wrapper:
    """A policy that behaves like the policy `inner`, except for some replaced methods.

    `instead` are the replacements, by method name.
    """

    def __init__(self, inner: Policy, **instead: Callable[..., Any]) -> None:
        self.inner = inner
        self.__dict__.update(instead)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def random_critical(inner: Policy, seed: int) -> Wrapper:
    """Return a policy that assigns precisions at random, as a baseline for Figure 3 of DyMoE.

    It takes the precisions (tiers) that the policy `inner` chooses for the used experts of a layer,
    and shuffles them among these experts. The number of experts in each tier does not change.
    `seed` is the seed of the random choices.
    """

    def decide(event: RouteEvent, view: StoreView, out: DecisionBuffer) -> None:
        inner.decide(event, view, out)
        rng = np.random.default_rng((seed, event.step, event.layer))
        used = np.unique(event.ids_array)
        out.tier_array[used] = rng.permutation(out.tier_array[used])

    return Wrapper(inner, decide=decide)


def one_layer(inner: Policy, layer: int, tier: int) -> Wrapper:
    """Return a policy that requests the best tier (precision) for all experts, except in one layer.

    In the MoE layer with the index `layer`, it requests the tier with the index `tier` for all
    experts (0 is the best). The returned policy wraps the policy `inner`, and replaces only its
    method `decide`.
    """

    def decide(event: RouteEvent, view: StoreView, out: DecisionBuffer) -> None:
        if event.layer == layer:
            out.tier_array[:] = tier

    return Wrapper(inner, decide=decide)


def fixed_tiers(inner: Policy, **instead: Callable[..., Any]) -> Wrapper:
    """Return a policy like `inner` that changes no expert's precision (tier) in the background.

    The methods of `inner` that start such changes are replaced by methods that do nothing.
    `instead` are other replacements, by method name.
    """
    stays: dict[str, Callable[..., Any]] = {
        "on_step": lambda report: (),
        "warm": lambda resident, target: None,
    }
    return Wrapper(inner, **stays | instead)


# Number of passes after which the total time is estimated. The first one is slower.
_ESTIMATE_AFTER = 2
SKIP = "skip"
# The name of the whole text, next to the names of its domains.
ALL = "all"

Settings = dict[str, Any]
# Returns the usage of each expert, float64 [n_layers, n_expert].
Uses = Callable[[], np.ndarray]


class Passes:
    """Counts how often a study reads its text, and shows the progress and the remaining time.

    A pass is one reading of the whole text by a model. All passes are expected to take about the
    same time. `begun` is the number of passes begun. `total` is the expected number, 0 if unknown.
    """

    def __init__(
        self,
        report: Progress,
        note: Callable[[str], None],
    ) -> None:
        self._report, self._note = report, note
        self.total = self.begun = 0
        self._start_s = 0.0

    def expect(self, total: int, n_tokens: int) -> None:
        """Set the expected number of passes over the text, and report it to the user.

        In a pass, a model reads the text once. `total` is the number of passes, and `n_tokens` is
        the maximum number of tokens in a pass.
        """
        self.total = total
        self._note(f"The text is read {total} times, at most {n_tokens} tokens each time")

    def begin(self, label: str) -> Callable[[float], None]:
        """Begin another reading of the text, and return a function that shows its progress.

        Call the returned function with the completed fraction, 0 to 1. `label` is shown next to the
        progress. It names the configuration of the model that reads the text.
        """
        done, now_s = self.begun, time.monotonic()
        if not done:
            self._start_s = now_s
        self.begun += 1
        named = f"{label}, pass {self.begun}"
        if self.total >= self.begun:
            named += f" of {self.total}"
            if done >= _ESTIMATE_AFTER:
                left_s = (now_s - self._start_s) / done * (self.total - done)
                named += f", {duration(left_s)} left in total"
                if done == _ESTIMATE_AFTER:
                    self._note(
                        f"The first {done} of {self.total} passes over the text took "
                        f"{duration(now_s - self._start_s)}. The other passes take about "
                        f"{duration(left_s)}"
                    )
        return lambda share: self._report(named, share)


def duration(seconds: float) -> str:
    """Format a duration, for example as 40 s, 12 min or 3 h 20 min."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    hours, rest = divmod(minutes, 60)
    return f"{minutes} min" if minutes < 100 else f"{hours} h {rest} min"


@dataclass(frozen=True, slots=True)
class Score:
    """The results of one configuration (a policy with its settings) on a text.

    - text: scores of each token, such as its log-likelihood.
    - choices: scores of the multiple-choice questions; None if they were not asked.
    - usage: work of the expert store, such as the fraction of cache hits; None without a store.
    - realised: the actual fraction of a token's experts with the high precision. The setting
      `retention` is the intended fraction. None for policies without this setting, and for text
      that is read as prompts.
    - report: figures that the policy reports about itself.
    - slot_bytes: memory for experts.
    """

    text: TextScores
    choices: ChoiceScores | None = None
    usage: dict[str, Any] | None = None
    realised: float | None = None
    report: dict[str, Any] = field(default_factory=dict)
    slot_bytes: int = 0

    @property
    def high(self) -> float:
        """The fraction of the routed experts for which the policy chose the high precision.

        Other experts may also be computed in it, if memory holds them in the high precision.
        """
        return (self.usage["high"] or 0.0) if self.usage else 0.0

    def averaged(self, others: Sequence[Score]) -> Score:
        """Return the mean of this score and of other scores of the same text.

        The values of each token are averaged, and so is the fraction of experts in the high tier.
        All other values are copied from this score.
        """
        rows = (self, *others)
        text = replace(
            self.text,
            nll=np.mean([row.text.nll for row in rows], axis=0),
            kl=np.mean([row.text.kl for row in rows], axis=0),
            agrees=np.mean([row.text.agrees for row in rows], axis=0),
        )
        high = sum(row.high for row in rows) / len(rows)
        usage = None if self.usage is None else self.usage | {"high": high}
        return replace(self, text=text, usage=usage)


def usual_high(tiers: Sequence[str]) -> str:
    """Return the name of the default high tier of a file.

    The lowest tier is not considered. Among the others, q4_k is preferred, then the best other
    4-bit tier. If there is no 4-bit tier, the result is the best tier of the file. `tiers` are all
    tiers of the file, best first.
    """
    four_bits = [tier for tier in tiers[:-1] if tier.removeprefix("i").startswith("q4")]
    return "q4_k" if "q4_k" in four_bits else (four_bits or [*tiers])[0]


class Subject:
    """A model, a text and optional questions. A study scores each configuration on them.

    - high, low: names of the tiers in configurations with two precisions.
    - tiers: names of all tiers of the model, best first.
    """

    def __init__(
        self,
        config: Config,
        options: EvalOptions,
        report: Progress,
        note: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Read the text and open the model once.

        `note` receives messages about the passes. Raises ConfigError for an unsuitable text or
        questions.
        """
        if options.text is None:
            raise ConfigError("a study needs a text")
        documents = read_documents(options.text, options.text_tokens)
        self.questions = read_questions(options.choices) if options.choices else []
        self.report, self.note = report, note
        self.passes = Passes(report, note)
        self.config = eval_config(config, options)
        self._low_tiers: tuple[str, ...] = ()
        if config.low:
            with ExpertModel.open(config.low) as model:
                self._low_tiers = tuple(tier.name for tier in model.tiers)
        # Tokenization does not depend on the settings, which may belong to policies of the study.
        unset = dict.fromkeys(self.config.of_policies)
        with (
            Runtime.open(self.config.with_changes(**unset)) as runtime,
            runtime.evaluator() as evaluator,
        ):
            self.tiers = tuple(tier.name for tier in evaluator.inside.model.tiers)
            self.name = config.model.name
            self.layer_ids = list(evaluator.inside.model.layer_ids)
            self.n_layers = evaluator.inside.model.n_layers
            self.n_expert_used = evaluator.inside.model.n_expert_used
            self.n_expert = evaluator.inside.model.n_expert
            self.windows = options.windows(evaluator, documents)
        self.uniform_types = UniformTypes(config)
        self.high = config.high_tier or usual_high(self.tiers)
        self.low = config.low_tier or self.tiers[-1]

    @property
    def best(self) -> str:
        """The name of the model's best stored precision (tier), such as "q8_0"."""
        return self.tiers[0]

    @property
    def n_tokens(self) -> int:
        """Number of tokens that each configuration is scored on."""
        return sum(window.n_scored for window in self.windows)

    @property
    def basis(self) -> str:
        """Description of the model and the text, for table titles."""
        questions = f", {len(self.questions)} questions" if self.questions else ""
        return (
            f"{self.name}, {self.n_layers} layers, {self.n_tokens} tokens{questions}, measured once"
        )

    def on(self, windows: Sequence[Window]) -> Subject:
        """Return a copy of this subject (model and text) that has only the given pieces of text.

        `windows` are these pieces.
        """
        other = copy(self)
        other.windows = list(windows)
        return other

    def model(self) -> ExpertModel:
        """Open the model, including a second file with lower precisions if it has one.

        The caller closes the model.
        """
        return ExpertModel.open(self.config.model, self.config.low)

    def reference(self) -> Reference:
        """Read the text with the model's best precision, and return all log-probabilities.

        The result is a temporary file [n_tokens, n_vocab], with the log-probability of each token
        of the vocabulary at each scored position of the text. The caller closes the file. The text
        is read token by token.
        """
        step = self.passes.begin("Reading the text in the best precision")
        config = best_config(self.config, self.best)
        with (
            Runtime.open(config, self.report) as runtime,
            runtime.evaluator() as evaluator,
        ):
            return read_reference(evaluator, self.windows, False, step)

    def uniform(self, tier: str) -> Settings:
        """Return the settings with every expert in one tier."""
        settings: Settings = {
            "policy": "lru",
            "high_tier": tier,
            "low_tier": None,
            "low": None,
            "renormalize": False,
        }
        if tier in self._low_tiers:
            settings["model"] = self.config.low
        return settings

    def mixed(self, low: str, retention: float, **more: Any) -> Settings:
        """Return settings for the policy `dymoe`, which mixes two precisions.

        Critical experts have the high tier. All other experts have the tier `low`, or are skipped
        if `low` is "skip". `retention` is the fraction of critical experts. `more` are further
        settings.
        """
        return {
            "policy": "dymoe",
            "high_tier": self.high,
            "low_tier": low,
            "retention": retention,
            "renormalize": self.config.renormalize and low == SKIP,
            **more,
        }

    @contextmanager
    def open(self, settings: Settings, used: np.ndarray | None = None) -> Iterator[Evaluator]:
        """Load the model with these settings, and yield an evaluator, which computes logits.

        `used` [n_layers, n_expert] is the expert usage that the policy knows at the start. None
        means that no usage is given.
        """
        with tempfile.TemporaryDirectory() as folder:
            if used is not None:
                settings = {**settings, "profile": Path(folder) / "profile.json"}
                with self.model() as model:
                    profile.save(settings["profile"], model, used)
            with (
                Runtime.open(self.config.compared(**settings)) as runtime,
                runtime.evaluator() as evaluator,
            ):
                yield evaluator

    def score(
        self,
        evaluator: Evaluator,
        label: str,
        against: Reference | None = None,
        decider: Callable[[Policy], Wrapper] | None = None,
        prefill: bool = False,
        ask: bool = False,
    ) -> Score:
        """Let a loaded model read this subject's text, and return the scores of the text.

        - evaluator: the loaded model.
        - label: name of the model's configuration, for the progress display.
        - against: log-probabilities of a reference model, for the KL divergence. None computes no
          divergence.
        - decider: a function that receives the model's policy and returns the policy to use
          instead. None keeps the policy.
        - prefill: read the text as prompts, not token by token.
        - ask: also score this subject's multiple-choice questions.
        """
        own = evaluator.inside.policy
        if decider is not None:
            evaluator.inside.driver.policy = cast(Policy, decider(own))
        try:
            judge, before = Judge(evaluator, prefill), counters(evaluator)
            step = self.passes.begin(label)
            text = score_text(judge, self.windows, against=against, progress=step)
            phase = Phase.PREFILL if prefill else Phase.DECODE
            usage = usage_between(before, counters(evaluator), phase)
            choices = None
            if ask and self.questions:
                choices = score_choices(
                    judge, self.questions, lambda x: self.report(f"{label}, questions", x)
                )
        finally:
            evaluator.inside.driver.policy = own
        slots, depth = evaluator.plan.slots, getattr(own.placement, "depth", None)
        return Score(
            text,
            choices,
            usage,
            None if prefill or depth is None else depth.realised,
            dict(own.report()),
            slots.total_bytes if slots else 0,
        )

    def uses(self, windows: Sequence[Window], tier: str) -> np.ndarray:
        """Return the fraction of tokens that use each expert, float64 [n_layers, n_expert].

        The windows are read token by token. All experts are computed in the tier `tier`.
        """
        settings = {**self.uniform(tier), "policy": "mixed", "ram": None, "expert_ram": 1 << 48}
        whole = [replace(window, prompt=False) for window in windows]
        total, steps = np.zeros((self.n_layers, self.n_expert)), 0

        def count(report: StepReport) -> Sequence[Transition]:
            nonlocal steps
            if report.counts is not None:
                total[:] += report.counts
                steps += 1
            return ()

        def counting(inner: Policy) -> Wrapper:
            return fixed_tiers(inner, on_step=count)

        with self.open(settings) as evaluator:
            self.on(whole).score(evaluator, "Counting expert uses", decider=counting)
        return total / max(1, steps)

    def random_uses(self, seed: int) -> np.ndarray:
        """Return random expert usage: the numbers 1 to n_expert in random order for each layer."""
        rng = np.random.default_rng(seed)
        return np.stack([rng.permutation(self.n_expert) + 1.0 for _ in range(self.n_layers)])


def halves(windows: Sequence[Window]) -> tuple[list[Window], list[Window]]:
    """Return (windows to measure expert usage, windows to score).

    A window is a piece of the text, and its domain is a label of that piece. About half of the
    scored tokens of each domain go into the first list, the rest into the second list. Both lists
    keep the order of the text. Raises ConfigError if a domain has only one window.
    """
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
                f"{named} has only one window (piece of text), but the study needs one for expert "
                f"usage and another for quality. Use more text of this kind, or a larger "
                f"--max-tokens"
            )
        # the last window is always scored, the first one never
        first = window is not most[domain] and (
            domain not in seen or 2 * left[domain] > total[domain]
        )
        parts[0 if first else 1].append(window)
        left[domain] -= window.n_scored
        seen.add(domain)
    return parts


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """A part of a text that is scored on its own: the whole text or one domain.

    A window is a piece of the text, and its domain is a label of that piece. The windows of a part
    are divided into two halves.

    - first: the windows that are only used to measure how often each expert is used.
    - second: the windows that are scored.
    - places: positions of this part's scored tokens in the list of all scored tokens of the text,
      int [m].
    """

    name: str
    places: np.ndarray
    first: list[Window]
    second: list[Window]


def parts_of(on: Subject) -> list[Part]:
    """Return the parts of a text to score: the whole text, then each domain if it has several.

    A domain is a label for a kind of text, such as code.
    """
    first, second = halves(on.windows)
    domains = np.repeat([each.domain for each in second], [each.n_scored for each in second])
    found = [Part(ALL, np.arange(len(domains)), first, second)]
    names = list(dict.fromkeys(window.domain for window in second))
    for name in names if len(names) > 1 else ():
        mine = ([each for each in half if each.domain == name] for half in (first, second))
        found.append(Part(name or "no domain", np.flatnonzero(domains == name), *mine))
    return found
