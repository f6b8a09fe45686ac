"""Measurements for notebooks: replays, benchmarks and traces, as lists of dicts and plots.

Each of them works on a thread of its own, as an LLM does, so that Ctrl-C ends it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from orchestrator.config import policy_name
from orchestrator.errors import ConfigError, ResourceError
from orchestrator.library.models import config_of, find_model, parsed
from orchestrator.library.process import check_process, loading
from orchestrator.library.progress import Bars
from orchestrator.library.worker import Stops, Worker
from orchestrator.policy import DEFAULT, POLICIES, Policy, policy_class, policy_settings

if TYPE_CHECKING:
    from orchestrator.lab.plotting import Panel

T = TypeVar("T")
Given = str | type[Policy]


class Rows(list[dict[str, Any]]):
    """Rows of measurements, a list with one dict for each row. pandas.DataFrame accepts it.

    `details` holds the complete results from which the rows were made.
    """

    def __init__(
        self, rows: Iterable[dict[str, Any]], details: Any, values: Mapping[str, str]
    ) -> None:
        """Create the list.

        `values` maps the row keys that `plot` shows to the labels of their axes.
        """
        super().__init__(rows)
        self.details, self._values = details, values

    def plot(self, *keys: str) -> Any:
        """Return a matplotlib Figure with a bar for each row, and a panel for each key.

        `keys` are keys of the rows, such as "hit_rate". Without keys the main measurements are
        shown. Raises ConfigError if matplotlib is not installed.
        """
        from orchestrator.lab.plotting import figure_of, require_matplotlib

        require_matplotlib("the call of plot")
        shown = {key: self._values.get(key, key) for key in keys or self._values}
        panels = [self._panel(key, label) for key, label in shown.items()]
        return figure_of(panels, 1)

    def _panel(self, key: str, label: str) -> Panel:
        from orchestrator.lab.plotting import Line, Panel, exact

        rows = [row for row in self if isinstance(row.get(key), (int, float))]
        names = [_label(row) for row in rows]
        line = Line(label, range(len(rows)), exact([float(row[key]) for row in rows]))
        return Panel("", label, [line], bars=True, ticks=names)


def _label(row: Mapping[str, Any]) -> str:
    cap = row.get("cap")
    return str(row["name"]) if cap is None else f"{row['name']} @{cap:.0%}"


def replay(
    trace: str | os.PathLike[str],
    policy: Given | Sequence[Given] | None = None,
    **options: Any,
) -> Rows:
    """Simulate a recorded trace with cache policies, and return a row of measurements for each.

    `policy` is a name, "module:Class", a subclass of Policy, or a list of these. None means the
    recorded policy. `options` are options of `moe-edge replay` and settings of the policies. Rows
    for comparison follow: the policy "lru", Belady's optimal cache, a lower bound of the times, and
    the recorded run.

    A row has name, kind ("policy", "optimum", "bound" or "recorded"), hit_rate,
    read_bytes_per_token, wait_ms_per_token, tpot_ms_p50, tpot_ms_mean, tpot_ms_p99, ttft_ms and
    kl_estimate. Unknown values are None. Raises MoeEdgeError.
    """
    given: list[Given | None] = []
    if policy is None or isinstance(policy, (str, type)):
        given.append(policy)
    else:
        given += policy

    def work() -> Rows:
        from orchestrator.lab.replay import ReplayOptions, read_trace
        from orchestrator.lab.replay import replay as run
        from orchestrator.native.llama import Bindings

        names = [policy_name(each) for each in given]  # a trace may name one of them
        recorded, library = read_trace(Path(trace)), Bindings.load().library()
        own = parsed(options, ReplayOptions.declared())
        known = policy_settings()
        settings = {
            name: own.pop(name) for name in [*own] if name in known and known[name].recorded
        }
        unknown = own.keys() - ReplayOptions.declared().keys()
        if unknown:
            raise ConfigError(f"replay has no option '{sorted(unknown)[0]}'")
        settings = parsed(settings, known)
        details = []
        for name in names:
            has = policy_class(name or recorded.header.policy).Settings.declared()
            asked = ReplayOptions.of({**own, "policy": name})
            mine = settings if len(names) == 1 else {k: settings[k] for k in settings if k in has}
            details.append(run(library, recorded, replace(asked, settings=mine)))
        shown = {"hit_rate": "hit rate", "tpot_ms_mean": "ms per token"}
        return Rows(_replayed(details), details, shown)

    return _done(work)


def _replayed(details: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows of measurements for replays of one trace.

    Each policy has one row. The rows of the optimum, the bound and the recorded run follow.
    """
    last = details[-1]
    tokens = last["decode_tokens"]
    runs = {name: run for each in details for name, run in reversed(each["runs"].items())}
    # The policies in the order of the call, and the baseline after them.
    order = dict.fromkeys([*(next(iter(each["runs"])) for each in details), *runs])
    best, bound = last["belady"]["decode"], last["bound"]
    optimum = {"decode": {"hit_rate": best["hit_rate"], "demand_bytes": best["miss_bytes"]}}
    lowest = {"tpot_ms_mean": bound["tpot_ms_mean"], "ttft_ms": bound["prefill_ms"]}
    recorded = last["recorded"]
    return [
        *(_row(name, "policy", runs[name], tokens) for name in order),
        _row("optimum", "optimum", optimum, tokens),
        _row("bound", "bound", lowest, tokens),
        _row(f"recorded {recorded['policy']}", "recorded", recorded, tokens),
    ]


