"""What can go wrong with the Hub and its cache, in one sentence each."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gguf_tools.errors import HubError, HubUnreachableError


def storage_folder(repo: str) -> Path:
    """The folder of a repository in the cache."""
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    folder: str = repo_folder_name(repo_id=repo, repo_type="model")
    return Path(constants.HF_HUB_CACHE) / folder


@contextmanager
def hub_sentences(repo: str, revision: str | None) -> Iterator[None]:
    """Turns what huggingface_hub raises into one sentence, and keeps its own log quiet."""
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
    # The first line whose class an error has says what it is: some classes derive from others.
    sentences: tuple[tuple[type[Exception], type[HubError], str], ...] = (
        (
            hub.GatedRepoError,
            HubError,
            f"access to it is restricted: accept its terms at {endpoint}/{repo}, then {login}",
        ),
        (
            hub.RepositoryNotFoundError,
            HubError,
            f"no such model at {endpoint}, or a private one: check the name, or {login}",
        ),
        (
            hub.DisabledRepoError,
            HubError,
            f"disabled at {endpoint}: nobody can download it",
        ),
        (hub.RevisionNotFoundError, HubError, f"no revision {revision}"),
        (
            hub.LocalEntryNotFoundError,
            HubUnreachableError,
            f"{endpoint} no longer answers: try again later",
        ),
        (hub.EntryNotFoundError, HubError, f"a file of it is gone: {why}"),
        (hub.HFValidationError, HubError, "not a repository's name: write it as OWNER/NAME"),
        (hub.OfflineModeIsEnabled, HubUnreachableError, "HF_HUB_OFFLINE forbids asking the Hub"),
    )
    for kind, ours, text in sentences:
        if isinstance(error, kind):
            return ours(f"{repo}: {text}")
    if isinstance(error, hub.HfHubHTTPError):
        return _answered(repo, endpoint, error.response.status_code, login)
    if isinstance(error, hub.HTTPError):
        return HubUnreachableError(f"{repo}: {endpoint} cannot be reached: {why}")
    if isinstance(error, OSError) and not isinstance(error, ValueError):
        where = error.filename or storage_folder(repo)
        return HubError(f"{where}: {error.strerror or why}")
    return HubError(f"{repo}: {why}")


def _answered(repo: str, endpoint: str, status: int, login: str) -> HubError:
    """What an HTTP status means that no class of the library stands for."""
    advice = "is HF_ENDPOINT right?"
    if status in (401, 403):
        advice = f"is the token right? {login}"
    elif status == 429 or status >= 500:
        advice = "try again later"
    kind = HubUnreachableError if status >= 500 else HubError
    return kind(f"{repo}: {endpoint} answers {status}: {advice}")


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
