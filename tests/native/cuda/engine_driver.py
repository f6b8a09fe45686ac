"""Decodes greedily with an engine; run as a program, because a backend stays once it is loaded.

engine_driver.py LIBRARY JOB: LIBRARY is a libggml-cuda.so to load, or "-". JOB is JSON: options of
Config.build, a prompt, n_decode, warm: every expert is read before the first token. Prints JSON:
tokens, logits of the first and last of them, statistics.
"""

from __future__ import annotations

import ctypes
import json
import sys
from pathlib import Path

from orchestrator.config import Config
from orchestrator.engine import Engine
from orchestrator.llama import Bindings


def load_backend(library: str) -> None:
    folder = Path(Bindings.load().api._lib._name).parent
    ggml = ctypes.CDLL(str(folder / "libggml.so"))
    ggml.ggml_backend_load.restype = ctypes.c_void_p
    if not ggml.ggml_backend_load(library.encode()):
        sys.exit(f"{library} is not a backend")


def main() -> None:
    library, job = sys.argv[1], json.loads(sys.argv[2])
    if library != "-":
        load_backend(library)
    prompt, tokens = job["prompt"], []
    with Engine.open(Config.build(**job["options"])) as engine:
        if job["warm"]:
            layers, experts = range(engine.model.n_layers), range(engine.model.n_expert)
            engine.store.warm([(layer, e, 0) for layer in layers for e in experts])
        rows = [engine.eval(prompt, 0)[-1]]
        for i in range(job["n_decode"]):
            tokens.append(int(rows[-1].argmax()))
            rows.append(engine.eval(tokens[-1:], len(prompt) + i)[-1])
        found = {
            "tokens": tokens,
            "first": rows[0].tolist(),
            "last": rows[-1].tolist(),
            "device": engine.plan.device.name if engine.plan.device else None,
            "managed": engine.managed,
        }
        if engine.managed:
            engine.store.check()
            stats = engine.store.stats()
            found["over_budget"] = stats.slot_bytes_peak > stats.budget_bytes
            found["requests"], found["hits"] = list(stats.requests), list(stats.hits)
            found["computed"] = [list(phase) for phase in stats.computed]
            found["routed"] = [list(phase) for phase in stats.routed]
            found["copied"] = sum(stats.copy_bytes)
            found["evictions"] = stats.evictions
    print(json.dumps(found))


if __name__ == "__main__":
    main()
