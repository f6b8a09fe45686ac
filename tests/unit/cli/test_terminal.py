"""The interactive loop on a real terminal: a pseudo-terminal, a process, and keys."""

import json
import re

import fake_engine
import pytest
from pseudo_terminal import CTRL_C, CTRL_D, PROMPT, UP, Terminal


def test_a_conversation(start):
    terminal = start()
    assert "fake: 8 layers of 16 experts, 4 a token, in q4_k q2_k\n" in terminal.greeting
    assert "managed: dymoe 4/2" in terminal.greeting
    answer = terminal.ask("hello")
    line = "first word 12 ms · 48.9 tok/s · experts 93 % in memory · memory 300 MiB of 1 GiB\n"
    assert f"\nHi there!\n{line}" in answer
    assert "<more>" in terminal.ask("more")
    terminal.send(CTRL_D)
    assert terminal.finish() == 0


def test_ctrl_c_stops_the_answer_and_keeps_the_session(start, tmp_path):
    terminal = start()
    terminal.send("endless\n")
    terminal.wait("5 6 7")
    terminal.send(CTRL_C)
    stopped = terminal.wait(PROMPT)
    assert "\nstopped · first word" in stopped
    assert "Traceback" not in terminal.raw
    assert "Hi there!" in terminal.ask("hello")
    terminal.ask(f"/save {tmp_path}/talk.jsonl")
    messages = [json.loads(line) for line in (tmp_path / "talk.jsonl").open()]
    assert [message["role"] for message in messages] == ["user", "assistant"] * 2
    assert messages[1]["content"].startswith("0 1 2 3 4 5 6 7")


def test_ctrl_c_at_the_prompt_says_how_to_leave(start):
    terminal = start()
    for typed in ("", "", "half a li"):
        terminal.send(typed)
        terminal.wait(typed)
        terminal.until_it_reads()
        terminal.send(CTRL_C)
        assert "/quit or Ctrl-D leaves" in terminal.wait(PROMPT)
    assert "Hi there!" in terminal.ask("hello")


def test_ctrl_c_while_loading_leaves(tmp_path):
    with Terminal("-m", "endless.gguf", home=tmp_path) as terminal:
        terminal.wait(r"Loading 1 GiB of weights \[#+-*\] +\d+ %")
        terminal.send(CTRL_C)
        assert terminal.finish() == 130
        assert "Traceback" not in terminal.raw


def test_bars_appear_and_go(start):
    terminal = start("-m", "slow.gguf")
    assert "Loading 1 GiB of weights [" in terminal.greeting
    text = terminal.ask("slow")
    assert re.search(r"Reading 1000 tokens \[#+-*\] +\d+ %", text)
    assert terminal.raw.rindex("\r\x1b[K") < terminal.raw.rindex("read")
    assert "Reading" not in terminal.ask("hello")


@pytest.mark.parametrize(
    ("prompt", "shown"),
    [
        ("endless prompt", "Reading 1000 tokens"),
        ("one micro-batch", r"Reading 1000 tokens \[-+\]   0 %, 1 s"),
    ],
)
def test_ctrl_c_during_prefill(start, prompt, shown):
    """A prompt that is one micro-batch shows that it is read."""
    terminal = start()
    terminal.send(prompt + "\n")
    terminal.wait(shown)
    terminal.send(CTRL_C)
    assert "stopped" in terminal.wait(PROMPT)
    assert "Hi there!" in terminal.ask("hello")


def test_a_narrow_terminal_breaks_between_words(start):
    terminal = start(columns=40)
    lines = terminal.greeting.splitlines()
    assert lines[:2] == ["fake: 8 layers of 16 experts, 4 a token,", "  in q4_k q2_k"]
    assert lines[2:4] == [
        "managed: dymoe 4/2 (q4_k/q2_k) r=0.75,",
        "  64 MiB of expert slots, direct I/O",
    ]
    wide = start()
    for line in ("hello", "/help", "/stats", "/set", "/memory", "/policy"):
        said = terminal.ask(line)
        assert max(map(len, said.splitlines())) <= 40, said
        assert set(said.split()) <= {*wide.ask(line).split(), "·"}, said  # no word is broken
    assert "How it answers:\n  /temp T " in wide.ask("/help")
    assert re.search(r"Reading 1000 tokens +\d+ %", terminal.ask("slow"))  # a bar without cells


def test_the_arrow_key_brings_back_lines_of_earlier_sessions(start, tmp_path):
    terminal = start()
    terminal.ask("hello")
    terminal.send("/quit\n")
    assert terminal.finish() == 0
    history = tmp_path / ".local/state/moe-edge/history"
    assert "hello\n" in history.read_text()
    assert history.stat().st_mode & 0o077 == 0
    terminal = start()
    terminal.send(UP + UP)
    terminal.wait("hello")
    assert "Hi there!" in terminal.ask("")


