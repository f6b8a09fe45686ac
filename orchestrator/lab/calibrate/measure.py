"""The loss table of a model: each expert in each precision against the full one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np

from gguf_tools.experts import ExpertModel
from gguf_tools.experts.pairing import check_same
from gguf_tools.file import layout
from gguf_tools.file.layout import DOWN, UP, GGMLType
from gguf_tools.quantize.ggml import Blocks, Ggml
from gguf_tools.quantize.methods import ExpertQuantizer
from gguf_tools.workers import in_order, workers
from orchestrator.cost.losses import LossTable, TablePrecision
from orchestrator.lab.calibrate.capture import Capture, LayerActivations, Progress
from orchestrator.lab.calibrate.compute import LayerExperts, Matrices, stored
from orchestrator.lab.calibrate.text import Calibration

# Tokens of an expert that its losses are measured on: they settle them to a few percent.
MAX_ROWS = 1024
# Float32 matrices in memory at a time.
WORK_BYTES = 2 << 30


class _Precision(NamedTuple):
    """A candidate, and where it comes from: a tier of the file, or a type to quantize to."""

    candidate: TablePrecision
    tier: int | None
    type: GGMLType | None


@dataclass(frozen=True, slots=True)
class Run:
    """What a table is measured with. reference: the model in full precision, which capture
    reads, too; quantizer makes the types that the model has no tier of."""

    model: ExpertModel
    reference: ExpertModel
    capture: Capture
    calibration: Calibration
    types: Sequence[GGMLType]
    quantizer: ExpertQuantizer
    ggml: Ggml
    threads: int

    def measure(self, progress: Progress) -> LossTable:
        """The table, layer by layer: in memory are one layer's rows of a few experts, and their
        matrices in float32.

        Raises MismatchError for a reference of another model, ConfigError or NativeError where
        its experts cannot be followed, QuantizeError.
        """
        model = self.model
        check_same(self.reference, model)
        precisions = self._precisions()
        n_layers, n = model.n_layers, model.n_expert
        counts = np.zeros((n_layers, n), np.int64)
        power, gates = np.full((2, n_layers, n), np.nan)
        loss = np.full((n_layers, n, len(precisions)), np.nan)
        shares = [0.0, 0.0]

        def report(part: int, share: float) -> None:
            shares[part] = share
            progress(sum(shares) / 2)

        layers = self.capture.layers(
            self.calibration.windows, progress=lambda share: report(0, share)
        )
        n_workers = max(1, min(self.threads, WORK_BYTES // expert_bytes(model)))
        with workers(n_workers, "losses") as pool:
            for done, seen in enumerate(layers, 1):
                counts[seen.layer] = seen.counts()
                experts = LayerExperts(self.reference, seen, self.ggml)
                used = [int(e) for e in np.flatnonzero(counts[seen.layer])]
                rows = in_order(pool, partial(self._row, seen, experts, precisions), used)
                for expert, (mean_square, errors) in zip(used, rows, strict=True):
                    gates[seen.layer, expert] = _mean_square(seen.gates(expert))
                    power[seen.layer, expert] = mean_square
                    loss[seen.layer, expert] = errors
                report(1, done / n_layers)
        tier = self.reference.tiers[0]
        return LossTable(
            [each.candidate for each in precisions],
            loss,
            power,
            counts,
            f"{self.reference.path.name}, {tier.name} ({tier.bpw:.2f} bits per weight)",
            self.quantizer.method,
            self.calibration.summary(),
            MAX_ROWS,
            gates,
        )

    def _precisions(self) -> list[_Precision]:
        """The tiers of the file, and the types that it has no tier of, best first."""
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

    def _bits(self, kind: GGMLType) -> float:
        shapes = [shape for layer in self.model.shapes for shape in layer if shape is not None]
        n_bytes = sum(
            rows * layout.row_bytes(layout.fitting_type(kind, n), n) for n, rows in shapes
        )
        return 8 * n_bytes / sum(n * rows for n, rows in shapes)

    def _row(
        self,
        seen: LayerActivations,
        experts: LayerExperts,
        precisions: list[_Precision],
        expert: int,
    ) -> tuple[float, list[float]]:
        """(mean square of an expert's output, mean squared error in each precision)."""
        n = int(seen.counts()[expert])
        x = seen.inputs(UP, expert, step=-(-n // MAX_ROWS))
        full = {k: stored(self.reference, seen.layer, k, expert, self.ggml) for k in experts.kinds}
        y = experts.output(expert, full, x)
        made = self._made(seen.layer, expert, full, precisions)
        errors = []
        for each in precisions:
            matrices = {
                kind: stored(self.model, seen.layer, kind, expert, self.ggml, each.tier)
                if each.tier is not None
                else self.ggml.dequantize(*made[kind, each.candidate.name], values.shape[1])
                for kind, values in full.items()
            }
            errors.append(_mean_square(experts.output(expert, matrices, x) - y))
        return _mean_square(y), errors

    def _made(
        self, layer: int, expert: int, full: Matrices, precisions: list[_Precision]
    ) -> dict[tuple[int, str], tuple[GGMLType, Blocks]]:
        """Encodings of an expert's matrices by kind and candidate, for those without a tier."""
        made = {}
        for kind, values in full.items():
            for candidate, _, ggml_type in precisions:
                if ggml_type is not None:
                    fitting = layout.fitting_type(ggml_type, values.shape[1])
                    blocks = self.quantizer.quantize(layer, kind, expert, values, fitting)
                    made[kind, candidate.name] = (fitting, blocks)
        return made


def expert_bytes(model: ExpertModel) -> int:
    """What one expert takes in float32, twice: in full precision and in another."""
    shapes = (shape for shape in model.shapes[0] if shape is not None)
    return 2 * 4 * sum(n * rows for n, rows in shapes)


def rows_bytes(model: ExpertModel, tokens: int) -> int:
    """What one expert's losses take beside its matrices, on a text of so many tokens: the encodings
    of all candidates; and in float32, its inputs and its output in full precision, with either all
    inner values of another output or that output's errors."""
    down = model.shapes[0][DOWN]
    assert down is not None
    n_ff, n_embd = down
    columns = 2 * n_embd + max(5 * n_ff + n_embd, 3 * n_embd)
    return expert_bytes(model) // 2 + 4 * min(MAX_ROWS, tokens) * columns


def _mean_square(values: np.ndarray) -> float:
    return float(np.mean(np.square(values), dtype=np.float64))
