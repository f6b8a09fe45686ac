"""Divide the neurons of a dense FFN into shared neurons and equal experts, and fit a router.

A SwiGLU layer is a sum over its neurons: y = sum_j h_j d_j, with h_j = silu(g_j x) (u_j x) and d_j
the column j of the down matrix. So the sum of all groups is the dense layer, for any division.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from models.real.activations import Floats, read_ffn
from models.real.dense import DenseModel
from orchestrator.errors import ConfigError

Ints = npt.NDArray[np.int64]
Progress = Callable[[str, float], None]
_ROUNDS = 25
# Standard deviation of a router's logits over tokens and experts. It is small enough that the
# weights, which are normalised and multiplied by k, are all close to 1. It is large enough that
# their order in single precision is that of the logits.
LOGIT_SPREAD = 2.0**-12
# Ridge of the router's regression, relative to the mean square of an input.
_RIDGE = 1e-3


@dataclass(frozen=True, slots=True)
class Groups:
    """Numbers of the neurons of one layer. shared: [n_shared]; experts: [n_expert, size]."""

    shared: Ints
    experts: Ints


@dataclass(frozen=True, slots=True)
class SplitShape:
    """How a layer is divided: n_expert experts with `size` neurons each. The rest is shared."""

    n_expert: int = 8
    size: int = 128

    def shared(self, n_ff: int) -> int:
        """Return the number of shared neurons.

        Raises ConfigError if it is not a multiple of `size`.
        """
        left = n_ff - self.n_expert * self.size
        if left <= 0 or left % self.size:
            raise ConfigError(
                f"{n_ff} neurons cannot be divided into {self.n_expert} experts of {self.size} and "
                f"shared neurons, a positive multiple of {self.size}"
            )
        return left


def balanced_kmeans(points: Floats, n_groups: int, seed: int) -> Ints:
    """Group points into equal groups.

    Returns the numbers of the points [n, d] in each group, [n_groups, n / n_groups].

    Points are compared by cosine. In each round, points choose their group in the order of how much
    they would lose with their second choice. A full group takes no more points.
    """
    rng = np.random.default_rng(seed)
    lengths = np.linalg.norm(points, axis=1, keepdims=True)
    points = (points / np.where(lengths > 0, lengths, 1)).astype(np.float32)
    size = len(points) // n_groups
    centres = points[rng.choice(len(points), n_groups, replace=False)]
    groups: Ints = np.zeros((n_groups, size), np.int64)
    for _ in range(_ROUNDS):
        likeness = points @ centres.T
        best = np.sort(likeness, axis=1)
        order = np.argsort(best[:, -2] - best[:, -1], kind="stable")
        left = np.full(n_groups, size)
        chosen = np.empty(len(points), np.int64)
        for point in order:
            ranked = np.argsort(-likeness[point], kind="stable")
            group = next(each for each in ranked if left[each] > 0)
            chosen[point], left[group] = group, left[group] - 1
        found = np.argsort(chosen, kind="stable").reshape(n_groups, size)
        if (found == groups).all():
            break
        groups = found
        centres = points[groups].mean(axis=1)
        centres /= np.maximum(np.linalg.norm(centres, axis=1, keepdims=True), 1e-12)
    return groups


def group_neurons(contributions: Floats, shape: SplitShape, seed: int = 1) -> Groups:
    """Divide the neurons of a layer. contributions: [T, n_ff], |h_j| |d_j| for each token.

    The neurons with the largest mean contribution are shared. Each token counts the same, so its
    contributions are divided by their sum first.
    """
    each = contributions / np.maximum(contributions.sum(axis=1, keepdims=True), 1e-12)
    n_shared = shape.shared(contributions.shape[1])
    order = np.argsort(-each.mean(axis=0), kind="stable")
    routed = np.sort(order[n_shared:])
    groups = balanced_kmeans(np.ascontiguousarray(each[:, routed].T), shape.n_expert, seed)
    return Groups(np.sort(order[:n_shared]), routed[groups])


def split_layers(
    model: DenseModel,
    dense: Path,
    windows: Sequence[Sequence[int]],
    shape: SplitShape,
    progress: Progress,
) -> list[Groups]:
    """Return the groups of each layer, from the activations of `dense` on the windows."""
    shape.shared(model.n_ff)
    columns = [np.linalg.norm(model.ffn(layer, "down"), axis=0) for layer in range(model.n_layers)]
    seen: list[list[npt.NDArray[np.float16]]] = [[] for _ in columns]

    def keep(layer: int, x: Floats, hidden: Floats) -> None:
        each = np.abs(hidden) * columns[layer]
        each /= np.maximum(each.max(axis=1, keepdims=True), 1e-12)
        seen[layer].append(each.astype(np.float16))

    read_ffn(dense, windows, keep, lambda share: progress("Reading activations", share))
    groups = []
    for layer, parts in enumerate(seen):
        groups.append(group_neurons(np.concatenate(parts).astype(np.float32), shape))
        parts.clear()
        progress("Grouping neurons", (layer + 1) / len(seen))
    return groups


def fit_routers(
    model: DenseModel,
    dense: Path,
    groups: Sequence[Groups],
    windows: Sequence[Sequence[int]],
    progress: Progress,
) -> list[Floats]:
    """Return the router of each layer, float32 [n_expert, n_embd].

    A logit is fitted by ridge regression to the length of an expert's output, relative to the sum
    of the lengths of the token's experts.
    """
    n_expert, n = len(groups[0].experts), model.n_embd
    downs = [model.ffn(layer, "down") for layer in range(model.n_layers)]
    squares = np.zeros((model.n_layers, n, n))
    products = np.zeros((model.n_layers, n, n_expert))

    def add(layer: int, x: Floats, hidden: Floats) -> None:
        lengths = np.stack(
            [
                np.linalg.norm(hidden[:, expert] @ downs[layer][:, expert].T, axis=1)
                for expert in groups[layer].experts
            ],
            axis=1,
        )
        shares = lengths / np.maximum(lengths.sum(axis=1, keepdims=True), 1e-12)
        squares[layer] += x.T @ x
        products[layer] += x.T @ (shares - 1 / n_expert)

    read_ffn(dense, windows, add, lambda share: progress("Fitting routers", share))
    n_tokens = sum(map(len, windows))
    routers = []
    for square, product in zip(squares, products, strict=True):
        ridge = _RIDGE * np.trace(square) / n
        fitted = np.linalg.solve(square + ridge * np.eye(n), product)
        fitted -= fitted.mean(axis=1, keepdims=True)
        # Mean square of a logit over tokens and experts.
        power = float(np.einsum("ne,nm,me->", fitted, square, fitted)) / (n_tokens * n_expert)
        routers.append((fitted.T * (LOGIT_SPREAD / np.sqrt(max(power, 1e-30)))).astype(np.float32))
    return routers
