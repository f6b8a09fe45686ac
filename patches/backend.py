"""The build backend: that of setuptools, after a check that moe-edge's llama.cpp is installed.

`make build` installs it. Without this check, pip would look for a version of llama-cpp-python that
no package index has, and end with a list of all versions that it found instead.
"""

from __future__ import annotations

import sys
import sysconfig
from importlib.metadata import distributions
from typing import Any

from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403

from patches.upstream import read_upstream


def get_requires_for_build_wheel(config_settings: Any = None) -> list[str]:
    """Return the packages that are needed to build a wheel (a hook that pip calls).

    Exit with a message if moe-edge's build of llama.cpp is not installed.
    """
    need_our_build()
    return list(build_meta.get_requires_for_build_wheel(config_settings))


def get_requires_for_build_editable(config_settings: Any = None) -> list[str]:
    """Return the packages that are needed for an editable installation (a hook that pip calls).

    Exit with a message if moe-edge's build of llama.cpp is not installed.
    """
    need_our_build()
    return list(build_meta.get_requires_for_build_editable(config_settings))


def need_our_build() -> None:
    """Exit with a message for the user if moe-edge's build of llama.cpp is not installed.

    The packages of the running Python are searched.
    """
    upstream = read_upstream()
    # pip runs this check with the Python of the target environment, but hides the installed
    # packages. Other installers use a separate environment, in which the check fails.
    folders = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    found = {each.version for each in distributions(name=upstream.name, path=folders)}
    if upstream.local_version not in found:
        sys.exit(
            "moe-edge needs its own build of llama.cpp, which no package index has: run "
            "`make build` in this folder to compile it and install moe-edge with pip. For "
            "`uv tool install`, pipx or another environment, run `make wheel` and install the "
            "wheel from the folder dist."
        )
