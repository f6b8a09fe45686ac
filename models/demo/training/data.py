"""The training data: token streams on disk, and batches packed from them.

A stream is a flat array of tokens, with a flag per token that tells whether the loss counts it, and
the offsets of its documents. `build` writes the streams into a cache folder. `Mixer` draws
documents from the streams, with the weights of the current phase, and packs them into rows.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer

from models.demo.training import tales
from models.demo.training.sources import load_sources, prose
from models.demo.training.talk import CHAT_WEIGHTS, FINAL_WEIGHTS, Sources, chat_documents
from models.demo.training.tokenizer import END_OF_TEXT, load_tokenizer, train_tokenizer

# Share of tokens from each stream, during most of the training and in its final phase.
STABLE = {"chat": 0.87, "stories": 0.13}
FINAL = {"final": 1.0}


class Stream:
    """A stream of training documents in memory.

    tokens are uint16. learn (bool) says which tokens count in the loss. starts are the offsets of
    the documents.
    """

    def __init__(
        self, tokens: NDArray[np.uint16], learn: NDArray[np.bool_], starts: NDArray[np.int64]
    ) -> None:
        self.tokens, self.learn, self.starts = tokens, learn, starts
        self.mean_length = len(tokens) / max(len(starts) - 1, 1)

    def save(self, path: Path) -> None:
        np.savez(path, tokens=self.tokens, learn=self.learn, starts=self.starts)

    @classmethod
    def load(cls, path: Path) -> Stream:
        with np.load(path) as z:
            return cls(z["tokens"], z["learn"], z["starts"])


def _stream(parts: Iterator[list[tuple[str, bool]]], tok: Tokenizer) -> Stream:
    """Tokenize documents and return them as a stream of training tokens.

    A document is a list of pieces (text, flag). The flag is True if the piece's tokens count in the
    loss. The pieces are tokenized separately. Each piece ends with a special token or a line break,
    so the result equals the tokens of the whole text.
    """
    tokens: list[NDArray[np.uint16]] = []
    learn: list[NDArray[np.bool_]] = []
    starts, length = [0], 0
    batch: list[list[tuple[str, bool]]] = []

    def flush() -> None:
        nonlocal length
        flat = tok.encode_batch_fast([t for doc in batch for t, _ in doc])
        i = 0
        for doc in batch:
            for _, flag in doc:
                ids = np.asarray(flat[i].ids, dtype=np.uint16)
                tokens.append(ids)
                learn.append(np.full(len(ids), flag))
                length += len(ids)
                i += 1
            starts.append(length)
        batch.clear()

    for doc in parts:
        batch.append(doc)
        if len(batch) == 2000:
            flush()
    flush()
    return Stream(np.concatenate(tokens), np.concatenate(learn), np.asarray(starts, np.int64))


def text_documents(texts: list[str]) -> Iterator[list[tuple[str, bool]]]:
    for t in texts:
        yield [(t.strip() + END_OF_TEXT, True)]


def build(
    data: Path, cache: Path, *, seed: int, vocab_size: int, chats: int = 110_000
) -> Tokenizer:
    """Write the tokenizer and the training streams to the folder `cache`.

    Nothing is done if they exist already. `data` is the folder of the text collection, and `chats`
    is the number of conversations to generate. Returns the tokenizer.
    """
    done = cache / "done.json"
    recipe = {"seed": seed, "vocab_size": vocab_size, "chats": chats}
    if done.exists() and json.loads(done.read_text()) == recipe:
        return load_tokenizer(cache)
    cache.mkdir(parents=True, exist_ok=True)
    sources, texts = load_sources(data), prose(data)

    def sample() -> Iterator[str]:
        for doc in chat_documents(sources, seed + 9, 25_000, CHAT_WEIGHTS, 0.5):
            yield "".join(t for t, _ in doc)
        yield "\n".join(texts)[:2_000_000]

    tok = train_tokenizer(sample(), vocab_size)
    tok.save(str(cache / "tokenizer.json"))
    _stream(chat_documents(sources, seed + 1, chats, CHAT_WEIGHTS, 0.45), tok).save(
        cache / "chat.npz"
    )
    _stream(chat_documents(sources, seed + 2, chats, FINAL_WEIGHTS, 0.40), tok).save(
        cache / "final.npz"
    )
    _stream(text_documents(texts), tok).save(cache / "stories.npz")
    done.write_text(json.dumps(recipe))
    return tok


def build_tiny(cache: Path, *, seed: int, vocab_size: int) -> Tokenizer:
    """Write the tokenizer and the streams of a toy data set to the folder `cache`.

    Its texts are generated, so it needs no text collection. Returns the tokenizer.
    """
    cache.mkdir(parents=True, exist_ok=True)
    rng = random.Random(seed)
    stories = [tales.tale(rng)[0] for _ in range(300)]
    docs = list(chat_documents(Sources(), seed, 1500, FINAL_WEIGHTS, 0.7))
    tok = train_tokenizer(iter([*stories, *("".join(t for t, _ in d) for d in docs)]), vocab_size)
    tok.save(str(cache / "tokenizer.json"))
    for name in ("chat", "final"):
        _stream(iter(docs), tok).save(cache / f"{name}.npz")
    _stream(text_documents(stories), tok).save(cache / "stories.npz")
    return tok


class Mixer:
    """Draws training batches: packs random documents into rows of `length` tokens."""

    def __init__(self, cache: Path, seed: int, length: int) -> None:
        names = {*STABLE, *FINAL}
        self.streams = {n: Stream.load(cache / f"{n}.npz") for n in sorted(names)}
        self.rng = np.random.default_rng(seed)
        self.length = length

    def seed(self, *place: int) -> None:
        """Seed the random generator with a batch's position in the training."""
        self.rng = np.random.default_rng(place)

    def batch(self, rows: int, weights: dict[str, float]) -> dict[str, torch.Tensor]:
        """Return a batch of B rows, as the arguments of `DemoModel.loss`, each [B, T].

        `weights` are the shares of tokens from each stream.
        """
        width = self.length + 1
        tokens = np.zeros((rows, width), np.int64)
        learn = np.zeros((rows, width), bool)
        doc = np.zeros((rows, width), np.int32)
        names = list(weights)
        # Draw long documents less often, because the weights are shares of tokens.
        share = np.array([weights[n] / min(self.streams[n].mean_length, width) for n in names])
        share /= share.sum()
        for r in range(rows):
            at, number = 0, 0
            while at < width:
                s = self.streams[names[self.rng.choice(len(names), p=share)]]
                i = int(self.rng.integers(len(s.starts) - 1))
                a, b = int(s.starts[i]), int(s.starts[i + 1])
                if b - a > width:
                    a += int(self.rng.integers(b - a - width // 2))
                n = min(b - a, width - at)
                tokens[r, at : at + n] = s.tokens[a : a + n]
                learn[r, at : at + n] = s.learn[a : a + n]
                doc[r, at : at + n] = number
                at, number = at + n, number + 1
        weight = learn[:, 1:] & (doc[:, 1:] == doc[:, :-1])
        return {
            "tokens": torch.from_numpy(tokens[:, :-1].copy()),
            "doc": torch.from_numpy(doc[:, :-1].copy()),
            "target": torch.from_numpy(tokens[:, 1:].copy()),
            "weight": torch.from_numpy(weight.astype(np.float32)),
        }
