"""The options of every benchmark."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

from gguf_tools import synthetic
from gguf_tools.process import default_threads
from orchestrator.errors import ConfigError
from orchestrator.lab.bench.job import Part, decode, longest_context, prompt, settle
from orchestrator.lab.option import check_options, declared_options, option

# A quick pass: tiny model, caps that leave a few experts of room, seconds in all.
QUICK_SHAPE = "tiny-olmoe"
DEMO = "demo"

Asked = TypeVar("Asked", bound="BenchOptions")


def parse_caps(text: str) -> tuple[float, ...]:
    """Shares from percentages, "60,80" -> (0.6, 0.8). Raises ConfigError."""
    try:
        return tuple(float(part.strip().rstrip("%")) / 100 for part in text.split(","))
    except ValueError:
        raise ConfigError(f"'{text}' is no list of percentages such as 60,80") from None


def show_caps(caps: tuple[float, ...]) -> str:
    """ "60,80" of shares."""
    return ",".join(f"{100 * cap:.0f}" for cap in caps)


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """What every benchmark asks for. Raises ConfigError.

    shape: experts of a random-weight model, or "demo" for the trained one, whose tokens come from
    text. caps: shares of the single-precision file that a process may take. tokens: measured
    decode steps after `warmup` unmeasured ones; max_seconds ends the decode steps of one process
    early (at least 8 are measured). quick: a tiny model. It and the demo are smaller than the
    process around them: the expert slots are capped instead of the whole process. layers: of a
    random-weight model, in the place of the shape's few.
    """

    shape: str = option(
        "olmoe",
        "Experts of a random-weight model, as olmoe, mixtral, qwen3-30b; or demo, the trained "
        "model.",
        metavar="NAME",
    )
    routing: str = option(
        "uniform",
        "How a random-weight model uses its experts: uniform, zipf, or topics: zipf, and other "
        "experts for the other half of the vocabulary.",
        metavar="KIND",
    )
    caps: tuple[float, ...] = option(
        (0.6, 0.8),
        "Memory caps in % of the model file.",
        metavar="LIST",
        parse=parse_caps,
        shown=show_caps,
    )
    tokens: int = option(128, "Measured decode steps.", least=1)
    prompt_tokens: int = option(128, "Prompt length.", least=1)
    runs: int = option(2, "Passes over all cases.", least=1)
    threads: int | None = option(None, "Compute threads.", least=1, told="the cores")
    seed: int = option(0, "Seed of the weights and of the tokens.", least=0)
    quick: bool = option(False, "A tiny model, in seconds; no figures to quote.")
    retention: float = option(
        0.75, "Share of critical experts of dymoe.", metavar="R", least=0, most=1
    )
    warmup: int = option(16, least=0)
    io_threads: int = option(4, least=1)
    max_seconds: float = option(45.0, least=0)
    layers: int | None = option(None, least=1)

    def __post_init__(self) -> None:
        if self.shape not in synthetic.PRESETS and self.shape != DEMO:
            known = ", ".join((*synthetic.PRESETS, DEMO))
            raise ConfigError(f"unknown shape '{self.shape}': known are {known}")
        if self.routing not in synthetic.ROUTINGS:
            known = ", ".join(synthetic.ROUTINGS)
            raise ConfigError(f"unknown routing '{self.routing}': known are {known}")
        if not self.caps or not all(0 < cap < 1 for cap in self.caps):
            raise ConfigError("caps are percentages of the file between 0 and 100")
        if len({f"{cap:.0%}" for cap in self.caps}) < len(self.caps):
            raise ConfigError("caps must differ by whole percentages")
        check_options(self)
        if self.layers is not None and self.trained:
            raise ConfigError("layers are for a random-weight model: the demo has its own")

    @classmethod
    def from_texts(cls: type[Asked], given: dict[str, Any]) -> Asked:
        """The record of the options that were given on the command line, lists still as text.
        Raises ConfigError."""
        chosen = dict(given)
        if chosen.get("shape") == DEMO and "routing" in chosen:
            raise ConfigError(
                "--routing has no effect with --shape demo, which routes as it was trained: leave "
                "one of the two out"
            )
        for field, declared in declared_options(cls):
            if declared.parse is not None and field.name in chosen:
                chosen[field.name] = declared.parse(chosen[field.name])
        return cls(**chosen)

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
    def marks(self) -> bool:
        """Whether decode steps are marked with what else happened in them."""
        return False

    @property
    def n_ubatch(self) -> int:
        """Tokens that every system evaluates at once."""
        return self.prompt_tokens

    @property
    def sequences(self) -> int:
        """How many sequences may decode together."""
        return max((part.sequences for part in self.parts()), default=0)

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

    def described(self, *more: str) -> dict[str, Any]:
        """What a report says of the options, JSON-ready; more: names of further ones."""
        names = ("tokens", "prompt_tokens", "runs", "retention", "io_threads", *more)
        values = {name: getattr(self, name) for name in names}
        routing = "trained" if self.trained else self.routing
        return {"routing": routing, "threads": self.n_threads} | {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in values.items()
        }

    @property
    def n_threads(self) -> int:
        """Compute threads, the cores where nothing was asked for."""
        return self.threads or default_threads()
