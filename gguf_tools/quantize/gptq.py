"""GPTQ for ggml's types: weights are rounded one column after the other, and the error of each
is made up for by the columns not yet rounded.

The loss is that of the outputs: tr((W - Q) H (W - Q)^T), with H = sum of x x^T over the inputs
x of the matrix. The error of column j, over U[j, j], is pushed into the columns behind j along
U[j], where U^T U = H^-1 and U is upper triangular (Frantar et al. 2022, arXiv 2210.17323, eq. 2
and 3, and its section 3.3).

ggml's types have scales for up to 256 columns at once. ggml's own quantizer chooses them for a
span of columns as it stands after what was pushed into it, with the diagonal of H as importance;
with these scales each column's codes are then chosen in turn, and written into ggml's blocks.
Sweeps of coordinate descent over all codes follow, since the first columns were rounded without
knowing the errors of the last. A type that codes groups of weights by a codebook keeps ggml's
codes, and its error moves span by span.
"""

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from gguf_tools.errors import QuantizeError
from gguf_tools.file.layout import BLOCK, FLOAT_TYPES, GGMLType
from gguf_tools.quantize.codes import CODINGS, code_values, put_codes
from gguf_tools.quantize.ggml import Blocks, Floats, Ggml

# So many columns get their scales together: the largest block has as many weights.
SPAN = 256
# The errors of so many columns are pushed one by one, before a matrix product pushes them on.
STRIDE = 32
DAMPING = 0.01
SWEEPS = 3
# A Hessian that rounding made indefinite is tried so often, each time with ten times the damping.
_TRIES = 4

# This is torch.Tensor, but mypy does not look into torch, which is only there with the extra.
Tensor = Any
Square = npt.NDArray[np.float64]


@functools.cache
def torch_module() -> Any:
    """torch, imported on first use; QuantizeError where it is not installed."""
    try:
        import torch
    except ImportError as error:
        raise QuantizeError("gptq needs torch: run `pip install 'moe-edge[convert]'`") from error
    return torch


def default_device() -> str:
    """``cuda`` where torch can use it, else ``cpu``."""
    return "cuda" if torch_module().cuda.is_available() else "cpu"


@dataclass(frozen=True, slots=True)
class Factor:
    """A Hessian [n, n], ready to quantize the matrices that share it.

    order int64 [n]: the columns in the order in which they are rounded. Within a span, those that
    the loss depends on most go first, while there are others left to make up for their errors.
    hessian and upper: the damped H and U, float32 [n, n] in this order, on the device.
    importance float32 [n]: the damped diagonal, in the matrix's own order.
    """

    order: np.ndarray
    hessian: Tensor
    upper: Tensor
    importance: Floats

    @property
    def nbytes(self) -> int:
        return 8 * self.order.size**2


def outer_sum(parts: Iterable[Floats], device: str) -> Square:
    """The sum of x x^T over inputs x that come in parts [rows, n], one part at least."""
    total: Tensor = None
    for part in parts:
        x = torch_module().as_tensor(part, device=device)
        product = (x.T @ x).double()
        total = product if total is None else total.add_(product)
    found: Square = total.cpu().numpy()
    return found


def smoothed(own: Square, tokens: int, shared: Square | None = None) -> Square:
    """An expert's Hessian [n, n] with the weight of n more tokens, so that an expert that saw few
    tokens has a sound one.

    own: the sum of x x^T over the tokens that it saw. Half of the n tokens more count as its mean
    diagonal, the other half as the mean x x^T of the layer's tokens, shared [n, n]. Inputs of down
    matrices have no such mean, since each expert's columns are its own.
    """
    n = len(own)
    if not tokens:
        return np.zeros_like(own) if shared is None else shared * n
    diagonal = np.diag(own.diagonal() / tokens)
    return own + n * (diagonal if shared is None else (diagonal + shared) / 2)


