"""How long a context is where none is asked for: as long as its memory costs little."""

from __future__ import annotations

from collections.abc import Callable

STEP_TOKENS = 256  # llama.cpp rounds the cells of its cache up to these

# The cache may take this share of what weights other than experts leave. With fifteen sixteenths
# of them a cache of experts hits about as often, and a step reads the cache only as far as it is
# filled.
SHARE = 1 / 16


def longest_affordable(
    least: int, most: int, bytes_of: Callable[[int], int], left_bytes: int, spare_bytes: int
) -> int:
    """The longest context of `least` to `most` tokens that costs at most SHARE of left_bytes, and
    of spare_bytes no more than there is; `least` where no longer one does.

    bytes_of: what a context of so many tokens takes, cache and scratch, more for more tokens.
    left_bytes: what is left behind the other weights for experts and the context. spare_bytes:
    what more than the least context may take without a change of how the model lies in memory.
    """
    allowed = min(left_bytes * SHARE, bytes_of(least) + spare_bytes)
    if most <= least or bytes_of(most) <= allowed:
        return max(least, most)
    low, high = least // STEP_TOKENS, most // STEP_TOKENS
    while low < high:
        middle = (low + high + 1) // 2
        if bytes_of(middle * STEP_TOKENS) <= allowed:
            low = middle
        else:
            high = middle - 1
    return max(least, low * STEP_TOKENS)
