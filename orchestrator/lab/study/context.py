"""Figures 2 to 4 of the near-data paper: what a prompt says of the experts that its answer uses,
beside what other texts say."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from gguf_tools.experts import ExpertModel
from gguf_tools.experts.hparams import SIGMOID, SOFTMAX
from gguf_tools.process import default_threads
from orchestrator.allocation.placement import PlacementSettings, importance
from orchestrator.allocation.pools import shares
from orchestrator.errors import ConfigError
from orchestrator.lab.eval.text import Window
from orchestrator.lab.study import plot
from orchestrator.lab.study.activations import (
    CHOSEN,
    ROUTER_INPUT,
    ActivationRecorder,
    Activations,
    applied_gates,
)
from orchestrator.lab.study.similarity import dense, top
from orchestrator.lab.study.study import Study
from orchestrator.lab.study.subject import Subject
from orchestrator.lab.table import Column, Row, Table, fixed, percent

# A window gives nothing to compare with fewer tokens in its prompt or in its answer.
LEAST = 8

# P~ and S of section 4.1: Figure 4 is of P, and experts are placed by S.
COUNTS, OWN = "own prompt, P", "own prompt, S"
RIGHT, WRONG, ALIKE, ORACLE = "others", "other domains", "uniform", "answer"
# What is looked at by layer.
BY_LAYER = (COUNTS, OWN, RIGHT, ALIKE)
USUAL_PRIOR = int(PlacementSettings().prior_tokens)


@dataclass(frozen=True, slots=True)
class Usage:
    """What one window used, [n_layers, n_expert] each: counts and gate sums of its prompt, counts
    of its answer. n_prompt, n_answer: their tokens."""

    domain: str
    n_prompt: int
    n_answer: int
    counts: np.ndarray
    gates: np.ndarray
    answer: np.ndarray

    @property
    def all(self) -> np.ndarray:
        """Counts of both."""
        both: np.ndarray = self.counts + self.answer
        return both


def captured(scores: np.ndarray, used: np.ndarray, n_hot: int) -> float:
    """Uses [n_layers, n_expert] of the n_hot experts of each layer with the largest scores."""
    hot = np.argsort(-scores, axis=1, kind="stable")[:, :n_hot]
    return float(np.take_along_axis(used, hot, axis=1).sum())


def cosines(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Cosine [n_layers] of the rows of two arrays [n_layers, n_expert]."""
    lengths = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    found: np.ndarray = (a * b).sum(axis=1) / np.where(lengths > 0, lengths, 1)
    return found


def choices(usages: Sequence[Usage], at: int, k: int) -> dict[str, np.ndarray | None]:
    """What each way of choosing says of one window's experts, scores [n_layers, n_expert]; None
    where there is no text to choose by. Others: all other windows of the same domain; those of
    other domains are the wrong profile."""
    own = usages[at]
    rest = [each for index, each in enumerate(usages) if index != at]
    right = _mean([each for each in rest if each.domain == own.domain])
    wrong = _mean([each for each in rest if each.domain != own.domain])
    paper = PlacementSettings(prior_tokens=0.0)
    nothing = np.zeros(own.counts.shape)
    found = {
        COUNTS: shares(own.counts),
        OWN: importance(own.counts, own.gates, nothing, paper, k),
        RIGHT: right,
        WRONG: wrong,
    }
    for name, usual in ((RIGHT, right), (WRONG, wrong)):
        found[blend(name)] = (
            None
            if usual is None
            else importance(own.counts, own.gates, usual, PlacementSettings(), k)
        )
    return found | {ALIKE: shares(nothing), ORACLE: own.answer.astype(np.float64)}


def blend(profile: str) -> str:
    """The name of the own prompt with a profile that counts as so many tokens."""
    return f"prompt + {USUAL_PRIOR} of {profile}"


def _mean(usages: Sequence[Usage]) -> np.ndarray | None:
    if not usages:
        return None
    mean: np.ndarray = np.mean([shares(each.all) for each in usages], axis=0)
    return mean


@dataclass(slots=True)
class Found:
    """rows: each way of choosing, by domain; layers: by layer."""

    subject: Subject
    n_windows: int
    n_hot: int
    n_expert: int
    rows: list[Row]
    layers: list[Row]


