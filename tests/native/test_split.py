"""A model in several files (llama.cpp's gguf-split): logits equal those of the single file.

This holds without management and with managed experts. Upstream's loader reads the same parts.
"""

import os

import numpy as np
import pytest
from gguf_split import split

from gguf_tools.errors import ChangedError
from gguf_tools.experts import ExpertModel

from .conftest import drawn, greedy, opened

PROMPT = drawn(40)
N_DECODE = 8


def run(model, **options):
    """Return logits [1 + N_DECODE, n_vocab] of a prompt in two chunks and of greedy decoding."""
    with (
        opened(model, ubatch=32, use_extra_bufts=False, **options) as runtime,
        runtime.evaluator() as e,
    ):
        assert e.inside.managed == bool(options)
        rows = greedy(e, PROMPT, N_DECODE)
        if e.inside.managed:
            e.inside.store.check()
            assert len(e.inside.store.spec.files) == len(e.inside.model.files)
    return rows


@pytest.mark.parametrize(("n_parts", "bare_first"), [(2, False), (3, False), (3, True)])
def test_plain_and_managed_equal_the_whole_file(n_parts, bare_first, one, tmp_path):
    first = split(one, tmp_path, n_parts, bare_first=bare_first)[0]
    with ExpertModel.open(first) as model, ExpertModel.open(one) as other:
        assert len(model.files) == n_parts
        assert model.tier_bytes == other.tier_bytes
        assert model.dense_bytes == other.dense_bytes
        budget = model.tier_bytes[0] // 2
        used = {
            each.file_index for layer in model.slices for kind in layer for each in kind if each
        }
        assert len(used) > 1  # the store reads more than one file
    reference = run(one)
    np.testing.assert_array_equal(run(first), reference)
    np.testing.assert_array_equal(run(first, policy="lru", expert_ram=budget), reference)


def test_parts_of_a_packed_file(both, tmp_path):
    """Both tiers are read from parts whose slices do not start at a disk block."""
    first = split(both, tmp_path, 3)[0]
    with ExpertModel.open(first) as model:
        offsets = [
            each.offset % 4096 for layer in model.slices for kind in layer for each in kind if each
        ]
        assert any(offsets)
    for tier, name in ((0, "q4_k"), (1, "q2_k")):
        options = {"policy": "lru", "high_tier": name, "expert_ram": 4 << 20}
        np.testing.assert_array_equal(run(first, **options), run(both, **options), str(tier))


@pytest.mark.parametrize("parts", [(1, 3), (2, 1), (2, 3)])
def test_a_split_low_file(parts, tiny_model, tmp_path):
    """Logits are equal whether the high file, the low file, or both are split."""
    files = tiny_model("qwen3moe", "q4_k"), tiny_model("qwen3moe", "q2_k")
    paths = [
        split(file, tmp_path / name, n)[0] if n > 1 else file
        for file, name, n in zip(files, ("high", "low"), parts, strict=True)
    ]
    # without prefetch and evictions; otherwise the tier for a low request would depend on the disk
    options = {"policy": "dymoe", "retention": 0.5, "expert_ram": 64 << 20, "n_ahead": 0}
    expected = run(files[0], low=files[1], **options)
    np.testing.assert_array_equal(run(paths[0], low=paths[1], **options), expected)


def test_a_part_cut_short_while_decoding(one, tmp_path):
    paths = split(one, tmp_path, 2)
    with opened(paths[0], policy="lru", expert_ram=1 << 20) as runtime, runtime.evaluator() as e:
        os.truncate(paths[1], paths[1].stat().st_size // 4)
        with pytest.raises(ChangedError, match=rf"{paths[1].name} was written to"):
            e.eval(PROMPT, 0)
