"""Conversations in files: JSON lines, a message each, as `/save` writes them."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from gguf_tools.file.opening import open_file
from orchestrator.errors import ConfigError
from orchestrator.files import write_whole

Message = dict[str, str]

_MOST_BYTES = 1 << 27
_WRONG = "this is no conversation that /save wrote"


def read_conversation(path: Path) -> list[Message]:
    """The messages in a file: a system prompt or none, then a user's and the assistant's in turns.

    A last message that was not answered is left out. Raises ConfigError for a file that cannot be
    read, or that is something else.
    """
    try:
        with open_file(path) as file:
            if os.fstat(file.fileno()).st_size > _MOST_BYTES:
                raise ConfigError(f"{path}: {_WRONG}")
            lines = file.read().decode().split("\n")
        messages = [_message(json.loads(line)) for line in lines if line.strip()]
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: {_WRONG}") from error
    first = 1 if messages and messages[0]["role"] == "system" else 0
    messages = messages[: len(messages) - (len(messages) - first) % 2]
    turns = messages[first:]
    wanted = ["user", "assistant"] * (len(turns) // 2)
    if not turns or [each["role"] for each in turns] != wanted:
        raise ConfigError(f"{path}: {_WRONG}")
    return messages


def _message(data: object) -> Message:
    """Raises ValueError."""
    if not isinstance(data, dict) or data.keys() != {"role", "content"}:
        raise ValueError
    if not all(isinstance(value, str) for value in data.values()):
        raise ValueError
    return data


def write_conversation(path: Path, messages: Sequence[Message]) -> None:
    """Writes messages as JSON lines, all or none, for their owner alone. Raises OSError."""
    lines = [json.dumps(message, ensure_ascii=False) + "\n" for message in messages]
    write_whole(path, "".join(lines), private=True)


class LastConversation:
    """The latest conversation, in the folder of the prompt cache. What cannot be written there is
    done without."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "last.jsonl"

    def keep(self, messages: Sequence[Message]) -> None:
        with suppress(OSError):
            write_conversation(self._path, messages)

    def read(self) -> list[Message]:
        """Raises ConfigError where there is none."""
        if not self._path.exists():
            raise ConfigError(f"--resume: no conversation was kept in {self._path.parent} yet")
        return read_conversation(self._path)
