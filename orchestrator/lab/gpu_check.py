"""`moe-edge gpu-check`: runs all checks and benchmarks that need a GPU, and writes one report.

In a checkout, these include its GPU tests. Each step is a process of its own. The order of the
steps is such that an early failure explains later ones.

The folder next to the report has a log file for each step, and a file with all outcomes. A hang, a
crash or a restart of the machine therefore loses no outcome, and the next call continues with the
remaining steps. The report is rewritten from that folder after each step. A missing GPU is not a
failure, and no step uses a network.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from orchestrator.cache.files import write_whole
from orchestrator.errors import ConfigError
from orchestrator.lab.bench.gpu import GpuOptions, ask_device
from orchestrator.lab.bench.models import DEMO_MODEL

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests/native/cuda"  # this folder exists only in a source checkout
TAIL = 12_000  # maximum number of characters of a step's output in the report
TRIES = 2  # do not repeat a step that was cut off this often: it may crash the machine
COLLECT_SECONDS = 300.0
# Factor for the time limits with the emulated GPU, which computes on the CPU.
EMULATED_TIMES = 10
# For each part: the time limit of a step in seconds, and a pattern of its tests. A test belongs to
# the first part that matches.
PARTS: dict[str, tuple[float, str]] = {
    "device": (300, r"test_device\.py"),
    "kernels": (600, r"test_upstreams"),
    "managed": (600, r"test_kernels\.py|test_gpu\.py"),
    "fused": (300, r"test_(fused|route)\.py"),
    "engine": (300, r"test_engine\.py"),
    "bench": (900, r"test_bench\.py"),
    "table3": (480, r"test_table3\.py"),
}
# Parts whose tests need no real GPU. With one, only their commands run, so that a part needs no
# pytest.
COMMANDS_ONLY = ("table3",)

_SHAPES = "bench gpu --runs 1 "
_TABLE3 = "bench gpu --table3 "
# Commands to run, as (part, title, arguments of `moe-edge`), small models first. The models have
# random weights, and experts of the original shapes. Finished cases are saved, so that an
# interrupted benchmark continues with the next case.
COMMANDS: tuple[tuple[str, str, str], ...] = (
    ("device", "the machine", f"plan {shlex.quote(str(DEMO_MODEL))}"),
    ("bench", "a tiny model", _SHAPES + "--quick"),
    ("bench", "Qwen3-30B-A3B, skewed", _SHAPES + "--shape qwen3-30b"),
    ("bench", "Qwen3-30B-A3B, uniform", _SHAPES + "--shape qwen3-30b --routing uniform"),
    ("bench", "Mixtral, skewed", _SHAPES + "--shape mixtral"),
    ("bench", "Mixtral, uniform", _SHAPES + "--shape mixtral --routing uniform"),
    ("table3", "a tiny model", _TABLE3 + "--quick --link 12GB/s"),
    ("table3", "PCIe 3.0, a quarter", _TABLE3 + "--link 12GB/s --caps 25"),
    ("table3", "own link, a quarter", _TABLE3 + "--caps 25"),
    ("table3", "PCIe 3.0, more", _TABLE3 + "--link 12GB/s --caps 50,75"),
)


@dataclass(frozen=True)
class Step:
    """A step of gpu-check: one test or one command, which runs in its own process.

    - part: the group of steps to which it belongs, such as "kernels".
    - limit_s: time limit in seconds.
    """

    part: str
    name: str
    command: tuple[str, ...]
    limit_s: float

    @property
    def slug(self) -> str:
        """The name of the step's log file without its ending."""
        words = re.sub(r"\W+", "-", self.name.rsplit("/", 1)[-1]).strip("-")
        return f"{list(PARTS).index(self.part)}-{self.part}-{words[:80]}"


@dataclass(frozen=True)
class Outcome:
    """The outcome of a step of gpu-check.

    The outcome "cut off" means that the step began and did not end, for example because the machine
    crashed. `sources` is a hash of the tested source files. `tries` is the number of attempts with
    these source files.
    """

    part: str
    name: str
    outcome: str  # passed | failed | skipped | cut off
    seconds: float = 0.0
    reason: str = ""
    output: str = ""
    sources: str = ""
    tries: int = 0


