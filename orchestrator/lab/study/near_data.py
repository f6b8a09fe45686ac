"""The near-data paper's Figures 2 and 4, and its Table 3 measured by KL divergence.

They show how well a prompt predicts the experts of its answer, and the loss of low precision for
experts that are not hot. Figure 2 is reproduced in part: the most and the least used expert of each
layer. Figure 3, the change of experts between decode steps, is not reproduced. The paper's Table 3
has the accuracy of Mixtral-8x7B on eight tasks, which this study does not measure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial

import numpy as np

from gguf_tools.experts.hparams import SIGMOID, SOFTMAX
from gguf_tools.units import format_size
from orchestrator.allocation.placement import (
    MAX_WIDTHS,
    PLAIN,
    PlacementSettings,
    best_of_each_width,
    importance,
)
from orchestrator.allocation.pools import nominal_bits, shares
from orchestrator.errors import ConfigError
from orchestrator.lab.eval.arithmetic import cosine
from orchestrator.lab.eval.text import Window
from orchestrator.lab.plotting import Line, Panel, exact
from orchestrator.lab.study.activations import (
    CHOSEN,
    ROUTER_INPUT,
    Activations,
    applied_gates,
    read_windows,
    routers_of,
    top,
)
from orchestrator.lab.study.study import (
    ANSWERS,
    Case,
    Findings,
    ScoredStudy,
    Scores,
    Study,
    above,
    four_digits,
    lines,
    quality,
    share,
)
from orchestrator.lab.study.subject import Part, Settings, Subject, Uses, fixed_tiers, parts_of
from orchestrator.lab.table import Column, Row, Table, fixed
from orchestrator.policy.context import OWN as OWN_SLOTS
from orchestrator.policy.context import SHARED

# Minimum number of tokens of a window's prompt, and of its answer.
LEAST = 8

# The quantities P~ and S of section 4.1. Figure 4 shows P; experts are placed by S.
COUNTS, OWN = "own prompt, P", "own prompt, S"
RIGHT, WRONG, EQUAL_USAGE, ORACLE = "others", "other domains", "uniform", "answer"
USUAL_PRIOR = int(PlacementSettings().prior_tokens)
# The predictions that are shown per layer, with their column titles.
BY_LAYER = {
    COUNTS: "cosine of P",
    OWN: "cosine of S",
    RIGHT: "cosine of others",
    EQUAL_USAGE: "cosine of uniform",
}
# The footnotes of tables of predictions.
_BASIC = (
    "Cosine: cosine similarity of the predicted usage of experts and their usage in the answer.",
    "Prediction P: an expert's share of all expert uses in the prompt.",
    "Prediction S: the mean of two shares of an expert in the prompt: its share of all expert uses "
    "and its share of all gate weights.",
    "Prediction by others: usage in other texts of the same domain (kind of text). Uniform "
    "prediction: equal usage of all experts.",
)
_METHODS = (
    *_BASIC,
    "Prediction by other domains: usage of experts in texts of other domains. Prediction by "
    "answer: the actual usage of experts in the answer.",
    f"Prediction by prompt + {USUAL_PRIOR} of X, where X is others or other domains: the weighted "
    f"mean of prediction S and the prediction by X. S has the number of prompt tokens as its "
    f"weight, and X has the weight {USUAL_PRIOR}.",
)

# Scores [n_layers, n_expert] of a window's experts by prediction method; None if the method has no
# text to predict from.
Choices = dict[str, np.ndarray | None]


@dataclass(frozen=True, slots=True)
class Usage:
    """How often the tokens of one window (piece of text) use each expert.

    The first tokens of the window are its prompt, and the other tokens are the answer. Each array
    is [n_layers, n_expert].

    - counts: number of prompt tokens that are routed to the expert.
    - gates: sum of the expert's gate weights for these tokens.
    - answer: number of answer tokens that are routed to the expert.
    """

    domain: str
    counts: np.ndarray
    gates: np.ndarray
    answer: np.ndarray

    @property
    def all(self) -> np.ndarray:
        """The number of tokens in prompt and answer that are routed to each expert."""
        both: np.ndarray = self.counts + self.answer
        return both


def captured(scores: np.ndarray, used: np.ndarray, n_hot: int) -> float:
    """Return the number of uses of hot experts, summed over the layers.

    The hot experts of a layer are the n_hot experts with the highest scores.

    - scores: the score of each expert, [n_layers, n_expert].
    - used: the number of uses of each expert, [n_layers, n_expert].
    """
    hot = np.argsort(-scores, axis=1, kind="stable")[:, :n_hot]
    return float(np.take_along_axis(used, hot, axis=1).sum())


def choices(usages: Sequence[Usage], at: int, k: int) -> Choices:
    """Predict how often an answer uses each expert, with several methods to choose from.

    Returns a dict with the predicted usage [n_layers, n_expert] by the method's name. The methods
    use the answer's prompt, other texts of the same kind or of other kinds, or both. For
    comparison, the dict also has uniform usage and the actual usage. A value is None if `usages`
    lacks the other texts that the method needs.

    - usages: the expert usage of many prompts and their answers.
    - at: the index of this prompt and answer in `usages`.
    - k: number of experts per token.
    """
    own, uniform = usages[at], np.zeros(usages[at].counts.shape)

    def mean(same: bool) -> np.ndarray | None:
        rest = [
            shares(each.all)
            for each in usages
            if each is not own and (each.domain == own.domain) == same
        ]
        return np.mean(rest, axis=0) if rest else None

    def blended(usual: np.ndarray | None, settings: PlacementSettings) -> np.ndarray | None:
        return None if usual is None else importance(own.counts, own.gates, usual, settings, k)

    right, wrong, usual = mean(True), mean(False), PlacementSettings()
    return {
        COUNTS: shares(own.counts),
        OWN: blended(uniform, PlacementSettings(prior_tokens=0.0)),
        RIGHT: right,
        WRONG: wrong,
        blend(RIGHT): blended(right, usual),
        blend(WRONG): blended(wrong, usual),
        EQUAL_USAGE: shares(uniform),
        ORACLE: own.answer.astype(np.float64),
    }


def blend(profile: str) -> str:
    """Return the name of the method that predicts expert usage from a prompt and from other texts.

    The method blends (mixes) the expert usage of the prompt with the expert usage of the other
    texts. `profile` names the other texts: RIGHT for texts of the prompt's kind, or WRONG for texts
    of other kinds.
    """
    return f"prompt + {USUAL_PRIOR} of {profile}"


class PromptContext(Study):
    """Study of how well a prompt predicts the experts of its answer."""

    def measure(self, on: Subject) -> Findings:
        """Measure how well several methods predict, before an answer begins, which experts it uses.

        Most methods predict from the answer's prompt. Each window (piece of text) that is long
        enough is divided into a prompt and an answer. The text of `on` is read once, in the best
        precision. Returns tables and a plot. Raises ConfigError if no window is long enough.
        """
        usages = read_usages(on)
        n_hot = max(1, on.n_expert // 4)
        every = [choices(usages, at, on.n_expert_used) for at in range(len(usages))]
        by_layer = list(layer_rows(usages, every, on.layer_ids))
        basis = f"{len(usages)} prompts and answers; {on.basis}"
        tables = [
            Table(
                f"How well an answer's experts are predicted before the answer begins (Figure 4 of "
                f"the near-data paper): {basis}",
                (
                    Column("text", "domain", left=True),
                    Column("predicted from", "by", left=True),
                    Column("cosine", "cosine", fixed(3)),
                    Column("uses of hot experts", "mass", share),
                ),
                list(domain_rows(usages, every, n_hot)),
                [
                    *_METHODS,
                    f"Hot experts: the {n_hot} of a layer's {on.n_expert} experts with the highest "
                    f"predicted usage. Their share of the answer's expert uses is shown.",
                ],
            ),
            Table(
                f"Expert usage of each layer, and how well the usage is predicted (part of Figure "
                f"2 of the near-data paper): {basis}",
                (
                    Column("layer", "layer"),
                    Column("most used expert, share of uses", "most", share),
                    Column("least used expert, share of uses", "least", share),
                    *(Column(head, by, fixed(3)) for by, head in BY_LAYER.items()),
                ),
                by_layer,
                [*_BASIC],
            ),
        ]
        drawn = [
            Line(by, on.layer_ids, exact([row[by] for row in by_layer]), dashed=by == OWN)
            for by in BY_LAYER
            if by_layer[0][by] is not None
        ]
        return Findings(
            tables,
            [Panel("layer", "cosine of predicted and actual expert usage", drawn, on.basis)],
        )


def prompt_tokens(window: Window) -> int:
    """Return the number of tokens at the start of a window that count as its prompt.

    These are the tokens before `window.first`, which are not scored. If the window has fewer than
    LEAST (8) such tokens, its first half is the prompt instead.
    """
    return window.first if window.first >= LEAST else len(window.tokens) // 2


def with_prompts(windows: Sequence[Window]) -> list[Window]:
    """Return the windows that are long enough, each with its first tokens marked as a prompt.

    A window is a piece of text. Its prompt is its tokens that are not scored, or its first half
    (see `prompt_tokens`). Its tokens after the prompt are the answer. Prompt and answer need at
    least LEAST tokens each. Raises ConfigError if no window is long enough.
    """
    found = [
        replace(window, first=n_prompt, prompt=True)
        for window in windows
        if min(n_prompt := prompt_tokens(window), len(window.tokens) - n_prompt) >= LEAST
    ]
    if not found:
        raise ConfigError(
            f"all windows (pieces of the text) are too short: a window needs a prompt and an "
            f"answer of at least {LEAST} tokens each. Use a longer text or a larger --window"
        )
    return found


def read_usages(on: Subject) -> list[Usage]:
    """Read the text, and return how often the prompt and the answer of each window use each expert.

    A window is a piece of the text. Its first tokens are the prompt, and the other tokens are the
    answer. Windows that are too short for this division are left out. The text is read once, in the
    best precision. Raises ConfigError if no window is long enough.
    """
    router = routers_of(on)[-1]
    with on.model() as model:
        gating = model.hparams.gating
    return [
        usage_of(found, window, on.layer_ids, router, on.n_expert, gating)
        for window, found in read_windows(on, with_prompts(on.windows))
    ]


def usage_of(
    found: Activations,
    window: Window,
    layer_ids: Sequence[int],
    router: np.ndarray | None,
    n_expert: int,
    gating: int = SOFTMAX,
) -> Usage:
    """Count how often the prompt and the answer in one window (piece of text) use each expert.

    - found: activations of the window.
    - layer_ids: layer number of each MoE layer.
    - router: router matrix of the last layer, float32 [n_expert, width], or None.
    - gating: the function for the router's logits, SOFTMAX or SIGMOID.

    If `router` is given, the prompt's counts in the last layer are of predicted experts: `router`
    is applied to the router input of the layer before. The policy `context` predicts them in the
    same way, because llama.cpp computes the last layer for only one token of a prompt.
    """
    n = prompt_tokens(window)
    counts, gates, answer = np.zeros((3, len(layer_ids), n_expert))
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
    return Usage(window.domain, counts, gates, answer)


def _scores(logits: np.ndarray, gating: int) -> np.ndarray:
    """Return a router's scores from its logits, float64 [T, n_expert]."""
    if gating == SIGMOID:
        sigmoid: np.ndarray = 1 / (1 + np.exp(-logits.astype(np.float64)))
        return sigmoid
    powers = np.exp(logits.astype(np.float64) - logits.max(axis=1, keepdims=True))
    softmax: np.ndarray = powers / powers.sum(axis=1, keepdims=True)
    return softmax


