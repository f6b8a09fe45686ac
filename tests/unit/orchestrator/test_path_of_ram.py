"""The way from --ram to expert slots: how many files a reader visits, and how often a file turns
back to one that is not finished."""

import sys
from pathlib import Path

import pytest
from recorded_plans import model

import orchestrator
from orchestrator.config import Config
from orchestrator.plan.planning import plan
from orchestrator.plan.records import Machine, Needs, Plan, PlanRequest

ROOT = Path(orchestrator.__file__).parent
MOST_FILES = 9


class Way:
    """Follows the calls of a thread, as its profile function.

    files: the files of the program, in the order in which they are entered. returns: (caller,
    called) for each call of a function in another file that waits for the caller.
    """

    def __init__(self):
        self.files, self.returns, self._waiting = [], [], []

    def __call__(self, frame, event, _):
        path = Path(frame.f_code.co_filename)
        if ROOT not in path.parents:
            return
        name = path.relative_to(ROOT).as_posix()
        if event == "return":
            self._waiting.pop()
        elif event == "call":
            if name not in self.files:
                self.files.append(name)
            if name in self._waiting and name != self._waiting[-1]:
                self.returns.append((self._waiting[-1], name))
            self._waiting.append(name)


@pytest.mark.parametrize("policy", [None, "lru"])
def test_ram_becomes_slots_in_few_files_and_without_returns(policy):
    """From the settings of a chat to the slots of the default policy, and of the baseline."""
    Config.declared()  # declarations are read once in a process
    of, way = model("24 layers"), Way()
    sys.setprofile(way)
    try:
        config = Config.build(model=of.path, ram=2 << 30, policy=policy)
        found = plan(PlanRequest(config, Needs(conversations=True)), of, Machine(1 << 40))
    finally:
        sys.setprofile(None)
    assert isinstance(found, Plan) and found.slots is not None and found.slots.groups
    assert way.files[0] == "config.py" and "allocation/slots.py" in way.files
    assert len(way.files) <= MOST_FILES, way.files
    assert way.returns == []
