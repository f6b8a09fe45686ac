"""Byte counts as a person reads them."""

import math


def format_size(size_bytes: float, *, up: bool = False) -> str:
    """Three significant digits and a binary unit: "1.23 GiB", "345 MiB", "67 KiB", "8 B".

    up: rounded up, so that what is printed is enough.
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
    """A size that a user is told to ask for: rounded up, by 1 MiB at most, and never in GiB, whose
    two decimals would round by 10 MiB."""
    mib = math.ceil(size_bytes / 2**20)
    return f"{mib} MiB" if mib >= 1000 else format_size(size_bytes, up=True)
