"""The list of all experiments by name.

A module is imported only when its experiment is loaded, so that the command line starts quickly.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from itertools import groupby
from typing import Any, NamedTuple

from orchestrator.errors import ConfigError


class Place(NamedTuple):
    """The location of the class of an experiment, which is a benchmark or a study.

    - where: "module:Class", relative to this package.
    - help: help text of the command, for a benchmark.
    - paper: the paper that is reproduced, for a study.
    """

    where: str
    help: str = ""
    paper: str = ""


# Benchmarks by name. The command without a name, `moe-edge bench`, has the name "".
BENCHMARKS = {
    "": Place(
        "bench.caps:Caps",
        "Compare upstream llama.cpp and all policies under memory caps on this machine.\n\n"
        "Options of the commands below must follow the command's name.",
    ),
    "ablation": Place(
        "bench.ablation:Ablation",
        "Measure the contribution of each part of DyMoE (Table 3 of the paper).\n\n"
        "TTFT is measured on a prompt that follows another conversation; cold TTFT on the first "
        "prompt, with no experts in memory.",
    ),
    "gpu": Place(
        "bench.gpu:Gpu",
        "Compare upstream llama.cpp and all policies on a GPU.\n\n"
        "A cap is the share of the expert bytes that fits in the GPU's memory next to the rest of "
        "the model. Upstream keeps the experts of the remaining layers on the CPU.",
    ),
    "paired": Place(
        "bench.paired:Paired",
        "Compare the speed of two settings, of two checkouts, or with upstream llama.cpp.\n\n"
        "Both sides are loaded and take turns, so that other load on the machine affects both "
        "equally. This shows differences of one or two percent.",
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

# Studies that replay a recorded run, by name.
REPLAY_STUDIES = {
    "firm": Place("study.firm:FirmParts", paper="FIRM-MoE"),
    "votes-loss": Place("study.firm:VotesLoss", paper="FIRM-MoE"),
}


def studies_by_paper() -> Iterator[str]:
    """Yield one text "study, study (paper)" for each paper."""
    for paper, names in groupby(STUDIES, lambda name: STUDIES[name].paper):
        yield f"{', '.join(names)} ({paper})"


def load(places: Mapping[str, Place], name: str) -> Any:
    """Import and create the benchmark or study with this name.

    Raises ConfigError if the name is unknown.
    """
    if name not in places:
        raise ConfigError(f"unknown study '{name}': choose one of {', '.join(places)}")
    module, _, kind = places[name].where.partition(":")
    return getattr(import_module(f"{__package__}.{module}"), kind)()
