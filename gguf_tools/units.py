"""Format byte counts for people."""

import math


def format_size(size_bytes: float, *, up: bool = False) -> str:
    """Format a size with about three digits and a binary unit: "1.23 GiB", "345 MiB", "8 B".

    up: round up, so that the printed size is never smaller than size_bytes.
    """
    value = float(size_bytes)
    units = ["GiB", "MiB", "KiB", "B"]
    while value >= 1000 and len(units) > 1:
        units.pop()
        value /= 1024
    unit = units[-1]
    decimals = 0 if unit == "B" else 2 if value < 10 or unit == "GiB" else 1 if value < 100 else 0
    if up:
        value = math.ceil(value * 10**decimals) / 10**decimals
    text = f"{value:.{decimals}f}"
    return f"{text.rstrip('0').rstrip('.') if decimals else text} {unit}"


def format_least(size_bytes: float) -> str:
    """Format a minimum size that a user should request, rounded up by at most 1 MiB.

    Large sizes are printed in MiB, because two decimals of a GiB would round by up to 10 MiB.
    """
    mib = math.ceil(size_bytes / 2**20)
    return f"{mib} MiB" if mib >= 1000 else format_size(size_bytes, up=True)
