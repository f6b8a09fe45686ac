"""Open and check a checkpoint folder in the format of Hugging Face's transformers.

The checks only read the configuration, the index and the header of each weight file. llama.cpp's
converter would find the same faults after hours, or not at all.
"""

import json
import os
import re
from codecs import BOM_UTF8
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from gguf_tools.convert.quantized import check_quantization
from gguf_tools.errors import CheckpointError, TextFileError
from gguf_tools.file.texts import open_regular, read_text

MAX_HEADER_BYTES = 100 << 20
MAX_JSON_BYTES = 256 << 20
INDEX = "model.safetensors.index.json"
_SHARD = re.compile(r"(.*-)([0-9]{5})(-of-)([0-9]{5})(\.safetensors|\.bin)")
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer.jsonl")
_TIKTOKEN = ("*.tiktoken", "*tiktoken*.model")

# Bits per number of each safetensors type.
DTYPE_BITS = {
    "BOOL": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "U8": 8,
    "I8": 8,
    "BF16": 16,
    "F16": 16,
    "I16": 16,
    "U16": 16,
    "F32": 32,
    "I32": 32,
    "U32": 32,
    "C64": 64,
    "F64": 64,
    "I64": 64,
    "U64": 64,
}


@dataclass(slots=True)
class Checkpoint:
    """A checkpoint folder in Hugging Face's format whose files have been checked.

    architecture: the model class in config.json, such as `MixtralForCausalLM`.
    dtype: safetensors type of most of the weights, such as `BF16`. Empty if the weights are not in
        safetensors files.
    nbytes: size of all weight files.
    """

    folder: Path
    architecture: str
    dtype: str
    nbytes: int


def open_checkpoint(folder: Path) -> Checkpoint:
    """Check a checkpoint folder and return its properties.

    Raises CheckpointError if a file is missing, truncated or inconsistent.
    """
    if not folder.is_dir():
        problem = "not a folder" if folder.exists() else "does not exist"
        raise CheckpointError(f"{folder}: {problem}: give a checkpoint folder with a config.json")
    config = _read_json(folder / "config.json")
    parts = _parts(folder)
    weights: Counter[str] = Counter()
    dtypes: dict[str, str] = {}
    is_mlx = False
    for part in parts:
        if part.suffix == ".safetensors":
            header, data_bytes = _header(part)
            about = header.pop("__metadata__", None)
            is_mlx |= isinstance(about, dict) and about.get("format") == "mlx"
            for name, dtype, shape in _tensors(part, header, data_bytes):
                dtypes[name] = dtype
                if len(shape) > 1:
                    weights[dtype] += prod(shape)
    check_quantization(folder, config, dtypes, is_mlx)
    if not any(path.is_file() for name in _TOKENIZERS for path in [folder / name]) and not any(
        next(folder.glob(pattern), None) for pattern in _TIKTOKEN
    ):
        raise CheckpointError(
            f"{folder}: no tokenizer: add the checkpoint's tokenizer.json or tokenizer.model"
        )
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if (folder / name).is_file():
            _read_json(folder / name)
    nbytes = sum(part.stat().st_size for part in parts)
    dtype = weights.most_common(1)[0][0] if weights else ""
    return Checkpoint(folder, _architecture(folder, config), dtype, nbytes)


def _read_json(path: Path) -> dict[str, Any]:
    """Read a file that contains a JSON object.

    Raises CheckpointError if the file is missing, not JSON, or not an object.
    """
    if not path.exists():
        raise CheckpointError(f"{path}: the file is missing: give a folder with a checkpoint")
    try:
        with open_regular(path) as file:
            if file.read(len(BOM_UTF8)) == BOM_UTF8:
                # transformers and llama.cpp's converter would refuse the mark.
                raise CheckpointError(
                    f"{path}: begins with a byte order mark: save the file without it"
                )
        found = json.loads(read_text(path, MAX_JSON_BYTES))
    except TextFileError as error:
        raise CheckpointError(str(error)) from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not JSON: {error}") from None
    if not isinstance(found, dict):
        raise CheckpointError(f"{path}: not a JSON object")
    return found


