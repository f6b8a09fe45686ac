"""What the store and the queue count, as Prometheus reads it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from gguf_tools.process import peak_rss_bytes
from orchestrator.events import Phase
from orchestrator.serve.backend import Backend
from orchestrator.serve.bodies import Bodies
from orchestrator.serve.gate import Gate, Unread

PREFIX = "moe_edge_"
Labels = Mapping[str, str]


def metrics_text(backend: Backend, gate: Gate, unread: Unread, bodies: Bodies) -> str:
    """Counters and gauges in Prometheus's text format."""
    lines: list[str] = []
    last = ""
    for name, kind, help, labels, value in _samples(backend, gate, unread, bodies):
        if name != last:
            lines += [f"# HELP {PREFIX}{name} {help}", f"# TYPE {PREFIX}{name} {kind}"]
            last = name
        said = ",".join(f'{key}="{text}"' for key, text in labels.items())
        lines.append(f"{PREFIX}{name}{{{said}}} {value}" if said else f"{PREFIX}{name} {value}")
    return "\n".join(lines) + "\n"


def _samples(
    backend: Backend, gate: Gate, unread: Unread, bodies: Bodies
) -> Iterator[tuple[str, str, str, Labels, float]]:
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
    plan = backend.engine.plan
    yield "ram_bytes", "gauge", "Cap on all that the model takes.", {}, plan.ram_bytes
    yield "budget_bytes", "gauge", "Cap on the slots of experts.", {}, plan.budget_bytes
    if not backend.engine.managed:
        return
    stats = backend.engine.store.stats()
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
