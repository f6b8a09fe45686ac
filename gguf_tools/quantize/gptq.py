"""GPTQ for ggml's types.

Rounds the weights column by column, and adjusts the remaining columns to compensate for each
column's rounding error.

GPTQ minimizes the error of the outputs, tr((W - Q) H (W - Q)^T). W are the weights, and Q the
quantized weights. H is the sum of x x^T over the inputs x of the matrix. After column j is rounded,
its error divided by U[j, j] times the row U[j] is subtracted from the columns after j. U is the
upper triangular matrix with U^T U = H^-1 (Frantar et al. 2022, arXiv 2210.17323, eq. 2 and 3, and
section 3.3).

ggml's types have scales for up to 256 columns at once. So the columns are processed in spans of
256. ggml's quantizer chooses the scales of a span from its adjusted weights, with the diagonal of H
as importance. Then the code of each column is chosen with these scales. At the end, sweeps of
coordinate descent over all codes improve the first columns, which were rounded without knowing the
errors of later ones. Types that encode groups of weights by a codebook keep ggml's codes, and their
error is compensated span by span.
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

# Number of columns whose scales are chosen together: the number of weights in the largest block.
SPAN = 256
# Number of columns whose errors are compensated one by one within the stride. A single matrix
# product then updates all columns after the stride.
STRIDE = 32
# Damping added to the Hessian's diagonal, as a share of its mean.
DAMPING = 0.01
SWEEPS = 3
# Number of attempts to factorize a Hessian, each with ten times the damping of the one before.
_TRIES = 4

# torch.Tensor. mypy does not know it, because torch is an optional dependency.
Tensor = Any
Square = npt.NDArray[np.float64]


@functools.cache
def torch_module() -> Any:
    """Return the module torch. Raises QuantizeError if torch is not installed."""
    try:
        import torch
    except ImportError as error:
        raise QuantizeError("gptq needs torch: run `pip install 'moe-edge[convert]'`") from error
    return torch


def default_device() -> str:
    """Return "cuda" if torch can use a GPU, otherwise "cpu"."""
    return "cuda" if torch_module().cuda.is_available() else "cpu"


@dataclass(frozen=True, slots=True)
class Factor:
    """A factorized Hessian H, with which GPTQ quantizes weight matrices that have the same inputs.

    H is the sum of x x^T over the calibration inputs x, scaled and damped, [n, n]. Row i and column
    i of H belong to column i of the weight matrices.

    order: the indices of the weight columns in the order in which GPTQ rounds them, int64 [n].
    hessian: H with its rows and columns in this order, float32 [n, n], on the compute device.
    upper: the upper Cholesky factor of the inverse of `hessian`, float32 [n, n].
    importance: the diagonal of H, not reordered, float32 [n].
    """

    order: np.ndarray
    hessian: Tensor
    upper: Tensor
    importance: Floats

    @property
    def nbytes(self) -> int:
        """The size in bytes of the two square matrices `hessian` and `upper`."""
        return 8 * self.order.size**2


def outer_sum(parts: Iterable[Floats], device: str) -> Square:
    """Return the sum of x x^T over all input vectors x, float64 [n, n].

    parts: arrays [rows, n] with one input vector per row. At least one array is required.
    device: torch device for the computation.
    """
    total: Tensor = None
    for part in parts:
        x = torch_module().as_tensor(part, device=device)
        product = (x.T @ x).double()
        total = product if total is None else total.add_(product)
    found: Square = total.cpu().numpy()
    return found


def smoothed(own: Square, tokens: int, shared: Square | None = None) -> Square:
    """Return an expert's Hessian for GPTQ, regularized because the expert may have few tokens.

    The Hessian is the sum of x x^T over the input vectors x of the expert's tokens. The result is
    own + n * R, float64 [n, n]. n is the length of x. R is an estimate of the mean of x x^T, so
    n * R counts like n further tokens.

    own: sum of x x^T over the expert's tokens, [n, n].
    tokens: number of these tokens.
    shared: mean of x x^T over all tokens of the layer, [n, n]. None for down matrices, whose inputs
        differ between experts.

    With D = own / tokens without the values off the diagonal, R is:

    - (D + shared) / 2 if `shared` is given,
    - D if `shared` is None,
    - `shared` (0 if None) if `tokens` is 0.
    """
    n = len(own)
    if not tokens:
        return np.zeros_like(own) if shared is None else shared * n
    diagonal = np.diag(own.diagonal() / tokens)
    return own + n * (diagonal if shared is None else (diagonal + shared) / 2)


def factorize(hessian: Square, device: str | None = None) -> Factor | None:
    """Return a factorized Hessian, with which `quantize` quantizes matrices by GPTQ.

    The result contains the Cholesky factor of the inverse Hessian. It is None if the Hessian is
    zero or cannot be factorized. Before the factorization, damping is added to the diagonal: a
    hundredth of the diagonal's mean, or more if the factorization fails.

    hessian: symmetric matrix, float64 [n, n]. Rows and columns may be zero.
    device: torch device for the computation. Default: a GPU if torch can use one.

    Raises QuantizeError if a value of the Hessian is not finite.
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
        # Work in place and free matrices early: for wide matrices they dominate memory use.
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
    """Quantize rows of a weight matrix by GPTQ, and return the encoded bytes.

    The rows are independent, so a matrix can be quantized in several calls. On the CPU the result
    is deterministic.

    ggml_type: the type of the result. Float types are only converted, without GPTQ.
    values: the rows, float32 [rows, n].
    factor: factorized Hessian of the inputs of the matrix.

    Raises QuantizeError if a weight is not finite, or if ggml cannot encode the rows in this type.
    """
    if ggml_type in FLOAT_TYPES:
        return ggml.quantize(ggml_type, values)
    return _Rounding(ggml, ggml_type, values, factor).blocks()


