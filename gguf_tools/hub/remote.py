"""Read the headers of remote models by HTTP range requests, from the Hub or any URL."""

from __future__ import annotations

import glob
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path, PurePosixPath
from threading import Lock
from typing import NamedTuple
from urllib.parse import quote, unquote, urlsplit

from gguf_tools.errors import (
    CountError,
    GGUFError,
    HubError,
    HubUnreachableError,
    MoeEdgeError,
    TruncatedError,
)
from gguf_tools.file.parts import SPLIT_NAME
from gguf_tools.file.reader import GGUFFile
from gguf_tools.hub.contents import prepare
from gguf_tools.hub.listing import Listing
from gguf_tools.hub.selection import PREFIX
from gguf_tools.progress import Progress
from gguf_tools.units import format_size
from gguf_tools.workers import in_order, workers

# Maximum number of bytes to read for one model, all parts together.
MOST_BYTES = 64 << 20
# Size of the first request for each part. Each further request doubles the bytes read so far.
_FIRST_BYTES = 256 << 10
# Maximum number of bytes to read for all models of a repository together, and the number of models
# that are read at the same time.
MOST_OF_ALL = 256 << 20
_CONNECTIONS = 4
# Number of requests without an answer after which no more requests are made.
_FAILURES = 3
# Number of bytes that must be equal before a vocabulary is taken from another header. Then the
# bytes of a tensor in a header, without its name and dimensions. Last, the bytes left for a chat
# template after the vocabulary.
_MARK_BYTES, _INFO_BYTES, _TEMPLATE_BYTES = 1 << 10, 24, 64 << 10
# Headers of quantizations differ by at most this many bytes.
_MORE_BYTES = 4 << 10
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
    return _written(_Reader(headers), urls, folder)


def fetch_listed_headers(
    listing: Listing, folder: Path, progress: Progress | None = None
) -> tuple[list[Headers | MoeEdgeError], int]:
    """Download the headers of a repository's models, as fetch_headers does for one model.

    All quantizations of a model have the same vocabulary, which is most of a header. It is
    therefore downloaded only once. At most MOST_OF_ALL bytes are downloaded in total, and nothing
    for models that are in the cache.

    folder: receives one folder for each model. progress: called with the finished share, 0 to 1.

    Return (results, number of downloaded bytes). The list `results` has a Headers object (path of
    the local copy, and sizes) for each listed model, in their order. If a header cannot be read or
    stored, it has an error instead.
    """
    from huggingface_hub.utils import build_hf_headers

    budget, headers = _Budget(MOST_OF_ALL), build_hf_headers()

    def read(number: int, like: _Vocabulary | None) -> tuple[Headers | MoeEdgeError, _Reader]:
        model, reader = listing.models[number], _Reader(headers, budget, like)
        found: Headers | MoeEdgeError
        try:
            if model.why:
                raise HubError(model.why)
            if not model.missing and all(path.exists() for path in model.paths):
                found = Headers(model.paths[0], 0, model.nbytes)
            else:
                mine = folder / str(number)
                mine.mkdir()
                found = _written(reader, model.urls, mine)
        except MoeEdgeError as error:
            found = error
        except OSError as error:  # such as a size that no file can have
            found = HubError(f"{model.name}: the header cannot be stored: {error.strerror}")
        return found, reader

    results: list[Headers | MoeEdgeError] = []
    read_bytes = 0

    def add(found: Headers | MoeEdgeError, reader: _Reader) -> None:
        nonlocal read_bytes
        read_bytes += reader.read_bytes
        results.append(found)
        if progress is not None:
            progress(len(results) / len(listing.models))

    like, left = None, iter(range(len(listing.models)))
    for number in left:
        found, reader = read(number, None)
        add(found, reader)
        if reader.vocabulary is not None:
            like = reader.vocabulary
            break
    with workers(_CONNECTIONS, "header") as pool:
        for found, reader in in_order(pool, lambda each: read(each, like), left):
            add(found, reader)
    return results, read_bytes


def _written(reader: _Reader, urls: Sequence[str], folder: Path) -> Headers:
    """Download the headers of a model's files, and write them as files into a folder."""
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


class _Budget:
    """Limits the bytes that several readers request together, and their failed requests."""

    def __init__(self, n_bytes: int) -> None:
        self._all = self._left = n_bytes
        self._failures = 0
        self._lock = Lock()

    def record(self, answered: bool) -> None:
        """Count successive requests that the server did not answer.

        After several such requests in a row, `take` refuses further requests. An answer resets the
        count.

        answered: whether the server answered the latest request.
        """
        with self._lock:
            self._failures = 0 if answered else self._failures + 1

    def take(self, url: str, n_bytes: int) -> None:
        """Reserve bytes for a request.

        Raises HubError if too few bytes are left. Raises HubUnreachableError if the server did not
        answer the last few requests.
        """
        with self._lock:
            if self._failures >= _FAILURES:
                raise HubUnreachableError(
                    f"{url}: not requested, because the server did not answer {_FAILURES} requests "
                    "before: try again later"
                )
            if n_bytes > self._left:
                raise HubError(
                    f"{url}: not read, because the headers of this repository are longer than "
                    f"{format_size(self._all)} together: name this file alone"
                )
            self._left -= n_bytes