class Folder:
    """The saved outcomes of the steps of `moe-edge gpu-check`, in a folder next to its report.

    A step is one test or one benchmark command. Outcomes of an earlier call are loaded, so that an
    interrupted check can continue.
    """

    def __init__(self, report: Path) -> None:
        self.report = report.resolve()
        self.path = self.report.with_suffix("")
        self.path.mkdir(parents=True, exist_ok=True)
        self._file = self.path / "outcomes.json"
        known = json.loads(self._file.read_text()) if self._file.exists() else {}
        self.known = {slug: Outcome(**each) for slug, each in known.items()}

    def log(self, step: Step) -> Path:
        """Return the path of the log file of a step, which receives the output while the step runs.

        A step is one test or one benchmark command.
        """
        return self.path / f"{step.slug}.log"

    def keep(self, step: Step, found: Outcome) -> None:
        """Save the outcome of a step of the GPU check, which is one test or one command.

        The outcome replaces an earlier outcome of the same step.
        """
        self.known[step.slug] = found
        kept = {slug: asdict(each) for slug, each in self.known.items()}
        write_whole(self._file, json.dumps(kept))

    def outcomes(self) -> list[Outcome]:
        """Return the outcomes of all steps (tests and commands) that have begun, ordered by part.

        A part is a group of steps, such as "kernels". If a step was cut off, the output in its
        outcome is read from the log file of the step.
        """
        found = []
        for slug, each in self.known.items():
            log = self.path / f"{slug}.log"
            if each.outcome == "cut off" and log.exists():
                each = replace(each, output=log.read_text("utf8", "replace"))
            found.append(each)
        return sorted(found, key=lambda each: list(PARTS).index(each.part))

    def write(self, machine: str) -> None:
        """Write the report of the GPU check with the outcomes of all tests and commands so far.

        - machine: name of the GPU, or the reason why none can be used.
        """
        write_whole(self.report, render(self.outcomes(), machine))
        os.sync()  # the user may have to switch off a machine that hangs


def run(
    report: Path,
    part: str | None,
    only: str,
    emulated: bool,
    say: Callable[[str], None],
) -> bool:
    """Run the GPU checks that are still missing, and update the report after each step.

    - report: file for the report. The outcomes of steps are kept in a folder next to it.
    - part: the group of steps to run, such as "kernels"; None runs all groups.
    - only: run only the steps whose part, name or command contains this text, even if they are
      done.
    - emulated: run the tests of the emulated GPU instead, which computes on the CPU.
    - say: called with a line of progress per step.

    Returns False if a step failed. Raises ConfigError for an unknown part, and OSError if a file
    cannot be written.
    """
    if part not in (None, *PARTS):
        raise ConfigError(f"--part '{part}' is unknown: choose one of {', '.join(PARTS)}")
    if emulated and not TESTS.is_dir():
        raise ConfigError(
            "--emulated needs a source checkout, whose tests contain the emulated GPU"
        )
    found, why = find_gpu()
    machine = "the emulated GPU" if emulated else why
    say(
        f"GPU: {machine}"
        if found or emulated
        else f"no GPU can be used ({why}), so steps that need a GPU are skipped"
    )
    folder = Folder(report)
    _kill_left_over(folder)
    failed = False
    for step in _steps(part, folder, emulated):
        if only and only not in f"{step.part}: {step.name}: {shlex.join(step.command)}":
            continue
        known = folder.known.get(step.slug)
        if known is not None and not (only or _must_run(known)):
            failed = failed or known.outcome in ("failed", "cut off")
            continue
        if found or emulated:
            say(f"{step.name}: {shlex.join(step.command)}")
        outcome = _run_step(step, folder, found or emulated)
        folder.write(machine)
        failed = failed or outcome.outcome == "failed"
        say(f"{outcome.outcome:8} {outcome.seconds:7.1f} s  {step.name}  {outcome.reason}".rstrip())
        if outcome.outcome == "failed" and found and not find_gpu()[0]:
            say(f"the GPU is gone after {step.name}: restart the machine, then run gpu-check again")
            break
    folder.write(machine)
    say(f"report: {report}")
    return not failed