def _row(name: str, kind: str, run: Mapping[str, Any], tokens: int) -> dict[str, Any]:
    decode = run.get("decode", {})

    def a_token(*keys: str) -> float | None:
        found = [decode[key] for key in keys if key in decode]
        return sum(found) / tokens if found and tokens else None

    own = ("tpot_ms_p50", "tpot_ms_mean", "tpot_ms_p99", "ttft_ms", "kl_estimate")
    return {
        "name": name,
        "kind": kind,
        "hit_rate": decode.get("hit_rate"),
        "read_bytes_per_token": a_token("demand_bytes", "prefetch_bytes"),
        "wait_ms_per_token": a_token("wait_ms"),
        **{key: run.get(key) for key in own},
    }


def bench(
    name: str = "",
    *,
    policy: Given | None = None,
    note: Callable[[str], None] = lambda _sentence: None,
    **options: Any,
) -> Rows:
    """Run a benchmark and return its rows, with keys such as name, cap, tokens_per_s and hit_rate.

    `name` is the name of a benchmark, as in `moe-edge bench NAME`. "" compares llama.cpp and all
    policies. `policy` is a further policy to compare. Its class must be in a module, because each
    case runs in its own process. `note` gets messages about the progress. `options` are the options
    of the command. Raises MoeEdgeError.
    """

    def work() -> Rows:
        from orchestrator.lab.registry import load

        experiment = load(name)
        declared = experiment.options.declared()
        given = dict(options)
        if policy is not None:
            given["policy"] = POLICIES.for_processes(POLICIES.named(policy))
        unknown = given.keys() - declared.keys()
        if unknown:
            raise ConfigError(f"the benchmark has no option '{sorted(unknown)[0]}'")
        report = experiment.run(experiment.options.of(parsed(given, declared)), note)
        shown = {"tokens_per_s": "tokens/s", "ttft_ms": "ms to the first token"}
        return Rows(report.rows, report.as_dict(), shown)

    return _done(work)


def record(
    out: str | os.PathLike[str],
    model: str | os.PathLike[str],
    text: str | None = None,
    *,
    prompt: str | None = None,
    tokens: int | None = None,
    prefill: int = 0,
    progress: bool | None = None,
    **settings: Any,
) -> Path:
    """Record which experts the model selects, in the file `out` for `replay`. Return its path.

    The model either answers `prompt` or reads `text`. It reads the first `prefill` tokens of the
    text as a prompt, and the others token by token. `tokens` limits the tokens of the text or of
    the answer. `settings` are those of LLM. Raises ConfigError unless either a text or a prompt is
    given. Raises MoeEdgeError if the model cannot run.
    """
    if (text is None) == (prompt is None):
        raise ConfigError("record() needs exactly one of the arguments text and prompt")
    check_process(settings.get("ram"))
    stops = Stops()

    def work() -> Path:
        from orchestrator.lab.replay.file import check_trace_target, write_trace
        from orchestrator.lab.replay.record import record_answer, record_text
        from orchestrator.runtime.answering import Answering
        from orchestrator.runtime.runtime import Runtime

        path = Path(out)
        check_trace_target(path)
        given = {"policy": DEFAULT, "remember": False, **settings}
        found = find_model(os.fspath(model), lambda _line: None, bars.download)
        config = config_of(found, given)
        loading()
        answering = Answering(reads_ahead=False) if text is None else None
        with Runtime.open(config, bars.stage, answering) as runtime, stops.including(runtime.stop):
            if text is None:
                recorded = record_answer(runtime, prompt or "", tokens)
            else:
                with runtime.evaluator() as evaluator:
                    recorded = record_text(evaluator, text, tokens, prefill)
        write_trace(path, recorded)
        return path

    bars = Bars(progress)
    try:
        return _done(work, stops)
    finally:
        bars.close()


def _done(work: Callable[[], T], stop: Callable[[], object] = lambda: None) -> T:
    """Run a function on a new thread, and return its result. Raises MoeEdgeError.

    If Ctrl-C interrupts the wait, `stop` is called to end native work of the function. OSError
    becomes ResourceError.
    """
    worker = Worker("moe-edge")
    try:
        return worker.call(work, stop)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        raise ResourceError(f"{where}{error.strerror or error}") from error
    finally:
        worker.end()
