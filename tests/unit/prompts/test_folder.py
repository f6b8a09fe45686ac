"""Conversations on disk: complete files, verified before use, within a size limit."""

import errno
import os
import struct
import time
from typing import NamedTuple

import numpy as np
import pytest
from killing import calls_of, killed, moments
from repacking import flip
from tables import cases

from orchestrator.errors import ConfigError
from orchestrator.runtime.prompt_copies import Mark, PromptFolder, usable

KEY = "a key"
TURNS = 6
ROOMY = 1 << 30


class Turn(NamedTuple):
    """The content of a sequence after a turn of a conversation."""

    tokens: np.ndarray
    marks: tuple[Mark, ...]
    key: str = KEY

    @property
    def state(self):
        return state_of(self.tokens)

    def save(self, folder):
        def write(path):
            head = struct.pack("<III", 0x67677371, 3, len(self.tokens))
            return path.write_bytes(head + self.tokens.tobytes() + self.state.tobytes())

        has_part = any(mark.part is not None for mark in self.marks)
        folder.save(self.key, self.tokens, has_part, self.marks, write)


def made(conversation, turn):
    """A turn of a conversation. Its state and parts are computed from its tokens."""
    tokens = np.arange(20 * (turn + 1), dtype=np.int32) + 1000 * conversation
    return Turn(tokens, (Mark(10, state_of(tokens[:10]), b"learned"),))


def state_of(tokens):
    seed = np.random.default_rng(int(tokens.sum()) + len(tokens))
    return seed.integers(0, 256, 300_000, dtype=np.uint8)