def find_gpu() -> tuple[bool, str]:
    """Return whether the installed libraries can use a GPU of this machine.

    The second value is the name of the GPU, or the reason why no GPU can be used.
    """
    try:
        found = ask_device(GpuOptions.device)
    except ConfigError as error:
        return False, str(error).rpartition(f"{GpuOptions.device}: ")[2]
    return True, str(found["name"])


def _steps(part: str | None, folder: Folder, emulated: bool) -> Iterator[Step]:
    """Yield the steps of a part (None: of all parts), first the tests and then the commands."""
    listed = TESTS.is_dir() and (emulated or part not in COMMANDS_ONLY)
    tests = find_tests(emulated) if listed else []
    for each in [part] if part else PARTS:
        yield from (step for step in tests if step.part == each)
        for of_part, name, arguments in COMMANDS:
            if of_part == each and not emulated:
                command = (sys.executable, "-m", "orchestrator", *shlex.split(arguments))
                if of_part in ("bench", "table3"):
                    command += ("--keep", str(folder.path / f"cases-{sources()}"))
                yield Step(each, f"{name}: moe-edge {arguments}", command, PARTS[each][0])


def find_tests(emulated: bool) -> list[Step]:
    """Return the tests that `moe-edge gpu-check` runs, as steps with a command and a time limit.

    If no tests can be listed in time, the result is one step that fails with the reason.

    - emulated: return the tests of the emulated GPU instead of those that need a real GPU.
    """
    marks = ("-k", "emulated") if emulated else ("-m", "gpu")
    pytest = (sys.executable, "-m", "pytest")
    where = str(TESTS.relative_to(ROOT))
    collect: tuple[str, ...] = (*pytest, "--collect-only", "-q", *marks, where)
    times = EMULATED_TIMES if emulated else 1
    limit_s = times * COLLECT_SECONDS
    try:
        done = subprocess.run(collect, capture_output=True, text=True, timeout=limit_s, cwd=ROOT)
        found = done.stdout
    except subprocess.TimeoutExpired:
        found = ""
        said = (
            f"pytest did not list the GPU tests within {limit_s:g} s: run gpu-check again, or find "
            f"the fault with: python -m pytest --collect-only {where}"
        )
        collect = (sys.executable, "-c", f"raise SystemExit({said!r})")
        limit_s = PARTS["device"][0]
    names = re.findall(r"^(tests/\S+::\S.*)$", found, re.MULTILINE)
    if not names:
        return [Step("device", "list the tests that need a GPU", collect, limit_s)]
    # With -s, the log is complete even if the step is cut off. With -r, the log has the reasons of
    # failures and skipped tests.
    command = (*pytest, "-q", "-s", "-rfEs")
    parts = map(part_of, names)
    return [
        Step(part, name, (*command, name), times * PARTS[part][0])
        for part, name in zip(parts, names, strict=True)
    ]


def part_of(test: str) -> str:
    """Return the name of the group of GPU checks to which a test belongs, such as "kernels".

    The group depends on the test's file and name. A test that matches no group belongs to "engine".

    - test: the test as pytest names it, such as "tests/native/cuda/test_gpu.py::test_copies".
    """
    return next((part for part, (_, tests) in PARTS.items() if re.search(tests, test)), "engine")


@functools.cache
def sources() -> str:
    """Return a hash of the source code that `moe-edge gpu-check` tests.

    If the hash has changed since a test failed, the test is run again.
    """
    digest = hashlib.sha256()
    for name in ("patches", "tests/native", "orchestrator", "gguf_tools"):
        for path in sorted((ROOT / name).rglob("*")):
            if path.suffix in (".py", ".cpp", ".cu", ".h", ".c", ".patch"):
                digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _must_run(known: Outcome) -> bool:
    """Return whether a step has to run, given its last outcome.

    A passed step does not run again. A skipped step does. A failed step runs again after the source
    files have changed. A step that was cut off runs again at most TRIES times with the same source
    files.
    """
    if known.outcome == "cut off" and known.tries < TRIES:
        return True
    return known.outcome == "skipped" or (known.outcome != "passed" and known.sources != sources())