def domain_rows(usages: Sequence[Usage], every: Sequence[Choices], n_hot: int) -> Iterator[Row]:
    """Yield table rows that compare methods to predict the usage of experts in answers.

    - usages: the actual usage in each prompt and its answer.
    - every: for each answer, a dict with the predicted usage by method.
    - n_hot: number of hot experts per layer. The hot experts are those with the highest predicted
      usage.

    There is one row for each method and domain (kind of text), with two metrics:

    - "cosine": mean cosine similarity of predicted and actual usage.
    - "mass": fraction of the expert uses in the answers that are uses of hot experts.
    """
    for domain in dict.fromkeys(usage.domain for usage in usages):
        for by in every[0]:
            mine = [
                (scores, usage.answer)
                for usage, known in zip(usages, every, strict=True)
                if usage.domain == domain and (scores := known[by]) is not None
            ]
            asked = sum(float(answer.sum()) for _, answer in mine)
            caught = sum(captured(scores, answer, n_hot) for scores, answer in mine)
            # With equal scores, the hot experts are random.
            if by == EQUAL_USAGE:
                caught = asked * n_hot / usages[0].counts.shape[1]
            if asked:
                mean = float(np.mean([cosine(*each).mean() for each in mine]))
                yield {"domain": domain, "by": by, "cosine": mean, "mass": caught / asked}


