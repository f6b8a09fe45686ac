"""Read the inputs and activations of each layer's FFN of a dense model from llama.cpp's graph."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from gguf_tools.process import compute_threads
from orchestrator.errors import NativeError
from orchestrator.lab.observe import Node, observe

Floats = npt.NDArray[np.float32]
# A callback that receives the layer, the FFN's input x [T, n_embd] after the norm, and the
# activations of its neurons [T, n_ff].
Sink = Callable[[int, Floats, Floats], None]
_FFN = re.compile(r"blk\.(\d+)\.ffn_(up|down)\.weight")


def read_ffn(
    path: Path,
    windows: Sequence[Sequence[int]],
    sink: Sink,
    progress: Callable[[float], None] = lambda share: None,
) -> None:
    """Evaluate each window (list of tokens) as a separate text, and pass on FFN activations.

    `sink` is called once for each layer of each window. Raises NativeError if the model's graph
    lacks the input of an FFN.
    """
    inputs: dict[int, Floats] = {}

    def place(node: Node) -> tuple[int, str] | None:
        found = _FFN.fullmatch(node.source(0).name) if node.op == "MUL_MAT" else None
        return None if found is None else (int(found[1]), found[2])

    def seen(node: Node) -> None:
        at = place(node)
        if at is None:
            return
        layer, kind = at
        if kind == "up":
            inputs[layer] = node.source(1).array()[0, 0]
        else:
            if layer not in inputs:
                raise NativeError(f"layer {layer}: the graph does not show the input of its FFN")
            sink(layer, inputs.pop(layer), node.source(1).array()[0, 0])

    length = max(map(len, windows))
    threads = compute_threads(None)
    with observe(path, length, threads, lambda node: place(node) is not None, seen) as observer:
        for number, window in enumerate(windows):
            observer.read(window)
            progress((number + 1) / len(windows))
