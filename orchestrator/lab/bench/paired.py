"""`moe-edge bench paired`: compares the speed of two sides that take turns.

Taking turns shows differences of one or two percent even on a noisy machine. All speed ratios are
measured with this command.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

from gguf_tools.children import child
from orchestrator.config import Config
from orchestrator.errors import ConfigError, MoeEdgeError
from orchestrator.lab.bench.models import HIGH, Note, build_models
from orchestrator.lab.bench.options import WORDS, BenchOptions
from orchestrator.lab.eval.arithmetic import median_interval
from orchestrator.lab.table import Column, Report, Row, Table, fixed
from orchestrator.policy import policy_settings
from orchestrator.settings import FROM_0, inherit, setting

HERE = Path(__file__).resolve().parents[3]
UPSTREAM = "upstream"
N_CTX = 4096
# Number of steps after each start of a side: first WARM_UP untimed steps, then TURNS turns of STEPS
# steps. The first step of a turn is discarded, because CPU caches are cold. For prompts, a turn
# times one prompt.
WARM_UP, TURNS, STEPS = 30, 10, 12

# The program of a side. It runs in both checkouts, so it uses only functions that exist in both.
WORKER = """
import json, sys, time
import numpy as np
from contextlib import contextmanager


@contextmanager
def opened(settings):
    # yields evaluate(tokens, pos), the vocabulary size, and a function for the callback's us
    if settings.pop("upstream", False):
        from orchestrator.lab.bench.plain import PlainModel

        with PlainModel(**settings) as model:
            yield model.eval, model.n_vocab, lambda: None
        return
    from orchestrator.config import Config

    config = Config.build(**settings)
    try:
        from orchestrator.runtime.runtime import Runtime
    except ModuleNotFoundError:  # an older checkout
        from orchestrator.engine.engine import Engine

        with Engine.open(config) as engine:
            yield warmed(engine, engine)
        return
    with Runtime.open(config) as runtime, runtime.evaluator() as evaluator:
        yield warmed(evaluator, evaluator.inside)


def warmed(evaluator, inside):
    model, config = inside.model, evaluator.config
    if inside.managed and config.expert_ram is None and config.ram is None:
        layers, experts = range(model.n_layers), range(model.n_expert)
        inside.store.warm([(layer, expert, 0) for layer in layers for expert in experts])
    n_vocab = len(model.metadata["tokenizer.ggml.tokens"])
    return evaluator.eval, n_vocab, inside.store.callback_us if inside.managed else lambda: None


with opened(json.loads(sys.argv[1])) as (evaluate, n_vocab, callback_us):
    drawn = np.random.default_rng(7).integers(5, min(1000, n_vocab), 4000)
    tokens, at = drawn.tolist(), 32
    evaluate(tokens[:at], 0)
    print("ready", flush=True)
    for line in sys.stdin:
        n_steps, n_prompt = map(int, line.split())
        times = []
        for _ in range(n_steps):
            n, at = (n_prompt, 0) if n_prompt else (1, at)
            start = time.perf_counter()
            evaluate(tokens[at : at + n], at)
            times.append(1e3 * (time.perf_counter() - start))
            at += n
        print(json.dumps([times, callback_us()]), flush=True)
