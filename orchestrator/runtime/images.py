"""Checks the images of a conversation, and writes them in the form that llama.cpp reads.

An image is part of a message, in base64. Nothing is fetched from an address.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable, Iterator, Sequence
from os import fstat
from pathlib import Path
from typing import Any, NoReturn

from gguf_tools.file.texts import open_regular
from gguf_tools.units import format_size
from orchestrator.errors import ConfigError
from orchestrator.runtime.image_files import Image as Image
from orchestrator.runtime.image_files import ImageLimits as ImageLimits
from orchestrator.runtime.image_files import inspect

Part = dict[str, Any]

# Types of content parts with an image: OpenAI's chat and responses, and Anthropic's messages.
_IMAGE_TYPES = ("image_url", "input_image", "image")
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]{0,30}):")
_LONGEST_HEAD = 256  # characters of a data: URL before its comma


# The error for an image if the model was loaded without an image encoder.
TEXT_ONLY = (
    "this model reads text only: to send images, load it with its image encoder, --mmproj FILE"
)


def no_images() -> ConfigError:
    """Return the error for an image if the model was loaded without an image encoder."""
    return ConfigError(TEXT_ONLY)


def read_image(path: Path, limits: ImageLimits | None) -> tuple[Image, str]:
    """Read an image file. Return its properties and its bytes as a data: URL.

    limits: the limits of the model, or None if it takes no images. Raises ConfigError for a file
    that is not an image within the limits, and TextFileError for a file that cannot be read.
    """
    if limits is None:
        raise no_images()
    with open_regular(path) as file:
        limits.check_bytes(fstat(file.fileno()).st_size, str(path))
        try:
            data = file.read(limits.file_bytes + 1)
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror or error}") from error
    return url_of(data, limits, str(path))


def url_of(data: bytes, limits: ImageLimits, name: str) -> tuple[Image, str]:
    """Return the properties of an image file, and its contents as a data: URL.

    data: the contents of the file. name: the beginning of error messages, such as the path of the
    file. Raises ConfigError for a file that llama.cpp cannot decode within the limits.
    """
    image = inspect(data, limits, name)
    return image, f"data:image/{image.type};base64,{base64.b64encode(data).decode()}"


def image_part(url: str) -> Part:
    """Return the content part of a message in OpenAI's chat format for an image."""
    return {"type": "image_url", "image_url": {"url": url}}


def is_image(part: Any) -> bool:
    """Return whether a JSON value is an image in a message, in any of the known formats."""
    return isinstance(part, dict) and part.get("type") in _IMAGE_TYPES


def has_images(messages: Iterable[Any]) -> bool:
    """Return whether messages have images, in any of the known formats."""
    return any(is_image(part) for _, _, part in _parts(messages, ""))


def settle_images(messages: Sequence[Any], limits: ImageLimits | None, field: str) -> list[str]:
    """Check all images of a conversation, and rewrite them in place for llama.cpp.

    Returns a string for each image: its base64 encoding, or a data: URL with this encoding. Raises
    ConfigError for images that cannot be decoded within the limits, for web addresses and file ids
    of images, and for audio and video.

    - messages: the conversation in the format of OpenAI's chat or responses API, or of Anthropic's
      API.
    - limits: the limits of the model, or None if it takes no images.
    - field: name of the messages in the request, for errors.
    """
    found = []
    for where, may_have_images, part in _parts(messages, field):
        kind = str(part.get("type"))
        if "audio" in kind or "video" in kind:
            raise ConfigError(f"{where}: audio and video are not supported: send text or images")
        if not is_image(part):
            continue
        if limits is None:
            raise no_images()
        if not may_have_images:
            raise ConfigError(
                f"{where}: this message may not contain images: send images in messages of the "
                "user or results of tools"
            )
        found.append((where, part))
    if limits is None or not found:
        return []
    if len(found) > limits.count:
        raise ConfigError(
            f"the conversation has {len(found)} images, and the limit is {limits.count}: leave "
            f"some of them out"
        )
    images, texts, n_bytes = [], list[str](), 0
    for where, part in found:
        text = _base64_of(part, where)
        image = inspect(_decoded(text, limits, where), limits, where)
        texts.append(_set(part, image.type, text))
        images.append(image)
        n_bytes += image.n_bytes
        if n_bytes > limits.file_bytes:
            total, most = format_size(n_bytes, up=True), format_size(limits.file_bytes)
            raise ConfigError(
                f"the image files of the conversation have {total} in all, and the limit is "
                f"{most}: make them smaller, or leave some of them out"
            )
    limits.check_images(images, f"{field}: {len(images)} images")
    return texts