def _architecture(folder: Path, config: dict[str, Any]) -> str:
    names = config.get("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise CheckpointError(f"{folder / 'config.json'}: no architecture in 'architectures'")
    return names[0]


def _parts(folder: Path) -> list[Path]:
    """Return the paths of all weight files of a checkpoint folder.

    Raises CheckpointError if one of the files is missing.
    """
    index = folder / INDEX
    if index.is_file():
        named = _read_json(index).get("weight_map")
        if not isinstance(named, dict) or not all(isinstance(each, str) for each in named.values()):
            raise CheckpointError(f"{index}: no valid 'weight_map' from tensors to files")
        parts = sorted({folder / name for name in named.values()})
        for part in parts:
            if part.parent != folder:
                raise CheckpointError(f"{index}: {part.name} is outside of the folder")
    else:
        parts = sorted(folder.glob("model*.safetensors")) or sorted(
            folder.glob("pytorch_model*.bin")
        )
    if not parts:
        raise CheckpointError(f"{folder}: no weights: expected *.safetensors or pytorch_model.bin")
    expected = set(parts)
    for part in parts:
        match = _SHARD.fullmatch(part.name)
        if match is not None and int(match[4]) < 1 << 12:
            expected |= {
                folder / f"{match[1]}{i:05d}{match[3]}{match[4]}{match[5]}"
                for i in range(1, int(match[4]) + 1)
            }
    for part in sorted(expected):
        if not os.path.isfile(part):  # Path.is_file() raises ValueError for some invalid names.
            raise CheckpointError(
                f"{part}: one of {len(expected)} weight files is missing: download it again"
            )
    return parts


def _tensors(
    path: Path, header: dict[str, Any], data_bytes: int
) -> Iterator[tuple[str, str, list[int]]]:
    """Yield name, type and shape of each tensor that the header of a safetensors file lists.

    Raises CheckpointError if the file is truncated or damaged.

    data_bytes: size of the data after the header.
    """
    for name, entry in header.items():
        tensor = f"{path}: tensor {name}"
        try:
            dtype, shape = str(entry["dtype"]), [int(each) for each in entry["shape"]]
            start, end = (int(each) for each in entry["data_offsets"])
        except (LookupError, TypeError, ValueError, OverflowError):
            raise CheckpointError(
                f"{tensor}: invalid header entry: download the file again"
            ) from None
        if dtype not in DTYPE_BITS:
            raise CheckpointError(f"{tensor}: unknown type {dtype}")
        n = prod(shape)
        if min(shape, default=0) < 0 or start < 0 or (end - start) * 8 != n * DTYPE_BITS[dtype]:
            raise CheckpointError(
                f"{tensor}: {end - start} bytes do not match the shape {shape} of {dtype}"
            )
        if end > data_bytes:
            raise CheckpointError(
                f"{tensor}: ends {end - data_bytes} bytes past the end of the truncated file:"
                " download it again"
            )
        yield name, dtype, shape


def _header(path: Path) -> tuple[dict[str, Any], int]:
    """Return the header of a safetensors file, and the size in bytes of the data after the header.

    Raises CheckpointError if the file cannot be read or the header is invalid.
    """
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > size - 8:
                raise CheckpointError(f"{path}: truncated inside the header: download it again")
            if length > MAX_HEADER_BYTES:
                raise CheckpointError(
                    f"{path}: not a safetensors file: a header of {length} bytes exceeds the"
                    f" maximum of {MAX_HEADER_BYTES}"
                )
            found = json.loads(file.read(length))
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from error
    except (ValueError, RecursionError):
        raise CheckpointError(f"{path}: not a safetensors file: the header is not JSON") from None
    if not isinstance(found, dict):
        raise CheckpointError(f"{path}: not a safetensors file: the header is not a JSON object")
    return found, size - 8 - length
