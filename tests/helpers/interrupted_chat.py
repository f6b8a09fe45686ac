"""Ctrl-C at random moments of a chat on a terminal, each followed by a short question.

    python tests/helpers/interrupted_chat.py --times 200
    python tests/helpers/interrupted_chat.py --times 10 --model FILE --ram 8GiB --words 1300

Each Ctrl-C comes while a prompt is read, while an answer is written, during idle reads, or while
slots are resized before a long prompt. The question must be answered within --hang seconds. Some
processes are ended by SIGTERM at such a moment, and the next one starts. Without --model, the model
is tiny and slow_pread.c delays its reads.
"""

import argparse
import contextlib
import json
import signal
import string
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random

REPO = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPO), str(REPO / "tests/helpers"), str(REPO / "tests/unit/cli")]

from pseudo_terminal import CTRL_C, Terminal  # noqa: E402

MOMENTS = ("prompt", "answer", "idle", "resize")
ANSWERED = r"(?s)memory [\d.]+[^\n]* of .*> \Z"
READY = r"> \Z"
MOE_EDGE = (sys.executable, "-m", "orchestrator")
SLOW_PREAD_US = 15000


def slow_reads(folder):
    """Return an environment in which reads from files are slow. Raises CalledProcessError."""
    library, source = Path(folder) / "slow_pread.so", Path(__file__).with_name("slow_pread.c")
    command = ["cc", "-O1", "-fPIC", "-shared", "-o", library, source]
    subprocess.run([str(each) for each in command], check=True)
    return {"LD_PRELOAD": str(library), "SLOW_PREAD_US": str(SLOW_PREAD_US)}


def tiny_model(folder):
    """Write a model whose experts do not fit a memory limit.

    Return its path and the limit in bytes.
    """
    from mixing import SHAPE

    from gguf_tools import synthetic
    from orchestrator.config import Config
    from orchestrator.runtime.runtime import Runtime

    path = Path(folder) / "interrupted.gguf"
    synthetic.write(path, replace(SHAPE, context=16384, n_layer=2), tiers=("q8_0",))
    with Runtime.open(Config.build(model=path, ctx=4096, policy="lru")) as runtime:
        plan = runtime.plan
        return path, plan.total_bytes - plan.slots.total_bytes // 2


@dataclass
class Chats:
    """Consecutive chats with one model, and the result of each interrupt.

    words: length of a long prompt. moments: when the interrupts come, in turns. span_s: the longest
    time from a message to a signal. hang_s: an answer that takes longer counts as a hang.

    answers: by moment, how often the question after an interrupt was answered. stopped: by moment,
    how often Ctrl-C stopped something. back_s: time from each Ctrl-C until the chat waits for keys.
    ended_s: time from SIGTERM to the end of each process. wrong: the failures.
    """

    args: list
    home: Path
    environment: dict
    words: int = 400
    span_s: float = 1.0
    hang_s: float = 60.0
    seed: str = "0"
    moments: tuple = MOMENTS
    answers: Counter = field(default_factory=Counter)
    stopped: Counter = field(default_factory=Counter)
    back_s: list = field(default_factory=list)
    ended_s: list = field(default_factory=list)
    wrong: list = field(default_factory=list)

    def __post_init__(self):
        self._random = Random(self.seed)

    def run(self, times, a_process):
        """Send `times` interrupts, and a SIGTERM after every `a_process` of them."""
        for first in range(0, times, a_process):
            with Terminal(
                *self.args, home=self.home, program=MOE_EDGE, **self.environment
            ) as terminal:
                terminal.wait(READY, self.hang_s)
                try:
                    for number in range(first, min(times, first + a_process)):
                        self.interrupt(terminal, self.moments[number % len(self.moments)])
                    self.end(terminal)
                except AssertionError as error:
                    self.wrong.append(f"{first}: {error}")

    def interrupt(self, terminal, moment):
        """Press Ctrl-C at this moment, and ask a question afterwards."""
        self.come_to(terminal, moment)
        self.stopped[moment] += "stopped" in self.stop(terminal)
        terminal.send(f"{self.text(3)}?\n")
        shown = terminal.wait(ANSWERED, self.hang_s)
        assert "Error" not in shown, shown
        self.answers[moment] += 1

    def stop(self, terminal):
        """Press Ctrl-C. Return the output until the chat waits for keys."""
        begin_s = time.monotonic()
        terminal.send(CTRL_C)
        terminal.until_it_reads(self.hang_s)
        self.back_s.append(time.monotonic() - begin_s)
        # If Ctrl-C comes just before the wait for keys, CPython notices it at the next key.
        terminal.send("\n")
        shown = terminal.wait(READY, self.hang_s)
        terminal.until_it_reads(self.hang_s)
        return shown

    def text(self, n_words):
        """Return new random words, so that they are routed to other experts."""
        letters = string.ascii_letters
        return " ".join("".join(self._random.choices(letters, k=4)) for _ in range(n_words))

    def come_to(self, terminal, moment):
        """Wait a random time after the event that begins this moment."""
        after_s = self._random.random() * self.span_s
        text = self.text(self.words)
        if moment == "resize":  # an aborted step must not hold memory that a long prompt needs
            terminal.ask("/reset")
            terminal.send(self.text(30) + "\n")
            time.sleep(self._random.random() * self.span_s / 2)
            self.stop(terminal)
        if moment == "idle":
            terminal.until_it_reads()
        elif moment == "answer":
            terminal.send(self.text(3) + "\n")
        else:
            terminal.send(text + "\n")
        time.sleep(after_s)

    def end(self, terminal):
        """Send SIGTERM at one of the moments."""
        moment = self._random.choice(self.moments)
        self.come_to(terminal, moment)
        begin_s = time.monotonic()
        terminal.signal(signal.SIGTERM)
        status = terminal.finish()
        self.ended_s.append(time.monotonic() - begin_s)
        assert status == 128 + signal.SIGTERM, f"status {status} after SIGTERM"
        assert "Traceback" not in terminal.raw, terminal.raw[-2000:]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=200)
    parser.add_argument("--a-process", type=int, default=20, help="Interrupts before a SIGTERM.")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--ram")
    parser.add_argument("--words", type=int, default=400)
    parser.add_argument("--span", type=float, default=1.0, help="Seconds before an interrupt.")
    parser.add_argument("--hang", type=float, default=60.0, help="Seconds.")
    parser.add_argument("--max-tokens", type=int, default=8)
    parser.add_argument("--moments", nargs="+", choices=MOMENTS, default=MOMENTS)
    parser.add_argument("--seed", default="0")
    asked = parser.parse_args()
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        environment = {"PYTHONPATH": str(REPO)}
        path, ram = asked.model, asked.ram
        if path is None:
            path, ram = tiny_model(folder)
            environment |= slow_reads(folder)
        args = ["-m", str(path), f"--ram={ram}", "--threads=1", "--temp=0", "--policy=lru"]
        args.append(f"--max-tokens={asked.max_tokens}")
        chats = Chats(
            args,
            folder,
            environment,
            asked.words,
            asked.span,
            asked.hang,
            asked.seed,
            asked.moments,
        )
        chats.run(asked.times, asked.a_process)
    print(
        json.dumps(
            {
                "answers": dict(chats.answers),
                "stopped": dict(chats.stopped),
                "back after at most": round(max(chats.back_s, default=0.0), 2),
                "SIGTERM": [round(each, 2) for each in chats.ended_s],
                "wrong": chats.wrong,
            },
            indent=1,
        )
    )
    return bool(chats.wrong)


if __name__ == "__main__":
    sys.exit(main())
