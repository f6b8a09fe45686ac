"""Which marks of a running sequence stay where there is no place for another one."""

from types import SimpleNamespace

import pytest
from test_matching import LETTERS

from orchestrator.engine.prompt_copies import Shelf
from orchestrator.engine.prompts import PromptCache
from orchestrator.memory.footprint import PROMPT_MARKS

PART_BYTES = 100


class Reading:
    """Steps of a model whose memory goes back to marks alone, each of PART_BYTES."""

    def __init__(self):
        self.cached = []
        self.marks = []
        self.state = SimpleNamespace(has_part=True, n_bytes=lambda part: PART_BYTES)

    def mark(self, with_part):
        length, part = len(self.cached), b"part" if with_part else None
        self.marks.append(SimpleNamespace(length=length, part=part, n_bytes=PART_BYTES * with_part))


@pytest.mark.parametrize(
    ("budget_parts", "read", "kept"),
    [
        (100, PROMPT_MARKS, [1, 2, 3, 4, 5, 6]),
        (100, PROMPT_MARKS + 1, [1, 3, 4, 5, 6, 7]),
        (100, PROMPT_MARKS + 3, [1, 5, 6, 7, 8, 9]),
        (3, 3, [1, 2, 3]),
        (3, 5, [1, 4, 5]),
        (1, 3, [3]),
    ],
)
def test_the_oldest_mark_and_the_latest_ones_stay(budget_parts, read, kept):
    steps = Reading()
    shelf = Shelf(budget_parts * PART_BYTES)
    cache = PromptCache(steps, LETTERS, 4096, shelf, None, "key")
    for token in range(read):
        steps.cached.append(token)
        cache.mark()
    assert [each.length for each in steps.marks] == kept
    assert shelf.live_bytes == len(kept) * PART_BYTES <= shelf.budget_bytes


def test_a_mark_that_never_has_room_takes_no_other_ones_place():
    steps = Reading()
    cache = PromptCache(steps, LETTERS, 4096, Shelf(PART_BYTES - 1), None, "key")
    steps.cached.append(0)
    cache.mark()
    assert [each.part for each in steps.marks] == [None]