class PromptContext(Study[Found]):
    """How well a prompt says what its answer needs."""

    name = "context"

    def measure(self, on: Subject) -> Found:
        """Reads the text once with the best tier. A record's context is the prompt; of a window
        without one, its first half. The last layer's part of a prompt is predicted from the layer
        before, as the policy does it. Raises ConfigError where no window is long enough."""
        usages = read_usages(on)
        k, n_expert, layers = on.n_expert_used, usages[0].counts.shape[1], on.layer_ids
        n_hot = max(1, n_expert // 4)
        every = [choices(usages, at, k) for at in range(len(usages))]
        return Found(
            on,
            len(usages),
            n_hot,
            n_expert,
            list(_by_domain(usages, every, n_hot)),
            list(_by_layer(usages, every, layers)),
        )

    def tables(self, found: Found) -> list[Table]:
        basis = f"{found.n_windows} prompts and answers; {found.subject.basis}"
        hot = f"{found.n_hot} of {found.n_expert} experts"
        mass = percent(1, " %")
        return [
            Table(
                f"Experts of an answer by what is known before (Figure 4): {basis}",
                (
                    Column("text", "domain", left=True),
                    Column("chosen by", "by", left=True),
                    Column("cosine", "cosine", fixed(3)),
                    Column(f"routed to the hot {hot}", "mass", mass),
                ),
                found.rows,
                [
                    "P: how often the prompt used each expert, which is what the paper's Figure 4 "
                    "compares; S: its importance, half of it P, half the gates' sums. Others: the "
                    "other prompts and answers of the same domain; other domains: the wrong "
                    "profile. Prompt + n: S with the profile as n further tokens."
                ],
            ),
            Table(
                f"Layers (Figures 2 and 3): {basis}",
                (
                    Column("layer", "layer"),
                    Column("most used expert", "most", mass),
                    Column("least used", "least", mass),
                    Column("cosine of the answer's use with the prompt's, P", COUNTS, fixed(3)),
                    Column("with the prompt's S", OWN, fixed(3)),
                    Column("with others", RIGHT, fixed(3)),
                    Column("with uniform use", ALIKE, fixed(3)),
                ),
                found.layers,
            ),
        ]

    def draw(self, found: Found, folder: Path) -> list[Path]:
        with plot.figure(folder, self.name) as (axis,):
            x = [row["layer"] for row in found.layers]
            for number, by in enumerate(BY_LAYER):
                y = [row[by] for row in found.layers]
                if None not in y:
                    label = f"{by} (Figure 4 of the paper)" if by == COUNTS else by
                    plot.line(axis, x, y, label, number, dashed=by == OWN)
            axis.set_xlabel("layer")
            axis.set_ylabel("cosine with the answer's use")
            axis.set_title(found.subject.basis, fontsize=9)
            axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.15), ncol=2, fontsize=8)
        return plot.files(folder, self.name)


def prompt_tokens(window: Window) -> int:
    """Tokens of a window that count as its prompt."""
    return window.first if window.first >= LEAST else len(window.tokens) // 2


def with_prompts(windows: Sequence[Window]) -> list[Window]:
    """Those windows that are long enough, each with its prompt. Raises ConfigError without any."""
    found = [
        replace(window, first=n_prompt, prompt=True)
        for window in windows
        if min(n_prompt := prompt_tokens(window), len(window.tokens) - n_prompt) >= LEAST
    ]
    if not found:
        raise ConfigError(
            f"no window has {LEAST} tokens of a prompt and {LEAST} of an answer: give a longer "
            f"text, or a larger --window"
        )
    return found


def read_usages(on: Subject) -> list[Usage]:
    """What each window of with_prompts used, by one pass over the text in the best tier."""
    config, windows = on.config, with_prompts(on.windows)
    found: list[Usage] = []
    with ExpertModel.open(config.model) as model:
        layers = model.layer_ids
        router = dense(model, f"blk.{layers[-1]}.ffn_gate_inp.weight")
        gating = model.hparams.gating
        longest = max(len(window.tokens) for window in windows)
        threads = config.threads or default_threads()
        with ActivationRecorder(config.model, longest, threads, config.ram) as recorder:
            for number, window in enumerate(windows, 1):
                read = recorder.read(window.tokens)
                found.append(usage_of(read, window, layers, router, model.n_expert, gating))
                on.report("Reading", number / len(windows))
    return found


