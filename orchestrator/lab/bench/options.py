"""Options that all benchmarks share."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from gguf_tools import synthetic
from gguf_tools.process import compute_threads
from orchestrator.cache.files import user_folder
from orchestrator.errors import ConfigError
from orchestrator.lab.bench.child import Part, decode, longest_context, prompt, settle
from orchestrator.policy.dymoe import DyMoESettings
from orchestrator.settings import FROM_0, FROM_1, MORE, Notation, Settings, inherit, setting

# The shape of the model with --quick, which runs in seconds.
QUICK_SHAPE = "tiny-olmoe"
DEMO = "demo"

_RETENTION = DyMoESettings.declared()["retention"]

Asked = TypeVar("Asked", bound="BenchOptions")


def parse_percentages(text: str) -> tuple[float, ...]:
    """Convert a list of percentages to fractions: "60,80" becomes (0.6, 0.8).

    Raises ConfigError for another text.
    """
    try:
        return tuple(float(part.strip().rstrip("%")) / 100 for part in text.split(","))
    except ValueError:
        raise ConfigError(f"'{text}' is not a list of percentages such as 60,80") from None


PERCENTAGES = Notation(
    parse_percentages, lambda shares: ",".join(f"{100 * share:.0f}" for share in shares)
)
# A list of words: "lru, upstream mmap" becomes ("lru", "upstream mmap").
WORDS = Notation(lambda text: tuple(filter(None, map(str.strip, text.split(",")))), ",".join)


@dataclass(frozen=True)
class BenchOptions(Settings):
    """Options that all benchmarks share. Raises ConfigError for an invalid value.

    - shape: "demo" for the trained demo model, or the shape of a model with random weights, such as
      "olmoe".
    - quick: measure a tiny model, to test the benchmark.
    - caps: limits of the process's memory, as fractions of the model file. With `quick` or "demo",
      limits of the experts' memory, as fractions of the experts.
    - tokens: number of measured decode steps, after `warmup` unmeasured steps.
    - max_seconds: time limit for these steps.
    - layers, vocab: number of layers and vocabulary entries of a random-weight model.
    """

    shape: str = setting(
        "olmoe",
        "Model to measure: the trained model demo, or random weights in the shape of a model such "
        "as olmoe, mixtral or qwen3-30b.",
        metavar="NAME",
    )
    routing: str = setting(
        "uniform",
        "How often a random-weight model uses each expert: equally (uniform), or some experts "
        "much more often (zipf).",
        metavar="KIND",
    )
    caps: tuple[float, ...] = setting(
        (0.6, 0.8),
        "Memory limits to measure, in percent of the model file's size.",
        notation=PERCENTAGES,
    )
    tokens: int = setting(128, "Number of measured decode steps.", within=FROM_1)
    prompt_tokens: int = setting(128, "Prompt length, in tokens.", within=FROM_1)
    runs: int = setting(2, "Number of measurements of each table row.", within=FROM_1)
    threads: int | None = setting(None, "Compute threads.", within=FROM_1, shown="the cores")
    seed: int = setting(0, "Seed of random weights and of input tokens.", within=FROM_0)
    quick: bool = setting(
        False, "Test the benchmark with a tiny model in seconds. Its figures are not meaningful."
    )
    retention: float = inherit(
        DyMoESettings,
        "retention",
        0.75,
        help=f"{_RETENTION.help} For dymoe.",
        shown=None,
        group=MORE,
    )
    rows: tuple[str, ...] = setting(
        (),
        "Measure only the rows of the tables whose names contain one of these words, such as "
        "lru,upstream.",
        notation=WORDS,
        shown="all",
    )
    warmup: int = setting(16, "Unmeasured decode steps.", within=FROM_0, option=False)
    io_threads: int = setting(4, "Threads that read experts.", within=FROM_1, option=False)
    max_seconds: float = setting(
        45.0,
        "Time limit for the decode steps of one process, in seconds.",
        within=FROM_0,
        option=False,
    )
    layers: int | None = setting(
        None,
        "Number of layers of a random-weight model. All 48 of qwen3-30b need 27 GB of disk.",
        within=FROM_1,
        shown="a few",
    )
    vocab: int | None = setting(
        None,
        "Vocabulary size of a random-weight model, such as 151936.",
        within=(512, math.inf),
        shown="a small one",
        group=MORE,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        shapes = (*synthetic.PRESETS, DEMO)
        if self.shape not in shapes:
            raise ConfigError(f"unknown --shape '{self.shape}': choose one of {', '.join(shapes)}")
        if self.routing not in synthetic.ROUTINGS:
            known = ", ".join(synthetic.ROUTINGS)
            raise ConfigError(f"unknown --routing '{self.routing}': choose one of {known}")
        if not self.caps or not all(0 < cap < 1 for cap in self.caps):
            raise ConfigError("each memory limit in --caps must be between 0 and 100 percent")
        if len({f"{cap:.0%}" for cap in self.caps}) < len(self.caps):
            raise ConfigError(
                "two memory limits in --caps round to the same percentage: give limits that differ "
                "by at least 1 percentage point"
            )
        for name in ("layers", "vocab"):
            if getattr(self, name) is not None and self.trained:
                raise ConfigError(
                    f"--{name} has no effect with --shape demo: leave one of the two options out"
                )

    @classmethod
    def of(cls: type[Asked], given: Mapping[str, Any]) -> Asked:
        """Return the options with the values that were given on the command line.

        Raises ConfigError if values are invalid or contradict each other.
        """
        if given.get("shape") == DEMO and given.get("routing") is not None:
            raise ConfigError(
                "--routing has no effect with --shape demo, because the demo model is trained, not "
                "random: leave one of the two options out"
            )
        return super().of(given)

    @property
    def trained(self) -> bool:
        """Whether the model is the trained demo model, not a model with random weights."""
        return self.shape == DEMO

    @property
    def model_name(self) -> str:
        """The name of the model's shape (its dimensions): the value of --shape, such as olmoe.

        With --quick, this is the shape of a tiny model, except for the trained demo model.
        """
        return QUICK_SHAPE if self.quick and not self.trained else self.shape

    @property
    def caps_process(self) -> bool:
        """Whether a memory cap applies to the whole process, not only to the cache of experts."""
        return not (self.quick or self.trained)

    @property
    def same_layers(self) -> bool:
        """Whether all layers of a random-weight model get the same experts.

        If so, the experts of only one layer are generated, so that a large file is written faster.
        """
        return False

    @property
    def folder(self) -> Path:
        """The folder in which models are generated."""
        return user_folder("cache") / "bench"

    @property
    def n_threads(self) -> int:
        """The number of compute threads, by default the number of cores."""
        return compute_threads(self.threads)

    @property
    def sequences(self) -> int:
        """The number of sequences that decode in one batch, or 0 if only one decodes."""
        return max((part.sequences for part in self.parts()), default=0)

    @property
    def n_ubatch(self) -> int:
        """Micro-batch size of every system, in tokens."""
        return max(self.prompt_tokens, self.sequences)

    @property
    def n_ctx(self) -> int:
        """Context length that holds the whole measurement, in tokens."""
        return longest_context(self.parts())

    def parts(self) -> list[Part]:
        """Return the parts of a measurement, in the order in which a child process runs them.

        The first part reads a prompt. The second decodes some tokens to warm up. The third decodes
        the tokens whose times are reported.
        """
        return [
            prompt(self.prompt_tokens),
            settle(self.warmup, self.max_seconds / 3),
            decode(self.tokens, self.max_seconds),
        ]

    @property
    def words(self) -> str:
        """The word that describes the measured tokens in reports: "text" or "random"."""
        return "text" if self.trained else "random"
