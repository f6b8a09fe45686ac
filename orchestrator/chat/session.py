"""A conversation: its messages, the files that hold them, and the runtime that answers.

It knows no terminal.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from gguf_tools import interrupts
from gguf_tools.closing import Closing
from gguf_tools.file.opening import open_file
from orchestrator.cache.files import write_whole
from orchestrator.config import Config, Sampling
from orchestrator.errors import ConfigError, NativeError
from orchestrator.runtime.images import image_part, settle_images
from orchestrator.runtime.overflow import Message, PromptLengths, shortened
from orchestrator.settings import Setting

if TYPE_CHECKING:
    from orchestrator.events import GenerationStats
    from orchestrator.runtime.answer import Answer
    from orchestrator.runtime.runtime import Runtime

CHAT = "/v1/chat/completions"
# The name of the model's reasoning in messages and events.
_THOUGHT = "reasoning_content"

# How many chats new_conversation leaves in a folder.
KEPT_CONVERSATIONS = 20
_MOST_BYTES = 1 << 27


def read_conversation(path: Path) -> list[Message]:
    """Return the messages in a file that `write_conversation` wrote.

    The file may begin with a system prompt. Messages of the user and the assistant follow in turns.
    A last message without an answer is left out. Raises ConfigError if the file cannot be read or
    holds something else.
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
        raise ConfigError(f"{path}: this file is not a conversation that /save wrote") from error
    return messages


def latest_conversation(folder: Path) -> Path | None:
    """Return the file in `folder` with the latest saved conversation, or None if there is none."""
    found = _conversations(folder)
    return found[-1] if found else None


def new_conversation(folder: Path) -> Path:
    """Return a new file name for a conversation in `folder`, which holds saved conversations.

    The oldest files are deleted, so that at most KEPT_CONVERSATIONS remain, including the new file.
    """
    for path in _conversations(folder)[: -(KEPT_CONVERSATIONS - 1)]:
        with suppress(OSError):
            path.unlink(missing_ok=True)
    return folder / f"{time.strftime('%Y-%m-%d-%H%M%S')}-{os.getpid()}.jsonl"


def _conversations(folder: Path) -> list[Path]:
    """Return the files of saved conversations in a folder, the latest last."""
    found = []
    for path in folder.glob("*.jsonl"):
        with suppress(OSError):
            found.append((path.stat().st_mtime_ns, path))
    return [path for _, path in sorted(found)]


def goes_on(messages: Sequence[Message], path: Path) -> bool:
    """Return whether `messages` begin with all messages of the conversation in a file.

    A longer conversation may then replace the file. The result is False if the file cannot be read.
    """
    try:
        before = read_conversation(path)
    except ConfigError:
        return False
    return list(messages[: len(before)]) == before


def _is_message(data: Any) -> bool:
    if not isinstance(data, dict) or data.keys() - {_THOUGHT} != {"role", "content"}:
        return False
    content = data["content"]
    if data["role"] == "user" and isinstance(content, list) and all(map(_is_part, content)):
        data = {**data, "content": ""}
    return all(isinstance(value, str) for value in data.values())


def _is_part(data: Any) -> bool:
    """Return whether JSON data is a text or an image of a message, as `content_of` makes them."""
    if not isinstance(data, dict):
        return False
    if data.get("type") == "text":
        return data.keys() == {"type", "text"} and isinstance(data["text"], str)
    url = data.get("image_url")
    return (
        isinstance(url, dict) and isinstance(url.get("url"), str) and data == image_part(url["url"])
    )


def content_of(text: str, images: Sequence[str]) -> str | list[dict[str, Any]]:
    """Return the content of a message with a text after images. `images` are data: URLs."""
    if not images:
        return text
    return [*map(image_part, images), *([{"type": "text", "text": text}] if text else [])]


def write_conversation(path: Path, messages: Sequence[Message]) -> None:
    """Write messages to a file as JSON lines. Only the owner of the file can read it.

    A message is {"role", "content"}, with `reasoning_content` if the model thought. The content of
    a message with images is a list of parts in OpenAI's format, with each image as a data: URL.
    The file is either complete or left as it was. Raises OSError if it cannot be written.
    """
    lines = [json.dumps(message, ensure_ascii=False) + "\n" for message in messages]
    write_whole(path, "".join(lines), private=True)


# Called while a prompt is read, with a function that returns how many tokens are read by now, and
# with the number of all tokens that have to be read.
Prefill = Callable[[Callable[[], float], int], None]


