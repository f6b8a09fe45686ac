"""Options and helpers that several commands share."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gguf_tools import interrupts
from gguf_tools.process import compute_threads
from orchestrator.chat.console import Console, progress_bar, strip_controls
from orchestrator.cli.help import Option
from orchestrator.config import Config
from orchestrator.errors import MoeEdgeError, SettingError
from orchestrator.policy import owners, policy_settings
from orchestrator.settings import Setting, flag_of, parse_size

if TYPE_CHECKING:
    from gguf_tools.quantize.methods import ExpertQuantizer
    from orchestrator.lab.calibrate.methods import Method
    from orchestrator.runtime.answering import Answering
    from orchestrator.runtime.runtime import Runtime

# Key in a click context: whether --force was given.
_FORCE = "moe-edge.force"


class NamedPath(click.Path):
    """The click type of an option or argument whose value is a path.

    An empty path is refused, because it would mean the current folder.
    """

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        if value == "":
            self.fail("the name is empty", param, ctx)
        return super().convert(value, param, ctx)


class NewPath(NamedPath):
    """The click type of an option or argument whose value is the path of an output file.

    A path at which a file exists is refused, unless --force was given.
    """

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        if value == "-":
            self.fail("an output must be a file, not stdout (./- is a file named -)", param, ctx)
        path = super().convert(value, param, ctx)
        complaint = _taken(path, ctx)
        if complaint:
            self.fail(complaint, param, ctx)
        return path


def _taken(path: Path, ctx: click.Context) -> str | None:
    """Return why an output must not be written to this path, or None if it may be written."""
    from gguf_tools.file.unfinished import irregular

    complaint = irregular(path)
    if complaint:
        return f"{path} {complaint}"
    if not ctx.meta.get(_FORCE) and os.path.lexists(path) and not path.is_dir():
        return f"{path} exists: choose another name, or give --force to replace it"
    # After the last output is written, the command is complete, and Ctrl-C has no effect.
    interrupts.declare_last_file(path)
    return None


def refuse_taken(path: Path) -> None:
    """Raise UsageError if an output must not be written to this path.

    An existing file is refused, unless --force was given. Commands call this function for outputs
    that are named after an input.
    """
    complaint = _taken(path, click.get_current_context())
    if complaint:
        raise click.UsageError(complaint)


def _remember_force(ctx: click.Context, _param: click.Parameter, given: bool) -> None:
    ctx.meta[_FORCE] = given


class Number(click.FloatRange):
    """The click type of an option whose value is a number in a range. NaN is refused."""

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        number = super().convert(value, param, ctx)
        if math.isnan(number):
            self.fail(f"{value} is not a number", param, ctx)
        return number


FILE = NamedPath(path_type=Path)
NEW_FILE = NewPath(path_type=Path)
AT_LEAST_0 = click.IntRange(min=0)

DEMO = Path("models/demo/moe-edge-demo.gguf")

Decorator = Callable[[Any], Any]


def read_by(parse: Callable[[str], Any]) -> Callable[..., Any]:
    """Return a click callback that parses an option's text with `parse`."""

    def read(_ctx: click.Context, _param: click.Parameter, text: str | None) -> Any:
        try:
            return None if text is None else parse(text)
        except MoeEdgeError as error:
            raise click.BadParameter(str(error)) from error

    return read


# Types of options by the word for their value, unless an option gives another type.
_VALUES: dict[str, dict[str, Any]] = {
    "N": {"type": click.IntRange(min=1)},
    "FILE": {"type": FILE},
    "DIR": {"type": FILE},
    "SIZE": {"callback": read_by(parse_size)},
}


