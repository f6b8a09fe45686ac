"""Ctrl-C at random moments of a chat on a terminal, each followed by a short question.

    python tests/helpers/interrupted_chat.py --times 200
    python tests/helpers/interrupted_chat.py --times 10 --model FILE --ram 8GiB --words 1300

Each Ctrl-C comes while a prompt is read, while an answer is written, while experts are read at the
prompt, or while slots are resized before a long prompt. The question has to be answered within
--hang seconds. Now and then a SIGTERM at such a moment ends the process, and the next one starts.
Without --model it is a tiny model, whose reads are slowed down by slow_pread.c.
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
    """The environment of a process whose reads from files are slow. Raises CalledProcessError."""
    library, source = Path(folder) / "slow_pread.so", Path(__file__).with_name("slow_pread.c")
    command = ["cc", "-O1", "-fPIC", "-shared", "-o", library, source]
    subprocess.run([str(each) for each in command], check=True)
    return {"LD_PRELOAD": str(library), "SLOW_PREAD_US": str(SLOW_PREAD_US)}


def tiny_model(folder):
    """A model whose experts do not fit a cap, and that cap: its path, and bytes."""
    from mixing import SHAPE
    from orchestrator.runtime.engine import Engine

    from gguf_tools import synthetic
    from orchestrator.config import Config

    path = Path(folder) / "interrupted.gguf"
    synthetic.write(path, replace(SHAPE, context=16384, n_layer=2), tiers=("q8_0",))
    with Engine.open(Config.build(model=path, ctx=4096, policy="lru")) as engine:
        plan = engine.plan
        return path, plan.total_bytes - plan.slots.total_bytes // 2


@dataclass
class Chats:
    """Chats with one model, one after the other, and what came of each interrupt.

    words: of a long prompt. moments: what the interrupts come to, in turns. span_s: the longest
    time from a message to a signal. hang_s: after which an answer counts as a hang.

    answers: how often the question after an interrupt was answered, by its moment. stopped: how
    often the Ctrl-C before it stopped something. ended_s: how long each process lived after
    SIGTERM. wrong: what went wrong.
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
    ended_s: list = field(default_factory=list)
    wrong: list = field(default_factory=list)

    def __post_init__(self):
        self._random = Random(self.seed)

    def run(self, times, a_process):
        """Sends `times` interrupts, and a SIGTERM after every `a_process` of them."""
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
        """Presses Ctrl-C at this moment, and asks a question afterwards."""
        self.come_to(terminal, moment)
        self.stopped[moment] += "stopped" in self.stop(terminal)
        terminal.send(f"{self.text(3)}?\n")
        shown = terminal.wait(ANSWERED, self.hang_s)
        assert "Error" not in shown, shown
        self.answers[moment] += 1

    def stop(self, terminal):
        """Ctrl-C, and what is shown until the chat waits for keys."""
        terminal.send(CTRL_C)
        terminal.until_it_reads(self.hang_s)
        # CPython notices a Ctrl-C that came just before it waited for keys at the next key.
        terminal.send("\n")
        shown = terminal.wait(READY, self.hang_s)
        terminal.until_it_reads(self.hang_s)
        return shown

    def text(self, n_words):
        """Words that no one has said before, so that they choose other experts."""
        letters = string.ascii_letters
        return " ".join("".join(self._random.choices(letters, k=4)) for _ in range(n_words))

    def come_to(self, terminal, moment):
        """Waits a random time after the event that begins such a moment."""
        after_s = self._random.random() * self.span_s
        text = self.text(self.words)
        if moment == "resize":  # a step that was cut off must not hold what a long prompt takes
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
        """SIGTERM at one of the moments."""
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
                "SIGTERM": [round(each, 2) for each in chats.ended_s],
                "wrong": chats.wrong,
            },
            indent=1,
        )
    )
    return bool(chats.wrong)


if __name__ == "__main__":
    sys.exit(main())
