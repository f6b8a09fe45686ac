"""The experiments by name. This is the one list of them; an experiment is imported when it is
loaded, so that the command line answers at once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

from orchestrator.errors import ConfigError

if TYPE_CHECKING:
    from orchestrator.lab.bench.benchmark import Benchmark
    from orchestrator.lab.study.study import Study
    from orchestrator.lab.study.votes_loss import VotesLoss


class Place(NamedTuple):
    """Where an experiment is, as "module:Class" below this package. help: of the command of a
    benchmark; paper: that a study is taken from."""

    where: str
    help: str = ""
    paper: str = ""


# The empty name is `moe-edge bench` itself.
BENCHMARKS = {
    "": Place(
        "bench.caps:Caps",
        "Measure this machine: upstream and every policy under memory caps.\n\n"
        "Options of a command below come after its name.",
    ),
    "ablation": Place(
        "bench.ablation:Ablation",
        "Six rows as in Table 3 of the DyMoE paper: what each part brings.\n\n"
        "TTFT is that of a prompt after decode steps of another conversation; cold TTFT that of "
        "the first prompt, with nothing in memory.",
    ),
    "firm": Place(
        "bench.firm:Firm",
        "What each part of FIRM-MoE brings, as in its Tables 1 and 2 and Figure 4.\n\n"
        "The routing is recorded once, and the rows are played in virtual time: ours, and the "
        "paper's, whose link has one queue for all reads.",
    ),
    "gpu": Place(
        "bench.gpu:Gpu",
        "Upstream and every policy on a GPU, against the bound and the goals.\n\n"
        "A cap is the share of the expert bytes that the GPU's memory holds beside the rest of "
        "the model. Upstream keeps the experts of the layers that do not fit on the CPU.",
    ),
    "paired": Place(
        "bench.paired:Paired",
        "Two sides in turns: settings, another checkout, or upstream at its best flags.\n\n"
        "Both are loaded at once and take turns, so that whatever else the machine does meets "
        "both. It tells a difference of one or two per cent.",
    ),
    "topics": Place(
        "bench.topics:Topics",
        "dynaexq and context while the topic changes.\n\n"
        "How even their steps stay, how many experts are promoted, and how fast they are once the "
        "experts of a topic have moved.",
    ),
}

STUDIES = {
    "accuracy": Place("study.dymoe:Accuracy", paper="DyMoE"),
    "retention": Place("study.dymoe:Retention", paper="DyMoE"),
    "critical": Place("study.dymoe:Critical", paper="DyMoE"),
    "depth": Place("study.dymoe:Depth", paper="DyMoE"),
    "similarity": Place("study.similarity:Similarity", paper="DyMoE"),
    "demotion": Place("study.demotion:Demotion", paper="DynaExq"),
    "memory": Place("study.memory:HotMemory", paper="DynaExq"),
    "equal": Place("study.equal:EqualMemory", paper="ours"),
    "allocation": Place("study.allocation:AllocationStudy", paper="ours"),
    "votes": Place("study.votes:VotesStudy", paper="FIRM-MoE"),
    "context": Place("study.context:PromptContext", paper="near-data"),
    "near-bits": Place("study.near_bits:NearBits", paper="near-data"),
}

# Studies of a recorded run.
REPLAY_STUDIES = {"votes-loss": Place("study.votes_loss:VotesLoss", paper="FIRM-MoE")}


def load_benchmark(name: str) -> Benchmark[Any]:
    """The benchmark of this name, which must be one of BENCHMARKS."""
    found: Benchmark[Any] = _load(BENCHMARKS, name)
    return found


def load_study(name: str) -> Study:
    """The study of this name. Raises ConfigError where there is none."""
    found: Study = _load(STUDIES, name)
    return found


def load_replay_study(name: str) -> VotesLoss:
    """The study of a recorded run of this name. Raises ConfigError where there is none."""
    found: VotesLoss = _load(REPLAY_STUDIES, name)
    return found


def studies_by_paper() -> Iterator[str]:
    """ "name, name (paper)" of each paper."""
    for paper, names in groupby(STUDIES, lambda name: STUDIES[name].paper):
        yield f"{', '.join(names)} ({paper})"


def _load(places: Mapping[str, Place], name: str) -> Any:
    if name not in places:
        raise ConfigError(f"unknown study '{name}'; known: {', '.join(places)}")
    module, _, kind = places[name].where.partition(":")
    return getattr(import_module(f"{__package__}.{module}"), kind)()
