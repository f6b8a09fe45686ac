"""Plans over a grid of models, limits, settings and policies, as lines of JSON:

    python tests/helpers/recorded_plans.py OUT.jsonl           # records all of them
    python tests/helpers/recorded_plans.py --compare A B       # prints the rows that differ
    python tests/helpers/recorded_plans.py --store             # stores the sample of the test

The rows are drawn from the whole grid with a fixed seed, so that a row has the same inputs in every
version of the program. No row needs a library, a GPU or a file: models are headers, and a GPU is a
record of its memory.
"""

import argparse
import hashlib
import json
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from gguf_tools import synthetic
from gguf_tools.experts import ExpertModel
from gguf_tools.file.layout import DEFAULT_ALIGNMENT, EXPERT_ALIGNMENT, pad
from gguf_tools.file.layout import type_by_name as type_of
from gguf_tools.file.reader import GGUFFile
from gguf_tools.file.writer import GGUFWriter, ValueType
from gguf_tools.known import known_models
from gguf_tools.synthetic.metadata import synthetic_metadata
from gguf_tools.synthetic.tensors import ModelBuilder
from gguf_tools.synthetic.vocab import TOKEN_TYPE
from orchestrator.allocation.estimate import KlEstimate
from orchestrator.config import Config
from orchestrator.cost.losses import started
from orchestrator.errors import MoeEdgeError
from orchestrator.plan.planning import plan, sizes_to_count
from orchestrator.plan.records import Counted, Device, Machine, Needs, Plan, PlanRequest, Refusal
from orchestrator.policy.base import UNKNOWN, History

SAMPLE = Path(__file__).parents[1] / "unit/orchestrator/recorded_plans.jsonl"
MIB, GIB = 2**20, 2**30
ROWS, IN_SAMPLE = 18_000, 150

# Values of each option. The first value is drawn more often than the others.
POLICIES = (None, "lru", "dymoe", "dynaexq", "firm", "context", "floor", "mixed", "plain")
OPTIONS: dict[str, tuple[Any, ...]] = {
    "ctx": (None, 512, 8192, 10**6),
    "ubatch": (None, 128, 1024),
    "kv": ("f16", "q8_0"),
    "low_tier": (None, "q2_k", "skip"),
    "high_tier": (None, "q4_k"),
    "exact": (False, True),
    "cache_ram": (None, 0, 8 * MIB, 10 * GIB),
    "force_managed": (False, True),
    "expert_ram": (None, MIB, 300 * MIB),
    "logits_all": (False, True),
    "importance": ("window", "exact"),
    "retention": (None, 1.0, 0.5),
    "hot_experts": (None, 1, 9),
    "near_slots": (None, "shared"),
    "near_place": (None, "host"),
    "low_share": (None, 0.9),
    "update_steps": (None, 0),
    "n_ahead": (None, 0, 1),
    "max_loss": (None, 0.0, 0.05),
}
ONLY: dict[str, tuple[str, ...]] = {
    "retention": ("dymoe",),
    "hot_experts": ("dynaexq", "context"),
    "near_slots": ("context",),
    "near_place": ("context",),
    "low_share": ("floor",),
    "update_steps": ("dynaexq", "mixed"),
    "n_ahead": ("dymoe", "firm", "floor"),
    "max_loss": ("floor",),
}
# Settings of the front ends: their memory in addition to the model.
FRONT_ENDS: dict[str, dict[str, Any]] = {
    "command": {},
    "chat": {"conversations": True},
    "server": {
        "conversations": True,
        "sequences": 3,
        "scored": 512,
        "extra_bytes": 40 * MIB,
        "extra_token_bytes": 100,
    },
}
# Memory limit beyond the rest of the model, as a fraction of the best tier's expert bytes. None:
# the machine's memory.
LIMITS = (None, 0.0, 0.01, 0.04, 0.1, 0.2, 0.35, 0.5, 0.7, 0.9, 1.0, 1.2)
MACHINES = ("cpu", "cpu", "cpu", "gpu", "gpu, capped")


def of_shape(shape: synthetic.Shape, *tiers: str) -> ExpertModel:
    """Return the model of the header that the synthetic writer would write, without a file."""
    types = [kind for name in tiers if (kind := type_of(name)) is not None]
    alignment = DEFAULT_ALIGNMENT if len(types) == 1 else EXPERT_ALIGNMENT
    writer = GGUFWriter(Path(f"{shape.arch}-{'-'.join(tiers)}.gguf"), alignment)
    for key, value in synthetic_metadata(shape, types).items():
        writer.meta(key, value, element=ValueType.INT32 if key == TOKEN_TYPE else None)
    for tensor in ModelBuilder(shape, types, "uniform", 1.0, 0).tensors():
        writer.declare(tensor.name, tensor.shape, tensor.type)
    header = writer.header()
    size = pad(len(header), writer.alignment) + writer.data_bytes
    return ExpertModel.of_parts([GGUFFile(writer.path, header, size)])


