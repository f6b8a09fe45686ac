"""The conversation: its messages, its commands, and one answer at a time on a terminal.

`Session` is the conversation and knows no terminal, `console.Console` is the terminal and knows no
engine; `Chat` (interactive) and `one_shot` join them.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from gguf_tools import interrupts
from orchestrator.chat_files import LastConversation, read_conversation, write_conversation
from orchestrator.config import Config
from orchestrator.console import Console
from orchestrator.errors import ConfigError, MoeEdgeError
from orchestrator.policy import known_policies, owners, policy_settings
from orchestrator.sampling import Sampling
from orchestrator.settings import Setting
from orchestrator.stats_text import stats_fields, stats_table

if TYPE_CHECKING:
    from orchestrator.engine import Engine

# What other programs call the commands.
ALIASES = {"/bye": "/quit", "/clear": "/reset", "/exit": "/quit", "/?": "/help"}
# What begins and ends a message of several lines.
QUOTES = '"""'
# A file with more bytes for each token of the context does not fit, whatever is in it.
_BYTES_PER_TOKEN = 64

Message = dict[str, str]
Prefill = Callable[[int, int], None]


class Session:
    """The messages of a conversation, and the engine that answers them.

    `messages` is everything said. Where that outgrows the context, the oldest exchanges are left
    out of what the model sees: `left_out` counts the messages.
    """

    def __init__(self, engine: Engine, config: Config) -> None:
        self.engine = engine
        self.sampling = Sampling(config.temp, config.top_p, config.seed)
        self.max_tokens = config.max_tokens or engine.n_ctx
        self.messages: list[Message] = []
        self.left_out = 0
        self.stopped = False
        self.system = config.system
        # Where the conversation is kept for `--resume`.
        self.keeper: LastConversation | None = None
        self.reset()

    def reset(self) -> None:
        """Forget everything but the system prompt."""
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
        start = len(self.messages)
        self.messages.append({"role": "user", "content": text})
        pieces: list[str] = []
        keep = False
        try:
            tokens = self._visible_tokens()
            # A stop before the engine has begun would be lost on it.
            if not self.stopped:
                for piece in self.engine.generate(
                    tokens, self.sampling, self.max_tokens, on_prefill
                ):
                    pieces.append(piece)
                    yield piece
                    if self.stopped:  # again, for a stop that came while it was starting
                        self.engine.cancel()
            keep = bool(pieces)
        except GeneratorExit:
            keep = bool(pieces)
            raise
        finally:
            if keep:
                self.messages.append({"role": "assistant", "content": "".join(pieces)})
                if self.keeper is not None:
                    self.keeper.keep(self.messages)
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

    def load(self, messages: list[Message]) -> None:
        """Go on with another conversation: its messages, as read_conversation gives them."""
        self.system = messages[0]["content"] if messages[0]["role"] == "system" else None
        self.messages, self.left_out = list(messages), 0

    def save(self, path: Path) -> None:
        """Write the messages to `path` as JSON lines; raises OSError and leaves no half file."""
        write_conversation(path, self.messages)


def one_shot(session: Session, console: Console, prompt: str, as_json: bool) -> bool:
    """Answer `prompt` on stdout, the answer alone or as one JSON object; False if it was stopped.

    Bars and the statistics line go to stderr, and only where that is a terminal.
    """
    pieces = []
    with interrupts.calling(session.stop):
        for piece in session.answer(prompt, console.prefill_bar):
            console.end_bar()
            pieces.append(piece)
            if not as_json:
                console.answer(piece)
    console.end_bar()
    stats = session.engine.last_stats
    if as_json:
        if session.stopped or stats is None:
            return False
        result = {"text": "".join(pieces), "stats": stats.as_dict()}
        # Escaped on a terminal, which acts upon some of the characters that JSON leaves alone.
        text = json.dumps(result, ensure_ascii=console.out_tty, allow_nan=False)
        console.answer(text + "\n")
        return True
    if not pieces or not pieces[-1].endswith("\n"):
        console.answer("\n")
    if console.err_tty and stats is not None:
        console.fields(stats_fields(stats, session.engine.plan.ram_bytes))
    return not session.stopped


