"""`make gpu-check`: what needs a GPU, in parts that each fit ten minutes, with one report.

The report is a Markdown file; a part that runs again replaces its own section. Nothing here
fails for the lack of a GPU: what needs one is then skipped, and says why.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from patches import cuda, probe
from patches.upstream import (
    say,
    write_atomic,
)

PARTS = ("build", "correct", "bench")
REPORT = Path("gpu-report.md")
TAIL = 12_000  # characters of a step's output in the report

# This is pytest's exit status where no test was selected.
NO_TESTS = 5

# (what it shows, arguments of `moe-edge`). Each is one step of the part `bench`, and its output
# goes into the report as it is. Models have random weights and experts of the true shapes.
BENCHES: tuple[tuple[str, str], ...] = (
    ("what the machine has", "doctor"),
    ("Qwen3-30B-A3B, skewed routing", "bench gpu --shape qwen3-30b --runs 1"),
    ("Qwen3-30B-A3B, uniform routing", "bench gpu --shape qwen3-30b --runs 1 --routing uniform"),
    ("Mixtral, skewed routing", "bench gpu --shape mixtral --runs 1"),
    ("Mixtral, uniform routing", "bench gpu --shape mixtral --runs 1 --routing uniform"),
    ("all layers of Qwen3-30B-A3B", "bench gpu --shape qwen3-30b --layers 48 --runs 1 --caps 25"),
)


@dataclass(frozen=True)
class Step:
    name: str
    outcome: str  # passed | failed | skipped
    seconds: float
    reason: str = ""
    output: str = ""


@dataclass
class Section:
    part: str
    steps: list[Step] = field(default_factory=list)

    @property
    def failed(self) -> bool:
        return any(step.outcome == "failed" for step in self.steps)


def run(
    parts: Iterable[str], python: Path, build_options: list[str], report: Path, only: str = ""
) -> int:
    """Runs the parts and writes the report; returns 0 unless a step failed. python is that of our
    environment. only picks the benchmarks whose name or arguments hold it."""
    found, why = probe.find_gpu()
    say(f"GPU: {why}" if found else f"no GPU: {why}; what needs one is skipped")
    status = 0
    for part in parts:
        if part == "build":
            section = _build(found, why, build_options)
        elif part == "correct":
            section = _correct(python)
        else:
            section = _bench(found, why, python, only)
        write_report(report, section, why)
        for step in section.steps:
            print(f"{step.outcome:8} {step.seconds:7.1f} s  {step.name}  {step.reason}".rstrip())
        status = 1 if section.failed else status
    print(f"report: {report}")
    return status


def _build(found: bool, why: str, options: list[str]) -> Section:
    name = "library, environment and tests' tools for this GPU"
    if not found:
        return Section("build", [Step(name, "skipped", 0, f"no GPU: {why}")])
    tool = str(Path(__file__).with_name("tool.py"))
    command = [sys.executable, tool, "setup", "--extras", "test", "--gpu", "cuda", *options]
    say(f"architecture: {cuda.gpu_arch() or 'unknown'}")
    return Section("build", [_step(name, command)])


def _correct(python: Path) -> Section:
    with tempfile.TemporaryDirectory(prefix="moe-edge-gpu.") as folder:
        results = Path(folder) / "results.xml"
        command = [
            str(python),
            "-m",
            "pytest",
            "-m",
            "gpu",
            "-ra",
            "-o",
            "junit_logging=system-out",
        ]
        command += [f"--junitxml={results}", "tests"]
        whole = _step("tests marked gpu", command)
        steps = read_junit(results.read_text()) if results.exists() else []
    if not steps:
        return Section("correct", [whole])
    return Section("correct", steps)


def _bench(found: bool, why: str, python: Path, only: str) -> Section:
    section = Section("bench")
    for name, arguments in BENCHES:
        if only not in f"{name}: {arguments}":
            section.steps.append(Step(name, "skipped", 0, f"STEP={only}"))
        elif found:
            command = [str(python), "-m", "orchestrator", *shlex.split(arguments)]
            section.steps.append(_step(f"{name}: moe-edge {arguments}", command))
        else:
            section.steps.append(Step(name, "skipped", 0, f"no GPU: {why}"))
    return section


def _step(name: str, command: list[str]) -> Step:
    say(f"{name}: {shlex.join(command)}")
    start = time.monotonic()
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )
    good = done.returncode in (0, NO_TESTS)
    reason = "" if good else f"exit status {done.returncode}"
    return Step(name, "passed" if good else "failed", time.monotonic() - start, reason, done.stdout)


def read_junit(text: str) -> list[Step]:
    """The tests of pytest's --junitxml, each with its reason and what it printed."""
    steps = []
    for case in ElementTree.fromstring(text).iter("testcase"):
        if not case.get("classname"):
            continue  # a file that was skipped as a whole, whatever its tests are marked
        outcome, reason = "passed", ""
        for kind in ("failure", "error", "skipped"):
            found = case.find(kind)
            if found is not None:
                outcome = "skipped" if kind == "skipped" else "failed"
                reason = (found.get("message") or "").split("\n")[0]
        printed = "".join(node.text or "" for node in case.iter("system-out"))
        printed = re.sub(r"^-+ Captured \w+ -+\n", "", printed, flags=re.MULTILINE)
        if outcome == "failed":
            printed += "".join(node.text or "" for node in case if node.tag in ("failure", "error"))
        name = f"{case.get('classname', '').rsplit('.', 1)[-1]}: {case.get('name')}"
        steps.append(Step(name, outcome, float(case.get("time", 0)), reason, printed))
    return steps


def write_report(path: Path, section: Section, machine: str) -> None:
    """Replaces the section of this part and keeps the others."""
    text = path.read_text() if path.exists() else "# GPU report\n"
    kept = {
        match[1]: match[0].rstrip()
        for match in re.finditer(r"^## (\w+)\n.*?(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    }
    kept[section.part] = _markdown(section, machine).rstrip()
    body = "\n\n".join(kept[part] for part in PARTS if part in kept)
    write_atomic(path, f"# GPU report\n\n{body}\n".encode())


def _markdown(section: Section, machine: str) -> str:
    lines = [
        f"## {section.part}",
        "",
        machine,
        "",
        "| step | result | s | why |",
        "|---|---|---|---|",
    ]
    for step in section.steps:
        reason = step.reason.replace("|", "\\|")
        name = step.name.replace("|", "\\|")
        lines.append(f"| {name} | {step.outcome} | {step.seconds:.1f} | {reason} |")
    for step in section.steps:
        output = re.sub(r"\x1b\[[0-9;]*m", "", step.output).strip()
        if output:
            # A heading of the output must not look like one of ours.
            quoted = "\n".join(f"    {line}" for line in output[-TAIL:].splitlines())
            lines += ["", f"### {step.name}", "", quoted]
    return "\n".join(lines)
