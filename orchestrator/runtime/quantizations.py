"""The quantizations in a repository of the Hugging Face Hub, as they would run on this machine.

Only headers are downloaded. They are planned and predicted by orchestrator.cost.outlook.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, fields, replace
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from gguf_tools.experts import ExpertModel
from gguf_tools.hub import Headers, ListedModel, Listing, fetch_listed_headers
from gguf_tools.process import processor_name
from orchestrator.cost.outlook import (
    FITS,
    NO_ROOM,
    NOT,
    STREAMS,
    WELL,
    Outlook,
    check_for_several_models,
    foresee,
    memory_for,
)
from orchestrator.errors import ConfigError, MoeEdgeError, PolicyError
from orchestrator.plan.machine import probe
from orchestrator.runtime.support import MANAGED, Support, support_of
from orchestrator.runtime.support import NOT as NOT_AT_ALL

if TYPE_CHECKING:
    from orchestrator.plan.records import PlanRequest

# Maximum number of models whose headers are read: the largest ones.
MOST_MODELS = 64
# A precision of more bits per weight is not the best choice, because Q8_0 (8.5 bits) loses nearly
# nothing.
_ENOUGH_BITS = 9.0


@dataclass(frozen=True, slots=True)
class Quantization:
    """One model of a repository, and how it would run on this machine.

    - file: the name of the model's first file.
    - disk_bytes, missing_bytes: size of all files, and the part of it that is not downloaded yet.
    - bits: the mean number of bits per weight; None if the header could not be read.
    - outlook: how the model would run; None if this is unknown.
    - why: a sentence that says why it is unknown, or why the model does not run; otherwise empty.
    """

    file: str
    disk_bytes: int
    missing_bytes: int
    bits: float | None = None
    outlook: Outlook | None = None
    why: str = ""


@dataclass(frozen=True, slots=True)
class Quantizations:
    """A table that says how each model of a Hugging Face repository would run on this machine.

    The rows are sorted by the size of the model, largest first.

    - best: the file name of the best choice; None if no model runs.
    - ram_bytes: the memory that a model may take.
    - free_bytes: free space on the disk of huggingface_hub's cache.
    - disk_bytes_per_s: read speed of the disk that holds the user cache.
    - header_bytes: the number of bytes of model headers that were downloaded.
    - first_tokens: the length of the prompt for which `Outlook.first_s` (time to the first token)
      is predicted.
    - left_out: the number of smaller models without a row.
    - disturbed: a note if other programs ran during measurements, otherwise empty.
    """

    repo: str
    commit: str
    rows: tuple[Quantization, ...]
    best: str | None
    ram_bytes: int
    free_bytes: int
    disk_bytes_per_s: float
    threads: int
    processor: str
    header_bytes: int
    left_out: int
    first_tokens: int
    disturbed: str

    def here(self, row: Quantization) -> str | None:
        """Return how a model would run on this machine, or None if this is unknown.

        row: the model's entry in `rows`. The result is one of these texts:

        - FITS: the whole model fits in memory.
        - STREAMS: some experts are read from disk while the model runs.
        - NOT: the model cannot run, for example because memory is too small.
        - NO_ROOM: the rest of the download is larger than the free disk space.
        """
        return _here(row, self.free_bytes)

    def as_dict(self) -> dict[str, Any]:
        """Return the table as a dict of JSON values, with one object in `rows` for each model.

        Each object has the fields of `Quantization`, and those of `Outlook` (the predicted memory
        and speed), which are None if unknown. Its field `here` says whether the model fits in
        memory, streams experts from disk or cannot run. Its field `best` says whether the model is
        the best choice.
        """
        found = asdict(self)
        for row, model in zip(found["rows"], self.rows, strict=True):
            outlook = row.pop("outlook") or dict.fromkeys(each.name for each in fields(Outlook))
            row |= {**outlook, "here": self.here(model), "best": model.file == self.best}
        return found


def compare(
    listing: Listing, request: PlanRequest, begins: Callable[[str, float | None], None]
) -> Quantizations:
    """Return how the models of a Hugging Face repository would run on this machine.

    Only the headers of the models are downloaded. The row of a model whose header cannot be read
    says why. listing: the models of the repository. request: the settings for each model. begins:
    called with the current activity and the share of it that is done (None if unknown).

    Raises ConfigError for settings that only suit a single model or a GPU, NativeError without
    moe-edge's build of llama.cpp, and OSError if the disk cannot be measured.
    """
    from orchestrator.cost.disk import machine_bandwidth
    from orchestrator.cost.speeds import DISTURBED, Speeds
    from orchestrator.cost.time import PROMPT_TOKENS
    from orchestrator.native.llama import Bindings

    config = request.config
    check_for_several_models(config)
    listed, reading = listing.models[:MOST_MODELS], "Reading headers"
    machine, rows = probe(), list[Quantization]()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="moe-edge-")))
        begins(reading, 0.0)
        headers, header_bytes = fetch_listed_headers(
            replace(listing, models=listed), folder, lambda done: begins(reading, done)
        )
        begins("Checking the architecture", None)
        opened = _opened(listed, headers, folder, stack)
        begins("Measuring the disk", None)
        disk, planning = machine_bandwidth(config), "Planning"
        speeds = stack.enter_context(Speeds(Bindings.load(), config.n_threads, rough=True))
        for number, (model, found) in enumerate(zip(listed, opened, strict=True)):
            begins(planning, number / len(listed))
            row = Quantization(model.name, model.nbytes, model.missing)
            if isinstance(found, str):
                rows.append(replace(row, why=found))
                continue
            parsed, support = found
            row = replace(row, bits=_bits(parsed))
            try:
                outlook = foresee(request, parsed, machine, disk, speeds)
            except (PolicyError, ConfigError) as error:
                rows.append(replace(row, why=_plain(error, folder, model)))
                continue
            why = ""
            if outlook.runs == STREAMS and support.runs != MANAGED:
                outlook, why = Outlook(NOT, model.nbytes), support.reason
            rows.append(replace(row, outlook=outlook, why=why))
        note = DISTURBED if speeds.disturbed else ""
    return Quantizations(
        repo=listing.repo,
        commit=listing.commit,
        rows=tuple(rows),
        best=best_of(rows, listing.free),
        ram_bytes=memory_for(config, machine),
        free_bytes=listing.free,
        disk_bytes_per_s=disk.bytes_per_s,
        threads=config.n_threads,
        processor=processor_name(),
        first_tokens=PROMPT_TOKENS,
        header_bytes=header_bytes,
        left_out=len(listing.models) - len(listed),
        disturbed=note,
    )


def best_of(rows: Sequence[Quantization], free_bytes: int) -> str | None:
    """Return the file name of the model that suits this machine best; None if no model runs.

    The candidates are the models that run on this machine and have at most _ENOUGH_BITS bits per
    weight. If no such model runs, the candidates are all models that run.

    - If some candidates generate at least WELL tokens per second, the result is the largest of
      them, because it is the most precise.
    - Otherwise, the result is the fastest candidate.

    rows: the models to choose from. free_bytes: free space on the disk that would hold the model.
    """
    run = [each for each in rows if _here(each, free_bytes) in (FITS, STREAMS)]
    usual = [each for each in run if each.bits is not None and each.bits <= _ENOUGH_BITS] or run
    well = [each for each in usual if _speed(each) >= WELL]
    if well:
        return max(well, key=lambda each: (each.disk_bytes, _speed(each))).file
    return max(usual, key=_speed).file if usual else None


def _speed(row: Quantization) -> float:
    return (row.outlook and row.outlook.tokens_s) or 0.0


def _here(row: Quantization, free_bytes: int) -> str | None:
    if row.missing_bytes > free_bytes:
        return NO_ROOM
    return row.outlook.runs if row.outlook else None


def _bits(model: ExpertModel) -> float:
    """Return the mean number of bits per weight."""
    tensors = [info for part in model.parts for info in part.tensors.values()]
    return 8 * sum(info.nbytes for info in tensors) / sum(prod(info.shape) for info in tensors)


def _opened(
    listed: Sequence[ListedModel],
    headers: Sequence[Headers | MoeEdgeError],
    folder: Path,
    stack: ExitStack,
) -> list[tuple[ExpertModel, Support] | str]:
    """Open each header, and ask llama.cpp how models of its architecture can run.

    The result has one entry for each model. It is a sentence if the model cannot run. folder: the
    folder of the headers. stack: closes the opened models.
    """
    supported: dict[str, Support] = {}
    opened = list[tuple[ExpertModel, Support] | str]()
    for listed_model, header in zip(listed, headers, strict=True):
        try:
            if isinstance(header, MoeEdgeError):
                raise header
            model = stack.enter_context(ExpertModel.open(header.path))
        except MoeEdgeError as error:
            opened.append(_plain(error, folder, listed_model))
            continue
        arch = model.hparams.arch
        # Without the library the result is None. Bindings.load reports this later.
        support = (
            supported.get(arch) or support_of(header.path, vocabulary=False) or Support(MANAGED, "")
        )
        if support.runs == NOT_AT_ALL:  # perhaps only this file
            opened.append(support.sentence)
            continue
        supported[arch] = support
        opened.append((model, support))
    return opened


def _plain(error: MoeEdgeError, folder: Path, model: ListedModel) -> str:
    """Return the sentence of an error, without the place of the file at its start.

    folder: the folder of the headers.
    """
    text = re.sub(rf"{re.escape(str(folder))}/\d+/", "", str(error))
    names = (*model.urls, *(str(path) for path in model.paths), Path(model.name).name)
    for name in names:
        text = text.removeprefix(f"{name}: ")
    return text
