"""One expert in float32: its weights in any precision, and what it makes of its inputs."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from gguf_tools.experts import ExpertModel
from gguf_tools.file.layout import DOWN, GATE, GATE_UP, KINDS, UP, GGMLType
from gguf_tools.quantize.ggml import Ggml, load_ggml
from orchestrator.errors import ConfigError

# Inner values as captured are products of quantized activations: what int8 leaves of them.
_TOLERANCE = 0.1

Matrices = dict[int, np.ndarray]


def stored(
    model: ExpertModel, layer: int, kind: int, expert: int, ggml: Ggml, tier: int = 0
) -> np.ndarray:
    """Weights of an expert's matrix in a tier of a file, float32 [rows, row length]."""
    where, shape = model.slices[layer][kind][tier], model.shapes[layer][kind]
    if where is None or shape is None:
        raise KeyError(f"layer {layer} has no {KINDS[kind]}")
    at = where.offset + expert * where.expert_bytes
    data = model.parts[where.file_index].bytes_at(at, where.expert_bytes)
    return ggml.dequantize(where.type, data, shape[0])


def tensor(model: ExpertModel, name: str) -> np.ndarray | None:
    """A tensor of a file as float32 [rows, row length]; None where it has none of this name."""
    for part in model.parts:
        if name in part.tensors:
            info = part.tensors[name]
            return load_ggml().dequantize(GGMLType(info.type), part.array(name), info.shape[0])
    return None


def _sigmoid(x: np.ndarray) -> np.ndarray:
    found: np.ndarray = 0.5 * (1 + np.tanh(0.5 * x))
    return found


def _gelu(x: np.ndarray) -> np.ndarray:
    found: np.ndarray = 0.5 * x * (1 + np.tanh(0.7978845608 * x * (1 + 0.044715 * x * x)))
    return found


def _limited(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    """SwiGLU with limits of 7, a slope of 1.702, and one more up."""
    gate, up = np.minimum(gate, 7), np.clip(up, -7, 7)
    found: np.ndarray = gate * _sigmoid(1.702 * gate) * (up + 1)
    return found


# By name: from what gate and up give (up alone: both are the same) to what down multiplies.
_GATED: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "silu": lambda gate, up: gate * _sigmoid(gate) * up,
    "gelu": lambda gate, up: _gelu(gate) * up,
    "relu": lambda gate, up: np.maximum(gate, 0) * up,
    "clamped swiglu": _limited,
}
_ALONE: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "silu": lambda _, up: up * _sigmoid(up),
    "gelu": lambda _, up: _gelu(up),
    "relu": lambda _, up: np.maximum(up, 0),
    "squared relu": lambda _, up: np.square(np.maximum(up, 0)),
}


class LayerExperts:
    """The experts of one MoE layer, with its activation function, scales and biases.

    Which function it is, the captured inputs of down tell: that one which gives them. Raises
    ConfigError where none does.
    """

    def __init__(
        self,
        model: ExpertModel,
        layer: int,
        expert: int,
        x: np.ndarray,
        actual: np.ndarray,
        ggml: Ggml,
    ) -> None:
        """x, actual: what gate and up, and what down of an expert multiplied, float32 [n, row
        length]."""
        self.kinds, il = model.kinds(layer), model.layer_ids[layer]
        self._changes = {kind: AfterProduct(model, il, kind) for kind in self.kinds}
        matrices = {kind: stored(model, layer, kind, expert, ggml) for kind in self.kinds}
        gate, up = self._inner(expert, matrices, x)
        errors = {
            name: float(np.linalg.norm(function(gate, up) - actual))
            for name, function in self._functions.items()
        }
        self.activation = min(errors, key=lambda name: errors[name])
        if not errors[self.activation] <= _TOLERANCE * np.linalg.norm(actual):
            raise ConfigError(
                f"{model.path}: layer {il}: what is between an expert's matrices is none of"
                f" {', '.join(self._functions)}: its losses cannot be measured"
            )

    @property
    def _functions(self) -> dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]]:
        return _ALONE if self.kinds == [UP, DOWN] else _GATED

    def output(self, expert: int, matrices: Matrices, x: np.ndarray) -> np.ndarray:
        """An expert's output, float32 [n, n_embd], from its matrices by kind, [rows, row length]
        each, and its inputs [n, n_embd]."""
        hidden = self._functions[self.activation](*self._inner(expert, matrices, x))
        return self._product(DOWN, expert, matrices, hidden)

    def _inner(
        self, expert: int, matrices: Matrices, x: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        if GATE_UP in matrices:
            both = self._product(GATE_UP, expert, matrices, x)
            middle = both.shape[1] // 2
            return both[:, :middle], both[:, middle:]
        up = self._product(UP, expert, matrices, x)
        return self._product(GATE, expert, matrices, x) if GATE in matrices else up, up

    def _product(self, kind: int, expert: int, matrices: Matrices, x: np.ndarray) -> np.ndarray:
        return self._changes[kind](x @ matrices[kind].T, expert)


class AfterProduct:
    """What llama.cpp does to the products of one kind of a layer's experts: an expert's scale, and
    then its bias, where the file has them."""

    def __init__(self, model: ExpertModel, il: int, kind: int) -> None:
        # float32 [n_expert, 1], and [n_expert, rows]
        self._scales, self._biases = (
            None if each is None else each.reshape(model.n_expert, -1)
            for each in (
                tensor(model, f"blk.{il}.ffn_{KINDS[kind]}_exps.{what}")
                for what in ("scale", "bias")
            )
        )

    def __call__(self, products: np.ndarray, experts: int | np.ndarray) -> np.ndarray:
        """products: float32 [..., rows]; experts: whose, [...]."""
        if self._scales is not None:
            products = products * self._scales[experts]
        return products if self._biases is None else products + self._biases[experts]
