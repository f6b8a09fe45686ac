"""The command line with an engine that answers from a script instead of a model.

Run as a program it is `moe-edge`, for the tests that need a process or a terminal. What it
answers depends on the prompt; the rest of it keeps the promises of orchestrator.runtime.engine.
"""

import os
import sys
import time
import types
from dataclasses import replace
from itertools import count
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

from orchestrator.errors import GGUFError, PolicyError  # noqa: E402
from orchestrator.events import GenerationStats  # noqa: E402

HOSTILE = "red\x1b[31m \x1b]0;title\x07bell\x07 \u202eback\x9b2J\rend\ttab"
TIMES = {"ttft_ms": 12.3, "tpot_ms_p50": 20.0, "tpot_ms_p99": 31.0, "tokens_per_s": 48.9}
COUNTS = {"tokens": 3, "prompt_tokens": 7, "evaluated_tokens": 5, "bytes_read": 5 * 2**20}
STATS = GenerationStats(
    **TIMES,
    **COUNTS,
    hit_rate=0.931,
    prefill_hit_rate=None,
    wait_ms=1.5,
    mix={"q4_k": 0.75, "q2_k": 0.25},
    computed={"q4_k": 0.8125, "q2_k": 0.1875},
    peak_rss_bytes=300 * 2**20,
    budget_bytes=64 * 2**20,
    mode="managed: dymoe 4/2 (q4_k/q2_k) r=0.75, 64 MiB of expert slots, direct I/O",
    callback_us_p50=11.0,
    finish="end",
    policy={"prefetch": "on", "recall": [None, 0.5, 0.75], "precision": [None, 0.5, 0.75]},
)
# An answer longer than a line, in pieces that are no words.
WORDS = ["some le", "ngthy w", "ords of an ans", "wer "] * 12


def mark(event):
    """Tells a test that waits for it, through a file, what has begun."""
    path = os.environ.get("FAKE_ENGINE_LOG")
    if path:
        with open(path, "a") as file:
            file.write(event + "\n")


class FakeEngine:
    """Answers "hello", "loud", "long", "fail", "silence", "slow" and echoes all else. What is
    called endless goes on until it is stopped: a model, an answer, the reading of a prompt."""

    def __init__(self, config):
        self.config = config
        self.n_ctx = config.ctx or 4096
        self.mode = STATS.mode
        self.n_cached = 300
        self.note = (
            "What earlier runs learned is not used" if config.model.name == "odd.gguf" else None
        )
        self.plan = types.SimpleNamespace(ram_bytes=config.ram or 2**30)
        self.model = types.SimpleNamespace(
            name=f"fake {config.model.stem}" if config.model.is_absolute() else "fake",
            hparams=types.SimpleNamespace(arch="qwen3moe"),
            n_layers=8,
            n_expert=16,
            n_expert_used=4,
            tiers=[types.SimpleNamespace(name=name) for name in ("q4_k", "q2_k")],
        )
        self.last_stats: GenerationStats | None = None
        self.seen: list[list[dict[str, str]]] = []
        self.samplings: list[object] = []
        self.closed = False
        self._rendered: list[dict[str, str]] = []
        self._cancelled = False
        self._read = 0

    @classmethod
    def open(cls, config, progress=None):
        mark("open")
        for step in range(5):
            if config.model.name == "slow.gguf":
                time.sleep(0.2)
            while config.model.name == "endless.gguf":
                time.sleep(0.05)
                if progress:
                    progress("Loading 1 GiB of weights", 0.5)
            if progress:
                progress("Loading 1 GiB of weights", step / 4)
        return cls(config)

    def __enter__(self):
        return self

    def __exit__(self, *_error):
        self.close()

    def close(self):
        self.closed = True

    def render_chat(self, messages):
        """Two tokens a message, and one a word of it."""
        self._rendered = [dict(message) for message in messages]
        return [0] * sum(2 + len(message["content"].split()) for message in messages)

    def prompt_done(self):
        return self._read

    def cancel(self):
        self._cancelled = True

    def idle(self):
        assert not self.closed

    def end_idle(self):
        pass

    def generate(self, tokens, sampling, max_tokens, on_prefill=None):
        assert not self.closed
        self._cancelled = False
        self._read = 0
        self.seen.append(self._rendered)
        self.samplings.append(sampling)
        finish, n_pieces = "end", 0
        try:
            for piece in self._pieces(self.seen[-1][-1]["content"], on_prefill):
                if self._cancelled:
                    finish = "cancelled"
                    break
                if n_pieces == max_tokens:
                    finish = "length"
                    break
                n_pieces += 1
                yield piece
        finally:
            self.last_stats = replace(STATS, tokens=n_pieces, mode=self.mode, finish=finish)

    def _pieces(self, prompt, on_prefill):
        if prompt == "hello":
            yield from ("Hi", " there", "!")
        elif prompt == "loud":
            yield HOSTILE
        elif prompt == "fail":
            yield "half an"
            raise GGUFError("model.gguf: read error at offset 4096")
        elif prompt == "sampling":
            yield f"{self.samplings[-1].temp} {self.samplings[-1].stop}"
        elif prompt == "words":
            yield from WORDS
        elif prompt == "silence":
            return
        elif prompt in ("long", "endless"):
            mark(prompt)
            for number in range(500) if prompt == "long" else count():
                time.sleep(0.02)
                yield f"{number} "
        elif prompt == "endless prompt":
            while not self._cancelled:
                time.sleep(0.05)
                self._read = 500
                on_prefill(500, 1000)
            yield "read"
        elif prompt == "one micro-batch":
            on_prefill(0, 1000)
            while not self._cancelled:
                time.sleep(0.05)
                self._read = min(700, self._read + 20)  # layers; on_prefill is not called again
            yield "read"
        elif prompt == "slow":
            for done in range(0, 1001, 100):
                time.sleep(0.1)
                self._read = done
                on_prefill(done, 1000)
            yield "read"
        else:
            yield f"<{prompt}>"

    def prompt_notes(self):
        return []

    def set_policy(self, name):
        if name not in ("lru", "dymoe"):
            raise PolicyError(f"unknown policy '{name}'; known: dymoe, lru")
        self.mode = f"managed: {name}"

    def memory(self):
        return {"dense weights": 2**30, "experts": 3 * 2**30, "context": 0, "free": 4 * 2**30}

    def change(self, name, value):
        used = "lru" not in self.mode
        if used:
            self.mode = f"managed: dymoe {name[0]}={value}"
        return used


def module():
    """What stands in for orchestrator.runtime.engine."""
    made = types.ModuleType("orchestrator.runtime.engine")
    made.Engine = FakeEngine
    return made


if __name__ == "__main__":
    sys.modules["orchestrator.runtime.engine"] = module()
    from orchestrator.cli.main import main

    main()
