"""How ggml's compute threads wait for each other."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from patches.upstream import PATCHES

from .conftest import HERE, run_program


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere upstream's barrier stays")
@pytest.mark.parametrize("flags", [["-O2"], ["-O1", "-g", "-fsanitize=thread"]])
def test_barrier(flags: list[str], tmp_path: Path) -> None:
    program = tmp_path / "barrier_test"
    command = ["cc", "-std=gnu11", "-Wall", "-Wextra", "-Werror", *flags]
    command += [f"-I{PATCHES / 'native'}", str(HERE / "barrier_test.c"), "-pthread"]
    subprocess.run([*command, "-o", str(program)], check=True)
    assert "all passed together" in run_program(program, timeout_s=120)
