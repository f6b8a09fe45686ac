"""Which expert gets which tier of a budget of bytes: bit allocation on convex hulls (Shoham and
Gersho 1988, "Efficient bit allocation for an arbitrary set of quantizers").

Minimise the sum over layers l and experts e of w[l, e] L[l, e](t) where the slots of all experts
take at most B bytes; w says how much an expert is used, L what it loses in tier t. Only the tiers
on the lower convex hull of an expert's (bytes, loss) can be part of a best choice at a price per
byte. The edges of all hulls, the steepest first, are the edges of the hull of the whole model: so
many of them as the budget holds are the best choice of all that take as many bytes, exactly.

Two tiers whose losses are alike in all experts come down to the order of w, as in DynaExq (3.3);
one layer and nominal bits to a prefix split (the near-data paper, 4.2).
"""

from __future__ import annotations

import numpy as np


class Hull:
    """The best allocations of a model, from the fewest bytes on.

    n_bytes [S + 1] and loss [S + 1]: what the allocations at its S + 1 break points take and lose.
    """

    def __init__(self, losses: np.ndarray, sizes: np.ndarray) -> None:
        """losses: w L, float64 [n_layers, n_expert, n_tiers]. sizes: bytes of an expert, int64
        [n_layers, n_tiers], positive."""
        n_layers, n_expert, n_tiers = losses.shape
        flat = np.asarray(losses, np.float64).reshape(-1, n_tiers)
        of_expert = np.repeat(np.asarray(sizes, np.int64), n_expert, axis=0)
        self._shape = n_layers, n_expert
        # Of the tiers with the fewest bytes, the one that loses least.
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
        """What all experts take in their smallest tiers."""
        return int(self.n_bytes[0])

    def at(self, budget_bytes: int) -> np.ndarray:
        """The tier of each expert, uint8 [n_layers, n_expert]. Edges are taken in their order; what
        is left after the last break point goes to later edges that fit. A budget below least_bytes
        counts as least_bytes."""
        budget_bytes = max(budget_bytes, self.least_bytes)
        n = int(np.searchsorted(self.n_bytes, budget_bytes, side="right")) - 1
        tiers = self._start.copy()
        # An expert's edges lie in its own order, so that the last one stands.
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
    """The falling edges of each expert's hull: slope (loss saved a byte), expert, tier that it
    leads to, bytes more, loss less. losses, sizes [n, n_tiers]."""
    rows, at = np.arange(len(losses)), start
    last = np.full(len(losses), np.inf)
    none = np.zeros(0, np.int64)
    found = [(np.zeros(0), none, none, none, np.zeros(0))]
    for _ in range(losses.shape[1] - 1):
        more = sizes - sizes[rows, at][:, None]
        less = losses[rows, at][:, None] - losses
        slope = np.where(more > 0, less / np.where(more > 0, more, 1), -np.inf)
        to = slope.argmax(axis=1)
        # On a line three points differ by rounding: no edge is steeper than the one before.
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
    """Of losses [n_layers, n_expert, n_tiers] those in the tiers [n_layers, n_expert]."""
    found: np.ndarray = np.take_along_axis(losses, tiers[..., None].astype(np.int64), axis=2)
    return found[..., 0]


def lost(losses: np.ndarray, tiers: np.ndarray) -> float:
    """What an allocation loses: the sum of losses w L in its tiers."""
    return float(in_tiers(losses, tiers).sum())