def factorize(hessian: Square, device: str | None = None) -> Factor | None:
    """Damps a Hessian by a hundredth of its mean diagonal, and factorizes its inverse in float64.

    hessian [n, n]: symmetric; a column that was never used may be all zeros. The result is None
    where the whole Hessian is, or where it cannot be factorized. Raises QuantizeError where a
    value is not finite.
    """
    torch = torch_module()
    device = device or default_device()
    diagonal = np.array(hessian.diagonal(), np.float64)
    if not np.isfinite(hessian).all():
        raise QuantizeError("an activation of the calibration run is not finite")
    mean = float(diagonal.mean())
    if mean <= 0:
        return None
    order = _order(diagonal)
    ordered = torch.as_tensor(hessian[np.ix_(order, order)], dtype=torch.float64, device=device)
    ordered /= mean
    damping = DAMPING
    for _ in range(_TRIES):
        # In place, and gone as soon as nobody needs it: wide matrices take most of the memory.
        damped = ordered.clone()
        damped.diagonal().add_(damping)
        lower, failed = torch.linalg.cholesky_ex(damped)
        if not failed:
            inverse = torch.cholesky_inverse(lower)
            del lower
            upper, failed = torch.linalg.cholesky_ex(inverse, upper=True)
            del inverse
            if not failed:
                importance = (diagonal / mean + damping).astype(np.float32)
                return Factor(order, damped.float(), upper.float(), importance)
        damping *= 10
    return None


def quantize(ggml: Ggml, ggml_type: GGMLType, values: Floats, factor: Factor) -> Blocks:
    """Encoded bytes of float32 rows [rows, n], as ``Ggml.quantize`` gives them, that keep the
    outputs of the matrix close. Rows do not depend on each other: a matrix may come in runs.

    Equal arguments give equal bytes on the CPU. Raises QuantizeError as ``Ggml.quantize`` does.
    """
    if ggml_type in FLOAT_TYPES:
        return ggml.quantize(ggml_type, values)
    return _Rounding(ggml, ggml_type, values, factor).blocks()


class _Grid:
    """The values that the codes of a span stand for. values [k, columns, rows]: see
    ``code_values``."""

    def __init__(self, values: Tensor, ggml_type: GGMLType) -> None:
        coding = CODINGS[ggml_type]
        self._values = values
        self._scales = values.new_tensor(coding.scales)[:, None] if coding.scales else None
        if self._scales is None:
            self._top = coding.last - coding.first
            self._step = (values[1] - values[0]) / self._top
            zero = self._step == 0
            self._inverse = (1 / self._step.masked_fill(zero, 1)).masked_fill(zero, 0)

    def nearest(self, column: int, wanted: Tensor) -> tuple[Tensor, Tensor]:
        """Codes, counted from the first, and their values [rows] that come nearest to
        what is wanted of a column [rows]."""
        if self._scales is None:
            base, step = self._values[0, column], self._step[column]
            code = ((wanted - base) * self._inverse[column]).round_().clamp_(0, self._top)
            return code, base + code * step
        values = self._scales * self._values[0, column]
        code = (values - wanted).abs().argmin(0, keepdim=True)
        return code[0], values.gather(0, code)[0]