class Chat:
    """The interactive loop: read a line, run a command or answer it, until /quit."""

    def __init__(self, session: Session, console: Console) -> None:
        self.session = session
        self.console = console
        self.commands: dict[str, tuple[str, str, Callable[[str], None]]] = {
            "/help": ("", "this list", self._help),
            "/regen": ("", "another answer in the place of the last one", self._regen),
            "/read": ("FILE", "put a text file before the next message", self._read),
            "/reset": ("", "forget the conversation", self._reset),
            "/system": ("TEXT", "set the system prompt and reset (- for none)", self._system),
            "/stats": ("", "everything measured on the last answer", self._stats),
            "/policy": ("NAME", "change the policy, live", self._policy),
            **self._live_settings(),
            "/save": ("FILE", "write the conversation as JSON lines", self._save),
            "/load": ("FILE", "go on with a conversation that /save wrote", self._load),
            "/quit": ("", "leave (so does Ctrl-D)", self._quit),
        }
        self._running = True
        self._saved: set[Path] = set()
        self._file_text = ""

    def run(self) -> None:
        """Talk until /quit or the end of the input."""
        engine, model = self.session.engine, self.session.engine.model
        tiers = " ".join(tier.name for tier in model.tiers)
        self.console.note(
            f"{model.name or model.hparams.arch}:"
            f" {model.n_layers} layers of {model.n_expert} experts, "
            f"{model.n_expert_used} a token, in {tiers}"
        )
        self.console.note(engine.mode)
        self.console.note("/help lists the commands, Ctrl-C stops an answer, /quit leaves\n")
        words = [name + " " if usage else name for name, (usage, _, _) in self.commands.items()]
        self.console.open_history(words)
        while self._running:
            try:
                line = self.console.ask()
                if line is not None and line.lstrip().startswith(QUOTES):
                    line = self._rest_of(line.lstrip().removeprefix(QUOTES))
            except KeyboardInterrupt:
                interrupts.forget()
                self.console.note("\n/quit or Ctrl-D leaves")
                continue
            if line is None:
                self.console.note("")
                return
            if not line.strip():
                continue
            try:
                if line.startswith("/"):
                    self._command(line)
                else:
                    self._message(line.strip())
            except MoeEdgeError as error:
                self.console.error(str(error))
            except KeyboardInterrupt:
                interrupts.forget()
                self.console.note("\nstopped")

    def _rest_of(self, line: str) -> str | None:
        """The message that began with QUOTES and `line`, up to the next QUOTES; None at the end of
        the input. It is text, whatever it begins with."""
        lines = [line]
        while not lines[-1].rstrip().endswith(QUOTES):
            more = self.console.ask(".")
            if more is None:
                return None
            lines.append(more)
        return " " + "\n".join(lines).rstrip().removesuffix(QUOTES)

    def _message(self, text: str) -> None:
        if self._file_text:
            text = f"{self._file_text}\n\n{text}"
        before = len(self.session.messages)
        self._show(self.session.answer(text, self.console.prefill_bar))
        if len(self.session.messages) > before:
            self._file_text = ""

    def _show(self, answer: Iterator[str]) -> None:
        session, console = self.session, self.console
        before = session.left_out
        length = 0
        last = ""
        try:
            with interrupts.calling(session.stop):
                for piece in answer:
                    console.end_bar()
                    console.answer(piece)
                    length += len(piece)
                    last = piece or last
        finally:
            console.end_bar()
            if length and not last.endswith("\n"):
                console.answer("\n")
        stats = session.engine.last_stats
        if not length or stats is None:
            console.note("stopped\n" if session.stopped else "(no answer)\n")
            return
        if session.left_out > before:
            console.note(
                f"The conversation outgrew the context of {session.engine.n_ctx} tokens: "
                f"the first {session.left_out} messages are no longer seen."
            )
        console.fields(stats_fields(stats, session.engine.plan.ram_bytes))
        for note in session.engine.prompt_notes():
            console.note(note)
        console.note("")

    def _command(self, line: str) -> None:
        name, _, argument = line.strip().partition(" ")
        name = ALIASES.get(name, name)
        if name not in self.commands:
            near = difflib.get_close_matches(name, self.commands, 1)
            hint = f"did you mean {near[0]}?" if near else "/help lists them"
            self.console.error(
                f"unknown command {name}: {hint} (a leading space sends the line as text)"
            )
            return
        self.commands[name][2](argument.strip())

    def _help(self, _argument: str) -> None:
        rows = [(f"{name} {usage}", text) for name, (usage, text, _) in self.commands.items()]
        rows.append((QUOTES, "begins and ends a message of several lines"))
        rows.append(("Ctrl-C", "stop the answer, keep the session"))
        width = max(len(name) for name, _ in rows)
        self.console.note("\n".join(f"{name:<{width}}  {text}" for name, text in rows))

    def _regen(self, _argument: str) -> None:
        self._show(self.session.answer_again(self.console.prefill_bar))

    def _read(self, argument: str) -> None:
        if not argument:
            self.console.error("/read needs a file name")
            return
        path = Path(argument).expanduser()
        n_ctx = self.session.engine.n_ctx
        try:
            if path.exists() and not path.is_file():
                raise ConfigError(f"{path}: not a regular file")
            if path.stat().st_size > _BYTES_PER_TOKEN * n_ctx:
                raise ConfigError(f"{path}: too long for the context of {n_ctx} tokens (--ctx)")
            self._file_text = path.read_text(encoding="utf-8").strip()
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise ConfigError(f"{path}: not a text in UTF-8, at byte {error.start}") from error
        length = len(self._file_text)
        self.console.note(f"{length} characters of {path} stand before your next message.")

    def _reset(self, _argument: str) -> None:
        self.session.reset()
        self._file_text = ""
        self.console.note("The conversation is empty.")

    def _system(self, argument: str) -> None:
        if argument:
            self.session.system = None if argument == "-" else argument
            self.session.reset()
            self.console.note("The conversation is empty.")
        self.console.note(f"System prompt: {self.session.system or 'none'}")

    def _stats(self, _argument: str) -> None:
        stats = self.session.engine.last_stats
        self.console.note(stats_table(stats) if stats else "Nothing was answered yet.")

    def _policy(self, argument: str) -> None:
        if argument:
            # Ctrl-C in the middle of a change would leave an engine that is neither.
            with interrupts.calling(lambda: None):
                self.session.engine.set_policy(argument)
        self.console.note(self.session.engine.mode)
        if not argument:
            self.console.note(f"Known policies: {', '.join(known_policies())}")

    def _live_settings(self) -> dict[str, tuple[str, str, Callable[[str], None]]]:
        """A command for each setting of a policy that may change between two tokens."""
        return {
            "/" + name.replace("_", "-"): (
                declared.metavar,
                f"change, live: {declared.help.rstrip('.')}",
                partial(self._change, declared),
            )
            for name, declared in policy_settings().items()
            if declared.live
        }

    def _change(self, declared: Setting, argument: str) -> None:
        if argument:
            value = declared.parse(argument)
            if not self.session.engine.change(declared.name, value):
                having = " or ".join(owners(declared.name))
                self.console.note(f"It has no effect under this policy: {having} would use it.")
        self.console.note(self.session.engine.mode)

    def _save(self, argument: str) -> None:
        if not argument:
            self.console.error("/save needs a file name")
            return
        path = Path(argument).expanduser().absolute()
        if path.exists() and path not in self._saved:
            self.console.error(f"{path} exists: choose another name")
            return
        try:
            self.session.save(path)
        except OSError as error:
            self.console.error(f"{path}: {error.strerror}")
            return
        self._saved.add(path)
        self.console.note(f"{len(self.session.messages)} messages written to {path}")

    def _load(self, argument: str) -> None:
        if not argument:
            self.console.error("/load needs a file name")
            return
        path = Path(argument).expanduser()
        self.session.load(read_conversation(path))
        self.console.note(f"{len(self.session.messages)} messages read from {path}")

    def _quit(self, _argument: str) -> None:
        self._running = False
