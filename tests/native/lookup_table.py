"""A model whose graph reads a large table by rows, and the blocks that a prompt needs of it."""

import os
from pathlib import Path

import numpy as np

from gguf_tools.experts import ExpertModel
from gguf_tools.file.layout import GGMLType
from gguf_tools.file.reader import GGUFFile
from gguf_tools.file.writer import GGUFWriter

BLOCK = 4096
_AT_ONCE = 1 << 22


def widen(tiny, path, n_vocab, n_each, n_ctx):
    """The gemma4 that upstream's test makes, with more tokens, so many values in each layer's
    embedding of one, and a longer context; all values are drawn anew."""
    rng = np.random.default_rng(1)
    writer = GGUFWriter(path)
    with GGUFFile.open(tiny) as file:
        arch = "gemma4."
        old_vocab = file.metadata[arch + "vocab_size"]
        old_each = file.metadata[arch + "embedding_length_per_layer_input"]
        n_layer = file.metadata[arch + "block_count"]
        names = [f"tok_{i}" for i in range(n_vocab)]
        new = {
            arch + "vocab_size": n_vocab,
            arch + "embedding_length_per_layer_input": n_each,
            arch + "context_length": n_ctx,
            "tokenizer.ggml.tokens": names,
            "tokenizer.ggml.scores": [0.0] * n_vocab,
        }
        for key in file.metadata:
            if key in new:
                writer.meta(key, new[key])
            else:
                writer.meta_encoded(key, file.encoded_value(key))
        for info in file.tensors.values():
            shape = list(info.shape)
            if info.name in ("output.weight", "token_embd.weight", "per_layer_token_embd.weight"):
                assert shape[1] == old_vocab
                shape[1] = n_vocab
            if "per_layer" in info.name or ".inp_gate." in info.name or ".proj." in info.name:
                sizes = {old_each: n_each, old_each * n_layer: n_each * n_layer}
                at = 0 if info.name.startswith("per_layer_token") else len(shape) - 1
                at = 0 if ".proj." in info.name else at
                shape[at] = sizes[shape[at]]
            writer.declare(info.name, shape, GGMLType.F32)
        with writer:
            writer.begin()
            for name, declared in writer.tensors.items():
                writer.write_tensor(name, _drawn(rng, declared.nbytes // 4))
    return path


def _drawn(rng, n):
    while n > 0:
        values = rng.standard_normal(min(n, _AT_ONCE), np.float32)
        yield (values * np.float32(0.1)).view(np.uint8)
        n -= len(values)


def forget(path):
    """The system keeps nothing of the file in memory."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def blocks_of(path, tokens):
    """How many blocks of the file hold the rows of these tokens."""
    with ExpertModel.open(path) as model:
        infos = [table.info for table in model.lookup]
    blocks = set()
    for info in infos:
        row = info.nbytes // info.shape[1]
        starts = info.offset + np.unique(tokens) * row
        for first, last in zip(starts // BLOCK, (starts + row - 1) // BLOCK, strict=True):
            blocks.update(range(first, last + 1))
    return len(blocks)


def read_bytes():
    """What this process had the disks read."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))