class _Rounding:
    """One run of rows. Matrices of weights are kept as [n, rows], in the factor's order, so that
    a column is contiguous."""

    def __init__(self, ggml: Ggml, ggml_type: GGMLType, values: Floats, factor: Factor) -> None:
        self._torch = torch_module()
        self._ggml, self._type, self._factor = ggml, ggml_type, factor
        self._block = BLOCK[ggml_type]
        self._rows, self._n = values.shape
        self._coded = np.empty(
            (self._rows, self._n // self._block.weights, self._block.bytes), np.uint8
        )
        self._wanted = self._tensor(values.T[factor.order])
        self._left = self._wanted.clone()
        self._done = self._torch.empty_like(self._left)
        self._codes = self._torch.empty(
            self._left.shape, dtype=self._torch.uint8, device=self._left.device
        )
        self._grids: dict[int, _Grid] = {}

    def blocks(self) -> Blocks:
        coding = CODINGS.get(self._type)
        for start, stop in _spans(self._n):
            self._choose_scales(start, stop)
            if coding is None:
                error = self._error_of_span(start, stop)
            else:
                error = self._round_span(start, stop)
            self._left[stop:] -= self._factor.upper[start:stop, stop:].T @ error
        if coding is not None:
            for _ in range(SWEEPS):
                self._sweep()
            codes = np.empty((self._rows, self._n), np.uint8)
            codes[:, self._factor.order] = self._codes.T.cpu().numpy()
            flat = self._coded.reshape(-1, self._block.bytes)
            put_codes(
                self._type, flat, codes.reshape(-1, self._block.weights) + np.uint8(coding.first)
            )
        return self._coded.reshape(-1)

    def _tensor(self, values: Floats) -> Tensor:
        return self._torch.as_tensor(np.ascontiguousarray(values), device=self._factor.upper.device)

    def _choose_scales(self, start: int, stop: int) -> None:
        """Lets ggml encode a span as it stands, and keeps the values that its codes stand for."""
        width = stop - start
        places = self._factor.order[start:stop]
        first = int(places.min())
        values = np.empty((self._rows, width), np.float32)
        values[:, places - first] = self._left[start:stop].T.cpu().numpy()
        importance = self._factor.importance[first : first + width]
        blocks = self._ggml.quantize(self._type, values, importance)
        blocks = blocks.reshape(-1, self._block.bytes)
        number = slice(first // self._block.weights, (first + width) // self._block.weights)
        self._coded[:, number] = blocks.reshape(self._rows, -1, self._block.bytes)
        if self._type in CODINGS:
            found = code_values(self._type, blocks, self._decode)
            found = found.reshape(len(found), self._rows, width).transpose(0, 2, 1)
            self._grids[start] = _Grid(self._tensor(found[:, places - first]), self._type)
        else:
            found = self._decode(blocks.reshape(-1)).reshape(self._rows, width)
            self._done[start:stop] = self._tensor(found.T[places - first])

    def _decode(self, blocks: Blocks) -> Floats:
        return self._ggml.dequantize(self._type, blocks, self._block.weights)

    def _error_of_span(self, start: int, stop: int) -> Tensor:
        """The errors E of a span that is rounded as a whole. Pushed within the span along the rows
        of U, they account for the whole difference between what was wanted and what was chosen."""
        inner = self._factor.upper[start:stop, start:stop]
        left = self._left[start:stop] - self._done[start:stop]
        return self._torch.linalg.solve_triangular(inner.T, left, upper=False)

    def _round_span(self, start: int, stop: int) -> Tensor:
        """Rounds the columns of a span in turn; returns their errors, each over U[j, j]."""
        upper, left, grid = self._factor.upper, self._left, self._grids[start]
        error = self._torch.empty_like(left[start:stop])
        for first in range(start, stop, STRIDE):
            last = min(first + STRIDE, stop)
            for j in range(first, last):
                self._codes[j], self._done[j] = grid.nearest(j - start, left[j])
                error[j - start] = (left[j] - self._done[j]) / upper[j, j]
                left[j + 1 : last].addr_(upper[j, j + 1 : last], error[j - start], alpha=-1)
            left[last:stop] -= upper[first:last, last:stop].T @ error[first - start : last - start]
        return error

    def _sweep(self) -> None:
        """Coordinate descent. Each column in turn takes the codes that are best while all others
        stay, which are those nearest to Q[j] + ((W - Q) H)[j] / H[j, j]."""
        hessian, done = self._factor.hessian, self._done
        pull = hessian @ (self._wanted - done)
        for start, stop in _spans(self._n):
            grid = self._grids[start]
            for first in range(start, stop, STRIDE):
                last = min(first + STRIDE, stop)
                before, near = done[first:last].clone(), pull[first:last].clone()
                for j in range(first, last):
                    best = done[j] + near[j - first] / hessian[j, j]
                    self._codes[j], done[j] = grid.nearest(j - start, best)
                    change = done[j] - before[j - first]
                    near[j - first + 1 :].addr_(hessian[j, j + 1 : last], change, alpha=-1)
                pull -= hessian[:, first:last] @ (done[first:last] - before)


def _spans(n: int) -> list[tuple[int, int]]:
    return [(start, min(start + SPAN, n)) for start in range(0, n, SPAN)]


def _order(diagonal: np.ndarray) -> np.ndarray:
    """Columns by falling diagonal within each span. Spans keep their places."""
    return np.concatenate(
        [
            start + np.argsort(-diagonal[start:stop], kind="stable")
            for start, stop in _spans(len(diagonal))
        ]
    )
