"""The options that several commands share, and what is made of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from gguf_tools.units import format_size
from orchestrator.cli_files import AT_LEAST_1, FILE, model_path, print_notes
from orchestrator.config import TRANSITION_RATE, Config, parse_size
from orchestrator.console import Console, progress_bar
from orchestrator.errors import MoeEdgeError, SettingError

if TYPE_CHECKING:
    from gguf_tools.quantize.methods import ExpertQuantizer
    from orchestrator.calibrate.methods import Method
    from orchestrator.engine import Engine

DEMO = Path("models/demo/moe-edge-demo.gguf")

F = TypeVar("F", bound=Callable[..., Any])


def size(_ctx: click.Context, _param: click.Parameter, value: str | None) -> int | None:
    """The bytes of an option that is written as 6GiB or 500MB."""
    try:
        return None if value is None else parse_size(value)
    except MoeEdgeError as error:
        raise click.BadParameter(str(error)) from error


def rate(ctx: click.Context, param: click.Parameter, value: str | None) -> int | None:
    """As size, or 0."""
    return 0 if value is not None and value.strip() == "0" else size(ctx, param, value)


def _default(name: str) -> str:
    """The default of a field of the config, for a help text."""
    return f"[default: {Config.__dataclass_fields__[name].default}]"


def together(*options: Callable[[F], F]) -> Callable[[F], F]:
    """Several options as one decorator, in the order of the help."""

    def apply(function: F) -> F:
        for option in reversed(options):
            function = option(function)
        return function

    return apply


model_options = together(
    click.option(
        "-m",
        "--model",
        type=FILE,
        metavar="FILE",
        help="A MoE model: any GGUF, or a packed one; hf:OWNER/NAME[/FILE] fetches it.  "
        "[default: the demo]",
    ),
    click.option(
        "--low",
        type=FILE,
        metavar="FILE",
        help="The same model in a lower precision, as a second GGUF.",
    ),
    click.option(
        "--ram",
        callback=size,
        metavar="SIZE",
        help="Cap on everything the model takes, as 6GiB or 500MB.  [default: free memory]",
    ),
    click.option(
        "--vram",
        callback=size,
        metavar="SIZE",
        help="Cap on everything the model takes of a GPU's memory.  [default: what is free there]",
    ),
    click.option(
        "--device",
        metavar="NAME",
        help=f"Where experts compute: cuda0, cpu, or auto: a GPU if there is one.  "
        f"{_default('device')}",
    ),
    click.option(
        "--misses",
        metavar="HOW",
        help="How a GPU gets experts that it lacks: auto, copy, read (in place, from the host's "
        "memory) or compute (on the CPU).  [default: auto]",
    ),
    click.option(
        "--expert-ram",
        callback=size,
        metavar="SIZE",
        help="Cap on the expert slots alone, for experiments.",
    ),
    click.option(
        "--policy",
        metavar="NAME",
        help="Who decides what stays in memory: plain, lru, dymoe, dynaexq.  [default: by fit]",
    ),
    click.option(
        "--retention",
        type=float,
        metavar="R",
        help="Average share of critical experts, 0 to 1.  [default: 1 with one precision, else "
        "0.75]",
    ),
    click.option(
        "--schedule",
        metavar="NAME",
        help=f"How that share falls with depth: cosine, linear, flat.  {_default('schedule')}",
    ),
    click.option(
        "--prefetch",
        metavar="WHEN",
        help=f"Load ahead: on, off, or auto: while it pays.  {_default('prefetch')}",
    ),
    click.option(
        "--high-tier",
        metavar="TIER",
        help="Precision of critical experts, as q4_k.  [default: the best that fits, else q4_k]",
    ),
    click.option(
        "--low-tier", metavar="TIER", help="Precision of the others, or skip.  [default: by fit]"
    ),
    click.option(
        "--renormalize",
        is_flag=True,
        help="With --low-tier skip: the weights of the other experts make up for the skipped.",
    ),
    click.option(
        "--profile",
        type=FILE,
        metavar="FILE",
        help="Where dynaexq keeps which experts were used; without it, a chat uses the user cache.",
    ),
    click.option(
        "--transition-rate",
        callback=rate,
        metavar="SIZE",
        help="What dynaexq may read in a second beside decoding, as 64MiB; 0: no limit.  "
        f"[default: {format_size(TRANSITION_RATE)}]",
    ),
    click.option("--ctx", type=int, metavar="N", help=f"Context in tokens.  {_default('ctx')}"),
    click.option("--threads", type=int, metavar="N", help="Compute threads.  [default: the cores]"),
)

answer_options = together(
    click.option(
        "--max-tokens",
        type=int,
        metavar="N",
        help="Longest answer in tokens.  [default: what the context has room for]",
    ),
    click.option(
        "--temp",
        type=float,
        metavar="T",
        help=f"Temperature; 0 takes the likeliest.  {_default('temp')}",
    ),
    click.option(
        "--top-p", type=float, metavar="P", help=f"Nucleus sampling.  {_default('top_p')}"
    ),
    click.option("--seed", type=int, metavar="N", help="Makes the sampling repeatable."),
    click.option("--system", metavar="TEXT", help="System prompt."),
)


CALIB_TOKENS = click.option(
    "--calib-tokens",
    type=AT_LEAST_1,
    metavar="N",
    help="Use N tokens of it at most.  [default: 65536]",
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
)


def make_config(options: dict[str, Any]) -> Config:
    """The config of the options that were given; without --model, of the demo model."""
    from orchestrator.choice import DYMOE

    chosen = given(options)
    if "model" not in chosen:
        chosen["model"] = demo_model()
    for name in {"model", "low"} & chosen.keys():
        chosen[name] = model_path(str(chosen[name]))
    for name in ("schedule", "prefetch"):
        if chosen.get(name, "off") != "off" and chosen.get("policy", DYMOE) != DYMOE:
            raise click.UsageError(
                f"--{name} is for --policy {DYMOE}: leave it out, or ask for that policy"
            )
    try:
        return Config.build(**chosen)
    except SettingError as error:
        option = "--" + error.name.replace("_", "-")
        raise click.BadParameter(error.complaint, param_hint=f"'{option}'") from error


def given(options: dict[str, Any]) -> dict[str, Any]:
    """The options that were given."""
    return {name: value for name, value in options.items() if value is not None}


def demo_model() -> Path:
    """The demo model of this checkout. Raises MoeEdgeError where it is not there."""
    for folder in (Path(__file__).resolve().parent.parent, Path.cwd()):
        if (folder / DEMO).is_file():
            return folder / DEMO
    raise MoeEdgeError(f"the demo model {DEMO} is not here: name a model with -m FILE.gguf")


@contextmanager
def quantizer(
    source: Path, threads: int | None, options: dict[str, Any]
) -> Iterator[ExpertQuantizer | None]:
    """What method_options ask for, for the experts of a model; reads the text where one is
    given."""
    from orchestrator.calibrate.methods import open_quantizer

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
    from orchestrator.calibrate.methods import Method

    if options.get("calib_tokens") and not options.get("calib"):
        raise click.UsageError("--calib-tokens is for a text: give --calib TEXT, or leave it out")
    renamed = {"name": "method", "calib": "calib", "imatrix": "imatrix", "tokens": "calib_tokens"}
    chosen = given({name: options.get(option) for name, option in renamed.items()})
    return Method(**chosen, threads=threads)


def open_engine(config: Config, console: Console) -> Engine:
    from orchestrator.engine import Engine
    from orchestrator.files import check_target

    if config.profile is not None and config.profile.parent.is_dir():  # else it is made
        check_target(config.profile)
    try:
        engine = Engine.open(config, console.load_bar)
    finally:
        console.end_bar()
    if engine.note:
        console.note(engine.note)
    return engine