def _parts(messages: Iterable[Any], field: str) -> Iterator[tuple[str, bool, Part]]:
    """Yield (path, whether it may be an image, part) for the content parts of messages.

    The content of results of tools is included.
    """
    for number, message in enumerate(messages):
        if not isinstance(message, dict):
            continue
        role, where = message.get("role"), f"{field}[{number}]"
        may = role in ("user", "tool", "function") or message.get("type") == "function_call_output"
        for name in ("content", "output"):
            listed = message.get(name)
            for place, part in enumerate(listed if isinstance(listed, list) else ()):
                if not isinstance(part, dict):
                    continue
                path = f"{where}.{name}[{place}]"
                yield path, may, part
                inner = part.get("content") if part.get("type") == "tool_result" else None
                for at, each in enumerate(inner if isinstance(inner, list) else ()):
                    if isinstance(each, dict):
                        yield f"{path}.content[{at}]", may, each


def _base64_of(part: Part, where: str) -> str:
    """Return the base64 text of an image in a message.

    Raises ConfigError for a URL, because nothing is fetched.
    """
    if part["type"] == "image":
        source = part.get("source")
        source = source if isinstance(source, dict) else {}
        if source.get("type") != "base64":
            _refuse_address(where, str(source.get("type"))[:20])
        text = source.get("data")
    else:
        text = part.get("image_url")
        text = text.get("url") if isinstance(text, dict) else text
        if text is None and part.get("file_id") is not None:
            _refuse_address(where, "file")
    if not isinstance(text, str):
        raise ConfigError(f"{where} has no image: give it as data:image/png;base64,...")
    scheme = _SCHEME.match(text)
    if scheme is None:
        return text
    if scheme[1].lower() != "data":
        _refuse_address(where, f"{scheme[1][:20]}:")
    comma = text.find(",", 0, _LONGEST_HEAD)
    if comma < 0 or not text[:comma].lower().endswith(";base64"):
        raise ConfigError(f"{where}: the data: URL is not base64: write data:image/png;base64,...")
    return text[comma + 1 :]


def _refuse_address(where: str, kind: str) -> NoReturn:
    raise ConfigError(
        f"{where}: the image is an address ({kind}), and nothing is fetched: send the image "
        "itself, in base64"
    )


def _decoded(text: str, limits: ImageLimits, where: str) -> bytes:
    """Return the bytes of a base64 text. Raises ConfigError if it is too long or not base64."""
    limits.check_bytes(3 * (len(text) // 4) - 2, where)
    try:
        return base64.b64decode(text, validate=True)
    except ValueError:
        why = "is cut off" if len(text) % 4 else "has invalid characters"
        if any(each in text for each in " \r\n\t"):
            why = "has spaces or line breaks"
        raise ConfigError(
            f"{where}: the image is not valid base64 (the text {why}): encode the file again"
        ) from None


def _set(part: Part, kind: str, text: str) -> str:
    """Write an image into its content part, in the form that llama.cpp reads. Return its text.

    kind: type of the image. text: its base64 text.
    """
    name = part["type"]
    part.clear()
    part["type"] = name
    if name == "image":
        part["source"] = {"type": "base64", "media_type": f"image/{kind}", "data": text}
        return text
    url = f"data:image/{kind};base64,{text}"
    part["image_url"] = {"url": url} if name == "image_url" else url
    return url
