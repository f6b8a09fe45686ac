"""The command line with the real engine and a random-weight model of a few megabytes."""

import json
import os
import signal
import subprocess
import sys

import pytest
from command_line import MOE_EDGE, REPO, python, run
from tables import cases

from gguf_tools import interrupts
from orchestrator.chat.session import Session
from orchestrator.cli.options import demo_model
from orchestrator.config import Config
from orchestrator.runtime.answering import Answering
from orchestrator.runtime.runtime import Runtime

TIERS = ("q8_0", "q4_k", "q2_k")


@pytest.fixture(scope="module")
def model(library, tiny_model):
    return tiny_model("qwen3moe", *TIERS, seed=1)


def ask(model, *args):
    options = ("-p", "hello there", "--seed", "5", "--json")
    done = python(*MOE_EDGE, "chat", "-m", model, *options, *args)
    assert (done.returncode, done.stderr) == (0, "")
    return json.loads(done.stdout)


@cases(
    "policy, other",
    (["--policy", "lru"], None),
    (["--low-tier", "q2_k"], "q2_k"),
    (["--low-tier", "skip"], "skip"),
)
def test_a_managed_answer_and_its_statistics(model, policy, other):
    options = ("--expert-ram", "1MiB", "--max-tokens", "24", "--high-tier", "q4_k")
    answer = ask(model, *options, *policy)
    stats = answer["stats"]
    assert answer["text"]
    assert stats["mode"].startswith("managed: dymoe" if other else "managed: lru")
    assert 2 <= stats["tokens"] <= 24
    assert stats["budget_bytes"] == 2**20
    assert stats["bytes_read"] > 0
    assert 0.0 <= stats["hit_rate"] <= 1.0
    assert 0 < stats["tpot_ms_p50"] <= stats["tpot_ms_p99"]
    assert sum(stats["mix"].values()) == pytest.approx(1.0)
    if other is None:
        assert stats["mix"] == {"q4_k": 1.0}
    else:
        assert stats["mix"]["q4_k"] > stats["mix"][other] > 0
        # a request for low uses a resident high copy
        assert stats["computed"]["q4_k"] >= stats["mix"]["q4_k"]
    assert sum(stats["computed"].values()) == pytest.approx(1.0)


