"""``verify``: every block of every tensor through ggml's own validation, and what the
metadata says of the file against what is there.

Other tools stop at the first thing that is wrong; here each finding is a sentence, and the
search goes on.
"""

import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from . import layout
from .errors import GGUFError
from .experts import ExpertModel
from .hparams import MAX_LAYERS, announced_tiers, routed_blocks
from .layout import BLOCK, GGMLType, expert_tensor_name, parse_expert_name
from .process import default_threads
from .quantize import Ggml, load, native_stderr_hidden
from .reader import GGUFFile, TensorInfo, architecture, open_model
from .streaming import CHUNK_BYTES, Job, Meter, Progress, run_all

# A tensor of noise has a finding in every block: one sentence, and a count up to here.
MAX_COUNTED = 1000
_BPW_TOLERANCE = 0.01
_OWN_KEYS = (
    layout.KEY_FORMAT_VERSION,
    layout.KEY_TIERS,
    layout.KEY_TIER_BPW,
    layout.KEY_QUANTIZATION,
    layout.KEY_CALIBRATION,
    layout.KEY_FALLBACKS,
)
_ROUTER = re.compile(r"blk\.([0-9]{1,9})\.ffn_gate_inp\.weight")


class Problem(NamedTuple):
    """One finding: a sentence that starts with the file, and the place where there is one.

    offset counts bytes from the start of the file, block from the start of the tensor.
    """

    text: str
    file: str
    tensor: str | None = None
    offset: int | None = None
    block: int | None = None


@dataclass(slots=True)
class VerifyReport:
    """What was looked at, and what was found. ``nbytes``: bytes of tensor data checked."""

    files: list[Path]
    tiers: list[str]
    n_tensors: int = 0
    n_blocks: int = 0
    nbytes: int = 0
    problems: list[Problem] = field(default_factory=list)
    seconds: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        """Ready for JSON; sizes in bytes."""
        return {
            "ok": not self.problems,
            "files": [str(path) for path in self.files],
            "tiers": self.tiers,
            "tensors": self.n_tensors,
            "blocks": self.n_blocks,
            "checked_bytes": self.nbytes,
            "seconds": round(self.seconds, 3),
            "problems": [problem._asdict() for problem in self.problems],
        }


def verify(
    path: str | Path,
    low: str | Path | None = None,
    *,
    progress: Progress | None = None,
    threads: int | None = None,
    ggml: Ggml | None = None,
) -> VerifyReport:
    """Check a model, all its parts; with ``low`` also that file's, and that it is the same model
    in a lower precision. ``progress`` gets the finished share, 0 to 1.

    Findings are in the report. A file whose structure cannot be followed (cut short, counts
    that do not fit, overlapping tensors, a part missing) is one finding that ends the search.
    Raises GGUFError only where ggml cannot be loaded.
    """
    started = time.monotonic()
    models = [Path(path)] + ([] if low is None else [Path(low)])
    report = VerifyReport([], [])
    opened: list[list[GGUFFile]] = []
    try:
        for each in models:
            try:
                opened.append(open_model(each))
            except GGUFError as error:
                report.files.append(each)
                report.problems.append(Problem(str(error), str(each)))
        for parts in opened:
            report.files += [part.path for part in parts]
            for part in parts:
                report.problems += _layout_problems(part)
            report.problems += _foreign_problems(parts)
            report.problems += _model_problems(parts, report)
        if low is not None and not report.problems:
            report.problems += _pair_problems(opened[0], opened[1], models[1], report)
        together = [part for parts in opened for part in parts]
        if together:
            _check_blocks(together, report, ggml or load(), threads or default_threads(), progress)
    finally:
        for parts in opened:
            for part in parts:
                part.close()
    report.seconds = time.monotonic() - started
    return report


def _pair_problems(
    high: list[GGUFFile], low: list[GGUFFile], named: Path, report: VerifyReport
) -> Iterator[Problem]:
    try:
        report.tiers = [tier.name for tier in ExpertModel.of_parts(high, low).tiers]
    except GGUFError as error:
        yield Problem(str(error), str(named))


