"""The native library of the server: found in the cache, or compiled when it is first asked for."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from gguf_tools.children import child
from orchestrator.errors import NativeError
from orchestrator.native import ServerLibrary
from orchestrator.native.llama import Bindings

LOOK_S = 0.1
TOOL = Path(__file__).resolve().parents[2] / "patches" / "tool.py"


class Stopped(Exception):
    """The server was told to end before it could answer."""


def server_library(bindings: Bindings, is_stopping: Callable[[], bool]) -> ServerLibrary:
    """The library that goes with the loaded llama.cpp. Compiling it shows its progress on stderr.

    Raises NativeError where it cannot be had: this is no checkout, or no compiler is there; and
    Stopped, where is_stopping says so while it is compiled.
    """
    if not TOOL.is_file():
        raise NativeError(
            f"the server is compiled from a checkout of moe-edge, and {TOOL} is not there"
        )
    package = Path(bindings.api.__file__).parent
    command = [sys.executable, str(TOOL), "server", str(package)]
    # Compilers of an interrupted build would go on for minutes.
    with child(command, with_its_own=True, stdout=subprocess.PIPE) as process:
        said = None
        while said is None:
            with suppress(subprocess.TimeoutExpired):
                said, _ = process.communicate(timeout=LOOK_S)
            if is_stopping():
                raise Stopped
    if process.returncode != 0:
        raise NativeError("llama.cpp's server cannot be compiled: the lines above say why")
    return ServerLibrary(Path(said.strip().splitlines()[-1]))
