"""Run llama.cpp's own server tests against `moe-edge serve` with the demo model.

    python tests/upstream/server.py [FILE ...] [-k EXPRESSION]

The tests are in the pinned source in the user cache. They need requests, wget, filelock,
prometheus-client and openai. They start a server with llama-server's options. This script is also
that server: it starts ours with the options that ours has.

Many of the tests assert words or token counts of another model, or features that we do not have.
tests/upstream/known.py lists them. A test that fails for words runs again without those assertions.
The status is 1 if a test fails for an unknown reason.
"""

import argparse
import collections
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

from known import LOOSE, loosened, reason_to_fail

HERE = Path(__file__).resolve().parents[2]
DEMO = HERE / "models/demo/moe-edge-demo.gguf"
FILES = (
    "basic chat_completion compat_anthropic compat_oai_responses completion ignore_eos metrics "
    "security stream template tokenize tool_call"
).split()
NOT_OURS = 97

# Options of llama-server that moe-edge serve has too, and those that have another name.
SAME = "--port --host --temp --seed --alias --parallel --threads --api-key".split()
OTHERS = {
    "--n-predict": "--max-tokens",
    "--cors-origins": "--cors-origin",
    "--chat-template-file": "--chat-template",
}
# Options without an effect here, without and with a value.
LEFT_OUT = (
    "--offline --cont-batching --metrics --kv-unified --no-slots --jinja --no-jinja --no-ui "
    "--verbose --no-cache-idle-slots"
).split()
LEFT_OUT_WITH_VALUE = "--hf-repo --hf-file -fa --reasoning-format".split()

# A pytest plugin that records the result of each test. Upstream downloads its models before the
# first test, which this prevents. Upstream also compares names of header fields by case, although
# case does not count there (RFC 9110, 5.1).
PLUGIN = """
import json
import os

import requests
import utils

utils.ServerPreset.load_all = staticmethod(lambda: None)
make_request = utils.ServerProcess.make_request

def request(*args, **options):
    result = make_request(*args, **options)
    result.headers = requests.structures.CaseInsensitiveDict(result.headers)
    return result

utils.ServerProcess.make_request = request


def pytest_runtest_logreport(report):
    if report.when == "call" or report.outcome != "passed":
        crash = getattr(report.longrepr, "reprcrash", None)
        with open(os.environ["MOE_EDGE_RESULTS"], "a") as results:
            said = crash.message if crash else ""
            results.write(json.dumps([report.nodeid, report.outcome, said]) + "\\n")
"""


