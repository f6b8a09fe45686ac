"""Predicted duration of `moe-edge calibrate`.

It is computed from a model's sizes and a short test of the processor.
"""

from __future__ import annotations

import math
from contextlib import suppress
from time import perf_counter
from typing import NamedTuple

import numpy as np

from gguf_tools.experts import ExpertModel
from gguf_tools.process import usable_cores
from orchestrator.config import Config
from orchestrator.cost.disk import kept_bandwidth
from orchestrator.errors import MoeEdgeError

# Default number of tokens of the text.
TOKENS = 8192
# Memory for the logits of a step, in bytes. Logits are stored twice, in float32.
LOGITS_BYTES = 1 << 30
# Number of inputs per expert, from the first step, on which errors are measured. They determine the
# relative error to a few percent. The mean square of the output is measured on all tokens.
MAX_ROWS = 64

# Speed of ggml's products in a pass, relative to a float32 product of numpy on all cores.
_PASS_SPEED = 1.0
# Seconds of one thread: per logit of a pass, per number of an expert's output in the first pass,
# and per weight that is read from the file and converted to float32.
_LOGIT_S, _OUTPUT_S, _WEIGHT_S = 15e-9, 2e-9, 2e-9
# Seconds to load the model for a pass, and bytes per second if the disk was not measured.
_LOAD_S, _BYTES_PER_S = 0.3, 1e9
# Rows and columns of the product that tests the processor, and how often it is computed.
_TEST_SIZE, _TEST_RUNS = 768, 4


class CalibrationTime(NamedTuple):
    """The predicted seconds of the parts of `moe-edge calibrate`.

    - read_s: the first pass over the text, which also measures the mean square of each expert's
      output.
    - measure_s: measuring the error of each expert's output in each precision.
    - pass_s: one further pass over the text. Such passes relate the errors to the quality loss in
      nats.
    - n_passes: number of further passes.
    """

    read_s: float
    measure_s: float
    pass_s: float
    n_passes: int

    @property
    def total_s(self) -> float:
        """The predicted seconds of the whole calibration."""
        return self.read_s + self.measure_s + self.n_passes * self.pass_s

    @classmethod
    def of(cls, model: ExpertModel, config: Config, n_tokens: int = TOKENS) -> CalibrationTime:
        """Predict the duration of `moe-edge calibrate` for a model and a text of n_tokens tokens.

        The function tests the processor for some milliseconds. The disk speed is taken from earlier
        measurements in the user cache. Without them, a default speed is assumed.

        config: determines the numbers of threads for computing and for reading.
        """
        threads = config.n_threads
        flops = _processor_flops() * threads / max(threads, usable_cores())
        k, n_tiers = model.n_expert_used, len(model.tiers)
        per_expert = [sum(math.prod(shape) for shape in each if shape) for each in model.shapes]
        n_vocab, output, dense = _dense_weights(model)
        scored = min(n_tokens, LOGITS_BYTES // (8 * max(1, n_vocab)))
        weights = n_tokens * (dense + k * sum(per_expert)) + scored * output
        read_bytes = model.dense_bytes + model.tier_bytes[0]
        bandwidth = _BYTES_PER_S
        with suppress(MoeEdgeError, OSError):
            bandwidth = kept_bandwidth(model, config, measures=False).bytes_per_s
        computed = 2 * weights / (_PASS_SPEED * flops)
        pass_s = _LOAD_S + computed + read_bytes / bandwidth + _LOGIT_S * scored * n_vocab
        outputs = n_tokens * k * model.n_layers * model.hparams.embedding_length
        experts = model.n_expert * sum(per_expert)
        measured = 2 * experts * MAX_ROWS * n_tiers / flops
        measured += experts * n_tiers * _WEIGHT_S / threads
        return cls(pass_s + _OUTPUT_S * outputs, measured, pass_s, n_tiers + 1)


def format_duration(seconds: float) -> str:
    """Return a rounded duration for people, such as "40 s", "3 minutes" or "2 hours"."""
    if seconds < 90:
        step = 5 if seconds > 15 else 1
        rounded = max(1, step * round(seconds / step))
        return f"{rounded} s"
    if seconds < 100 * 60:
        return f"{round(seconds / 60)} minutes"
    return f"{round(seconds / 3600)} hours"


def _dense_weights(model: ExpertModel) -> tuple[int, int, int]:
    """Return (vocabulary size, weights of the output matrix, weights of other dense matrices).

    Matrices of experts are not counted.
    """
    n_vocab = output = dense = 0
    for part in model.parts:
        for name, info in part.tensors.items():
            if name == "token_embd.weight":
                n_vocab = info.shape[1]
                output = output or math.prod(info.shape)
            elif name == "output.weight":
                output = math.prod(info.shape)
            elif len(info.shape) > 1 and "_exps" not in name:
                dense += math.prod(info.shape)
    return n_vocab, output, dense


def _processor_flops() -> float:
    """Return the operations per second of a float32 product on all cores."""
    a = np.ones((_TEST_SIZE, _TEST_SIZE), np.float32)
    least = math.inf
    for _ in range(_TEST_RUNS):
        start = perf_counter()
        a @ a
        least = min(least, perf_counter() - start)
    return float(2 * _TEST_SIZE**3 / max(least, 1e-9))