def write(path):
    """Write the turns of two conversations alternately, with a limit for two files."""
    folder = PromptFolder(path, 1 << 21)
    for number in range(2 * TURNS):
        made(number % 2, number // 2).save(folder)


TICK_S = 0.02  # more than the resolution of file times


def turn_of(tokens, *marks, key=KEY):
    return Turn(np.array(tokens, np.int32), marks, key)


def read(folder, listed, most=ROOMY):
    """(state in the file, marks), or None if the file cannot be used."""
    states = []

    def take(path):
        states.append(np.fromfile(path, np.uint8)[12 + 4 * len(listed.tokens) : listed.state_end])
        return True

    marks = folder.load(listed, most, take)
    return None if marks is None else (states[0], marks)


def test_a_saved_sequence_is_read_back(tmp_path):
    part = np.arange(200, dtype=np.uint8)
    marks = Mark(2, part, None), Mark(3, None, b"policy"), Mark(5, part + 1, b"")
    turn = turn_of([7, 8, 9, 10, 11, 12], *marks)
    turn.save(PromptFolder(tmp_path, ROOMY))
    folder = PromptFolder(tmp_path, ROOMY)
    (listed,) = folder.of(KEY)
    assert listed.tokens.tolist() == [7, 8, 9, 10, 11, 12]
    assert [listed.usable(n) for n in (6, 5, 4, 3, 2, 1)] == [6, 5, 2, 2, 2, 0]
    # Without parts at marks, a sequence can be cut at any token.
    assert [usable(3, False, (), n) for n in (4, 3, 2)] == [3, 3, 2]
    state, found = read(folder, listed)
    np.testing.assert_array_equal(state, turn.state)
    assert [(m.length, m.policy) for m in found] == [(2, None), (3, b"policy"), (5, b"")]
    np.testing.assert_array_equal(found[2].part, part + 1)
    assert [m.length for m in read(folder, listed, 250)[1]] == [3, 5]
    assert listed.path.stat().st_mode & 0o777 == 0o600
    assert folder.of("another key") == []
    assert folder.notes == []


@cases(
    "damage, at",
    *[(flip, at) for at in (0, 9, 14, 50_000, -1000, -300, -60, -45, -10, -1)],
    *[(os.truncate, size) for size in (0, 10, 1000, 300_000)],
)
def test_every_damage_is_found(tmp_path, damage, at):
    folder = PromptFolder(tmp_path, ROOMY)
    made(0, 1).save(folder)
    (path,) = tmp_path.iterdir()
    damage(path, at)
    assert all(read(folder, listed) is None for listed in folder.of(KEY))
    assert not path.exists()
    (note,) = folder.notes
    assert note == f"{path}: this kept conversation is damaged, so it was removed."
    assert folder.of(KEY) == []


def test_a_file_under_anothers_name_is_dropped(tmp_path):
    folder = PromptFolder(tmp_path, ROOMY)
    turn_of([1, 2, 3], key="one").save(folder)
    (path,) = tmp_path.iterdir()
    turn_of([1, 2, 3], key="two").save(folder)
    (other,) = set(tmp_path.iterdir()) - {path}
    os.replace(path, other)
    assert folder.of("two") == []
    assert len(folder.notes) == 1


def test_other_files_in_the_folder_are_kept(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "x.prompt").write_text("mine")
    folder = PromptFolder(tmp_path, 1 << 20)
    for number in range(3):
        made(number, 0).save(folder)
    assert {"notes.txt", "x.prompt"} < {path.name for path in tmp_path.iterdir()}


def test_a_longer_turn_replaces_a_shorter_one(tmp_path):
    folder = PromptFolder(tmp_path, ROOMY)
    for conversation, turn in ((0, 0), (1, 3), (0, 1), (0, 2)):
        made(conversation, turn).save(folder)
    assert sorted(len(each.tokens) for each in folder.of(KEY)) == [60, 80]


def test_the_least_recently_used_go_first(tmp_path):
    folder = PromptFolder(tmp_path, 2_000_000)  # three files of 600 kB each
    for number in range(3):
        made(number, 0).save(folder)
        time.sleep(TICK_S)
    oldest = folder.of(KEY)[-1]
    assert oldest.tokens[0] == 0
    assert read(folder, oldest) is not None
    time.sleep(TICK_S)
    made(3, 0).save(folder)
    assert [int(each.tokens[0]) // 1000 for each in folder.of(KEY)] == [3, 0, 2]
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 2_000_000


def test_a_conversation_above_the_limit_is_not_kept(tmp_path):
    folder = PromptFolder(tmp_path, 100_000)
    made(0, 0).save(folder)
    assert list(tmp_path.iterdir()) == []
    (note,) = folder.notes
    assert "--prompt-cache-limit" in note


def test_a_file_that_does_not_fit_the_context_is_kept(tmp_path):
    made(0, 0).save(PromptFolder(tmp_path, ROOMY))
    folder = PromptFolder(tmp_path, ROOMY)
    (listed,) = folder.of(KEY)
    assert folder.load(listed, ROOMY, lambda _path: False) is None
    assert folder.notes == [
        f"{listed.path}: no memory for this kept conversation, so its tokens are computed again."
    ]
    assert folder.of(KEY) == []  # it would be tried again for each request
    (again,) = PromptFolder(tmp_path, ROOMY).of(KEY)
    assert read(folder, again) is not None


@cases(
    "name, said",
    ("file", "file is a file, or is inside a file: name a folder"),
    ("file/below", "below is a file, or is inside a file: name a folder"),
    ("x" * 300, "File name too long: name a folder that can be made and written"),
)
def test_a_path_that_is_not_a_folder_is_refused(name, said, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=said):
        PromptFolder(tmp_path / name, ROOMY)


def test_a_failed_write_is_reported_with_the_systems_reason(tmp_path, monkeypatch):
    """The note has the system's reason, because llama.cpp reports only that writing failed."""

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    folder = PromptFolder(tmp_path, ROOMY)
    folder.save(KEY, [1, 2, 3], False, (), lambda _path: 0)
    assert folder.notes == [
        f"{tmp_path}: No space left on device: no conversation is kept there. Free space or allow "
        f"writing, or name another folder with --prompt-cache."
    ]
    assert list(tmp_path.iterdir()) == []


def test_a_failed_write_of_llama_cpp_is_reported(tmp_path):
    folder = PromptFolder(tmp_path, ROOMY)
    folder.save(KEY, [1, 2, 3], False, (), lambda _path: None)  # nothing to write
    assert folder.notes == []
    folder.save(KEY, [1, 2, 3], False, (), lambda _path: 0)
    (note,) = folder.notes
    assert "llama.cpp cannot write the file" in note
    assert list(tmp_path.iterdir()) == []


def test_a_killed_writer_leaves_only_complete_files(tmp_path):
    """A process is killed at twenty random points of its work. Every file that is left can be
    used."""

    def work():
        write(tmp_path)

    modules = ("orchestrator.runtime.prompt_copies", "gguf_tools.file")
    total = calls_of(work, *modules)
    for path in tmp_path.iterdir():
        path.unlink()
    found = died = 0
    for at in moments(total, 20, seed=5):
        died += killed(work, at, *modules)
        folder = PromptFolder(tmp_path, ROOMY)
        for listed in folder.of(KEY):
            conversation, turn = int(listed.tokens[0]) // 1000, len(listed.tokens) // 20 - 1
            expected = made(conversation, turn)
            state, marks = read(folder, listed)
            np.testing.assert_array_equal(listed.tokens, expected.tokens)
            np.testing.assert_array_equal(state, expected.state)
            np.testing.assert_array_equal(marks[0].part, expected.marks[0].part)
            found += 1
        assert folder.notes == []
        assert all(path.suffix == ".prompt" for path in tmp_path.iterdir())
    assert found > 10 and died >= 15