"""


@dataclass(frozen=True)
class PairedOptions(BenchOptions):
    """Options of `moe-edge bench paired`, which compares the speed of two configurations.

    The two configurations are called the sides "ours" and "theirs".

    - ours, theirs: the settings of each side, as texts NAME=VALUE. If one of the texts is the word
      "upstream", the side runs upstream llama.cpp. Its only settings are mmap and extra_bufts.
    - other: the source checkout whose code "theirs" runs; None is this checkout.
    - python: the Python interpreter that runs the other checkout.

    A side without a memory cap has all experts in memory. Raises ConfigError for an invalid value.
    """

    model: Path | None = setting(None, "A model file.", shown="one of --shape")
    routing: str = inherit(BenchOptions, "routing", "zipf")
    tier: str = setting(HIGH, "Quantization type of the experts of a random-weight model.")
    ours: tuple[str, ...] = setting(
        ("policy=lru", "force_managed=true"),
        "Settings of the first of the two compared configurations, as NAME=VALUE.",
        notation=WORDS,
    )
    theirs: tuple[str, ...] = setting(
        (UPSTREAM,),
        "Settings of the second of the two compared configurations, as NAME=VALUE. The word "
        "upstream selects llama.cpp with its fastest flags.",
        notation=WORDS,
    )
    other: Path | None = setting(
        None,
        "Source checkout of moe-edge that runs the second configuration (--theirs).",
        metavar="DIR",
    )
    python: str = setting(
        sys.executable,
        "Python interpreter that runs the second configuration (--theirs).",
        metavar="FILE",
        shown="this one",
    )
    prompt: int = setting(
        0, "Time prompts of this many tokens. With 0, time decode steps.", within=FROM_0
    )
    runs: int = inherit(
        BenchOptions,
        "runs",
        12,
        help="Number of times that both configurations are started and timed.",
    )
    caps: tuple[float, ...] = inherit(BenchOptions, "caps", option=False)
    tokens: int = inherit(BenchOptions, "tokens", option=False)
    prompt_tokens: int = inherit(BenchOptions, "prompt_tokens", option=False)
    retention: float = inherit(BenchOptions, "retention", option=False)
    rows: tuple[str, ...] = inherit(BenchOptions, "rows", option=False)

    def side(self, words: Sequence[str], model: Path) -> dict[str, Any]:
        """Return the settings of one of the two compared configurations, for its child process.

        The result is a dict with arguments of Config.build. For upstream llama.cpp, it has
        arguments of PlainModel instead, and the additional key "upstream" with the value True.

        - words: the settings that the user gave, each as NAME=VALUE. The word "upstream" among them
          selects upstream llama.cpp.
        - model: the model file.

        Raises ConfigError for an unknown setting.
        """
        n_ubatch, threads = max(64, self.prompt), self.n_threads
        own = [word for word in words if word != UPSTREAM]
        if len(own) < len(words):
            flags = {"upstream": True, "mmap": False, "extra_bufts": True}
            sizes = {"path": str(model), "n_ctx": N_CTX, "n_ubatch": n_ubatch, "threads": threads}
            flag = Config.declared()["force_managed"].parse
            return {**flags, **sizes, **_parsed(own, {"mmap": flag, "extra_bufts": flag})}
        sizes = {"model": str(model), "ctx": N_CTX, "ubatch": n_ubatch, "threads": threads}
        known = {**Config.declared(), **policy_settings()}
        return {**sizes, **_parsed(own, {name: each.parse for name, each in known.items()})}


def _parsed(words: Sequence[str], known: Mapping[str, Callable[[str], Any]]) -> dict[str, Any]:
    found = {}
    for word in words:
        name, equals, value = word.partition("=")
        if name not in known or not equals:
            raise ConfigError(
                f"'{word}' is not a setting in the form NAME=VALUE, such as policy=lru"
            )
        found[name] = known[name](value)
    return found


class Side:
    """The child process of one of the two sides (configurations) that are compared.

    The process computes only during calls of `run`. The caller collects the measured times in the
    list `ms`, in milliseconds.
    """

    def __init__(self, process: subprocess.Popen[str], errors: IO[str]) -> None:
        self.ms: list[float] = []
        self.callback_us: float | None = None
        self._process, self._errors = process, errors

    @classmethod
    @contextmanager
    def started(cls, tree: Path, python: str, options: Mapping[str, Any]) -> Iterator[Side]:
        """Start the child process of one of the two compared configurations.

        Yields a Side, the object that controls the process, after the process has loaded its model.
        The process ends at the end of the `with` block.

        - tree: the source checkout whose code the process runs.
        - python: path of the Python interpreter that runs the code.
        - options: the settings of the configuration, from PairedOptions.side.

        Raises MoeEdgeError if the process fails.
        """
        with (
            TemporaryFile("w+") as errors,
            child(
                [python, "-c", WORKER, json.dumps(options)],
                cwd=tree,
                env={**os.environ, "PYTHONPATH": str(tree)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
            ) as process,
        ):
            side = cls(process, errors)
            side._read()
            yield side
            process.communicate()

    def _read(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            self._errors.seek(0)
            said = self._errors.read().strip().splitlines()[-1:]
            raise MoeEdgeError(
                f"the process of one of the compared configurations failed: {' '.join(said)}"
            )
        return line

    def run(self, steps: int, prompt: int) -> list[float]:
        """Run several steps in the child process and return their times in milliseconds.

        Each step reads a prompt of `prompt` tokens, or decodes one token if `prompt` is 0. The time
        of the first step is left out, because the CPU caches are cold.
        """
        assert self._process.stdin is not None
        self._process.stdin.write(f"{steps} {prompt}\n")
        self._process.stdin.flush()
        times, self.callback_us = json.loads(self._read())
        return list(times[1:])


def in_turns(sides: Mapping[str, Side], prompt: int, turns: int = TURNS) -> None:
    """Time several configurations by turns, so that other load on the machine affects all equally.

    Each configuration has its own child process with a loaded model. In each of `turns` rounds, the
    processes compute one after another. The next round has the reverse order.

    - sides: the child processes, by name. The measured times of a process are appended to its list
      `ms`.
    - prompt: length of the timed prompts, in tokens. With 0, decode steps are timed instead.
    """
    steps = 2 if prompt else STEPS
    order = list(sides.values())
    for side in order:
        side.run(2 if prompt else WARM_UP, prompt)
    for _ in range(turns):
        for side in order:
            side.ms += side.run(steps, prompt)
        order.reverse()


COLUMNS = (
    Column("pair", "pair"),
    Column("ours", "ours_ms", fixed(2), "ms"),
    Column("theirs", "theirs_ms", fixed(2), "ms"),
    Column("ratio", "ratio", fixed(4)),
    Column("callback, ours", "ours_callback_us", fixed(0), "us"),
    Column("theirs", "theirs_callback_us", fixed(0), "us"),
)


class Paired:
    """Compares the speed of two sides (settings, checkouts, or upstream llama.cpp).

    The sides are called "ours" and "theirs". They are started together several times, and each
    start of both sides is called a pair. The ratio of a pair is the median step time of "theirs"
    divided by that of "ours". A ratio above 1 means that "ours" is faster.
    """

    options = PairedOptions

    def run(self, on: PairedOptions, note: Note = lambda text: None) -> Report:
        """Compare the speed of two configurations, and return a report with the speed ratios.

        The configurations, called "ours" and "theirs", are started together several times. Each
        start gives one ratio. Raises MoeEdgeError if one of them fails.

        - on: the options, which have the settings of both configurations.
        - note: receives progress messages.
        """
        model = on.model or build_models(on, (on.tier,), note)[0]
        model = model.resolve()
        arguments = {
            "ours": (HERE, sys.executable, on.side(on.ours, model)),
            "theirs": (on.other or HERE, on.python, on.side(on.theirs, model)),
        }
        rows: list[Row] = []
        for number in range(1 if on.quick else on.runs):
            names = list(arguments) if number % 2 else list(reversed(arguments))
            with ExitStack() as stack:
                sides = {
                    name: stack.enter_context(Side.started(*arguments[name])) for name in names
                }
                in_turns(sides, on.prompt, 1 if on.quick else TURNS)
            row: Row = {"pair": number + 1}
            for name, side in sides.items():
                row[f"{name}_ms"] = statistics.median(side.ms)
                row[f"{name}_callback_us"] = side.callback_us
            rows.append(row | {"ratio": row["theirs_ms"] / row["ours_ms"]})
            note(
                f"measurement {number + 1} of {on.runs}: the second configuration (--theirs) takes "
                f"{rows[-1]['ratio']:.4f} times as long as the first (--ours)"
            )
        median, low, high = median_interval([row["ratio"] for row in rows])
        footnotes = [
            "ratio: time of the second configuration (--theirs) divided by the time of the first "
            "(--ours). Above 1, the first configuration is faster",
            f"The median ratio is {median:.4f} (95 % confidence interval: {low:.4f} to {high:.4f})",
        ]
        what = f"a prompt of {on.prompt} tokens" if on.prompt else "a decoded token"
        table = Table(f"{what}, medians of each start", COLUMNS, rows, footnotes)
        compared = (
            f"settings of the first configuration (--ours): {', '.join(on.ours)}; of the second "
            f"configuration (--theirs): {', '.join(on.theirs)}"
        )
        return Report([f"{model.name}; {compared}"], [table], [])
