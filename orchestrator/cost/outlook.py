"""A rough prediction of how a model runs on this machine, from its header.

It serves tables of several models: known ones, and the quantizations in a repository. A model is
planned and predicted as `moe-edge plan MODEL` does, with two differences: scratch is an upper
estimate, and one product stands for all products of a type.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from orchestrator.errors import ConfigError
from orchestrator.plan.machine import AUTO, CPU
from orchestrator.settings import flag_of

if TYPE_CHECKING:
    from gguf_tools.experts import ExpertModel
    from orchestrator.config import Config
    from orchestrator.cost.disk import Bandwidth
    from orchestrator.cost.speeds import Speeds
    from orchestrator.plan.records import Machine, PlanRequest

# Tokens per second from which a model runs well: about the reading speed of a person.
WELL = 5.0
# Length of the longer context, in tokens.
LONG = 8192
FITS, STREAMS, NOT, NO_ROOM = "fits", "streams", "does not run", "no room"


@dataclass(frozen=True, slots=True)
class Outlook:
    """The predicted memory and speed of a model on this machine.

    - runs: "fits" in memory, "streams" its experts from disk, or "does not run".
    - ram_bytes: the memory that the model takes. If it does not run, the memory that it needs.
    - tokens_s: tokens per second after a short context, if all experts are used equally often.
    - tokens_s_skewed: tokens per second after a short context, if few experts get most of the
      tokens.
    - tokens_s_long: tokens per second after 8192 tokens (LONG); None if the context is shorter.
    - first_s: seconds until the answer to the first prompt begins.
    - hit_rate: the share of the requested experts that are in memory.
    - reading: the share of a token's time that waits for the disk, if all experts are used equally
      often. The rest is computing.
    """

    runs: str
    ram_bytes: int
    tokens_s: float | None = None
    tokens_s_skewed: float | None = None
    tokens_s_long: float | None = None
    first_s: float | None = None
    hit_rate: float | None = None
    reading: float | None = None


def check_for_several_models(config: Config) -> None:
    """Check the settings for a table that predicts how several models run on this machine.

    `moe-edge plan` prints such a table if the user names no model, or a repository with several
    models. Raises ConfigError for settings that only suit a single model, such as --low-tier, and
    for settings of a GPU.
    """
    of_one = ("low", "high_tier", "low_tier")
    named = [*(name for name in of_one if config.given(name) is not None), *config.of_policies]
    if named:
        flag = flag_of(named[0])
        raise ConfigError(f"{flag} needs a model: name one with -m, or leave {flag} out")
    if config.vram is not None or config.device not in (AUTO, CPU):
        raise ConfigError(
            "a table of several models covers only the CPU: leave --device and --vram out"
        )


def memory_for(config: Config, machine: Machine) -> int:
    """Return the bytes of memory that a model may take: --ram, or the usable memory."""
    return min(config.ram, machine.memory_bytes) if config.ram else machine.usable_bytes


def foresee(
    request: PlanRequest, model: ExpertModel, machine: Machine, disk: Bandwidth, speeds: Speeds
) -> Outlook:
    """Predict whether a model fits in the memory of this machine, and how fast it answers.

    - request: the settings.
    - model: the model, of which only the header is needed.
    - machine: the memory of this machine.
    - disk: speed of the disk that would hold the model.
    - speeds: timings of the processor. Operations that were never timed are timed now.

    Raises PolicyError or ConfigError if the settings do not suit the model, and NativeError if an
    operation cannot be timed.
    """
    from orchestrator.cost.time import PROMPT_TOKENS, TimeModel, skewed, uniform_usage
    from orchestrator.plan.planning import plan
    from orchestrator.plan.records import Refusal

    config = request.config
    found = plan(request, model, machine)
    if isinstance(found, Refusal):
        return Outlook(NOT, found.needed_bytes)
    times = TimeModel(model, disk, speeds, uniform_usage(model))
    short = times.of_plan(found, config)
    other = times.of_plan(found, config, uses=skewed(model))
    long = None
    if found.n_ctx >= LONG:
        full = times.of_plan(found, config, n_cells=LONG) if found.shared else short
        long = 1.0 / full.token_s(LONG)
    token_s = short.token_s(PROMPT_TOKENS)
    return Outlook(
        runs=STREAMS if found.absent_bytes else FITS,
        ram_bytes=found.total_bytes,
        tokens_s=1.0 / token_s,
        tokens_s_skewed=1.0 / other.token_s(PROMPT_TOKENS),
        tokens_s_long=long,
        first_s=short.prompt_s(PROMPT_TOKENS, first=True),
        hit_rate=short.residency.hit_rate,
        reading=1.0 - short.without_reads.token_s(PROMPT_TOKENS) / token_s,
    )
