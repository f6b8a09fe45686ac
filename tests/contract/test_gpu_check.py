"""`make gpu-check`: skips with a reason, fails where a step fails, keeps its report's sections."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

import pytest

from patches import gpu_check, probe
from patches import tool as tool_module
from patches.gpu_check import Section, Step
from patches.upstream import REPO, read_upstream

RESULTS = """<?xml version="1.0"?><testsuites><testsuite>
<testcase classname="" name="tests.unit.other"><skipped message="collection skipped"/></testcase>
<testcase classname="tests.native.cuda.test_kernels" name="test_a[gpu]" time="1.5">
<system-out>worst NMSE 1e-4</system-out></testcase>
<testcase classname="tests.native.cuda.test_kernels" name="test_b[gpu]" time="0">
<skipped message="no GPU: none">there</skipped></testcase>
<testcase classname="tests.native.cuda.test_kernels" name="test_c[gpu]" time="0">
<failure message="AssertionError: row 3&#10;more">where it was</failure></testcase>
</testsuite></testsuites>"""


def test_reads_what_pytest_found() -> None:
    a, b, c = gpu_check.read_junit(RESULTS)
    assert (a.outcome, a.seconds, a.output) == ("passed", 1.5, "worst NMSE 1e-4")
    assert (b.outcome, b.reason) == ("skipped", "no GPU: none")
    assert (c.outcome, c.reason) == ("failed", "AssertionError: row 3")
    assert "where it was" in c.output


def test_a_part_replaces_its_own_section(tmp_path: Path) -> None:
    report = tmp_path / "report.md"
    gpu_check.write_report(
        report, Section("bench", [Step("x", "passed", 1, "", "## build\n1 | 2")]), "H"
    )
    gpu_check.write_report(report, Section("build", [Step("y", "failed", 2, "a | b")]), "H")
    gpu_check.write_report(report, Section("bench", [Step("z", "passed", 3)]), "H")
    text = report.read_text()
    assert text.index("## build") < text.index("## bench")
    assert "| y | failed | 2.0 | a \\| b |" in text
    assert "| z | passed" in text and "| x |" not in text
    assert text.startswith("# GPU report\n") and text.count("## bench") == 1


def test_without_a_gpu_all_is_skipped(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(probe, "find_gpu", lambda: (False, "no driver"))
    report = tmp_path / "report.md"
    assert gpu_check.run(("build", "bench"), Path(sys.executable), [], report) == 0
    assert report.read_text().count("skipped") == 1 + len(gpu_check.BENCHES)
    assert "no GPU: no driver" in capsys.readouterr().out


def test_benchmarks_are_picked_by_a_word(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(probe, "find_gpu", lambda: (True, "one"))
    monkeypatch.setattr(gpu_check, "BENCHES", (("a", "--version"), ("b", "doctor")))
    report = tmp_path / "report.md"
    assert gpu_check.run(("bench",), Path(sys.executable), [], report, "version") == 0
    text = report.read_text()
    assert "a: moe-edge --version | passed" in text and "| b | skipped | 0.0 | STEP=version" in text


def test_files_are_all_that_is_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, user_folder: Path
) -> None:
    """--files: pip is told to look nowhere else, and the source there is taken."""
    sdist = tmp_path / read_upstream().sdist_name
    sdist.write_bytes(b"not it")
    for name in ("PIP_NO_INDEX", "PIP_FIND_LINKS"):
        monkeypatch.delenv(name, raising=False)
    tool = [sys.executable, str(REPO / "patches/tool.py"), "--files"]
    done = subprocess.run([*tool, str(tmp_path), "source"], capture_output=True, text=True)
    assert done.returncode == 1 and f"{sdist}: sha256 is" in done.stderr
    done = subprocess.run([*tool, "nowhere", "status"], capture_output=True, text=True)
    assert done.returncode == 1 and "--files nowhere: there is no such folder" in done.stderr
    args = argparse.Namespace(files=tmp_path, sdist=None)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    tool_module.use_files(args)
    assert args.sdist == sdist
    assert (os.environ["PIP_NO_INDEX"], os.environ["PIP_FIND_LINKS"]) == ("1", str(tmp_path))


def test_a_failed_step_fails_the_check(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(probe, "find_gpu", lambda: (True, "one"))
    monkeypatch.setattr(gpu_check, "BENCHES", (("wrong", "no-such-command"),))
    report = tmp_path / "report.md"
    assert gpu_check.run(("bench",), Path(sys.executable), [], report) == 1
    assert "| failed |" in report.read_text()
    assert "no-such-command" in report.read_text()
