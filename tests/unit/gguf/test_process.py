"""What a process knows of itself."""

import os
import subprocess
import sys
from pathlib import Path

from gguf_tools.process import default_threads, peak_rss_bytes

REPO = Path(__file__).resolve().parents[3]


def printed(program):
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=REPO, capture_output=True, text=True, check=True
    )
    return int(done.stdout)


def test_peak_is_not_that_of_the_program_before():
    """exec keeps getrusage's figure: a small program would show its big caller's."""
    peak = "from gguf_tools.process import peak_rss_bytes; print(peak_rss_bytes())"
    big = (
        "import os, sys; block = b'x' * (300 << 20); "
        f"os.execv(sys.executable, [sys.executable, '-c', {peak!r}])"
    )
    assert 2**20 < printed(big) < 200 << 20


def test_peak_grows():
    """In a small program: what the tests before took once would have to be exceeded here."""
    program = (
        "from gguf_tools.process import peak_rss_bytes; before = peak_rss_bytes(); "
        "block = b'x' * (before + (8 << 20)); print(peak_rss_bytes() - before)"
    )
    assert printed(program) > 4 << 20


def test_peak_without_proc(tmp_path):
    assert peak_rss_bytes(tmp_path / "missing") > 2**20


def test_threads():
    assert 1 <= default_threads() <= (os.cpu_count() or 1)
