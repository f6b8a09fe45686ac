"""Named activations of a model while it reads a text."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from gguf_tools.experts import ExpertModel
from orchestrator.errors import NativeError
from orchestrator.lab.calibrate.measure import tensor
from orchestrator.lab.eval.text import Window
from orchestrator.lab.observe import CalibrationBudget, Node, observe
from orchestrator.lab.study.subject import Subject

_NAME = re.compile(r"([a-z_]+)-(\d+)")

# Names of a layer's tensors in llama.cpp's graphs: the residual stream before and after the
# experts, the router's input, its logits, and the chosen experts.
FFN_INPUT, OUTPUT, ROUTER_INPUT, ROUTER_LOGITS = "ffn_inp", "l_out", "ffn_norm", "ffn_moe_logits"
CHOSEN = "ffn_moe_topk"
# Weights of those experts, in the order in which they are computed. A model family has some of
# these steps; the last one present is the weight that the model applies.
GATES = ("ffn_moe_weights", *(f"ffn_moe_weights_{step}" for step in ("softmax", "norm", "scaled")))
NAMES = (FFN_INPUT, OUTPUT, ROUTER_INPUT, ROUTER_LOGITS, CHOSEN, *GATES)
# Copies of a read's activations in memory: two reads, and the data derived from them.
_COPIES = 3

Activations = dict[tuple[str, int], np.ndarray]


def applied_gates(found: Activations, layer: int) -> np.ndarray:
    """Return the gate weights of each token's experts [T, k], as the model applies them.

    Some models scale the weights so that they sum to 1 or to another constant.
    """
    return next(found[name, layer] for name in reversed(GATES) if (name, layer) in found)


def top(logits: np.ndarray, k: int) -> np.ndarray:
    """For each row, return the column indices of the k largest values, the largest first.

    `logits` is [T, n], and the result is int64 [T, k].
    """
    return np.argsort(-logits, axis=1, kind="stable")[:, :k]


def recall(predicted: np.ndarray, actual: np.ndarray) -> np.ndarray:
    """For each row, return the fraction of the entries of `actual` that are also in `predicted`.

    `predicted` is [T, p], `actual` is [T, k], and the result is [T].
    """
    share: np.ndarray = (actual[:, :, None] == predicted[:, None, :]).any(axis=2).mean(axis=1)
    return share


def routers_of(on: Subject) -> list[np.ndarray | None]:
    """Return the router matrix of each MoE layer, float32 [n_expert, width].

    The list has None for a layer without such a matrix.
    """
    with on.model() as model:
        return [tensor(model, f"blk.{il}.ffn_gate_inp.weight") for il in on.layer_ids]


def read_windows(on: Subject, windows: Sequence[Window]) -> Iterator[tuple[Window, Activations]]:
    """Evaluate windows of the text, and yield each window with the activations of the model.

    A window is a piece of text that is evaluated on its own, in the best precision. The activations
    are a dict by tensor name and layer number. They include the router's inputs and logits, and the
    chosen experts.
    """
    threads = on.config.n_threads
    texts = [window.tokens for window in windows]
    found = activations_of(on.config.model, texts, threads, on.config.ram)
    for number, (window, each) in enumerate(zip(windows, found, strict=True), 1):
        yield window, each
        on.report("Reading", number / len(windows))


def activations_of(
    path: Path, texts: Sequence[Sequence[int]], threads: int, ram: int | None = None
) -> Iterator[Activations]:
    """Yield a model's activations for each text, as a dict by tensor name and layer number.

    The tensor names are those in NAMES, such as ROUTER_INPUT. Arrays are float32 [T, width] for T
    tokens. The array named CHOSEN has the experts of each token, int32 [T, k].

    `ram` is a memory cap in bytes, with which experts are read on demand. None loads the whole
    model.

    Raises GGUFError for an invalid file, BudgetError if the cap is too small, and NativeError if
    the model's graph has no router inputs.
    """
    found: Activations = {}
    longest, budget = max(map(len, texts)), None
    if ram is not None:
        with ExpertModel.open(path) as model:
            width = 3 * model.hparams.embedding_length + model.n_expert
            width += (1 + len(GATES)) * model.n_expert_used
            own = _COPIES * 4 * longest * width * len(model.layer_ids)
        budget = CalibrationBudget(ram, own, "the study's activations")

    def place(node: Node) -> tuple[str, int] | None:
        match = _NAME.fullmatch(node.name)
        return (match[1], int(match[2])) if match and match[1] in NAMES else None

    def keep(node: Node) -> None:
        if key := place(node):
            found[key] = node.array()

    with observe(
        path, longest, threads, lambda node: place(node) is not None, keep, budget
    ) as reader:
        for tokens in texts:
            found.clear()
            reader.read(tokens)
            if not any(name == ROUTER_INPUT for name, _ in found):
                raise NativeError("the model's graph has no router input of the expected name")
            yield {key: value.reshape(len(tokens), -1) for key, value in found.items()}
