"""Models in one file or in several parts, as llama.cpp's gguf-split writes them."""

import os
import re

from gguf_tools import errors
from gguf_tools.file.layout import KEY_ALIGNMENT, KEY_SPLIT_COUNT, KEY_SPLIT_NO, KEY_SPLIT_TENSORS
from gguf_tools.file.reader import GGUFFile, architecture, metadata_value

MAX_PARTS = 65535

# Such a name is NAME-00001-of-00003.gguf: it holds the part's number, from 1, and their count.
SPLIT_NAME = re.compile(r"(.*)-([0-9]{5})-of-([0-9]{5})\.gguf", re.DOTALL)


def open_model(path: str | os.PathLike[str]) -> list[GGUFFile]:
    """Open a model: one file, or all parts of a split one, the first part first. The first part
    is also the one to name, as for llama.cpp.

    Raises SplitError where parts are missing, out of order or of another model, and
    DuplicateError where they share a tensor name. Every part is also checked as GGUFFile.open does.
    """
    first = GGUFFile.open(path)
    n_parts = metadata_value(first, KEY_SPLIT_COUNT, int, 0)
    if n_parts <= 1:
        architecture(first)
        return [first]
    if n_parts > MAX_PARTS:
        raise errors.CountError(f"{first.path}: key {KEY_SPLIT_COUNT}: {n_parts} parts")
    number = metadata_value(first, KEY_SPLIT_NO, int, 0)
    match = SPLIT_NAME.fullmatch(first.path.name)
    if match is None or int(match[3]) != n_parts:
        raise errors.SplitError(
            f"{first.path}: one of {n_parts} parts, but not named"
            f" NAME-{number + 1:05d}-of-{n_parts:05d}.gguf"
        )
    if number != 0:
        raise errors.SplitError(
            f"{first.path}: part {number + 1} of {n_parts}; open the first part,"
            f" {match[1]}-00001-of-{n_parts:05d}.gguf"
        )
    if match[2] != "00001":
        raise errors.SplitError(
            f"{first.path}: named part {int(match[2])} of {n_parts}, but it is part 1: name it"
            f" {match[1]}-00001-of-{n_parts:05d}.gguf"
        )
    architecture(first)
    files = [first]
    names = dict.fromkeys(first.tensors, first.path)
    for index in range(1, n_parts):
        part = _open_part(first, index, n_parts, f"{match[1]}-{index + 1:05d}-of-{match[3]}.gguf")
        for name in part.tensors:
            if name in names:
                raise errors.DuplicateError(f"{part.path}: tensor {name}: also in {names[name]}")
        names.update(dict.fromkeys(part.tensors, part.path))
        files.append(part)
    total = metadata_value(first, KEY_SPLIT_TENSORS, int, len(names))
    if total != len(names):
        raise errors.SplitError(
            f"{first.path}: key {KEY_SPLIT_TENSORS}: {total}, but the parts hold {len(names)}"
        )
    return files


def _open_part(first: GGUFFile, index: int, n_parts: int, name: str) -> GGUFFile:
    """Part ``index`` (from 0) of the model of ``first``."""
    path = first.path.with_name(name)
    if not path.exists():
        raise errors.SplitError(
            f"{path}: part {index + 1} of {n_parts} is missing; all parts of"
            f" {first.path.name} belong in one folder"
        )
    part = GGUFFile.open(path)
    for key, expected in ((KEY_SPLIT_NO, index), (KEY_SPLIT_COUNT, n_parts)):
        found = metadata_value(part, key, int, None)
        if found is None:
            raise errors.SplitError(f"{path}: key {key} is missing: not a part of a split model")
        if found != expected:
            raise errors.SplitError(f"{path}: key {key}: {found}, expected {expected}")
    # gguf-split leaves the model's own metadata to the first part. What another one has must agree.
    for key in part.metadata:
        own = key in (KEY_SPLIT_NO, KEY_ALIGNMENT) or key not in first.metadata
        if not own and part.metadata[key] != first.metadata[key]:
            raise errors.SplitError(
                f"{path}: not of the model of {first.path.name}: key {key} differs"
                f" ({part.metadata[key]!r:.60} here, {first.metadata[key]!r:.60} there)"
            )
    return part
