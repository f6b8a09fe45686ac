"""`moe-edge eval` for one configuration: score a text or questions, and print the result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from gguf_tools.experts import DEFAULT_KV, ExpertModel
from gguf_tools.units import format_size
from orchestrator.config import Config
from orchestrator.errors import ConfigError
from orchestrator.events import Phase
from orchestrator.lab.eval import arithmetic
from orchestrator.lab.eval.arithmetic import pair
from orchestrator.lab.eval.judge import (
    Judge,
    Reference,
    TextScores,
    read_questions,
    score_choices,
    score_text,
)
from orchestrator.lab.eval.text import Document, Window, needed_tokens, read_documents, windows_of
from orchestrator.lab.eval.virtual import VirtualStore
from orchestrator.lab.replay.figures import counted, ratio
from orchestrator.lab.replay.trace import COMPUTED, COUNTERS, ROUTED
from orchestrator.native import CStats
from orchestrator.plan.footprint import LEAST_CONTEXT, SIZES
from orchestrator.policy import BASELINE
from orchestrator.runtime.evaluator import Evaluator
from orchestrator.runtime.load import Progress
from orchestrator.runtime.loss_meter import LossMeter
from orchestrator.runtime.runtime import Runtime


def counters(evaluator: Evaluator) -> CStats | None:
    """Return the current counters of the expert store, the cache of experts in memory.

    Returns None if the model runs without a store (--policy plain).
    """
    inside = evaluator.inside
    return inside.store.stats() if inside.managed else None


def usage_between(
    old: CStats | None, new: CStats | None, phase: Phase, losses: LossMeter | None = None
) -> dict[str, Any] | None:
    """Return a summary of the expert cache's work between two readings of its counters.

    `old` and `new` are the readings. If one is None, the result is None. Only steps of the given
    phase count. Unknown values are None.

    - high, low, skip: fractions of the router's choices for which the policy wanted the high tier,
      a lower tier, and no computation.
    - computed_low: fraction of the computed matrices that were in a lower tier.
    - hit_rate: fraction of the requests to the cache that were hits.
    - bytes_read: bytes read from disk, including reads for tier changes in any phase.
    - kl_low, kl_estimate: low and high estimate of the quality loss in nats per token.
    - limit_halved: fraction of the tokens with a halved loss limit (in unusual text).

    The last two items come from `losses`, and cover the time since it was created.
    """
    if old is None or new is None:
        return None

    moved = dict(zip(COUNTERS, (counted(new) - counted(old))[phase].tolist(), strict=True))
    routed, computed = ([moved[name] for name in names] for names in (ROUTED, COMPUTED))
    asked, lost = sum(routed), losses.mean(phase) if losses else None
    read = moved["demand_bytes"] + moved["prefetch_bytes"]
    return {
        "high": ratio(routed[0], asked),
        "low": ratio(sum(routed[1:-1]), asked),
        "skip": ratio(routed[-1], asked),
        "computed_low": ratio(sum(computed[1:]), sum(computed)),
        "hit_rate": ratio(moved["hits"], moved["requests"]),
        "bytes_read": read + new.transition_bytes - old.transition_bytes,
        "kl_estimate": lost,
        "kl_low": None if losses is None or lost is None else losses.estimate.spread * lost,
        "limit_halved": ratio(losses.halved_tokens, losses.tokens[phase]) if losses else None,
    }


WINDOW = 512
LEAST_WINDOW, LEAST_TOKENS = 8, 16


@dataclass(frozen=True, slots=True)
class EvalOptions:
    """Options of an evaluation.

    - text, choices: files with a text and with multiple-choice questions.
    - tokens: maximum number of scored tokens.
    - window: the text is cut into windows of this many tokens, each with its own context.
    - prompt_tokens: number of tokens at the start of each window that are read as a prompt and not
      scored. None reads token by token.
    - kl: also compute the KL divergence from the model in the precision (tier) `kl_from`, by
      default the best one.
    - prefill: read everything as prompts, without decode steps.
    - reuse: if an expert is in memory in a higher precision than the policy chose, use the higher
      precision, as a chat does (DyMoE 4.4.2).
    - bandwidth (bytes per second), latency_us (per read), compute_ms (per token): speeds for a
      simulation. The decisions of some policies depend on the experts that are cached. With such a
      policy, the cache is simulated with these speeds. None means measured.
    """

    text: Path | None = None
    choices: Path | None = None
    tokens: int | None = None
    window: int = WINDOW
    kl: bool = False
    kl_from: str | None = None
    prompt_tokens: int | None = None
    prefill: bool = False
    reuse: bool = False
    bandwidth: int | None = None
    latency_us: int | None = None
    compute_ms: float | None = None

    @property
    def text_tokens(self) -> int | None:
        """The number of tokens of the text that are read; None means all."""
        return needed_tokens(self.tokens, self.window, self.prompt_tokens)

    def windows(self, evaluator: Evaluator, documents: Sequence[Document]) -> list[Window]:
        """Cut documents into windows of the chosen length.

        Raises ConfigError if the documents have too few tokens.
        """
        length, prompt = min(self.window, evaluator.n_ctx), self.prompt_tokens
        windows = windows_of(evaluator.tokenize, documents, length, self.tokens, prompt)
        scored = sum(window.n_scored for window in windows)
        if scored < LEAST_TOKENS:
            after = f" after prompts of {prompt} tokens" if prompt else ""
            remedy = "use more text, or a smaller --prompt-tokens" if prompt else "use more text"
            raise ConfigError(
                f"{self.text}: {scored} tokens{after} are too few. The minimum is "
                f"{LEAST_TOKENS}: {remedy}"
            )
        return windows

    def check(self) -> None:
        """Raise ConfigError if options contradict each other or are out of range."""
        if self.text is None and self.choices is None:
            raise ConfigError("there is nothing to evaluate: give --text FILE or --choices FILE")
        if self.kl and self.text is None:
            raise ConfigError("--kl needs a text: give --text FILE")
        if self.kl_from is not None and not self.kl:
            raise ConfigError("--kl-from has no effect without --kl: add --kl, or remove --kl-from")
        if self.window < LEAST_WINDOW:
            raise ConfigError(f"--window must be at least {LEAST_WINDOW}, not {self.window}")
        if self.prompt_tokens is not None and self.prefill:
            raise ConfigError("--prefill reads all tokens as prompts: remove --prompt-tokens")
        if (self.prompt_tokens or 0) >= self.window:
            raise ConfigError(
                f"--prompt-tokens {self.prompt_tokens} must be smaller than --window "
                f"{self.window}: use a smaller --prompt-tokens, or a larger --window"
            )


def eval_config(config: Config, options: EvalOptions) -> Config:
    """Return a copy of `config` with the settings that an evaluation needs.

    The logits of all tokens are computed. Each expert is computed in exactly the precision that the
    policy chooses. With `options.reuse`, an expert that is in memory in a higher precision may be
    used in that precision instead. The number of threads is fixed, so that it does not depend on
    the machine's load.
    """
    return config.with_changes(
        threads=config.n_threads,
        logits_all=True,
        ubatch=min(config.ubatch or SIZES[0], options.window),
        # Questions need at least LEAST_CONTEXT tokens, because they may be longer than a window of
        # the text.
        ctx=max(config.ctx or LEAST_CONTEXT * (options.choices is not None), options.window),
        exact_tiers=not options.reuse,
    )


def best_config(config: Config, best: str) -> Config:
    """Return the config of the reference model, which an evaluation compares with its model.

    The reference model is the same model with all experts in the precision `best`. Its KV cache has
    the default type. It has the memory cap of `config`, but no separate cap on its cache of
    experts.
    """
    return config.compared(
        policy=BASELINE,
        high_tier=best,
        low=None,
        low_tier=None,
        renormalize=False,
        expert_ram=None,
        kv=DEFAULT_KV,
    )


def evaluate(config: Config, options: EvalOptions, report: Progress) -> dict[str, Any]:
    """Evaluate a model on a text and on questions. Returns a dict for JSON and for `render`.

    `report` is called with the progress. Raises MoeEdgeError if the text, the questions or the
    settings cannot be used.
    """
    options.check()
    documents = read_documents(options.text, options.text_tokens) if options.text else []
    questions = read_questions(options.choices) if options.choices else []
    config = eval_config(config, options)
    with ExpertModel.open(config.model) as model:
        best = model.tiers[model.tier_index(options.kl_from) if options.kl_from else 0].name

    with ExitStack() as stack:
        against = None
        if options.kl:
            # Free the reference model before the evaluated model is loaded, because memory may not
            # hold both.
            with (
                Runtime.open(best_config(config, best), report) as runtime,
                runtime.evaluator() as evaluator,
            ):
                windows = options.windows(evaluator, documents)
                progress = partial(report, "Reading with the best tier")
                against = stack.enter_context(
                    read_reference(evaluator, windows, options.prefill, progress)
                )
        runtime = stack.enter_context(Runtime.open(config, report))
        evaluator = stack.enter_context(runtime.evaluator())
        inside = evaluator.inside
        windows = options.windows(evaluator, documents) if documents else []
        shadow = None
        if inside.managed and inside.policy.wants.by_residency and not options.reuse:
            shadow = stack.enter_context(
                VirtualStore(evaluator, options.bandwidth, options.latency_us, options.compute_ms)
            )
        result: dict[str, Any] = {
            "model": config.model.name,
            "mode": runtime.mode,
            "prompt_tokens": options.prompt_tokens,
            "form": "prefill" if options.prefill else "decode",
            "window": min(options.window, evaluator.n_ctx),
            "exact_tiers": inside.managed and not options.reuse,
        }
        phase = Phase.PREFILL if options.prefill else Phase.DECODE
        losses = None
        if inside.managed:
            # From here on, estimate the quality loss relative to the best tier.
            estimate = inside.losses.estimate(evaluator.plan.tier_names, best)
            losses = LossMeter(estimate, evaluator.config.exact_tiers) if estimate else None
            inside.driver.meter = losses
        count = shadow.stats if shadow else partial(counters, evaluator)
        before = count()
        judge = Judge(evaluator, options.prefill)
        if windows:
            scores = score_text(
                judge, windows, against=against, progress=lambda done: report("Reading", done)
            )
            result["text"] = text_report(scores, best)
        if questions:
            choices = score_choices(judge, questions, lambda done: report("Asking", done))
            result["choices"] = {
                "questions": len(questions),
                "acc": pair(choices.acc),
                "acc_norm": pair(choices.acc_norm),
                "right": choices.right.tolist(),
                "right_norm": choices.right_norm.tolist(),
            }
        result["usage"] = usage_between(before, count(), phase, losses)
        if shadow is not None:
            result["virtual"] = shadow.as_dict()
    return result


def read_reference(
    evaluator: Evaluator, windows: list[Window], prefill: bool, progress: Callable[[float], None]
) -> Reference:
    """Read the windows of a text with the reference model, and return its log-probabilities.

    With `prefill`, all tokens are read as prompts. The caller closes the result.
    """
    n_vocab = evaluator.eval(windows[0].tokens[:1], 0).shape[-1]
    reference = Reference(sum(window.n_scored for window in windows), n_vocab)
    try:
        score_text(Judge(evaluator, prefill), windows, keep=reference, progress=progress)
    except BaseException:
        reference.close()
        raise
    return reference


def text_report(scores: TextScores, best: str) -> dict[str, Any]:
    """Return the metrics of an evaluated text, such as its perplexity, as a dict for JSON.

    - scores: the scores of the text's tokens. They may include a comparison with a reference model,
      which has all experts in the best precision.
    - best: name of this precision.
    """
    result: dict[str, Any] = {
        "tokens": len(scores.nll),
        "perplexity": pair(scores.perplexity),
        "domains": {name: pair(value) for name, value in scores.by_domain().items()},
    }
    if len(scores.kl):
        result["best_tier"] = best
        result["kl"] = pair(arithmetic.mean(scores.kl))
        result["top1"] = pair(arithmetic.mean(scores.agrees))
    return result


def render(result: dict[str, Any]) -> str:
    """Format the result of an evaluation for a terminal, with one metric per line."""
    decode = result["form"] == "decode"
    lines = [f"{result['model']}, {result['mode']}"]

    def add(label: str, value: str, note: str = "") -> None:
        lines.append(f"{label:16}{value}" + (f"  ({note})" if note else ""))

    if (text := result.get("text")) is not None:
        if "kl" in text:
            add(f"KL from {text['best_tier']}", with_error(text["kl"], 5), "nats per token")
        notes = [
            f"of {text['tokens']} tokens, decoded one at a time"
            if decode
            else f"of {text['tokens']} tokens, computed in batches",
            f"the text was read in windows of at most {result['window']} tokens",
        ]
        if prompt := result["prompt_tokens"]:
            notes.append(
                f"each window of the text begins with a prompt of at least {prompt} tokens"
            )
        add("perplexity", with_error(text["perplexity"]), "; ".join(notes))
        for name, value in text["domains"].items():
            add(f"  {name}", with_error(value))
        if "top1" in text:
            add("same top token", share_with_error(text["top1"]))
    if (choices := result.get("choices")) is not None:
        scores = f"{share_with_error(choices['acc'])}, {share_with_error(choices['acc_norm'])}"
        add("acc, acc_norm", scores, f"{choices['questions']} questions")
    if (usage := result["usage"]) is not None:
        if (lost := usage["kl_estimate"]) is not None:
            estimate = f"{usage['kl_low']:.5f} to {lost:.5f}"
            add("KL estimated", estimate, "nats per token, from the loss table")
        if usage["limit_halved"]:
            note = (
                "the limit on the quality loss was halved, because the text uses other experts "
                "than the calibration text of the loss table"
            )
            percent = 100 * usage["limit_halved"]
            add("limit halved", f"{percent:.0f} % of the tokens", note)
        asked = {key: usage[key] for key in ("high", "low", "skip") if usage[key] is not None}
        shares = ", ".join(f"{100 * part:.1f} % {key}" for key, part in asked.items())
        add("experts asked", shares, "precisions that the policy requested")
        if (virtual := result.get("virtual")) is not None and virtual["tpot_ms_mean"]:
            note = (
                f"simulated: the disk reads {format_size(virtual['bandwidth'])}/s with a "
                f"latency of {virtual['latency_us']} us, and computing a token takes "
                f"{virtual['compute_ms']:.2f} ms"
            )
            add("time per token", f"{virtual['tpot_ms_mean']:.2f} ms", note)
        if usage["computed_low"] is not None:
            how = (
                "each expert was computed in the precision that the policy chose"
                if result["exact_tiers"]
                else "if an expert was in memory in a higher precision than the policy chose, the "
                "higher precision was used"
            )
            add("computed low", f"{100 * usage['computed_low']:.1f} % of the expert matrices", how)
        reads = format_size(usage["bytes_read"])
        if usage["hit_rate"] is not None:
            reads += f"; {100 * usage['hit_rate']:.1f} % of the requested experts were in memory"
        add("read", reads)
    return "\n".join(lines)


def with_error(pair: Sequence[float | None], digits: int = 3) -> str:
    """Format a value and its standard error, for example "12.345 +- 0.210"."""
    value, error = pair
    shown = "?" if value is None else f"{value:.{digits}f}"
    return shown if error is None else f"{shown} +- {error:.{digits}f}"


def share_with_error(pair: Sequence[float | None], digits: int = 1) -> str:
    """Format a fraction and its standard error in percent."""
    percent = [None if x is None else 100 * x for x in pair]
    return f"{with_error(percent, digits)} %"
