"""What people and monitors see of the server: the page at `/`, and what Prometheus reads."""

from __future__ import annotations

import hashlib
import re
from base64 import b64encode
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from starlette.responses import Response

from gguf_tools.process import peak_rss_bytes
from orchestrator.events import Phase
from orchestrator.runtime.runtime import Runtime
from orchestrator.serve.served import Served
from orchestrator.serve.state import State

# One file of ours, which works without network.
PAGE = Path(__file__).with_name("page.html")
PREFIX = "moe_edge_"
_SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? ", re.MULTILINE)
Labels = Mapping[str, str]


def page_response() -> Response:
    """The page, and what a browser may do for it: run its own script, use its own style, and ask
    this server. Whatever an answer brought into it could do neither."""
    text = PAGE.read_text(encoding="utf-8")
    may = (
        "default-src 'none'",
        f"style-src '{_digest(text, 'style')}'",
        f"script-src '{_digest(text, 'script')}'",
        "img-src data:",
        "connect-src 'self'",
        "frame-ancestors 'none'",
        "base-uri 'none'",
        "form-action 'none'",
    )
    headers = {
        "content-security-policy": "; ".join(may),
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cache-control": "no-cache",
    }
    return Response(text, headers=headers, media_type="text/html")


def _digest(text: str, tag: str) -> str:
    """An inline element as Content Security Policy names it (level 2, section 7.17.2)."""
    (inner,) = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
    return "sha256-" + b64encode(hashlib.sha256(inner.encode()).digest()).decode()


def picture(runtime: Runtime) -> dict[str, Any]:
    """Return what the page shows: the model, where each expert is, how often tokens used it, hits
    and bytes, and what memory is in use.

    resident and used: uint8 and little-endian uint32 [layers, experts] in base64. streams_below:
    without managed experts, a --ram in bytes with which some of them come from the disk.
    """
    plan, stats = runtime.plan, runtime.stats()
    about = {"model": runtime.about.name, "mode": stats.mode, "memory": runtime.memory()}
    if stats.counts is None or stats.resident is None:
        return about | {"layers": 0, "streams_below": plan.total_bytes - plan.expert_bytes // 2}
    counts = stats.counts
    read = [*counts.demand_bytes, *counts.prefetch_bytes, counts.transition_bytes]
    return {
        **about,
        "layers": stats.resident.shape[0],
        "experts": stats.resident.shape[1],
        "tiers": list(plan.tier_names),
        "resident": b64encode(stats.resident.tobytes()).decode(),
        "used": b64encode(np.asarray(stats.used, "<u4").tobytes()).decode(),
        "requests": sum(counts.requests),
        "hits": sum(counts.hits),
        "bytes_read": sum(read),
    }


def metrics_text(state: State, served: Served) -> str:
    """Counters and gauges in Prometheus's text format."""
    lines: list[str] = []
    last = ""
    for name, kind, help, labels, value in _samples(state, served):
        if name != last:
            lines += [f"# HELP {PREFIX}{name} {help}", f"# TYPE {PREFIX}{name} {kind}"]
            last = name
        said = ",".join(f'{key}="{text}"' for key, text in labels.items())
        lines.append(f"{PREFIX}{name}{{{said}}} {value}" if said else f"{PREFIX}{name} {value}")
    return "\n".join(lines) + "\n"


def of_replica(text: str, replica: str) -> str:
    """Metrics with one more label, by which those of several servers are told apart."""

    def named(sample: re.Match[str]) -> str:
        labels = f'{sample[2]},replica="{replica}"' if sample[2] else f'replica="{replica}"'
        return f"{sample[1]}{{{labels}}} "

    return _SAMPLE.sub(named, text)


def together(texts: Iterable[str]) -> str:
    """Metrics of several servers as one text, in which each name has its head once."""
    families: dict[str, dict[str, None]] = {}
    for text in texts:
        for line in text.splitlines():
            if line.startswith("# "):
                lines = families.setdefault(line.split()[2], {})
            lines[line] = None
    return "".join(f"{line}\n" for lines in families.values() for line in lines)


def _samples(state: State, served: Served) -> Iterator[tuple[str, str, str, Labels, float]]:
    gate, bodies, unread = state.gate, state.bodies, state.unread
    yield "requests_running", "gauge", "Requests that decode now.", {}, gate.running
    yield "requests_waiting", "gauge", "Requests that wait for their turn.", {}, gate.waiting
    yield "requests_refused_total", "counter", "Requests refused with 429.", {}, gate.refused
    yield "unread_bytes", "gauge", "Answers that nobody has read.", {}, unread.n_bytes
    yield "body_bytes", "gauge", "Requests that arrive or wait.", {}, bodies.kept_bytes
    yield "bodies_waiting", "gauge", "Requests that wait to be looked at.", {}, bodies.waiting
    refused = bodies.refused
    yield "bodies_refused_total", "counter", "Requests refused for want of room.", {}, refused
    peak = peak_rss_bytes()
    yield "peak_resident_bytes", "gauge", "Most memory that the process had.", {}, peak
    plan, stats = served.runtime.plan, served.runtime.stats().counts
    yield "ram_bytes", "gauge", "Cap on all that the model takes.", {}, plan.ram_bytes
    yield "budget_bytes", "gauge", "Cap on the slots of experts.", {}, plan.budget_bytes
    if stats is None:
        return
    by_phase = (
        ("expert_requests_total", "Experts that tokens asked for.", stats.requests),
        ("expert_hits_total", "Of those, in memory already.", stats.hits),
        ("demand_bytes_total", "Bytes read because a token waited.", stats.demand_bytes),
        ("prefetch_bytes_total", "Bytes read ahead.", stats.prefetch_bytes),
        ("wait_microseconds_total", "Time that computing waited for bytes.", stats.wait_us),
    )
    for name, help, values in by_phase:
        for phase in Phase:
            yield name, "counter", help, {"phase": phase.name.lower()}, values[phase]
    help = "Bytes read to exchange versions of experts."
    yield "transition_bytes_total", "counter", help, {}, stats.transition_bytes
    for name, help, table in (
        ("experts_decided_total", "Experts by the precision that was decided.", stats.routed),
        ("matrices_computed_total", "Matrices by the precision computed.", stats.computed),
    ):
        for phase in Phase:
            for tier, count in zip(plan.tier_names, table[phase], strict=False):
                labels = {"phase": phase.name.lower(), "tier": tier}
                yield name, "counter", help, labels, count
