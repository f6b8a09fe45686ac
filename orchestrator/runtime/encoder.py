"""Finds the image encoder of a model, and measures the memory that images need."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from gguf_tools.file.reader import GGUFFile, architecture, metadata_value
from gguf_tools.hub.selection import is_encoder
from orchestrator.config import Config
from orchestrator.errors import ConfigError, NativeError
from orchestrator.native.llama import Bindings
from orchestrator.native.server import server_library
from orchestrator.runtime.image_files import ImageLimits
from orchestrator.runtime.prompt_copies import common_prefix
from orchestrator.runtime.support import ChildAborted, ask_child

NONE = Path("none")
_ARCHITECTURE = "clip"
# An image token is held as float32 in three places: the encoder's output, llama.cpp's batch, and
# the input of the graph.
_EMBEDDINGS = 3
_FLOAT_BYTES = 4


@dataclass(frozen=True)
class Encoder:
    """The image encoder of a model.

    path: its file. limits: limits for the images of a request. n_bytes: memory that the encoder
    takes, without the images of requests. whole_tokens: the minimum micro-batch size in tokens, if
    the model must compute all tokens of an image in one micro-batch; otherwise 0. width: the length
    of the embedding vector of an image token.
    """

    path: Path
    limits: ImageLimits
    n_bytes: int
    whole_tokens: int
    width: int


def encoder_of(config: Config) -> Encoder | None:
    """Return the image encoder that a configuration names, or the one in the folder of the model.

    The result is None without an image encoder. Raises ConfigError if the named file is not an
    image encoder of the model.
    """
    if config.mmproj == NONE:
        return None
    path = config.mmproj or _near(config.model)
    if path is None:
        return None
    found = _measured(path, config.image_max_tokens, _stamp(path))
    width = _input_width(config.model, _stamp(config.model))
    if found.width == width:
        return found
    if config.mmproj is None:
        return None
    raise ConfigError(
        f"{path}: this image encoder belongs to another model, because its image tokens have "
        f"{found.width} numbers instead of {width}: choose another --mmproj, or --mmproj none"
    )


def _stamp(path: Path) -> tuple[int, ...]:
    """Return numbers that change if a file changes. They are empty if the file does not exist."""
    try:
        stat = path.stat()
    except OSError:
        return ()
    return stat.st_size, stat.st_mtime_ns


@lru_cache(maxsize=8)
def _input_width(model: Path, _stamp: tuple[int, ...]) -> int:
    """Return how many numbers a model reads for each image token.

    Qwen3-VL's models read further numbers in their first layers (deepstack).
    """
    with GGUFFile.open(model) as file:
        arch = architecture(file)
        width = metadata_value(file, f"{arch}.embedding_length", int, 0)
        return int(width * (1 + metadata_value(file, f"{arch}.n_deepstack_layers", int, 0)))


def _near(model: Path) -> Path | None:
    """Return the image encoder in the folder of a model: a file mmproj*.gguf.

    If there are several, it is the one whose name has the most in common with the model's name.
    """
    found = sorted(
        each for each in model.parent.glob("*.gguf") if is_encoder(each.name) and each.is_file()
    )

    def common(path: Path) -> int:
        name = path.stem.lower().removeprefix("mmproj").lstrip("-_.")
        return common_prefix(list(name.encode()), list(model.stem.lower().encode()))

    return max(found, key=common, default=None)


@lru_cache(maxsize=8)
def _measured(path: Path, max_tokens: int | None, _stamp: tuple[int, ...]) -> Encoder:
    """Check and measure an image encoder. _stamp: changes if the file changes."""
    with GGUFFile.open(path) as file:  # also checks that the file is complete
        if architecture(file) != _ARCHITECTURE:
            raise ConfigError(
                f"{path}: this is not an image encoder (mmproj), but a model of the architecture "
                f"{architecture(file)}: choose another --mmproj, or --mmproj none"
            )
    limits = ImageLimits()
    try:
        found = ask_child(_measure, path, max_tokens, limits.pixels)
    except ChildAborted as error:
        found = f"llama.cpp aborts when it reads the file ({error})"
    if isinstance(found, str) or found is None:
        raise ConfigError(
            f"{path}: llama.cpp cannot use this image encoder: {found or 'no reason given'}; "
            "choose another --mmproj, or --mmproj none"
        )
    weights, scratch, prepared, min_pixels, part_tokens, is_whole, n_embd = found
    embeddings = _EMBEDDINGS * _FLOAT_BYTES * n_embd * part_tokens
    return Encoder(
        path,
        limits.with_prepared_sizes(prepared, min_pixels),
        weights + scratch + embeddings,
        part_tokens if is_whole else 0,
        n_embd,
    )


def _measure(path: Path, max_tokens: int | None, most_pixels: int) -> tuple[int, ...] | str:
    """Measure an image encoder. Return the fields of CImages, or the reason of a failure."""
    try:
        found = server_library(Bindings.load()).measure_images(path, max_tokens, most_pixels)
    except NativeError as error:
        return str(error)
    return tuple(getattr(found, name) for name, *_ in found._fields_)