def layer_rows(
    usages: Sequence[Usage], every: Sequence[Choices], layer_ids: Sequence[int]
) -> Iterator[Row]:
    """Yield a table row for each layer, with its expert usage and how well it is predicted.

    A row has the usage of the most and of the least used expert, as fractions of all uses. For each
    prediction method, it has the mean cosine similarity of predicted and actual usage.

    - usages: the actual usage in each prompt and its answer.
    - every: for each answer, the predicted usage by method.
    - layer_ids: layer number of each MoE layer.
    """
    frequency = shares(np.sum([usage.all for usage in usages], axis=0))
    known = {
        by: [
            cosine(scores, usage.answer)
            for usage, each in zip(usages, every, strict=True)
            if (scores := each[by]) is not None
        ]
        for by in BY_LAYER
    }
    for layer, il in enumerate(layer_ids):
        row: Row = {"layer": il, "most": float(frequency[layer].max())}
        row["least"] = float(frequency[layer].min())
        for by, values in known.items():
            row[by] = float(np.mean([each[layer] for each in values])) if values else None
        yield row


BITS = (3.0, 2.0)
HOT = (0.25, 0.5)  # fractions of a layer's experts; the paper uses one half
PAPER = (
    "hot experts chosen by the prompt, precisions of the others chosen by quality loss (near-data "
    "paper)"
)
OURS = "prompt and usage profile"
STATIC, RANDOM = "usage profile alone", "random"
UNIFORM = "hot experts chosen by prompt and usage profile, all others in the same precision"
FIXED = (
    "precisions chosen by prompt and usage profile, with a fixed number of experts in each "
    "precision"
)
JUDGED, ASKED = "judged", "asked"
_SEED = 1


