"""Predicted duration of `moe-edge calibrate`.

It is computed from a model's sizes, and from the times of its matrix products on this processor.
"""

from __future__ import annotations

import math
from contextlib import closing, suppress
from typing import NamedTuple

from gguf_tools.experts import ExpertModel
from orchestrator.allocation.estimate import ROUTING_TOKENS
from orchestrator.config import Config
from orchestrator.cost.disk import kept_bandwidth
from orchestrator.cost.speeds import FILE, Speeds, interpolated, spare_bytes
from orchestrator.errors import MoeEdgeError
from orchestrator.native.llama import Bindings
from orchestrator.plan.footprint import vocabulary_size
from orchestrator.plan.records import PlanRequest

# Default number of tokens of the text.
TOKENS = 8192
# Memory for the logits of a step, in bytes. Logits are stored twice, in float32.
LOGITS_BYTES = 1 << 30
# Number of inputs per expert, from the first step, on which errors are measured. They determine the
# relative error to a few percent. The mean square of the output is measured on all tokens.
MAX_ROWS = 64

# A pass takes longer than the shortest timings of its operations: 1.15 to 1.4 times as long, for
# three models (2026-11-29).
_PASS_FACTOR = 1.2
# Seconds of one thread: per logit of a pass, per number of an expert's output in the first pass,
# and per weight that is read from the file and converted to float32.
_LOGIT_S, _OUTPUT_S, _WEIGHT_S = 15e-9, 2e-9, 2e-9
# Seconds to load the model for a pass, and bytes per second if the disk was not measured.
_LOAD_S, _BYTES_PER_S = 0.3, 1e9


class CalibrationTime(NamedTuple):
    """The predicted seconds of the parts of `moe-edge calibrate`.

    - read_s: the first pass over the text, which also measures the mean square of each expert's
      output.
    - measure_s: measuring the error of each expert's output in each precision.
    - passes_s: each further pass over the text. These passes relate the errors to the quality loss
      in nats. In the first two, some experts are skipped. In each other pass, half of the experts
      are computed in one of the lower precisions.
    """

    read_s: float
    measure_s: float
    passes_s: tuple[float, ...]

    @property
    def total_s(self) -> float:
        """The predicted seconds of the whole calibration."""
        return self.read_s + self.measure_s + sum(self.passes_s)

    @classmethod
    def of(
        cls, model: ExpertModel, config: Config, n_tokens: int = TOKENS, measures: bool = True
    ) -> CalibrationTime:
        """Predict the duration of `moe-edge calibrate` for a model and a text of n_tokens tokens.

        The speeds of the processor and of the disk are those that earlier runs have measured. For
        an unknown disk, a default speed is assumed.

        - config: determines the memory limit, and the number of threads that compute or read.
        - measures: whether unknown speeds of the processor are measured now. This takes some
          seconds.

        Raises NativeError if the speed of the processor is unknown afterwards.
        """
        n_vocab = max(1, vocabulary_size(model))
        scored = min(n_tokens, LOGITS_BYTES // (8 * n_vocab))
        pool = spare_bytes(PlanRequest(config), model)
        with closing(Speeds(Bindings.load(), config.n_threads, pool, measures)) as speeds:
            costs = speeds.costs(model, tuple(range(len(model.tiers))), FILE)
            scored_s = speeds.output_seconds(model, scored)
        rows = n_tokens * model.n_expert_used / model.n_expert
        experts_s = model.n_expert * costs.expert_s.sum(axis=0)
        tiers_s = [float(interpolated(each, rows)) for each in experts_s]
        computed = interpolated(costs.dense_s, n_tokens) + scored_s
        computed += n_tokens * ROUTING_TOKENS / 2 * costs.attention_s[1]
        read_bytes = model.dense_bytes + model.tier_bytes[0]
        bandwidth = _BYTES_PER_S
        with suppress(MoeEdgeError, OSError):
            bandwidth = kept_bandwidth(model, config, measures=False).bytes_per_s
        logits_s = _LOGIT_S * scored * n_vocab
        computed_s = _PASS_FACTOR * (float(computed) + tiers_s[0])
        pass_s = _LOAD_S + computed_s + read_bytes / bandwidth + logits_s
        lowered_s = [pass_s + _PASS_FACTOR * (each - tiers_s[0]) / 2 for each in tiers_s[1:]]
        n_uses = n_tokens * model.n_expert_used * model.n_layers
        output_s = _OUTPUT_S * n_uses * model.hparams.embedding_length
        shapes = (shape for each in model.shapes for shape in each if shape)
        n_weights = model.n_expert * len(model.tiers) * sum(map(math.prod, shapes))
        measured = float(interpolated(experts_s.sum(axis=0), MAX_ROWS))
        measured += _WEIGHT_S * n_weights / config.n_threads
        return cls(pass_s + output_s, measured, (pass_s, pass_s, *lowered_s))


def format_duration(seconds: float) -> str:
    """Return a rounded duration for people, such as "40 s", "3 minutes" or "2 hours"."""
    if seconds < 90:
        step = 5 if seconds > 15 else 1
        rounded = max(1, step * round(seconds / step))
        return f"{rounded} s"
    if seconds < 100 * 60:
        return f"{round(seconds / 60)} minutes"
    return f"{round(seconds / 3600)} hours"
