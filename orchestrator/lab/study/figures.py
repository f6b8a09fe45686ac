"""The row and the columns that the tables of studies share."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from gguf_tools.units import format_size
from orchestrator.lab.eval import arithmetic
from orchestrator.lab.eval.arithmetic import pair
from orchestrator.lab.eval.report import share_with_error, with_error
from orchestrator.lab.study.subject import Score
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


LABEL = Column("configuration", "configuration", left=True)
RETENTION = Column("r", "retention", "{:g}".format)
COMPUTED_LOW = Column("low or skipped", _lower, percent(1, " %"))
# What a configuration did.
DONE = (RETENTION, Column("realised", _realised, fixed(3)), COMPUTED_LOW)
# What all experts take in one type, and what a weight of theirs does.
SIZE = (Column("experts", "bytes", format_size), Column("bits", "bits", fixed(2)))
ANSWERS = (Column("acc", "acc", share_with_error), Column("acc_norm", "acc_norm", share_with_error))
four_digits = partial(with_error, digits=4)
share = percent(1, " %")


def quality(best: str, base: str) -> tuple[Column, ...]:
    """The columns of quality, the same in every table: the distance from the best tier first.
    base: what the perplexity's relative change is from."""
    return (
        Column(f"KL from {best}", "kl", four_digits),
        Column("perplexity", "perplexity", with_error),
        Column(f"change from {base}", "change", show_change),
        Column("same top token", "top1", share_with_error),
    )


def figures(score: Score, base: Score) -> Row:
    """What a configuration came to, its quality with standard errors and by domain. base: what the
    perplexity's change is from."""
    found: Row = {
        "realised": score.realised,
        "usage": score.usage.as_dict() if score.usage else None,
        "kl": pair(score.mean_kl),
        "perplexity": pair(score.text.perplexity),
        "change": pair(score.against(base)),
        "top1": pair(arithmetic.mean(score.agrees)),
        "domains": {name: pair(each) for name, each in score.text.by_domain().items()},
    }
    if score.choices is not None:
        found |= {"acc": pair(score.choices.acc), "acc_norm": pair(score.choices.acc_norm)}
    return found


def above(score: Score, other: Score) -> list[float | None] | None:
    """How much higher a KL is than another one, paired; None of itself."""
    return None if score is other else pair(arithmetic.mean(score.kl - other.kl))