def _problem(part: GGUFFile, info: TensorInfo, text: str) -> Problem:
    where = f"{part.path}: tensor {info.name}: offset {info.offset}"
    return Problem(f"{where}: {text}", str(part.path), info.name, info.offset)


def _layout_problems(part: GGUFFile) -> Iterator[Problem]:
    """Tensors follow each other in the order of their list, with nothing but zero padding
    between them: llama.cpp refuses anything else."""
    end = part.data_offset
    previous = "the header"
    for info in part.tensors.values():
        expected = layout.pad(end, part.alignment)
        if info.offset != expected:
            yield _problem(part, info, f"expected at {expected}, behind {previous}")
        elif _holds_data(part, end, info.offset):
            yield _problem(part, info, f"data between it and the end of {previous} at {end}")
        end, previous = info.offset + info.nbytes, info.name
    if part.tensors:
        last = max(info.offset + info.nbytes for info in part.tensors.values())
        if part.size > layout.pad(last, part.alignment) or _holds_data(part, last, part.size):
            yield Problem(
                f"{part.path}: {part.size - last} bytes behind the last tensor, which ends at"
                f" {last}",
                str(part.path),
                offset=last,
            )


def _foreign_problems(parts: list[GGUFFile]) -> Iterator[Problem]:
    """A part of another quantization. Its header cannot tell: parts but the first say nothing of
    the model, and names, shapes and counts are equal. So: none of its expert matrices, of any
    kind, has a type that this kind has in another part."""
    types = [_expert_types(part) for part in parts]
    for index, (part, own) in enumerate(zip(parts, types, strict=True)):
        others: dict[tuple[int, str | None], set[GGMLType]] = {}
        for found in types[:index] + types[index + 1 :]:
            for key, each in found.items():
                others.setdefault(key, set()).update(each)
        shared = [key for key in own if key in others]
        if len(parts) == 2 and index == 0:  # of two, one finding is enough
            continue
        if len(shared) > 1 and all(own[key].isdisjoint(others[key]) for key in shared):
            have, rest = (
                ", ".join(sorted({each.tier_name for key in shared for each in found[key]}))
                for found in (own, others)
            )
            yield Problem(
                f"{part.path}: a part of another quantization? Its experts are {have}, those of the"
                f" other parts {rest}",
                str(part.path),
            )


def _expert_types(part: GGUFFile) -> dict[tuple[int, str | None], set[GGMLType]]:
    """ggml types by matrix kind and tier."""
    types: dict[tuple[int, str | None], set[GGMLType]] = {}
    for info in part.tensors.values():
        parsed = parse_expert_name(info.name)
        if parsed is not None:
            types.setdefault((parsed.kind, parsed.tier), set()).add(info.type)
    return types


def _holds_data(part: GGUFFile, start: int, end: int) -> bool:
    """Whether a byte that should be padding is not zero."""
    return 0 < end - start <= part.alignment and bool(part.bytes_at(start, end - start).any())


def _model_problems(parts: list[GGUFFile], report: VerifyReport) -> Iterator[Problem]:
    """What the metadata promises of experts and tiers."""
    first = parts[0]
    try:
        tiers = announced_tiers(first)
    except GGUFError as error:
        yield Problem(str(error), str(first.path))
        return
    try:
        n_layers = routed_blocks(first, architecture(first))
    except GGUFError:  # what is wrong there is found below
        n_layers = MAX_LAYERS
    found = list(_tier_problems(parts, tiers, n_layers)) if tiers != [""] else []
    yield from found
    try:
        model = ExpertModel.of_parts(parts)
    except GGUFError as error:
        # the same finding, unless it is one that was already named above
        if not any(each.tensor and each.tensor in str(error) for each in found):
            yield Problem(str(error), str(first.path))
        return
    report.tiers += [tier.name for tier in model.tiers]
    names = (name for part in parts for name in part.tensors)
    routers = {int(match[1]) for name in names if (match := _ROUTER.fullmatch(name))}
    for il in sorted(routers - set(model.layer_ids)):
        if il < model.block_count and not first.metadata.get(f"{model.arch}.nextn_predict_layers"):
            yield Problem(f"{first.path}: layer {il} has a router but no experts", str(first.path))
    if tiers != [""]:
        yield from _bpw_problems(first, model)
        yield from _statement_problems(first, model)


