"""Calls of `moe-edge pull` against the local server."""

import random

from command_line import run

SIZE = 300_000


def noise(seed, size=SIZE):
    return random.Random(seed).randbytes(size)


def pull(*words):
    return run("pull", *words)


def pulled(*words):
    """A pull that must succeed."""
    result = pull(*words)
    assert result.exit_code == 0, result.output
    return result


def refused(*words):
    result = pull(*words)
    assert (result.exit_code, result.stdout) == (1, ""), result.output
    assert result.stderr.count("\n") == 1
    return result.stderr.removeprefix("Error: ").rstrip("\n")


def blobs(tmp_path):
    return sorted(path.name for path in tmp_path.glob("hf/hub/models--*/blobs/*"))
