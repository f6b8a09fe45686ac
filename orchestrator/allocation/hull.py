"""Choice of a tier for each expert under a byte budget: bit allocation on convex hulls.

See Shoham and Gersho 1988, "Efficient bit allocation for an arbitrary set of quantizers".

Minimise the sum over layers l and experts e of w[l, e] L[l, e](t). The condition is that the
slots of all experts take at most B bytes. w is the usage of an expert, and L its loss in tier t. At
a given price per byte, only tiers on the lower convex hull of an expert's (bytes, loss) points can
be optimal. The edges of all hulls, sorted by falling slope, form the hull of the whole model. The
first edges that fit the budget are the optimal allocation for exactly the bytes that they take.

With two tiers and uniform losses, this reduces to the order of w, as in DynaExq (3.3). With one
layer and nominal bits, it reduces to a prefix split (the near-data paper, 4.2).
"""

from __future__ import annotations

import numpy as np


class Hull:
    """Chooses a precision (tier) for every expert, with the least total loss in a memory budget.

    At first, every expert has its smallest tier. Each step then moves one expert to a larger tier
    with less loss. The step that saves the most loss per added byte is first. The budget decides
    how many steps are taken.

    - n_bytes: n_bytes[i] is the size of all experts after i steps, int64 [n_steps + 1]. n_bytes[0]
      is the size before the first step.
    - loss: loss[i] is the total loss of all experts after i steps, float64 [n_steps + 1].

    The points (n_bytes[i], loss[i]) form the lower convex hull of the points of all possible
    choices.
    """

    def __init__(self, losses: np.ndarray, sizes: np.ndarray) -> None:
        """Compute the hull from the loss and the size of experts in each tier.

        losses: the loss of each expert, weighted with its use, float64 [n_layers, n_expert,
        n_tiers]. sizes: the bytes of an expert, positive int64 [n_layers, n_tiers].
        """
        n_layers, n_expert, n_tiers = losses.shape
        flat = np.asarray(losses, np.float64).reshape(-1, n_tiers)
        of_expert = np.repeat(np.asarray(sizes, np.int64), n_expert, axis=0)
        self._shape = n_layers, n_expert
        # Start with the smallest tier; among equal sizes, with the least loss.
        least = of_expert == of_expert.min(axis=1, keepdims=True)
        self._start = np.where(least, flat, np.inf).argmin(axis=1)
        slopes, owners, to, more, less = _edges(flat, of_expert, self._start)
        order = np.argsort(-slopes, kind="stable")
        self._owner, self._to = owners[order], to[order]
        self._more, less = more[order], less[order]
        rows = np.arange(len(flat))
        self.n_bytes = int(of_expert[rows, self._start].sum()) + np.append(0, np.cumsum(self._more))
        self.loss = float(flat[rows, self._start].sum()) - np.append(0, np.cumsum(less))

    @property
    def least_bytes(self) -> int:
        """The total bytes if every expert is in its smallest tier."""
        return int(self.n_bytes[0])

    def at(self, budget_bytes: int) -> np.ndarray:
        """Return each expert's tier (precision) for a memory budget, uint8 [n_layers, n_expert].

        At first, each expert gets its smallest tier, even if the budget is too small for that.
        Experts are then moved to better tiers in the order of saved loss per added byte, until one
        does not fit. The bytes that are left are used for later experts that still fit.
        """
        budget_bytes = max(budget_bytes, self.least_bytes)
        n = int(np.searchsorted(self.n_bytes, budget_bytes, side="right")) - 1
        tiers = self._start.copy()
        # An expert's edges are in order, so the last assignment is the right one.
        tiers[self._owner[:n]] = self._to[:n]
        spare = budget_bytes - int(self.n_bytes[n])
        passed: set[int] = set()
        least = np.minimum.accumulate(self._more[::-1])[::-1]
        for at in range(n, len(self._more)):
            if least[at] > spare:
                break
            owner = int(self._owner[at])
            if owner in passed:
                continue
            if self._more[at] <= spare:
                tiers[owner] = self._to[at]
                spare -= int(self._more[at])
            else:
                passed.add(owner)
        found: np.ndarray = tiers.reshape(self._shape).astype(np.uint8)
        return found


def _edges(
    losses: np.ndarray, sizes: np.ndarray, start: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return the edges of the convex hull of each expert's points (bytes, loss).

    An edge leads from one tier to a larger tier with less loss. The arrays are: the saved loss per
    byte, the expert, the larger tier, the added bytes and the saved loss.

    losses, sizes: the loss and the bytes of each expert in each tier, [n, n_tiers]. start: the
    smallest tier of each expert.
    """
    rows, at = np.arange(len(losses)), start
    last = np.full(len(losses), np.inf)
    none = np.zeros(0, np.int64)
    found = [(np.zeros(0), none, none, none, np.zeros(0))]
    for _ in range(losses.shape[1] - 1):
        more = sizes - sizes[rows, at][:, None]
        less = losses[rows, at][:, None] - losses
        slope = np.where(more > 0, less / np.where(more > 0, more, 1), -np.inf)
        to = slope.argmax(axis=1)
        # Rounding must not make an edge steeper than the previous one.
        last = np.minimum(slope[rows, to], last)
        falls = last > 0
        mine = rows[falls], to[falls]
        found.append((last[falls], *mine, more[mine], less[mine]))
        at = np.where(falls, to, at)
    slopes, owners, tiers, added, saved = (
        np.concatenate(each) for each in zip(*found, strict=True)
    )
    return slopes, owners, tiers, added, saved


def in_tiers(losses: np.ndarray, tiers: np.ndarray) -> np.ndarray:
    """Return the quality loss of each expert in its own tier, [n_layers, n_expert].

    A tier is a precision in which an expert can be computed.

    losses: the loss of each expert in every tier, in any unit, [n_layers, n_expert, n_tiers].
    tiers: the index of each expert's own tier, [n_layers, n_expert].
    """
    found: np.ndarray = np.take_along_axis(losses, tiers[..., None].astype(np.int64), axis=2)
    return found[..., 0]


def total_loss(losses: np.ndarray, tiers: np.ndarray) -> float:
    """Return the total quality loss of all experts in all layers, each in its own tier (precision).

    losses: the loss of each expert in every tier, in any unit, [n_layers, n_expert, n_tiers].
    tiers: the index of each expert's own tier, [n_layers, n_expert].
    """
    return float(in_tiers(losses, tiers).sum())
