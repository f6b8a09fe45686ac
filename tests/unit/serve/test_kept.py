"""`serve --prompt-cache`: conversations outlive their sequence and their server."""

import json
import re
import signal
import struct
from types import SimpleNamespace

import numpy as np
import pytest
from command_line import run
from served import serving
from waiting import wait_until

from orchestrator.runtime.kept import KeptConversations
from orchestrator.runtime.prompt_copies import _FOOTER, Mark, PromptFolder

LONG = [{"role": "user", "content": "Where do the experts lie, and who reads them? " * 30}]
OTHER = [{"role": "user", "content": "What is a fox? " * 40}]
THEN = {"role": "user", "content": "And then?"}


@pytest.fixture(scope="module")
def model(library, tiny_model):
    return tiny_model("qwen3moe", "q8_0", "q4_k", seed=1)


def started(model, folder, *options):
    usual = ("-m", str(model), "--ctx", "2048", "--temp", "0", "--cache-ram", "0")
    folder.parent.mkdir(exist_ok=True)
    return serving(folder.parent, *usual, "--prompt-cache", str(folder), *options)


def asked(server, messages):
    """(answer with its probabilities, number of prompt tokens that were read, number of all prompt
    tokens)."""
    asked = {"messages": messages, "max_tokens": 4, "logprobs": True, "top_logprobs": 2}
    answer = server.post("/v1/chat/completions", asked)
    timings, (choice,) = answer["timings"], answer["choices"]
    said = choice["message"]["content"], choice["logprobs"]["content"]
    return said, timings["prompt_n"], timings["prompt_n"] + timings["cache_n"]


def going_on(messages, said):
    return [*messages, {"role": "assistant", "content": said[0]}, THEN]


def files(folder):
    return sorted(folder.glob("*.prompt"))


@pytest.mark.parametrize("options", [(), ("--policy", "lru")])
def test_long_prompts_survive_a_kill(model, tmp_path, options):
    """After SIGKILL, the next server reads only the new tokens and gives the same bits. `chat` uses
    the same files."""
    folder = tmp_path / "prompts"
    with started(model, folder, *options) as server:
        said, n_read, n = asked(server, LONG)
        assert n_read == n > 1024
        wait_until(lambda: files(folder), "no file was written")
        live, n_new, _ = asked(server, going_on(LONG, said))
        assert server.end(signal.SIGKILL)[0] == -signal.SIGKILL
    with started(model, folder, *options) as server:
        again, n_again, n_all = asked(server, going_on(LONG, said))
        assert (again, n_again) == (live, n_new) and n_all > n > 10 * n_new
    options = ["--temp=0", "--max-tokens=4", "--ctx=2048", "--prompt-cache", str(folder), "--json"]
    done = run("chat", "-m", model, *options, "-p", LONG[0]["content"])
    assert done.exit_code == 0 and json.loads(done.stdout)["stats"]["evaluated_tokens"] < 20


@pytest.mark.parametrize("parallel", [1, 2])
def test_a_conversation_returns_after_others_used_its_sequence(model, tmp_path, parallel):
    folder = tmp_path / "prompts"
    with started(model, folder, "--parallel", str(parallel)) as server:
        said, _, n_long = asked(server, LONG)
        others = [[{**OTHER[0], "content": f"{n} {OTHER[0]['content']}"}] for n in range(parallel)]
        for other in others:
            assert asked(server, other)[1] > 100
        _, n_read, n = asked(server, going_on(LONG, said))
        assert n_read <= n - n_long + 1
        status, text = server.end(signal.SIGTERM)
        assert status == 0 and "still working" not in text
    # Also after a restart.
    with started(model, folder) as server:
        for other in others:
            assert asked(server, other)[1] == 1


def text(about):
    return f"{about}: where do the experts lie, and who reads them? " * 8


# The same question in each form of request, and several prompts or answers at once.
FORMS = [
    ("/v1/messages", {"messages": [{"role": "user", "content": text("one")}], "max_tokens": 2}),
    ("/v1/responses", {"input": text("two"), "max_output_tokens": 2}),
    ("/api/chat", {"messages": [{"role": "user", "content": text("three")}], "stream": False}),
    ("/v1/chat/completions", {"messages": OTHER, "n": 2, "max_tokens": 2}),
    ("/v1/completions", {"prompt": [text("four"), text("five")], "max_tokens": 2}),
]


def n_read(server, path, data):
    """Number of prompt tokens that are read for this request."""

    def count():
        (found,) = re.findall(r"^llamacpp:prompt_tokens_total (\d+)", server.get("/metrics"), re.M)
        return int(found)

    before = count()
    server.post(path, {"model": "any", "options": {"num_predict": 2}, **data})
    return count() - before


def test_every_form_of_a_request_comes_back(model, tmp_path):
    folder = tmp_path / "prompts"
    with started(model, folder, "--parallel", "2") as server:
        first = [n_read(server, *each) for each in FORMS]
        assert min(first) > 100
        assert server.end(signal.SIGTERM)[0] == 0
    with started(model, folder, "--parallel", "2") as server:
        again = [n_read(server, *each) for each in FORMS]
    # the last token of each prompt, and the end of a turn in the chat template
    assert max(again) <= 4, again


