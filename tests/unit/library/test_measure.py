"""Replays, benchmarks and traces for notebooks."""

import pytest
from command_line import DEMO, REPO, python

from orchestrator import ConfigError, MoeEdgeError, PolicyError, bench, record, replay
from orchestrator.lab.replay import ReplayOptions, read_trace
from orchestrator.lab.replay import replay as run
from orchestrator.library.measure import Rows
from orchestrator.native.llama import Bindings
from orchestrator.policy import POLICIES
from orchestrator.policy.base import About
from orchestrator.policy.lru import LRU

SPEED = {"bandwidth": "1GB", "latency_us": 80}


class Mine(LRU):
    about = About(name="mine", precisions=LRU.precisions, wants=LRU.about.wants, reason="is mine")


@pytest.fixture(autouse=True)
def no_policies_left():
    yield
    POLICIES.pop("mine", None)


@pytest.fixture(scope="module")
def trace(library, tmp_path_factory):
    path = tmp_path_factory.mktemp("trace") / "t.npz"
    made = record(path, DEMO, "a text of some words, " * 20, tokens=48, prefill=16,
                  expert_ram="8MiB", ctx=256)  # fmt: skip
    assert made == path
    return path


def test_rows_are_those_of_the_command(trace):
    rows = replay(trace, policy=["firm", Mine], **SPEED)
    assert [row["name"] for row in rows][:3] == ["firm", "mine", "lru"]
    assert [row["kind"] for row in rows] == ["policy"] * 3 + ["optimum", "bound", "recorded"]
    by_name = {row["name"]: row for row in rows}
    keys = ("hit_rate", "read_bytes_per_token", "tpot_ms_mean")
    assert {by_name["mine"][key] for key in keys} == {by_name["lru"][key] for key in keys}
    options = ReplayOptions(policy="firm", bandwidth=10**9, latency_us=80)
    (found, _) = run(Bindings.load().library(), read_trace(trace), options)["runs"].values()
    assert by_name["firm"]["hit_rate"] == found["decode"]["hit_rate"]
    assert by_name["firm"]["tpot_ms_mean"] == found["tpot_ms_mean"]
    assert by_name["optimum"]["hit_rate"] >= by_name["lru"]["hit_rate"]


def test_a_setting_goes_to_the_policies_that_have_it(trace):
    few = replay(trace, policy=["lru", "dymoe"], retention=0.5, low_tier="q4_k", **SPEED)
    assert few[0]["name"] == "lru" and few[1]["name"] == "dymoe"
    with pytest.raises(ConfigError, match="--retention has no effect with --policy lru"):
        replay(trace, policy="lru", retention=0.5, **SPEED)
    with pytest.raises(ConfigError, match="replay has no option 'bandwith'"):
        replay(trace, bandwith="1GB")
    with pytest.raises(MoeEdgeError, match=r"nothing\.npz"):
        replay(trace.with_name("nothing.npz"))


def test_a_plot(trace, tmp_path):
    pytest.importorskip("matplotlib")
    figure = replay(trace, **SPEED).plot()
    figure.savefig(tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 1000
    assert len(figure.axes) == 2
    rows = Rows([{"name": "a", "cap": 0.5, "x": 1.0}, {"name": "b", "x": None}], None, {"x": "X"})
    assert len(rows.plot("x").axes) == 1


def test_bench_refuses_what_its_processes_cannot_import():
    made = type("Inner", (LRU,), {"about": Mine.about, "__module__": "__main__"})
    with pytest.raises(ConfigError, match="mine is defined in __main__"):
        bench(policy=made)
    with pytest.raises(PolicyError, match="is not a policy"):
        bench(policy=int)
    with pytest.raises(ConfigError, match="the benchmark has no option 'tokns'"):
        bench(tokns=3)


RECORD = f"""
import os, signal, threading
from orchestrator import record
from orchestrator.runtime.runtime import Runtime
submit = Runtime.submit
def pressed(*args, **kwargs):
    threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()
    return submit(*args, **kwargs)
Runtime.submit = pressed
stop, close, told = Runtime.stop, Runtime.close, []
Runtime.stop = lambda self: (told.append("stop"), stop(self))
Runtime.close = lambda self: (told.append("close"), close(self))
try:
    record("t.npz", {str(DEMO)!r}, prompt="word " * 800, tokens=100, ram="400MiB", ubatch=4)
except KeyboardInterrupt:
    print("interrupted", os.listdir(), told[:2])
"""


def test_an_interrupt_ends_a_recorded_answer(library, tmp_path):
    done = python("-c", RECORD, folder=tmp_path, PYTHONPATH=str(REPO))
    assert (done.returncode, done.stderr, done.stdout) == (
        0,
        "",
        "interrupted [] ['stop', 'close']\n",
    )


def test_record_wants_one_input(tmp_path):
    with pytest.raises(ConfigError, match="exactly one of the arguments text and prompt"):
        record(tmp_path / "t.npz", DEMO)