def our_options(theirs):
    """Return the options of moe-edge serve for those of llama-server.

    Exit if one has no counterpart.
    """
    ours, n_ctx, parallel = ["-m", str(DEMO)], 0, 1
    batches = []
    left = list(theirs)
    while left:
        name = left.pop(0)
        if name in LEFT_OUT:
            continue
        if name in LEFT_OUT_WITH_VALUE:
            left.pop(0)
        elif name in ("--batch-size", "--ubatch-size"):
            batches.append(int(left.pop(0)))  # the smaller one counts
        elif name == "--ctx-size":
            n_ctx = int(left.pop(0))
        elif name == "--cache-ram":
            ours += ["--cache-ram", f"{left.pop(0)}MiB"]
        elif name == "--reasoning" and left[0] == "auto":
            left.pop(0)  # the same here
        elif name == "--chat-template" and not re.fullmatch(r"[\w.-]+", left[0]):
            handle, path = tempfile.mkstemp(suffix=".jinja")
            os.write(handle, left.pop(0).encode())
            os.close(handle)
            ours += ["--chat-template", path]
        elif name in SAME or name in OTHERS:
            value = left.pop(0)
            if name == "--parallel":
                parallel = int(value)
            if name.endswith("-file"):
                value = str(Path(value).resolve())  # serve runs in another folder
            if name == "--n-predict" and int(value) < 1:
                continue  # no limit
            ours += [OTHERS.get(name, name), value]
        else:
            print(f"moe-edge serve has no option like {name}", file=sys.stderr)
            sys.exit(NOT_OURS)
    if batches:
        ours += ["--ubatch", str(min(batches))]
    if "--cors-origin" not in ours:
        ours += ["--cors-origin", "*"]  # the default of llama-server
    if n_ctx:
        # llama-server's context is that of all sequences together.
        ours += ["--ctx", str(n_ctx // parallel)]
    return ours


def serve():
    options = our_options(sys.argv[1:])
    command = [sys.executable, "-m", "orchestrator", "serve", *options]
    os.chdir(HERE)
    os.execve(sys.executable, command, {**os.environ, "PYTHONPATH": str(HERE)})


def upstream_tests():
    """Return the tests' folder in the pinned source. Exit if it was never unpacked."""
    from patches.upstream import cache_dir, read_upstream

    found = sorted(cache_dir().glob(f"source/*/{read_upstream().source}/tools/server/tests"))
    if not found:
        sys.exit("the pinned source is not unpacked: run `make build` once")
    return found[-1]


def free_port():
    """Return a free port. Upstream's tests would use any server that answers on theirs."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


class Runs:
    """Calls of pytest in a separate folder."""

    def __init__(self, folder):
        self._tests = upstream_tests()
        self._folder = folder
        (folder / "no_downloads.py").write_text(PLUGIN)
        shutil.copy(self._tests / "conftest.py", folder)  # ends the server of each test
        server = folder / "llama-server"
        script = f'exec "{sys.executable}" "{Path(__file__).resolve()}" "$@"'
        server.write_text(f"#!/bin/sh\nMOE_EDGE_AS_LLAMA_SERVER=1 {script}\n")
        server.chmod(0o755)
        self._results = folder / "results"
        self._environment = {
            **os.environ,
            "LLAMA_SERVER_BIN_PATH": str(server),
            "MOE_EDGE_RESULTS": str(self._results),
            "PYTHONPATH": os.pathsep.join([str(folder), str(self._tests)]),
            "OMP_WAIT_POLICY": "PASSIVE",
            "PORT": str(free_port()),
            "TMPDIR": str(folder),
        }

    def files(self, files, expression):
        """Return (file, test with parameters, outcome, first line of the failure) of each test."""
        more = ["-k", expression] if expression else []
        return self._run([f"unit/test_{name}.py" for name in files], more)

    def loosely(self, file, tests):
        """Return the same for these tests without the assertions of LOOSE."""
        source = (self._tests / f"unit/test_{file}.py").read_text()
        path = self._folder / f"test_{file}.py"
        path.write_text(loosened(source, LOOSE[file]))
        return self._run([f"{path}::{test}" for test in tests], [])

    def _run(self, what, more):
        self._results.write_text("")
        command = [sys.executable, "-m", "pytest", "-p", "no_downloads", "-q"]
        command += ["-p", "no:cacheprovider", "-m", "not slow", f"--basetemp={self._folder}/tests"]
        done = subprocess.run(
            [*command, *what, *more],
            cwd=self._tests,
            env=self._environment,
            capture_output=True,
            text=True,
            check=False,
        )
        results = []
        for line in self._results.read_text().splitlines():
            test, outcome, said = json.loads(line)
            found = re.match(r".*?test_(\w+)\.py::(.*)", test, re.DOTALL)
            results.append((found[1], found[2], outcome, said.partition("\n")[0]))
        if not results:
            sys.exit(done.stdout[-4000:] + done.stderr[-4000:])
        return results


def run(files, expression):
    """Run the tests, print their results, and return the number of unexplained failures."""
    counts = collections.Counter()

    def say(file, test, what, reason):
        counts[what] += 1
        print(f"{what:9} {file}::{test}  {reason[:160]}".rstrip(), flush=True)

    with tempfile.TemporaryDirectory() as folder:
        runs = Runs(Path(folder))
        again = {}
        for file, test, outcome, said in runs.files(files or FILES, expression):
            is_loose = test.partition("[")[0] in LOOSE.get(file, {})
            if outcome != "failed":
                say(file, test, outcome, said)
            elif is_loose and f"return code {NOT_OURS}" not in said:
                again.setdefault(file, []).append(test)
            else:
                reason = reason_to_fail(file, test)
                say(file, test, "known" if reason else "FAILED", reason or said)
        for file, tests in again.items():
            results = runs.loosely(file, tests)
            for test in set(tests) - {each[1] for each in results}:
                say(file, test, "FAILED", "was not run again")
            for _, test, outcome, said in results:
                if outcome == "passed":
                    say(file, test, "loosely", LOOSE[file][test.partition("[")[0]][0])
                else:
                    reason = reason_to_fail(file, test)
                    say(file, test, "known" if reason else "FAILED", reason or said)
    print(", ".join(f"{n} {what}" for what, n in counts.most_common()))
    return counts["FAILED"]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="*", metavar="FILE", help=f"of {' '.join(FILES)}")
    parser.add_argument("-k", dest="expression", help="like pytest's")
    asked = parser.parse_args()
    sys.exit(min(1, run(asked.files, asked.expression)))


if __name__ == "__main__":
    sys.path.insert(0, str(HERE))
    if os.environ.get("MOE_EDGE_AS_LLAMA_SERVER"):
        serve()
    main()
