"""The conversation on a terminal: its commands, the answers, and their costs.

`session.Session` is the conversation and knows no terminal, `console.Console` is the terminal and
knows no model; `Chat` (interactive) and `one_shot` join them.
"""

from __future__ import annotations

import difflib
import json
import math
import shlex
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gguf_tools import interrupts
from gguf_tools.columns import aligned
from gguf_tools.file.texts import read_text
from gguf_tools.units import format_size
from orchestrator.chat.console import Console
from orchestrator.chat.dropped import dropped_images, path_of
from orchestrator.chat.session import (
    Piece,
    Session,
    goes_on,
    read_conversation,
    write_conversation,
)
from orchestrator.errors import ConfigError, MoeEdgeError
from orchestrator.policy import known_policies, owners, policy_settings
from orchestrator.runtime.images import read_image
from orchestrator.settings import Setting

if TYPE_CHECKING:
    from orchestrator.events import GenerationStats


# Names of the commands in other programs.
ALIASES = {
    "/bye": "/quit",
    "/clear": "/reset",
    "/exit": "/quit",
    "/temperature": "/temp",
    "/?": "/help",
}
# Begins and ends a message of several lines.
QUOTES = '"""'
# A file with more bytes for each token of the context does not fit, whatever is in it.
_BYTES_PER_TOKEN = 64
_BAR = 10  # length of the bars of /memory, in characters


def _follow(
    session: Session, console: Console, answer: Generator[Piece, None, None], shown: bool
) -> tuple[str, str]:
    """Read an answer until its end or Ctrl-C, and show its pieces as they come if `shown` is True.

    Returns the text of the answer, and the text of the reasoning before it.
    """
    pieces: dict[bool, list[str]] = {False: [], True: []}  # by whether they are thoughts
    try:
        with interrupts.calling(session.stop), console.quiet_keys(), closing(answer):
            for piece in answer:
                console.end_bar()
                pieces[piece.is_thought].append(piece.text)
                if shown and piece.is_thought:
                    console.thought(piece.text)
                elif shown:
                    console.answer(piece.text)
    finally:
        console.end_bar()
        console.end_answer()
    return "".join(pieces[False]), "".join(pieces[True])


def one_shot(
    session: Session, console: Console, prompt: str, as_json: bool, images: Sequence[Path] = ()
) -> bool:
    """Answer `prompt` on stdout. Return False if Ctrl-C stopped the answer.

    `images` are image files that the prompt is about.
    The output is the answer alone, or one JSON object if as_json is True. If stderr is a terminal,
    progress bars and a line of statistics are written to it.
    """
    urls = [read_image(path, session.runtime.images)[1] for path in images]
    answer = session.answer(prompt, console.prefill_bar, urls)
    said, thought = _follow(session, console, answer, shown=not as_json)
    stats = session.last_stats
    if as_json:
        if session.stopped or stats is None:
            return False
        result = {"text": said, **({"thinking": thought} if thought else {})}
        # Escaped on a terminal, which acts upon some of the characters that JSON leaves alone.
        text = json.dumps(
            {**result, "stats": stats.as_dict()}, ensure_ascii=console.out_tty, allow_nan=False
        )
        console.write(text + "\n")
        return True
    if not said.endswith("\n"):
        console.write("\n")
    if console.err_tty and stats is not None:
        console.fields(stats_fields(stats, session.runtime.plan.ram_bytes))
    return not session.stopped