def _known(name: str, precision: str) -> ExpertModel:
    found = next(each for each in known_models() if each.name == name)
    return ExpertModel.of_parts(found.parts(precision))


@cache
def model(name: str) -> ExpertModel:
    tiny = synthetic.preset("tiny-qwen3moe")
    long = replace(tiny, context=65536, n_expert=128, n_head_kv=1, head_dim=32)
    many = replace(tiny, context=16384, n_layer=4, n_expert=256, n_head_kv=1, head_dim=32)
    real = replace(synthetic.preset("qwen3-30b"), n_layer=24, context=40960)
    three = ("q8_0", "q4_k", "q2_k")
    made = {
        "tiny": lambda: of_shape(tiny, "q4_k"),
        "three": lambda: of_shape(tiny, *three),
        "long": lambda: of_shape(long, "q4_k", "q2_k"),
        "many": lambda: of_shape(many, *three),
        "latent": lambda: of_shape(synthetic.preset("tiny-deepseek2"), "q8_0", "q2_k"),
        "24 layers": lambda: of_shape(real, *three),
        "24 layers, two": lambda: of_shape(real, "q4_k", "q2_k"),
        "qwen3": lambda: _known("Qwen3-30B-A3B", "Q4_K_M"),
        "recurrent": lambda: _known("LFM2-8B-A1B", "Q4_K_M"),
        "gpt-oss": lambda: _known("gpt-oss-20b", "MXFP4"),
    }
    return made[name]()


MODELS = {
    **{"tiny": 1, "three": 3, "long": 3, "many": 2, "latent": 2},
    **{"24 layers": 4, "24 layers, two": 2, "qwen3": 2, "recurrent": 1, "gpt-oss": 1},
}


class UnevenHistory(History):
    """A history with uneven usage and a loss table."""

    def __init__(self, of: ExpertModel) -> None:
        rng = np.random.default_rng(7)
        size, tiers = (of.n_layers, of.n_expert), of.tiers
        self._hotness = np.round(rng.random(size) ** 4, 6)
        spread = 0.5 + rng.random(size)
        self._losses = {
            each.name: np.round(spread * 0.25 ** (each.bpw or 4.0), 12) for each in tiers
        }
        self._skip = np.round(0.01 * spread, 9)

    def hotness(self) -> np.ndarray:
        return self._hotness

    def losses(self, names: Sequence[str], per_use: bool = False) -> np.ndarray:
        found: np.ndarray = np.stack([self._losses[name] for name in names], axis=2)
        return found * 0.5 if per_use else found

    def estimate(self, names: Sequence[str]) -> KlEstimate:
        nats = np.concatenate([self.losses(names, False), self._skip[..., None]], axis=2)
        return KlEstimate(names[0], nats, np.full(self._skip.shape, 0.1))


@cache
def history_of(name: str) -> UnevenHistory:
    return UnevenHistory(model(name))


def rows(n: int = ROWS) -> Iterator[dict[str, Any]]:
    """Yield the inputs of each row."""
    draw = random.Random(56)
    for number in range(n):
        name = draw.choices(list(MODELS), list(MODELS.values()))[0]
        policy = draw.choice(POLICIES)
        settings: dict[str, Any] = {} if policy is None else {"policy": policy}
        for key, values in OPTIONS.items():
            usual = draw.random() < (0.6 if key in ("ctx", "low_tier", *ONLY) else 0.88)
            value = values[0] if usual else draw.choice(values[1:])
            fits = key not in ONLY or policy in ONLY[key]
            if value is not None and value != values[0] and fits:
                settings[key] = value
        yield {
            "row": number,
            "model": name,
            "machine": draw.choice(MACHINES),
            "limit": draw.choice(LIMITS),
            "front": draw.choice(list(FRONT_ENDS)),
            "history": draw.random() < 0.4,
            "more": draw.choice((0, 0, 0, 5 * MIB)),
            "counted": draw.random() < 0.3,
            "settings": settings,
        }


def planned(row: dict[str, Any]) -> Plan | Refusal:
    """Return the plan of a row. Raises ConfigError or PolicyError for conflicting settings."""
    of, settings = model(row["model"]), dict(row["settings"])
    gpu = row["machine"] != "cpu"
    limit_bytes = int(of.dense_bytes + 96 * MIB + (row["limit"] or 0.0) * of.tier_bytes[0])
    memory, card = 64 * GIB, None
    if gpu:
        flash = row["row"] % 2 == 0
        card = Device("cuda0", "a card", 8 * GIB, 8 * GIB, flash)
        memory = 16 * GIB
    if row["limit"] is not None:
        if row["machine"] == "gpu, capped":
            settings["vram"] = limit_bytes
        elif gpu:
            card = replace(card, memory_bytes=limit_bytes + 256 * MIB) if card else None
        else:
            settings["ram"] = limit_bytes
    config = Config.build(model=of.path, **settings)
    history = history_of(row["model"]) if row["history"] else UNKNOWN
    more = row["more"] if gpu else 0
    request = PlanRequest(config, Needs(**FRONT_ENDS[row["front"]]), more)
    if row["counted"] and not gpu:
        sizes = sizes_to_count(request, of)[1]
        request = replace(request, counted=Counted.of(sizes, partial(_count, of, config.kv)))
    return plan(request, of, Machine(memory, card), history)