def option(said: str, help: str, **more: Any) -> Decorator:
    """Return a decorator that adds an option to a click command.

    said: the names of the option, and then a placeholder in capitals if the option has a value.
        Three examples:

    - `-m --model FILE` is an option with two names and a value.
    - `--force` is a flag, because it has no placeholder, and `more` has no `type`.
    - `--json as_json` is a flag that the decorated function gets as its parameter `as_json`.

    The placeholders N, FILE, DIR and SIZE also set the type of the value.

    help: the text in the help.
    more: arguments of click.option, and `group`, the heading under which the help lists the option.
    """
    names = said.split()
    if names[-1][0].isupper():
        metavar = names.pop()
        more = {"metavar": metavar, **_VALUES.get(metavar, {}), **more}
    elif "type" not in more:
        more["is_flag"] = True
    return click.option(*names, cls=Option, help=help, **more)


# For every command with an output. It is eager, because the output's path is checked by it.
FORCE = option(
    "--force",
    "Replace existing output files.",
    is_eager=True,
    expose_value=False,
    callback=_remember_force,
)

# A model without -m. make_config uses the parameter "named" as the model.
_NAMED = click.argument("named", metavar="[MODEL]", required=False)


def one_name(named: str | None, model: str | Path | None) -> str | None:
    """Return the model that the user named as an argument or with -m; None if no model was named.

    Raises UsageError if the user named a model in both ways.
    """
    if named is not None and model is not None:
        raise click.UsageError(
            f"the model is given twice, as {named} and -m {model}: leave one out"
        )
    return named if model is None else str(model)


def model_argument(function: Any) -> Any:
    """Decorate a command that works on one model file.

    The user names the model as an argument or with -m. The decorated function gets the path of the
    file as its parameter `file`.
    """

    @_NAMED
    @option("-m --model FILE", "Model file, if it is not given as the argument MODEL.", type=str)
    @wraps(function)
    def with_file(*args: Any, named: str | None, model: str | None, **options: Any) -> Any:
        asked = one_name(named, model)
        if asked is None:
            raise click.UsageError("Missing argument 'MODEL': give a file, as MODEL or -m MODEL")
        return function(*args, file=model_path(asked), **options)

    return with_file


JSON = option("--json as_json", "Print one JSON object.")


def _note_capped(threads: int | None) -> int | None:
    """Return `threads` unchanged, and print a note if there are fewer cores than threads."""
    if threads is not None and compute_threads(threads) < threads:
        cores = compute_threads(threads)
        note(
            f"Note: --threads {threads} is capped at {cores}, the cores available to this process."
        )
    return threads


THREADS = option(
    "--threads N",
    "Number of threads, at most one for each core.  [default: the number of cores]",
    callback=lambda _ctx, _param, threads: _note_capped(threads),
)
LOW = option("--low LOW", "Second GGUF of the same model in a lower precision.", type=FILE)


def together(*options: Setting | Decorator) -> Decorator:
    """Return one decorator that adds several options to a command, in the order of the help."""

    def apply(function: Any) -> Any:
        for each in reversed(options):
            function = (option_of(each) if isinstance(each, Setting) else each)(function)
        return function

    return apply


def option_of(declared: Setting) -> Decorator:
    """Return the decorator that adds a setting to a command as an option."""
    shown = declared.default_text
    text = f"{declared.help}  [default: {shown}]" if shown else declared.help
    more: dict[str, Any] = {"help": text, "cls": Option, "group": declared.group}
    if bool in declared.kinds:
        flags = declared.flag
        if declared.default or declared.optional:
            flags += f"/--no-{declared.flag.removeprefix('--')}"
        return click.option(flags, is_flag=True, default=None, **more)
    if declared.unit is not None or declared.notation is not None:
        more["callback"] = read_by(declared.parse)
    elif int in declared.kinds:
        more["type"] = float if float in declared.kinds else int
    elif Path in declared.kinds:
        more["type"] = FILE
    elif declared.repeated:
        more |= {"multiple": True, "callback": lambda _ctx, _param, texts: texts or None}
    short = ["-m"] if declared.name == "model" else []
    return click.option(*short, declared.flag, metavar=declared.metavar, **more)


