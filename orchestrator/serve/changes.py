"""Downloads models, and changes the loaded one, for the page. Requires --allow-model-change."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from time import monotonic
from typing import Any

from gguf_tools.children import child
from orchestrator.errors import MoeEdgeError
from orchestrator.runtime.load import Progress
from orchestrator.serve.wire import Refusal

# Actions of a request. Each but STOP starts a task.
LIST, COMPARE, PULL, LOAD, STOP = "list", "compare", "pull", "load", "stop"
ACTIONS = (LIST, COMPARE, PULL, LOAD, STOP)
# States of a task.
RUNNING, DONE, STOPPED, FAILED = "running", "done", "stopped", "failed"


class _Stopped(Exception):
    """Raised on a task's thread after the task was stopped."""


@dataclass
class Task:
    """A client's task for `ModelChanges`, such as the download of a model, and its progress.

    - action: LIST, COMPARE, PULL (download) or LOAD.
    - model: the repository to compare, or the model to download or load; "" for LIST.
    - state: RUNNING, DONE, STOPPED or FAILED.
    - doing, done: the current activity, and the share of it that is done; None if it is unknown.
    - error: a sentence if the state is FAILED, otherwise "".
    """

    action: str
    model: str
    state: str = RUNNING
    doing: str = ""
    done: float | None = None
    error: str = ""


@dataclass(frozen=True)
class _Local:
    """A model on this machine that can be loaded."""

    name: str
    path: Path
    nbytes: int


