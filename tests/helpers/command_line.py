"""`moe-edge` in this process and in one of its own, for tests of what it says."""

import os
import subprocess
import sys
from pathlib import Path

from click.testing import CliRunner

from orchestrator.cli.main import cli

REPO = Path(__file__).resolve().parents[2]
DEMO = REPO / "models/demo/moe-edge-demo.gguf"
MOE_EDGE = ("-m", "orchestrator")


def run(*words, stdin=None):
    """A command and its arguments, each of them made a text."""
    return CliRunner().invoke(cli, [str(word) for word in words], input=stdin)


def python(*words, stdin="", folder=REPO, **environment):
    """What Python says to these words in a process of its own, as *MOE_EDGE, "list"."""
    return subprocess.run(
        [sys.executable, *map(str, words)],
        cwd=folder,
        env={**os.environ, **environment},
        input=stdin,
        capture_output=True,
        encoding="utf-8",
        timeout=600,  # only what hangs takes so long
    )
