"""Which pass over the text a study is in, of how many, and how long the rest will take."""

from __future__ import annotations

import time
from collections.abc import Callable

from orchestrator.lab.eval.run import Report

# So many passes have ended when the time of all is estimated: the first one opens the model anew.
_ESTIMATE_AFTER = 2


class Passes:
    """Counts passes over the text and names each of them in its bar. They take about as long as
    each other. begun: how many there were; total: how many there will be, 0 for unknown."""

    def __init__(
        self,
        report: Report,
        note: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._report, self._note, self._clock = report, note, clock
        self.total = self.begun = 0
        self._start_s = 0.0

    def expect(self, total: int, n_tokens: int) -> None:
        """There will be so many, over about so many tokens each; that is said."""
        self.total = total
        self._note(f"{total} passes over up to {n_tokens} tokens of the text")

    def begin(self, label: str) -> Callable[[float], None]:
        """What gets the share of the next pass that is done."""
        done, now_s = self.begun, self._clock()
        if not done:
            self._start_s = now_s
        self.begun += 1
        named = f"{label}, pass {self.begun}"
        if self.total >= self.begun:
            named += f" of {self.total}"
            if done >= _ESTIMATE_AFTER:
                left_s = (now_s - self._start_s) / done * (self.total - done)
                named += f", {duration(left_s)} left in all"
                if done == _ESTIMATE_AFTER:
                    self._note(
                        f"The first {done} of {self.total} passes took "
                        f"{duration(now_s - self._start_s)}: about {duration(left_s)} more"
                    )
        return lambda share: self._report(named, share)


def duration(seconds: float) -> str:
    """ "40 s", "12 min", "3 h 20 min"."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60} min"
