"""Known models on this machine: the table of `moe-edge plan` without a model.

Each model is planned and predicted from its header (orchestrator.cost.outlook).
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from time import time
from typing import TYPE_CHECKING, Any

from gguf_tools.known import DATA, known_models
from gguf_tools.process import default_threads, processor_name
from orchestrator.cache.files import digest, keep, recalled, user_folder
from orchestrator.cost.outlook import (
    NO_ROOM,
    WELL,
    Outlook,
    check_for_several_models,
    foresee,
    memory_for,
)
from orchestrator.plan.machine import probe
from orchestrator.plan.records import Machine

if TYPE_CHECKING:
    from orchestrator.plan.records import PlanRequest

_FORMAT = "moe-edge known 4"
# A cached table is valid while free memory changes by at most this share. A table that was
# disturbed by other programs is valid for this many seconds.
_AS_MUCH, _DISTURBED_S = 0.05, 600.0
# Number of latest commands whose tables are kept.
_MOST = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Row(Outlook):
    """One row of the table of known models: how a model in one precision runs on this machine.

    total_b, active_b: number of all parameters, and of those that one token uses, in billions.
    disk_bytes: size of the file.
    """

    model: str
    precision: str
    total_b: float
    active_b: float
    disk_bytes: int


@dataclass(frozen=True, slots=True)
class Known:
    """The table of known models for this machine.

    - rows: one row for each model in each precision.
    - ram_bytes: the memory that a model may take.
    - free_bytes, disk_bytes_per_s: free space and read speed of the disk that holds the user cache.
    - threads, processor: the number of compute threads, and the name of the processor.
    - first_tokens: the length in tokens of the prompt for which the rows predict first_s, the
      seconds until the answer begins.
    - disturbed: a note if other programs ran during measurements, otherwise empty.
    """

    rows: tuple[Row, ...]
    ram_bytes: int
    free_bytes: int
    disk_bytes_per_s: float
    threads: int
    processor: str
    first_tokens: int
    disturbed: str

    def runs(self, row: Row) -> str:
        """Return how a model runs here: FITS, STREAMS, NOT or NO_ROOM.

        FITS means that the model fits in memory, and STREAMS that its experts are read from disk
        while it runs. NOT means that the memory is too small even for streaming, and NO_ROOM that
        the disk has too little free space for the file.
        """
        return row.runs if row.disk_bytes <= self.free_bytes else NO_ROOM

    def best(self) -> list[Row]:
        """Return one row for each model, in the precision that suits this machine best.

        A precision is fast enough if it reaches WELL tokens per second. The models come in this
        order:

        - Models with a precision that is fast enough, sorted by falling size. The row has the best
          such precision.
        - Slower models, sorted by falling speed. The row has the fastest precision.
        - Models that do not run, sorted by rising size. The row has the smallest precision.
        """

        def order(row: Row) -> tuple[int, float]:
            if row.tokens_s is None or self.runs(row) == NO_ROOM:
                return 2, row.total_b
            return (0, -row.total_b) if row.tokens_s >= WELL else (1, -row.tokens_s)

        def among(row: Row) -> tuple[int, float]:
            group, by = order(row)
            return group, (-row.disk_bytes, by, row.disk_bytes)[group]

        names = dict.fromkeys(row.model for row in self.rows)
        of = ([row for row in self.rows if row.model == name] for name in names)
        return sorted((min(mine, key=among) for mine in of), key=order)


def known_here(request: PlanRequest, begins: Callable[[str, float | None], None]) -> Known:
    """Return a table that predicts how popular MoE models would run on this machine.

    The models are those in `gguf_tools.known`. The table is read from the user cache, or computed
    in some seconds.

    begins: called with the name of the current activity, and with its progress from 0 to 1 or None.

    Raises ConfigError if the request has settings for one particular model or for a GPU, such as
    --low-tier. Raises OSError if the disk cannot be measured, and NativeError without the native
    library.
    """
    config = request.config
    check_for_several_models(config)
    machine = probe()
    ram = memory_for(config, machine)
    path, key = user_folder("cache") / "speed" / "known.json", _key(request)
    path.parent.mkdir(parents=True, exist_ok=True)
    kept = recalled(path, _FORMAT, "tables")
    known = _read(kept.get(key, {}), ram)
    if known is None:
        known = _find(request, machine, ram, begins)
        kept.pop(key, None)
        latest = dict([*kept.items()][1 - _MOST :])
        keep(path, _FORMAT, "tables", {**latest, key: {"at": time(), **asdict(known)}})
    return replace(known, free_bytes=shutil.disk_usage(path.parent).free)


def _key(request: PlanRequest) -> str:
    """Return the name under which the user cache keeps the table of known models.

    The name depends on everything that the table depends on, except free memory.
    """
    from importlib.metadata import version

    machine = processor_name(), default_threads()
    return digest(version("moe-edge"), DATA.read_text(), *machine, request.plan_settings())


def _read(found: Mapping[str, Any], ram: int) -> Known | None:
    """Return the cached table if it is still valid, otherwise None.

    found: the cached JSON object. ram: bytes of memory for a model now. The table is valid while
    free memory stays about the same. A table that other programs disturbed is valid for only some
    minutes.
    """
    with suppress(TypeError, ValueError, KeyError):
        kept = {name: value for name, value in found.items() if name != "at"}
        rows = tuple(Row(**row) for row in kept["rows"])
        known = Known(**{**kept, "rows": rows})
        old = time() - found["at"] > _DISTURBED_S
        if abs(ram / known.ram_bytes - 1) <= _AS_MUCH and not (known.disturbed and old):
            return known
    return None


def _find(
    request: PlanRequest, machine: Machine, ram: int, begins: Callable[[str, float | None], None]
) -> Known:
    from gguf_tools.experts import ExpertModel
    from orchestrator.cost.disk import machine_bandwidth
    from orchestrator.cost.speeds import DISTURBED, Speeds
    from orchestrator.cost.time import PROMPT_TOKENS
    from orchestrator.native.llama import Bindings

    begins("Measuring the disk", None)
    disk, threads = machine_bandwidth(request.config), request.config.n_threads
    begins("Measuring the processor", None)
    rows: list[Row] = []
    models = known_models()
    with Speeds(Bindings.load(), threads, rough=True, steady=False) as speeds:
        for number, each in enumerate(models):
            for precision in each.precisions:
                with ExpertModel.of_parts(each.parts(precision)) as model:
                    found = foresee(request, model, machine, disk, speeds)
                    rows.append(
                        Row(
                            model=each.name,
                            precision=precision,
                            total_b=each.total_b,
                            active_b=each.active_b,
                            disk_bytes=model.parts[0].size,
                            **asdict(found),
                        )
                    )
            begins("Planning known models", (number + 1) / len(models))
        note = DISTURBED if speeds.disturbed else ""
    here = ram, 0, disk.bytes_per_s, threads, processor_name()
    return Known(tuple(rows), *here, PROMPT_TOKENS, note)
