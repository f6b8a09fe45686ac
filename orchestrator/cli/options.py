"""What several commands share: types of options, the options themselves, what is made of them, and
how a result is printed."""

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
from orchestrator.errors import GGUFError, MoeEdgeError, SettingError
from orchestrator.policy import owners, policy_settings
from orchestrator.settings import Setting, flag_of, parse_size

if TYPE_CHECKING:
    from gguf_tools.quantize.methods import ExpertQuantizer
    from orchestrator.lab.calibrate.methods import Method
    from orchestrator.lab.table import Table
    from orchestrator.runtime.answering import Answering
    from orchestrator.runtime.runtime import Runtime

# Where a context keeps whether outputs may be replaced.
_FORCE = "moe-edge.force"


class NamedPath(click.Path):
    """A path that names something: "" would be the current folder."""

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        if value == "":
            self.fail("the name is empty", param, ctx)
        return super().convert(value, param, ctx)


class NewPath(NamedPath):
    """The name of an output. What has it already is replaced where FORCE was given, alone. An
    interrupt that comes once it is there ends the program."""

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        if value == "-":
            self.fail("an output is a file, not stdout (./- is a file of that name)", param, ctx)
        path = super().convert(value, param, ctx)
        complaint = _taken(path, ctx)
        if complaint:
            self.fail(complaint, param, ctx)
        return path


def _taken(path: Path, ctx: click.Context) -> str | None:
    """Why an output of this name is not to be written, or None. Nobody writes over a folder."""
    from gguf_tools.file.unfinished import irregular

    complaint = irregular(path)
    if complaint:
        return f"{path} {complaint}"
    if not ctx.meta.get(_FORCE) and os.path.lexists(path) and not path.is_dir():
        return f"{path} exists: choose another name, or replace it with --force"
    interrupts.ends_with(path)
    return None


def refuse_taken(path: Path) -> None:
    """As NewPath, of an output that is named after an input: raises UsageError."""
    complaint = _taken(path, click.get_current_context())
    if complaint:
        raise click.UsageError(complaint)


def check_study(study: str | None, out: Path | None) -> None:
    """Raises UsageError for --out without a study, and where its tables are not to be written."""
    if out is not None and study is None:
        raise click.UsageError("--out is where a study writes: give --study NAME")
    if out is not None:
        refuse_taken(out / f"{study}.md")


def _remember_force(ctx: click.Context, _param: click.Parameter, given: bool) -> None:
    ctx.meta[_FORCE] = given


class Number(click.FloatRange):
    """A number of a range; what is none (nan) is in no range."""

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        number = super().convert(value, param, ctx)
        if math.isnan(number):
            self.fail(f"{value} is no number", param, ctx)
        return number


FILE = NamedPath(path_type=Path)
NEW_FILE = NewPath(path_type=Path)
AT_LEAST_0 = click.IntRange(min=0)

DEMO = Path("models/demo/moe-edge-demo.gguf")

Decorator = Callable[[Any], Any]


def read_by(parse: Callable[[str], Any]) -> Callable[..., Any]:
    """A callback of options whose text means what `parse` makes of it."""

    def read(_ctx: click.Context, _param: click.Parameter, text: str | None) -> Any:
        try:
            return None if text is None else parse(text)
        except MoeEdgeError as error:
            raise click.BadParameter(str(error)) from error

    return read


# What the words are that stand for values in a help, unless an option has another type.
_VALUES: dict[str, dict[str, Any]] = {
    "N": {"type": click.IntRange(min=1)},
    "FILE": {"type": FILE},
    "DIR": {"type": FILE},
    "SIZE": {"callback": read_by(parse_size)},
}


def option(said: str, help: str, **more: Any) -> Decorator:
    """An option as the help says it, `-p --prompt TEXT`: one without a word for its value or a type
    is a flag, and a word in small letters before that names the parameter. more: as click.option
    has it, and the group of the help."""
    names = said.split()
    if names[-1][0].isupper():
        metavar = names.pop()
        more = {"metavar": metavar, **_VALUES.get(metavar, {}), **more}
    elif "type" not in more:
        more["is_flag"] = True
    return click.option(*names, cls=Option, help=help, **more)


# Of every command with an output. It is read before the output's name is.
FORCE = option(
    "--force",
    "Replace an output that exists.",
    is_eager=True,
    expose_value=False,
    callback=_remember_force,
)

# The name of a model without -m. Its parameter is "named", which make_config takes as the model.
_NAMED = click.argument("named", metavar="[MODEL]", required=False)


