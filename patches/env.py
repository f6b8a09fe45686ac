"""Find or create moe-edge's Python environment, and install packages into it.

An active virtual environment or conda environment is used. Otherwise `.venv` in the repository is
created.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from patches import wheel
from patches.upstream import (
    PATCHES,
    REPO,
    BuildError,
    Upstream,
    errors_of_pip,
    say,
    write_atomic,
)

PYTHON_AT_LEAST = (3, 10)

# Runs in the environment's Python and prints the installed packages as a JSON object.
INSPECT = """
import importlib.metadata as metadata, json, sys
report = {"version": sys.version_info[:2], "stamp": None, "names": [], "llama_cpp": None}
for item in metadata.distributions():
    if item.metadata["Name"]:
        report["names"].append(item.metadata["Name"].lower().replace("_", "-"))
try:
    found = metadata.distribution("llama_cpp_python")
    text = found.read_text("../" + sys.argv[1])
    report["stamp"] = json.loads(text) if text else None
    report["llama_cpp"] = str(found.locate_file("llama_cpp"))
except metadata.PackageNotFoundError:
    pass
print(json.dumps(report))
"""


@dataclass(frozen=True)
class Environment:
    """The Python environment into which moe-edge is installed.

    is_own: whether this is the repository's `.venv`. The setup creates that environment if it does
    not exist. python: path of the environment's Python.
    """

    root: Path
    is_own: bool
    python: Path

    @property
    def note(self) -> Path:
        """The path of the file in which `make build` records its choices, such as the extras."""
        return self.root / "moe-edge-setup.json"

    def read_note(self) -> dict[str, Any]:
        """Return the record that the last `make build` stored in this environment, or {}.

        The record has the choices for gpu and amx, the installed extras (optional parts) and
        packages, and a hash of the declared requirements.
        """
        try:
            note = json.loads(self.note.read_text())
        except (OSError, ValueError):
            return {}
        return note if isinstance(note, dict) else {}


def locate() -> Environment:
    """Return the Python environment to install into, without creating it.

    This is the active virtual or conda environment. If none is active, it is the repository's
    `.venv`.
    """
    for variable in ("VIRTUAL_ENV", "CONDA_PREFIX"):
        root = os.environ.get(variable)
        if root and (Path(root) / "bin" / "python").exists():
            return Environment(Path(root), False, Path(root) / "bin" / "python")
    root_path = REPO / ".venv"
    return Environment(root_path, True, root_path / "bin" / "python")


def ensure(env: Environment) -> None:
    """Create the environment if it is the repository's `.venv` and does not exist.

    Raises BuildError if that fails or the environment has no pip.
    """
    if env.is_own and not _has_pip(env.python):
        if sys.version_info < PYTHON_AT_LEAST:
            raise BuildError(_too_old(sys.version_info[:2]))
        if not all(map(importlib.util.find_spec, ("ensurepip", "venv"))):
            version = f"{sys.version_info[0]}.{sys.version_info[1]}"
            raise BuildError(
                "Python's venv module is missing: install it with "
                f"`sudo apt install python{version}-venv`."
            )
        say("creating .venv")
        if env.root.exists():
            shutil.rmtree(env.root)
        done = subprocess.run(
            [sys.executable, "-m", "venv", str(env.root)], capture_output=True, text=True
        )
        if done.returncode != 0:
            shutil.rmtree(env.root, ignore_errors=True)
            lines = (done.stdout + done.stderr).strip().splitlines()
            raise BuildError(f"could not create {env.root}: {' '.join(lines)[:300]}")
    elif not _has_pip(env.python):
        raise BuildError(
            f"{env.python} has no pip: install it with `{env.python} -m ensurepip`, "
            "or leave this environment."
        )


def _has_pip(python: Path) -> bool:
    if not python.exists():
        return False
    command = [str(python), "-m", "pip", "--version"]
    return subprocess.run(command, capture_output=True).returncode == 0


def _too_old(version: Sequence[int]) -> str:
    return f"Python 3.10 or newer is needed, this is {version[0]}.{version[1]}."


def inspect(env: Environment) -> dict[str, Any]:
    """Return facts about the environment: its Python version and its packages.

    The dict has the keys `version` (of Python), `names` (of the installed packages), `llama_cpp`
    (the folder of the package llama_cpp) and `stamp` (moe-edge's record of how it built llama_cpp).
    A missing version, folder or record is None.
    """
    report: dict[str, Any] = {"version": None, "stamp": None, "names": [], "llama_cpp": None}
    if env.python.exists():
        command = [str(env.python), "-I", "-c", INSPECT, wheel.STAMP]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode == 0:
            report = json.loads(done.stdout)
    return report


def installed_key(report: dict[str, Any]) -> str | None:
    """Return the key of the installed llama.cpp build, or None if moe-edge did not build it.

    The key is a hash of everything that determines the build, such as sources and compiler flags.
    report: result of `inspect`.
    """
    return str(report["stamp"].get("key")) if report["stamp"] else None


def install(
    env: Environment,
    upstream: Upstream,
    wheel_path: Path,
    key: str,
    extras: set[str],
    choices: dict[str, str],
) -> bool:
    """Install the wheel of llama.cpp, and moe-edge with its extras, into the environment.

    Return False if everything was installed already. Extras that were installed before are kept.
    Raises BuildError if pip fails.

    wheel_path: path of the wheel.
    key: key of the wheel's build.
    extras: names of optional parts, such as "dev".
    choices: the choices for gpu and amx, which are recorded for the next setup.
    """
    report, note = inspect(env), env.read_note()
    if report["version"] and tuple(report["version"]) < PYTHON_AT_LEAST:
        raise BuildError(_too_old(report["version"]))
    before, packages = set(note.get("extras", ())), note.get("packages")
    wanted = sorted(extras | before)
    changed = installed_key(report) != key
    if changed:
        _pip(env, "installing the bindings", ["--no-deps", "--force-reinstall", str(wheel_path)])
    declared = [REPO / "pyproject.toml", PATCHES / "requirements.txt"]
    project = hashlib.sha256(b"".join(each.read_bytes() for each in declared)).hexdigest()
    complete = (
        note.get("project") == project
        and before >= extras
        and packages is not None
        and set(packages) <= set(report["names"])
    )
    if not complete:
        suffix = f"[{','.join(wanted)}]" if wanted else ""
        what = "installing moe-edge" + (f" with {', '.join(wanted)}" if wanted else "")
        _pip(env, what, ["--editable", f"{REPO}{suffix}"])
        changed = True
    after = inspect(env)
    if installed_key(after) != key:
        raise BuildError(
            f"pip has replaced moe-edge's build of {upstream.name} in {env.root}: run the command"
            " again."
        )
    if changed or any(note.get(name) != choice for name, choice in choices.items()):
        packages = packages if complete else sorted(after["names"])
        content = {"project": project, "extras": wanted, "packages": packages, **choices}
        write_atomic(env.note, json.dumps(content).encode())
    return changed


def _pip(env: Environment, what: str, arguments: list[str]) -> None:
    say(what)
    command = [str(env.python), "-m", "pip", "install", "--disable-pip-version-check", "--quiet"]
    done = subprocess.run(
        [*command, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if done.returncode != 0:
        raise BuildError(f"{what} failed: " + "\n".join(errors_of_pip(done.stdout)[-6:]))


def ready_line(env: Environment) -> str:
    """Return the line that tells the user how to run moe-edge from the current shell."""
    if not env.is_own:
        return "ready: moe-edge chat"
    here = Path.cwd()
    shown = env.root.relative_to(here) if env.root.is_relative_to(here) else env.root
    return f"ready: run `source {shown}/bin/activate`, then `moe-edge chat`"
