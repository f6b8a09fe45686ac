"""Figure 6, and what follows from it: how alike neighbouring layers' hidden states are, and how
well the next layer's experts are predicted from the layer before (DyMoE eq. 6)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gguf_tools.experts import ExpertModel
from gguf_tools.process import default_threads
from orchestrator.lab.eval import arithmetic
from orchestrator.lab.eval.arithmetic import pair
from orchestrator.lab.eval.report import share_with_error, with_error
from orchestrator.lab.study import plot
from orchestrator.lab.study.activations import (
    FFN_INPUT,
    OUTPUT,
    ROUTER_INPUT,
    ROUTER_LOGITS,
    ActivationRecorder,
    Activations,
)
from orchestrator.lab.study.study import Study
from orchestrator.lab.study.subject import Subject
from orchestrator.lab.table import Column, Row, Table, percent

# The predictors, by what the next layer's router is applied to.
AS_IT_IS, OFTEN, CHANCE = "x", "most used", "random"
FIRST = "x first"
PREDICTORS = {
    AS_IT_IS: "recall, x as it is",
    FIRST: "its first expert, as it is",
    OFTEN: "recall, most used",
}

_DTYPES = {0: np.float32, 1: np.float16}
_BF16 = 30


def cosine(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Cosine similarity [T] of the rows of two arrays [T, width]."""
    lengths = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    similarity: np.ndarray = (a.astype(np.float64) * b).sum(axis=1) / lengths
    return similarity


def top(logits: np.ndarray, k: int) -> np.ndarray:
    """The k best of each row [T, n], best first: int64 [T, k]."""
    return np.argsort(-logits, axis=1, kind="stable")[:, :k]


def recall(predicted: np.ndarray, actual: np.ndarray) -> np.ndarray:
    """Share [T] of each row's actual entries [T, k] that are among its predicted ones [T, p]."""
    share: np.ndarray = (actual[:, :, None] == predicted[:, None, :]).any(axis=2).mean(axis=1)
    return share


