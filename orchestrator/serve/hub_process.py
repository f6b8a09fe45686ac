"""The process in which the server lists, compares and downloads models.

The server runs `python -m orchestrator.serve.hub_process`. A process of its own keeps
huggingface_hub (29 MiB) and the memory for measurements out of the server, whose memory is limited
by --ram. It also can be ended at any time.

The process reads a request from stdin: a JSON object with `action` and further fields, which are
the arguments of the function for this action. It writes lines of JSON to stdout: {"doing", "done"}
for progress, and at the end {"result"} or {"error"}.
"""

from __future__ import annotations

import glob
import json
import os
import sys
from collections.abc import Callable
from time import monotonic
from typing import Any

from orchestrator.errors import MoeEdgeError

# Minimum time between two reports of progress.
REPORT_S = 0.2
_last_s = float("-inf")
_last = ""


def list_pulled() -> list[dict[str, Any]]:
    """Return the downloaded models: name, path and size in bytes."""
    from gguf_tools.hub import pulled, short_name

    models = pulled()
    return [
        {"name": short_name(each, models), "path": str(each.paths[0]), "bytes": each.nbytes}
        for each in models
        if each.file
    ]


def compare(repo: str, settings: dict[str, Any], front_bytes: int, parallel: int) -> dict[str, Any]:
    """Return how the models of a Hugging Face repository (OWNER/NAME) would run on this machine.

    The result is that of `Quantizations.as_dict`, a table with a row for each model. settings: the
    server's settings (Config), by name. front_bytes: memory that the server needs in addition to
    the model. parallel: number of answers at the same time. Raises MoeEdgeError or OSError.
    """
    from gguf_tools.hub import PREFIX, list_models
    from orchestrator.config import Config
    from orchestrator.runtime import quantizations
    from orchestrator.runtime.answering import Answering

    report("Asking the Hub", None)
    listing = list_models(repo.removeprefix(PREFIX))
    config = Config.build(model=os.devnull, remember=True, **settings)  # the model is a placeholder
    request = Answering(parallel=parallel, front_bytes=front_bytes, grammars=True).request(config)
    return quantizations.compare(listing, request, report).as_dict()


def pull(model: str) -> None:
    """Download a model, given as OWNER/NAME/FILE, with all its parts.

    Raises MoeEdgeError or OSError.
    """
    from gguf_tools import hub

    report("Asking the Hub", None)
    owner, _, rest = model.removeprefix(hub.PREFIX).partition("/")
    name, _, file = rest.partition("/")
    found = hub.prepare(f"{owner}/{name}" if rest else owner, (glob.escape(file),) if file else ())
    if not found.models:
        raise MoeEdgeError(f"{model}: this is not a GGUF model: name one as OWNER/NAME/FILE")
    hub.fetch(found, lambda done: report("Downloading", done))


ACTIONS: dict[str, Callable[..., Any]] = {"list": list_pulled, "compare": compare, "pull": pull}


def report(doing: str, done: float | None) -> None:
    """Write the progress to stdout, at most once in REPORT_S for each activity.

    doing: the current activity. done: the share of it that is done, or None if this is unknown.
    """
    global _last_s, _last
    now_s = monotonic()
    if doing != _last or now_s - _last_s >= REPORT_S:
        _last_s, _last = now_s, doing
        _write(doing=doing, done=done)


def _write(**said: Any) -> None:
    print(json.dumps(said), flush=True)


def main() -> None:
    """Carry out one request of the server: read it from stdin, and write the result to stdout.

    The request is a JSON object. Its field `action` names a function in ACTIONS, and the other
    fields are the arguments. The result is a line of JSON: {"result"} or {"error"}.
    """
    asked = json.load(sys.stdin)
    try:
        result = ACTIONS[asked.pop("action")](**asked)
    except (MoeEdgeError, OSError) as error:
        _write(error=str(error))
    else:
        _write(result=result)


if __name__ == "__main__":
    main()