def test_a_file_too_long_for_the_context_is_kept(model, tmp_path):
    folder = tmp_path / "prompts"
    with started(model, folder) as server:
        said, _, n = asked(server, LONG)
        server.end(signal.SIGTERM)
    (path,) = files(folder)
    with started(model, folder, "--ctx", "512") as server:
        short = [{**LONG[0], "content": LONG[0]["content"][:500]}]
        assert asked(server, short)[1] > 50
        assert server.end(signal.SIGTERM)[1].count(f"{path}: no memory for this kept") == 1
    with started(model, folder) as server:
        assert asked(server, going_on(LONG, said))[1] < n // 10


def test_a_conversation_is_saved_although_llama_cpp_was_ending(tmp_path):
    """llama.cpp saves nothing while it ends. After its end, the conversation is saved."""
    tokens = list(range(2000))
    data = struct.pack("<III2000i8x", 0x67677371, 3, len(tokens), *tokens)

    class Native:
        needs_checkpoints, is_ending = False, True

        def match(self, sequence, prompt):
            return 0, False

        def tokens(self, sequence):
            return tokens

        def save(self, sequence, path):
            if self.is_ending:
                return 0, 0, []
            return path.write_bytes(data), len(tokens), []

    native, driver = Native(), SimpleNamespace(save_sequence=lambda sequence: None)
    kept = KeptConversations(PromptFolder(tmp_path, 1 << 20), "a", driver, native, "saves", print)
    kept.before_prompt(0, tokens)
    kept.answered([0], is_good=True)
    kept.thread.submit(lambda: None).result()
    assert files(tmp_path) == []
    native.is_ending = False
    kept.leave(None)
    assert len(files(tmp_path)) == 1


def test_damaged_files_and_files_above_the_limit_are_read_again(model, tmp_path):
    folder = tmp_path / "prompts"
    with started(model, folder) as server:
        fresh = asked(server, OTHER)
        server.end(signal.SIGTERM)
    (path,) = files(folder)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with started(model, folder, "--prompt-cache-limit", "1000B") as server:
        assert asked(server, OTHER) == fresh
        for other in (LONG, OTHER, LONG):
            asked(server, other)
        text = server.end(signal.SIGTERM)[1]
    assert f"{path}: this kept conversation is damaged, so it was removed." in text
    assert text.count("is not kept: it is more than --prompt-cache-limit") >= 1
    assert files(folder) == []


def test_a_truncated_state_is_read_again(model, tmp_path):
    """A file with a correct hash and a truncated state is ignored, and the prompt is read again."""
    folder = tmp_path / "prompts"
    with started(model, folder) as server:
        fresh = asked(server, OTHER)
        server.end(signal.SIGTERM)
    (path,) = files(folder)
    whole = path.read_bytes()
    _, n_description, _, _ = _FOOTER.unpack(whole[-_FOOTER.size :])
    kept = json.loads(whole[-_FOOTER.size - n_description : -_FOOTER.size])
    n_tokens = int.from_bytes(whole[8:12], "little")
    tokens = np.frombuffer(whole[12 : 12 + 4 * n_tokens], "<i4")
    n_cut = len(whole) // 2
    path.unlink()

    def write(to):
        to.write_bytes(whole[:n_cut])
        return n_cut

    PromptFolder(folder, 1 << 30).save(kept["key"], tokens, kept["has_part"], (), write)
    assert len(files(folder)) == 1
    with started(model, folder) as server:
        assert asked(server, OTHER) == fresh
        assert server.end(signal.SIGTERM)[0] == 0


@pytest.mark.parametrize(
    ("n_tokens", "marks"),
    [((1 << 21) + 1, ()), (20, [Mark(float("inf"), None, None)])],
    ids=["more tokens than any context", "a length without end"],
)
def test_a_file_that_claims_too_much_is_damaged(tmp_path, n_tokens, marks):
    head = struct.pack("<III", 0x67677371, 3, n_tokens)

    def write(to):
        to.write_bytes(head + bytes(4 * n_tokens))
        return len(head) + 4 * n_tokens

    folder = PromptFolder(tmp_path, 1 << 30)
    folder.save("key", range(20), False, marks, write)
    assert folder.of("key") == [] and files(tmp_path) == []
    assert "this kept conversation is damaged, so it was removed." in folder.notes[0]


def test_an_unwritable_folder_is_reported_once(model, tmp_path):
    folder = tmp_path / "prompts"
    with started(model, folder) as server:
        folder.rmdir()
        for messages in (OTHER, LONG, OTHER):
            asked(server, messages)
        assert server.end(signal.SIGTERM)[1].count("no conversation is kept there") == 1


@pytest.mark.parametrize("way", ["the client leaves", "the server ends"])
def test_a_partly_read_prompt_is_not_kept_as_complete(model, tmp_path, way):
    folder = tmp_path / "prompts"
    with started(model, folder) as server:
        fresh = asked(server, LONG)
    for path in files(folder):
        path.unlink()
    slow = {"messages": LONG, "max_tokens": 4, "stream": True, "return_progress": True}
    with started(model, folder, "--ubatch", "32") as server:
        asked(server, OTHER)
        connection = server.asked("/v1/chat/completions", slow)
        assert b"prompt_progress" in connection.getresponse().readline()
        if way == "the client leaves":
            connection.close()
        server.end(signal.SIGTERM)
    with started(model, folder) as server:
        assert asked(server, LONG)[0][0] == fresh[0][0]