def one_name(named: str | None, model: str | Path | None) -> str | None:
    """Return the model that a command line names, as an argument or with -m; None if it names none.
    Raises UsageError if it names two."""
    if named is not None and model is not None:
        raise click.UsageError(f"the model is named twice, {named} and -m {model}: leave one out")
    return named if model is None else str(model)


def model_argument(function: Any) -> Any:
    """Decorator of a command on one file, which is its argument or given with -m. The command gets
    the path as `file`."""

    @_NAMED
    @option("-m --model FILE", "The model, if it is not the argument.", type=str)
    @wraps(function)
    def with_file(*args: Any, named: str | None, model: str | None, **options: Any) -> Any:
        asked = one_name(named, model)
        if asked is None:
            raise click.UsageError("Missing argument 'MODEL': name a file, as MODEL or -m MODEL")
        return function(*args, file=model_path(asked), **options)

    return with_file


JSON = option("--json as_json", "Print one JSON object.")


def _note_capped(threads: int | None) -> int | None:
    """Return `threads`, and tell the user if it will be capped at the cores."""
    if threads is not None and compute_threads(threads) < threads:
        cores = compute_threads(threads)
        note(f"Note: --threads {threads}: capped at {cores}, the cores that this process may use.")
    return threads


THREADS = option(
    "--threads N",
    "Threads, at most one for each core.  [default: the cores]",
    callback=lambda _ctx, _param, threads: _note_capped(threads),
)
STUDY_OUT = option("--out DIR", "Where a study writes tables and plots.")
LOW = option("--low LOW", "The same model in a lower precision, as a second GGUF.", type=FILE)


def together(*options: Setting | Decorator) -> Decorator:
    """Several options as one decorator, in the order of the help: those of settings, and others."""

    def apply(function: Any) -> Any:
        for each in reversed(options):
            function = (option_of(each) if isinstance(each, Setting) else each)(function)
        return function

    return apply


def option_of(declared: Setting) -> Decorator:
    """The option of a setting."""
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
    """The settings of all policies that have options, below the policies that have them. recorded:
    of those alone that a trace records, all of them there, with its values as their defaults."""
    made = []
    for name, declared in policy_settings().items():
        if declared.option and (declared.recorded or not recorded):
            if recorded:
                declared = replace(declared, shown="as recorded", group="")
            made.append(replace(declared, group=declared.group or of_policies(owners(name))))
    return made


def of_policies(names: Sequence[str]) -> str:
    """The heading of what these policies have."""
    return f"{'Policies' if len(names) > 1 else 'Policy'} {', '.join(names)}"


_OWN = [each for each in Config.declared().values() if each.option]
_MODEL = [each for each in _OWN if not (each.answer or each.conversation)]


def options_of_model(none: str | None = None) -> Decorator:
    """What says which model runs, and how. none: what is without a model, but for the demo."""
    own = [
        replace(each, shown=none or each.shown) if each.name == "model" else each for each in _MODEL
    ]
    return together(_NAMED, *own, *policy_options())


model_options = options_of_model()
answer_options = together(*(each for each in _OWN if each.answer))
conversation_options = together(*(each for each in _OWN if each.conversation))


CALIB_TOKENS = option(
    "--calib-tokens N", "Use N tokens of it at most.  [default: 65536, or 8192 for a loss table]"
)
RAM = option_of(
    replace(
        Config.declared()["ram"],
        help="Cap on everything that reading a text takes, as 6GiB (6G means the same) or 500MB: "
        "the experts of the model that reads then come from the file as they are needed.",
        shown="none",
        group="",
    )
)
method_options = together(
    option(
        "--method NAME",
        "How experts are quantized: rtn (to the nearest), imatrix (columns weighted by what "
        "they see in a text), gptq (later columns make up for the errors of earlier ones; needs "
        "torch).  [default: rtn]",
    ),
    option(
        "--calib TEXT",
        "The text that tells what matters; .jsonl records have a text each; .xz is unpacked.",
        type=FILE,
    ),
    CALIB_TOKENS,
    option("--imatrix FILE", "An importance matrix of llama.cpp, in the place of a text."),
    RAM,
)


def make_config(options: dict[str, Any]) -> Config:
    """The config of the options that were given; without --model, of the demo model."""
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
    """Return the config that `moe-edge chat` runs with these options. Commands that say what would
    run, or that try it, use the same."""
    from orchestrator.runtime.answering import Answering

    return Answering().config(make_config({"remember": True, **given(options)}))


@contextmanager
def as_options() -> Iterator[None]:
    """Lets a SettingError name the option that asks for the setting."""
    try:
        yield
    except SettingError as error:
        hint = f"'{flag_of(error.name)}'"
        raise click.BadParameter(error.complaint, param_hint=hint) from error


