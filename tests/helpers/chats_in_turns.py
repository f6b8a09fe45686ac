"""Compare the speed of `moe-edge chat` in two environments, on a machine that others use too.

    python tests/helpers/chats_in_turns.py OLD/.venv/bin/moe-edge NEW/.venv/bin/moe-edge MODEL.gguf

Both chats write the same greedy answer. They take turns: one is stopped (SIGSTOP) while the other
writes a block of characters. A busy neighbour therefore slows both. Two equal programs may still
differ by some per cent for as long as they run, so the interval is that of several starts. Other
arguments, such as --expert-ram 1GiB, go to the chats.
"""

import argparse
import os
import signal
import statistics
import subprocess
import time

from orchestrator.lab.eval.arithmetic import median_interval

PROMPT = "Tell me a long story about a fox and a river."


class Chat:
    """A chat that runs only while it writes a block of its answer."""

    def __init__(self, program, model, block, options):
        self._command = [program, "chat", "-m", model, "-p", PROMPT, "--temp", "0", *options]
        self._command += ["--max-tokens", "1000000", "--threads", "2"]
        self._block = block
        self._process = None

    def start(self):
        """Start the answer from its beginning. The first block is not measured.

        Ends the program if the answer is shorter than a block.
        """
        self.end()
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            start_new_session=True,
            bufsize=0,
        )
        if self.write() is None:
            raise SystemExit(f"the answer of {self._command[0]} is shorter than --block")

    def end(self):
        if self._process is not None:
            self._signal(signal.SIGKILL)
            self._process.wait()
            self._process.stdout.close()

    def write(self):
        """Let the chat write a block. Return the seconds, or None if the answer has ended."""
        self._signal(signal.SIGCONT)
        begun, missing = time.perf_counter(), self._block
        while missing:
            part = os.read(self._process.stdout.fileno(), missing)
            if not part:
                return None
            missing -= len(part)
        took = time.perf_counter() - begun
        self._signal(signal.SIGSTOP)
        return took

    def _signal(self, number):
        os.killpg(self._process.pid, number)


def ratio(chats, n_pairs):
    """Return the median of old over new seconds of adjacent blocks, for one start of both chats."""
    found = []
    for number in range(n_pairs):
        took = {at: chats[at].write() for at in (number % 2, 1 - number % 2)}
        if None in took.values():
            raise SystemExit(
                "the context is full: use fewer --pairs, a smaller --block, or a larger --ctx"
            )
        found.append(took[0] / took[1])
    return statistics.median(found)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", maxsplit=1)[0])
    parser.add_argument("old")
    parser.add_argument("new")
    parser.add_argument("model")
    parser.add_argument("--block", type=int, default=30, help="characters of a block")
    parser.add_argument("--starts", type=int, default=10, help="how often both chats are started")
    parser.add_argument("--pairs", type=int, default=10, help="blocks of each chat per start")
    given, options = parser.parse_known_args()
    chats = [Chat(each, given.model, given.block, options) for each in (given.old, given.new)]
    ratios = []
    try:
        for number in range(given.starts):
            # The process that is started first may get other pages of memory.
            for chat in chats[:: -1 if number % 2 else 1]:
                chat.start()
            ratios.append(ratio(chats, given.pairs))
    finally:
        for chat in chats:
            chat.end()
    median, low, high = median_interval(ratios)
    print(
        f"speed of the new chat over the old one: {median:.3f} ({low:.3f} to {high:.3f}), "
        f"{len(ratios)} starts of {given.pairs} pairs"
    )


if __name__ == "__main__":
    main()
