"""What this machine has, how fast it moves bytes, how a model would lie: `moe-edge doctor`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import click
import numpy as np

from gguf_tools import built
from gguf_tools.columns import aligned
from gguf_tools.experts import ExpertModel
from gguf_tools.process import default_threads
from gguf_tools.units import format_size
from orchestrator.chat.console import Console
from orchestrator.cli.help import Command
from orchestrator.cli.options import JSON, chat_config, model_options, say_result
from orchestrator.config import Config
from orchestrator.cost.disk import bytes_per_s, kept_bandwidth, read_bandwidth
from orchestrator.cost.planner import Planner, Runs
from orchestrator.cost.plans import Candidate, behind_text
from orchestrator.cost.speeds import DISTURBED
from orchestrator.cost.time import PROMPT_TOKENS, spare_bytes
from orchestrator.errors import MoeEdgeError
from orchestrator.memory.machine import more_than_there, one_of_several
from orchestrator.native import Bandwidths, measure_device
from orchestrator.native.llama import Bindings
from orchestrator.policy import PLAIN, known_policies

# Of a plan, for --json.
_SHOWN = ("token_ms", "token_ms_behind", "first_prompt_ms", "prompt_ms", "hit_rate", "read_bytes")
_MEMORY_BYTES = 256 * 2**20
_MEMORY_SECONDS = 0.5


def examine(config: Config, begins: Callable[[str], None] = lambda _what: None) -> dict[str, Any]:
    """Measures this machine for a few seconds; begins gets what is being measured. JSON-ready.

    gpu_note: why there is no GPU, or that there are others. plan: what runs, what it loses, and
    where it lies, None where nothing does, and plan_note says why; kl: its loss; chosen: why a loss
    that is allowed chose it. ram_note: what is wrong with the cap on memory. expected: what is
    predicted on the CPU of what runs, and then of each other policy that fits; profiled: by what
    earlier runs used, and not as if all experts were alike; disturbed: while other programs ran.

    Raises MoeEdgeError for a model that cannot be read, OSError for a disk that fails."""
    bindings = Bindings.load()
    threads = config.threads or default_threads()
    with ExpertModel.open(config.model, config.low) as model:
        planner, note = _planner(bindings, config, model)
        gpu, machine = planner.gpu, planner.machine
        begins("Measuring the disk")
        disk = read_bandwidth(model, threads=config.io_threads)
        # What is found now counts for the plan, for its prediction, and for those of later runs.
        kept_bandwidth(model, config, disk)
        begins("Measuring this machine")  # a loss that is allowed chooses by speeds
        runs, plan_note = None, ""
        try:
            runs = planner.runs(config)
        except MoeEdgeError as error:
            plan_note = str(error)
        begins("Measuring the memory")
        memory_speed = memory_bandwidth(threads, spare_bytes(config, model))
        expert_bytes = model.tier_bytes[0] // (model.n_layers * model.n_expert)
        expected: list[Candidate] = []
        profiled = disturbed = False
        if gpu is None and runs is not None:
            begins("Measuring the processor")
            others = _others(planner, config, runs)
            with planner.times(fresh=True) as times:
                expected = [planner.candidate(times, each) for each in (runs, *others)]
                profiled, disturbed = times.profiled, times.disturbed
    copies = measure_device(bindings.library(), gpu.info, threads) if gpu else None
    return {
        "threads": threads,
        "memory_bytes": machine.memory_bytes,
        "usable_bytes": machine.usable_bytes,
        "system": f"{built.instructions()} libraries; "
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
        "chosen": planner.chosen,
        "ram_note": more_than_there(config.ram, machine) or "",
        "expected": [
            {"policy": each.name, "tiers": "/".join(each.tiers)}
            | {name: value for name, value in each.as_dict().items() if name in _SHOWN}
            | {"chosen": number == 0}
            for number, each in enumerate(expected)
        ],
        "profiled": profiled,
        "disturbed": disturbed,
    }


def plan_line(runs: Runs) -> str:
    """What runs, what it loses, and where it lies."""
    plan = runs.plan
    how = plan.reason if plan.managed else f"plain upstream path: {plan.reason}"
    where = f"on {plan.device.name}" if plan.device else "in main memory"
    size = format_size(plan.total_bytes)
    return f"{how}{runs.loses.text}; {size} {where}; context {plan.n_ctx} tokens"


def _planner(bindings: Bindings, config: Config, model: ExpertModel) -> tuple[Planner, str]:
    """What says what runs, and why there is no GPU, or that there are others. For the CPU where
    the device that was asked for cannot be had."""
    try:
        planner = Planner(config, model)
    except MoeEdgeError as error:
        here = config.with_changes(device="cpu", vram=None, misses=None)
        return Planner(here, model), str(error)
    if planner.gpu is not None:
        return planner, one_of_several(bindings, planner.gpu) or ""
    built = bindings.api.llama_supports_gpu_offload()
    return planner, "not asked for" if built else "none that this build can use"


def _others(planner: Planner, config: Config, runs: Runs) -> list[Runs]:
    """What would run with the other policies that fit, where none was named."""
    found: list[Runs] = []
    ours = runs.plan.policy.name if runs.plan.policy else PLAIN
    for name in known_policies() if config.policy is None else ():
        if name != ours:
            with suppress(MoeEdgeError):
                found.append(planner.compared(config.compared(policy=name)))
    # The policy that keeps everything in memory is none where that does not fit.
    return [each for each in found if each.plan.total_bytes <= each.plan.ram_bytes]


def memory_bandwidth(threads: int, most_bytes: int = _MEMORY_BYTES) -> float:
    """Bytes per second that so many threads read together from the host's memory. most_bytes: of
    which they may take so much."""
    parts = [np.ones(min(_MEMORY_BYTES, most_bytes) // threads // 8) for _ in range(threads)]

    def work(index: int, in_time: Callable[[], bool]) -> int:
        total = 0
        while in_time():
            parts[index].max()
            total += parts[index].nbytes
        return total

    return bytes_per_s(work, threads, _MEMORY_SECONDS)


def render(found: dict[str, Any]) -> str:
    """The report as text."""
    size, usable = format_size(found["memory_bytes"]), format_size(found["usable_bytes"])
    disk, gpu, copies = found["disk"], found["gpu"], found["copies"]
    lines = [
        f"CPU       {found['threads']} threads; {found['system']}",
        f"Memory    {size} free, {usable} usable; read at {_speed(found['memory_bytes_per_s'])}",
        *([f"          {found['ram_note']}"] if found["ram_note"] else []),
        f"Disk      {_speed(disk['bytes_per_s'])}, {'direct' if disk['direct'] else 'buffered'} "
        f"reads of about {format_size(disk['slice_bytes'])} from {found['model']}",
    ]
    if gpu is None:
        lines.append(f"GPU       {found['gpu_note']}")
    else:
        pinned = _speed(copies["pinned"]) if copies["pinned"] else "refused"
        lines += [
            f"GPU       {gpu['name']}: {gpu['description']}, {format_size(gpu['memory_bytes'])} of "
            f"{format_size(gpu['total_bytes'])} free",
            f"Copies    to the GPU: {pinned} pinned, {_speed(copies['pageable'])} pageable; "
            f"{copies['round_trip_us']:.0f} us there and back",
            *([f"          {found['gpu_note']}"] if found["gpu_note"] else []),
            f"Misses    {misses_line(Bandwidths(**copies), found['expert_bytes'])}",
        ]
    lines.append(f"Model     {found['plan'] or found['plan_note']}")
    if found["chosen"]:
        lines.append(f"          {found['chosen']}")
    if found["expected"]:
        lines += _expected_lines(found)
    return "\n".join(lines)


def _expected_lines(found: dict[str, Any]) -> list[str]:
    profiled = found["profiled"]
    used = "by what earlier runs used" if profiled else "as if all experts were used alike"
    rows = [["policy", "tiers", "ms/token", "tok/s", "first prompt", "prompt", "hit", "MB/token"]]
    rows += [
        [
            each["policy"] + " *" * each["chosen"],
            each["tiers"],
            f"{each['token_ms']:.1f}",
            f"{1e3 / each['token_ms']:.1f}",
            f"{each['first_prompt_ms'] / 1e3:.1f} s",
            f"{each['prompt_ms'] / 1e3:.1f} s",
            f"{each['hit_rate']:.1%}",
            f"{each['read_bytes'] / 1e6:.1f}",
        ]
        for each in found["expected"]
    ]
    return [
        f"Predicted behind prompts of {PROMPT_TOKENS} tokens, {used} (* is what would run):",
        *(f"          {line}" for line in aligned(rows)),
        *filter(None, [behind_text(found["expected"][0]["token_ms_behind"])]),
        *([DISTURBED] if found["disturbed"] else []),
    ]


def misses_line(copies: Bandwidths, expert_bytes: int) -> str:
    """How long an expert that the GPU lacks takes on each way, and which way --misses auto goes."""
    if not copies.pinned:
        return "all are copied: host memory cannot be pinned"
    beside = 2 * copies.round_trip_us / 1e6  # of gate and up, and of down
    ways = {"copied": copies.pinned, "read in place": copies.read, "computed here": copies.compute}
    took = {way: expert_bytes / speed for way, speed in ways.items() if speed}
    times = ", ".join(f"{way} {seconds * 1e3:.2f} ms" for way, seconds in took.items())
    here = took.pop("computed here", float("inf")) + beside
    first = "computed here" if here < min(took.values()) else min(took, key=lambda way: took[way])
    return (
        f"an expert of {format_size(expert_bytes)}: {times} and {beside * 1e3:.2f} ms a layer; "
        f"the first of a layer is {first}, more are shared"
    )


def _speed(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.2f} GB/s"


@click.command(cls=Command)
@model_options
@JSON
def doctor(as_json: bool, **options: Any) -> None:
    """Measure this machine, and say how a model would run on it."""
    with Console().bars() as console:
        found = examine(chat_config(options), lambda what: console.bar(what, None))
    say_result(found, render, as_json)