def usage_of(
    found: Activations,
    window: Window,
    layer_ids: Sequence[int],
    router: np.ndarray | None,
    n_expert: int,
    gating: int = SOFTMAX,
) -> Usage:
    """What a window used, from its activations: the experts that the model chose, with the weights
    that it applied.

    router [n_expert, width]: of the last layer, None where its own choices have to do; gating: as
    of Hyperparameters. The router ranks the input of the layer before, as the hook does for the
    policy, and its gates are the scores of all experts.
    """
    n = prompt_tokens(window)
    size = len(layer_ids), n_expert
    counts, gates, answer = np.zeros(size), np.zeros(size), np.zeros(size)
    for layer, il in enumerate(layer_ids):
        chosen = found[CHOSEN, il]
        ids, weights = chosen[:n], applied_gates(found, il)[:n]
        if layer and layer == len(layer_ids) - 1 and router is not None:
            logits = found[ROUTER_INPUT, layer_ids[layer - 1]][:n] @ router.T
            ids = top(logits, chosen.shape[1])
            weights = np.take_along_axis(_scores(logits, gating), ids, axis=1)
        counts[layer] = np.bincount(ids.ravel(), minlength=n_expert)
        gates[layer] = np.bincount(ids.ravel(), weights.ravel(), n_expert)
        answer[layer] = np.bincount(chosen[n:].ravel(), minlength=n_expert)
    return Usage(window.domain, n, len(window.tokens) - n, counts, gates, answer)


def _scores(logits: np.ndarray, gating: int) -> np.ndarray:
    """What a router makes of its logits, float64 [T, n_expert]."""
    if gating == SIGMOID:
        sigmoid: np.ndarray = 1 / (1 + np.exp(-logits.astype(np.float64)))
        return sigmoid
    powers = np.exp(logits.astype(np.float64) - logits.max(axis=1, keepdims=True))
    softmax: np.ndarray = powers / powers.sum(axis=1, keepdims=True)
    return softmax


_Every = Sequence[dict[str, np.ndarray | None]]


def _share(
    usages: Sequence[Usage], every: _Every, by: str, n_hot: int, where: Callable[[Usage], bool]
) -> tuple[float, float] | None:
    """(cosine, captured share) of one way of choosing over the windows of which `where` is true:
    the mean, and the share of all their routed experts; None where it says nothing of them."""
    cosine, caught, asked = [], 0.0, 0.0
    for usage, known in zip(usages, every, strict=True):
        scores = known[by]
        if not where(usage) or scores is None:
            continue
        cosine.append(cosines(scores, usage.answer).mean())
        asked += usage.answer.sum()
        # What is alike in all experts captures the share of experts that are hot.
        alike = n_hot / scores.shape[1]
        caught += (
            alike * usage.answer.sum() if by == ALIKE else captured(scores, usage.answer, n_hot)
        )
    return (float(np.mean(cosine)), caught / asked) if asked else None


def _domains(usages: Sequence[Usage]) -> list[str]:
    return list(dict.fromkeys(usage.domain for usage in usages))


def _by_domain(usages: Sequence[Usage], every: _Every, n_hot: int) -> Iterator[Row]:
    for domain in _domains(usages):

        def inside(each: Usage, of: str = domain) -> bool:
            return each.domain == of

        for by in every[0]:
            found = _share(usages, every, by, n_hot, inside)
            if found is not None:
                yield {"domain": domain, "by": by, "cosine": found[0], "mass": found[1]}


def _by_layer(usages: Sequence[Usage], every: _Every, layer_ids: Sequence[int]) -> Iterator[Row]:
    frequency = shares(np.sum([usage.all for usage in usages], axis=0))
    known: dict[str, np.ndarray | None] = {}
    for by in BY_LAYER:
        found = [
            cosines(scores, usage.answer)
            for usage, each in zip(usages, every, strict=True)
            if (scores := each[by]) is not None
        ]
        known[by] = np.mean(found, axis=0) if found else None
    for layer, il in enumerate(layer_ids):
        row: Row = {
            "layer": il,
            "most": float(frequency[layer].max()),
            "least": float(frequency[layer].min()),
        }
        for by, values in known.items():
            row[by] = None if values is None else float(values[layer])
        yield row
