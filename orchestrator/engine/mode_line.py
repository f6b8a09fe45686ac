"""One line about an engine: what runs, and why or how."""

from __future__ import annotations

from gguf_tools.experts import DEFAULT_KV
from gguf_tools.units import format_size
from orchestrator.config import Config
from orchestrator.engine.driver import Driver
from orchestrator.engine.load import Loaded, Loader
from orchestrator.memory.layouts import layout_text


def mode_line(config: Config, loader: Loader, loaded: Loaded) -> str:
    """The path, the policy and its slots, how misses are served, the micro-batch, the context."""
    plan, driver = loaded.plan, loaded.driver
    context = f", micro-batch {plan.n_ubatch}, context {loaded.context.n_ctx}"
    if config.kv != DEFAULT_KV:
        context += f" in {config.kv}"
    if not isinstance(driver, Driver):
        return f"plain upstream path: {plan.reason}{context}"
    slots = format_size(plan.slots.total_bytes) if plan.slots else "no"
    stats = driver.store.stats()
    direct = "direct I/O" if stats.direct_io else "buffered I/O"
    pinned = stats.host_pinned or not loader.on_gpu
    pageable = "" if pinned else ", host memory not pinned"
    text = f"managed: {driver.policy.describe()}, {slots} of expert slots, {direct}{pageable}"
    # A policy that keeps all experts in memory has learned since it started; others have settings
    # that change while they run.
    resident = driver.policy.wants.all_resident
    loses = loaded.runs.loses if resident else loader.planner.loses(plan)
    return text + layout_text(driver.store.spec) + loses.text + _served(driver, loader) + context


def _served(driver: Driver, loader: Loader) -> str:
    """How a GPU gets the experts that it lacks."""
    if loader.gpu is None:
        return ""
    asked, served = loader.misses.mode, driver.store.misses()
    return f", misses: {served}" + (f" ({asked} cannot be had)" if served != asked else "")
