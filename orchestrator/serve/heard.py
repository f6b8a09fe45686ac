"""What of the prompts of a server is to be probed while nobody asks: an answer is a part of the
next prompt of its conversation, and so it is in what is new there."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from orchestrator.engine.prompt_copies import common_prefix
from orchestrator.engine.steps import Held

# More of one prompt says little more about the next one.
_MOST_TOKENS = 256


class Heard:
    """The last prompt of each sequence, and which one ended last. In memory alone."""

    def __init__(self) -> None:
        self._prompts: dict[int, Held] = {}
        self._last: Held | None = None

    def prompt(self, sequence: int, tokens: Sequence[int]) -> None:
        """Before a prompt is read into a sequence; empty where nobody knows what that will hold."""
        before = self._prompts.get(sequence)
        known = common_prefix(tokens, before.tokens) if before is not None else 0
        start = max(1, known, len(tokens) - _MOST_TOKENS)
        self._prompts[sequence] = Held(sequence, tokens, start)

    def answered(self, sequences: Iterable[int], is_good: bool) -> None:
        """A request has ended, which has read its prompts unless it failed."""
        held = [self._prompts[each] for each in sequences if is_good and each in self._prompts]
        self._last = next((each for each in held if each.start < len(each.tokens)), None)

    def take(self) -> Held | None:
        """What is new in the last prompt, once."""
        last, self._last = self._last, None
        return last