class _Grid:
    """The values to which a ggml type can round the weights in a group of columns of a matrix.

    These values depend on the scales that were chosen for the columns.

    values: [k, columns, rows], the values of k codes of the type, with k = 1 or 2. A code is the
        integer that stands for a weight. The values of all other codes are computed from these.
    """

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
        """Round weights in one column of a matrix to the nearest values of this grid.

        The grid has the values that a ggml type can store in some columns of a matrix. These values
        differ between the columns, because the columns have different scales.

        column: index of the column, counted from the first column of the grid.
        wanted: the weights to be rounded, one for each row of the matrix, [rows].

        Returns (codes, values), both [rows]. The values are the rounded weights. The codes are the
        integers that stand for these weights, minus the type's smallest code.
        """
        if self._scales is None:
            base, step = self._values[0, column], self._step[column]
            code = ((wanted - base) * self._inverse[column]).round_().clamp_(0, self._top)
            return code, base + code * step
        values = self._scales * self._values[0, column]
        code = (values - wanted).abs().argmin(0, keepdim=True)
        return code[0], values.gather(0, code)[0]


class _Rounding:
    """The quantization of some rows of a matrix by GPTQ.

    Weight matrices are stored transposed, [n, rows], and in the column order of the factorized
    Hessian, so that each column is contiguous.
    """

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
        """Quantize the matrix rows of this object, and return the encoded bytes of these rows."""
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
        """Let ggml choose the scales of a group of columns, and store the representable values.

        The columns have been adjusted for the errors of earlier columns.

        start, stop: the group's range of columns, in rounding order.
        """
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
        """Return the errors of a group of columns that ggml rounded all at once.

        The errors can be used like those of columns that were rounded one by one: later columns
        that are updated with them compensate for the rounding of the whole group. They are the
        solution E of U^T E = wanted - rounded, where U is the group's part of the Cholesky factor
        of the inverse Hessian.

        start, stop: the group's range of columns, in rounding order.
        """
        inner = self._factor.upper[start:stop, start:stop]
        left = self._left[start:stop] - self._done[start:stop]
        return self._torch.linalg.solve_triangular(inner.T, left, upper=False)

    def _round_span(self, start: int, stop: int) -> Tensor:
        """Round a group of columns one by one. Each column compensates for errors of earlier ones.

        Return the error of each column j divided by U[j, j], where U is the Cholesky factor of the
        inverse Hessian.

        start, stop: the group's range of columns, in rounding order.
        """
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
        """Improve the codes of all columns by one pass of coordinate descent.

        Each column in turn gets the codes that are optimal while all other columns are fixed. With
        weights W and quantized weights Q, they are the codes closest to Q[j] + ((W - Q) H)[j] /
        H[j, j].
        """
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
    """Return the order in which columns are rounded: by falling diagonal within each span.

    A span is a group of SPAN columns whose scales are chosen together.

    diagonal: diagonal of the Hessian.
    """
    return np.concatenate(
        [
            start + np.argsort(-diagonal[start:stop], kind="stable")
            for start, stop in _spans(len(diagonal))
        ]
    )
