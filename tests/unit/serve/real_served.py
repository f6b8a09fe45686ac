"""The demo model, served in this process."""

from contextlib import contextmanager

from fake_served import quiet, state_with
from served import library_path

from orchestrator.runtime.runtime import Runtime
from orchestrator.serve.app import application
from orchestrator.serve.bodies import Words
from orchestrator.serve.served import Served, answering
from orchestrator.serve.settings import ServeSettings


@contextmanager
def served_with(config, parallel=1):
    settings, words = ServeSettings(parallel=parallel), Words("gpt2", "")
    library_path()
    with Runtime.open(config, answering=answering(config, settings, words, "")) as runtime:
        yield Served(runtime, settings, words, quiet)


def app_of(served):
    """The application for the demo model."""
    state = state_with(served, parallel=served.parallel)
    state.gate.open(served.about.n_cells)
    return application(state, quiet)
