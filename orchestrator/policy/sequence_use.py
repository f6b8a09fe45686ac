"""What each sequence used of the experts: P and W of the near-data paper, section 4.1, of its whole
conversation, answers included."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from orchestrator.errors import PolicyError
from orchestrator.events import Phase, StepReport

_MAGIC = b"moe-edge use 1\n"


@dataclass(slots=True)
class _Use:
    """counts P and gates W, float64 [n_layers, n_expert] each."""

    counts: np.ndarray
    gates: np.ndarray


class SequenceUse:
    """Sums of the sequences that are in memory; what those that are over used is in `past`, float64
    [n_layers, n_expert].

    A token of a prompt counts for its own sequence. What a decode step used is known for all of its
    tokens together, so that it counts in equal parts for all sequences in memory: their sum is
    exact, and so is a sequence that is alone. Answers have no gate sums.
    """

    def __init__(self, n_layers: int, n_expert: int) -> None:
        self._size = n_layers, n_expert
        self.past = self._zeros()
        self._of: dict[int, _Use] = {}
        self._step = -1
        self._in_step: dict[int, _Use] = {}
        self._given: set[int] = set()  # restored since the last step

    def _zeros(self) -> np.ndarray:
        return np.zeros(self._size)

    def _new(self) -> _Use:
        return _Use(self._zeros(), self._zeros())

    @property
    def counts(self) -> np.ndarray:
        """P of all sequences in memory, float64 [n_layers, n_expert]."""
        return self._sum([each.counts for each in self._of.values()])

    @property
    def gates(self) -> np.ndarray:
        """W of them."""
        return self._sum([each.gates for each in self._of.values()])

    def _sum(self, parts: list[np.ndarray]) -> np.ndarray:
        total: np.ndarray = np.sum([self._zeros(), *parts], axis=0)
        return total

    def begin(self, step: int) -> bool:
        """A layer of this step follows: whether it is the step's first one. What a failed step
        counted is dropped."""
        if step == self._step:
            return False
        self._step = step
        self._in_step.clear()
        return True

    def count(self, layer: int, ids: np.ndarray, gates: np.ndarray, sequences: np.ndarray) -> None:
        """Tokens of the running step: the experts ids and their weights gates [T, k], and the
        sequence of each token [T]."""
        for sequence in sorted(set(sequences.tolist())):
            mine = sequences == sequence
            use = self._in_step.setdefault(sequence, self._new())
            chosen, n = ids[mine].ravel(), self._size[1]
            use.counts[layer] += np.bincount(chosen, minlength=n)
            use.gates[layer] += np.bincount(chosen, gates[mine].ravel(), n)

    def step_done(self, report: StepReport) -> None:
        """A step that succeeded: sequences end and begin, and what it used is added."""
        for sequence in {*report.ends, *report.starts} - self._given:
            if (over := self._of.pop(sequence, None)) is not None:
                self.past += over.counts
        self._given.clear()
        for sequence in report.starts:
            self._of.setdefault(sequence, self._new())
        if report.phase == Phase.PREFILL:
            for sequence, use in self._in_step.items():
                mine = self._of.setdefault(sequence, self._new())
                mine.counts += use.counts
                mine.gates += use.gates
            self._in_step.clear()
        elif self._of and report.counts is not None:
            part = report.counts / len(self._of)
            for use in self._of.values():
                use.counts += part
        elif report.counts is not None:
            self.past += report.counts

    def save(self, sequence: int) -> bytes | None:
        """What one sequence used so far; None for one that is not in memory."""
        use = self._of.get(sequence)
        if use is None:
            return None
        return _MAGIC + np.stack([use.counts, use.gates]).astype("<f8").tobytes()

    def restore(self, sequence: int, state: bytes) -> None:
        """A sequence goes on from where another one was saved, in the place of what it used itself.
        Raises PolicyError for what save did not write for this model."""
        n_layers, n_expert = self._size
        body = state[len(_MAGIC) :]
        if not state.startswith(_MAGIC) or len(body) != 16 * n_layers * n_expert:
            raise PolicyError("the state of a sequence is damaged, or of another model")
        sums = np.frombuffer(body, "<f8").reshape(2, n_layers, n_expert).astype(np.float64)
        if not (np.isfinite(sums).all() and (sums >= 0).all()):
            raise PolicyError("the state of a sequence is damaged: it has impossible sums")
        self._of[sequence] = _Use(sums[0].copy(), sums[1].copy())
        self._given.add(sequence)
