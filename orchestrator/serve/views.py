"""The page at `/`, its data, and the metrics for Prometheus."""

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

PAGE = Path(__file__).with_name("page")
# All scripts of the page are one script element, so that they share their constants.
SCRIPTS = ("base.js", "markdown.js", "store.js", "images.js", "chat.js", "models.js", "experts.js")
PREFIX = "moe_edge_"
_SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? ", re.MULTILINE)
Labels = Mapping[str, str]


def page_response(changes_model: bool = False) -> Response:
    """Return the server's web page, with a Content Security Policy against foreign scripts.

    `changes_model` tells whether the page offers to download models and to change the loaded one.

    The policy allows only the page's own script and style, and connections to this server. HTML in
    an answer therefore cannot run scripts. The page is a single text that loads nothing else.
    """
    text = _page()
    if changes_model:
        text = text.replace("<body>", '<body class="may-change">')
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
        # Browsers otherwise look up the host names of links before a click.
        "x-dns-prefetch-control": "off",
        "cache-control": "no-cache",
    }
    return Response(text, headers=headers, media_type="text/html")


def _page() -> str:
    """Return the text of the page, with its style and its scripts."""
    read = {name: (PAGE / name).read_text(encoding="utf-8") for name in ("page.css", *SCRIPTS)}
    script = "".join(read[name] for name in SCRIPTS)
    page = (PAGE / "page.html").read_text(encoding="utf-8")
    page = page.replace("<style></style>", f"<style>\n{read['page.css']}</style>")
    return page.replace("<script></script>", f"<script>\n{script}</script>")


def _digest(text: str, tag: str) -> str:
    """Return the hash of the page's inline element `tag`, for its Content Security Policy.

    The format is that of CSP level 2, section 7.17.2.
    """
    (inner,) = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
    return "sha256-" + b64encode(hashlib.sha256(inner.encode()).digest()).decode()


def picture(runtime: Runtime) -> dict[str, Any]:
    """Return the data about the model's experts that the web page draws, as a JSON object.

    - tiers: the names of the precisions.
    - resident: the best precision of each expert in memory, uint8 [layers, experts] in base64. A
      value is an index into `tiers`, or 254 for an expert that is only on disk.
    - used: how often tokens used each expert, little-endian uint32 of the same shape, in base64.
    - images: the limits for images in requests, or None if the model takes none.
    - streams_below: only for a model without an expert cache, instead of tiers, resident and used.
      The page suggests this value of --ram, in bytes, for a restart with an expert cache.
    """
    plan, stats = runtime.plan, runtime.stats()
    about: dict[str, Any] = {"model": runtime.about.name, "mode": stats.mode}
    about["memory"] = runtime.memory()
    about["images"] = None if runtime.images is None else runtime.images.as_dict()
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
    """Return the server's own metrics, without llama.cpp's, in Prometheus' text format."""
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
    """Return the metrics `text` of one server with the label `replica` added to each metric."""

    def named(sample: re.Match[str]) -> str:
        labels = f'{sample[2]},replica="{replica}"' if sample[2] else f'replica="{replica}"'
        return f"{sample[1]}{{{labels}}} "

    return _SAMPLE.sub(named, text)


def together(texts: Iterable[str]) -> str:
    """Return the metrics of several servers as one text, in which each metric has one header."""
    families: dict[str, dict[str, None]] = {}
    for text in texts:
        for line in text.splitlines():
            if line.startswith("# "):
                lines = families.setdefault(line.split()[2], {})
            lines[line] = None
    return "".join(f"{line}\n" for lines in families.values() for line in lines)


def _samples(state: State, served: Served) -> Iterator[tuple[str, str, str, Labels, float]]:
    """Yield (name, kind, help, labels, value) of each metric."""
    gate, bodies, unread = state.gate, state.bodies, state.unread
    yield "requests_running", "gauge", "Requests that are being answered.", {}, gate.running
    yield "requests_waiting", "gauge", "Requests that wait for their turn.", {}, gate.waiting
    yield "requests_refused_total", "counter", "Requests refused with 429.", {}, gate.refused
    yield (
        "unread_bytes",
        "gauge",
        "Bytes of answers that clients have not read.",
        {},
        unread.n_bytes,
    )
    yield (
        "body_bytes",
        "gauge",
        "Bytes of request bodies that are arriving or waiting.",
        {},
        bodies.kept_bytes,
    )
    yield (
        "bodies_waiting",
        "gauge",
        "Number of request bodies that wait to be parsed.",
        {},
        bodies.waiting,
    )
    refused = bodies.refused
    yield (
        "bodies_refused_total",
        "counter",
        "Requests refused for lack of memory for their bodies.",
        {},
        refused,
    )
    peak = peak_rss_bytes()
    yield "peak_resident_bytes", "gauge", "Peak resident memory of the process.", {}, peak
    plan, stats = served.runtime.plan, served.runtime.stats().counts
    yield "ram_bytes", "gauge", "Memory limit of the model (--ram).", {}, plan.ram_bytes
    yield "budget_bytes", "gauge", "Memory limit of the expert cache.", {}, plan.budget_bytes
    if stats is None:
        return
    by_phase = (
        ("expert_requests_total", "Number of experts that the router selected.", stats.requests),
        (
            "expert_hits_total",
            "Number of experts that the router selected and that were in memory.",
            stats.hits,
        ),
        ("demand_bytes_total", "Bytes read while a token waited for them.", stats.demand_bytes),
        ("prefetch_bytes_total", "Bytes prefetched.", stats.prefetch_bytes),
        (
            "wait_microseconds_total",
            "Time that computing waited for reads of experts.",
            stats.wait_us,
        ),
    )
    for name, help, values in by_phase:
        for phase in Phase:
            yield name, "counter", help, {"phase": phase.name.lower()}, values[phase]
    help = "Bytes read to change the precision of experts in memory."
    yield "transition_bytes_total", "counter", help, {}, stats.transition_bytes
    for name, help, table in (
        (
            "experts_decided_total",
            "Number of requested experts, by the precision that the policy chose.",
            stats.routed,
        ),
        (
            "matrices_computed_total",
            "Number of computed expert matrices, by precision.",
            stats.computed,
        ),
    ):
        for phase in Phase:
            for tier, count in zip(plan.tier_names, table[phase], strict=False):
                labels = {"phase": phase.name.lower(), "tier": tier}
                yield name, "counter", help, labels, count