def dense(model: ExpertModel, name: str) -> np.ndarray | None:
    """A tensor as float32 [rows, row length]; None where it is absent or quantized."""
    for part in model.parts:
        info = part.tensors.get(name)
        if info is None:
            continue
        raw, kind = part.array(name), int(info.type)
        if kind == _BF16:
            values = (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        elif kind in _DTYPES:
            values = raw.view(_DTYPES[kind]).astype(np.float32)
        else:
            return None
        return values.reshape(-1, info.shape[0])
    return None


@dataclass(slots=True)
class Alike:
    """What came of it, a row for each MoE layer but the first: similarity with the layer before,
    and the recall of each predictor. chance: the recall of experts chosen at random."""

    subject: Subject
    layer_ids: list[int]
    chance: float
    alike: list[Row]
    ahead: list[Row]

    @staticmethod
    def known(rows: list[Row], name: str) -> list[float]:
        """The values of the layers that have one."""
        return [row[name][0] or 0.0 for row in rows if row[name] is not None]


class Similarity(Study[Alike]):
    """How well a layer says what the next one needs."""

    name = "similarity"

    def measure(self, on: Subject) -> Alike:
        """Reads the text once with the best tier. Experts are ranked by the router's logits; a
        model's selection biases and groups are left out."""
        values: dict[tuple[str, int], list[np.ndarray]] = defaultdict(list)
        config = on.config
        with ExpertModel.open(config.model) as model:
            routers = [dense(model, f"blk.{il}.ffn_gate_inp.weight") for il in model.layer_ids]
            k = model.n_expert_used
            longest = max(len(window.tokens) for window in on.windows)
            threads = config.threads or default_threads()
            counts = np.zeros((len(model.layer_ids), model.n_expert), np.int64)
            with ActivationRecorder(config.model, longest, threads, config.ram) as recorder:
                reads = []
                for number, window in enumerate(on.windows, 1):
                    found = recorder.read(window.tokens)
                    reads.append(_measure(found, model.layer_ids, routers, k, values, counts))
                    on.report("Reading", number / len(on.windows))
        for layer in range(1, len(model.layer_ids)):
            often = top(counts[layer][None].astype(float), k)
            for actual in (each[layer] for each in reads):
                values[OFTEN, layer].append(recall(np.repeat(often, len(actual), 0), actual))
        joined = {key: np.concatenate(parts) for key, parts in values.items()}
        return _rows(on, joined, model.layer_ids, k / model.n_expert)

    def tables(self, found: Alike) -> list[Table]:
        basis = found.subject.basis
        note = (
            "x: the router's input of the layer before, under the next layer's router. Most used: "
            "always the experts that this text uses most in that layer."
        )
        means = {name: found.known(found.ahead, name) for name in PREDICTORS}
        overall = {
            name: [float(np.mean(each)), None] if each else None for name, each in means.items()
        }
        return [
            Table(
                f"Hidden state of neighbouring layers (Figure 6): {basis}",
                (
                    Column("layers", "layers"),
                    Column("cosine behind the layer (l_out)", OUTPUT, with_error),
                    Column("cosine before the experts (ffn_inp)", FFN_INPUT, with_error),
                ),
                found.alike,
            ),
            Table(
                f"Experts of a layer predicted from the one before (eq. 6): {basis}",
                (
                    Column("layer", "layer"),
                    *(Column(text, name, share_with_error) for name, text in PREDICTORS.items()),
                    Column("recall, random", CHANCE, percent(1, " %")),
                ),
                found.ahead,
                [note],
                [{"layer": "mean", CHANCE: found.chance, **overall}],
            ),
        ]

    def draw(self, found: Alike, folder: Path) -> list[Path]:
        x = found.layer_ids[1:]
        with plot.figure(folder, self.name, 2) as (left, right):
            labels = {OUTPUT: "behind the layer", FFN_INPUT: "before the experts"}
            for number, (name, label) in enumerate(labels.items()):
                if y := found.known(found.alike, name):
                    plot.line(left, x, y, label, number)
            labels = {AS_IT_IS: "x as it is", OFTEN: "most used experts"}
            for number, (name, label) in enumerate(labels.items()):
                if y := found.known(found.ahead, name):
                    plot.line(right, x, [100 * each for each in y], label, number)
            plot.level(right, 100 * found.chance, "random")
            left.set_ylabel("cosine similarity with the layer before")
            left.set_ylim(0, 1.02)
            right.set_ylabel("recall of the layer's experts, %")
            right.set_ylim(0, 102)
            for axis in (left, right):
                axis.set_xlabel("layer")
                axis.legend()
            left.set_title(found.subject.basis, fontsize=9)
        return plot.files(folder, self.name)


def _measure(
    found: Activations,
    layer_ids: list[int],
    routers: Sequence[np.ndarray | None],
    k: int,
    values: dict[tuple[str, int], list[np.ndarray]],
    counts: np.ndarray,
) -> list[np.ndarray]:
    """Adds one read's figures to values and counts; returns each MoE layer's experts [T, k]."""
    actual = [top(found[ROUTER_LOGITS, il], k) for il in layer_ids]
    for layer, il in enumerate(layer_ids):
        counts[layer] += np.bincount(actual[layer].ravel(), minlength=counts.shape[1])
        if layer == 0:
            continue
        before = layer_ids[layer - 1]
        for name in (OUTPUT, FFN_INPUT):
            if (name, before) in found and (name, il) in found:
                values[name, layer].append(cosine(found[name, before], found[name, il]))
        router = routers[layer]
        if router is None:
            continue
        predicted = top(found[ROUTER_INPUT, before] @ router.T, k)
        values[AS_IT_IS, layer].append(recall(predicted, actual[layer]))
        values[FIRST, layer].append(recall(predicted, actual[layer][:, :1]))
    return actual


def _rows(
    subject: Subject,
    values: dict[tuple[str, int], np.ndarray],
    layer_ids: list[int],
    chance: float,
) -> Alike:
    """The mean of each figure in each layer; None of one that the model does not give."""

    def means(names: Iterable[str], layer: int) -> Row:
        return {
            name: pair(arithmetic.mean(values[name, layer])) if (name, layer) in values else None
            for name in names
        }

    found = Alike(subject, layer_ids, chance, [], [])
    for layer in range(1, len(layer_ids)):
        between = f"{layer_ids[layer - 1]}-{layer_ids[layer]}"
        found.alike.append({"layers": between} | means((OUTPUT, FFN_INPUT), layer))
        ahead = {"layer": layer_ids[layer], CHANCE: chance}
        found.ahead.append(ahead | means(PREDICTORS, layer))
    return found
