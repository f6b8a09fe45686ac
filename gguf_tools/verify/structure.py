"""Whether the bytes of a file lie where llama.cpp wants them, and belong to one model."""

from collections.abc import Iterator

from gguf_tools.file import layout
from gguf_tools.file.layout import GGMLType, parse_expert_name
from gguf_tools.file.reader import GGUFFile
from gguf_tools.verify.report import Problem, problem_at


def layout_problems(part: GGUFFile) -> Iterator[Problem]:
    """Tensors follow each other in the order of their list, with nothing but zero padding
    between them: llama.cpp refuses anything else."""
    end = part.data_offset
    previous = "the header"
    for info in part.tensors.values():
        expected = layout.pad(end, part.alignment)
        if info.offset != expected:
            yield problem_at(part, info, f"expected at {expected}, behind {previous}")
        elif _holds_data(part, end, info.offset):
            yield problem_at(part, info, f"data between it and the end of {previous} at {end}")
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


def foreign_problems(parts: list[GGUFFile]) -> Iterator[Problem]:
    """Parts of another quantization of the same model.

    Their headers cannot tell, since parts but the first say nothing of the model, and names,
    shapes and counts are equal. Such a part is known by its expert matrices: none of them, of any
    kind, has a type that this kind has in another part.
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