def test_a_stop_text_ends_the_answer(model):
    options = ("--policy", "lru", "--high-tier", "q4_k", "--expert-ram", "1MiB", "--max-tokens=24")
    whole = ask(model, *options)["text"]
    stop = whole[len(whole) // 2 :][:3]
    cut = ask(model, *options, "--stop", "never said", "--stop", stop)
    assert cut["text"] == whole[: whole.index(stop)]
    assert cut["stats"]["finish"] == "stop" and cut["stats"]["tokens"] < 24


def test_a_seed_repeats_the_answer(model):
    options = ("--expert-ram", "1MiB", "--policy", "lru", "--max-tokens", "24")
    first = ask(model, *options)["text"]
    assert ask(model, *options)["text"] == first
    done = python(*MOE_EDGE, "chat", "-m", model, "--seed", "5", *options, stdin="hello there\n")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.rstrip("\n") == first.rstrip("\n")


@cases(
    "options, parts",
    (
        ["--ram", "10MB"],
        [
            "the smallest --ram that works with the policy dymoe and a context of 512 tokens is",
            "--policy lru",
        ],
    ),
    (["--ram", "10MB", "--policy", "plain"], ["the policy plain", "needs at least"]),
    (["--policy", "lru", "--low-tier", "skip"], ["--low-tier has no effect with --policy lru"]),
    (["--expert-ram", "10KiB"], ["the smallest that works with the policy dymoe is"]),
    (["--profile", "hot.json"], ["--profile is for --policy dynaexq"]),
    (["--policy", "dynaexq", "--profile", "no/hot.json"], ["no/hot.json: there is no such folder"]),
    (["--high-tier", "q5_k"], ["q5_k", *TIERS]),
    (["--low", "nowhere.gguf"], ["nowhere.gguf"]),
    (["-m", "cut.gguf", "--expert-ram", "1MiB"], ["cut.gguf"]),  # a truncated file
)
def test_a_refusal_is_one_sentence(model, options, parts, capfd, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cut.gguf").write_bytes(model.read_bytes()[:-100_000])
    done = run("chat", "-m", model, "-p", "x", *options)
    assert capfd.readouterr() == ("", "")  # llama.cpp prints nothing
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr.startswith("Error: ")
    assert done.stderr.count("\n") == 1
    for part in parts:
        assert part in done.stderr


@pytest.mark.parametrize("memory", ["--ram=1GiB", "--expert-ram=800KiB"])
def test_a_file_name_may_be_any_bytes(model, tmp_path, memory):
    path = os.fsencode(tmp_path) + b"/a \n\xff\xc3\xbc.gguf"
    os.symlink(model, path)
    options = ["-p", "x", "--max-tokens=1", memory, "-m", path]
    command = [sys.executable, "-m", "orchestrator", "chat", *options]
    for name in ("C", "C.UTF-8"):
        env = {**os.environ, "LC_ALL": name, "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
        done = subprocess.run(command, cwd=REPO, env=env, stderr=subprocess.PIPE)
        assert (done.returncode, done.stderr) == (0, b"")


def test_ctrl_c_during_an_answer(model):
    config = Config.build(model=model, expert_ram=800 * 2**10, ctx=2048, seed=3, max_tokens=2000)
    with Runtime.open(config, answering=Answering()) as runtime:
        session = Session(runtime, config)
        pieces, progress = [], []
        with interrupts.calling(session.stop):
            for piece in session.answer("hello"):
                if not pieces:
                    os.kill(os.getpid(), signal.SIGINT)
                pieces.append(piece)
        assert session.stopped
        assert len(pieces) <= 2
        assert session.last_stats.finish == "cancelled"
        assert session.messages[-1]["content"] == "".join(piece.text for piece in pieces)

        def interrupt(done, total):
            progress.append((done, total))
            os.kill(os.getpid(), signal.SIGINT)

        with interrupts.calling(session.stop):
            assert list(session.answer("word " * 300, interrupt)) == []
        assert session.stopped
        assert progress[0][1] > 300
        assert len(progress) == 1
        assert len(session.messages) == 2
        assert list(session.answer("again"))
        assert session.last_stats.finish != "cancelled"


ASKED = ("--temp=0", "--threads=1", "--json", "-p", "Tell me about Norway.")


@pytest.mark.parametrize(
    ("options", "finish"),
    [
        ((), "end"),
        (("--max-tokens=3",), "length"),
        (("--stop=Sweden",), "stop"),
        (("--ctx=32",), "context"),
    ],
)
def test_statistics_say_how_an_answer_ended(options, finish):
    done = run("chat", "-m", demo_model(), *ASKED, *options)
    answer = json.loads(done.stdout)
    stats = answer["stats"]
    assert stats["finish"] == finish
    assert stats["ttft_ms"] > 0 and stats["tpot_ms_p99"] >= stats["tpot_ms_p50"] > 0
    # The end token is not counted: with this number as the limit, the text is the same.
    if finish == "end":
        cut = run("chat", "-m", demo_model(), *ASKED, f"--max-tokens={stats['tokens']}")
        assert json.loads(cut.stdout)["text"] == answer["text"]
        assert json.loads(cut.stdout)["stats"]["finish"] == "length"


QUESTION = "Where do the experts of a model lie, and who reads them? " * 6


def chat(model, *args):
    options = ("--temp=0", "--max-tokens=4", "--threads=1", "--ctx=2048")
    done = run("chat", "-m", model, *options, *args)
    return done.exit_code, done.stdout, done.stderr


def test_a_conversation_goes_on_in_another_process(model, tmp_path):
    folder = tmp_path / "prompts"
    code, out, _ = chat(model, "--prompt-cache", folder, "--json", "-p", QUESTION)
    assert code == 0
    stats = json.loads(out)["stats"]
    assert stats["evaluated_tokens"] == stats["prompt_tokens"] > 200
    code, out, said = chat(model, "--prompt-cache", folder, "--resume", "--json", "-p", "And then?")
    assert (code, said) == (0, "The conversation continues after 2 messages.\n")
    again = json.loads(out)["stats"]
    assert again["prompt_tokens"] > stats["prompt_tokens"]
    new = again["prompt_tokens"] - stats["prompt_tokens"]
    assert again["evaluated_tokens"] <= new + 1
    assert len((folder / "last.jsonl").read_text().splitlines()) == 4


def test_a_conversation_that_is_not_kept_is_reported_at_the_end(model, tmp_path):
    limit = "--prompt-cache-limit=1000B"
    code, _, said = chat(model, "--prompt-cache", tmp_path, limit, "-p", QUESTION)
    assert code == 0
    assert said.startswith("A conversation of ") and said.count("\n") == 1


def test_resume_without_a_saved_conversation_is_refused(model, tmp_path):
    code, _, said = chat(model, "--resume", "-p", "x")
    assert code == 1 and said.startswith("Error: --resume: there is no saved conversation in ")
    code, _, said = chat(model, "--resume", "--prompt-cache", tmp_path, "-p", "x")
    assert (code, said) == (1, f"Error: --resume: there is no saved conversation in {tmp_path}\n")
