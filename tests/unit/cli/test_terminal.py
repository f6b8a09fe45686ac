"""Interactive chat on a pseudo-terminal, with a process and keys."""

import json
import re
import subprocess

import fake_runtime
import pytest
from pictures import black
from pseudo_terminal import CTRL_C, CTRL_D, ESCAPES, FAKE, PROMPT, UP, Terminal
from tables import cases

from gguf_tools import synthetic
from orchestrator.chat.console import WordWrap


def test_a_conversation(start):
    terminal = start()
    shown = "fake: 8 layers of 16 experts, 4 used per token; precisions: q4_k q2_k\n"
    assert shown in terminal.greeting
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


def test_ctrl_c_while_loading_exits(tmp_path):
    with Terminal("-m", "endless.gguf", home=tmp_path) as terminal:
        terminal.wait(r"Loading 1 GiB of weights \[#+-*\] +\d+ %")
        terminal.send(CTRL_C)
        assert terminal.finish() == 130
        assert "Traceback" not in terminal.raw


def test_a_narrow_terminal_breaks_between_words(start):
    terminal = start(columns=40)
    lines = terminal.greeting.splitlines()
    lines = lines[lines.index("fake: 8 layers of 16 experts, 4 used per") :]
    assert lines[:2] == [
        "fake: 8 layers of 16 experts, 4 used per",
        "  token; precisions: q4_k q2_k",
    ]
    assert lines[2:4] == [
        "managed: dymoe 4/2 (q4_k/q2_k) r=0.75,",
        "  64 MiB for experts, direct I/O",
    ]
    wide = start()
    for line in ("hello", "/help", "/stats", "/set", "/memory", "/policy"):
        said = terminal.ask(line)
        assert max(map(len, said.splitlines())) <= 40, said
        assert set(said.split()) <= {*wide.ask(line).split(), "·"}, said  # no word is broken
    assert "How it answers:\n  /temp T " in wide.ask("/help")
    assert re.search(r"Reading 1000 tokens +\d+ %", terminal.ask("slow"))  # without space for a bar


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


PASTE = "\x1b[200~{}\x1b[201~"
MORE = re.compile(r"\. \Z")  # prompt for further lines of a message
TEXT, STOPPED = re.compile("5 6 7"), re.compile(r"stopped(.*\n)*> \Z")
LEAVES = re.compile(r"/quit or Ctrl-D leaves(.*\n)*> \Z")
AT_PROMPT = (Terminal.until_it_reads, None)
# (keys, expected result): a text before the next prompt, or a regular expression for the whole
# output, or the exit status.
TALKS = {
    "Ctrl-C at the prompt says how to leave": [
        *[(CTRL_C, LEAVES) if step else AT_PROMPT for _ in range(2) for step in (0, 1)],
        *[("half a li", re.compile("half a li")), AT_PROMPT, (CTRL_C, LEAVES)],
        ("hello", "Hi there!"),
    ],
    "Ctrl-C while a prompt is read": [
        ("endless prompt\n", re.compile("Reading 1000 tokens")),
        *[(CTRL_C, STOPPED), ("hello", "Hi there!")],
    ],
    "a prompt that is one micro-batch shows its layers": [
        ("one micro-batch\n", re.compile(r"Reading 1000 tokens \[#+-+\]  70 %")),
        *[(CTRL_C, STOPPED), ("hello", "Hi there!")],
    ],
    "Tab completes a command": [("/ret\t", re.compile("/retention")), ("0.5", "r=0.5")],
    "a message of several lines": [
        *[('"""first\n', MORE), ("/second\n", MORE), ('third"""', "<first\n/second\nthird>")],
        *[('"""first\n', MORE), AT_PROMPT, (CTRL_C, LEAVES), ("again", "<again>")],
        ('"""first\n' + CTRL_D, 0),
    ],
    "a paste of several lines is one message": [
        (PASTE.format("/first\r\r\tsecond"), re.compile("second")),
        ("!\n", re.compile(r"</first\n\n(\t| {7,8})second!>(.*\n)*> \Z")),
        *[("hello", "Hi there!"), (UP + UP, re.compile("second")), ("", "second!>")],
    ],
    "a paste may hold a quoted message": [
        (PASTE.format('"""one\rtwo"""'), re.compile("two")),
        ("", "<one\ntwo>"),
    ],
    "Ctrl-C forgets what was typed ahead": [
        *[("endless\n", TEXT), ("hello\n" + CTRL_C, STOPPED), ("again", "<again>")]
    ],
}


