"""Compare the ways to handle an expert that is not in memory: wait, skip, or substitute it.

`python -m models.real.substitution MODEL --data DIR --out FILE.json [--text NAME] [--resident N]`

In each layer, the N experts that a fitting text uses most are resident. A chosen expert that is not
resident is missing. The first choice of a token is always waited for. Of the other missing experts,
those with the smallest weights are left out, at several levels. The result for each way is the KL
divergence from the same model with all experts, in nats per token.

Every decision depends on one token and on the fixed residents, never on other tokens of its batch.
So reading a window in one step gives the same as decoding it (`--stepped` does that). Finished
windows are kept in FILE.json, and an interrupted run continues from there.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gguf_tools.experts import ExpertModel
from gguf_tools.file.reader import GGUFFile
from gguf_tools.process import compute_threads
from gguf_tools.quantize.ggml import load_ggml
from models.real.activations import Floats
from models.real.command import reporting_errors
from models.real.text import FIT, JUDGED, fit_windows, judged_documents, judged_windows
from orchestrator.cache.files import write_whole
from orchestrator.errors import ConfigError
from orchestrator.lab.observe import Node, Observer, observe

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

SKIP, SKIP_NORMED = "skip", "skip, renormalised"
NORMED, OWN, PAIR = "substitute, renormalised", "substitute, own gate", "substitute, best factor"
OPTIMUM = "substitute, optimum of the token"
BIAS = "bias before top-k"
WAYS = (SKIP, SKIP_NORMED, NORMED, OWN, PAIR, OPTIMUM)
# Levels to measure: shares of the missing experts that are left out, and biases for resident
# experts in standard deviations of a logit.
LEVELS, BIASES = (0.5, 1.0), (0.25, 0.5, 1.0)
_NODE = re.compile(r"ffn_moe_(logits|topk|weights_norm|weights_scaled)-(\d+)")


@dataclass(frozen=True, slots=True)
class Layer:
    """Properties of one MoE layer with E experts, measured on a text.

    - resident: bool [E], the experts that are in memory. The other experts are called missing.
    - factors [E, E]: if expert f replaces expert e, f gets e's gate weight times factors[e, f].
    - correlations [E, E]: squared correlations of the outputs of two experts.
    - scores: gate weights that tokens gave to missing experts, without each token's first expert.
    - spread: mean standard deviation of a token's router logits.
    """

    resident: Bools
    factors: Floats
    correlations: Floats
    scores: Floats
    spread: float


@dataclass(frozen=True, slots=True)
class Choice:
    """A configuration to measure: a way to replace or skip missing experts, and its level.

    For BIAS, the level is the bias of the experts in memory, in standard deviations of a logit. For
    all other ways, the level is the share of missing experts that are replaced or skipped. If `way`
    is empty, all experts are used.
    """

    way: str = ""
    level: float = 0.0

    @property
    def label(self) -> str:
        return f"{self.way} {self.level:g}" if self.way else "whole"


def choices(levels: Sequence[float], biases: Sequence[float]) -> list[Choice]:
    """Return all configurations to measure: each way to replace experts at each level.

    Configurations with a bias for resident experts follow.
    """
    ways = [Choice(way, level) for way in WAYS for level in levels]
    return ways + [Choice(BIAS, level) for level in biases]


CHOICES = choices(LEVELS, BIASES)


class Experts:
    """Computes the outputs of all experts of a model in NumPy."""

    def __init__(self, path: Path) -> None:
        with ExpertModel.open(path) as model:
            self.layer_ids = list(model.layer_ids)
            self.n_expert, self.n_used = model.n_expert, model.n_expert_used
        file, ggml = GGUFFile.open(path), load_ggml()
        arch = file.metadata["general.architecture"]
        self.scale = float(file.metadata.get(f"{arch}.expert_weights_scale", 0.0)) or 1.0
        self._matrices: list[list[Floats]] = []
        for layer in self.layer_ids:
            found = []
            for kind in ("gate", "up", "down"):
                info = file.tensors[f"blk.{layer}.ffn_{kind}_exps.weight"]
                rows = ggml.dequantize(info.type, file.array(info.name), info.shape[0])
                found.append(rows.reshape(self.n_expert, info.shape[1], info.shape[0]))
            self._matrices.append(found)
        file.close()

    def outputs(self, layer: int, x: Floats) -> Floats:
        """Return the outputs of all experts of a layer for inputs x [T, n_embd].

        They are float32 [T, E, n_embd].
        """
        gate, up, down = self._matrices[layer]
        n, size = gate.shape[0], gate.shape[1]
        g = x @ gate.reshape(n * size, -1).T
        hidden = (g / (1 + np.exp(-g))) * (x @ up.reshape(n * size, -1).T)
        per_expert = hidden.reshape(len(x), n, size).transpose(1, 0, 2)
        found: Floats = np.matmul(per_expert, down.transpose(0, 2, 1)).transpose(1, 0, 2)
        return found


def weights_of(logits: Floats, ids: Ints, scale: float) -> npt.NDArray[np.float64]:
    """Return the gate weights [T, k] of the chosen experts `ids` [T, k].

    They are a softmax of the logits over these experts, times `scale`.
    """
    chosen = np.take_along_axis(logits.astype(np.float64), ids, axis=1)
    each = np.exp(chosen - chosen.max(axis=1, keepdims=True))
    found: npt.NDArray[np.float64] = scale * each / each.sum(axis=1, keepdims=True)
    return found


def left_out(weights: Floats, missing: Bools, layer: Layer, level: float) -> Bools:
    """Return which of each token's k experts are left out, bool [T, k].

    A missing expert is left out if its weight is small: at most the quantile `level` of
    layer.scores. With level 1, every missing expert is left out. The first expert of a token,
    which has the largest weight, is never left out.
    """
    found: Bools = missing.copy()
    if level < 1 and len(layer.scores):
        found &= weights <= np.quantile(layer.scores, level)
    found[:, 0] = False
    return found


def substitutes(order: Ints, ids: Ints, out: Bools, resident: Bools) -> Ints:
    """Return an expert that replaces each expert that is left out, int [T, k], or -1.

    It is the best-ranked resident expert that the token has not chosen. Each expert that is left
    out gets a different one. `order` [T, E] are the experts by rank.
    """
    found = np.full(ids.shape, -1, np.int64)
    for token in np.flatnonzero(out.any(axis=1)):
        free = [f for f in order[token] if resident[f] and f not in ids[token]]
        slots = np.flatnonzero(out[token])
        for slot, f in zip(slots, free, strict=False):
            found[token, slot] = f
    return found


def best_of_token(outputs: Floats, ids: Ints, out: Bools, resident: Bools) -> tuple[Ints, Floats]:
    """Find the best substitute for each expert that is left out, by the experts' outputs.

    Returns the substitutes [T, k], or -1, and the factors of their weights [T, k].

    The loss of replacing expert e by f is |o_e - a o_f|^2, which is least at a = o_e o_f / |o_f|^2.
    The experts of a token choose in turns.
    """
    found, factors = np.full(ids.shape, -1, np.int64), np.zeros(ids.shape, np.float32)
    for token in np.flatnonzero(out.any(axis=1)):
        free = [f for f in np.flatnonzero(resident) if f not in ids[token]]
        products = outputs[token] @ outputs[token].T
        for slot in np.flatnonzero(out[token]):
            if not free:
                break
            e = ids[token, slot]
            gains = [products[e, f] ** 2 / max(products[f, f], 1e-20) for f in free]
            f = free.pop(int(np.argmax(gains)))
            found[token, slot] = f
            factors[token, slot] = products[e, f] / max(products[f, f], 1e-20)
    return found, factors


@dataclass
class Decider:
    """Replaces or skips missing experts while a model is evaluated, as `choice` says.

    waited: number of missing experts that were used nevertheless. missed: number of all missing
        experts.
    """

    experts: Experts
    layers: list[Layer]
    choice: Choice = field(default_factory=Choice)
    waited: int = 0
    missed: int = 0
    _x: Floats | None = None
    _logits: Floats | None = None
    _weights: npt.NDArray[np.float64] | None = None

    def on_topk(self, at: int, ids_view: npt.NDArray[np.int32]) -> None:
        """Replace missing experts in ids_view [T, k], a view of a layer's chosen experts.

        The new gate weights are stored in this object, until the graph node of the weights is
        computed and `seen` can replace them.
        """
        assert self._logits is not None and self._x is not None
        layer, logits, scale = self.layers[at], self._logits, self.experts.scale
        ids = ids_view.astype(np.int64)
        weights = weights_of(logits, ids, scale)
        missing = ~layer.resident[ids]
        self.missed += int(missing.sum())
        way, level = self.choice.way, self.choice.level
        if way == BIAS:
            score = logits + level * layer.spread * layer.resident
            ids = np.argsort(-score, axis=1, kind="stable")[:, : ids.shape[1]]
            self.waited += int((~layer.resident[ids]).sum())
            ids_view[:] = ids
            self._weights = weights_of(logits, ids, scale)
            return
        out = left_out(weights.astype(np.float32), missing, layer, level)
        self.waited += int((missing & ~out).sum())
        kept = np.where(out, 0.0, weights)
        if way in (SKIP, SKIP_NORMED):
            if way == SKIP_NORMED:
                kept *= scale / kept.sum(axis=1, keepdims=True)
            self._weights = kept
            return
        if way == OPTIMUM:
            outputs = self.experts.outputs(at, self._x)
            others, factors = best_of_token(outputs, ids, out, layer.resident)
        else:
            order = np.argsort(-logits, axis=1, kind="stable")
            others = substitutes(order, ids, out, layer.resident)
            factors = layer.factors[ids, others] if way == PAIR else np.ones(ids.shape, np.float32)
        used = others >= 0
        ids = np.where(used, others, ids)
        if way == NORMED:
            # An expert without a substitute is skipped.
            weights = weights_of(logits, ids, scale) * (used | ~out)
            self._weights = weights * scale / weights.sum(axis=1, keepdims=True)
        else:
            self._weights = np.where(used, weights * factors, kept)
        ids_view[:] = ids

    def wanted(self, node: Node) -> bool:
        """Return whether a graph node is part of a router, so that `seen` should receive it."""
        return bool(self.choice.way) and _NODE.fullmatch(node.name) is not None

    def seen(self, node: Node) -> None:
        """Handle a computed node of a router.

        The logits and the input are remembered. The chosen experts and their weights are changed.
        """
        found = _NODE.fullmatch(node.name)
        if found is None:
            return
        at = self.experts.layer_ids.index(int(found[2]))
        if found[1] == "logits":
            self._logits, self._x = node.array()[0, 0], node.source(1).array()[0, 0]
        elif found[1] == "topk":
            self.on_topk(at, node.view()[0, 0])
        elif self._weights is not None:
            scaled = self.experts.scale != 1.0
            if scaled == (found[1] == "weights_scaled"):
                view = node.view()
                view[:] = self._weights.astype(np.float32).reshape(view.shape)


def fit(
    path: Path,
    experts: Experts,
    windows: Sequence[Sequence[int]],
    n_resident: int,
    threads: int | None = None,
) -> list[Layer]:
    """Read a text, and return the properties of each layer's experts.

    n_resident is the number of experts in memory in each layer.
    """
    n, layers = experts.n_expert, len(experts.layer_ids)
    counts = np.zeros((layers, n))
    # Products of the outputs of e and f, summed over tokens that chose e and not f, weighted by the
    # square of e's weight.
    cross, ones, twos = (np.zeros((layers, n, n)) for _ in range(3))
    chosen: list[list[tuple[Ints, Floats]]] = [[] for _ in range(layers)]
    spreads: list[list[float]] = [[] for _ in range(layers)]
    pattern = re.compile(r"ffn_moe_logits-(\d+)")

    def seen(node: Node) -> None:
        found = pattern.fullmatch(node.name)
        if found is None:
            return
        at = experts.layer_ids.index(int(found[1]))
        logits, x = node.array()[0, 0], node.source(1).array()[0, 0]
        ids = np.argsort(-logits, axis=1, kind="stable")[:, : experts.n_used]
        weights = weights_of(logits, ids, experts.scale)
        counts[at] += np.bincount(ids.ravel(), minlength=n)
        chosen[at].append((ids[:, 1:], weights[:, 1:].astype(np.float32)))
        spreads[at].append(float(logits.std(axis=1).mean()))
        outputs = experts.outputs(at, x)
        products = np.matmul(outputs, outputs.transpose(0, 2, 1))
        gates = np.zeros(logits.shape)
        np.put_along_axis(gates, ids, weights, axis=1)
        pairs = (gates**2)[:, :, None] * (gates == 0)[:, None, :]
        lengths = np.einsum("tee->te", products)
        cross[at] += (pairs * products).sum(axis=0)
        ones[at] += (pairs * lengths[:, :, None]).sum(axis=0)
        twos[at] += (pairs * lengths[:, None, :]).sum(axis=0)

    length = max(map(len, windows))
    wanted = pattern.fullmatch
    with observe(
        path, length, compute_threads(threads), lambda node: bool(wanted(node.name)), seen
    ) as reader:
        for window in windows:
            reader.read(window)
    found = []
    for at in range(layers):
        resident = np.zeros(n, bool)
        resident[np.argsort(-counts[at], kind="stable")[:n_resident]] = True
        scores = [weights[~resident[ids]] for ids, weights in chosen[at]]
        found.append(
            Layer(
                resident,
                (cross[at] / np.maximum(twos[at], 1e-20)).astype(np.float32),
                (cross[at] ** 2 / np.maximum(ones[at] * twos[at], 1e-20)).astype(np.float32),
                np.concatenate(scores),
                float(np.mean(spreads[at])),
            )
        )
    return found


def log_softmax(logits: Floats) -> Floats:
    """Return the log-probabilities [n, n_vocab] of logits in single precision.

    This is exact enough here.
    """
    shifted: Floats = logits - logits.max(axis=1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(axis=1, keepdims=True, dtype=np.float64))
    return shifted


def read_stepped(reader: Observer, window: Sequence[int]) -> Floats:
    """Evaluate a window (list of tokens) token by token, and return its logits [n, n_vocab]."""
    context = reader._context
    context.forget_all()
    rows = []
    for position, token in enumerate(window):
        if context.decode([token], position) != 0:
            raise RuntimeError("llama.cpp failed to evaluate a token")
        rows.append(reader.logits(1)[0].copy())
    return np.stack(rows)


def measure(
    path: Path,
    experts: Experts,
    layers: list[Layer],
    windows: Sequence[Sequence[int]],
    known: list[dict[str, Any]],
    seconds: float,
    stepped: bool = False,
    threads: int | None = None,
    asked: Sequence[Choice] = CHOICES,
) -> list[dict[str, Any]]:
    """Measure each configuration of `asked` on a text that is cut into windows.

    Returns one record per window, with sums over its tokens. `known` are the records of an
    interrupted measurement, which continues after them. The measurement stops early after
    `seconds`. With `stepped`, tokens are evaluated one by one.
    """
    decider = Decider(experts, layers)
    started, length = time.monotonic(), max(map(len, windows))
    found = list(known)
    with observe(path, length, compute_threads(threads), decider.wanted, decider.seen) as reader:

        def read(window: Sequence[int]) -> Floats:
            if stepped:
                return log_softmax(read_stepped(reader, window)[:-1])
            reader.read(window)
            return log_softmax(reader.logits(len(window))[:-1])

        for window in windows[len(known) :]:
            if time.monotonic() - started > seconds:
                break
            decider.choice = Choice()
            base = read(window)
            p, target = np.exp(base), (np.arange(len(window) - 1), window[1:])
            record: dict[str, Any] = {"tokens": len(window) - 1, "nll": float(-base[target].sum())}
            for choice in asked:
                decider.choice, decider.waited, decider.missed = choice, 0, 0
                other = read(window)
                record[choice.label] = {
                    "kl": float((p * (base - other)).sum(dtype=np.float64)),
                    "nll": float(-other[target].sum()),
                    "same": int((base.argmax(axis=1) == other.argmax(axis=1)).sum()),
                    "waited": decider.waited / len(window),
                    "missed": decider.missed / len(window),
                }
            found.append(record)
            print(f"\rwindow {len(found)} of {len(windows)}", end="", file=sys.stderr)
    return found


def finished_windows(out: Path, options: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the windows that an interrupted run has saved in a file of results.

    The list is empty if there is no such file. options: the options of this run by name. Raises
    ConfigError if the file has results of other options.
    """
    if not out.exists():
        return []
    saved = json.loads(out.read_text())
    others = [name for name, value in options.items() if saved.get(name) != value]
    if others:
        raise ConfigError(
            f"{out}: has results of another run ({', '.join(others)}): give another --out, or "
            "remove the file"
        )
    windows: list[dict[str, Any]] = saved["windows"]
    return windows