class Piece(NamedTuple):
    """A piece of an answer's text.

    `is_thought` tells whether it belongs to the model's reasoning, which comes before the answer.
    """

    text: str
    is_thought: bool = False


class Session(Closing):
    """A conversation with a model: its messages, its settings, and the runtime that answers.

    `messages` holds all messages. If they become too long for the context, the oldest are left out
    of the prompt, and `left_out` counts them. `last_stats` holds the measurements of the latest
    answer, or None. `stopped` tells whether `stop` ended the latest answer.
    """

    def __init__(
        self, runtime: Runtime, config: Config, constraint: Mapping[str, Any] | None = None
    ) -> None:
        """Start a conversation that `runtime` answers, with the system prompt in `config`.

        `config` also holds the settings of the answers. `constraint` holds fields of a request that
        constrain each answer, such as a JSON schema or a grammar.
        """
        self.runtime = runtime
        self._config = config  # settings of the answers; the runtime has its own, which may differ
        self._constraint = dict(constraint or {})
        self.messages: list[Message] = []
        self.left_out = 0
        self.stopped = False
        self.last_stats: GenerationStats | None = None
        self.system = config.system
        # The file for `--resume`. A conversation that cannot be written there goes on without it.
        self.kept: Path | None = None
        self._answer: Answer | None = None
        self._lengths = PromptLengths()
        self.reset()

    @property
    def n_ctx(self) -> int:
        """Length of the context in tokens."""
        return self.runtime.about.n_ctx

    @property
    def n_used(self) -> int:
        """Number of tokens in the context after the latest answer."""
        stats = self.last_stats
        return 0 if stats is None else stats.prompt_tokens + stats.tokens

    @property
    def max_tokens(self) -> int:
        """Maximum length of an answer in tokens."""
        return self._config.max_tokens or self.n_ctx

    @staticmethod
    def settings() -> dict[str, Setting]:
        """Return the settings that `set` can change, by name.

        They control how the tokens of an answer are sampled, and its maximum length.
        """
        declared = Config.declared()
        return {name: declared[name] for name in ("max_tokens", "think", *Sampling.declared())}

    def value(self, name: str) -> Any:
        """Return the current value of the setting with this name.

        The settings that the method `settings` lists, such as max_tokens, belong to the
        conversation. All other settings belong to the runtime, which computes the answers.
        """
        config = self._config if name in self.settings() else self.runtime.config
        return config.given(name)

    def set(self, name: str, value: Any) -> None:
        """Change a setting that the method `settings` lists. It takes effect at the next answer.

        Raises SettingError for a wrong value.
        """
        self._config = self._config.with_changes(**{name: value})

    def reset(self) -> None:
        """Remove all messages except the system prompt, and delete the file for `--resume`."""
        if self.kept is not None:
            with suppress(OSError):
                self.kept.unlink(missing_ok=True)
        self.messages = [{"role": "system", "content": self.system}] if self.system else []
        self.left_out = 0

    def answer(
        self, text: str, on_prefill: Prefill | None = None, images: Sequence[str] = ()
    ) -> Generator[Piece, None, None]:
        """Send a message of the user to the model, and yield the pieces of the answer.

        Both are added to `messages`. If the runtime fails or gives no answer, the message is
        removed again. The method `stop` ends the answer early, and keeps the text so far.

        text: the message.
        on_prefill: called while the prompt is read. Its arguments are a function that returns the
            number of tokens read by now, and the number of tokens to read.
        images: images in the message, as data: URLs.
        """
        self.stopped = False
        return self._answered(content_of(text, images), on_prefill)

    def check_images(self, images: Sequence[str]) -> None:
        """Check whether a next message with these images can be answered. They are data: URLs.

        Raises ConfigError if the images of the conversation would be too many or too large, or if
        the model takes none.
        """
        message = {"role": "user", "content": content_of("", images)}
        settle_images([*self.messages, message], self.runtime.images, "messages")

    def _answered(self, content: Any, on_prefill: Prefill | None) -> Generator[Piece, None, None]:
        start = len(self.messages)
        self.messages.append({"role": "user", "content": content})
        pieces: list[Piece] = []
        is_good = False
        try:
            settle_images(self.messages, self.runtime.images, "messages")
            # Closed here: the frames of an exception would keep it until the runtime is closed.
            with closing(self._pieces(self._visible(), on_prefill)) as found:
                for piece in found:
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

    def _pieces(
        self, messages: list[Message], on_prefill: Prefill | None
    ) -> Generator[Piece, None, None]:
        """Yield the pieces of the answer to `messages`, and set last_stats at the end."""
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
        """Return the request for a chat completion of these messages, as JSON."""
        config, sampling = self._config, self._config.sampling
        data: dict[str, Any] = {
            "messages": messages,
            "stream": True,
            "return_progress": True,
            "max_tokens": config.max_tokens or -1,
            **sampling.fields(),
            **self._constraint,
            **self._template_fields(),
        }
        return json.dumps(data).encode()

    def _template_fields(self) -> dict[str, Any]:
        """Return the fields of a request that change how the chat template writes messages."""
        think = self._config.think
        return {} if think is None else {"chat_template_kwargs": {"enable_thinking": think == "on"}}

    def _keep(self) -> None:
        """Write the messages to the file for `--resume`, if there is one."""
        if self.kept is not None:
            with suppress(OSError):
                self.kept.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                write_conversation(self.kept, self.messages)

    def stop(self) -> None:
        """End the running answer soon, and set `stopped`.

        Signal handlers and any thread may call this.
        """
        self.stopped = True
        answer = self._answer
        if answer is not None:
            answer.cancel()

    def answer_again(self, on_prefill: Prefill | None = None) -> Generator[Piece, None, None]:
        """Yield the pieces of a new answer that replaces the last one.

        If the new answer fails or is empty, the old one stays. Raises ConfigError if the
        conversation has no answer yet.
        """
        if not self.messages or self.messages[-1]["role"] != "assistant":
            raise ConfigError("nothing was answered yet")
        self.stopped = False
        return self._answer_again(on_prefill)

    def _answer_again(self, on_prefill: Prefill | None) -> Generator[Piece, None, None]:
        last = self.messages[-2:]
        del self.messages[-2:]
        length = len(self.messages)
        try:
            yield from self._answered(last[0]["content"], on_prefill)
        finally:
            if len(self.messages) == length:
                self.messages += last

    def _visible(self) -> list[Message]:
        """Return the messages that the model gets, and set left_out to the number of the others."""
        seen = shortened(
            self.messages,
            len(self._request(self.messages)),
            self._n_tokens,
            self.n_ctx,
            self.max_tokens,
        )
        self.left_out = len(self.messages) - len(seen)
        return seen

    def _n_tokens(self, messages: list[Message], is_head: bool) -> int | None:
        """Return the number of tokens of a prompt, or None if the chat template refuses it.

        If is_head is True, the fields that constrain an answer are added to the request, because
        some templates write them into the prompt.
        """
        fields = {**self._template_fields(), **(self._constraint if is_head else {})}

        def count(request: bytes) -> int | None:
            status, text = self.runtime.query(f"{CHAT}/input_tokens", request).whole()
            return int(json.loads(text)["input_tokens"]) if status == 200 else None

        return self._lengths.of(json.dumps({"messages": messages, **fields}).encode(), count)

    def change_model(self, path: Path) -> None:
        """Continue the conversation with the model at `path`, with the same settings.

        Raises the error of Runtime.set if the model cannot be loaded. The old model then stays.
        """
        try:
            self.runtime.set(model=path, low=None)
        finally:
            self._lengths = PromptLengths()

    def close(self) -> None:
        """Close the runtime, and free the model."""
        self.runtime.close()

    def load(self, messages: list[Message]) -> None:
        """Replace the conversation by `messages`, which read_conversation returned.

        Raises ConfigError if the model cannot read their images.
        """
        settle_images(messages, self.runtime.images, "messages")
        self.system = messages[0]["content"] if messages[0]["role"] == "system" else None
        self.messages, self.left_out = list(messages), 0


def _message_of(pieces: Sequence[Piece]) -> Message:
    """Return the message of the assistant that consists of these pieces."""
    said, thought = (
        "".join(each.text for each in pieces if each.is_thought == of) for of in (0, 1)
    )
    message = {"role": "assistant", "content": said}
    return message | {_THOUGHT: thought} if thought else message


def _read_by_now(answer: Answer, done: int) -> float:
    """Return how many tokens of a prompt have been read, as a number that need not be whole.

    `done` is the number of tokens in complete steps. The tokens that the running step has computed
    so far are added.
    """
    return done + answer.tokens_done()