def _count(of: ExpertModel, kv: str, n_ctx: int, n_tokens: int) -> tuple[int, int]:
    """Return the bytes of the KV cache and of the scratch, instead of llama.cpp's count."""
    return of.kv_bytes(n_ctx, kv) + 8192, n_tokens * (40_000 + 2 * n_ctx) + 65_536


def _digest(value: Any) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:12]


def _asked(plan: Plan) -> dict[str, Any]:
    """Return the requirements, the fractions and the initial tiers of a plan's policy."""
    placement = plan.placement
    if placement is None:
        return {}
    shape = placement.shape
    uses = np.random.default_rng(3).random((shape.n_layers, shape.n_expert))
    wants = asdict(placement.wants)
    for new in ("told_in", "waits", "learns"):
        del wants[new]
    found: dict[str, Any] = {"policy": placement.name, "wants": wants}
    found["mix"] = np.round(placement.fractions(uses).mean(axis=(0, 1)), 9).tolist()
    if placement.wants.all_resident:
        found["starts"] = _digest(started(placement, uses).tolist())
        found["starts as known"] = _digest(started(placement).tolist())
    return found


def outcome(row: dict[str, Any]) -> dict[str, Any]:
    """Return the plan of a row, or the reason why there is none."""
    try:
        made = planned(row)
    except MoeEdgeError as error:
        return {"error": type(error).__name__}
    if isinstance(made, Refusal):
        return {"refused": made.text, "needs": made.needed_bytes}
    found: dict[str, Any] = {
        **{"managed": made.managed, "n_ctx": made.n_ctx, "n_ubatch": made.n_ubatch},
        **{"ram": made.ram_bytes, "cap": made.cap_bytes, "dense": made.dense_bytes},
        **{"kv": made.kv_bytes, "scratch": made.scratch_bytes, "compute": made.compute_bytes},
        **{"prompts": made.prompt_bytes, "reason": made.reason, "versions": made.versions},
        **{"tiers": list(made.tiers), "experts": made.expert_bytes, "budget": made.budget_bytes},
        **{"host": made.host_bytes, "absent": made.absent_bytes, "total": made.total_bytes},
        **_asked(made),
    }
    if made.slots is not None:
        slots = made.slots
        at = sorted((key, slots.groups[index]) for key, index in slots.group_of.items())
        found["slots"] = slots.total_bytes, slots.host_bytes, len(slots.groups), _digest(at)
    if made.shared is not None:
        shared = made.shared
        found["shared"] = [
            *(shared.n_bytes, shared.least_slots, shared.all_slots, round(shared.cell_bytes, 6)),
            *(shared.cell_step, shared.sequences, shared.prompts),
            {size: (empty, round(each, 6)) for size, (empty, each) in shared.scratch.items()},
        ]
    answer: dict[str, Any] = json.loads(json.dumps(found))
    return answer


def record(path: Path, chosen: Iterator[dict[str, Any]]) -> None:
    with path.open("w") as file:
        for row in chosen:
            file.write(json.dumps({**row, "is": outcome(row)}) + "\n")


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def differences(before: dict[str, Any], now: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the facts that differ, as (before, now)."""
    keys = dict.fromkeys((*before, *now))
    return {key: (before.get(key), now.get(key)) for key in keys if before.get(key) != now.get(key)}


def sample() -> list[dict[str, Any]]:
    """Return the rows of the test, evenly spaced."""
    return [row for row in rows() if row["row"] % (ROWS // IN_SAMPLE) == 0]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", nargs="?", type=Path)
    parser.add_argument("--compare", nargs=2, type=Path, metavar=("A", "B"))
    parser.add_argument("--store", action="store_true")
    asked = parser.parse_args()
    if asked.compare:
        pairs = list(zip(*map(read, asked.compare), strict=True))
        found = [(a, differences(a["is"], b["is"])) for a, b in pairs]
        for row, each in found:
            if each:
                shown = {key: row[key] for key in row if key != "is"}
                print(json.dumps(shown), *(f"\n    {k}: {v}" for k, v in each.items()))
        print(f"{sum(bool(each) for _, each in found)} of {len(found)} rows differ")
        return int(any(each for _, each in found))
    if asked.store:
        record(SAMPLE, iter(sample()))
    if asked.out:
        record(asked.out, rows())
    return 0


if __name__ == "__main__":
    sys.exit(main())
