"""The experiments by name. This is the one list of them; an experiment is imported when it is
loaded, so that the command line answers at once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from itertools import groupby
from typing import Any, NamedTuple

from orchestrator.errors import ConfigError


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
}

STUDIES = {
    "accuracy": Place("study.dymoe:Accuracy", paper="DyMoE"),
    "retention": Place("study.dymoe:Retention", paper="DyMoE"),
    "critical": Place("study.dymoe:Critical", paper="DyMoE"),
    "depth": Place("study.dymoe:Depth", paper="DyMoE"),
    "similarity": Place("study.dymoe:Similarity", paper="DyMoE"),
    "demotion": Place("study.dynaexq:Demotion", paper="DynaExq"),
    "memory": Place("study.dynaexq:HotMemory", paper="DynaExq"),
    "equal": Place("study.dynaexq:EqualMemory", paper="ours"),
    "votes": Place("study.votes:VotesStudy", paper="FIRM-MoE"),
    "context": Place("study.near_data:PromptContext", paper="near-data"),
    "near-bits": Place("study.near_data:NearBits", paper="near-data"),
}

# Studies of a recorded run.
REPLAY_STUDIES = {
    "firm": Place("study.firm:FirmParts", paper="FIRM-MoE"),
    "votes-loss": Place("study.firm:VotesLoss", paper="FIRM-MoE"),
}


def studies_by_paper() -> Iterator[str]:
    """ "name, name (paper)" of each paper."""
    for paper, names in groupby(STUDIES, lambda name: STUDIES[name].paper):
        yield f"{', '.join(names)} ({paper})"


def load(places: Mapping[str, Place], name: str) -> Any:
    """The experiment of this name. Raises ConfigError where there is none."""
    if name not in places:
        raise ConfigError(f"unknown study '{name}'; known: {', '.join(places)}")
    module, _, kind = places[name].where.partition(":")
    return getattr(import_module(f"{__package__}.{module}"), kind)()
