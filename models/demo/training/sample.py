"""Generate text for measurements with the demo model: conversations like those of its training.

`python -m models.demo.training.sample > models/demo/conversations.txt` writes the file that the
benchmark reads, with a line of % between two conversations. All text comes from our own grammar
(`tales.py`, `smalltalk.py`), so no data is needed.
"""

from __future__ import annotations

import random
import sys

from models.demo.training.talk import Sources, Talker, render

COUNT, SEED = 40, 7
KINDS = {"story": 0.5, "small": 0.3, "identity": 0.2}


def conversations(count: int = COUNT, seed: int = SEED) -> list[str]:
    """Generate `count` conversations in the model's chat template.

    The same arguments always give the same text.
    """
    talker = Talker(Sources(), random.Random(seed))
    return [
        "".join(piece for piece, _ in render(talker.conversation(KINDS, 0.3))) for _ in range(count)
    ]


if __name__ == "__main__":
    sys.stdout.write("%\n".join(conversations()))
