"""Policies in packages and modules of their own, for a process of its own."""

import pytest
from command_line import MOE_EDGE, python


@pytest.fixture
def installed(tmp_path):
    """installed(package=module text, ..) -> a folder on PYTHONPATH, as pip leaves it.

    points: the text of entry_points.txt, instead of the usual one.
    """

    def make(value=None, points=None, **modules):
        for module, text in modules.items():
            (tmp_path / f"{module}.py").write_text(text)
            info = tmp_path / f"{module}-1.0.dist-info"
            info.mkdir(exist_ok=True)
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
            (info / "entry_points.txt").write_text(
                points or f"[moe_edge.policies]\n{module} = {value or f'{module}:Tiny'}\n"
            )
        return tmp_path

    return make


@pytest.fixture
def moe_edge():
    """moe_edge(folder, *words) with the packages of a folder."""

    def run(folder, *words):
        return python(*MOE_EDGE, *words, PYTHONPATH=str(folder))

    return run