def test_tab_completes_a_command(start):
    terminal = start()
    terminal.send("/ret\t")
    terminal.wait("/retention")
    assert "r=0.5" in terminal.ask("0.5")


def test_the_history_may_be_unwritable(start, tmp_path):
    (tmp_path / "state").write_text("a file, not a folder")
    terminal = start(XDG_STATE_HOME=str(tmp_path / "state"), columns=400)
    assert "History is not kept: " in terminal.greeting
    assert "Hi there!" in terminal.ask("hello")


LISTED = "/help|/regen|/read FILE|/reset|/system TEXT|/stats|/memory|/set NAME VALUE|/temp T"
LISTED += '|/model NAME|/policy NAME|/retention R|/save FILE|/quit|"""|Ctrl-C'
COMMANDS = [
    ("/help", LISTED.split("|")),
    ("/?", ["/regen", "another answer"]),
    ("/regen", ["Error: nothing was answered yet"]),
    ("/reset", ["The conversation is empty."]),
    ("/clear", ["The conversation is empty."]),
    ("/system", ["System prompt: none"]),
    ("/system Be brief.", ["The conversation is empty.", "System prompt: Be brief."]),
    ("/system -", ["System prompt: none"]),
    ("/stats", ["Nothing was answered yet."]),
    ("/memory", ["dense weights  1 GiB  12 %  #\n", "context        0 B ", "Context: 300 of"]),
    ("/policy", ["dymoe 4/2"]),
    ("/policy lru", ["managed: lru"]),
    ("/policy lur", ["Error: unknown policy 'lur'; known: dymoe, lru"]),
    ("/retention 0.5", ["It has no effect under this policy", "managed: lru"]),
    ("/policy dymoe", ["managed: dymoe"]),
    ("/retention 0.25", ["managed: dymoe r=0.25"]),
    ("/retention much", ["must be a number from 0 to 1, not 'much'"]),
    ("/temp", ["temp 0.7"]),
    ("/temp 0.25", ["temp 0.25"]),
    ("/set stop 'the end' User:", ["stop 'the end' User:"]),
    ("sampling", ["0.25 ('the end', 'User:')"]),
    ("/set stop -", ["stop -\n"]),
    ("sampling", ["0.25 ()"]),
    ("/set min-p 0.5", ["min_p 0.5"]),
    ("/set seed 7", ["seed 7"]),
    ("/set seed -", ["seed -\n"]),
    ("/set max-tokens 100", ["max_tokens 100"]),
    ("/set retention 0.75", ["managed: dymoe r=0.75"]),
    ("/set", ["min_p 0.5 ", "retention ", "max_tokens 100 ", "Temperature; 0 takes"]),
    ("/set temp hot", ["Error: the setting 'temp' must be a number from 0 to 100, not 'hot'"]),
    ("/set temp 101", ["must be 0.0 to 100.0, not 101.0"]),
    ("/set temp -", ["must be a number from 0 to 100, not '-'"]),
    ("/set tmp 1", ["Error: no setting tmp can be changed here: did you mean temp?"]),
    ("/set stop 'a", ["has a quotation mark without its other one"]),
    ("/model", ["x.gguf", "fake: 8 layers"]),
    ("/model nowhere.gguf", ["Error: ", "nowhere.gguf"]),
    ("/read", ["Error: /read needs a file name"]),
    ("/read /nowhere", ["Error: /nowhere: No such file or directory"]),
    ("/read /dev/null", ["Error: /dev/null: not a regular file"]),
    ('"""one line"""', ["<one line>"]),
    ('"""/reset"""', ["</reset>"]),
    ("/save", ["Error: /save needs a file name"]),
    ("/save /nowhere/at/all", ["Error: /nowhere/at/all: No such file or directory"]),
    ("/stat", ["Error: unknown command /stat: did you mean /stats?"]),
    ("/etc/passwd", ["Error: unknown command /etc/passwd: /help lists them (a leading space"]),
    (" /etc/passwd", ["</etc/passwd>"]),
    ("fail", ["half an\n", "Error: model.gguf: read error at offset 4096"]),
    ("silence", ["(no answer)"]),
    ("   ", []),
]


def test_every_command(start):
    terminal = start()
    for line, expected in COMMANDS:
        text = terminal.ask(line)
        for part in expected:
            assert part in text, (line, text)
    assert "experts 93 % in memory" in terminal.ask("hello")
    table = terminal.ask("/stats")
    assert re.search(r"mix +q4_k 0\.750, q2_k 0\.250\n", table)
    assert re.search(r"callback_us_p50 +11\.000", table)
    assert "Traceback" not in terminal.raw


