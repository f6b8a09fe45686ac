"""`--prompt-cache` and `--resume` over the real engine: conversations outlive their process."""

import json

import pytest
from command_line import run

QUESTION = "Where do the experts of a model lie, and who reads them? " * 6


@pytest.fixture(scope="module")
def model(library, tiny_model):
    return tiny_model("qwen3moe", "q8_0", "q4_k", seed=1)


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
    assert (code, said) == (0, "It goes on behind 2 messages.\n")
    again = json.loads(out)["stats"]
    assert again["prompt_tokens"] > stats["prompt_tokens"]
    new = again["prompt_tokens"] - stats["prompt_tokens"]
    assert again["evaluated_tokens"] <= new + 1
    assert len((folder / "last.jsonl").read_text().splitlines()) == 4


def test_what_could_not_be_kept_is_said_at_the_end(model, tmp_path):
    limit = "--prompt-cache-limit=1000"
    code, _, said = chat(model, "--prompt-cache", tmp_path, limit, "-p", QUESTION)
    assert code == 0
    assert said.startswith("A conversation of ") and said.count("\n") == 1


def test_there_is_something_to_resume(model, tmp_path):
    code, _, said = chat(model, "--resume", "-p", "x")
    assert code == 2 and "--prompt-cache DIR" in said
    code, _, said = chat(model, "--resume", "--prompt-cache", tmp_path, "-p", "x")
    assert (code, said) == (1, f"Error: --resume: no conversation is kept in {tmp_path}\n")
