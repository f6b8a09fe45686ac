"""Named activations of a model while it reads a text, for the studies."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from gguf_tools.closing import Closing
from gguf_tools.experts import ExpertModel
from gguf_tools.process import default_threads
from orchestrator.errors import NativeError
from orchestrator.lab.calibrate.measure import tensor
from orchestrator.lab.eval.text import Window
from orchestrator.lab.observe import CalibrationRoom, Node, observe
from orchestrator.lab.study.subject import Subject

_NAME = re.compile(r"([a-z_]+)-(\d+)")

# What a tensor of a layer is: the residual stream before and behind the experts, the router's
# input, its logits, and the experts that it chose, by the names that llama.cpp's graphs give them.
FFN_INPUT, OUTPUT, ROUTER_INPUT, ROUTER_LOGITS = "ffn_inp", "l_out", "ffn_norm", "ffn_moe_logits"
CHOSEN = "ffn_moe_topk"
# Weights of those experts in the order of computing: each step is there where a family has it, and
# the last one there is what the model multiplies by.
GATES = ("ffn_moe_weights", *(f"ffn_moe_weights_{step}" for step in ("softmax", "norm", "scaled")))
NAMES = (FFN_INPUT, OUTPUT, ROUTER_INPUT, ROUTER_LOGITS, CHOSEN, *GATES)
# Of the activations of a read: those of two reads at once, and what is made of them.
_COPIES = 3

Activations = dict[tuple[str, int], np.ndarray]


def applied_gates(found: Activations, layer: int) -> np.ndarray:
    """The weights of each token's experts [T, k] as the model applies them: those of families that
    renormalise add up to 1, or to their scale."""
    return next(found[name, layer] for name in reversed(GATES) if (name, layer) in found)


def top(logits: np.ndarray, k: int) -> np.ndarray:
    """The k best of each row [T, n], best first: int64 [T, k]."""
    return np.argsort(-logits, axis=1, kind="stable")[:, :k]


def recall(predicted: np.ndarray, actual: np.ndarray) -> np.ndarray:
    """Share [T] of each row's actual entries [T, k] that are among its predicted ones [T, p]."""
    share: np.ndarray = (actual[:, :, None] == predicted[:, None, :]).any(axis=2).mean(axis=1)
    return share


def routers_of(on: Subject) -> list[np.ndarray | None]:
    """Each MoE layer's router, float32 [n_expert, width]; None where a layer has none."""
    with on.model() as model:
        return [tensor(model, f"blk.{il}.ffn_gate_inp.weight") for il in on.layer_ids]


def read_windows(on: Subject, windows: Sequence[Window]) -> Iterator[tuple[Window, Activations]]:
    """What the best tier computes of each window."""
    config, longest = on.config, max(len(window.tokens) for window in windows)
    threads = config.threads or default_threads()
    with ActivationRecorder(config.model, longest, threads, config.ram) as recorder:
        for number, window in enumerate(windows, 1):
            yield window, recorder.read(window.tokens)
            on.report("Reading", number / len(windows))


class ActivationRecorder(Closing):
    """A model and a context that keep the activations of each read. Free it with close."""

    def __init__(self, path: Path, n_ctx: int, threads: int, ram: int | None = None) -> None:
        """ram: a cap on all that is in memory, with experts read from the file as they are needed;
        None for the whole model. Raises GGUFError, NativeError or BudgetError."""
        self._found: Activations = {}
        room = None
        if ram is not None:
            own = _kept_bytes(path, n_ctx)
            room = CalibrationRoom(ram, own, "what the study keeps of the text")
        self._observer = observe(path, n_ctx, threads, self._is_wanted, self._keep, room)

    def read(self, tokens: Sequence[int]) -> Activations:
        """Activations of one text, read at once: (name, layer) -> float32 [T, width]; int32 [T, k]
        of CHOSEN.

        Raises NativeError where the model has none of those names.
        """
        self._found = {}
        self._observer.read(tokens)
        if not any(name == ROUTER_INPUT for name, _ in self._found):
            raise NativeError("the model's graph does not name its router inputs as expected")
        return {key: value.reshape(len(tokens), -1) for key, value in self._found.items()}

    @staticmethod
    def _is_wanted(node: Node) -> bool:
        match = _NAME.fullmatch(node.name)
        return match is not None and match[1] in NAMES

    def _keep(self, node: Node) -> None:
        match = _NAME.fullmatch(node.name)
        if match is not None:
            self._found[match[1], int(match[2])] = node.array()

    def close(self) -> None:
        """Frees the context and the model; safe to call twice."""
        self._observer.close()


def _kept_bytes(path: Path, n_ctx: int) -> int:
    """What a study keeps of the text beside the model."""
    with ExpertModel.open(path) as model:
        width = 3 * model.hparams.embedding_length + model.n_expert
        width += (1 + len(GATES)) * model.n_expert_used
        return _COPIES * 4 * n_ctx * width * len(model.layer_ids)
