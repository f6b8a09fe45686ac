"""What each sequence used: sums by sequence, ends, and a state that a cache of prompts can keep."""

from __future__ import annotations

import numpy as np
import pytest

from orchestrator.errors import PolicyError
from orchestrator.events import Phase, StepReport
from orchestrator.policy.context import SequenceUse

SIZE = (2, 4)


def read(use: SequenceUse, step: int, tokens: list[tuple[int, list[int]]], **said: object) -> None:
    """A step of a prompt: (sequence, experts) of each token, the same in both layers, with weights
    0.75 and 0.25."""
    ids = np.array([experts for _, experts in tokens], np.int32)
    gates = np.tile(np.array([0.75, 0.25], np.float32), (len(tokens), 1))
    of = np.array([sequence for sequence, _ in tokens], np.int32)
    for layer in range(SIZE[0]):
        use.count(step, layer, ids, gates, of)
    use.step_done(StepReport(Phase.PREFILL, len(tokens), 1.0, **said))


def answer(use: SequenceUse, counts: list[int], **said: object) -> None:
    both = np.tile(np.array(counts, np.uint32), (SIZE[0], 1))
    use.step_done(StepReport(Phase.DECODE, 1, 1.0, counts=both, **said))


def test_a_conversation_counts_until_it_ends_and_several_add_up():
    use = SequenceUse(*SIZE)
    read(use, 1, [(0, [0, 1]), (0, [0, 2])], starts=(0,))
    answer(use, [0, 0, 1, 1])
    assert use.sums[0].tolist() == [[2, 1, 2, 1]] * 2
    assert use.sums[1].tolist() == [[1.5, 0.25, 0.25, 0]] * 2  # answers have none
    read(use, 2, [(0, [3, 0]), (5, [3, 2])], starts=(5,))  # a turn of one, a prompt of another
    assert use.sums[0].tolist() == [[3, 1, 3, 3]] * 2
    answer(use, [2, 0, 0, 2])
    assert use.sums[0].tolist() == [[5, 1, 3, 5]] * 2
    answer(use, [0, 4, 0, 0], ends=(0,))
    # Of 5: its prompt, half of what both used together, and all since it is alone.
    assert use.sums[0].tolist() == [[1, 4, 1, 2]] * 2
    assert use.past.tolist() == [[4, 1, 2, 3]] * 2
    assert use.sums[1].tolist() == [[0, 0, 0.25, 0.75]] * 2
    answer(use, [1, 1, 0, 0], ends=(5,))
    assert not use.sums[0].any() and use.past.tolist() == [[6, 6, 3, 5]] * 2


def test_a_sequence_that_begins_anew_forgets_and_a_failed_step_counts_nothing():
    use = SequenceUse(*SIZE)
    use.count(1, 0, np.array([[3, 2]]), np.ones((1, 2)), np.zeros(1, np.int32))  # no report follows
    read(use, 2, [(0, [0, 1])], starts=(0,))
    read(use, 3, [(0, [2, 3])], starts=(0,))
    assert use.sums[0].tolist() == [[0, 0, 1, 1]] * 2
    assert use.past.tolist() == [[1, 1, 0, 0]] * 2


def test_a_kept_prefix_brings_what_it_used():
    use = SequenceUse(*SIZE)
    read(use, 1, [(0, [0, 1]), (0, [0, 2])], starts=(0,))
    answer(use, [1, 0, 0, 1])
    kept = use.save(0)
    assert kept is not None and use.save(7) is None
    before = use.sums[0]
    more = np.array([0, 1, 0, 1])
    read(use, 2, [(0, [2, 3])], starts=(0,), ends=(0,))  # another conversation in its place
    use.restore(0, kept)
    # What was dropped is reported with the next step; what was restored is not that.
    read(use, 3, [(0, [3, 1])], ends=(0,))
    assert use.sums[0].tolist() == (before + more).tolist()
    use.restore(4, kept)
    answer(use, [0, 0, 0, 0])
    assert use.sums[0].tolist() == (2 * before + more).tolist()
    answer(use, [0, 0, 0, 0], ends=(4,))  # this end is one
    assert use.sums[0].tolist() == (before + more).tolist()
    other = SequenceUse(*SIZE)
    other.restore(1, kept)
    assert other.save(1) == kept


@pytest.mark.parametrize("damage", [b"", b"x", "cut", "more", "other", "nan", "negative"])
def test_a_damaged_state_is_refused(damage: bytes | str):
    use = SequenceUse(*SIZE)
    read(use, 1, [(0, [0, 1])], starts=(0,))
    kept = use.save(0)
    bad = {"cut": kept[:-8], "more": kept + bytes(8), "other": b"x" + kept[1:]}
    bad |= {name: kept[:-8] + np.float64(v).tobytes() for name, v in WRONG.items()}
    with pytest.raises(PolicyError, match="state of a sequence"):
        use.restore(0, bad[damage] if isinstance(damage, str) else damage)
    assert use.save(0) == kept


WRONG = {"nan": np.nan, "negative": -1.0}