class Chat:
    """An interactive chat on a terminal, which reads messages and commands until /quit."""

    def __init__(
        self,
        session: Session,
        console: Console,
        change_model: Callable[[str], None],
        tell: Callable[[], None],
    ) -> None:
        """Prepare the commands of the chat.

        `change_model` continues the session with the model of the given name. `tell` shows notes of
        the runtime that came since the last answer.
        """
        self.session = session
        self.console = console
        self.tell = tell
        self._change_model = change_model
        self._settings = session.settings()
        # Settings of policies that may change between two tokens.
        live = {name: declared for name, declared in policy_settings().items() if declared.live}
        self._changeable = self._settings | live
        temp, think = self._settings["temp"], self._settings["think"]
        # For each command: its arguments, its help, and the function that runs it.
        self._groups: dict[str, dict[str, tuple[str, str, Callable[[str], None]]]] = {
            "The conversation": {
                "/regen": ("", "replace the last answer by another answer", self._regen),
                "/read": ("FILE", "put a text file at the start of your next message", self._read),
                "/image": (
                    "FILE",
                    "add a PNG or JPEG to your next message (- removes all); or drop the file on "
                    "the terminal",
                    self._image,
                ),
                "/system": (
                    "TEXT",
                    "set the system prompt (- for none) and forget the conversation",
                    self._system,
                ),
                "/reset": ("", "forget the conversation", self._reset),
                "/save": ("FILE", "write the conversation as JSON lines", self._save),
                "/load": ("FILE", "continue a saved conversation, or change the model", self._load),
            },
            "How it answers": {
                "/temp": ("T", "change the temperature", partial(self._change, temp)),
                "/think": ("on|off", "think before an answer", partial(self._change, think)),
                "/set": (
                    "NAME VALUE",
                    "change the setting NAME; without NAME: list all settings",
                    self._set,
                ),
                "/model": ("NAME", "change the model; without NAME: show it", self._model),
                "/policy": ("NAME", "change the policy; without NAME: show it", self._policy),
                **{
                    "/" + name.replace("_", "-"): (
                        declared.metavar,
                        declared.help[0].lower() + declared.help[1:].partition(". ")[0].rstrip("."),
                        partial(self._change, declared),
                    )
                    for name, declared in live.items()
                },
            },
            "Costs": {
                "/stats": ("", "all measurements of the last answer", self._stats),
                "/memory": ("", "memory in use, by purpose", self._memory),
            },
            "This program": {
                "/help": ("", "this list", self._help),
                "/quit": ("", "leave (so does Ctrl-D)", self._quit),
            },
        }
        self.commands = {
            name: command for group in self._groups.values() for name, command in group.items()
        }
        self._running = True
        self._asks = False  # whether the chat waits for a line
        self._file_text = ""
        self._images: list[str] = []  # data: URLs for the next message

    def attach(self, paths: Sequence[Path]) -> None:
        """Send image files with the next message.

        Raises ConfigError or TextFileError for a file that the model cannot read.
        """
        for path in paths:
            image, url = read_image(path, self.session.runtime.images)
            self.session.check_images([*self._images, url])
            self._images.append(url)
            self.console.note(f"[image: {path.name}, {image.size}]")

    def run(self) -> None:
        """Answer messages and run commands until /quit or the end of the input."""
        self._introduce()
        self.console.note("/help lists the commands, Ctrl-C stops an answer, /quit leaves\n")
        words = [name + " " if usage else name for name, (usage, _, _) in self.commands.items()]
        self.console.open_history(words)
        while self._running:
            try:
                self._turn()
            except KeyboardInterrupt:
                interrupts.forget()
                self.console.note("\n/quit or Ctrl-D leaves" if self._asks else "\nstopped")

    def _turn(self) -> None:
        """Read one line, and run it as a command or answer it as a message.

        The chat continues after a Ctrl-C at any moment.
        """
        self._asks = True
        line = self.console.ask()
        if line is not None and line.lstrip().startswith(QUOTES):
            line = self._rest_of(line.lstrip().removeprefix(QUOTES))
        self._asks = False
        if line is None:
            self.console.note("")
            self._running = False
        elif line.strip():
            try:
                images = [] if line.split()[0] in self.commands else dropped_images(line)
                # Several pasted lines are a message, even if the first one begins with a slash.
                if images:
                    self.attach(images)
                elif line.startswith("/") and "\n" not in line.strip():
                    self._command(line)
                else:
                    self._message(line.strip())
            except MoeEdgeError as error:
                self.console.error(str(error))

    def _introduce(self) -> None:
        """Show the name and the experts of the model, and the status line of the runtime."""
        model = self.session.runtime.model
        tiers = " ".join(tier.name for tier in model.tiers)
        self.console.note(
            f"{model.name or model.hparams.arch}: {model.n_layers} layers of {model.n_expert} "
            f"experts, {model.n_expert_used} used per token; precisions: {tiers}"
        )
        self.console.note(self.session.runtime.mode)

    def _rest_of(self, line: str) -> str | None:
        """Read the rest of a message of several lines, up to the line that ends with QUOTES.

        QUOTES are three double quotes. `line` is the first line without QUOTES. Returns None at the
        end of the input. The result begins with a space, so that it is never taken for a command.
        """
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
        self._show(self.session.answer(text, self.console.prefill_bar, self._images))
        if len(self.session.messages) > before:
            self._file_text, self._images = "", []

    def _show(self, answer: Generator[Piece, None, None]) -> None:
        session, console = self.session, self.console
        before = session.left_out
        try:
            said, thought = _follow(session, console, answer, shown=True)
        finally:
            console.end_line()
        stats = session.last_stats
        if not (said or thought) or stats is None:
            console.note("stopped\n" if session.stopped else "(no answer)\n")
            return
        if session.left_out > before:
            console.note(
                f"The conversation outgrew the context of {session.n_ctx} tokens: the model no "
                f"longer sees the first {session.left_out} messages."
            )
        console.fields(stats_fields(stats, session.runtime.plan.ram_bytes))
        self.tell()
        console.note("")

    def _command(self, line: str) -> None:
        name, _, argument = line.strip().partition(" ")
        name = ALIASES.get(name, name)
        if name not in self.commands:
            near = difflib.get_close_matches(name, self.commands, 1)
            hint = f"did you mean {near[0]}?" if near else "/help lists them"
            raise ConfigError(
                f"unknown command {name}: {hint} (a leading space sends the line as text)"
            )
        usage, _, run = self.commands[name]
        if usage == "FILE" and not argument.strip():
            raise ConfigError(f"{name} needs a file name")
        run(argument.strip())

    def _help(self, _argument: str) -> None:
        rows = {
            heading: [(f"{name} {usage}", text) for name, (usage, text, _) in group.items()]
            for heading, group in self._groups.items()
        }
        rows["Keys"] = [
            (QUOTES, "starts and ends a message of several lines"),
            ("Ctrl-C", "stop the answer, keep the session"),
        ]
        self.console.explain(rows)

    def _regen(self, _argument: str) -> None:
        self._show(self.session.answer_again(self.console.prefill_bar))

    def _read(self, argument: str) -> None:
        path, n_ctx = Path(argument).expanduser(), self.session.n_ctx
        too_long = f"the file is too long for the context of {n_ctx} tokens (--ctx)"
        self._file_text = read_text(path, _BYTES_PER_TOKEN * n_ctx, too_long).strip()
        length = len(self._file_text)
        self.console.note(f"The {length} characters of {path} will begin your next message.")

    def _image(self, argument: str) -> None:
        if argument != "-":
            self.attach([path_of(argument)])
            return
        self._images = []
        self.console.note("Your next message will have no images.")

    def _reset(self, _argument: str) -> None:
        self.session.reset()
        self._file_text, self._images = "", []
        self.console.note("The conversation is empty.")

    def _system(self, argument: str) -> None:
        if argument:
            self.session.system = None if argument == "-" else argument
            self.session.reset()
            self.console.note("The conversation is empty.")
        self.console.note(f"System prompt: {self.session.system or 'none'}")

    def _stats(self, _argument: str) -> None:
        stats = self.session.last_stats
        self.console.note(stats_table(stats) if stats else "Nothing was answered yet.")

    def _memory(self, _argument: str) -> None:
        parts = self.session.runtime.memory()
        if not parts:
            self.console.note(
                "/memory shows nothing, because this model is on a GPU. The command works only for "
                "models in main memory."
            )
            return
        total = sum(parts.values())
        rows = [
            [name, format_size(n), f"{100 * n / total:.0f} %", "#" * round(_BAR * n / total)]
            for name, n in parts.items()
        ]
        self.console.note("\n".join(aligned(rows)))
        self.console.note(f"Context: {self.session.n_used} of {self.session.n_ctx} tokens in use.")

    def _policy(self, argument: str) -> None:
        if argument:
            # Ctrl-C in the middle of a change would leave a model that is half loaded.
            with interrupts.calling(lambda: None), self.console.bars():
                self.session.runtime.set(policy=argument)
        self.console.note(self.session.runtime.mode)
        if not argument:
            self.console.note(f"Known policies: {', '.join(known_policies())}")

    def _model(self, argument: str) -> None:
        if argument:
            with self.console.quiet_keys():
                self._change_model(argument)
        else:
            self.console.note(str(self.session.runtime.config.model))
        self._introduce()

    def _set(self, argument: str) -> None:
        name, _, text = argument.partition(" ")
        known = self._changeable
        if not name:
            rows = [(f"{each.name} {self._value_of(each)}", each.help) for each in known.values()]
            self.console.explain({"Settings": rows})
            return
        name = name.lower().replace("-", "_")
        if name not in known:
            near = difflib.get_close_matches(name, known, 1, 0.5)
            hint = f"did you mean {near[0]}?" if near else "/set alone lists them"
            raise ConfigError(f"{name} is not a setting that can be changed during a chat: {hint}")
        self._change(known[name], text.strip())

    def _value_of(self, declared: Setting) -> str:
        """Return a setting's value as text that /set accepts, or "-" if it has no value."""
        value = self.session.value(declared.name)
        if declared.repeated:
            return shlex.join(value) or "-"
        return "-" if value is None else str(value)

    def _change(self, declared: Setting, argument: str) -> None:
        """Set a setting to the value `argument` unless it is empty, and show the current value."""
        if declared.name in self._settings:
            if argument:
                self.session.set(declared.name, _read(declared, argument))
            self.console.note(f"{declared.name} {self._value_of(declared)}")
            return
        if argument:
            value = declared.parse(argument)
            if not self.session.runtime.set(**{declared.name: value}):
                name, policies = declared.name, " or ".join(owners(declared.name))
                self.console.note(
                    f"{name} has no effect with the current policy. It is a setting of the "
                    f"policy {policies}."
                )
        self.console.note(self.session.runtime.mode)

    def _save(self, argument: str) -> None:
        path = Path(argument).expanduser().absolute()
        if path.exists() and not goes_on(self.session.messages, path):
            raise ConfigError(
                f"{path} exists and does not contain an earlier state of this conversation: choose "
                f"another name"
            )
        try:
            write_conversation(path, self.session.messages)
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror}") from error
        self.console.note(f"{len(self.session.messages)} messages written to {path}")

    def _load(self, argument: str) -> None:
        path = Path(argument).expanduser()
        if path.suffix == ".gguf" or not path.is_file():
            self._model(argument)
            return
        self.session.load(read_conversation(path))
        self.console.note(f"{len(self.session.messages)} messages read from {path}")

    def _quit(self, _argument: str) -> None:
        self._running = False


