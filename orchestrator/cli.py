"""The command line: parse, build the config, call one function.

Everything heavy is imported inside the commands, so that --help answers at once.
"""

from __future__ import annotations

import errno
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from gguf_tools.units import format_size
from orchestrator import cli_bench, cli_files, cli_replay
from orchestrator.config import Config
from orchestrator.console import Console, progress_bar, strip_controls
from orchestrator.errors import MoeEdgeError

if TYPE_CHECKING:
    from gguf_tools.pack import PackReport
    from orchestrator.engine import Engine

DEMO = Path("models/demo/moe-edge-demo.gguf")
FILE = click.Path(path_type=Path)
AT_LEAST_1 = click.IntRange(min=1)

F = TypeVar("F", bound=Callable[..., Any])


class Commands(click.Group):
    """The commands, and the edge where an error becomes one sentence and an exit status."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except MoeEdgeError as error:
            raise _sentence(str(error)) from error
        except KeyboardInterrupt:
            ctx.exit(130)
        except OSError as error:
            if error.errno == errno.EPIPE or not error.strerror:
                raise
            where = f"{error.filename}: " if error.filename else ""
            raise _sentence(f"{where}{error.strerror}") from error


def _sentence(text: str) -> click.ClickException:
    """An error for the user; what a file or its name smuggled into it stays harmless."""
    return click.ClickException(strip_controls(text))


def _default(name: str) -> str:
    """The default of a field of the config, for a help text."""
    return f"[default: {Config.__dataclass_fields__[name].default}]"


def _options(*options: Callable[[F], F]) -> Callable[[F], F]:
    def apply(function: F) -> F:
        for option in reversed(options):
            function = option(function)
        return function

    return apply


model_options = _options(
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
        callback=cli_replay.size,
        metavar="SIZE",
        help="Cap on everything the model takes, as 6GiB or 500MB.  [default: free memory]",
    ),
    click.option(
        "--expert-ram",
        callback=cli_replay.size,
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
        "--profile",
        type=FILE,
        metavar="FILE",
        help="Where dynaexq keeps which experts were used; without it, a chat uses the user cache.",
    ),
    click.option("--ctx", type=int, metavar="N", help=f"Context in tokens.  {_default('ctx')}"),
    click.option("--threads", type=int, metavar="N", help="Compute threads.  [default: the cores]"),
)

answer_options = _options(
    click.option(
        "--max-tokens",
        type=int,
        metavar="N",
        help=f"Longest answer in tokens.  {_default('max_tokens')}",
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


def _print_version(ctx: click.Context, _param: click.Parameter, value: bool) -> None:
    if not value or ctx.resilient_parsing:
        return
    from importlib.metadata import PackageNotFoundError, version

    found = []
    for package in ("moe-edge", "llama_cpp_python"):
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            found.append(f"{package} (not installed)")
    click.echo(", ".join(found))
    ctx.exit()


@click.group(
    name="moe-edge",
    cls=Commands,
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_print_version,
    help="Show the versions and exit.",
)
def cli() -> None:
    """Run Mixture-of-Experts models that do not fit the memory: experts stay on
    disk in several precisions, and come into RAM within a budget."""


@cli.command()
@model_options
@answer_options
@click.option(
    "-p",
    "--prompt",
    metavar="TEXT",
    help="Answer this, print the answer alone, and exit. So does text on stdin.",
)
@click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="With a prompt: print one JSON object, the text and its statistics.",
)
def chat(prompt: str | None, as_json: bool, **options: Any) -> None:
    """Talk to a model."""
    from orchestrator.chat import Chat, Session, one_shot

    console = Console()
    if prompt is None and not console.in_tty:
        prompt = sys.stdin.read() if sys.stdin else ""
        if not prompt.strip():
            raise click.UsageError("no prompt: give -p TEXT, or text on stdin, or a terminal")
    if prompt is None and as_json:
        raise click.UsageError("--json needs a prompt: give -p TEXT, or text on stdin")
    if prompt is not None and not prompt.strip():
        raise click.UsageError("the prompt is empty")
    config = _config({**options, "remember": True})
    with _engine(config, console) as engine:
        session = Session(engine, config)
        if prompt is None:
            Chat(session, console).run()
        elif not one_shot(session, console, prompt.strip(), as_json):
            raise KeyboardInterrupt


def _config(options: dict[str, Any]) -> Config:
    """The config of the options that were given; without --model, of the demo model."""
    given = _given(options)
    if "model" not in given:
        given["model"] = _demo_model()
    for name in {"model", "low"} & given.keys():
        given[name] = cli_files.model_path(str(given[name]))
    return Config.build(**given)


def _given(options: dict[str, Any]) -> dict[str, Any]:
    """The options that were given."""
    return {name: value for name, value in options.items() if value is not None}


def _demo_model() -> Path:
    for folder in (Path(__file__).resolve().parent.parent, Path.cwd()):
        if (folder / DEMO).is_file():
            return folder / DEMO
    raise MoeEdgeError(f"the demo model {DEMO} is not here: name a model with -m FILE.gguf")


def _engine(config: Config, console: Console) -> Engine:
    from orchestrator.engine import Engine

    try:
        engine = Engine.open(config, console.load_bar)
    finally:
        console.end_bar()
    if engine.note:
        console.note(engine.note)
    return engine


@cli.command()
@click.argument("source", metavar="IN", type=FILE)
@click.argument("target", metavar="OUT", type=FILE)
@click.option(
    "--tiers",
    required=True,
    metavar="LIST",
    help="Precisions to store, best first, as q8_0,q4_k,q2_k.",
)
@click.option(
    "--dense",
    type=click.Choice(["q8_0"]),
    help="Also quantize the F16 and F32 matrices that are not experts.",
)
@click.option("--threads", type=AT_LEAST_1, metavar="N", help="Threads.  [default: the cores]")
def pack(source: Path, target: Path, tiers: str, dense: str | None, threads: int | None) -> None:
    """Write the experts of a GGUF in several precisions into one file."""
    from gguf_tools.pack import pack as run

    names = [name.strip().lower() for name in tiers.split(",") if name.strip()]
    if not names:
        raise click.UsageError("--tiers names no precision: write it as q8_0,q4_k,q2_k")
    with progress_bar("Packing") as progress:
        report = run(source, target, names, dense=dense, progress=progress, threads=threads)
    _print_report(report)


@cli.command()
@click.argument("source", metavar="IN", type=FILE)
@click.argument("target", metavar="OUT", type=FILE)
@click.option("--tier", required=True, metavar="TIER", help="The precision to keep, as q4_k.")
def export(source: Path, target: Path, tier: str) -> None:
    """Write one precision of a packed file as a GGUF for any llama.cpp."""
    from gguf_tools.pack import export as run

    with progress_bar("Exporting") as progress:
        report = run(source, target, tier.lower(), progress=progress)
    _print_report(report)


def _print_report(report: PackReport) -> None:
    """What was written on stdout, what is odd about it on stderr."""
    tiers = ", ".join(
        f"{name} {bpw:.2f} bits {format_size(nbytes)}" for name, bpw, nbytes in report.tiers
    )
    click.echo(f"{report.path}: {format_size(report.nbytes)}, experts in {tiers}")
    for sentence in (*report.fallbacks, *report.warnings):
        click.echo(f"Note: {sentence}", err=True)


@cli.command()
@click.argument("file", metavar="FILE", type=FILE)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def inspect(file: Path, as_json: bool) -> None:
    """Show what a model file holds, and what fits which budget."""
    from gguf_tools.experts import ExpertModel
    from gguf_tools.inspect import describe, render
    from orchestrator.hardware import scratch_bytes

    with ExpertModel.open(file) as model:
        description = describe(model, scratch_bytes(model, Config.build(model=file)))
    click.echo(json.dumps(description) if as_json else strip_controls(render(description)))


cli.add_command(cli_files.pull)
cli.add_command(cli_files.verify)
cli.add_command(cli_bench.bench)


@cli.command("eval")
@model_options
@click.option(
    "--text",
    type=FILE,
    metavar="FILE",
    help="Text to predict; .jsonl records have a text each; .xz is unpacked.",
)
@click.option(
    "--choices",
    type=FILE,
    metavar="FILE",
    help='JSON lines {"question", "choices", "answer"}, answered by likelihood.',
)
@click.option("--kl", is_flag=True, help="Compare with the best tier of the file.")
@click.option("--tokens", type=AT_LEAST_1, metavar="N", help="Use N tokens of the text at most.")
@click.option("--window", type=int, metavar="N", help="Tokens of one context.  [default: 512]")
@click.option("--prefill", is_flag=True, help="Judge the text read as prompts, not by token.")
@click.option(
    "--reuse",
    is_flag=True,
    help="A low request may use a high copy in memory, as in a chat; results then depend on "
    "the memory.",
)
@click.option(
    "--study",
    metavar="NAME",
    help="A table or figure of the paper: accuracy, retention, critical, schedule, depth, "
    "similarity.",
)
@click.option("--out", type=FILE, metavar="DIR", help="Where a study writes tables and plots.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def evaluate(study: str | None, out: Path | None, as_json: bool, **options: Any) -> None:
    """Measure quality: perplexity, distance from the best tier, multiple choice.

    Each token is decided on its own, as in an answer: what is decided for a prompt sees its
    later tokens."""
    from dataclasses import asdict, fields

    from orchestrator.eval import EvalOptions, render, run_study
    from orchestrator.eval import evaluate as run

    names = {field.name for field in fields(EvalOptions)}
    chosen = {name: options.pop(name) for name in names & options.keys()}
    config, wanted = _config(options), EvalOptions(**_given(chosen))
    console = Console()
    try:
        if study is None:
            if out is not None:
                raise click.UsageError("--out is where a study writes: give --study NAME")
            result = run(config, wanted, console.bar)
            text = render(result)
        else:
            tables = run_study(study, config, wanted, out, console.bar)
            result = {"study": study, "tables": [asdict(table) for table in tables]}
            text = "\n\n".join(table.markdown() for table in tables)
    finally:
        console.end_bar()
    click.echo(json.dumps(result) if as_json else strip_controls(text))


@cli.command()
@model_options
@click.option("--out", required=True, type=FILE, metavar="FILE", help="The trace, as T.npz.")
@click.option(
    "--text", type=FILE, metavar="FILE", help="Evaluate this text, token by token, as decoding."
)
@click.option(
    "--prefill",
    type=click.IntRange(min=0),
    default=0,
    metavar="N",
    help="With --text: take its first N tokens as a prompt.  [default: 0]",
)
@click.option("-p", "--prompt", metavar="TEXT", help="Answer this prompt instead.")
@click.option(
    "--tokens",
    type=AT_LEAST_1,
    metavar="N",
    help="Tokens of the text, or of the answer.  [default: what the context holds, or 512]",
)
@click.option("--seed", type=click.IntRange(min=0), metavar="N", help="Seed of the answer.")
def trace(
    out: Path,
    text: Path | None,
    prefill: int,
    prompt: str | None,
    tokens: int | None,
    **options: Any,
) -> None:
    """Record the routing of a run, for `moe-edge replay`.

    Without --policy it is dymoe, which looks ahead, under the whole memory."""
    from orchestrator.replay.record import record_answer, record_text
    from orchestrator.replay.trace import check_target, write_trace
    from orchestrator.sampling import Sampling

    if (text is None) == (prompt is None):
        raise click.UsageError("what to evaluate: give either --text FILE or -p TEXT")
    if prefill and text is None:
        raise click.UsageError("--prefill is for --text: a prompt is a prefill already")
    check_target(out)
    options["policy"] = options["policy"] or "dymoe"
    config = _config(options)
    words = None if text is None else text.read_text("utf-8", "replace")
    with _engine(config, Console()) as engine:
        if words is not None:
            recorded = record_text(engine, words, tokens, prefill)
        else:
            sampling = Sampling(config.temp, config.top_p, config.seed)
            recorded = record_answer(engine, prompt or "", sampling, tokens or config.max_tokens)
    write_trace(out, recorded)
    steps, size = len(recorded.arrays["step_phase"]), format_size(out.stat().st_size)
    click.echo(f"{out}: {steps} steps of {recorded.header.model}, {size}")


cli.add_command(cli_replay.replay)


def main() -> None:
    """The entry point `moe-edge`."""
    cli(prog_name=cli.name)
