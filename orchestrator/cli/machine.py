"""Examines this machine for a model: memory, disk, GPU, and the plan. Output of `moe-edge plan`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from gguf_tools import built
from gguf_tools.experts import ExpertModel
from gguf_tools.units import format_size
from orchestrator.cost.disk import Bandwidth, bytes_per_s, kept_bandwidth
from orchestrator.cost.planner import Planner, ResolvedPlan
from orchestrator.cost.plans import Frontier
from orchestrator.cost.speeds import spare_bytes
from orchestrator.errors import MoeEdgeError
from orchestrator.native import Bandwidths, measure_device
from orchestrator.native.llama import Bindings
from orchestrator.plan.machine import one_of_several
from orchestrator.plan.records import PlanRequest

_MEMORY_BYTES = 256 * 2**20
_MEMORY_SECONDS = 0.5


def examine(
    request: PlanRequest,
    begins: Callable[[str], None] = lambda _what: None,
    disk: Bandwidth | None = None,
) -> tuple[dict[str, Any], Frontier | None]:
    """Measure this machine, and predict how a model would run on it. This takes some seconds.

    Returns (facts, plans). The facts are JSON values by name, such as the free memory. The plans
    are settings with which the model fits in memory, with predicted speed and quality loss. They
    are None if nothing fits. They are also None with a GPU, because speeds are predicted only for
    the CPU.

    begins: called with the name of each measurement.
    disk: read speed of the disk. None measures the disk that has the model file.

    Raises MoeEdgeError if the model cannot be read, OSError if the disk cannot be measured.
    """
    bindings, config = Bindings.load(), request.config
    threads = config.n_threads
    with ExpertModel.open(config.model, config.low) as model:
        planner, note = _planner(bindings, request, model, disk)
        gpu, machine = planner.gpu, planner.machine
        begins("Measuring the disk")
        disk = disk or kept_bandwidth(model, config)
        begins("Measuring the memory")
        memory_speed = memory_bandwidth(threads, spare_bytes(request, model))
        begins("Measuring this machine")
        runs, plans, plan_note = None, None, ""
        notes = list[str]()
        if gpu is None:
            try:
                plans = planner.frontier(config)
            except MoeEdgeError as error:
                plan_note = str(error)
        if plans is not None and plans.why_not:
            notes.append(f"The quality loss (KL) is unknown: {plans.why_not}")
        on_disk = model.lookup_text and (
            f"These tensors stay on disk, except with --policy plain: {model.lookup_text}"
        )
        notes += filter(None, [planner.note, on_disk])
        try:
            runs = planner.runs(config)
        except MoeEdgeError as error:
            plan_note = str(error)
        expert_bytes = model.tier_bytes[0] // (model.n_layers * model.n_expert)
        best = model.tiers[0].name
    copies = measure_device(bindings.library(), gpu.info, threads) if gpu else None
    return {
        "threads": threads,
        "memory_bytes": machine.memory_bytes,
        "usable_bytes": machine.usable_bytes,
        "system": f"{built.instruction_set()} libraries; "
        + bindings.api.llama_print_system_info().decode("utf-8", "replace").strip(),
        "memory_bytes_per_s": memory_speed,
        "model": str(config.model),
        "expert_bytes": expert_bytes,
        "disk": disk._asdict(),
        "gpu": asdict(gpu.device) if gpu else None,
        "gpu_note": note,
        "copies": copies._asdict() if copies else None,
        "plan": plan_line(runs) if runs else None,
        "kl": runs.loses.kl if runs else None,
        "plan_note": plan_note,
        "notes": notes,
        "candidates": [asdict(each) for each in plans.candidates] if plans else [],
        "taken": plans.candidates.index(plans.taken) if plans else None,
        "why": plans.why if plans else None,
        "best_tier": best,
        "lookup": model.lookup_text,
        "disturbed": plans.disturbed if plans else False,
    }, plans


def plan_line(runs: ResolvedPlan) -> str:
    """Return one line that says how a model runs: the policy and its settings (the plan).

    The line has the reason for the plan, its quality loss, its memory and its context length.
    """
    plan = runs.plan
    reason = plan.reason if plan.managed else f"llama.cpp's own path: {plan.reason}"
    loss = runs.loses.text
    where = f"on {plan.device.name}" if plan.device else "in main memory"
    size = format_size(plan.total_bytes)
    return f"{reason}{loss}; the model takes {size} {where}; context {plan.n_ctx} tokens"


def _planner(
    bindings: Bindings, request: PlanRequest, model: ExpertModel, disk: Bandwidth | None
) -> tuple[Planner, str]:
    """Return (planner, note about the GPU) for a model.

    The planner predicts the memory and the speed with which the model would run. The note says why
    no GPU is used, or that the machine has several. If the requested device is not available, the
    planner is for the CPU. disk: speed of the disk, for a model that is not stored here.
    """
    try:
        planner = Planner(request, model, disk)
    except MoeEdgeError as error:
        here = request.config.with_changes(device="cpu", vram=None, misses=None)
        return Planner(replace(request, config=here), model, disk), str(error)
    if planner.gpu is not None:
        return planner, one_of_several(bindings, planner.gpu) or ""
    built = bindings.api.llama_supports_gpu_offload()
    return planner, "not requested" if built else "none that this build supports"


def memory_bandwidth(threads: int, most_bytes: int = _MEMORY_BYTES) -> float:
    """Return the bytes per second that `threads` threads read together from host memory.

    most_bytes: memory that the measurement may allocate.
    """
    parts = [np.ones(min(_MEMORY_BYTES, most_bytes) // threads // 8) for _ in range(threads)]

    def work(index: int, in_time: Callable[[], bool]) -> int:
        total = 0
        while in_time():
            parts[index].max()
            total += parts[index].nbytes
        return total

    return bytes_per_s(work, threads, _MEMORY_SECONDS)


def render(found: dict[str, Any]) -> str:
    """Format the facts about the machine that `examine` returned as text."""
    size, usable = format_size(found["memory_bytes"]), format_size(found["usable_bytes"])
    disk, gpu, copies = found["disk"], found["gpu"], found["copies"]
    lines = [
        f"CPU       {found['threads']} threads; {found['system']}",
        f"Memory    {size} free, of which moe-edge may use {usable}; "
        f"bandwidth {_speed(found['memory_bytes_per_s'])}",
        f"Disk      reads experts at {_speed(disk['bytes_per_s'])}",
    ]
    if gpu is None:
        lines.append(f"GPU       {found['gpu_note']}")
    else:
        pinned = _speed(copies["pinned"]) if copies["pinned"] else "refused"
        lines += [
            f"GPU       {gpu['name']} ({gpu['description']}): {format_size(gpu['memory_bytes'])} "
            f"of {format_size(gpu['total_bytes'])} memory free",
            f"Copies    to the GPU: {pinned} from pinned memory, {_speed(copies['pageable'])} "
            f"from pageable memory; a round trip takes {copies['round_trip_us']:.0f} us",
            *([f"          {found['gpu_note']}"] if found["gpu_note"] else []),
            f"Misses    {misses_line(Bandwidths(**copies), found['expert_bytes'])}",
        ]
    if found["plan"] or found["candidates"]:
        lines.append(f"Model     {found['plan'] or found['plan_note']}")
    return "\n".join(lines)


def misses_line(copies: Bandwidths, expert_bytes: int) -> str:
    """Return a text about the time that a GPU waits for an expert that is not in its memory.

    The text also says whether `--misses auto` copies such an expert or computes it on the CPU.
    copies: measured speeds of copies to the GPU, and of the CPU.
    """
    if not copies.pinned:
        return "missing experts are copied to the GPU, because host memory cannot be pinned"
    waits_s = 2 * copies.round_trip_us / 1e6  # seconds: for gate and up together, and for down
    ways = {"copied to the GPU": copies.pinned, "computed on the CPU": copies.compute}
    took = {way: expert_bytes / speed for way, speed in ways.items() if speed}
    times = ", or ".join(f"{way} in {seconds * 1e3:.2f} ms" for way, seconds in took.items())
    here = took.pop("computed on the CPU", float("inf")) + waits_s
    first = (
        "computed on the CPU" if here < min(took.values()) else min(took, key=lambda way: took[way])
    )
    return (
        f"an expert of {format_size(expert_bytes)} that is not in GPU memory is {times}. "
        f"Computing on the CPU adds {waits_s * 1000.0:.2f} ms per layer for round trips between "
        f"GPU and CPU. With --misses auto, the first missing expert of a layer is {first}"
    )


def _speed(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.2f} GB/s"
