"""llama.cpp's own tests of its server, run against `moe-edge serve` with the demo model.

    python tests/upstream_tests.py [FILE ...] [-k EXPRESSION]

The tests are those of the pinned source in the user cache; they need requests, wget, filelock,
prometheus-client and openai. They start a server with llama-server's options: this script is that
server, too, and starts ours with what it has of them. It prints what passed and what failed. A test
that asks for something that `moe-edge serve` has not (embeddings, adapters, ...) starts no server,
and is counted as such.

Many of them assert words or token counts of the model that they were written for, or what we leave
out; EXPERIMENTS.md says which failures are of which kind.
"""

from __future__ import annotations

import argparse
import collections
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parents[1]
DEMO = HERE / "models/demo/moe-edge-demo.gguf"
FILES = (
    "basic chat_completion compat_anthropic compat_oai_responses completion ignore_eos metrics "
    "security stream template tokenize tool_call"
).split()
NOT_OURS = 97

# Options of llama-server that moe-edge serve has, under its own names.
SAME = {
    "--port": "--port",
    "--host": "--host",
    "--temp": "--temp",
    "--seed": "--seed",
    "--alias": "--alias",
    "--n-predict": "--max-tokens",
    "--parallel": "--parallel",
    "--threads": "--threads",
    "--api-key": "--api-key",
    "--cors-origins": "--cors-origin",
    "--chat-template-file": "--chat-template",
}
# Those that change nothing here, with and without a value.
LEFT_OUT = {
    "--offline": 0,
    "--cont-batching": 0,
    "--metrics": 0,
    "--kv-unified": 0,
    "--no-slots": 0,
    "--jinja": 0,
    "--no-jinja": 0,
    "--no-ui": 0,
    "--verbose": 0,
    "--no-cache-idle-slots": 0,
    "--hf-repo": 1,
    "--hf-file": 1,
    "-fa": 1,
    "--reasoning-format": 1,
}

# Upstream downloads its models before the first test, and compares names of header fields by case,
# which they do not have (RFC 9110, 5.1). A plugin of pytest.
PLUGIN = """
import requests
import utils

utils.ServerPreset.load_all = staticmethod(lambda: None)
make_request = utils.ServerProcess.make_request

def request(*args, **options):
    result = make_request(*args, **options)
    result.headers = requests.structures.CaseInsensitiveDict(result.headers)
    return result

utils.ServerProcess.make_request = request
"""


def our_options(theirs: list[str]) -> list[str]:
    """The options of moe-edge serve for those of llama-server. Exits where one has no place."""
    ours, n_ctx, parallel = ["-m", str(DEMO)], 0, 1
    batches: list[int] = []
    left = list(theirs)
    while left:
        name = left.pop(0)
        if name in LEFT_OUT:
            del left[: LEFT_OUT[name]]
        elif name in ("--batch-size", "--ubatch-size"):
            batches.append(int(left.pop(0)))  # the smaller one counts
        elif name == "--ctx-size":
            n_ctx = int(left.pop(0))
        elif name == "--cache-ram":
            ours += ["--cache-ram", f"{left.pop(0)}MiB"]
        elif name in SAME:
            value = left.pop(0)
            if name == "--parallel":
                parallel = int(value)
            if name.endswith("-file"):
                value = str(Path(value).resolve())  # serve runs in another folder
            if name == "--n-predict" and int(value) < 1:
                continue  # no limit
            ours += [SAME[name], value]
        else:
            print(f"moe-edge serve has nothing like {name}", file=sys.stderr)
            sys.exit(NOT_OURS)
    if batches:
        ours += ["--ubatch", str(min(batches))]
    if n_ctx:
        # Theirs is of all sequences together.
        ours += ["--ctx", str(n_ctx // parallel)]
    return ours


def serve() -> None:
    options = our_options(sys.argv[1:])
    command = [sys.executable, "-m", "orchestrator", "serve", *options]
    os.chdir(HERE)
    os.execve(sys.executable, command, {**os.environ, "PYTHONPATH": str(HERE)})


def upstream_tests() -> Path:
    """The tests' folder in the pinned source. Exits where that has never been unpacked."""
    from patches.upstream import cache_dir, read_upstream

    found = sorted(cache_dir().glob(f"source/*/{read_upstream().source}/tools/server/tests"))
    if not found:
        sys.exit("the pinned source is not unpacked: run `make serve` once")
    return found[-1]


def run(files: list[str], expression: str | None) -> int:
    """Runs them, prints the list, and returns pytest's status."""
    tests = upstream_tests()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "no_downloads.py").write_text(PLUGIN)
        server = Path(folder) / "llama-server"
        script = f'exec "{sys.executable}" "{Path(__file__).resolve()}" "$@"'
        server.write_text(f"#!/bin/sh\nMOE_EDGE_AS_LLAMA_SERVER=1 {script}\n")
        server.chmod(0o755)
        environment = {
            **os.environ,
            "LLAMA_SERVER_BIN_PATH": str(server),
            "PYTHONPATH": os.pathsep.join([folder, str(tests)]),
            "OMP_WAIT_POLICY": "PASSIVE",
            "COLUMNS": "400",  # pytest cuts reasons to the width of its terminal
        }
        command = [sys.executable, "-m", "pytest", "-p", "no_downloads", "-v", "--tb=line"]
        command += ["-p", "no:cacheprovider", "-m", "not slow", "-rA", f"--basetemp={folder}/tests"]
        command += [f"unit/test_{name}.py" for name in files or FILES]
        if expression:
            command += ["-k", expression]
        done = subprocess.run(
            command, cwd=tests, env=environment, capture_output=True, text=True, check=False
        )
    report(done.stdout)
    return done.returncode


def report(said: str) -> None:
    """What each test came to, by file, from pytest's summary."""
    counts: collections.Counter[str] = collections.Counter()
    reasons: dict[str, str] = {}
    for line in said.splitlines():
        found = re.match(r"(PASSED|FAILED|ERROR|SKIPPED) (unit/.*?)(?: - (.*))?$", line)
        if found and found[1] != "PASSED":
            reasons[found[2]] = (found[3] or "").strip()
    for line in said.splitlines():
        found = re.match(r"(unit/\S+::.*?) (PASSED|FAILED|ERROR|SKIPPED)\b", line)
        if not found:
            continue
        name, what = found[1], found[2]
        reason = next((text for key, text in reasons.items() if name.startswith(key)), "")
        if f"return code {NOT_OURS}" in reason:
            what = "not ours"
        counts[what.lower()] += 1
        print(f"{what.lower():9} {name.removeprefix('unit/test_')}  {reason[:160]}".rstrip())
    print(", ".join(f"{n} {what}" for what, n in counts.most_common()))
    if not counts:
        print(said[-4000:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="*", metavar="FILE", help=f"of {' '.join(FILES)}")
    parser.add_argument("-k", dest="expression", help="as pytest's")
    asked = parser.parse_args()
    sys.exit(run(asked.files, asked.expression))


if __name__ == "__main__":
    sys.path.insert(0, str(HERE))
    if os.environ.get("MOE_EDGE_AS_LLAMA_SERVER"):
        serve()
    main()