# The near tiers of a file by their distinct nominal bits, the widest first.
NearTiers = dict[float, str]


def near_tiers(tiers: Sequence[str]) -> NearTiers:
    """Return the precisions (tiers) of a file that a layer's less used experts can have.

    The result maps the number of bits per weight to the name of a tier. If several tiers have the
    same number of bits, the best of them is returned. The best tier of the file is not included,
    because the most used experts have it.

    `tiers` are the names of all tiers of the file, best first.
    """
    return {nominal_bits(name): name for name in best_of_each_width(tiers[1:])[-MAX_WIDTHS:]}


class NearBits(ScoredStudy):
    """Study of the quality loss if only the most used experts of a layer have the best precision.

    All other experts have few bits per weight. Several ways to choose their bits are compared, such
    as the same number for all, or more bits for experts that a prompt uses more often.

    For each kind of text, expert usage is measured on the first half of the text, and quality on
    the second half.
    """

    def scored(self, on: Subject) -> Subject:
        return on.on(parts_of(on.on(with_prompts(on.windows)))[0].second)

    def cases(self, on: Subject) -> list[Case]:
        on = on.on(with_prompts(on.windows))
        near, (everything, *domains) = near_tiers(on.tiers), parts_of(on)
        bits, asked = _bits(on, near), on.config.given("hot_experts")
        hot = [asked] if asked else sorted({max(1, round(share * on.n_expert)) for share in HOT})
        # Reads all texts once, at the first call.
        usages = cache(lambda: dict(zip(map(id, on.windows), read_usages(on), strict=True)))
        listed = []
        for part in domains or [everything]:
            listed.append(_alone(on, on.best, None, part, JUDGED))
            known = cache(partial(_profile, usages, part))
            for n_hot in hot:
                for width in bits:
                    name = near.get(width)
                    if name is not None:
                        listed.append(_alone(on, name, width, part, JUDGED))
                    listed += _cases(on, near, width, n_hot, part, known, JUDGED)
        if on.questions:
            whole = self.scored(on).windows[:1]
            part = Part("", np.arange(whole[0].n_scored), [], whole)
            known = cache(partial(_profile, usages, everything))
            listed.append(_alone(on, on.best, None, part, ASKED))
            n_hot = asked or max(1, on.n_expert // 2)
            for width in bits:
                listed += _cases(on, near, width, n_hot, part, known, ASKED)
        return listed

    def show(self, found: Scores, on: Subject) -> Findings:
        scored, rows = found.on, []
        # Baselines: everything in the best tier by domain, and uniform bits by _place.
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
            Column("choice of precisions", "configuration", left=True),
        )
        columns = (
            *head,
            Column("slots", "slots", format_size),
            *quality(on.best, on.best),
            Column("KL difference from equal precisions", "above", four_digits),
        )
        notes = [
            f"The column Hot has the number of experts per layer in {on.best}. The column Bits has "
            f"the mean bits per weight of the other experts.",
            "Each domain (kind of text) has two halves. Quality is measured on the second half. "
            "The usage profile is the expert usage in the first half.",
            f"{STATIC.capitalize()} and {RANDOM}: precisions are chosen once, before the first "
            f"prompt. In all other rows, each prompt can change them.",
            "Slots: total size of the memory slots that hold the experts. A slot for several "
            "precisions has the size of the largest.",
            "KL difference from equal precisions: the row's KL minus the KL of the row in which "
            "all experts that are not hot have the same precision. The two rows have the same "
            "text, and equal values in the columns Hot and Bits. Below 0, the row is better.",
        ]
        tables = [
            Table(
                f"Quality with few bits for the experts that are not hot (Table 3 of the near-data "
                f"paper): {scored.basis}",
                columns,
                rows,
                notes,
            )
        ]
        if asked := found.of(ASKED):
            title = f"Multiple choice (Table 3 of the near-data paper): {scored.basis}"
            answers = found.rows(asked, asked[0][1])
            tables.append(Table(title, (*head[1:], *ANSWERS), answers))
        panels = []
        for name in bases:
            drawn = lines(
                [row for row in rows if row["domain"] == name and row["hot"]],
                "bits",
                "kl",
                lambda row: f"{row['configuration']}, {row['hot']} hot",
            )
            x, y = (
                "mean bits per weight of the experts that are not hot",
                f"KL from {on.best}, nats",
            )
            panels.append(Panel(x, y, drawn, f"{name}: {scored.basis}"))
        return Findings(tables, panels)