def _statement_problems(first: GGUFFile, model: ExpertModel) -> Iterator[Problem]:
    """Our keys are those that there are, tiers have names of types, texts about how they were made
    are of the right type, and each fallback is stated."""
    for key in first.metadata:
        if key.startswith(layout.KEY_PREFIX) and key not in _OWN_KEYS:
            yield Problem(f"{first.path}: key {key}: unknown", str(first.path))
    for tier in model.tiers:
        if layout.type_by_name(tier.name) is None:
            yield Problem(
                f"{first.path}: key {layout.KEY_TIERS}: {tier.name} is no type", str(first.path)
            )
    for key in (layout.KEY_QUANTIZATION, layout.KEY_CALIBRATION):
        if not isinstance(first.metadata.get(key, ""), str):
            yield Problem(f"{first.path}: key {key}: not a text", str(first.path))
    needed: dict[str, None] = {}
    for shapes in model.shapes:
        for kind, shape in enumerate(shapes):
            for tier in model.tiers:
                declared = layout.type_by_name(tier.name)
                if shape is not None and declared is not None:
                    needed |= dict.fromkeys(layout.fallback(kind, declared, shape[0]))
    for text in needed:
        if text not in model.fallbacks:
            yield Problem(
                f"{first.path}: key {layout.KEY_FALLBACKS} does not say: {text}", str(first.path)
            )


def _bpw_problems(first: GGUFFile, model: ExpertModel) -> Iterator[Problem]:
    actual = [tier.bpw for tier in model.tiers]
    stated = first.metadata.get(layout.KEY_TIER_BPW)
    same = (
        isinstance(stated, list)
        and len(stated) == len(actual)
        and all(isinstance(each, float) for each in stated)
        and np.allclose(stated, actual, atol=_BPW_TOLERANCE)
    )
    if not same:
        held = ", ".join(f"{each:.2f}" for each in actual)
        said = "is missing" if stated is None else f"{stated!r:.80}"
        yield Problem(
            f"{first.path}: key {layout.KEY_TIER_BPW} {said}, but the tiers hold {held}"
            " bits per weight",
            str(first.path),
        )


def _tier_problems(parts: Sequence[GGUFFile], tiers: list[str], n_layers: int) -> Iterator[Problem]:
    """Every expert matrix of the first n_layers has every tier, of the announced type, at a
    whole disk block."""
    first = parts[0]
    if first.alignment % layout.EXPERT_ALIGNMENT:
        yield Problem(
            f"{first.path}: alignment {first.alignment}; an expert file is aligned to"
            f" {layout.EXPERT_ALIGNMENT} bytes",
            str(first.path),
        )
    where = {info.name: (part, info) for part in parts for info in part.tensors.values()}
    for part, info in list(where.values()):
        parsed = parse_expert_name(info.name)
        if parsed is None or parsed.il >= n_layers:
            if layout.TIER_MARK in info.name:
                yield _problem(part, info, "not a tier of an expert matrix")
            continue
        asked = tiers[0] if parsed.tier is None else parsed.tier
        if asked not in tiers or (parsed.tier is not None and asked == tiers[0]):
            yield _problem(
                part, info, f"key {layout.KEY_TIERS} does not list {asked} as a lower tier"
            )
            continue
        declared = layout.type_by_name(asked)
        fitting = None if declared is None else layout.fitting_type(declared, info.shape[0])
        if fitting is not None and info.type != fitting:
            yield _problem(
                part, info, f"{info.type.tier_name}, but tier {asked} is {fitting.tier_name} there"
            )
        if len(parts) == 1 and info.offset % layout.EXPERT_ALIGNMENT:
            yield _problem(part, info, f"not a multiple of {layout.EXPERT_ALIGNMENT}")
        if parsed.tier is not None:
            base = expert_tensor_name(parsed.il, parsed.kind)
            if base not in where:
                yield _problem(part, info, f"its best tier {base} is missing")
            elif where[base][1].shape != info.shape:
                best = list(where[base][1].shape)
                yield _problem(part, info, f"shape {list(info.shape)}; its best tier is {best}")
            continue
        for tier in tiers[1:]:
            name = expert_tensor_name(parsed.il, parsed.kind, tier)
            if name not in where:
                yield Problem(
                    f"{part.path}: tensor {name} is missing, but key {layout.KEY_TIERS} announces"
                    f" tier {tier}",
                    str(part.path),
                    name,
                )