def _run_step(step: Step, folder: Folder, there: bool) -> Outcome:
    if not there:
        outcome = Outcome(step.part, step.name, "skipped", reason="no GPU")
        folder.keep(step, outcome)
        return outcome
    known = folder.known.get(step.slug)
    again = known is not None and known.outcome == "cut off" and known.sources == sources()
    tries = known.tries + 1 if known is not None and again else 1
    begun = Outcome(step.part, step.name, "cut off", sources=sources(), tries=tries)
    folder.keep(step, begun)
    start = time.monotonic()
    status = _run_limited(step, folder)
    output = folder.log(step).read_text("utf8", "replace")
    said = re.findall(r"^(SKIPPED|FAILED|ERROR) .*?(?: - |: )(.*)$", output, re.MULTILINE)
    result, reason = "failed", ""
    if status is None:
        reason = (
            f"the test or command was stopped, because it took longer than {step.limit_s:g} s: see "
            f"its output in the report"
        )
    elif status < 0:
        reason = f"signal {-status} ({signal.Signals(-status).name})"
    elif status:
        reason = said[-1][1] if said else f"exit status {status}"
    elif said and said[-1][0] == "SKIPPED":
        result, reason = "skipped", said[-1][1]
    else:
        result = "passed"
    seconds = time.monotonic() - start
    outcome = replace(begun, outcome=result, seconds=seconds, reason=reason, output=output)
    folder.keep(step, outcome)
    return outcome


def _run_limited(step: Step, folder: Folder) -> int | None:
    """Run a step in a child process with a time limit, and write its output to a file.

    At the end, all processes of the step are killed. Returns the exit status, or None after the
    time limit.
    """
    quiet = {"PYTHONUNBUFFERED": "1", "PIP_NO_INDEX": "1", "HF_HUB_OFFLINE": "1"}
    with folder.log(step).open("wb") as log:
        process = subprocess.Popen(
            step.command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=os.environ | quiet,
            cwd=ROOT,
        )
        running = folder.path / "running"
        write_whole(running, f"{process.pid} {_start_ticks(process.pid)}")
        try:
            return process.wait(step.limit_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            running.unlink(missing_ok=True)


def _start_ticks(pid: int) -> str:
    """Return the start time of a process in kernel ticks, or "" if the process does not exist."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[19]
    except (OSError, IndexError):
        return ""


def _kill_left_over(folder: Folder) -> None:
    """Kill the step that an earlier, killed call of gpu-check left running.

    Otherwise two steps would share the GPU.
    """
    running = folder.path / "running"
    if running.exists():
        pid, _, started = running.read_text().partition(" ")
        if started and _start_ticks(int(pid)) == started:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(int(pid), signal.SIGKILL)
        running.unlink(missing_ok=True)


def render(outcomes: Sequence[Outcome], machine: str) -> str:
    """Format the report of the GPU check as Markdown.

    The report has a table of all steps (tests and commands), and then the output of each step.

    - machine: name of the GPU, or the reason why none can be used.
    """
    lines = [
        "# GPU report",
        "",
        machine,
        "",
        "The table has a row for each test and each command. The option --part of gpu-check runs "
        "only one group of them.",
        "",
        "| group (--part) | test or command | result | seconds | reason |",
        "|---|---|---|---|---|",
    ]
    for each in outcomes:
        name, reason = (text.replace("|", "\\|") for text in (each.name, each.reason))
        cells = (each.part, name, each.outcome, f"{each.seconds:.1f}", reason)
        lines.append(f"| {' | '.join(cells)} |")
    for each in outcomes:
        output = re.sub(r"\x1b\[[0-9;]*m", "", each.output).strip()
        if output:
            # Indent the output, so that its headings do not become headings of the report.
            quoted = "\n".join(f"    {line}" for line in output[-TAIL:].splitlines())
            lines += ["", f"## {each.part}: {each.name}", "", quoted]
    return "\n".join(lines) + "\n"
