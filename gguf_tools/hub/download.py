"""Download files of a Hugging Face repository into huggingface_hub's cache, with resumption.

huggingface_hub's own `hf_hub_download` discards a partial download when the process ends. This
module therefore downloads each file's blob with the library's HTTP client and calls
`hf_hub_download` afterwards, which then only links the finished blob.
"""

import fcntl
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gguf_tools.errors import HubError
from gguf_tools.file.chunks import sha256_of
from gguf_tools.hub.contents import Download, HubFile, incomplete_blob
from gguf_tools.hub.explain import translated_errors
from gguf_tools.progress import Progress, ProgressMeter

RETRIES = 5
_SHA256 = re.compile(r"[0-9a-f]{64}")


def fetch(download: Download, progress: Progress | None = None) -> list[Path]:
    """Download the missing files of a planned download, and return the local paths of all files.

    Broken connections and partial downloads of earlier runs are resumed. Raises DiskSpaceError
    before anything is downloaded, or HubError if the download fails.

    progress: called with the finished share, 0 to 1.
    """
    from huggingface_hub import constants, hf_hub_download

    download.check_space()
    meter = ProgressMeter(progress, download.nbytes)
    paths = []
    with translated_errors(download.repo, download.revision):
        for file in download.files:
            meter.add(file.have)
            if not file.path.exists():
                # For larger files hf_hub_download uses the Hub's Xet protocol instead of HTTP.
                if not file.blob.exists() and file.size <= constants.MAX_HTTP_DOWNLOAD_SIZE:
                    _download(file, meter.add)
                hf_hub_download(download.repo, file.name, revision=download.commit)
            paths.append(file.path)
        if download.revision != download.commit:
            ref = download.folder / "refs" / download.revision
            ref.parent.mkdir(parents=True, exist_ok=True)
            ref.write_text(download.commit)
    return paths


def _download(file: HubFile, add: Callable[[int], None]) -> None:
    """Download a file's contents into the cache, continuing a partial download.

    Raises HubError if another process is downloading the file, or if its SHA-256 is wrong.

    add: called with the number of bytes in each received piece.
    """
    from huggingface_hub.errors import HfHubHTTPError, HTTPError
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers

    class Bar:
        """Replaces tqdm's progress bar, and passes the number of received bytes to `add`."""

        def __init__(self, **_: Any) -> None:
            pass

        def update(self, nbytes: int) -> None:
            add(nbytes)

        def __enter__(self) -> "Bar":
            return self

        def __exit__(self, *_: object) -> None:
            pass

    incomplete = incomplete_blob(file.blob)
    incomplete.parent.mkdir(parents=True, exist_ok=True)
    with incomplete.open("ab") as target:
        try:
            fcntl.flock(target, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise HubError(
                f"{file.name}: another process is downloading this file: try again later"
            ) from None
        if target.tell() > file.size:
            target.truncate(0)
        retries = RETRIES
        while True:
            before = target.tell()
            try:
                http_get(
                    file.url,
                    target,
                    resume_size=before,
                    headers=build_hf_headers(),
                    expected_size=file.size,
                    tqdm_class=Bar,
                )
                break
            except HfHubHTTPError:
                raise
            except HTTPError:
                # http_get resumes after a timeout, but not after a connection reset.
                retries = RETRIES if target.tell() > before else retries - 1
                if not retries:
                    raise
                time.sleep(1)
        target.flush()
        os.fsync(target.fileno())
        # Large files are named by their SHA-256.
        if _SHA256.fullmatch(file.blob.name) and sha256_of(incomplete) != file.blob.name:
            incomplete.unlink()
            raise HubError(
                f"{file.name}: damaged during the download (wrong SHA-256): pull it again"
            )
        os.replace(incomplete, file.blob)