@reporting_errors
def main(argv: list[str] | None = None) -> int:
    """Run the command. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m models.real.substitution", description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--data", type=Path, required=True, help="folder of the text collection")
    parser.add_argument("--out", type=Path, required=True, help="results, as JSON")
    parser.add_argument("--text", choices=list(JUDGED), default="wikitext")
    parser.add_argument("--fit", nargs="+", default=list(FIT), help="texts in `train` to fit on")
    parser.add_argument("--fit-tokens", type=int, default=2048)
    parser.add_argument("--resident", type=int, help="resident experts of a layer [default: half]")
    parser.add_argument("--documents", type=int, default=16)
    parser.add_argument("--window", type=int, default=128, help="tokens of each document")
    parser.add_argument("--levels", type=float, nargs="+", default=LEVELS, help="shares left out")
    parser.add_argument("--biases", type=float, nargs="*", default=BIASES)
    parser.add_argument(
        "--seconds",
        type=float,
        default=1e9,
        help="stop after this many seconds; the same command continues",
    )
    parser.add_argument("--stepped", action="store_true", help="evaluate token by token")
    parser.add_argument("--threads", type=int, help="compute threads [default: free cores]")
    args = parser.parse_args(argv)
    experts = Experts(args.model)
    n_resident = args.resident or experts.n_expert // 2
    with observe(
        args.model, 512, compute_threads(args.threads), lambda node: False, lambda node: None
    ) as reader:

        def tokenize(text: str) -> list[int]:
            return reader.model.tokenize(text, add_special=True, parse_special=True)

        fitted = fit_windows(tokenize, args.data, args.fit_tokens, tuple(args.fit))
        documents = judged_documents(args.data, args.text, 64 * args.documents * args.window)
        cut = judged_windows(tokenize, documents, 1 << 30, args.window, 1)
    windows = [window for _, window in cut if len(window) == args.window][: args.documents]
    layers = fit(args.model, experts, fitted, n_resident, args.threads)
    options = {
        "model": args.model.name,
        "text": args.text,
        "fit": list(args.fit),
        "fit_tokens": args.fit_tokens,
        "resident": n_resident,
        "window": args.window,
        "levels": list(args.levels),
        "biases": list(args.biases),
    }
    known = finished_windows(args.out, options)
    records = measure(
        args.model,
        experts,
        layers,
        windows,
        known,
        args.seconds,
        args.stepped,
        args.threads,
        choices(args.levels, args.biases),
    )
    squared = []
    for layer in layers:
        pairs = np.outer(~layer.resident, layer.resident) & (layer.correlations > 0)
        squared.append(float(layer.correlations[pairs].mean()) if pairs.any() else 0.0)
    result = options | {
        "n_expert": experts.n_expert,
        "n_used": experts.n_used,
        "squared_correlation": squared,
        "windows": records,
    }
    write_whole(args.out, json.dumps(result))
    print(f"{args.out}: {len(records)} of {len(windows)} windows")
    return 0


if __name__ == "__main__":
    sys.exit(main())
