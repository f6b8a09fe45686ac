"""The command line with a runtime that answers from a script instead of a model.

Run as a program, this file is `moe-edge`, for tests that need a process or a terminal. The answer
depends on the prompt. Otherwise it behaves like orchestrator.runtime.runtime.
"""

import json
import os
import sys
import time
import types
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

from orchestrator.errors import GGUFError, PolicyError  # noqa: E402
from orchestrator.events import GenerationStats  # noqa: E402
from orchestrator.runtime.image_files import ImageLimits  # noqa: E402

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
    mode="managed: dymoe 4/2 (q4_k/q2_k) r=0.75, 64 MiB for experts, direct I/O",
    callback_us_p50=11.0,
    finish="end",
    policy={"prefetch": "on", "recall": [None, 0.5, 0.75], "precision": [None, 0.5, 0.75]},
)
# Fields of a request that the prompt "asked" returns.
SHOWN = ("chat_template_kwargs", "response_format", "grammar", "repeat_penalty")
# An answer longer than a line. The pieces do not end at words.
WORDS = ["some le", "ngthy w", "ords of an ans", "wer "] * 12


def mark(event):
    """Append an event to the file FAKE_RUNTIME_LOG, for which a test waits."""
    path = os.environ.get("FAKE_RUNTIME_LOG")
    if path:
        with open(path, "a") as file:
            file.write(event + "\n")


def text_of(content):
    """The text of a message, without its images."""
    if isinstance(content, str):
        return content
    return " ".join(part["text"] for part in content if part["type"] == "text")


def n_tokens(message):
    """Count two tokens for a message, one for each of its words, and 20 for each image."""
    n_images = str(message["content"]).count("data:image")
    return 2 + len(text_of(message["content"]).split()) + 20 * n_images


class FakeAnswer:
    """The events of a scripted answer."""

    def __init__(self, runtime, messages, max_tokens):
        self._runtime, self._messages, self._max_tokens = runtime, messages, max_tokens
        self._finish = "cancelled"
        self._cancelled = False
        self._n_pieces = self._read = 0

    def cancel(self):
        self._cancelled = True

    def close(self):
        pass

    def tokens_done(self):
        return self._read

    def __iter__(self):
        for event in self._events(text_of(self._messages[-1]["content"])):
            if self._cancelled:
                return
            if isinstance(event, str):
                if self._n_pieces == self._max_tokens:
                    self._finish = "length"
                    return
                self._n_pieces += 1
                event = {"choices": [{"delta": {"content": event}}]}
            yield event
        if not self._cancelled:
            self._finish = "end"

    def stats(self, mode, policy):
        assert policy == STATS.policy
        return replace(STATS, tokens=self._n_pieces, mode=mode, finish=self._finish)

    def _reading(self, processed):
        self._read = 0
        return {"prompt_progress": {"total": 1000, "cache": 0, "processed": processed}}

    def _events(self, prompt):
        if prompt == "hello":
            yield from ("Hi", " there", "!")
        elif prompt == "loud":
            yield HOSTILE
        elif prompt == "think":
            for text in ("Is it", " so?"):
                yield {"choices": [{"delta": {"reasoning_content": text}}]}
            yield "It is."
        elif prompt == "fail":
            yield "half an"
            raise GGUFError("model.gguf: read error at offset 4096")
        elif prompt == "sampling":
            asked = self._runtime.asked[-1]
            yield f"{asked['temperature']} {tuple(asked['stop'])}"
        elif prompt == "asked":
            asked = self._runtime.asked[-1]
            yield json.dumps({name: asked[name] for name in SHOWN if name in asked})
        elif prompt == "shown":
            images = str(self._messages).count("data:image/png;base64,iVBOR")
            yield f"I see {images} images"
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
                yield self._reading(500)
            yield "read"
        elif prompt == "one micro-batch":
            yield self._reading(0)
            while not self._cancelled:
                time.sleep(0.05)
                # layers of the micro-batch; no other event arrives
                self._read = min(700, self._read + 20)
            yield "read"
        elif prompt == "slow":
            for done in range(0, 1001, 100):
                time.sleep(0.1)
                yield self._reading(done)
            yield "read"
        else:
            yield f"<{prompt}>"


class FakeRuntime:
    """Answers "hello", "loud", "think", "long", "fail", "silence", "slow" and others from a script,
    and echoes all other prompts.

    An endless model, answer or prompt continues until it is cancelled. A blind model takes no
    images. asked: the requests. seen: their messages.
    """

    note = None

    def __init__(self, config):
        self.plan = types.SimpleNamespace(ram_bytes=config.ram or 2**30)
        self.mode = STATS.mode
        self.asked: list[dict[str, Any]] = []
        self.seen: list[list[dict[str, str]]] = []
        self.closed = False
        self._load(config)

    def _load(self, config):
        self.config = config
        self.about = types.SimpleNamespace(n_ctx=config.ctx or 4096)
        self.images = None if config.model.name == "blind.gguf" else ImageLimits()
        if config.model.name == "odd.gguf":
            self.note = "The expert usage of earlier runs is not used"
        self.model = types.SimpleNamespace(
            name=f"fake {config.model.stem}" if config.model.is_absolute() else "fake",
            hparams=types.SimpleNamespace(arch="qwen3moe"),
            n_layers=8,
            n_expert=16,
            n_expert_used=4,
            tiers=[types.SimpleNamespace(name=name) for name in ("q4_k", "q2_k")],
        )

    @classmethod
    def open(cls, config, progress=None, answering=None, say=None):
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

    def close(self, end_s=None):
        self.closed = True

    def submit(self, body):
        assert not self.closed
        self.asked.append(json.loads(body))
        self.seen.append(self.asked[-1]["messages"])
        most = self.asked[-1]["max_tokens"]
        return FakeAnswer(self, self.seen[-1], self.about.n_ctx if most < 0 else most)

    def query(self, route, body):
        assert route == "/v1/chat/completions/input_tokens"
        n = sum(map(n_tokens, json.loads(body)["messages"]))
        answer = 200, json.dumps({"input_tokens": n}).encode()
        return types.SimpleNamespace(whole=lambda: answer)

    def stats(self):
        return types.SimpleNamespace(mode=self.mode, policy=STATS.policy)

    def memory(self):
        return {"dense weights": 2**30, "experts": 3 * 2**30, "context": 0, "free": 4 * 2**30}

    def set(self, **changes):
        if "model" in changes:
            self._load(self.config.with_changes(**changes))
            return True
        ((name, value),) = changes.items()
        if name == "policy":
            if value not in ("lru", "dymoe"):
                raise PolicyError(f"unknown policy '{value}'; known: dymoe, lru")
            self.mode = f"managed: {value}"
            return True
        used = "lru" not in self.mode
        if used:
            self.mode = f"managed: dymoe {name[0]}={value}"
        return used


def module():
    """A module that replaces orchestrator.runtime.runtime."""
    made = types.ModuleType("orchestrator.runtime.runtime")
    made.Runtime = FakeRuntime
    return made


if __name__ == "__main__":
    sys.modules["orchestrator.runtime.runtime"] = module()
    from orchestrator.cli.main import main

    main()