@pytest.mark.parametrize("name", TALKS)
def test_keys(start, name):
    terminal = start()
    # Terminals mark pasted text only if asked to.
    assert "\x1b[?2004h" in terminal.raw
    for keys, brings in TALKS[name]:
        if callable(keys):
            keys(terminal)
        elif isinstance(brings, str):
            assert brings in terminal.ask(keys)
        else:
            terminal.send(keys)
            assert terminal.finish() == brings if brings == 0 else terminal.wait(brings)


def test_the_history_may_be_unwritable(start, tmp_path):
    (tmp_path / "state").write_text("a file, not a folder")
    terminal = start(XDG_STATE_HOME=str(tmp_path / "state"), columns=400)
    assert "The history of typed lines is not kept: " in terminal.greeting
    assert "Hi there!" in terminal.ask("hello")


LISTED = "/help|/regen|/read FILE|/image FILE|/reset|/system TEXT|/stats|/memory|/temp T"
LISTED += '|/set NAME VALUE|/model NAME|/policy NAME|/retention R|/save FILE|/quit|"""|Ctrl-C'
COMMANDS = [
    ("/help", LISTED.split("|")),
    ("/?", ["/regen", "replace the last answer"]),
    ("/regen", ["Error: nothing was answered yet"]),
    ("/reset", ["The conversation is empty."]),
    ("/clear", ["The conversation is empty."]),
    ("/system", ["System prompt: none"]),
    ("/system Be brief.", ["The conversation is empty.", "System prompt: Be brief."]),
    ("/system -", ["System prompt: none"]),
    ("/stats", ["Nothing was answered yet."]),
    ("/memory", ["dense weights  1 GiB  12 %  #\n", "context        0 B ", "Context: 0 of"]),
    ("/policy", ["dymoe 4/2"]),
    ("/policy lru", ["managed: lru"]),
    ("/policy lur", ["Error: unknown policy 'lur'; known: dymoe, lru"]),
    ("/retention 0.5", ["retention has no effect with the current policy", "managed: lru"]),
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
    ("/set", ["min_p 0.5 ", "retention ", "max_tokens 100 ", "Temperature; 0 is greedy"]),
    ("/set temp hot", ["Error: the setting 'temp' must be a number from 0 to 100, not 'hot'"]),
    ("/set temp 101", ["must be 0.0 to 100.0, not 101.0"]),
    ("/set temp -", ["must be a number from 0 to 100, not '-'"]),
    (
        "/set tmp 1",
        ["Error: tmp is not a setting that can be changed during a chat: did you mean temp?"],
    ),
    ("/set stop 'a", ["has an unmatched quotation mark"]),
    ("/model", ["x.gguf", "fake: 8 layers"]),
    ("/model nowhere.gguf", ["Error: ", "nowhere.gguf"]),
    ("/read", ["Error: /read needs a file name"]),
    ("/read /nowhere", ["Error: /nowhere: No such file or directory"]),
    ("/read /dev/null", ["Error: /dev/null: not a regular file"]),
    ("/image", ["Error: /image needs a file name"]),
    ("/image /nowhere", ["Error: /nowhere: No such file or directory"]),
    ("/image /dev/null", ["Error: /dev/null: not a regular file"]),
    ("/image /etc/passwd", ["Error: /etc/passwd: this is neither PNG nor JPEG: convert it to PNG"]),
    ("/image -", ["Your next message will have no images."]),
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


def test_read_adds_a_file_to_the_next_message(start, tmp_path):
    terminal = start(columns=400)
    text = tmp_path / "a text.txt"
    text.write_text("Grüße\n")
    assert f"The 5 characters of {text} will" in terminal.ask(f"/read {text}")
    assert "<Grüße\n\nwhat is it?>" in terminal.ask("what is it?")
    assert "<what is it?>" in terminal.ask("what is it?")
    text.write_bytes(b"ab\xff")
    assert f"Error: {text}: not UTF-8 text (byte 0xff at offset 2)" in terminal.ask(f"/read {text}")
    # Zero bytes are valid UTF-8, but a file with them is not text. This is checked before its
    # length.
    for data in (b"ab\0", b"ab\0" * 10**6):
        text.write_bytes(data)
        assert f"Error: {text}: not UTF-8 text (byte 0x00 at offset 2)" in terminal.ask(
            f"/read {text}"
        )
    text.write_text("x" * 10**6)
    assert f"Error: {text}: the file is too long for the context" in terminal.ask(f"/read {text}")
    assert "<nothing was added>" in terminal.ask("nothing was added")


def test_an_image_is_sent_with_the_next_message(start, tmp_path):
    terminal = start(columns=400)
    image = tmp_path / "a (first) photo.png"
    image.write_bytes(black())
    assert "[image: a (first) photo.png, 4x3]" in terminal.ask(f"/image {image}")
    assert "I see 1 images" in terminal.ask("shown")
    assert "I see 1 images" in terminal.ask("shown")
    # Terminals write the name of a dropped file in these ways.
    escaped = re.sub(r"([ ()])", r"\\\1", str(image))
    for line in (f"{image}", f"'{image}'", f'"{image}"', escaped, f"  {image} ", image.as_uri()):
        assert terminal.ask(line).count("[image: a (first) photo.png, 4x3]") == 1
    assert terminal.ask(f"'{image}' {escaped}").count("[image: ") == 2
    assert "I see 9 images" in terminal.ask("shown")
    assert "I see 9 images" in terminal.ask("/regen")
    other = tmp_path / "a.gif"
    other.write_bytes(b"GIF89a" + bytes(20))
    assert "Error: " in (said := terminal.ask(str(other)))
    assert "a.gif: this is a GIF image: convert it to PNG or JPEG" in said
    assert f"<look at {image}>" in terminal.ask(f"look at {image}")
    terminal.ask(f"/image {image}")
    assert "no images" in terminal.ask("/image -")
    saved = tmp_path / "talk.jsonl"
    terminal.ask(f"/save {saved}")
    terminal.ask("/reset")
    assert "I see 0 images" in terminal.ask("shown")
    terminal.ask(f"/load {saved}")
    assert "I see 9 images" in terminal.ask("shown")
    terminal.send(CTRL_D)
    assert terminal.finish() == 0
    resumed = start("-m", "x.gguf", "--resume", columns=400)
    assert "I see 9 images" in resumed.ask("shown")


def test_images_of_the_command_belong_to_the_first_message(start, tmp_path):
    (tmp_path / "a.png").write_bytes(black())
    terminal = start("-m", "x.gguf", "--image", str(tmp_path / "a.png"))
    assert "[image: a.png, 4x3]" in terminal.greeting
    assert "I see 1 images" in terminal.ask("shown")


def test_save_replaces_only_its_own_file(start, tmp_path):
    terminal = start(columns=400)
    other = tmp_path / "other.txt"
    other.write_text("mine")
    terminal.ask("hello")
    wrong = "exists and does not contain an earlier state of this conversation: choose another name"
    assert wrong in terminal.ask(f"/save {other}")
    assert other.read_text() == "mine"
    assert "2 messages written" in terminal.ask("/save ~/talk.jsonl")
    terminal.ask("more")
    assert "4 messages written" in terminal.ask("/save ~/talk.jsonl")
    assert len((tmp_path / "talk.jsonl").read_text().splitlines()) == 4
    # Another conversation does not replace it. The same one is continued, also in a later run.
    terminal.ask("/reset")
    terminal.ask("hello")
    assert wrong in terminal.ask("/save ~/talk.jsonl")
    assert len((tmp_path / "talk.jsonl").read_text().splitlines()) == 4
    terminal.ask("/load ~/talk.jsonl")
    terminal.ask("still more")
    assert "6 messages written" in terminal.ask("/save ~/talk.jsonl")


def test_a_reset_conversation_is_not_resumed(start, tmp_path):
    terminal = start("-m", "x.gguf", "--prompt-cache", str(tmp_path))
    terminal.ask("hello")
    assert (tmp_path / "last.jsonl").exists()
    terminal.ask("/reset")
    terminal.send("/quit\n")
    assert terminal.finish() == 0
    with Terminal("--prompt-cache", str(tmp_path), "--resume", home=tmp_path) as again:
        assert again.finish() == 1
        said = f"--resume: there is no saved conversation in {tmp_path}"
        assert said in again.raw and "Hi there!" not in again.raw


def kept_by(folder):
    return sorted((folder / ".cache" / "moe-edge" / "conversations").glob("*"))


def test_a_chat_is_kept_and_resumed_without_any_option(start, tmp_path, monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME")
    terminal = start()
    assert "Chats are saved for --resume" in terminal.greeting
    assert kept_by(tmp_path) == []  # nothing has been said yet
    terminal.ask("hello")
    (path,) = kept_by(tmp_path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    terminal.send(CTRL_D)
    assert terminal.finish() == 0
    other = start()
    assert "Chats are saved" not in other.greeting  # shown only once
    other.ask("more")
    assert len(kept_by(tmp_path)) == 2
    again = start("-m", "x.gguf", "--resume")
    assert "The conversation continues after 2 messages." in again.greeting
    again.ask("hello")
    path = max(kept_by(tmp_path), key=lambda each: each.stat().st_mtime_ns)
    assert len(kept_by(tmp_path)) == 2 and len(path.read_text().splitlines()) == 4
    assert "<more>" in path.read_text()
    # A conversation that was reset is deleted.
    again.ask("/reset")
    assert len(kept_by(tmp_path)) == 1


@cases(
    "args, stdin",
    ("--no-keep-messages", None),
    ("-p hello", b""),
    ("--json", b"hello"),
    ("", b"hello"),
)
def test_chats_that_are_not_saved(start, tmp_path, monkeypatch, args, stdin):
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    args = ("-m", "x.gguf", *args.split())
    if stdin is None:
        terminal = start(*args)
        assert "Chats are saved" not in terminal.greeting
        terminal.ask("hello")
    else:
        done = subprocess.run([*FAKE, "chat", *args], input=stdin, capture_output=True, check=True)
        assert done.stdout and done.stderr == b""
    assert kept_by(tmp_path) == []


def test_an_answer_may_go_on_from_the_last_chat(start, tmp_path, monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    command = [*FAKE, "chat", "-m", "x.gguf", "--resume", "-p", "hello"]
    done = subprocess.run(command, capture_output=True, text=True)
    folder = tmp_path / ".cache" / "moe-edge" / "conversations"
    assert done.returncode == 1
    assert done.stderr == f"Error: --resume: there is no saved conversation in {folder}\n"
    start().ask("hello")
    (path,) = kept_by(tmp_path)
    before = path.read_text()
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stderr == "The conversation continues after 2 messages.\n"
    assert path.read_text() == before and kept_by(tmp_path) == [path]


def test_the_model_cannot_control_the_terminal(start):
    terminal = start()
    before = len(terminal.raw)
    terminal.ask("loud")
    said = terminal.raw[before:]
    assert "red[31m ]0;titlebell" in said
    for control in ("\x1b[31m", "\x1b]", "\x07", "\x9b", "\u202e"):
        assert control not in said


@cases("environment, coloured", ({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False))
def test_no_color_is_honoured(start, environment, coloured):
    """A dumb terminal gets no progress bar either."""
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
        assert json.loads(terminal.raw)["text"] == fake_runtime.HOSTILE
        assert "\x9b" not in terminal.raw
        assert "\x1b" not in terminal.raw


def test_keys_typed_ahead_wait_for_the_prompt(start):
    terminal = start()
    terminal.send("long\n")
    terminal.wait("5 6 7")
    terminal.send("hello\x7f\x7fp me\n")
    # Keys typed during an answer are read at the prompt, including deletions.
    answer = terminal.wait(r"<help me>\n(.+\n)+\n> \Z").partition("first word")[0]
    assert "498 499" in answer and "hel" not in answer
    assert "Hi there!" in terminal.ask("hello")


def test_one_answer_is_wrapped_and_has_its_statistics_and_json_is_not(tmp_path):
    args = ("-m", "x.gguf", "-p", "words")
    with Terminal(*args, home=tmp_path) as terminal:
        assert terminal.finish() == 0
        said, _, statistics = ESCAPES.sub("", terminal.raw).partition("\r\nfirst word")
        assert "\r\n" in said and statistics.startswith(" 12 ms · ")
    with Terminal(*args, "--json", home=tmp_path) as terminal:
        assert terminal.finish() == 0
        assert terminal.raw.count("\n") == 1


CODE = "```\nsome code that is long\n```\n"


def wrapped(text, width, by=1):
    wrap = WordWrap(lambda: width)
    pieces = [text[i : i + by] for i in range(0, len(text), by)]
    return "".join(map(wrap.feed, pieces)) + wrap.end()


@cases(
    "text, width, expected",
    ("one two three", 7, "one two\nthree"),
    ("one two three", 8, "one two\nthree"),
    ("one  two", 5, "one\ntwo"),
    ("  indented words", 10, "  indented\nwords"),
    ("a verylongword b", 6, "a\nverylongword b"),
    ("one\ntwo three", 9, "one\ntwo three"),
    ("ends with a space ", 80, "ends with a space "),
    ("日本語日本語", 7, "日本語\n日本語"),
    ("a\tb cd", 9, "a\tb\ncd"),
    (f"{CODE}and words", 8, f"{CODE}and\nwords"),
    ("  ```\nx = 1  # y\n  ```\nwords are", 8, "  ```\nx = 1  # y\n  ```\nwords\nare"),
    ("a `` b ``` c", 6, "a `` b\n``` c"),
)
def test_wrapping(text, width, expected):
    for by in (1, 3, 100):
        assert wrapped(text, width, by) == expected


def test_a_word_is_shown_as_soon_as_it_ends():
    wrap = WordWrap(lambda: 80)
    assert [wrap.feed(piece) for piece in ("He", "llo wor", "ld.\n", "x")] == [
        *("", "Hello", " world.\n", "")
    ]


def test_another_model_goes_on_with_the_conversation(start, tmp_path):
    synthetic.write(tmp_path / "other.gguf", "tiny-olmoe")
    terminal = start()
    terminal.ask("hello")
    terminal.ask("/temp 0.5")
    said = terminal.ask(f"/model {tmp_path}/other.gguf")
    assert "fake other: 8 layers" in said
    assert "0.5 ()" in terminal.ask("sampling")
    assert "4 messages written" in terminal.ask("/save ~/talk.jsonl")


def test_reasoning_is_dim_and_before_the_answer(start):
    terminal = start()
    terminal.ask("think")
    assert "\x1b[2mIs it so?\x1b[0m\r\n\r\nIt is.\r\n" in terminal.raw
