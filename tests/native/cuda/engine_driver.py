"""Decode greedily with an evaluator.

A separate program, because a loaded backend cannot be unloaded.

engine_driver.py LIBRARY JOB

LIBRARY is a libggml-cuda.so to load, or "-". JOB is JSON: options of Config.build, prompt,
n_decode, and: warm: load every expert before the first token. answer: tokens to continue with
instead of its own. routes: report the routed experts of each token. watch: prefill has a callback
that accepts the default tiers, and the last token but one is prefill.

Prints JSON: its own tokens, the logits before each of them and after the last, statistics, and the
device memory in use after each chunk of the prompt and at the end. Options that do not work print
{"error": message, "needed": bytes of the smallest budget that works, or null}.
"""

import ctypes
import json
import sys
from pathlib import Path

import numpy as np

from orchestrator.config import Config
from orchestrator.errors import BudgetError, MoeEdgeError
from orchestrator.events import Phase
from orchestrator.native import context_memory, find_device
from orchestrator.native.llama import Bindings
from orchestrator.runtime.runtime import Runtime


def load_backend(library):
    folder = Path(Bindings.load().api._lib._name).parent
    ggml = ctypes.CDLL(str(folder / "libggml.so"))
    ggml.ggml_backend_load.restype = ctypes.c_void_p
    if not ggml.ggml_backend_load(library.encode()):
        sys.exit(f"{library} is not a backend")


def taken(library, runtime):
    """Return a function that returns used device bytes.

    They are the peak on an emulated GPU, and the current use on a real one.
    """
    if library != "-":
        peak = ctypes.CDLL(library).moe_emu_peak_bytes
        peak.restype = ctypes.c_uint64
        return lambda: int(peak())
    gpu = runtime._loader.gpu
    native = Bindings.load().library()
    before = gpu.info.memory_bytes
    return lambda: before - find_device(native, gpu.info.name).memory_bytes


def used(library):
    """Return the bytes of the emulated device in use, including loaded kernels, or None."""
    if library == "-":
        return None
    now = ctypes.CDLL(library).moe_emu_used_bytes
    now.restype = ctypes.c_uint64
    return int(now())


def bytes_that_came(e, at_first):
    """Return the bytes of all experts that are in the best tier now and were not at first."""
    best = (at_first != 0) & (e.inside.store.resident() == 0)
    sizes = [
        sum(tiers[0].expert_bytes for tiers in kinds if tiers[0]) for kinds in e.inside.model.slices
    ]
    return int(best.sum(axis=1) @ np.array(sizes))


def chosen(event):
    """Return the step, the layer, and each token's experts in ascending order."""
    return [event.step, event.layer, *np.sort(event.ids_array, axis=1).ravel().tolist()]


def planned_slots(runtime):
    """Return the bytes of slots that were planned before GPU memory was measured."""
    slots = runtime._loader.planner.plan(runtime.inside.config).slots
    return slots.total_bytes if slots else 0


def main():
    library, job = sys.argv[1], json.loads(sys.argv[2])
    if library != "-":
        load_backend(library)
    if "pinned_limit" in job:
        ctypes.CDLL(library).moe_emu_limit_pinned(ctypes.c_uint64(job["pinned_limit"]))
    if "refuse_pin" in job:
        ctypes.CDLL(library).moe_emu_refuse_pin(ctypes.c_int64(job["refuse_pin"]))
    try:
        print(json.dumps(decode(library, job)))
    except MoeEdgeError as error:
        needed = error.needed_bytes if isinstance(error, BudgetError) else None
        print(json.dumps({"error": str(error), "needed": needed}))


def decode(library, job):
    prompt, tokens = job["prompt"], []
    with Runtime.open(Config.build(**job["options"])) as runtime, runtime.evaluator() as e:
        at_first = e.inside.store.resident() if e.inside.managed else None
        on_device = taken(library, runtime) if e.plan.device else lambda: 0
        if not runtime._loader.on_gpu:
            e.inside.loaded.warm_up()  # as a GPU's: both begin with the same experts
        step = e.plan.n_ubatch
        if job["warm"]:
            layers, experts = range(e.inside.model.n_layers), range(e.inside.model.n_expert)
            e.inside.store.warm([(layer, e, 0) for layer in layers for e in experts])
        took = []
        routes = []
        if job["routes"]:
            e.inside.store.set_route(lambda event: routes.append(chosen(event)), 0)
        for start in range(0, len(prompt), step):
            rows = [e.eval(prompt[start : start + step], start)[-1]]
            took.append(on_device())
        watched = []
        if job["watch"]:
            e.inside.store.set_route(
                lambda event: watched.append((event.phase, event.n_tokens)), 0, (Phase.PREFILL,)
            )
        for i in range(job["n_decode"]):
            tokens.append(int(rows[-1].argmax()))
            fed = job["answer"][i : i + 1] if "answer" in job else tokens[-1:]
            phase = Phase.PREFILL if job["watch"] and i == job["n_decode"] - 2 else Phase.DECODE
            rows.append(e.eval(fed, len(prompt) + i, phase=phase)[-1])
        found = {
            "tokens": tokens,
            "watched": watched,
            "routes": routes,
            "rows": [row.tolist() for row in rows],
            "device": e.plan.device.name if e.plan.device else None,
            "managed": e.inside.managed,
            "mode": runtime.mode,
            "note": runtime.note,
            "took": [*took, on_device()],
            "used": used(library),
            "llama": context_memory(Bindings.load().library(), e.inside.context.handle)[1],
            "cap": e.plan.cap_bytes,
            "slots": e.plan.slots.total_bytes if e.plan.slots else 0,
            "slots_at_first": planned_slots(runtime),
            "planned": e.plan.total_bytes,
        }
        if e.inside.managed:
            e.inside.store.check()
            stats = e.inside.store.stats()
            found["over_budget"] = stats.slot_bytes_peak > stats.budget_bytes
            found["requests"], found["hits"] = list(stats.requests), list(stats.hits)
            found["computed"] = [list(phase) for phase in stats.computed]
            found["routed"] = [list(phase) for phase in stats.routed]
            found["copied"] = sum(stats.copy_bytes)
            found["came"] = bytes_that_came(e, at_first)
            found["cold"] = sum(map(sum, (phase[1:] for phase in stats.computed)))
            found["host_computed"] = sum(stats.host_computed)
            found["misses"] = e.inside.store.misses()
    return found


if __name__ == "__main__":
    main()