def test_a_message_of_several_lines(start):
    terminal = start()
    terminal.send('"""first\n')
    terminal.wait(r"\. \Z")
    terminal.send("/second\n")
    terminal.wait(r"\. \Z")
    assert "<first\n/second\nthird>" in terminal.ask('third"""')
    terminal.send('"""first\n')
    terminal.wait(r"\. \Z")
    terminal.until_it_reads()
    terminal.send(CTRL_C)
    assert "leaves" in terminal.wait(PROMPT)
    assert "<again>" in terminal.ask("again")
    terminal.send('"""first\n' + CTRL_D)
    assert terminal.finish() == 0


def test_a_file_stands_before_one_message(start, tmp_path):
    terminal = start(columns=400)
    text = tmp_path / "a text.txt"
    text.write_text("Grüße\n")
    assert f"5 characters of {text} stand" in terminal.ask(f"/read {text}")
    assert "<Grüße\n\nwhat is it?>" in terminal.ask("what is it?")
    assert "<what is it?>" in terminal.ask("what is it?")
    text.write_bytes(b"ab\xff")
    assert f"Error: {text}: not a text in UTF-8, at byte 2" in terminal.ask(f"/read {text}")
    # Zeros are UTF-8, and no text; a long file of them is not to be cut to the context either.
    for data in (b"ab\0", b"ab\0" * 10**6):
        text.write_bytes(data)
        assert f"Error: {text}: not a text in UTF-8, at byte 2" in terminal.ask(f"/read {text}")
    text.write_text("x" * 10**6)
    assert f"Error: {text}: too long for the context" in terminal.ask(f"/read {text}")
    assert "<nothing was added>" in terminal.ask("nothing was added")


def test_the_statistics_line_without_unicode(start):
    terminal = start(PYTHONIOENCODING="ascii")
    assert "first word 12 ms | 48.9 tok/s" in terminal.ask("hello")


def test_save_replaces_only_its_own_file(start, tmp_path):
    terminal = start(columns=400)
    other = tmp_path / "other.txt"
    other.write_text("mine")
    terminal.ask("hello")
    wrong = "exists, and holds something else: choose another name"
    assert wrong in terminal.ask(f"/save {other}")
    assert other.read_text() == "mine"
    assert "2 messages written" in terminal.ask("/save ~/talk.jsonl")
    terminal.ask("more")
    assert "4 messages written" in terminal.ask("/save ~/talk.jsonl")
    assert len((tmp_path / "talk.jsonl").read_text().splitlines()) == 4
    # Another conversation does not take its place; the same one goes on in it, in a later run too.
    terminal.ask("/reset")
    terminal.ask("hello")
    assert wrong in terminal.ask("/save ~/talk.jsonl")
    assert len((tmp_path / "talk.jsonl").read_text().splitlines()) == 4
    terminal.ask("/load ~/talk.jsonl")
    terminal.ask("still more")
    assert "6 messages written" in terminal.ask("/save ~/talk.jsonl")


def test_what_was_forgotten_is_not_resumed(start, tmp_path):
    terminal = start("-m", "x.gguf", "--prompt-cache", str(tmp_path))
    terminal.ask("hello")
    assert (tmp_path / "last.jsonl").exists()
    terminal.ask("/reset")
    terminal.send("/quit\n")
    assert terminal.finish() == 0
    with Terminal("--prompt-cache", str(tmp_path), "--resume", home=tmp_path) as again:
        assert again.finish() == 1
        said = f"--resume: no conversation is kept in {tmp_path}"
        assert said in again.raw and "Hi there!" not in again.raw


def test_the_model_cannot_control_the_terminal(start):
    terminal = start()
    before = len(terminal.raw)
    terminal.ask("loud")
    said = terminal.raw[before:]
    assert "red[31m ]0;titlebell" in said
    for control in ("\x1b[31m", "\x1b]", "\x07", "\x9b", "\u202e"):
        assert control not in said


@pytest.mark.parametrize(
    ("environment", "coloured"), [({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)]
)
def test_no_color_is_honoured(start, environment, coloured):
    """A dumb terminal gets no bar either."""
    terminal = start("-m", "slow.gguf", **environment)
    terminal.ask("hello")
    assert bool(re.search(r"\x1b\[[0-9;]*m", terminal.raw)) == coloured
    has_bar = "TERM" not in environment
    assert ("Loading" in terminal.greeting) == ("\x1b[K" in terminal.raw) == has_bar


def test_json_needs_a_prompt(tmp_path):
    with Terminal("-m", "x.gguf", "--json", home=tmp_path) as terminal:
        assert terminal.finish() == 2
        assert "--json needs a prompt" in terminal.raw


def test_json_on_a_terminal_is_escaped(tmp_path):
    with Terminal("-m", "x.gguf", "-p", "loud", "--json", home=tmp_path) as terminal:
        assert terminal.finish() == 0
        assert json.loads(terminal.raw)["text"] == fake_engine.HOSTILE
        assert "\x9b" not in terminal.raw
        assert "\x1b" not in terminal.raw
