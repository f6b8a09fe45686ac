"""`floor` beside DyMoE's choice by gates where both lose as much, in virtual time.

    python tests/equal_loss.py MODEL.gguf --text TEXT [--tokens 1000] [--share 0.67]
        [--bandwidth 1.25GB] [--compute-ms 0.94] [--low skip,q2_k]
        [--skip-present 0]

For each share of critical experts, dymoe decides token by token in virtual time, and its KL from
the high precision is measured. Then the loss that floor is allowed is halved until its own measured
KL is that or less. All have the same text, slots, disk and computing. Neither KL nor virtual time
depends on how busy the machine is. The model needs a fitted loss table (`moe-edge calibrate`).
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from gguf_tools.experts import ExpertModel
from orchestrator.config import Config
from orchestrator.engine.engine import Engine
from orchestrator.events import Phase
from orchestrator.lab.eval import EvalOptions
from orchestrator.lab.eval.compare import Reference
from orchestrator.lab.eval.judge import Judge
from orchestrator.lab.eval.perplexity import score_text
from orchestrator.lab.eval.run import best_config, eval_config, read_reference
from orchestrator.lab.eval.text import Window, cut_windows, read_documents
from orchestrator.lab.eval.virtual import VirtualTime, virtual_store
from orchestrator.lab.replay.simulate import Transport
from orchestrator.memory.footprint import model_shape
from orchestrator.settings import parse_size

SHARES = (0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95)
# Steps in which the slots fill.
WARM_UP = 64
# floor's KL is close enough where it is that share of the other's; nobody halves longer than that.
CLOSE, MOST_HALVINGS = 0.9, 7
LARGEST_LOSS = 2.0


class Run(NamedTuple):
    """KL in nats a token, measured and foreseen; milliseconds and bytes waited for of a token."""

    kl: float
    error: float
    foreseen: float
    ms: float
    waited_bytes: float

    def __str__(self) -> str:
        waited = self.waited_bytes / 1024
        return f"{self.ms:6.3f} ms  KL {self.kl:.4f} +- {self.error:.4f}  waits {waited:5.0f} KiB"


class Setting:
    """One text, memory and disk, in which policies are compared."""

    def __init__(self, asked: argparse.Namespace) -> None:
        speed = Transport(parse_size(asked.bandwidth), 100, 4)
        self._time = VirtualTime(speed, 1000 * asked.compute_ms)
        # As in a chat: policies look ahead, and a high copy in memory is used in the place of a low
        # one.
        self._options = EvalOptions(text=asked.text, tokens=asked.tokens, window=256, reuse=True)
        self._high, self._skip_present = asked.high, asked.skip_present
        with ExpertModel.open(asked.model) as model:
            tier = [each.name for each in model.tiers].index(asked.high)
            slots = int(asked.share * model_shape(model, (tier,)).all_slot_bytes())
        plain = Config.build(model=asked.model, threads=1, force_managed=True, expert_ram=slots)
        self._config = eval_config(plain, self._options)
        self._windows: list[Window] = []
        self._spent: dict[float, Run] = {}

    @contextmanager
    def reference(self) -> Iterator[Reference]:
        """What the high precision says, and where the text is cut."""
        with Engine.open(best_config(self._config, self._high)) as engine:
            text = self._options.text
            assert text is not None
            documents = read_documents(text)
            self._windows = cut_windows(
                engine, documents, self._options.window, self._options.tokens, text, None
            )
            found = read_reference(engine, self._windows, False, lambda *_: None)
        with found:
            yield found

    def run(self, against: Reference, **settings: Any) -> Run:
        """One policy with its settings."""
        config = self._config.compared(high_tier=self._high, **settings)
        with Engine.open(config) as engine, virtual_store(engine, self._time) as store:
            scores = score_text(Judge(engine), self._windows, against=against)
            meter, n_steps = engine.driver.meter, len(store.step_us)
            us, waited = store.step_us[WARM_UP:], store.stats().demand_bytes[Phase.DECODE]
            foreseen = meter.mean(Phase.DECODE) if meter is not None else None
        assert scores.kl is not None
        error = float(scores.kl.std() / math.sqrt(len(scores.kl)))
        ms = sum(us) / len(us) / 1000
        return Run(float(scores.kl.mean()), error, foreseen or 0.0, ms, waited / n_steps)

    def spent(self, against: Reference, allowed: float) -> Run:
        """floor with a loss that is allowed, each measured once."""
        if allowed not in self._spent:
            ours = {} if self._skip_present is None else {"skip_present": self._skip_present}
            self._spent[allowed] = self.run(against, policy="floor", max_loss=allowed, **ours)
        return self._spent[allowed]

    def as_close(self, against: Reference, kl: float) -> tuple[float, Run]:
        """(the loss that is allowed, floor with it) whose KL is at most this, and near it where
        floor can lose as much."""
        for allowed in (0.0, LARGEST_LOSS):
            self.spent(against, allowed)
        for _ in range(MOST_HALVINGS):
            low = max(at for at, run in self._spent.items() if run.kl <= kl)
            above = [at for at, run in self._spent.items() if at > low]
            if not above or self._spent[low].kl >= CLOSE * kl:
                break
            self.spent(against, math.sqrt(max(low, kl / 8) * min(above)))
        low = max(at for at, run in self._spent.items() if run.kl <= kl)
        return low, self._spent[low]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--high", default="q4_k")
    parser.add_argument("--low", default="skip,q2_k", help="what dymoe lowers experts to")
    parser.add_argument("--share", type=float, default=0.67, help="of the experts, in slots")
    parser.add_argument("--bandwidth", default="1.25GB", help="reads in bytes a second")
    parser.add_argument("--compute-ms", type=float, default=0.94, help="a token without waits")
    parser.add_argument("--skip-present", type=float, help="the setting of floor")
    parser.add_argument("--retention", default=",".join(map(str, SHARES)))
    asked = parser.parse_args()
    setting = Setting(asked)
    with setting.reference() as against:
        for name in ("lru", "dymoe"):
            lossless = {"retention": 1.0} if name == "dymoe" else {}
            run = setting.run(against, policy=name, **lossless)
            print(f"lossless {name:13} {run}", flush=True)
        for low in asked.low.split(","):
            for share in map(float, asked.retention.split(",")):
                settings = {"policy": "dymoe", "low_tier": low, "retention": share}
                theirs = setting.run(against, **settings)
                allowed, ours = setting.as_close(against, theirs.kl)
                print(
                    f"{low:5} r {share:.2f}  dymoe {theirs}\n"
                    f"{'':12} floor {ours}, allowed {allowed:.4f}, foreseen {ours.foreseen:.4f}: "
                    f"{theirs.ms / ours.ms:.3f}x",
                    flush=True,
                )


if __name__ == "__main__":
    main()
