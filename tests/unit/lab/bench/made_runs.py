"""Invented results of benchmark processes, and the rows of a report."""

from orchestrator.native.abi import WAITS


def part(name, ms, tokens=None, **store):
    """A part of a run. ms: duration of each step. store: counters of the store, if the run has
    one."""
    tokens = len(ms) if tokens is None else tokens
    made = {"name": name, "tokens": tokens, "ms": list(ms)}
    if not store:
        return made
    counted = {
        "requests": 10,
        "hits": 4,
        "bytes": 0,
        "needed_bytes": 0,
        "used_ahead": 0.0,
        "copied_bytes": 0,
        "needed_copied_bytes": 0,
        "host_computed_bytes": 0,
        **{f"{cause} wait": 0.0 for cause in WAITS},
        "routed": {"high": 4, "low": 0, "skip": 0},
        "budget_bytes": 2**20,
    } | store
    each = counted["needed_bytes"] / max(1, len(ms))
    return made | {"store": counted, "callback_us": 9.0, "step_reads": [[each, 0]] * len(ms)}


def run(*parts, **more):
    """Output of a benchmark process."""
    return {"parts": list(parts), "peak_rss": 50 * 2**20, "policy": {}} | more


def rows_of(report):
    """Rows of a report by (name, cap)."""
    return {(row["name"], row["cap"]): row for row in report.rows}
