"""What a user can tune of FIRM-MoE, and which of it goes together."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from orchestrator.allocation.prefetch import OFF as NEVER
from orchestrator.allocation.prefetch import LookAhead
from orchestrator.errors import ConfigError, SettingError
from orchestrator.policy.firm.heop import ALL, GROUPS, OFF, WAYS, Votes
from orchestrator.policy.firm.votes import MOL, RANK, depth_of
from orchestrator.policy.firm.votes import WAYS as VOTES_WAYS
from orchestrator.settings import setting

# Settings that say which votes count. What a recorded run had of the last three holds for its own
# votes alone.
_VOTING = ("prefetch", "agree", "votes", "tune", "n_ahead")


def read_votes(text: str) -> list[Votes]:
    """(K, P) of each group of layers from "4,1", for all of them, or "4,1/8,3/8,3". Raises
    ValueError."""
    pairs = [tuple(int(part) for part in pair.split(",")) for pair in text.split("/")]
    if len(pairs) not in (1, len(GROUPS)) or any(len(pair) != 2 or min(pair) < 1 for pair in pairs):
        raise ValueError(text)
    return [(k, p) for k, p in pairs] * (len(GROUPS) // len(pairs))


def write_votes(votes: Sequence[Votes]) -> str:
    """As read_votes reads it."""
    return "/".join(f"{k},{p}" for k, p in votes)


@dataclass(frozen=True)
class FIRMSettings(LookAhead):
    """What a user can tune. Raises SettingError."""

    prefetch_kinds: int = setting(
        3,
        "How many matrices of an expert are loaded ahead, in the order of computing: its gate; "
        "its gate and up; all of it.",
        within=(1, 3),
    )
    agree: str = setting(
        RANK,
        "Which experts are expected: rank, the first K that the layer before predicts; mol, the "
        "paper's, those among the first K of each of P layers; margin, those that the layer before "
        "ranks far enough above its last one.",
        metavar="HOW",
        choices=VOTES_WAYS,
    )
    votes: str | None = setting(
        None,
        "K,P: the candidates of a vote and the layers that vote, of which only mol has several; "
        "K,P/K,P/K,P for shallow, middle and deep layers.",
        metavar="K,P",
        shown="tuned",
    )
    tune: str | None = setting(
        None,
        "How K and P are found: climb, the paper's hill climbing; all, every pair counted on the "
        "same tokens; off.",
        metavar="HOW",
        choices=WAYS,
        shown=f"{ALL}, off with votes",
    )
    tune_steps: int = setting(
        32, "Decode steps between two changes of K and P.", within=(1, 2**24), hidden=True
    )
    tune_patience: int = setting(
        2, "Changes without gain, after which climb turns round.", within=(1, 2**16), hidden=True
    )
    tune_tokens: int = setting(
        512, "Decode steps after which K and P stay.", within=(1, 2**24), hidden=True
    )
    waste_weight: float = setting(
        0.5, "Loss of an expert that is loaded ahead for nothing.", within=(0.0, 1e6), hidden=True
    )
    miss_weight: float = setting(
        0.5, "Loss of an expert that is loaded on demand.", within=(0.0, 1e6), hidden=True
    )

    def __post_init__(self) -> None:
        """Refuses what would have no effect."""
        super().__post_init__()
        try:
            deepest = self.deepest
        except ValueError:
            raise SettingError(
                "votes",
                f"must be K,P such as 4,1, or three of them as 4,1/8,3/8,3, not '{self.votes}'",
            ) from None
        if self.prefetch == NEVER or self.n_ahead == 0:
            for name, value in (("votes", self.votes), ("tune", self.tune)):
                if value not in (None, OFF):
                    off = "prefetch off" if self.prefetch == NEVER else "n_ahead 0"
                    raise SettingError(
                        name, f"is {value}, and nothing is loaded ahead with {off}: leave one out"
                    )
        n_ahead, most = self.n_ahead, self.declared()["n_ahead"].within
        if self.agree != MOL and (deepest or 0) > 1:
            raise SettingError(
                "votes",
                f"asks {deepest} layers in '{self.votes}', and with {self.agree} one votes: "
                f"write K,1, or choose {MOL} for agree",
            )
        if self.agree != MOL and n_ahead is not None and n_ahead > 1:
            raise SettingError(
                "n_ahead",
                f"is {n_ahead}, and with {self.agree} only the layer before votes: leave it out, "
                f"or choose {MOL} for agree",
            )
        if deepest is None:
            return
        if most is not None and deepest > most[1]:
            raise SettingError(
                "votes", f"asks {deepest} layers in '{self.votes}', and {most[1]:g} can vote"
            )
        if n_ahead not in (None, deepest):
            raise SettingError(
                "n_ahead",
                f"is {n_ahead}, and the votes '{self.votes}' are of {deepest} layers: leave it out",
            )
        if self.tune not in (None, OFF):
            raise SettingError(
                "tune", f"is {self.tune}, and votes says what would be tuned: leave one out"
            )

    @property
    def deepest(self) -> int | None:
        """How many layers vote at most; None where that is tuned. Raises ValueError for votes that
        cannot be read."""
        return None if self.votes is None else max(p for _, p in read_votes(self.votes))

    @property
    def way(self) -> str:
        """How K and P are found."""
        return self.tune or (ALL if self.votes is None else OFF)

    @property
    def usual_ahead(self) -> int:
        """As many as vote, or as the paper's, where they all may."""
        return self.deepest or depth_of(self.agree, 3)

    def limited(self, depth: int, asked: Collection[str]) -> FIRMSettings:
        """Votes that were asked for need their layers; those of a recorded run that did not look
        ahead decided nothing."""
        if self.deepest is None or self.deepest <= depth:
            return super().limited(depth, asked)
        if "votes" in asked:
            raise ConfigError(
                f"the trace looks {depth} layers ahead, and the votes '{self.votes}' are of "
                f"{self.deepest}: record it with --agree {MOL} --n-ahead {self.deepest}"
            )
        return replace(self, votes=None, n_ahead=None).limited(depth, asked)

    @classmethod
    def changed(cls, recorded: Mapping[str, Any], changes: Mapping[str, Any]) -> FIRMSettings:
        """What says which votes count belongs together: where a change concerns it, only the way to
        agree stays as recorded."""
        if any(changes.get(name, recorded.get(name)) != recorded.get(name) for name in _VOTING):
            recorded = {k: v for k, v in recorded.items() if k not in _VOTING[2:]}
        return cls.of({**recorded, **changes})