def given(options: dict[str, Any]) -> dict[str, Any]:
    """The options that were given."""
    return {name: value for name, value in options.items() if value is not None}


def demo_model() -> Path:
    """The demo model, of a wheel or of this checkout. Raises MoeEdgeError where it is not there."""
    here = Path(__file__).resolve()
    for folder in (here.parents[1], here.parents[2], Path.cwd()):
        if (folder / DEMO).is_file():
            return folder / DEMO
    raise MoeEdgeError(f"the demo model {DEMO} is not here: name a model with -m FILE.gguf")


@contextmanager
def quantizer(source: Path, options: dict[str, Any]) -> Iterator[ExpertQuantizer | None]:
    """What method_options and THREADS ask for, for the experts of a model; reads the text where one
    is given."""
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


def chosen_method(options: dict[str, Any]) -> Method:
    """The method that was asked for."""
    from orchestrator.lab.calibrate.methods import Method

    if options.get("calib_tokens") and not options.get("calib"):
        raise click.UsageError("--calib-tokens is for a text: give --calib TEXT, or leave it out")
    if options.get("ram") and not options.get("calib"):
        raise click.UsageError("--ram is for reading a text: give --calib TEXT, or leave it out")
    renamed = {"name": "method", "tokens": "calib_tokens"}
    names = ("calib", "imatrix", "ram", "threads", *renamed)
    return Method(**given({name: options.get(renamed.get(name, name)) for name in names}))


def open_runtime(
    config: Config, console: Console, answering: Answering | None = None, **more: Any
) -> Runtime:
    """Open a model with a bar that shows the progress. more: further parameters of Runtime.open."""
    from orchestrator.cache.files import check_target
    from orchestrator.runtime.runtime import Runtime

    profile = config.given("profile")
    if profile is not None and profile.parent.is_dir():  # else it is made
        check_target(profile)
    with console.bars():
        runtime = Runtime.open(config, console.bar, answering, **more)
    if runtime.note:
        console.note(runtime.note)
    return runtime


def say(text: str) -> None:
    """A line on stdout, or several."""
    click.echo(strip_controls(text))


def say_result(found: Any, render: Callable[[Any], str], as_json: bool) -> None:
    """A result on stdout, as one JSON object or as the text that render makes of it."""
    click.echo(json.dumps(found) if as_json else strip_controls(render(found)))


def say_tables(study: str, tables: Iterable[Table], as_json: bool) -> None:
    """The tables of a study on stdout."""
    tables = list(tables)
    found = {"study": study, "tables": [table.as_dict() for table in tables]}
    say_result(found, lambda _: "\n\n".join(table.markdown() for table in tables), as_json)


def print_notes(sentences: Iterable[str]) -> None:
    """What is odd about a result, on stderr."""
    for sentence in sentences:
        note(f"Note: {sentence}")


def names_of(text: str) -> list[str]:
    """The names in a list that is written as q8_0,q4_k."""
    return [name.strip().lower() for name in text.split(",") if name.strip()]


def tier_names(text: str) -> list[str]:
    """The names in a --tiers option; UsageError where there is none."""
    names = names_of(text)
    if not names:
        raise click.UsageError("--tiers names no precision: write it as q8_0,q4_k,q2_k")
    return names


def model_path(text: str) -> Path:
    """The path that an option names: hf:OWNER/NAME and hf:OWNER/NAME/FILE are fetched; where no
    file has the name, a model that was pulled may (`moe-edge list`). Raises HubError where several
    have it."""
    from gguf_tools.hub import PREFIX, find_pulled, resolve

    if text.startswith(PREFIX):
        return resolve(text, note, lambda: progress_bar("Downloading"))
    found = None if os.path.lexists(text) else find_pulled(text)
    return _local(Path(text)) if found is None else found.paths[0]


def _local(path: Path) -> Path:
    """`path`, unless what it is says what was meant; all else is the reader's to refuse."""
    if path.is_dir():
        hint = "name a GGUF in it"
        if (path / "config.json").is_file():
            hint = "`moe-edge convert` makes one of a checkpoint"
        raise GGUFError(f"{path}: a folder, not a GGUF: {hint}")
    if path.parts and path.parts[0] in ("http:", "https:"):
        raise GGUFError(f"{path}: no file; from the Hugging Face Hub it is hf:OWNER/NAME")
    return path


def note(text: str) -> None:
    """A line on stderr."""
    click.echo(strip_controls(text), err=True)
