"""Checkpoints of families, run in our engine."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gguf_tools.convert import convert
from orchestrator.config import Config
from orchestrator.native.llama import Bindings
from orchestrator.runtime.runtime import Runtime

from . import checkpoints
from .families import PROMPT

GGML_F32 = 0
N_DECODE = 16


@dataclass
class Case:
    """A converted checkpoint with its reference results.

    logits: those of transformers, [prompt + N_DECODE, vocab]. answer: the tokens after the prompt.
    """

    packed: Path
    tokens: list[int]
    their_tokens: list[int]
    answer: list[int]
    logits: np.ndarray


def make_case(name, folder):
    """Convert a family's checkpoint and compute transformers' tokens and logits."""
    model = checkpoints.write_checkpoint(name, folder / "hf")
    packed = folder / "packed.gguf"
    report = convert(folder / "hf", packed, ["f32", "f16"], threads=1)
    assert not report.warnings  # a good checkpoint causes no warnings
    tokens, answer = greedy(packed)
    theirs = checkpoints.their_tokens(name, folder / "hf", PROMPT)
    logits = checkpoints.reference_logits(model, tokens + answer)
    return Case(packed, tokens, theirs, answer, logits)


def greedy(path):
    """The prompt's tokens, and the next N_DECODE tokens by greedy decoding."""
    with (
        Runtime.open(Config.build(model=path, ctx=64, threads=1)) as runtime,
        runtime.evaluator() as e,
    ):
        tokens = e.tokenize(PROMPT)
        answer = [int(e.eval(tokens, 0)[-1].argmax())]
        for pos in range(len(tokens), len(tokens) + N_DECODE - 1):
            answer.append(int(e.eval(answer[-1:], pos)[-1].argmax()))
    return tokens, answer


def our_logits(path, tokens, answer, **options):
    """Logits [tokens + answer, vocab]: the prompt in one step, then one token per step."""
    config = Config.build(
        model=path, ctx=256, threads=1, logits_all=True, use_extra_bufts=False, **options
    )
    with Runtime.open(config) as runtime, runtime.evaluator() as e:
        assert e.inside.managed == ("policy" in options)
        rows = [part.copy() for part in e.eval_each(tokens, 0)]
        for i, token in enumerate(answer):
            rows.append(e.eval([token], len(tokens) + i))
    return np.concatenate(rows)


def managed_logits(path, tokens, answer, tier=None):
    """Logits with expert slots of 1 MiB, which hold only some of the experts."""
    return our_logits(path, tokens, answer, policy="lru", high_tier=tier, expert_ram=1 << 20)


def use_float32_attention(monkeypatch):
    api = Bindings.load().api
    default = api.llama_context_default_params

    def params():
        found = default()
        found.type_k = found.type_v = GGML_F32
        found.flash_attn_type = api.LLAMA_FLASH_ATTN_TYPE_DISABLED
        return found

    monkeypatch.setattr(api, "llama_context_default_params", params)
