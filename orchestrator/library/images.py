"""Images that a Python program gives to `LLM.chat`: paths, bytes, and images of Pillow."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

from orchestrator.errors import ConfigError
from orchestrator.runtime.images import (
    ImageLimits,
    Part,
    image_part,
    no_images,
    read_image,
    url_of,
)

# Modes of Pillow's images that are written as PNG without a conversion.
_PNG_MODES = ("1", "L", "LA", "I;16", "P", "RGB", "RGBA")


def with_images(
    messages: Sequence[Mapping[str, Any]], images: Sequence[Any], limits: ImageLimits | None
) -> list[dict[str, Any]]:
    """Return messages in OpenAI's format, in which the given images have become data: URLs.

    An image is given as a path, the bytes of a PNG or JPEG file, or an image of Pillow.

    - messages: messages in OpenAI's format. The content of a message may also be a list of texts
      (strings), images, and parts in OpenAI's format.
    - images: images for the beginning of the last message. A string in this list is a path.
    - limits: the limits of the model, or None if it takes no images.

    Raises ConfigError for an image that the model cannot read, and TextFileError for a file that
    cannot be read.
    """
    if not all(isinstance(each, Mapping) for each in messages):
        raise ConfigError("messages: each message must be an object with a role and a content")
    made = [dict(each) for each in messages]
    for number, message in enumerate(made):
        content = message.get("content")
        if isinstance(content, (list, tuple)):
            message["content"] = [
                _part(each, limits, f"messages[{number}].content[{place}]")
                for place, each in enumerate(content)
            ]
    if images:
        if not made or made[-1].get("role") != "user":
            raise ConfigError('cannot add images: the last message must have the role "user"')
        content = made[-1].get("content") or []
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        shown = [_shown(each, limits, f"images[{at}]") for at, each in enumerate(images)]
        made[-1]["content"] = [*shown, *parts]
    return made


def _part(given: Any, limits: ImageLimits | None, name: str) -> Any:
    if isinstance(given, str):
        return {"type": "text", "text": given}
    return given if isinstance(given, Mapping) else _shown(given, limits, name)


def _shown(image: Any, limits: ImageLimits | None, name: str) -> Part:
    """Return the part of a message for an image. name: its place, for messages."""
    if limits is None:
        raise no_images()
    if isinstance(image, str) and image.startswith("data:"):
        return image_part(image)
    if isinstance(image, (str, os.PathLike)):
        return image_part(read_image(Path(image), limits)[1])
    if isinstance(image, (bytes, bytearray, memoryview)):
        return image_part(url_of(bytes(image), limits, name)[1])
    if not all(hasattr(image, each) for each in ("save", "convert", "mode", "size")):
        raise ConfigError(
            f"{name} has the type {type(image).__name__}: give a path, the bytes of a PNG or JPEG "
            "file, or an image of Pillow"
        )
    width, height = image.size
    limits.check_size(width, height, name)
    buffer = BytesIO()
    right = image if image.mode in _PNG_MODES else image.convert("RGB")
    right.save(buffer, "PNG")
    return image_part(url_of(buffer.getvalue(), limits, name)[1])
