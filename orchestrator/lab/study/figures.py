"""Rows and columns that the tables of several studies share."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from orchestrator.eval import arithmetic
from orchestrator.eval.report import share_with_error, with_error
from orchestrator.eval.run import pair
from orchestrator.lab.study.study import Configuration
from orchestrator.lab.study.subject import Score
from orchestrator.lab.table import Column, Row, fixed, percent


def show_change(found: Sequence[float | None]) -> str:
    """A relative change with its standard error, as "+1.23 % +- 0.45"."""
    value, error = (0.0 if each is None else 100 * each for each in found)
    return f"{value:+.2f} % +- {error:.2f}"


def _realised(row: Row) -> float | None:
    share: float | None = row["realised"]
    return None if row["retention"] is None else share


def _lower(row: Row) -> float:
    """The share of the routed experts that were low or skipped."""
    usage = row["usage"] or {}
    return (usage.get("low") or 0.0) + (usage.get("skip") or 0.0)


RETENTION = Column("r", "retention", "{:g}".format)
PERPLEXITY = Column("perplexity", "perplexity", with_error)
# How a configuration is named, and what it did.
DONE = (
    RETENTION,
    Column("realised", _realised, fixed(3)),
    Column("low or skipped", _lower, percent(1, " %")),
    PERPLEXITY,
)
show_kl = partial(with_error, digits=4)
LABEL = Column("configuration", "configuration", left=True)
ANSWERS = (Column("acc", "acc", share_with_error), Column("acc_norm", "acc_norm", share_with_error))


def change_from(name: str) -> Column:
    """The relative change of the perplexity from a configuration."""
    return Column(f"change from {name}", "change", show_change)


def row_of(each: Configuration, score: Score, **more: Any) -> Row:
    """One configuration with its figures."""
    usage = score.usage
    return {
        "configuration": each.label,
        "retention": each.retention,
        "realised": score.realised,
        "usage": usage.as_dict() if usage else None,
        "perplexity": pair(score.text.perplexity),
        "domains": domains_of(score),
        **more,
    }


def domains_of(score: Score) -> dict[str, list[float | None]]:
    """The perplexity on each domain of the text."""
    return {name: pair(each) for name, each in score.text.by_domain().items()}


def change_of(score: Score, base: Score) -> list[float | None]:
    """[relative change of the perplexity, its standard error]."""
    return pair(score.against(base))


def distances(score: Score) -> np.ndarray:
    """KL of each token from the reference that the score was taken with."""
    if score.text.kl is None:
        raise ValueError("scored without a reference")
    return score.text.kl


def kl_of(score: Score) -> list[float | None]:
    """[the mean of `distances`, its standard error]."""
    return pair(arithmetic.mean(distances(score)))


def answers_of(score: Score) -> dict[str, list[float | None]]:
    """The shares of questions that were answered right; nothing where none were put."""
    if score.choices is None:
        return {}
    return {"acc": pair(score.choices.acc), "acc_norm": pair(score.choices.acc_norm)}
