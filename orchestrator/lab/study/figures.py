"""Rows and columns that the tables of several studies share."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from gguf_tools.units import format_size
from orchestrator.lab.eval import arithmetic
from orchestrator.lab.eval.arithmetic import pair
from orchestrator.lab.eval.report import share_with_error, with_error
from orchestrator.lab.study.study import Configuration
from orchestrator.lab.study.subject import Score
from orchestrator.lab.study.uniform import UniformFile
from orchestrator.lab.table import Column, Row, fixed, percent


def show_change(found: Sequence[float | None]) -> str:
    """A relative change with its standard error, as "+1.23 % +- 0.45"."""
    value, error = (0.0 if each is None else 100 * each for each in found)
    return f"{value:+.2f} % +- {error:.2f}"


def _realised(row: Row) -> float | None:
    share: float | None = row["realised"]
    return None if row["retention"] is None else share


def _lower(row: Row) -> float | None:
    """The share of the routed experts that were computed low, or not at all."""
    usage = row["usage"]
    if usage is None:
        return None
    skipped = usage.get("skip") or 0.0
    share: float = skipped + (1 - skipped) * (usage.get("computed_low") or 0.0)
    return share


RETENTION = Column("r", "retention", "{:g}".format)
COMPUTED_LOW = Column("low or skipped", _lower, percent(1, " %"))
# What a configuration did.
DONE = (
    RETENTION,
    Column("realised", _realised, fixed(3)),
    COMPUTED_LOW,
)
LABEL = Column("configuration", "configuration", left=True)
# What all experts take in one type, and what a weight of theirs does.
SIZE = (Column("experts", "bytes", format_size), Column("bits", "bits", fixed(2)))
ANSWERS = (Column("acc", "acc", share_with_error), Column("acc_norm", "acc_norm", share_with_error))


def quality(best: str, base: str) -> tuple[Column, ...]:
    """The columns of quality, the same in every table: the distance from the best tier first.
    base: what the perplexity's relative change is from."""
    return (
        Column(f"KL from {best}", "kl", partial(with_error, digits=4)),
        Column("perplexity", "perplexity", with_error),
        Column(f"change from {base}", "change", show_change),
        Column("same top token", "top1", share_with_error),
    )


def quality_of(score: Score, base: Score) -> Row:
    """The figures of `quality`, each with its standard error, and the perplexity by domain."""
    return {
        "kl": pair(arithmetic.mean(distances(score))),
        "perplexity": pair(score.text.perplexity),
        "change": pair(score.against(base)),
        "top1": pair(arithmetic.mean(agreements(score))),
        "domains": {name: pair(each) for name, each in score.text.by_domain().items()},
    }


def size_of(file: UniformFile) -> Row:
    """The figures of SIZE."""
    return {"bytes": file.n_bytes, "bits": file.bits}


def row_of(each: Configuration, score: Score, base: Score, **more: Any) -> Row:
    """One configuration with its figures. base: what the perplexity's change is from."""
    usage = score.usage
    return {
        "configuration": each.label,
        "retention": each.retention,
        "realised": score.realised,
        "usage": usage.as_dict() if usage else None,
        **quality_of(score, base),
        **more,
    }


def distances(score: Score) -> np.ndarray:
    """KL of each token from the reference that the score was taken with."""
    if score.text.kl is None:
        raise ValueError("scored without a reference")
    return score.text.kl


def agreements(score: Score) -> np.ndarray:
    """Of each token 1.0 where its likeliest one is the reference's, else 0.0; between them where
    the score is a mean over several."""
    if score.text.agrees is None:
        raise ValueError("scored without a reference")
    return score.text.agrees.astype(np.float64)


def answers_of(score: Score) -> dict[str, list[float | None]]:
    """The shares of questions that were answered right; nothing where none were put."""
    if score.choices is None:
        return {}
    return {"acc": pair(score.choices.acc), "acc_norm": pair(score.choices.acc_norm)}