class ModelChanges:
    """Downloads models and changes the server's loaded model, as clients request it.

    It also lists the models on this machine, and compares the models of a repository by their
    predicted memory and speed. It runs one such task at a time, on a thread of its own.
    """

    def __init__(
        self,
        threads: str,
        change: Callable[[Path, Progress], None],
        loaded: Callable[[], Path],
        options: Callable[[], dict[str, Any]],
    ) -> None:
        """Create an object without a task.

        `threads` is the prefix of the names of the server's threads. `change` loads another model
        and blocks until it is loaded. `loaded` returns the path of the server's model. `options`
        returns the arguments of hub_process.compare, except the repository.
        """
        self._threads, self._change, self._loaded, self._options = threads, change, loaded, options
        self._first = _local(loaded())
        self._models = [self._first]
        self._task: Task | None = None
        self._thread: threading.Thread | None = None
        self._compared: dict[str, Any] | None = None
        self._is_stopped = False
        self._process: subprocess.Popen[str] | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return the models on this machine, the latest task and the latest comparison, for JSON.

        The task is the latest action of a client, such as a download, with its progress. The
        comparison says how the models of a repository would run on this machine. Both are None at
        the start.
        """
        loaded = self._loaded().resolve()
        return {
            "models": [
                {"name": each.name, "bytes": each.nbytes, "loaded": each.path.resolve() == loaded}
                for each in self._models
            ],
            "task": self._task and asdict(self._task),
            "compared": self._compared,
        }

    def carry_out(self, action: str, model: str) -> None:
        """Start a task, or stop the running task if `action` is STOP.

        `action` is the kind of task: LIST the models on this machine, COMPARE the models of a
        repository, PULL (download) a model, or LOAD it. `model` names the repository or the model.
        If a LIST task is running, the new task waits for its end, for less than a second. Raises
        Refusal (an error response) if a task of another kind is running, or if `model` is missing.
        """
        if action == STOP:
            self.stop()
            return
        before, task = self._thread, self._task
        if before is not None and before.is_alive() and task is not None and task.action != LIST:
            raise Refusal(409, "another task is running: wait for its end, or stop it")
        if action != LIST and not model:
            raise Refusal(400, f"the field 'model' is missing: name a model to {action}")
        self._task, self._is_stopped = Task(action, model), False
        self._thread = threading.Thread(
            target=self._run, args=(self._task, before), name=f"{self._threads}change"
        )
        self._thread.start()

    def stop(self) -> None:
        """Make the running task, such as a download, end soon.

        A partial download is kept. Thread-safe.
        """
        self._is_stopped = True
        process = self._process
        if process is not None:
            process.kill()

    def join(self, end_s: float) -> bool:
        """Wait until the running task, such as a download, ends, but not longer than until end_s.

        end_s is a time of the monotonic clock. Returns False if the task still runs then.
        """
        if self._thread is not None:
            self._thread.join(max(0.0, end_s - monotonic()))
            return not self._thread.is_alive()
        return True

    def _run(self, task: Task, before: threading.Thread | None) -> None:
        """Carry out a task, and record its result. This runs on the task's thread.

        `before` is the thread of the previous task.
        """
        if before is not None:
            before.join()
        try:
            if task.action == COMPARE:
                self._compared = self._ask(task, COMPARE, repo=task.model, **self._options())
            elif task.action == PULL:
                self._ask(task, PULL, model=task.model)
                self._mark_downloaded(task.model)
                self._list(task)
            else:
                self._list(task)
            if task.action == LOAD:
                self._load(task)
            task.state = DONE
        except _Stopped:
            task.state = STOPPED
        except (MoeEdgeError, Refusal, OSError) as error:
            task.error, task.state = str(error), FAILED
        except Exception as error:
            task.error, task.state = f"{type(error).__name__}: {error}", FAILED
            raise

    def _list(self, task: Task) -> None:
        found = [
            _Local(each["name"], Path(each["path"]), each["bytes"])
            for each in self._ask(task, LIST)
        ]
        first = self._first.path.resolve()
        is_listed = any(each.path.resolve() == first for each in found)
        self._models = found if is_listed else [self._first, *found]

    def _mark_downloaded(self, model: str) -> None:
        """Record in the latest comparison that a model (OWNER/NAME/FILE) was downloaded."""
        if self._compared is not None:
            for row in self._compared["rows"]:
                if model.endswith(f"{self._compared['repo']}/{row['file']}"):
                    row["missing_bytes"] = 0

    def _load(self, task: Task) -> None:
        paths = [each.path for each in self._models if each.name == task.model]
        if not paths:
            raise MoeEdgeError(f"{task.model}: there is no downloaded model of this name")
        self._change(paths[0], lambda doing, done: self._report(task, doing, done))

    def _report(self, task: Task, doing: str, done: float | None) -> None:
        """Record the progress of a task. Raises _Stopped if the task was stopped."""
        if self._is_stopped:
            raise _Stopped
        task.doing, task.done = doing, done

    def _ask(self, task: Task, action: str, **arguments: Any) -> Any:
        """Carry out an action in hub_process, and return its result.

        Raises MoeEdgeError with the sentence of an error, and _Stopped if the task was stopped.
        """
        pipe = subprocess.PIPE
        command = [sys.executable, "-m", "orchestrator.serve.hub_process"]
        # In its own session, so that a Ctrl-C reaches only the server, which ends the process.
        with child(command, stdin=pipe, stdout=pipe, start_new_session=True) as process:
            self._process = process
            try:
                self._report(task, task.doing, task.done)  # `stop` may have come before
                assert process.stdin is not None and process.stdout is not None
                with process.stdin as to:
                    to.write(json.dumps({"action": action, **arguments}))
                process.stdin = None
                for line in process.stdout:
                    said = json.loads(line)
                    if "result" in said:
                        return said["result"]
                    if "error" in said:
                        raise MoeEdgeError(said["error"])
                    self._report(task, said["doing"], said["done"])
            except (BrokenPipeError, json.JSONDecodeError):
                pass  # the process has ended
            finally:
                self._process = None
            status = process.wait()
        if self._is_stopped:
            raise _Stopped
        raise MoeEdgeError(f"the process for {action} ended with status {status}")


def _local(path: Path) -> _Local:
    """Return the model in a file, under the name of the file."""
    return _Local(path.stem, path, path.stat().st_size)
