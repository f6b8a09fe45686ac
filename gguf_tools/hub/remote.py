"""The headers of models that are not here, read by range requests: of the Hub, or of any URL."""

from __future__ import annotations

import glob
import re
from pathlib import Path, PurePosixPath
from typing import NamedTuple
from urllib.parse import quote, unquote, urlsplit

from gguf_tools.errors import CountError, HubError, HubUnreachableError, TruncatedError
from gguf_tools.file.parts import SPLIT_NAME
from gguf_tools.file.reader import GGUFFile
from gguf_tools.hub.contents import prepare
from gguf_tools.hub.selection import PREFIX
from gguf_tools.units import format_size

# What the headers of one model may have, all parts together.
MOST_BYTES = 64 << 20
# What is asked for first, of each part; then as much again as is there.
_FIRST_BYTES = 256 << 10
_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)")
# A path makes one slash of two.
_WORN = re.compile(r"(https?):/+")


class Headers(NamedTuple):
    """path: of the first part of a model, whose parts have their header and their true size, and
    nothing else. read_bytes: what was read for it. nbytes: of the model."""

    path: Path
    read_bytes: int
    nbytes: int


def is_remote(text: str) -> bool:
    """Whether a model is named as on the Hub, or by a URL."""
    return text.startswith(PREFIX) or _WORN.match(text) is not None


def fetch_headers(text: str, folder: Path) -> Headers:
    """Writes stand-ins for the parts of ``hf:OWNER/NAME/FILE``, ``hf:OWNER/NAME`` or a URL into a
    folder. At most MOST_BYTES are read. Raises HubError, where the server gives no parts of a file
    too, HubUnreachableError, GGUFError for what is no model, and OSError."""
    urls, headers = _of_hub(text) if text.startswith(PREFIX) else (_of_url(text), {})
    reader = _Reader(headers)
    paths = []
    total = 0
    for url in urls:
        name = PurePosixPath(unquote(urlsplit(url).path)).name
        header, size = reader.header(url, name)
        path = folder / name
        with path.open("wb") as file:
            file.write(header)
            file.truncate(size)
        paths.append(path)
        total += size
    return Headers(paths[0], reader.read_bytes, total)


def _of_hub(text: str) -> tuple[list[str], dict[str, str]]:
    """The URLs of a model's parts, and the headers that open them."""
    from huggingface_hub.utils import build_hf_headers

    words = text.removeprefix(PREFIX).split("/", 2)
    if len(words) < 2 or not all(words):
        raise HubError(f"{text}: write it as {PREFIX}OWNER/NAME or {PREFIX}OWNER/NAME/FILE.gguf")
    found = prepare("/".join(words[:2]), [glob.escape(each) for each in words[2:]])
    if len(found.models) != 1:
        names = ", ".join(found.models) or "none"
        raise HubError(f"{text}: one GGUF model is needed, and it matches {names}")
    return [file.url for file in found.files], build_hf_headers()


def _of_url(text: str) -> list[str]:
    url = _WORN.sub(r"\1://", text, count=1)
    try:
        at = urlsplit(url)
    except ValueError as error:
        raise HubError(f"{text}: no address: {error}") from None
    folder, _, name = at.path.rpartition("/")
    split = SPLIT_NAME.fullmatch(unquote(name))
    if split is None:
        return [url]
    names = (f"{split[1]}-{n:05d}-of-{split[3]}.gguf" for n in range(1, int(split[3]) + 1))
    return [at._replace(path=f"{folder}/{quote(each)}").geturl() for each in names]


class _Reader:
    def __init__(self, headers: dict[str, str]) -> None:
        self._headers, self.read_bytes = headers, 0

    def header(self, url: str, name: str) -> tuple[bytes, int]:
        """The beginning of a file with all of its header, and the size of the file."""
        have, wanted = b"", _FIRST_BYTES
        while True:
            piece, size = self._range(url, len(have), wanted)
            have += piece
            try:
                GGUFFile(Path(name), have, size).close()
                return have, size
            except (TruncatedError, CountError):
                if len(have) >= size or not piece:
                    raise
            wanted = len(have)
            if self.read_bytes + wanted > MOST_BYTES:
                raise HubError(
                    f"{url}: its header does not end within {format_size(MOST_BYTES)}: that is no "
                    f"GGUF model"
                )

    def _range(self, url: str, start: int, n: int) -> tuple[bytes, int]:
        """So many bytes from a place, or as many as there are, and the size of the file."""
        from huggingface_hub.errors import HTTPError
        from huggingface_hub.utils import get_session

        span = {"Range": f"bytes={start}-{start + n - 1}", "Accept-Encoding": "identity"}
        headers = {**self._headers, **span}
        try:
            with get_session().stream("GET", url, headers=headers, follow_redirects=True) as answer:
                status = answer.status_code
                said = _RANGE.fullmatch(answer.headers.get("Content-Range", ""))
                if status == 206 and said is not None and int(said[1]) == start:
                    body = bytearray()
                    for chunk in answer.iter_bytes():
                        body += chunk
                        if len(body) >= n:
                            break
                    self.read_bytes += len(body)
                    return bytes(body[:n]), int(said[3])
        except (HTTPError, OSError, ValueError) as error:
            why = (str(error) or type(error).__name__).splitlines()[0]
            raise HubUnreachableError(f"{url}: cannot be reached: {why}") from error
        if status == 200:
            raise HubError(
                f"{url}: this server gives whole files alone (no range requests), so that the "
                f"header cannot be read by itself: download the file, and name that"
            )
        raise HubError(f"{url}: the server answers {status}: is the address right?")
