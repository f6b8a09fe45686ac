"""Run `moe-edge` in this process or in a separate one."""

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
    """Run a command in this process. Arguments are converted to text."""
    return CliRunner().invoke(cli, [str(word) for word in words], input=stdin)


def python(*words, stdin="", folder=REPO, **environment):
    """Run Python with these arguments in a separate process, for example *MOE_EDGE, "list"."""
    return subprocess.run(
        [sys.executable, *map(str, words)],
        cwd=folder,
        env={**os.environ, **environment},
        input=stdin,
        capture_output=True,
        encoding="utf-8",
        timeout=600,  # no correct command takes this long
    )
