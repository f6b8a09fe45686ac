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
    from huggingface_hub import constants
    from huggingface_hub import errors as hub

    log = logging.getLogger("huggingface_hub")
    level = log.level
    log.setLevel(logging.ERROR)
    login = "log in with `hf auth login` or set HF_TOKEN"
    try:
        yield
    except hub.GatedRepoError as error:
        raise HubError(
            f"{repo}: access to it is restricted: accept its terms at {constants.ENDPOINT}/{repo},"
            f" then {login}"
        ) from error
    except hub.RepositoryNotFoundError as error:
        raise HubError(
            f"{repo}: no such model at {constants.ENDPOINT}, or a private one: check the name, or"
            f" {login}"
        ) from error
    except hub.DisabledRepoError as error:
        raise HubError(
            f"{repo}: disabled at {constants.ENDPOINT}: nobody can download it"
        ) from error
    except hub.RevisionNotFoundError as error:
        raise HubError(f"{repo}: no revision {revision}") from error
    except hub.LocalEntryNotFoundError as error:
        raise HubUnreachableError(
            f"{repo}: {constants.ENDPOINT} no longer answers: try again later"
        ) from error
    except hub.EntryNotFoundError as error:
        raise HubError(f"{repo}: a file of it is gone: {_first_line(error)}") from error
    except hub.HFValidationError as error:
        raise HubError(f"{repo}: not a repository's name: write it as OWNER/NAME") from error
    except hub.OfflineModeIsEnabled as error:
        raise HubUnreachableError(f"{repo}: HF_HUB_OFFLINE forbids asking the Hub") from error
    except hub.HfHubHTTPError as error:
        status = error.response.status_code
        why = "is HF_ENDPOINT right?"
        if status in (401, 403):
            why = f"is the token right? {login}"
        elif status == 429 or status >= 500:
            why = "try again later"
        kind = HubUnreachableError if status >= 500 else HubError
        raise kind(f"{repo}: {constants.ENDPOINT} answers {status}: {why}") from error
    except hub.HTTPError as error:
        raise HubUnreachableError(
            f"{repo}: {constants.ENDPOINT} cannot be reached: {_first_line(error)}"
        ) from error
    except ValueError as error:
        raise HubError(f"{repo}: {_first_line(error)}") from error
    except OSError as error:
        where = error.filename or storage_folder(repo)
        raise HubError(f"{where}: {error.strerror or _first_line(error)}") from error
    finally:
        log.setLevel(level)


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
