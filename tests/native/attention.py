"""Attention on its own: what each token of a prompt receives (DyMoE eq. 1), in numpy from a model's
weights, without a node of its graph but the stream that enters the layer."""

import gguf
import numpy as np

from orchestrator.lab.observe import observe


class Attention:
    """The attention of a GGUF's layers, for architectures with separate q and k.

    interleaved: rope turns neighbouring values, as Llama's; else the two halves of a head, as
    NeoX's. normed: each head of q and k has a norm of its own, as Qwen3's.
    """

    def __init__(self, path, interleaved, normed):
        reader = gguf.GGUFReader(path)
        self._tensors = {each.name: each for each in reader.tensors}
        fields = {name: field.contents() for name, field in reader.fields.items()}
        arch = fields["general.architecture"]
        self.n_head = int(fields[f"{arch}.attention.head_count"])
        self.n_head_kv = int(fields[f"{arch}.attention.head_count_kv"])
        self.head_dim = int(fields[f"{arch}.attention.key_length"])
        self.theta = float(fields[f"{arch}.rope.freq_base"])
        self.eps = float(fields[f"{arch}.attention.layer_norm_rms_epsilon"])
        self.interleaved, self.normed = interleaved, normed

    def tensor(self, name):
        found = self._tensors[name]
        return gguf.dequantize(found.data, found.tensor_type).astype(np.float64)

    def embeddings(self, tokens):
        """[T, n_embd]: what enters the first layer."""
        return self.tensor("token_embd.weight")[tokens]

    def weights(self, il, stream):
        """Attention weights [heads, queries, keys] of layer il over stream [T, n_embd]."""
        x = self._rms(stream, self.tensor(f"blk.{il}.attn_norm.weight"))
        q = self._heads(x, il, "q", self.n_head)
        k = self._heads(x, il, "k", self.n_head_kv)
        k = np.repeat(k, self.n_head // self.n_head_kv, axis=0)
        scores = q @ k.transpose(0, 2, 1) / np.sqrt(self.head_dim)
        later = np.triu(np.ones(scores.shape[1:], bool), 1)
        scores[:, later] = -np.inf
        weights = np.exp(scores - scores.max(axis=2, keepdims=True))
        return weights / weights.sum(axis=2, keepdims=True)

    def _heads(self, x, il, which, n):
        """[n, T, head_dim], turned by position."""
        rows = x @ self.tensor(f"blk.{il}.attn_{which}.weight").T
        heads = rows.reshape(len(x), n, self.head_dim)
        if self.normed:
            heads = self._rms(heads, self.tensor(f"blk.{il}.attn_{which}_norm.weight"))
        return self._rope(heads.transpose(1, 0, 2))

    def _rope(self, heads):
        half = self.head_dim // 2
        frequencies = self.theta ** (-np.arange(half) / half)
        angles = np.arange(heads.shape[1])[:, None] * frequencies
        pairs = slice(0, None, 2) if self.interleaved else slice(0, half)
        others = slice(1, None, 2) if self.interleaved else slice(half, None)
        a, b = heads[..., pairs], heads[..., others]
        turned = np.empty_like(heads)
        turned[..., pairs] = a * np.cos(angles) - b * np.sin(angles)
        turned[..., others] = a * np.sin(angles) + b * np.cos(angles)
        return turned

    def _rms(self, x, gain):
        return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + self.eps) * gain


def received(weights, window):
    """s_i [T]: summed over the last `window` queries, mean over heads."""
    return weights[:, -window:].sum(axis=1).mean(axis=0)


def streams(path, tokens):
    """[T, n_embd] behind each layer of the plain model."""
    seen: dict[int, np.ndarray] = {}

    def keep(node):
        seen[int(node.name.removeprefix("l_out-"))] = node.array()[0, 0]

    with observe(path, len(tokens), 1, lambda n: n.name.startswith("l_out-"), keep) as observer:
        observer.read(tokens)
    return seen
