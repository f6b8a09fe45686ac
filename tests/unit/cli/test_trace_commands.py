"""`moe-edge trace` and `moe-edge replay` from end to end, and their refusals."""

import json

import pytest
from command_line import run

from orchestrator.lab.replay import read_trace
from orchestrator.lab.replay.trace import PROMPT_ENDS, STARTS


@pytest.fixture(scope="module")
def model(library, tiny_model):
    """A packed model with two precisions."""
    return tiny_model("qwen3moe", "q4_k", "q2_k", seed=1)


@pytest.fixture(scope="module")
def recorded(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("trace")
    text = folder / "text.txt"
    text.write_text("a text of some words, " * 10)
    options = ("--ctx=128", "--threads=1", "--expert-ram=2MiB", "--low-tier=q2_k")
    options += ("--tokens=40", "--prefill=16", "--out", folder / "t.npz")
    assert " with 25 steps, " in done("trace", "-m", model, "--text", text, *options)
    return folder / "t.npz"


def test_a_text_becomes_a_trace(recorded):
    trace = read_trace(recorded)
    header = trace.header
    assert (header.policy, header.in_use) == ("dymoe", ("q4_k", "q2_k"))
    assert (header.settings["n_ahead"], header.expert_bytes) == (1, 2 << 20)
    assert header.settings["retention"] is None  # not given
    assert trace.arrays["marks"].tolist() == [[0, STARTS, 0], [0, PROMPT_ENDS, 0]]
    assert header.tiers == ("q4_k", "q2_k")
    assert trace.arrays["step_tokens"].tolist() == [16] + 24 * [1]


def done(*args):
    """Output of a command that must succeed."""
    result = run(*args)
    assert result.exit_code == 0, result.stderr
    return result.stdout


def test_replay_prints_the_policy_and_its_baselines(recorded):
    said = done("replay", recorded)
    table, policy = said.split("policy: ")
    names = [line.split()[0].rstrip(",") for line in table.splitlines() if " % " in line]
    assert names == ["compute", "dymoe", "lru", "Belady", "recorded"]
    assert "bound, one precision" in table
    assert policy.endswith("look-ahead 1\n")


def test_options_reach_the_replay(recorded):
    options = ("--policy=lru", "--expert-ram=1MiB", "--bandwidth=1GB", "--latency-us=70")
    found = json.loads(
        done("replay", recorded, "--json", *options, "--io-threads=3", "--compute-ms=2.5")
    )
    assert list(found["runs"]) == ["lru"]
    wanted = {"expert_bytes": 1 << 20, "bandwidth": 10**9, "latency_us": 70, "io_threads": 3}
    wanted |= {"transition_rate": 0}
    assert wanted.items() <= found.items()
    assert found["compute_ms"]["decode_token"] == 2.5
    assert found["runs"]["lru"]["tpot_ms_mean"] > 2.5

    options = ("--retention=0.5", "--low-tier=skip", "--schedule=flat", "--prefetch=off")
    found = json.loads(done("replay", recorded, "--json", *options))
    assert found["policy"].startswith("dymoe q4_k/skip retention=0.5")
    assert found["n_ahead"] == 0
    assert found["runs"]["dymoe"]["decode"]["mix"]["skip"] == 0.5


def test_an_answer_becomes_a_trace(model, tmp_path):
    out = tmp_path / "answer.npz"
    done(
        *("trace", "-m", model, "-p", "hello", "--tokens=5", "--seed=3", "--out", out),
        *("--ctx=128", "--threads=1", "--expert-ram=2MiB", "--policy=lru"),
    )
    trace = read_trace(out)
    assert trace.header.policy == "lru"
    assert len(trace.arrays["step_phase"]) <= 5
    assert len(trace.arrays["ahead_ids"]) == 0


def test_refused_in_one_sentence(model, recorded, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("some words")
    odd = tmp_path / "odd.txt"
    odd.write_bytes(b"\xff")
    trace = ("trace", "-m", model, "--ctx=128", "--threads=1")
    out = ("--out", tmp_path / "t.npz")
    cases = [
        ((*trace, "-p", "x", "--out", tmp_path / "no" / "t.npz"), "cannot be written"),
        ((*trace, "-p", "x", "--out", tmp_path), "cannot be written"),
        ((*trace, "--text", tmp_path / "no.txt", *out), "No such file"),
        ((*trace, "--text", odd, *out), "is not a text in UTF-8"),
        ((*trace, "-p", "x", "--policy=plain", *out), "the model runs on llama.cpp's own path"),
        ((*trace, "--text", text, "--tokens=999", *out), "--tokens 999 is larger than the context"),
        ((*trace, "--text", text, "--prefill=99", *out), "--prefill 99 is larger than the"),
        (("replay", model), "not a trace"),
        (("replay", tmp_path / "no.npz"), "No such file"),
        (("replay", recorded, "--policy=plain"), "--policy plain cannot be replayed"),
        (("replay", recorded, "--losses", text), "not a loss table"),
        (
            ("replay", recorded, "--expert-ram=4096B"),
            "--expert-ram 4 KiB is too small: the smallest that works",
        ),
    ]
    for args, said in cases:
        result = run(*args)
        assert result.exit_code == 1, (args, result.stdout)
        assert said in result.stderr and result.stderr.startswith("Error: "), result.stderr
        assert result.stderr.count("\n") == 1
    assert {*tmp_path.iterdir()} == {text, odd}
