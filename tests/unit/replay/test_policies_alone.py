"""Each policy can be removed: its file or folder, and its lines in the registry. Everything else
still imports, and all other policies decide as before."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator.policy import BASELINE, POLICIES

ROOT = Path(__file__).resolve().parents[3]

PROGRAM = """
import importlib, json, sys
from pathlib import Path
import orchestrator
from golden import DECISIONS, ROWS, RUN, decided
from orchestrator.native.llama import Bindings
from orchestrator.policy import POLICIES
from orchestrator.lab.replay.file import read_trace

copy, removed = Path(sys.argv[1]), sys.argv[2]
assert Path(orchestrator.__file__).is_relative_to(copy) and removed not in POLICIES
for path in sorted((copy / "orchestrator").rglob("*.py")):
    parts = path.relative_to(copy).with_suffix("").parts
    if parts[1] in ("lab", "__main__"):
        continue
    try:
        importlib.import_module(".".join(parts).removesuffix(".__init__"))
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("orchestrator"):
            raise  # else an extra that is not installed
library, trace = Bindings.load().library(), read_trace(RUN)
stored = json.loads(DECISIONS.read_text())
rows = {name: row for row, (name, *_) in ROWS.items()}
for name in POLICIES:
    assert decided(library, trace, rows[name]) == stored[rows[name]], name
"""


def without(copy, name):
    """Remove a policy from a copy of the repository."""
    policies = copy / "orchestrator" / "policy"
    module = POLICIES[name].__module__.rpartition(".")[2]
    (policies / f"{module}.py").unlink(missing_ok=True)
    shutil.rmtree(policies / module, ignore_errors=True)
    registry, named = policies / "registry.py", POLICIES[name].__name__
    lines = registry.read_text().splitlines(keepends=True)
    mine = [f"from orchestrator.policy.{module} import {named}\n", f"        {named},\n"]
    assert all(lines.count(each) == 1 for each in mine)
    registry.write_text("".join(line for line in lines if line not in mine))


@pytest.mark.parametrize("name", [each for each in POLICIES if each != BASELINE])
def test_other_policies_work_without_a_policy(library, tmp_path, name):
    leave_out = shutil.ignore_patterns("__pycache__", "lab")
    shutil.copytree(ROOT / "orchestrator", tmp_path / "orchestrator", ignore=leave_out)
    without(tmp_path, name)
    path = os.pathsep.join(map(str, (tmp_path, Path(__file__).parent, ROOT)))
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, tmp_path, name],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
