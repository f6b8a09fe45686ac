"""Parts of split models that do not belong together are refused with a sentence."""

import os
import re

import pytest
from gguf_craft import model_metadata, model_tensors, write_model
from gguf_split import split

from gguf_tools import errors
from gguf_tools.experts import ExpertModel
from gguf_tools.file.layout import ValueType
from gguf_tools.file.parts import open_model
from gguf_tools.file.reader import GGUFFile


def part(path, number, count, tensors, total, arch="qwen3moe"):
    metadata = model_metadata() if number == 0 else {"general.architecture": arch}
    keys = [
        (f"split.{key}", n, ValueType.UINT16, None) for key, n in (("no", number), ("count", count))
    ]
    keys.append(("split.tensors.count", total, ValueType.INT32, None))
    return write_model(path, tensors, metadata, extra=keys)


def split_paths(folder):
    return [folder / f"m-0000{i}-of-00002.gguf" for i in (1, 2)]


HALF = model_tensors()


def parted(end, start, *arch):
    """Two parts: the first `end` tensors, and the tensors from `start` on."""
    return {0: (0, HALF[:end]), 1: (1, HALF[start:], *arch)}


# name: (part that is opened, {index: (split.no, tensors, architecture)}, error, part of the
# message)
PARTS = {
    "no second part": (0, {0: (0, HALF)}, errors.SplitError, "part 2 of 2 is missing"),
    "opened at the second": (1, {1: (1, HALF)}, errors.SplitError, "m-00001-of-00002"),
    "twice the first": (0, {0: (0, HALF[:4]), 1: (0, HALF[4:])}, errors.SplitError, "split.no"),
    "a tensor in both": (0, parted(4, 3), errors.DuplicateError, "m-00001-of-00002"),
    "missing tensors": (0, parted(4, 5), errors.SplitError, "split.tensors.count"),
    "another architecture": (0, parted(4, 4, "olmoe"), errors.SplitError, "'olmoe', but"),
}


@pytest.mark.parametrize("name", PARTS)
def test_parts_that_form_no_model(name, tmp_path):
    opened, parts, error, says = PARTS[name]
    paths = split_paths(tmp_path)
    for at, (number, tensors, *arch) in parts.items():
        part(paths[at], number, 2, tensors, len(HALF), *arch)
    with pytest.raises(error, match=re.escape(says)):
        open_model(paths[opened])


def test_split_with_a_wrong_name(tmp_path):
    part(tmp_path / "m.gguf", 0, 2, HALF, 9)
    with pytest.raises(errors.SplitError, match="NAME-00001-of-00002"):
        open_model(tmp_path / "m.gguf")


@pytest.fixture
def split_model(tmp_path):
    """Paths of the three parts of a whole model, as gguf-split writes them."""
    return split(write_model(tmp_path / "whole.gguf"), tmp_path, 3)


def refused(path):
    with pytest.raises(errors.GGUFError) as caught:
        open_model(path)
    return str(caught.value)


FIRST = "m-00001-of-00003.gguf"
# name: (parts that are replaced, part that is opened, part that the message names, its text). A
# replacement is a part of this or another model, or a whole model.
SWAPPED = {
    "a later part is opened": ({}, 3, 3, f"this is part 3 of 3: open the first part, {FIRST}"),
    "another order": ({2: "part 3", 3: "part 2"}, 1, 2, "key split.no is 2, expected 1"),
    "the first under another's name": (
        {2: "part 1"},
        2,
        2,
        "named part 2 of 3, but this is part 1",
    ),
    "of another split": ({2: "halves"}, 1, 2, "key split.count is 2, expected 3"),
    "of another model": (
        {2: "larger"},
        1,
        2,
        f"belongs to another model than {FIRST}: key split.t",
    ),
    "a model of its own": (
        {2: "whole"},
        1,
        2,
        "not a part of a split model: key split.no is missing",
    ),
}


@pytest.mark.parametrize("name", SWAPPED)
def test_swapped_parts(split_model, tmp_path, name):
    moves, opened, named, says = SWAPPED[name]
    larger = write_model(tmp_path / "larger.gguf", model_tensors(layers=range(3)))
    data = {f"part {number}": path.read_bytes() for number, path in enumerate(split_model, 1)}
    data["whole"] = (tmp_path / "whole.gguf").read_bytes()
    data["halves"] = split(tmp_path / "whole.gguf", tmp_path / "other", 2)[1].read_bytes()
    data["larger"] = split(larger, tmp_path / "other", 3)[1].read_bytes()
    for number, content in moves.items():
        split_model[number - 1].write_bytes(data[content])
    assert refused(split_model[opened - 1]).startswith(f"{split_model[named - 1]}: {says}")


@pytest.mark.parametrize("size", [0, 3, 100, -1])
def test_split_with_a_truncated_part(split_model, size):
    part = split_model[1]
    with GGUFFile.open(part) as file:
        last = list(file.tensors.values())[-1]
    # -1: one byte less than the last tensor needs; the rest is padding
    os.truncate(part, size if size >= 0 else last.offset + last.nbytes - 1)
    assert refused(split_model[0]).startswith(f"{part}: ")


def test_name_of_a_split_model_without_one(tmp_path):
    whole = write_model(tmp_path / "whole.gguf", metadata=model_metadata(name=None))
    with ExpertModel.open(split(whole, tmp_path, 2, name="my-model")[0]) as model:
        assert model.name == "my-model"
