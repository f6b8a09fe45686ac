"""A conversation: its messages, the files that hold them, and the engine that answers.

It knows no terminal."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gguf_tools import interrupts
from gguf_tools.closing import Closing
from gguf_tools.file.opening import open_file
from orchestrator.cache.files import write_whole
from orchestrator.config import Config, Sampling
from orchestrator.errors import ConfigError
from orchestrator.settings import Setting

if TYPE_CHECKING:
    from orchestrator.runtime.engine import Engine


Message = dict[str, str]

# How many chats new_conversation leaves in a folder.
KEPT_CONVERSATIONS = 20
_MOST_BYTES = 1 << 27


def read_conversation(path: Path) -> list[Message]:
    """The messages in a file: a system prompt or none, then a user's and the assistant's in turns.

    A last message that was not answered is left out. Raises ConfigError for a file that cannot be
    read, or that is something else.
    """
    try:
        with open_file(path) as file:
            if os.fstat(file.fileno()).st_size > _MOST_BYTES:
                raise ValueError
            lines = file.read().decode().split("\n")
        messages = [json.loads(line) for line in lines if line.strip()]
        if not all(map(_is_message, messages)):
            raise ValueError
        first = 1 if messages and messages[0]["role"] == "system" else 0
        messages = messages[: len(messages) - (len(messages) - first) % 2]
        roles = [each["role"] for each in messages[first:]]
        if not roles or roles != ["user", "assistant"] * (len(roles) // 2):
            raise ValueError
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: this is no conversation that /save wrote") from error
    return messages


def latest_conversation(folder: Path) -> Path | None:
    """Return the file of new_conversation that was written last, or None if there is none."""
    found = _conversations(folder)
    return found[-1] if found else None


def new_conversation(folder: Path) -> Path:
    """Return the name of a new file for the messages of one chat, in a folder for several chats.

    The oldest files are deleted so that at most KEPT_CONVERSATIONS remain with the new one.
    """
    for path in _conversations(folder)[: -(KEPT_CONVERSATIONS - 1)]:
        with suppress(OSError):
            path.unlink(missing_ok=True)
    return folder / f"{time.strftime('%Y-%m-%d-%H%M%S')}-{os.getpid()}.jsonl"


def _conversations(folder: Path) -> list[Path]:
    """The files of new_conversation in a folder, the one that was written last at the end."""
    found = []
    for path in folder.glob("*.jsonl"):
        with suppress(OSError):
            found.append((path.stat().st_mtime_ns, path))
    return [path for _, path in sorted(found)]


def goes_on(messages: Sequence[Message], path: Path) -> bool:
    """Whether all that a file holds is the beginning of these messages, so that nothing is lost
    where they take its place."""
    try:
        before = read_conversation(path)
    except ConfigError:
        return False
    return list(messages[: len(before)]) == before


def _is_message(data: Any) -> bool:
    is_one = isinstance(data, dict) and data.keys() == {"role", "content"}
    return is_one and all(isinstance(value, str) for value in data.values())


def write_conversation(path: Path, messages: Sequence[Message]) -> None:
    """Write messages as JSON lines, which only the owner of the file can read.

    The file is written whole or not at all. Raises OSError.
    """
    lines = [json.dumps(message, ensure_ascii=False) + "\n" for message in messages]
    write_whole(path, "".join(lines), private=True)


# Called while a prompt is read, with a function that returns how many tokens are read by now, and
# with the number of all tokens that have to be read.
Prefill = Callable[[Callable[[], float], int], None]


class Session(Closing):
    """The messages of a conversation, and the engine that answers them.

    `messages` is everything said. Where that outgrows the context, the oldest exchanges are left
    out of what the model sees: `left_out` counts the messages.
    """

    def __init__(self, engine: Engine, config: Config) -> None:
        self.engine = engine
        self._config = config  # of answers; the engine may have changed its own
        self.messages: list[Message] = []
        self.left_out = 0
        self.stopped = False
        self.system = config.system
        # Where it is kept for `--resume`. What cannot be written there is done without.
        self.kept: Path | None = None
        self.reset()

    @property
    def max_tokens(self) -> int:
        """Tokens of the longest answer."""
        return self._config.max_tokens or self.engine.n_ctx

    @staticmethod
    def settings() -> dict[str, Setting]:
        """What `set` can change: how an answer is drawn, and how long it may be."""
        declared = Config.declared()
        return {name: declared[name] for name in ("max_tokens", *Sampling.declared())}

    def value(self, name: str) -> Any:
        """A setting's value: of answers, or of the engine."""
        config = self._config if name in self.settings() else self.engine.config
        return config.given(name)

    def set(self, name: str, value: Any) -> None:
        """Changes a setting from the next answer on. Raises SettingError for a wrong value."""
        self._config = self._config.with_changes(**{name: value})

    def reset(self) -> None:
        """Forget everything but the system prompt; --resume has nothing to go on with either."""
        if self.kept is not None:
            with suppress(OSError):
                self.kept.unlink(missing_ok=True)
        self.messages = [{"role": "system", "content": self.system}] if self.system else []
        self.left_out = 0

    def answer(self, text: str, on_prefill: Prefill | None = None) -> Iterator[str]:
        """Yield the pieces of the answer to `text`; `stop` ends it early.

        A message that failed (any MoeEdgeError of the engine) or that got no answer is forgotten,
        so that the conversation always alternates between user and assistant. What was said
        before a stop is kept.
        """
        self.stopped = False
        return self._answer(text, on_prefill)

    def _answer(self, text: str, on_prefill: Prefill | None) -> Iterator[str]:
        def reads(_done: int, total: int) -> None:
            if self.stopped:  # again, for a stop that came while the engine was starting
                self.engine.cancel()
            if on_prefill is not None:
                on_prefill(self.engine.prompt_done, total)

        start = len(self.messages)
        self.messages.append({"role": "user", "content": text})
        pieces: list[str] = []
        keep = False
        try:
            tokens = self._visible_tokens()
            # A stop before the engine has begun would be lost on it.
            if not self.stopped:
                sampling = self._config.sampling
                for piece in self.engine.generate(tokens, sampling, self.max_tokens, reads):
                    pieces.append(piece)
                    yield piece
                    if self.stopped:
                        self.engine.cancel()
            keep = bool(pieces)
        except GeneratorExit:
            keep = bool(pieces)
            raise
        finally:
            if keep:
                self.messages.append({"role": "assistant", "content": "".join(pieces)})
                if self.kept is not None:
                    with suppress(OSError):
                        self.kept.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                        write_conversation(self.kept, self.messages)
            else:
                del self.messages[start:]

    def stop(self) -> None:
        """End the running answer soon, and set `stopped`; safe in a signal handler and from any
        thread."""
        self.stopped = True
        self.engine.cancel()

    def answer_again(self, on_prefill: Prefill | None = None) -> Iterator[str]:
        """Yield another answer in the place of the last one, which stays where this one fails or
        is empty. Raises ConfigError where there is none."""
        if not self.messages or self.messages[-1]["role"] != "assistant":
            raise ConfigError("nothing was answered yet")
        self.stopped = False
        return self._answer_again(on_prefill)

    def _answer_again(self, on_prefill: Prefill | None) -> Iterator[str]:
        last, left_out = self.messages[-2:], self.left_out
        del self.messages[-2:]
        length = len(self.messages)
        try:
            yield from self._answer(last[0]["content"], on_prefill)
        finally:
            if len(self.messages) == length:
                self.messages += last
                self.left_out = left_out

    def _visible_tokens(self) -> list[int]:
        """Tokens of what the model shall see; moves `left_out` on where that is too long.

        It goes down to half of the context at once: dropping one exchange a turn would change the
        prefix, and so evaluate the whole conversation again, at every turn.
        """
        head = self.messages[: 1 if self.system else 0]
        context = self.engine.n_ctx
        limit = context - min(self.max_tokens, context // 4)
        while True:
            rest = self.messages[len(head) + self.left_out :]
            tokens = self.engine.render_chat(head + rest)
            if len(tokens) <= limit or len(rest) < 3:
                return tokens
            self.left_out += 2
            limit = context // 2

    def change_model(self, path: Path, open_engine: Callable[[Config], Engine]) -> None:
        """Lets another model go on with the conversation, under the same settings.

        The memory of the one before is freed first. It is opened again where the other cannot be:
        then the error is raised, as MoeEdgeError, OSError or KeyboardInterrupt.
        """
        before = self.engine.config
        wanted = before.with_changes(model=path, low=None)
        self.engine.close()
        try:
            self.engine = open_engine(wanted)
        except BaseException:
            interrupts.forget()
            with interrupts.calling(lambda: None):
                self.engine = open_engine(before)
            raise

    def close(self) -> None:
        """Frees the engine."""
        self.engine.close()

    def load(self, messages: list[Message]) -> None:
        """Go on with another conversation: its messages, as read_conversation gives them."""
        self.system = messages[0]["content"] if messages[0]["role"] == "system" else None
        self.messages, self.left_out = list(messages), 0