def policy_options(recorded: bool = False) -> list[Setting]:
    """Return the policy settings that are command-line options, each with its heading in the help.

    If a setting has no heading of its own, the heading names the policies that have the setting.
    recorded: return only the settings that a routing trace records. The help then shows "as
    recorded" as their default.
    """
    made = []
    for name, declared in policy_settings().items():
        if declared.option and (declared.recorded or not recorded):
            if recorded:
                declared = replace(declared, shown="as recorded", group="")
            made.append(replace(declared, group=declared.group or of_policies(owners(name))))
    return made


def of_policies(names: Sequence[str]) -> str:
    """Return the heading in the help for settings that the named policies share."""
    heading = "Policies" if len(names) > 1 else "Policy"
    return f"{heading} {', '.join(names)}"


_OWN = [each for each in Config.declared().values() if each.option]
_MODEL = [each for each in _OWN if not (each.answer or each.conversation)]


def model_options_with(none: str | None = None) -> Decorator:
    """Return a decorator that adds the options that choose a model and how the model runs.

    none: a text about the command without a model, for the help of the option -m. The help shows it
        after "default:". For example, `moe-edge plan` without a model prints a table of models, so
        its text is "a table". If `none` is None, the help shows the usual default.
    """
    own = [
        replace(each, shown=none or each.shown) if each.name == "model" else each for each in _MODEL
    ]
    return together(_NAMED, *own, *policy_options())


model_options = model_options_with()
answer_options = together(*(each for each in _OWN if each.answer))
conversation_options = together(*(each for each in _OWN if each.conversation))


CALIB_TOKENS = option(
    "--calib-tokens N",
    "Use at most N tokens of the calibration text.  [default: 65536, or 8192 for the "
    "loss table of calibrate]",
)
RAM = option_of(
    replace(
        Config.declared()["ram"],
        help="Memory limit for the calibration, such as 6GiB (or 6G) or 500MB. The experts of the "
        "model then stream from the file.",
        shown="none",
        group="",
    )
)
method_options = together(
    option(
        "--method NAME",
        "Quantization method. rtn: round to nearest. imatrix: errors are weighted by an importance "
        "matrix of a text. gptq: later columns compensate the errors of earlier ones (needs "
        "torch).  [default: rtn]",
    ),
    option(
        "--calib TEXT",
        "Calibration text: plain text, .jsonl (one text per record), or compressed (.xz).",
        type=FILE,
    ),
    CALIB_TOKENS,
    option(
        "--imatrix FILE", "File with an importance matrix of llama.cpp, used instead of a text."
    ),
    RAM,
)


def make_config(options: dict[str, Any]) -> Config:
    """Return the configuration for the options of a command.

    If the user named no model, the configuration has the demo model.
    """
    chosen = given(options)
    asked = one_name(chosen.pop("named", None), chosen.get("model"))
    chosen["model"] = demo_model() if asked is None else asked
    for name in {"model", "low"} & chosen.keys():
        chosen[name] = model_path(str(chosen[name]))
    with as_options():
        config = Config.build(**chosen)
    _note_capped(config.threads)
    return config


def chat_config(options: dict[str, Any]) -> Config:
    """Return the configuration that `moe-edge chat` would use with these options.

    Commands that plan or test a model use the same configuration.
    """
    return make_config({"remember": True, **given(options)})


@contextmanager
def as_options() -> Iterator[None]:
    """Return a context manager that turns a SettingError in its `with` block into a usage error.

    The usage error (click.BadParameter) names the command-line option of the setting.
    """
    try:
        yield
    except SettingError as error:
        hint = f"'{flag_of(error.name)}'"
        raise click.BadParameter(error.complaint, param_hint=hint) from error


