"""What one child process is told to measure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from orchestrator.config import Config

PROMPT, DECODE = "prompt", "decode"
COLD = "cold"  # the first prompt, which finds nothing in memory
MIN_STEPS = 8


class Part(NamedTuple):
    """A stretch of a measurement: one prompt of n tokens, or n decode steps.

    name: what the report finds it by. Decode steps end early after so many seconds, when at
    least at_least of them are done. sequences: so many go on from the prompt before and decode
    together, a token each a step; 0: the prompt's own one does.
    """

    name: str
    kind: str
    n: int
    seconds: float = 0.0
    at_least: int = 1
    sequences: int = 0


def prompt(n: int, name: str = PROMPT) -> Part:
    """A prompt that starts a conversation of its own: nothing before it is in the KV cache."""
    return Part(name, PROMPT, n)


def settle(n: int, seconds: float) -> Part:
    """Decode steps that no report uses."""
    return Part("settle", DECODE, n, seconds)


def decode(n: int, seconds: float) -> Part:
    """Measured decode steps."""
    return Part(DECODE, DECODE, n, seconds, MIN_STEPS)


def longest_context(parts: Sequence[Part], shared: bool = True) -> int:
    """Context that holds the longest conversation of these parts, in the units of the KV cache;
    with all sequences that share it, or the longest of one of them."""
    longest = length = 0
    for part in parts:
        together = max(1, part.sequences) if shared else 1
        length = part.n * together + (length if part.kind == DECODE else 0)
        longest = max(longest, length)
    return -(-longest // 256) * 256


@dataclass(slots=True)
class Job:
    """What to measure. settings: of PlainModel ("upstream") or Config ("engine").

    text: a file of conversations to take the tokens from; without it they are random.
    warm: read every expert before the first token.
    device: whose memory to report; the system "device" measures that alone.
    """

    system: str
    model: str
    low: str | None
    settings: dict[str, Any]
    n_ctx: int
    n_ubatch: int
    threads: int
    parts: list[Part]
    seed: int
    text: str | None = None
    warm: bool = False
    device: str | None = None

    def __post_init__(self) -> None:
        self.parts = [Part(*each) for each in self.parts]  # JSON has lists

    def config(self) -> Config:
        """Of our engine. Raises ConfigError."""
        from orchestrator.config import Config

        return Config.build(
            model=self.model,
            low=self.low,
            ctx=self.n_ctx,
            ubatch=self.n_ubatch,
            threads=self.threads,
            **self.settings,
        )
