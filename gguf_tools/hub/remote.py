"""Read the headers of remote models by HTTP range requests, from the Hub or any URL."""

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

# Maximum number of bytes to read for one model, all parts together.
MOST_BYTES = 64 << 20
# Size of the first request for each part. Each further request doubles the bytes read so far.
_FIRST_BYTES = 256 << 10
_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)")
# The beginning of a URL. A URL that was stored as a Path has only one slash.
_URL_START = re.compile(r"(https?):/+")


class Headers(NamedTuple):
    """Local copies of the headers of a remote model's files.

    Each file has the size of the remote file, but only the header has contents. The rest is a hole,
    which takes no disk space.

    path: the file of the model's first part.
    read_bytes: number of bytes that were downloaded.
    nbytes: size of the whole model.
    """

    path: Path
    read_bytes: int
    nbytes: int


def is_remote(text: str) -> bool:
    """Return whether a model name is a URL or a name on the Hugging Face Hub (`hf:OWNER/NAME`)."""
    return text.startswith(PREFIX) or _URL_START.match(text) is not None


def fetch_headers(text: str, folder: Path) -> Headers:
    """Download the headers of a remote model's files, and write them as files into a folder.

    The written files have the size of the remote files, but no contents after the header. At most
    MOST_BYTES are downloaded.

    text: `hf:OWNER/NAME`, `hf:OWNER/NAME/FILE` or a URL.

    Raises HubError if the model is not found or the server does not support range requests, and
    HubUnreachableError if the server does not answer. Raises GGUFError if the file is not a valid
    GGUF, and OSError if a file cannot be written.
    """
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
    """Return the URLs of the files of a model on the Hub, and the HTTP headers for the requests.

    text: `hf:OWNER/NAME` or `hf:OWNER/NAME/FILE`.
    Raises HubError unless exactly one GGUF model matches.
    """
    from huggingface_hub.utils import build_hf_headers

    words = text.removeprefix(PREFIX).split("/", 2)
    if len(words) < 2 or not all(words):
        raise HubError(
            f"{text}: not a model name: write it as {PREFIX}OWNER/NAME or"
            f" {PREFIX}OWNER/NAME/FILE.gguf"
        )
    found = prepare("/".join(words[:2]), [glob.escape(each) for each in words[2:]])
    if len(found.models) != 1:
        names = ", ".join(found.models) or "none"
        raise HubError(f"{text}: exactly one GGUF model must match, but these match: {names}")
    return [file.url for file in found.files], build_hf_headers()


def _of_url(text: str) -> list[str]:
    """Return the URLs of all files of a model, given the URL of any of its files.

    Raises HubError if the URL is invalid.
    """
    url = _URL_START.sub(r"\1://", text, count=1)
    try:
        at = urlsplit(url)
    except ValueError as error:
        raise HubError(f"{text}: not a valid URL: {error}") from None
    folder, _, name = at.path.rpartition("/")
    split = SPLIT_NAME.fullmatch(unquote(name))
    if split is None:
        return [url]
    names = (f"{split[1]}-{n:05d}-of-{split[3]}.gguf" for n in range(1, int(split[3]) + 1))
    return [at._replace(path=f"{folder}/{quote(each)}").geturl() for each in names]


class _Reader:
    """Downloads the headers of GGUF files by HTTP range requests, and counts the bytes."""

    def __init__(self, headers: dict[str, str]) -> None:
        self._headers, self.read_bytes = headers, 0

    def header(self, url: str, name: str) -> tuple[bytes, int]:
        """Return the beginning of a remote file, which includes its header, and the file's size.

        Raises HubError if more than MOST_BYTES would have to be read.
        """
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
                    f"{url}: not a GGUF model: the header is longer than {format_size(MOST_BYTES)}"
                )

    def _range(self, url: str, start: int, n: int) -> tuple[bytes, int]:
        """Request n bytes of a remote file from offset `start` on.

        Return the received bytes, which can be fewer, and the size of the file. Raises HubError if
        the server does not support range requests, and HubUnreachableError if it does not answer.
        """
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
                f"{url}: the server does not support range requests, so the header cannot be read "
                f"without the rest: download the file and give its path"
            )
        raise HubError(f"{url}: the server answered with HTTP status {status}: check the URL")
