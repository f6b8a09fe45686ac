"""A model whose graph looks up rows of a large table, and the file blocks that a prompt needs."""

import os
from pathlib import Path

import numpy as np

from gguf_tools.experts import ExpertModel
from gguf_tools.file.layout import GGMLType
from gguf_tools.file.reader import GGUFFile
from gguf_tools.file.writer import GGUFWriter

BLOCK = 4096


def widen(tiny, path, n_vocab, n_ctx):
    """Copy upstream's gemma4 test model with a larger vocabulary and a longer context.

    The rows of the vocabulary are random.
    """
    rng = np.random.default_rng(1)
    with GGUFFile.open(tiny) as file, GGUFWriter(path, file.alignment) as writer:
        new = {
            "gemma4.vocab_size": n_vocab,
            "gemma4.context_length": n_ctx,
            "tokenizer.ggml.tokens": [f"tok_{i}" for i in range(n_vocab)],
            "tokenizer.ggml.scores": [0.0] * n_vocab,
        }
        for key in file.metadata:
            if key in new:
                writer.meta(key, new[key])
            else:
                writer.meta_encoded(key, file.encoded_value(key))
        wider = ("output.weight", "token_embd.weight", "per_layer_token_embd.weight")
        shapes = {info.name: info.shape for info in file.tensors.values()}
        shapes |= {name: (shapes[name][0], n_vocab) for name in wider if name in shapes}
        for name, shape in shapes.items():
            writer.declare(name, shape, file.tensors[name].type)
        writer.begin()
        for name, shape in shapes.items():
            data = file.array(name)
            if name in wider:
                assert file.tensors[name].type is GGMLType.F32
                data = rng.standard_normal(shape[0] * n_vocab, np.float32) * np.float32(0.1)
            writer.write_tensor(name, data)
    return path


def forget(path):
    """Drop the file from the page cache."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def blocks_of(path, tokens):
    """Return the number of file blocks that hold the rows of these tokens."""
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
    """Return the bytes that this process has read from disks."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))