def _place(case: Case) -> tuple[str, int | None, float | None]:
    return case.row["domain"], case.row["hot"], case.row["bits"]


def _bits(on: Subject, near: NearTiers) -> list[float]:
    """Return the mean nominal bits to measure: those of the options, or the paper's.

    Values below the file's lowest tier are left out. Raises ConfigError if none is left.
    """
    asked = on.config.given("near_bits")
    wanted = BITS if asked is None else (float(asked),)
    found = [bits for bits in wanted if bits >= min(near)]
    if not found:
        raise ConfigError(
            f"{on.name} has no precision of at most {max(wanted):g} bits per weight. The lowest is "
            f"{near[min(near)]}: pack the model with a lower precision"
        )
    return found


def _profile(usages: Callable[[], dict[int, Usage]], part: Part) -> np.ndarray:
    """Return the mean usage of a part's first half. `usages` maps a window's id to its usage."""
    mean: np.ndarray = np.mean([shares(usages()[id(each)].all) for each in part.first], axis=0)
    return mean


def _alone(on: Subject, tier: str, bits: float | None, part: Part, group: str) -> Case:
    """Return the case with all experts in one tier."""
    row: Row = {"domain": part.name, "bits": bits, "hot": None}
    ask = group == ASKED
    return Case(f"all in {tier}", on.uniform(tier), group, row, part, ask=ask)


def _cases(
    on: Subject, near: NearTiers, bits: float, n_hot: int, part: Part, known: Uses, group: str
) -> list[Case]:
    """Return the compared cases for a number of hot experts and a number of bits.

    For questions, each of which has its own prompt, only the methods that place experts by the
    prompt are included.
    """
    memory = {"policy": "context", "high_tier": None, "low_tier": None, "ram": None}
    usual = {**memory, "expert_ram": None, "hot_experts": n_hot, "near_bits": bits}
    by_prompt = {**usual, "near_slots": SHARED}
    by_chance = partial(on.random_uses, _SEED)
    ways: list[tuple[str, Settings, Uses, bool]] = [
        (PAPER, {**by_prompt, "near_weights": PLAIN, "prior_tokens": 0.0}, known, False),
        (OURS, by_prompt, known, False),
        (FIXED, {**usual, "near_slots": OWN_SLOTS}, known, False),
        (STATIC, by_prompt, known, True),
        (RANDOM, by_prompt, by_chance, True),
    ]
    name = near.get(bits)
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
            decider=fixed_tiers if stays else None,
            ask=group == ASKED,
        )
        for label, settings, used, stays in ways
        if not (stays and group == ASKED)
    ]
