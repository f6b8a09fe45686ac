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
# Regularization of the router's ridge regression, relative to the mean square of an input.
_RIDGE = 1e-3


@dataclass(frozen=True, slots=True)
class Groups:
    """The division of a layer's neurons into experts, by the numbers of the neurons.

    shared: neurons that every token uses, [n_shared]. experts: neurons of each expert, [n_expert,
        size].
    """

    shared: Ints
    experts: Ints


@dataclass(frozen=True, slots=True)
class SplitShape:
    """How the neurons of a layer are divided: n_expert experts with `size` neurons each.

    The remaining neurons are shared.
    """

    n_expert: int = 8
    size: int = 128

    def shared(self, n_ff: int) -> int:
        """Return the number of shared neurons of a layer with n_ff neurons.

        Raises ConfigError if the number is not a positive multiple of `size`.
        """
        left = n_ff - self.n_expert * self.size
        if left <= 0 or left % self.size:
            raise ConfigError(
                f"{n_ff} neurons cannot be divided into {self.n_expert} experts of {self.size} and "
                f"shared neurons, a positive multiple of {self.size}"
            )
        return left


def balanced_kmeans(points: Floats, n_groups: int, seed: int) -> Ints:
    """Group similar points into n_groups groups of equal size.

    `points` are [n, d] and are compared by cosine. Returns the numbers of the points in each group,
    [n_groups, n / n_groups].

    In each round, points choose a group in the order of how much they would lose with their second
    choice. A full group takes no more points.
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
    """Divide the neurons of a layer into shared neurons and experts.

    `contributions` [T, n_ff] is |h_j| |d_j| for each token: the activation of a neuron times the
    length of its row of down. The neurons with the largest mean contribution are shared. The
    contributions of a token are first divided by their sum, so that all tokens count equally.
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
    """Divide the neurons of each layer into experts, by their activations on a text.

    `dense` is the file of the model that reads the windows (pieces of text).
    """
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
    """Return a router for each layer, float32 [n_expert, n_embd], fitted on a text.

    A router predicts how large the output of each expert is, relative to the sum over all experts.
    It is fitted by ridge regression. `dense` is the file of the model that reads the windows
    (pieces of text).
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
        # The mean square of a logit over tokens and experts.
        power = float(np.einsum("ne,nm,me->", fitted, square, fitted)) / (n_tokens * n_expert)
        routers.append((fitted.T * (LOGIT_SPREAD / np.sqrt(max(power, 1e-30)))).astype(np.float32))
    return routers
