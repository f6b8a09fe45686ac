"""Builds the package as setuptools does, where our build of llama.cpp is installed.

`make build` installs that first. Without it pip would look for the version that only `make build`
makes, and end in a list of all those that it found elsewhere.
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
    need_our_build()
    return list(build_meta.get_requires_for_build_wheel(config_settings))


def get_requires_for_build_editable(config_settings: Any = None) -> list[str]:
    need_our_build()
    return list(build_meta.get_requires_for_build_editable(config_settings))


def need_our_build() -> None:
    """Ends the process with a sentence, which pip and uv show, if the environment that is installed
    into lacks our build. pip runs this in that environment's Python, which then sees none of its
    packages: so their folders are named here. Other installers run it in an environment of their
    own, which has nothing of ours, and are refused."""
    upstream = read_upstream()
    folders = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    found = {each.version for each in distributions(name=upstream.name, path=folders)}
    if upstream.local_version not in found:
        sys.exit(
            "moe-edge needs its own build of llama.cpp, which no package index has: run "
            "`make build` in this folder, which compiles it and installs moe-edge with pip. For "
            "`uv tool install`, pipx or another environment run `make wheel`, and install the "
            "wheel in dist."
        )