class _Vocabulary(NamedTuple):
    """A header that contains a vocabulary, which other headers may share.

    header: the beginning of the file, up to the data. end: an offset after the vocabulary, before
    everything that differs between quantizations.
    """

    header: bytes
    end: int

    @classmethod
    def of(cls, header: bytes, parsed: GGUFFile) -> _Vocabulary:
        infos = sum(
            _INFO_BYTES + len(name.encode()) + 8 * len(info.shape)
            for name, info in parsed.tensors.items()
        )
        return cls(header, max(0, len(header) - infos - _TEMPLATE_BYTES))


class _Reader:
    """Downloads the headers of a model's files by HTTP range requests, and counts the bytes."""

    def __init__(
        self,
        headers: dict[str, str],
        budget: _Budget | None = None,
        like: _Vocabulary | None = None,
    ) -> None:
        """Prepare to read. Nothing is downloaded yet.

        headers: HTTP headers of every request. budget: limits the bytes of several readers. like: a
        vocabulary that the model probably shares.
        """
        self._headers, self._budget, self._like = headers, budget, like
        self.read_bytes = 0
        # The vocabulary of the model, if it is long and was downloaded in full.
        self.vocabulary: _Vocabulary | None = None

    def header(self, url: str, name: str) -> tuple[bytes, int]:
        """Return the beginning of a remote file, which includes its header, and the file's size.

        Raises HubError if more than MOST_BYTES would have to be read.
        """
        have, wanted = b"", _FIRST_BYTES
        while True:
            piece, size = self._range(url, len(have), wanted)
            have += piece
            try:
                return self._parsed(name, have, size), size
            except (TruncatedError, CountError):
                if len(have) >= size or not piece:
                    raise
            if self._like is not None and len(have) == len(piece):
                with suppress(GGUFError):
                    spliced = self._spliced(url, have, size, self._like)
                    if spliced is not None:
                        return self._parsed(name, spliced, size), size
            wanted = len(have)
            if self.read_bytes + wanted > MOST_BYTES:
                raise HubError(
                    f"{url}: not a GGUF model: the header is longer than {format_size(MOST_BYTES)}"
                )

    def _parsed(self, name: str, have: bytes, size: int) -> bytes:
        """Return the header at the beginning of a file. Raises GGUFError if it is incomplete."""
        with GGUFFile(Path(name), have, size) as parsed:
            header = have[: parsed.data_offset]
            if self._like is None and len(header) > _FIRST_BYTES:
                self.vocabulary = _Vocabulary.of(header, parsed)
        return header

    def _spliced(self, url: str, have: bytes, size: int, like: _Vocabulary) -> bytes | None:
        """Return the beginning of a file whose vocabulary is taken from another file.

        Only what follows the vocabulary is downloaded. have: the beginning of the file, which ends
        inside the vocabulary. size: the size of the file. The result is None unless both files have
        the same bytes at the start and at the end of the part that is taken.
        """
        mark = have[-_MARK_BYTES:]
        start = like.header.find(mark) + len(mark)
        if start < len(mark) or like.header.find(mark, start - len(mark) + 1) >= 0:
            return None
        end = max(start, like.end)
        at = len(have) + end - start
        if at >= size:
            return None
        piece, _ = self._range(url, at, len(like.header) - end + _MORE_BYTES)
        if piece[:_MARK_BYTES] != like.header[end : end + _MARK_BYTES]:
            return None
        return have + like.header[start:end] + piece

    def _range(self, url: str, start: int, n: int) -> tuple[bytes, int]:
        """Request n bytes of a remote file from offset `start` on.

        Return the received bytes, which can be fewer, and the size of the file. Raises HubError if
        the server does not support range requests, and HubUnreachableError if it does not answer.
        """
        from huggingface_hub import constants
        from huggingface_hub.errors import HTTPError
        from huggingface_hub.utils import get_session

        if self._budget is not None:
            self._budget.take(url, n)
        span = {"Range": f"bytes={start}-{start + n - 1}", "Accept-Encoding": "identity"}
        headers = {**self._headers, **span}
        try:
            with get_session().stream(
                "GET",
                url,
                headers=headers,
                follow_redirects=True,
                timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT,
            ) as answer:
                status = answer.status_code
                said = _RANGE.fullmatch(answer.headers.get("Content-Range", ""))
                if status == 206 and said is not None and int(said[1]) == start:
                    body = bytearray()
                    for chunk in answer.iter_bytes():
                        body += chunk
                        if len(body) >= n:
                            break
                    self.read_bytes += len(body)
                    if self._budget is not None:
                        self._budget.record(True)
                    return bytes(body[:n]), int(said[3])
        except (HTTPError, OSError, ValueError) as error:
            why = (str(error) or type(error).__name__).splitlines()[0]
            if self._budget is not None:
                self._budget.record(False)
            raise HubUnreachableError(f"{url}: cannot be reached: {why}") from error
        if status == 200:
            raise HubError(
                f"{url}: the server does not support range requests, so the header cannot be read "
                f"without the rest: download the file and give its path"
            )
        raise HubError(f"{url}: the server answered with HTTP status {status}: check the URL")