def _check_blocks(
    parts: Sequence[GGUFFile],
    report: VerifyReport,
    ggml: Ggml,
    threads: int,
    progress: Progress | None,
) -> None:
    tensors = [(part, info) for part in parts for info in part.tensors.values()]
    report.n_tensors = len(tensors)
    bad: dict[tuple[Path, str], list[int]] = {}
    unknown = {kind for kind in {info.type for _, info in tensors} if not ggml.can_check(kind)}
    checked = [info for _, info in tensors if info.type not in unknown]
    report.nbytes = sum(info.nbytes for info in checked)
    report.n_blocks = sum(info.nbytes // BLOCK[info.type].bytes for info in checked)

    def jobs() -> Iterator[Job]:
        for part, info in tensors:
            if info.type in unknown:
                continue
            block_bytes = BLOCK[info.type].bytes
            step = max(1, CHUNK_BYTES // block_bytes) * block_bytes
            found = bad.setdefault((part.path, info.name), [])
            for start in range(0, info.nbytes, step):
                size = min(step, info.nbytes - start)
                yield partial(_check_run, ggml, part, info, (start, size), found)

    with native_stderr_hidden():
        run_all(jobs(), threads, Meter(progress, report.nbytes))
    for part, info in tensors:
        found = sorted(bad.get((part.path, info.name), ()))
        if info.type in unknown:
            report.problems.append(
                _problem(part, info, f"ggml has no check for {info.type.tier_name}")
            )
        elif found:
            report.problems.append(_block_problem(part, info, found))


def _check_run(
    ggml: Ggml, part: GGUFFile, info: TensorInfo, run: tuple[int, int], found: list[int]
) -> int:
    """Check (start, bytes) of a tensor; adds the numbers of its bad blocks to ``found``."""
    start, nbytes = run
    block_bytes = BLOCK[info.type].bytes
    todo = [(start // block_bytes, nbytes // block_bytes)]
    bad: list[int] = []
    while todo and len(bad) < MAX_COUNTED:
        block, count = todo.pop()
        data = part.bytes_at(info.offset + block * block_bytes, count * block_bytes)
        if ggml.is_valid(info.type, data):
            continue
        if count == 1:
            bad.append(block)
        else:
            half = count // 2
            todo += [(block + half, count - half), (block, half)]
    found += bad
    return nbytes


def _block_problem(part: GGUFFile, info: TensorInfo, found: list[int]) -> Problem:
    """One sentence for the bad blocks of a tensor, in order."""
    block = found[0]
    size = BLOCK[info.type]
    offset = info.offset + block * size.bytes
    expert = ""
    if parse_expert_name(info.name) is not None and len(info.shape) == 3:
        per_expert = info.shape[0] * info.shape[1] // size.weights
        expert = f" (expert {block // per_expert})" if per_expert else ""
    what = "value" if size.weights == 1 else f"{info.type.tier_name} block"
    rest = ""
    if len(found) > 1:
        least = "at least " if len(found) >= MAX_COUNTED else ""
        rest = f", and {least}{len(found) - 1} more"
    return Problem(
        f"{part.path}: tensor {info.name}: {what} {block}{expert} at offset {offset} is not"
        f" finite{rest}",
        str(part.path),
        info.name,
        offset,
        block,
    )
