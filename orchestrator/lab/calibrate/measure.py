"""Measures the output of each expert and its error in each precision, in one pass over a text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np

from gguf_tools.experts import ExpertModel
from gguf_tools.experts.pairing import check_same
from gguf_tools.file import layout
from gguf_tools.file.layout import DOWN, GATE, GATE_UP, KINDS, UP, GGMLType
from gguf_tools.quantize.ggml import Blocks, Ggml, load_ggml
from gguf_tools.quantize.methods import ExpertQuantizer
from gguf_tools.workers import in_order, workers
from orchestrator.cost.calibrating import MAX_ROWS
from orchestrator.cost.losses import LossTable, TablePrecision
from orchestrator.errors import ConfigError
from orchestrator.events import DecisionBuffer, RouteEvent
from orchestrator.lab.calibrate.capture import Calibration, Progress, Rows
from orchestrator.lab.observe import Node

# Relative tolerance for the recorded inputs of down. llama.cpp computes them with activations
# rounded to int8.
_TOLERANCE = 0.1

Matrices = dict[int, np.ndarray]


def stored(
    model: ExpertModel, layer: int, kind: int, expert: int, ggml: Ggml, tier: int = 0
) -> np.ndarray:
    """Read an expert's matrix from a model file and return it as float32 [rows, row length].

    `kind` is the matrix kind, such as DOWN. `tier` is the index of the stored precision; 0 is the
    highest. Raises KeyError if the layer has no matrix of this kind.
    """
    where, shape = model.slices[layer][kind][tier], model.shapes[layer][kind]
    if where is None or shape is None:
        raise KeyError(f"layer {layer} has no {KINDS[kind]}")
    at = where.offset + expert * where.expert_bytes
    data = model.parts[where.file_index].bytes_at(at, where.expert_bytes)
    return ggml.dequantize(where.type, data, shape[0])


def tensor(model: ExpertModel, name: str) -> np.ndarray | None:
    """Read a tensor of a model file by name and return it as float32 [rows, row length].

    Returns None if the file has no tensor of this name.
    """
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


def _clamped_swiglu(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    """Return SwiGLU with inputs limited to 7, a slope of 1.702, and 1 added to up."""
    gate, up = np.minimum(gate, 7), np.clip(up, -7, 7)
    found: np.ndarray = gate * _sigmoid(1.702 * gate) * (up + 1)
    return found


# Activation functions by name. They compute the input of down from the outputs of gate and up.
# Experts without a gate use those in _ALONE, which get the output of up twice.
_GATED: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "silu": lambda gate, up: gate * _sigmoid(gate) * up,
    "gelu": lambda gate, up: _gelu(gate) * up,
    "relu": lambda gate, up: np.maximum(gate, 0) * up,
    "clamped swiglu": _clamped_swiglu,
}
_ALONE: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "silu": lambda _, up: up * _sigmoid(up),
    "gelu": lambda _, up: _gelu(up),
    "relu": lambda _, up: np.maximum(up, 0),
    "squared relu": lambda _, up: np.square(np.maximum(up, 0)),
}


class LayerExperts:
    """Computes the experts of one MoE layer in NumPy, with activation function and biases."""

    def __init__(
        self,
        model: ExpertModel,
        layer: int,
        expert: int,
        x: np.ndarray,
        actual: np.ndarray,
        ggml: Ggml,
    ) -> None:
        """Find the activation function of the layer, from the recorded inputs of one expert.

        `x` are the inputs of gate and up, `actual` those of down, each float32 [n, row length]. The
        function is the one that computes `actual` from `x`. Raises ConfigError if no known function
        fits.
        """
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
                f"{model.path}: layer {il}: the activation function of the experts is unknown (none"
                f" of {', '.join(self._functions)}), so its losses cannot be measured"
            )

    @property
    def _functions(self) -> dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]]:
        return _ALONE if self.kinds == [UP, DOWN] else _GATED

    def output(self, expert: int, matrices: Matrices, x: np.ndarray) -> np.ndarray:
        """Compute and return an expert's output for n input vectors, float32 [n, n_embd].

        `matrices` maps each matrix kind to its values [rows, row length]. `x` are the inputs [n,
        n_embd].
        """
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
    """The scale and bias that llama.cpp applies after the products of a layer's expert matrices.

    A model file may have only a scale, only a bias, both or neither.
    """

    def __init__(self, model: ExpertModel, il: int, kind: int) -> None:
        # Scales are float32 [n_expert, 1], and biases float32 [n_expert, rows].
        self._scales, self._biases = (
            None if each is None else each.reshape(model.n_expert, -1)
            for each in (
                tensor(model, f"blk.{il}.ffn_{KINDS[kind]}_exps.{what}")
                for what in ("scale", "bias")
            )
        )

    def __call__(self, products: np.ndarray, experts: int | np.ndarray) -> np.ndarray:
        """Return matrix products after scale and bias are applied.

        `products` is float32 [..., rows]. `experts` [...] are the experts that computed them.
        """
        if self._scales is not None:
            products = products * self._scales[experts]
        return products if self._biases is None else products + self._biases[experts]


# Maximum number of bytes for experts' float32 matrices in memory at a time.
WORK_BYTES = 2 << 30
# Number of tokens whose outputs are squared in one block.
_BLOCK = 64
# How llama.cpp names the inputs of experts that were multiplied by the gate weights (Llama 4).
_WEIGHTED = "ffn_moe_weighted"


class _Precision(NamedTuple):
    """A precision whose loss is measured.

    It is either a tier of the model file (`tier`), or a type that the experts are quantized to
    (`type`). The other field is None.
    """

    candidate: TablePrecision
    tier: int | None
    type: GGMLType | None


class _Sample(NamedTuple):
    """A sample of the inputs of a layer's experts.

    - rows: sampled inputs of gate and up. starts: int [n_expert + 1]; the rows of expert e are
      those from starts[e] to starts[e + 1].
    - probe: one expert whose inputs of down are sampled as well. hidden: these inputs, float32 [n,
      n_ff].
    """

    starts: np.ndarray
    rows: Rows
    probe: int
    hidden: np.ndarray


class OutputSums:
    """Statistics of each expert's output, summed while a model reads a text.

    The sums of an expert are over the tokens that were routed to the expert.

    - counts int64 [n_layers, n_expert]: the number of these tokens.
    - gates float64 [n_layers, n_expert]: the sum of their squared gate weights.
    - squares float64 [n_layers, n_expert]: the sum of the mean squares of the expert's outputs.
    - weighs bool [n_layers]: True if the layer multiplies the inputs of its experts by the gate
      weights, so that `squares` includes these weights. Usually False: the layer multiplies the
      outputs by the gate weights later, and `squares` does not include these weights.
    - samples: maps the index of a layer to a sample of its experts' inputs.
    """

    def __init__(self, model: ExpertModel, folder: Path | None = None) -> None:
        """Create sums of zero.

        A sample of the inputs of each expert, from the first step, is written to a temporary file
        in `folder`. With None, no inputs are sampled.
        """
        shape = (model.n_layers, model.n_expert)
        self.counts, self.weighs = np.zeros(shape, np.int64), np.zeros(shape[0], bool)
        self.gates, self.squares = np.zeros((2, *shape))
        self.samples: dict[int, _Sample] = {}
        self._folder, self._n_expert = folder, model.n_expert
        self._inputs: tuple[int, np.ndarray] | None = None
        self._outputs = [AfterProduct(model, il, DOWN) for il in model.layer_ids]

    def route(self, event: RouteEvent, _decision: DecisionBuffer) -> None:
        ids = event.ids_array.ravel()
        weights = np.square(event.weights_array.ravel(), dtype=np.float64)
        self.counts[event.layer] += np.bincount(ids, minlength=self._n_expert)
        self.gates[event.layer] += np.bincount(ids, weights, self._n_expert)

    def add_product(self, layer: int, kind: int, node: Node) -> None:
        """Update the statistics after llama.cpp has computed a matrix product of a layer's experts.

        - layer: the index among the MoE layers.
        - kind: the kind of the matrices: UP, GATE, GATE_UP or DOWN.
        - node: llama.cpp's tensor that holds the product.

        DOWN is the last product of a layer. It holds the experts' outputs, whose mean squares are
        added to `squares`. The experts' inputs are an operand of the layer's first product.
        `weighs` is set to True if they were multiplied by the gate weights, otherwise to False. If
        samples were requested, a sample of the inputs is stored in `samples`.
        """
        if kind != DOWN:
            if self._inputs is None or self._inputs[0] != layer:
                inputs = node.source(1)
                self._inputs = layer, inputs.array()[0]
                self.weighs[layer] = inputs.name.startswith(_WEIGHTED)
            return
        ids, y = node.source(2).view()[0, 0], node.view()[0]
        squares = np.empty(ids.shape)
        for start in range(0, len(ids), _BLOCK):
            here = slice(start, start + _BLOCK)
            block = self._outputs[layer](y[here], ids[here])
            squares[here] = np.einsum("tkn,tkn->tk", block, block)
        flat = np.ascontiguousarray(ids).ravel()
        self.squares[layer] += np.bincount(flat, squares.ravel() / y.shape[2], self._n_expert)
        if self._folder is not None and layer not in self.samples and self._inputs is not None:
            hidden = node.source(1).view()[0]
            self.samples[layer] = self._sample(flat, self._inputs[1], hidden, ids.shape[1])
        self._inputs = None

    def _sample(self, ids: np.ndarray, x: np.ndarray, hidden: np.ndarray, k: int) -> _Sample:
        """Return a sample of each expert's inputs, evenly spread over the expert's tokens.

        `ids` are the experts of T tokens, int [T * k]. `x` are the inputs of gate and up, and
        `hidden` those of down.
        """
        order = np.argsort(ids, kind="stable")
        bounds = np.searchsorted(ids[order], np.arange(self._n_expert + 1))
        places = [order[a : b : max(1, -(-(b - a) // MAX_ROWS))] for a, b in pairwise(bounds)]
        starts = np.cumsum([0, *map(len, places)])
        probe = int(np.argmax(np.diff(starts)))
        assert self._folder is not None
        rows = Rows(self._folder, int(starts[-1]), (1, x.shape[2]))
        for start, at in zip(starts, places, strict=False):
            token, slot = np.divmod(at, k)
            if len(at):
                rows.put(int(start), x[token, slot if x.shape[1] > 1 else 0][:, None])
        token, slot = np.divmod(places[probe], k)
        return _Sample(starts, rows, probe, hidden[token, slot].copy())


@dataclass(frozen=True, slots=True)
class Precisions:
    """Measures a loss table: how much the output of each expert changes in each precision.

    - model: the model file whose precisions are measured.
    - reference: the same model in full precision. Errors are relative to its outputs.
    - types: further quantization types to measure.
    - quantizer: the method that quantizes experts to these types.
    """

    model: ExpertModel
    reference: ExpertModel
    types: Sequence[GGMLType]
    quantizer: ExpertQuantizer
    ggml: Ggml
    threads: int

    def __post_init__(self) -> None:
        """Raise MismatchError if `reference` is not the same model as `model`."""
        check_same(self.reference, self.model)

    @property
    def listed(self) -> list[_Precision]:
        """All precisions whose losses are measured, from the most to the fewest bits per weight.

        They are the precisions that the model file contains, and the quantization types in the
        field `types`.
        """
        found = [
            _Precision(TablePrecision(tier.name, round(tier.bpw, 4), True), index, None)
            for index, tier in enumerate(self.model.tiers)
        ]
        names = {each.candidate.name for each in found}
        for kind in dict.fromkeys(self.types):
            if kind.tier_name not in names:
                bits = round(self._bits(kind), 4)
                found.append(_Precision(TablePrecision(kind.tier_name, bits, False), None, kind))
        return sorted(found, key=lambda each: -each.candidate.bits)

    def table(self, sums: OutputSums, calibration: Calibration, progress: Progress) -> LossTable:
        """Compute the loss table: the error of each expert's output in each precision.

        `sums` are the statistics of the experts' outputs, and `calibration` is the text. Only the
        matrices of a few experts are in memory at a time. Raises ConfigError if the experts'
        activation function is unknown, and QuantizeError if a type cannot be computed.
        """
        seen, precisions = sums.counts > 0, self.listed
        uses = np.where(sums.weighs[:, None], sums.gates, sums.counts)
        with np.errstate(invalid="ignore", divide="ignore"):
            power = np.where(seen, sums.squares / uses, np.nan)
            gates = np.where(seen, sums.gates / sums.counts, np.nan)
        errors = np.zeros((*seen.shape, len(precisions)))
        n_workers = max(1, min(self.threads, WORK_BYTES // expert_bytes(self.model)))
        with workers(n_workers, "losses") as pool:
            for done, (layer, sample) in enumerate(sorted(sums.samples.items()), 1):
                experts = self._experts(layer, sample)
                used = [int(e) for e in np.flatnonzero(np.diff(sample.starts))]
                rows = in_order(pool, partial(self._row, layer, sample, experts, precisions), used)
                found = np.full(errors.shape[1:], np.nan)
                for expert, row in zip(used, rows, strict=True):
                    found[expert] = row
                # An expert that was not sampled gets the mean error of its layer.
                errors[layer] = np.where(np.isnan(found), np.nanmean(found, axis=0), found)
                progress(done / len(sums.samples))
        tier = self.reference.tiers[0]
        return LossTable(
            [each.candidate for each in precisions],
            errors * power[:, :, None],
            power,
            sums.counts,
            f"{self.reference.path.name}, {tier.name} ({tier.bpw:.2f} bits per weight)",
            self.quantizer.method,
            calibration.summary(),
            MAX_ROWS,
            gates,
        )

    def _bits(self, kind: GGMLType) -> float:
        shapes = [shape for layer in self.model.shapes for shape in layer if shape is not None]
        n_bytes = sum(
            rows * layout.row_bytes(layout.fitting_type(kind, n), n) for n, rows in shapes
        )
        return 8 * n_bytes / sum(n * rows for n, rows in shapes)

    def _experts(self, layer: int, sample: _Sample) -> LayerExperts:
        start = sample.starts[sample.probe]
        x = sample.rows.take(np.arange(start, start + len(sample.hidden)))
        return LayerExperts(self.reference, layer, sample.probe, x, sample.hidden, self.ggml)

    def _row(
        self,
        layer: int,
        sample: _Sample,
        experts: LayerExperts,
        precisions: list[_Precision],
        expert: int,
    ) -> list[float]:
        """Return an expert's mean squared output error in each precision.

        The errors are divided by the mean square of the expert's output in full precision.
        """
        x = sample.rows.take(np.arange(*sample.starts[expert : expert + 2]))
        full = {k: stored(self.reference, layer, k, expert, self.ggml) for k in experts.kinds}
        y = experts.output(expert, full, x)
        made = self._made(layer, expert, full, precisions)
        power, errors = max(_mean_square(y), 1e-300), []
        own = self.reference.path == self.model.path
        for each in precisions:
            if own and each.tier == 0:
                errors.append(0.0)
                continue
            matrices = {
                kind: stored(self.model, layer, kind, expert, self.ggml, each.tier)
                if each.tier is not None
                else self.ggml.dequantize(*made[kind, each.candidate.name], values.shape[1])
                for kind, values in full.items()
            }
            errors.append(_mean_square(experts.output(expert, matrices, x) - y) / power)
        return errors

    def _made(
        self, layer: int, expert: int, full: Matrices, precisions: list[_Precision]
    ) -> dict[tuple[int, str], tuple[GGMLType, Blocks]]:
        """Quantize an expert's matrices to each precision that the model file does not contain.

        `full` are the matrices in full precision. The result maps (matrix kind, name of the
        precision) to the type and the quantized blocks.
        """
        made = {}
        for kind, values in full.items():
            for candidate, _, ggml_type in precisions:
                if ggml_type is not None:
                    fitting = layout.fitting_type(ggml_type, values.shape[1])
                    blocks = self.quantizer.quantize(layer, kind, expert, values, fitting)
                    made[kind, candidate.name] = (fitting, blocks)
        return made


def expert_bytes(model: ExpertModel) -> int:
    """Return the number of bytes of two float32 copies of an expert's matrices.

    One copy is decoded from full precision, the other from the precision whose loss is measured.
    """
    shapes = (shape for shape in model.shapes[0] if shape is not None)
    return 2 * 4 * sum(n * rows for n, rows in shapes)


def _mean_square(values: np.ndarray) -> float:
    return float(np.mean(np.square(values), dtype=np.float64))
