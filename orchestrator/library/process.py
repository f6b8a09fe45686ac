"""Which models are open in this process, and whether the process can open a further model."""

from __future__ import annotations

import os
import weakref

from orchestrator.errors import ClosedError, ConfigError
from orchestrator.library.worker import Worker

# The workers of the models that are open or being loaded.
_open: weakref.WeakSet[Worker] = weakref.WeakSet()
# The process that loaded the first model. Forks inherit this number.
_first_process: list[int] = []


def check_process(ram: object) -> None:
    """Raise an error if this process cannot open a further model.

    `ram` is the memory limit of that model, or None. Raises ClosedError in a fork of a process that
    has loaded a model, because the fork lacks its compute threads. Raises ConfigError if another
    model is open and `ram` is None.
    """
    if _first_process and _first_process[0] != os.getpid():
        raise ClosedError(
            f"this process is a fork of process {_first_process[0]}, which has opened a model: "
            "start this process with multiprocessing's spawn"
        )
    if ram is None and len(_open):
        raise ConfigError(
            "another model is open in this process, so the free memory is not known: give ram, "
            'such as ram="8GiB", or close the other model'
        )


def opening(worker: Worker) -> None:
    """Add a model to this process's record of open models. Call this before the model is loaded.

    `worker` is the thread that does the work of the model. `check_process` reads the record.
    """
    _open.add(worker)


def loading() -> None:
    """Record that this process has loaded a model, so that its forks refuse to load models."""
    if not _first_process:
        _first_process.append(os.getpid())


def closed(worker: Worker) -> None:
    """Remove a model from this process's record of open models.

    Call this after the model is closed, or if it could not be loaded. `worker` is the thread that
    did the work of the model.
    """
    _open.discard(worker)
