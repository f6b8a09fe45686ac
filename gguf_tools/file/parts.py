"""Open a model that consists of one file, or of several parts written by llama.cpp's gguf-split."""

import os
import re

from gguf_tools import errors
from gguf_tools.file.layout import KEY_ALIGNMENT, KEY_SPLIT_COUNT, KEY_SPLIT_NO, KEY_SPLIT_TENSORS
from gguf_tools.file.reader import GGUFFile, architecture, metadata_value

MAX_PARTS = 65535

# A part's file name has its number, counted from 1, and the number of parts, such as
# NAME-00001-of-00003.gguf.
SPLIT_NAME = re.compile(r"(.*)-([0-9]{5})-of-([0-9]{5})\.gguf", re.DOTALL)


def open_model(path: str | os.PathLike[str]) -> list[GGUFFile]:
    """Open all files of a GGUF model, in the order of its parts if the model is split.

    path: the file or, as for llama.cpp, the first part of a split model.

    Raises SplitError if parts are missing, out of order or belong to another model. Raises
    DuplicateError if two parts have a tensor of the same name, and other GGUFErrors if a file
    cannot be read or is malformed.
    """
    first = GGUFFile.open(path)
    n_parts = metadata_value(first, KEY_SPLIT_COUNT, int, 0)
    if n_parts <= 1:
        architecture(first)
        return [first]
    if n_parts > MAX_PARTS:
        raise errors.CountError(
            f"{first.path}: key {KEY_SPLIT_COUNT} is {n_parts}, but the maximum is {MAX_PARTS}"
        )
    number = metadata_value(first, KEY_SPLIT_NO, int, 0)
    match = SPLIT_NAME.fullmatch(first.path.name)
    if match is None or int(match[3]) != n_parts:
        raise errors.SplitError(
            f"{first.path}: this is one of {n_parts} parts: name it"
            f" NAME-{number + 1:05d}-of-{n_parts:05d}.gguf"
        )
    if number != 0:
        raise errors.SplitError(
            f"{first.path}: this is part {number + 1} of {n_parts}: open the first part,"
            f" {match[1]}-00001-of-{n_parts:05d}.gguf"
        )
    if match[2] != "00001":
        raise errors.SplitError(
            f"{first.path}: named part {int(match[2])} of {n_parts}, but this is part 1: rename it"
            f" to {match[1]}-00001-of-{n_parts:05d}.gguf"
        )
    architecture(first)
    files = [first]
    names = dict.fromkeys(first.tensors, first.path)
    for index in range(1, n_parts):
        part = _open_part(first, index, n_parts, f"{match[1]}-{index + 1:05d}-of-{match[3]}.gguf")
        for name in part.tensors:
            if name in names:
                raise errors.DuplicateError(
                    f"{part.path}: tensor {name}: the tensor is also in {names[name]}"
                )
        names.update(dict.fromkeys(part.tensors, part.path))
        files.append(part)
    total = metadata_value(first, KEY_SPLIT_TENSORS, int, len(names))
    if total != len(names):
        raise errors.SplitError(
            f"{first.path}: key {KEY_SPLIT_TENSORS} is {total}, but the parts have {len(names)}"
            " tensors"
        )
    return files


def _open_part(first: GGUFFile, index: int, n_parts: int, name: str) -> GGUFFile:
    """Open a part of a split model other than the first, and check that it belongs to the model.

    Raises SplitError if the part is missing or belongs to another model.

    index: number of the part, counted from 0.
    name: file name of the part.
    """
    path = first.path.with_name(name)
    if not path.exists():
        raise errors.SplitError(
            f"{path}: part {index + 1} of {n_parts} is missing: put all parts of"
            f" {first.path.name} into one folder"
        )
    part = GGUFFile.open(path)
    for key, expected in ((KEY_SPLIT_NO, index), (KEY_SPLIT_COUNT, n_parts)):
        found = metadata_value(part, key, int, None)
        if found is None:
            raise errors.SplitError(f"{path}: not a part of a split model: key {key} is missing")
        if found != expected:
            raise errors.SplitError(f"{path}: key {key} is {found}, expected {expected}")
    # gguf-split writes the model's metadata into the first part only. Metadata in other parts must
    # have the same values.
    for key in part.metadata:
        own = key in (KEY_SPLIT_NO, KEY_ALIGNMENT) or key not in first.metadata
        if not own and part.metadata[key] != first.metadata[key]:
            raise errors.SplitError(
                f"{path}: belongs to another model than {first.path.name}: key {key} is"
                f" {part.metadata[key]!r:.60}, but {first.metadata[key]!r:.60} in the first part"
            )
    return part
