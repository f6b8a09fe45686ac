"""Check that tensors are placed as llama.cpp requires, and that all parts belong to one model."""

from collections.abc import Iterator

from gguf_tools.file import layout
from gguf_tools.file.layout import GGMLType, parse_expert_name
from gguf_tools.file.reader import GGUFFile
from gguf_tools.verify.report import Problem, problem_at


def layout_problems(part: GGUFFile) -> Iterator[Problem]:
    """Yield a problem for each tensor whose data is not where llama.cpp expects it in the file.

    llama.cpp loads a file only if the data of its tensors is in the order of the tensor list, with
    only zeros between two tensors. Extra bytes at the end are reported, too.
    """
    end = part.data_offset
    previous = "the header"
    for info in part.tensors.values():
        expected = layout.pad(end, part.alignment)
        if info.offset != expected:
            yield problem_at(
                part, info, f"the data is expected at offset {expected}, after {previous}"
            )
        elif _has_data(part, end, info.offset):
            yield problem_at(
                part, info, f"the padding after {previous}, which ends at {end}, is not zero"
            )
        end, previous = info.offset + info.nbytes, info.name
    if part.tensors:
        last = max(info.offset + info.nbytes for info in part.tensors.values())
        if part.size > layout.pad(last, part.alignment) or _has_data(part, last, part.size):
            yield Problem(
                f"{part.path}: {part.size - last} extra bytes after the last tensor, which ends at"
                f" {last}",
                str(part.path),
                offset=last,
            )


def foreign_problems(parts: list[GGUFFile]) -> Iterator[Problem]:
    """Yield a problem for each file of a split model that seems to come from another quantization.

    For example, a file's `ffn_up_exps` and `ffn_down_exps` tensors are in q4_k, but in all other
    files, tensors with these names are in q8_0. Layer numbers in names are ignored.

    A file is reported if it shares at least two such names with other files, and all tensors with
    a shared name have other ggml types there. One name is not enough, because a quantization may
    use several types for it.

    If the model has only two files, only the second is reported.

    parts: the opened files of the model.
    """
    types = [_expert_types(part) for part in parts]
    for index, (part, own) in enumerate(zip(parts, types, strict=True)):
        others: dict[tuple[int, str | None], set[GGMLType]] = {}
        for found in types[:index] + types[index + 1 :]:
            for key, each in found.items():
                others.setdefault(key, set()).update(each)
        shared = [key for key in own if key in others]
        if len(parts) == 2 and index == 0:  # One finding is enough for two parts.
            continue
        if len(shared) > 1 and all(own[key].isdisjoint(others[key]) for key in shared):
            have, rest = (
                ", ".join(sorted({each.tier_name for key in shared for each in found[key]}))
                for found in (own, others)
            )
            yield Problem(
                f"{part.path}: this part seems to belong to another quantization: its experts are"
                f" {have}, but {rest} in the other parts",
                str(part.path),
            )


def _expert_types(part: GGUFFile) -> dict[tuple[int, str | None], set[GGMLType]]:
    """Return the ggml types of the experts in a file, by kind of matrix and precision (tier)."""
    types: dict[tuple[int, str | None], set[GGMLType]] = {}
    for info in part.tensors.values():
        parsed = parse_expert_name(info.name)
        if parsed is not None:
            types.setdefault((parsed.kind, parsed.tier), set()).add(info.type)
    return types


def _has_data(part: GGUFFile, start: int, end: int) -> bool:
    """Return whether any byte of a padding range of a file is not zero.

    Return False for a range that is longer than padding can be.
    """
    return 0 < end - start <= part.alignment and bool(part.bytes_at(start, end - start).any())
