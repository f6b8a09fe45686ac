"""The options that several commands share, and what is made of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from orchestrator.chat.console import Console, progress_bar
from orchestrator.cli.files import AT_LEAST_1, FILE, model_path, print_notes
from orchestrator.config import Config
from orchestrator.errors import MoeEdgeError, SettingError
from orchestrator.policy import owners, policy_settings
from orchestrator.settings import Setting, flag_of, parse_size

if TYPE_CHECKING:
    from gguf_tools.quantize.methods import ExpertQuantizer
    from orchestrator.engine.engine import Engine
    from orchestrator.lab.calibrate.methods import Method

DEMO = Path("models/demo/moe-edge-demo.gguf")

F = TypeVar("F", bound=Callable[..., Any])


def read_by(parse: Callable[[str], Any]) -> Callable[..., Any]:
    """A callback of options whose text means what `parse` makes of it."""

    def read(_ctx: click.Context, _param: click.Parameter, text: str | None) -> Any:
        try:
            return None if text is None else parse(text)
        except MoeEdgeError as error:
            raise click.BadParameter(str(error)) from error

    return read


size = read_by(parse_size)


def together(*options: Callable[[F], F]) -> Callable[[F], F]:
    """Several options as one decorator, in the order of the help."""

    def apply(function: F) -> F:
        for option in reversed(options):
            function = option(function)
        return function

    return apply


def option_of(declared: Setting, default: str | None = None) -> Callable[[F], F]:
    """The option of a setting. default: how the help names it, in the place of the declared
    one."""
    shown = declared.default_text if default is None else default
    text = f"{declared.help}  [default: {shown}]" if shown else declared.help
    more: dict[str, Any] = {"help": text, "hidden": declared.hidden}
    if bool in declared.kinds:
        flags = declared.flag
        if declared.default:
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


def policy_options(default: str | None = None, recorded: bool = False) -> list[Callable[[F], F]]:
    """The options of all policies' settings, each with the policies that have it. recorded: of
    those alone that a trace records."""
    return [
        option_of(
            replace(declared, help=f"{declared.help} For {' and '.join(owners(name))}."), default
        )
        for name, declared in policy_settings().items()
        if declared.option and (declared.recorded or not recorded)
    ]


_OWN = [each for each in Config.declared().values() if each.option]
_MODEL = [each for each in _OWN if not (each.answer or each.conversation)]
_BESIDE_POLICY = [each.name for each in _MODEL].index("policy") + 1

model_options = together(
    *map(option_of, _MODEL[:_BESIDE_POLICY]),
    *policy_options(),
    *map(option_of, _MODEL[_BESIDE_POLICY:]),
)
answer_options = together(*(option_of(each) for each in _OWN if each.answer))
conversation_options = together(*(option_of(each) for each in _OWN if each.conversation))


CALIB_TOKENS = click.option(
    "--calib-tokens",
    type=AT_LEAST_1,
    metavar="N",
    help="Use N tokens of it at most.  [default: 65536]",
)
RAM = option_of(
    replace(
        Config.declared()["ram"],
        help="Cap on everything that reading a text takes, as 6GiB (6G means the same) or 500MB: "
        "the experts of the model that reads then come from the file as they are needed.",
        shown="none",
    )
)
method_options = together(
    click.option(
        "--method",
        metavar="NAME",
        help="How experts are quantized: rtn (to the nearest), imatrix (columns weighted by what "
        "they see in a text), gptq (later columns make up for the errors of earlier ones; needs "
        "torch).  [default: rtn]",
    ),
    click.option(
        "--calib",
        type=FILE,
        metavar="TEXT",
        help="The text that tells what matters; .jsonl records have a text each; .xz is unpacked.",
    ),
    CALIB_TOKENS,
    click.option(
        "--imatrix",
        type=FILE,
        metavar="FILE",
        help="An importance matrix of llama.cpp, in the place of a text.",
    ),
    RAM,
)


def make_config(options: dict[str, Any]) -> Config:
    """The config of the options that were given; without --model, of the demo model."""
    chosen = given(options)
    if "model" not in chosen:
        chosen["model"] = demo_model()
    for name in {"model", "low"} & chosen.keys():
        chosen[name] = model_path(str(chosen[name]))
    try:
        return Config.build(**chosen)
    except SettingError as error:
        raise bad_option(error) from error


def chat_config(options: dict[str, Any]) -> Config:
    """As make_config, of what `moe-edge chat` runs with these options. Commands that say what would
    run, or try it, take the same."""
    return make_config({**options, "remember": True, "conversations": True})


def bad_option(error: SettingError) -> click.BadParameter:
    """The same about the option that asks for the setting."""
    return click.BadParameter(error.complaint, param_hint=f"'{flag_of(error.name)}'")


def given(options: dict[str, Any]) -> dict[str, Any]:
    """The options that were given."""
    return {name: value for name, value in options.items() if value is not None}


def demo_model() -> Path:
    """The demo model of this checkout. Raises MoeEdgeError where it is not there."""
    for folder in (Path(__file__).resolve().parents[2], Path.cwd()):
        if (folder / DEMO).is_file():
            return folder / DEMO
    raise MoeEdgeError(f"the demo model {DEMO} is not here: name a model with -m FILE.gguf")


@contextmanager
def quantizer(
    source: Path, threads: int | None, options: dict[str, Any]
) -> Iterator[ExpertQuantizer | None]:
    """What method_options ask for, for the experts of a model; reads the text where one is
    given."""
    from orchestrator.lab.calibrate.methods import open_quantizer

    notes: list[str] = []
    with ExitStack() as stack:
        with progress_bar("Calibrating") as progress:
            chosen = chosen_method(threads, options)
            opened = open_quantizer(chosen, source, progress, notes.append)
            method = stack.enter_context(opened)
        print_notes(notes)
        notes.clear()
        yield method
    print_notes(notes)


def chosen_method(threads: int | None, options: dict[str, Any]) -> Method:
    """The method that was asked for."""
    from orchestrator.lab.calibrate.methods import Method

    if options.get("calib_tokens") and not options.get("calib"):
        raise click.UsageError("--calib-tokens is for a text: give --calib TEXT, or leave it out")
    if options.get("ram") and not options.get("calib"):
        raise click.UsageError("--ram is for reading a text: give --calib TEXT, or leave it out")
    renamed = {"name": "method", "tokens": "calib_tokens"}
    names = ("calib", "imatrix", "ram")
    chosen = given({name: options.get(renamed.get(name, name)) for name in (*names, *renamed)})
    return Method(**chosen, threads=threads)


def open_engine(config: Config, console: Console) -> Engine:
    from orchestrator.cache.files import check_target
    from orchestrator.engine.engine import Engine

    profile = config.given("profile")
    if profile is not None and profile.parent.is_dir():  # else it is made
        check_target(profile)
    try:
        console.load_bar(0.0)  # a plan may be chosen first, for which this machine is measured
        engine = Engine.open(config, console.load_bar)
    finally:
        console.end_bar()
    if engine.note:
        console.note(engine.note)
    return engine
