"""How long products took at several times, and which of that to believe: what `Speeds` keeps.

Other work makes a product slower, and nothing makes it faster. So the least of its timings stands.
One moment cannot tell whether it was disturbed. So a product is timed again at another one, until
two timings of a quiet machine agree. A machine that got slower is believed when the timings from
before are old.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from orchestrator.cache.files import read_object, write_whole

DISTURBED = (
    "Other programs kept the processor busy while its speed was measured, so that predictions may "
    "be too slow. What is run next measures again."
)
# Timings agree when they are so close to the least one.
AGREE = 1.2
# What is timed again sooner is the same moment.
APART_S = 600.0
# So many moments are kept, and after as many quiet ones nothing is timed until timings of that age
# are dropped.
MOST_MOMENTS = 6
OLD_S = 30 * 86400.0
_LARGEST_BYTES = 1 << 20


class Timing(NamedTuple):
    """seconds: of the product. at: when, in seconds of the system's clock. quiet: hardly anything
    else ran."""

    seconds: float
    at: float
    quiet: bool


class Timings:
    """The timings of each product, by its key, as they are `now`."""

    def __init__(self, now: float, of: Mapping[str, Iterable[Timing]] | None = None) -> None:
        """of: what was kept. What is old, or of a time to come, is dropped."""
        self._now = now
        self._of: dict[str, list[Timing]] = {}
        for key, kept in (of or {}).items():
            young = [each for each in kept if 0 <= now - each.at < OLD_S]
            if young:
                self._of[key] = sorted(young, key=lambda each: each.at)

    @classmethod
    def read(cls, data: Any, now: float) -> Timings:
        """Of what as_dict() wrote; nothing where that is damaged."""
        try:
            return cls(now, {key: [_read(*each) for each in kept] for key, kept in data.items()})
        except (AttributeError, TypeError, ValueError):
            return cls(now)

    @classmethod
    def load(cls, path: Path, form: str, now: float) -> Timings:
        """Of what save() kept in this form; nothing where that is not to be had."""
        with suppress(OSError):
            data = read_object(path, _LARGEST_BYTES)
            if data and data.get("format") == form:
                return cls.read(data.get("timings"), now)
        return cls(now)

    def save(self, path: Path, form: str) -> None:
        """Keeps them in a file, where it can be written."""
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, json.dumps({"format": form, "timings": self.as_dict()}))

    def as_dict(self) -> dict[str, list[Timing]]:
        """For a file."""
        return self._of

    def least(self, key: str) -> float | None:
        """The seconds that stand for a product, None where it was never timed."""
        kept = self._of.get(key)
        return min(each.seconds for each in kept) if kept else None

    def is_due(self, key: str, alike: int = 2) -> bool:
        """Whether to time it now: there is nothing of a quiet machine, or not so many timings that
        agree, and then the last timing is some time ago."""
        kept = self._of.get(key, [])
        another = not kept or self._now - kept[-1].at >= APART_S
        quiet = sum(each.quiet for each in kept)
        if not quiet:
            return another or len(kept) < MOST_MOMENTS
        least = min(each.seconds for each in kept)
        agreeing = sum(each.quiet and each.seconds <= AGREE * least for each in kept)
        return another and agreeing < alike and quiet < MOST_MOMENTS

    def was_quiet(self, key: str) -> bool:
        """Whether any of its timings is of a quiet machine."""
        return any(each.quiet for each in self._of.get(key, ()))

    def add(self, key: str, seconds: float, quiet: bool) -> None:
        """A timing of now. Of two of the same moment the lesser one stays."""
        kept = self._of.setdefault(key, [])
        if kept and self._now - kept[-1].at < APART_S:
            last = kept.pop()
            kept.append(min(last, last._replace(seconds=seconds, quiet=quiet)))
        else:
            kept.append(Timing(seconds, self._now, quiet))
        if len(kept) > MOST_MOMENTS:
            # The present one stays, which says when it was timed last.
            kept.remove(max(kept[:-1], key=lambda each: (not each.quiet, each.seconds)))


def _read(seconds: object, at: object, quiet: object) -> Timing:
    """Raises ValueError for what is no timing."""
    times = isinstance(seconds, float) and isinstance(at, float) and isinstance(quiet, bool)
    if not (times and 0.0 < seconds < 1e6):  # type: ignore[operator]
        raise ValueError
    return Timing(seconds, at, quiet)  # type: ignore[arg-type]
