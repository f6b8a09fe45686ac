"""Bars are shown in notebooks and terminals, and nowhere else."""

import io
import sys
import types

import pytest

from gguf_tools.progress import ProgressMeter
from orchestrator.library.progress import Bars, in_notebook, shows_bars


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def kernel(monkeypatch):
    """Makes this process look like the kernel of a notebook."""
    shell = types.SimpleNamespace(config={"IPKernelApp": {}})
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: shell))


def test_where_bars_are_shown(monkeypatch):
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    assert not shows_bars()
    monkeypatch.setattr(sys, "stderr", Terminal())
    assert shows_bars() and not in_notebook()
    monkeypatch.setattr(sys, "stderr", None)
    assert not shows_bars()


def test_a_notebook_without_ipywidgets_has_bars_of_text(monkeypatch, kernel):
    from tqdm import notebook

    monkeypatch.setattr("orchestrator.library.progress._DELAY_S", 0)
    monkeypatch.setattr(notebook, "IProgress", None)
    said = io.StringIO()
    monkeypatch.setattr(sys, "stderr", said)
    assert in_notebook() and shows_bars()
    bars = Bars(None)
    bars.stage("Reading experts", 0.5)
    bars.close()
    assert "Reading experts" in said.getvalue()


def test_bars_of_a_load_and_a_download(monkeypatch):
    monkeypatch.setattr("orchestrator.library.progress._DELAY_S", 0)
    monkeypatch.setattr(sys, "stderr", Terminal())
    for shown in (None, True):
        said = sys.stderr = Terminal()
        bars = Bars(shown)
        bars.stage("Measuring this machine", None)
        bars.stage("Reading experts", 0.5)
        with bars.download() as report:
            ProgressMeter(report, 3_000_000).add(1_500_000)
        bars.close()
        text = said.getvalue()
        assert "Measuring this machine" in text and "Reading experts" in text
        assert "Downloading" in text and "/3.00M" in text
    said = sys.stderr = Terminal()
    Bars(False).stage("Reading experts", 0.5)
    assert said.getvalue() == ""
