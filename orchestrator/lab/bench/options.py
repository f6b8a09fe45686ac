"""The options of every benchmark."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from gguf_tools import synthetic
from gguf_tools.process import compute_threads
from orchestrator.errors import ConfigError
from orchestrator.lab.bench.child import Part, decode, longest_context, prompt, settle
from orchestrator.policy.dymoe import DyMoESettings
from orchestrator.settings import FROM_0, FROM_1, MORE, Notation, Settings, again, setting

# A quick pass: tiny model, caps that leave a few experts of room, seconds in all.
QUICK_SHAPE = "tiny-olmoe"
DEMO = "demo"

_RETENTION = DyMoESettings.declared()["retention"]

Asked = TypeVar("Asked", bound="BenchOptions")


def parse_percentages(text: str) -> tuple[float, ...]:
    """Shares from percentages, "60,80" -> (0.6, 0.8). Raises ConfigError."""
    try:
        return tuple(float(part.strip().rstrip("%")) / 100 for part in text.split(","))
    except ValueError:
        raise ConfigError(f"'{text}' is no list of percentages such as 60,80") from None


PERCENTAGES = Notation(
    parse_percentages, lambda shares: ",".join(f"{100 * share:.0f}" for share in shares)
)
# ("lru", "upstream mmap") from "lru, upstream mmap".
WORDS = Notation(lambda text: tuple(filter(None, map(str.strip, text.split(",")))), ",".join)


@dataclass(frozen=True)
class BenchOptions(Settings):
    """What every benchmark asks for. Raises ConfigError.

    shape: experts of a random-weight model, or "demo" for the trained one, whose tokens come from
    text. caps: shares of the single-precision file that a process may take. tokens: measured
    decode steps after `warmup` unmeasured ones; max_seconds ends the decode steps of one process
    early (at least 8 are measured). quick: a tiny model. It and the demo are smaller than the
    process around them: the expert slots are capped instead of the whole process. layers: of a
    random-weight model, in the place of the shape's few.
    """

    shape: str = setting(
        "olmoe",
        "Experts of a random-weight model, as olmoe, mixtral, qwen3-30b; or demo, the trained "
        "model.",
        metavar="NAME",
    )
    routing: str = setting(
        "uniform",
        "How a random-weight model uses its experts: uniform, or zipf, which is skewed.",
        metavar="KIND",
    )
    caps: tuple[float, ...] = setting(
        (0.6, 0.8),
        "Memory caps in % of the model file.",
        notation=PERCENTAGES,
    )
    tokens: int = setting(128, "Measured decode steps.", within=FROM_1)
    prompt_tokens: int = setting(128, "Prompt length.", within=FROM_1)
    runs: int = setting(2, "Passes over all cases.", within=FROM_1)
    threads: int | None = setting(None, "Compute threads.", within=FROM_1, shown="the cores")
    seed: int = setting(0, "Seed of the weights and of the tokens.", within=FROM_0)
    quick: bool = setting(False, "A tiny model, in seconds; no figures to quote.")
    retention: float = again(
        DyMoESettings,
        "retention",
        0.75,
        help=f"{_RETENTION.help} For dymoe.",
        shown=None,
        group=MORE,
    )
    rows: tuple[str, ...] = setting(
        (),
        "Only rows whose names have one of these words, as lru,dynaexq,upstream.",
        notation=WORDS,
        shown="all",
    )
    warmup: int = setting(16, "Unmeasured decode steps.", within=FROM_0, option=False)
    io_threads: int = setting(4, "Threads that read experts.", within=FROM_1, option=False)
    max_seconds: float = setting(
        45.0, "Longest time of one process's decode steps.", within=FROM_0, option=False
    )
    layers: int | None = setting(
        None,
        "Layers of a random-weight model; all 48 of qwen3-30b take 27 GB of disk.",
        within=FROM_1,
        shown="a few",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        shapes = (*synthetic.PRESETS, DEMO)
        if self.shape not in shapes:
            raise ConfigError(f"unknown shape '{self.shape}': known are {', '.join(shapes)}")
        if self.routing not in synthetic.ROUTINGS:
            known = ", ".join(synthetic.ROUTINGS)
            raise ConfigError(f"unknown routing '{self.routing}': known are {known}")
        if not self.caps or not all(0 < cap < 1 for cap in self.caps):
            raise ConfigError("caps are percentages of the file between 0 and 100")
        if len({f"{cap:.0%}" for cap in self.caps}) < len(self.caps):
            raise ConfigError("caps must differ by whole percentages")
        if self.layers is not None and self.trained:
            raise ConfigError("layers are for a random-weight model: the demo has its own")

    @classmethod
    def of(cls: type[Asked], given: Mapping[str, Any]) -> Asked:
        """The record of the options that were given on the command line. Raises ConfigError."""
        if given.get("shape") == DEMO and given.get("routing") is not None:
            raise ConfigError(
                "--routing has no effect with --shape demo, which routes as it was trained: leave "
                "one of the two out"
            )
        return super().of(given)

    @property
    def trained(self) -> bool:
        """Whether the model is the demo, not one of random weights."""
        return self.shape == DEMO

    @property
    def model_name(self) -> str:
        """The shape that really runs."""
        return QUICK_SHAPE if self.quick and not self.trained else self.shape

    @property
    def caps_process(self) -> bool:
        """Whether a cap holds for the whole process, not for the expert slots alone."""
        return not (self.quick or self.trained)

    @property
    def n_threads(self) -> int:
        """Compute threads, the cores where nothing was asked for."""
        return compute_threads(self.threads)

    @property
    def sequences(self) -> int:
        """How many sequences decode together; 0: one alone."""
        return max((part.sequences for part in self.parts()), default=0)

    @property
    def n_ubatch(self) -> int:
        """Tokens that every system evaluates at once."""
        return max(self.prompt_tokens, self.sequences)

    @property
    def n_ctx(self) -> int:
        """Context that holds what is measured."""
        return longest_context(self.parts())

    def parts(self) -> list[Part]:
        """What every process does: a prompt, unmeasured decode steps, measured ones."""
        return [
            prompt(self.prompt_tokens),
            settle(self.warmup, self.max_seconds / 3),
            decode(self.tokens, self.max_seconds),
        ]

    @property
    def words(self) -> str:
        """What the tokens are."""
        return "text" if self.trained else "random"
