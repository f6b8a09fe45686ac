"""Translate errors of huggingface_hub into one-sentence messages."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gguf_tools.errors import HubError, HubUnreachableError


def storage_folder(repo: str) -> Path:
    """Return the folder in which huggingface_hub's cache stores a repository."""
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    folder: str = repo_folder_name(repo_id=repo, repo_type="model")
    return Path(constants.HF_HUB_CACHE) / folder


@contextmanager
def translated_errors(repo: str, revision: str | None) -> Iterator[None]:
    """Convert huggingface_hub's exceptions in the `with` block to HubError with one sentence.

    During the block, huggingface_hub logs only errors.
    """
    from huggingface_hub.errors import EntryNotFoundError, HTTPError

    log = logging.getLogger("huggingface_hub")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    except (EntryNotFoundError, HTTPError, OSError, ValueError) as error:
        raise _explained(error, repo, revision) from error
    finally:
        log.setLevel(level)


def _explained(error: Exception, repo: str, revision: str | None) -> HubError:
    from huggingface_hub import constants
    from huggingface_hub import errors as hub

    endpoint, why = constants.ENDPOINT, _first_line(error)
    login = "log in with `hf auth login` or set HF_TOKEN"
    # Derived classes come before their base classes: the first match is used.
    sentences: tuple[tuple[type[Exception], type[HubError], str], ...] = (
        (
            hub.GatedRepoError,
            HubError,
            f"access is restricted: accept the terms at {endpoint}/{repo}, then {login}",
        ),
        (
            hub.RepositoryNotFoundError,
            HubError,
            f"{endpoint} has no such model, or it is private: check the name, or {login}",
        ),
        (
            hub.DisabledRepoError,
            HubError,
            f"the repository is disabled at {endpoint} and cannot be downloaded",
        ),
        (hub.RevisionNotFoundError, HubError, f"there is no revision {revision}"),
        (
            hub.LocalEntryNotFoundError,
            HubUnreachableError,
            f"{endpoint} no longer answers: try again later",
        ),
        (hub.EntryNotFoundError, HubError, f"a file no longer exists in the repository: {why}"),
        (hub.HFValidationError, HubError, "not a repository name: write it as OWNER/NAME"),
        (
            hub.OfflineModeIsEnabled,
            HubUnreachableError,
            "the Hub cannot be reached because HF_HUB_OFFLINE is set: unset it",
        ),
    )
    for kind, ours, text in sentences:
        if isinstance(error, kind):
            return ours(f"{repo}: {text}")
    if isinstance(error, hub.HfHubHTTPError):
        return _answered(repo, endpoint, error.response.status_code, login)
    if isinstance(error, hub.HTTPError):
        return HubUnreachableError(f"{repo}: {endpoint} cannot be reached: {why}")
    if isinstance(error, OSError) and not isinstance(error, ValueError):
        path = error.filename or storage_folder(repo)
        return HubError(f"{path}: {error.strerror or why}")
    return HubError(f"{repo}: {why}")


def _answered(repo: str, endpoint: str, status: int, login: str) -> HubError:
    """Return the error to raise for an HTTP status that huggingface_hub has no exception for.

    login: advice on how to log in.
    """
    advice = "check HF_ENDPOINT"
    if status in (401, 403):
        advice = f"check the token, or {login}"
    elif status == 429 or status >= 500:
        advice = "try again later"
    kind = HubUnreachableError if status >= 500 else HubError
    return kind(f"{repo}: {endpoint} answered with HTTP status {status}: {advice}")


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