def _read(declared: Setting, text: str) -> Any:
    """Return the value that a text means for a setting. "-" means None if the setting allows it."""
    return None if text == "-" and declared.optional else declared.parse(text)


# Names of the endings that are not the model's own.
ENDINGS = {
    "cancelled": "stopped",
    "context": "answer cut: the context (--ctx) is full",
    "length": "cut at --max-tokens",
}


def stats_fields(stats: GenerationStats, ram_bytes: int) -> list[str]:
    """Return the fields of the statistics line below an answer, such as speed and memory.

    Together they fit in 80 columns. If the answer was cut or stopped, the first field says so.
    `ram_bytes` is the limit of all memory of the model. The hit rate is left out with `--policy
    plain`, because all experts are then in memory.
    """
    fields = [ENDINGS[stats.finish]] if stats.finish in ENDINGS else []
    wait = f"{stats.ttft_ms:.0f} ms" if stats.ttft_ms < 1e3 else f"{stats.ttft_ms / 1e3:.1f} s"
    fields.append(f"first word {wait}")
    if math.isfinite(stats.tokens_per_s):
        fields.append(f"{stats.tokens_per_s:.1f} tok/s")
    if stats.hit_rate is not None:
        fields.append(f"experts {100 * stats.hit_rate:.0f} % in memory")
    if stats.kl_estimate:
        halved = ", limit halved" * stats.limit_halved
        fields.append(f"estimated loss {stats.kl_estimate:.2g}{halved}")
    cap = format_size(ram_bytes)
    took = format_size(stats.peak_rss_bytes).removesuffix(cap[cap.rindex(" ") :])
    fields.append(f"memory {took} of {cap}")
    return fields


def stats_table(stats: GenerationStats) -> str:
    """Return all measurements of an answer as text, with one measurement per line."""
    rows: list[tuple[str, str]] = []
    values = stats.as_dict()
    policy = values.pop("policy")
    for key, value in (values | policy).items():
        if value is None:
            text = "-"
        elif isinstance(value, list):
            text = " ".join(_short(each) for each in value)
        elif isinstance(value, dict):
            text = ", ".join(f"{name} {_number(share)}" for name, share in value.items())
        elif "bytes" in key:
            text = format_size(value)
        else:
            text = _number(value)
        rows.append((key, text))
    return "\n".join(aligned(rows))


def _short(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}" if isinstance(value, float) else str(value)


def _number(value: object) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)
