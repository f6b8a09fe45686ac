"""The errors of the commands in this folder."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps

from gguf_tools.errors import GGUFError
from orchestrator.errors import MoeEdgeError

Main = Callable[[list[str] | None], int]


def reporting_errors(run: Main) -> Callable[..., int]:
    """Make a command print an error as one sentence and return 1 instead of raising it.

    run: takes the arguments, or None for those of the process, and returns the exit status.
    """

    @wraps(run)
    def main(argv: list[str] | None = None) -> int:
        try:
            return run(argv)
        except (GGUFError, MoeEdgeError, OSError) as error:
            print(f"error: {error}", file=sys.stderr)
            return 1

    return main