def given(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options that the user gave, which are those that are not None."""
    return {name: value for name, value in options.items() if value is not None}


def demo_model() -> Path:
    """Return the path of the demo model, which comes with the package.

    Raises MoeEdgeError if the file is missing.
    """
    here = Path(__file__).resolve()
    for folder in (here.parents[1], here.parents[2], Path.cwd()):
        if (folder / DEMO).is_file():
            return folder / DEMO
    raise MoeEdgeError(f"the demo model {DEMO} is missing: name a model with -m FILE.gguf")


@contextmanager
def quantizer(source: Path, options: dict[str, Any]) -> Iterator[ExpertQuantizer | None]:
    """Yield the quantizer that the options of a command request; None for plain rounding.

    source: the model whose experts are quantized. The quantizer reads the calibration text first,
    if the user gave one. Notes for the user are printed.
    """
    from orchestrator.lab.calibrate.methods import open_quantizer

    notes: list[str] = []
    with ExitStack() as stack:
        with progress_bar("Calibrating") as progress:
            opened = open_quantizer(chosen_method(options), source, progress, notes.append)
            method = stack.enter_context(opened)
        print_notes(notes)
        notes.clear()
        yield method
    print_notes(notes)


def chosen_method(options: dict[str, Any], has_text: bool = False) -> Method:
    """Return the quantization method that the options of a command request.

    Raises UsageError if --calib-tokens or --ram is given, but the command has no calibration text.
    has_text: the command has a default text, so that --calib is not needed.
    """
    from orchestrator.lab.calibrate.methods import Method

    has_text = has_text or bool(options.get("calib"))
    if options.get("calib_tokens") and not has_text:
        raise click.UsageError(
            "--calib-tokens needs a text: give --calib TEXT, or leave --calib-tokens out"
        )
    if options.get("ram") and not has_text:
        raise click.UsageError(
            "--ram has no effect without a calibration text: give --calib TEXT, or leave --ram out"
        )
    renamed = {"name": "method", "tokens": "calib_tokens"}
    names = ("calib", "imatrix", "ram", "threads", *renamed)
    return Method(**given({name: options.get(renamed.get(name, name)) for name in names}))


def open_runtime(
    config: Config, console: Console, answering: Answering | None = None, **more: Any
) -> Runtime:
    """Open a model, and show the progress and notes on the console.

    answering: settings of a runtime that answers requests, such as the number of parallel answers.
    more: further parameters of Runtime.open.
    """
    from orchestrator.cache.files import check_target
    from orchestrator.runtime.runtime import Runtime

    profile = config.given("profile")
    if profile is not None and profile.parent.is_dir():  # a missing folder is created later
        check_target(profile)
    with console.bars():
        runtime = Runtime.open(config, console.bar, answering, **more)
    if runtime.note:
        console.note(runtime.note)
    return runtime


def say(text: str) -> None:
    """Print text to stdout, without control characters."""
    click.echo(strip_controls(text))


def say_result(found: Any, render: Callable[[Any], str], as_json: bool) -> None:
    """Print a result to stdout: as one JSON object, or as the text that `render` returns."""
    click.echo(json.dumps(found) if as_json else strip_controls(render(found)))


def print_notes(sentences: Iterable[str]) -> None:
    """Print sentences to stderr, each as a line that begins with "Note: "."""
    for sentence in sentences:
        note(f"Note: {sentence}")


def names_of(text: str) -> list[str]:
    """Split a list such as "q8_0,q4_k" at its commas, and return the names in lower case."""
    return [name.strip().lower() for name in text.split(",") if name.strip()]


def tier_names(text: str) -> list[str]:
    """Return the precisions in the value of --tiers. Raises UsageError if the value has none."""
    names = names_of(text)
    if not names:
        raise click.UsageError("--tiers is empty: give precisions, such as q8_0,q4_k,q2_k")
    return names


def model_path(text: str) -> Path:
    """Return the local path of the model that a text names.

    text: a path, the name of a downloaded model, or hf:OWNER/NAME[/FILE] for a model on the Hugging
    Face Hub. A model on the Hub is downloaded if necessary, with a progress bar.
    """
    from orchestrator.library.models import find_model

    return find_model(text, note, lambda: progress_bar("Downloading"))


def note(text: str) -> None:
    """Print text to stderr, without control characters."""
    click.echo(strip_controls(text), err=True)
