"""A conversation: its messages, the files that hold them, and the runtime that answers.

It knows no terminal.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from gguf_tools import interrupts
from gguf_tools.closing import Closing
from gguf_tools.file.opening import open_file
from orchestrator.cache.files import write_whole
from orchestrator.config import Config, Sampling
from orchestrator.errors import ConfigError, NativeError
from orchestrator.settings import Setting

if TYPE_CHECKING:
    from orchestrator.events import GenerationStats
    from orchestrator.runtime.answer import Answer
    from orchestrator.runtime.runtime import Runtime


Message = dict[str, str]

CHAT = "/v1/chat/completions"
# The model's reasoning, as a message and as an event have it.
_THOUGHT = "reasoning_content"

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
    """Return whether messages begin with those of a file, so that it can be replaced."""
    try:
        before = read_conversation(path)
    except ConfigError:
        return False
    return list(messages[: len(before)]) == before


def _is_message(data: Any) -> bool:
    is_one = isinstance(data, dict) and data.keys() - {_THOUGHT} == {"role", "content"}
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


class Piece(NamedTuple):
    """A piece of an answer. is_thought: of the model's reasoning, which comes before the answer."""

    text: str
    is_thought: bool = False


class Session(Closing):
    """The messages of a conversation, and the runtime that answers them.

    `messages` is everything said. If that outgrows the context, the oldest exchanges are left out
    of the prompt: `left_out` counts their messages. `last_stats`: what the latest answer
    cost, or None. `constraint`: fields of a request that constrain the answers, a JSON schema or a
    grammar.
    """

    def __init__(
        self, runtime: Runtime, config: Config, constraint: Mapping[str, Any] | None = None
    ) -> None:
        self.runtime = runtime
        self._config = config  # of answers; the runtime may have changed its own
        self._constraint = dict(constraint or {})
        self.messages: list[Message] = []
        self.left_out = 0
        self.stopped = False
        self.last_stats: GenerationStats | None = None
        self.system = config.system
        # The file for `--resume`. A conversation that cannot be written there goes on without it.
        self.kept: Path | None = None
        self._answer: Answer | None = None
        self.reset()

    @property
    def n_ctx(self) -> int:
        """Tokens that the conversation may have."""
        return self.runtime.about.n_ctx

    @property
    def n_used(self) -> int:
        """Tokens of the context that the conversation took, as of the latest answer."""
        stats = self.last_stats
        return 0 if stats is None else stats.prompt_tokens + stats.tokens

    @property
    def max_tokens(self) -> int:
        """Tokens of the longest answer."""
        return self._config.max_tokens or self.n_ctx

    @staticmethod
    def settings() -> dict[str, Setting]:
        """Return what `set` can change: how an answer is drawn, and how long it may be."""
        declared = Config.declared()
        return {name: declared[name] for name in ("max_tokens", "think", *Sampling.declared())}

    def value(self, name: str) -> Any:
        """Return a setting's value: of answers, or of the runtime."""
        config = self._config if name in self.settings() else self.runtime.config
        return config.given(name)

    def set(self, name: str, value: Any) -> None:
        """Change a setting from the next answer on. Raises SettingError for a wrong value."""
        self._config = self._config.with_changes(**{name: value})

    def reset(self) -> None:
        """Forget everything but the system prompt, and delete the file for `--resume`."""
        if self.kept is not None:
            with suppress(OSError):
                self.kept.unlink(missing_ok=True)
        self.messages = [{"role": "system", "content": self.system}] if self.system else []
        self.left_out = 0

    def answer(self, text: str, on_prefill: Prefill | None = None) -> Iterator[Piece]:
        """Yield the pieces of the answer to `text`; `stop` ends it early.

        A message that failed (with any MoeEdgeError of the runtime) or that got no answer is
        forgotten, so that user and assistant always alternate. What was said before a stop is kept.
        """
        self.stopped = False
        return self._answered(text, on_prefill)

    def _answered(self, text: str, on_prefill: Prefill | None) -> Iterator[Piece]:
        start = len(self.messages)
        self.messages.append({"role": "user", "content": text})
        pieces: list[Piece] = []
        is_good = False
        try:
            for piece in self._pieces(self._visible(), on_prefill):
                pieces.append(piece)
                yield piece
            is_good = True
        except GeneratorExit:
            is_good = True
            raise
        finally:
            if is_good and pieces:
                self.messages.append(_message_of(pieces))
                self._keep()
            else:
                del self.messages[start:]

    def _pieces(self, messages: list[Message], on_prefill: Prefill | None) -> Iterator[Piece]:
        """Answer messages; afterwards last_stats is set."""
        if self.stopped:  # before anything was computed
            return
        answer = self.runtime.submit(self._request(messages))
        self._answer = answer
        try:
            for event in answer:
                if self.stopped:  # later events are not seen
                    break
                if on_prefill is not None and "prompt_progress" in event:
                    read = event["prompt_progress"]
                    done, total = read["processed"] - read["cache"], read["total"] - read["cache"]
                    on_prefill(partial(_read_by_now, answer, done), total)
                for choice in event.get("choices", ()):
                    delta = choice.get("delta", {})
                    if delta.get(_THOUGHT):
                        yield Piece(delta[_THOUGHT], is_thought=True)
                    if delta.get("content"):
                        yield Piece(delta["content"])
        except (ConfigError, NativeError):
            if not self.stopped:
                raise
        finally:
            self._answer = None
            with interrupts.held():
                answer.close()
            stats = self.runtime.stats()
            self.last_stats = answer.stats(stats.mode, stats.policy)

    def _request(self, messages: list[Message]) -> bytes:
        """A request for a chat completion, in the server's form."""
        config, sampling = self._config, self._config.sampling
        data: dict[str, Any] = {
            "messages": messages,
            "stream": True,
            "return_progress": True,
            "max_tokens": config.max_tokens or -1,
            **sampling.fields(),
            **self._constraint,
        }
        if config.think is not None:
            data["chat_template_kwargs"] = {"enable_thinking": config.think == "on"}
        return json.dumps(data).encode()

    def _keep(self) -> None:
        """Write the messages for `--resume`."""
        if self.kept is not None:
            with suppress(OSError):
                self.kept.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                write_conversation(self.kept, self.messages)

    def stop(self) -> None:
        """End the running answer soon, and set `stopped`.

        Safe in a signal handler and from any thread.
        """
        self.stopped = True
        answer = self._answer
        if answer is not None:
            answer.cancel()

    def answer_again(self, on_prefill: Prefill | None = None) -> Iterator[Piece]:
        """Yield another answer in place of the last one, which stays if this one fails or is empty.

        Raises ConfigError if nothing was answered yet.
        """
        if not self.messages or self.messages[-1]["role"] != "assistant":
            raise ConfigError("nothing was answered yet")
        self.stopped = False
        return self._answer_again(on_prefill)

    def _answer_again(self, on_prefill: Prefill | None) -> Iterator[Piece]:
        last, left_out = self.messages[-2:], self.left_out
        del self.messages[-2:]
        length = len(self.messages)
        try:
            yield from self._answered(last[0]["content"], on_prefill)
        finally:
            if len(self.messages) == length:
                self.messages += last
                self.left_out = left_out

    def _visible(self) -> list[Message]:
        """Return the messages that the model sees; move `left_out` on if they are too long.

        It goes down to half of the context at once: if one exchange were left out at each turn, the
        prefix would change at each turn, and all would be evaluated again.
        """
        head = self.messages[: 1 if self.system else 0]
        context = self.n_ctx
        limit = context - min(self.max_tokens, context // 4)
        while True:
            rest = self.messages[len(head) + self.left_out :]
            if len(rest) < 3 or self._n_tokens(head + rest) <= limit:
                return head + rest
            self.left_out += 2
            limit = context // 2

    def _n_tokens(self, messages: list[Message]) -> int:
        """How many tokens messages have in the model's chat template."""
        query = self.runtime.query(f"{CHAT}/input_tokens", self._request(messages))
        status, text = query.whole()
        found = json.loads(text)
        if status != 200:
            raise ConfigError(str(found["error"]["message"]))
        return int(found["input_tokens"])

    def change_model(self, path: Path) -> None:
        """Let another model continue the conversation, with the same settings.

        Raises what Runtime.set raises; the model before answers again then.
        """
        self.runtime.set(model=path, low=None)

    def close(self) -> None:
        """Free the runtime."""
        self.runtime.close()

    def load(self, messages: list[Message]) -> None:
        """Continue another conversation: its messages, as read_conversation returns them."""
        self.system = messages[0]["content"] if messages[0]["role"] == "system" else None
        self.messages, self.left_out = list(messages), 0


def _message_of(pieces: Sequence[Piece]) -> Message:
    """The message of the model that came in these pieces."""
    said, thought = (
        "".join(each.text for each in pieces if each.is_thought == of) for of in (0, 1)
    )
    message = {"role": "assistant", "content": said}
    return message | {_THOUGHT: thought} if thought else message


def _read_by_now(answer: Answer, done: int) -> float:
    """How many tokens of a prompt are read: those of earlier steps, and of the running one."""
    return done + answer.tokens_done()
