"""Generate the tensors of a synthetic model.

Routing: every token embedding is the sum of a constant vector c and a random vector. The router row
of expert e is b_e * c plus a random vector orthogonal to c. The router logit of e is therefore b_e
plus noise that differs between tokens. With b = 0 all experts are used equally, and other values of
b give any skew. As in trained models, each layer adds little to the residual stream
(RESIDUAL_POWER). The choice of the next layer's router can therefore be predicted from the input of
this layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from gguf_tools.file.layout import (
    BLOCK,
    EMBEDDINGS,
    KINDS,
    OUTPUT,
    GGMLType,
    expert_tensor_name,
)
from gguf_tools.synthetic import weights as sw
from gguf_tools.synthetic.drawn import DRAWN_TYPES, drawn_matrix
from gguf_tools.synthetic.shapes import KV_RANK, NOPE_DIM, Q_RANK, ROPE_DIM, V_DIM, Shape

# Variance that each layer adds to the residual stream, relative to that of the embeddings.
RESIDUAL_POWER = 0.1
# Variance of the constant vector, relative to the same.
CONSTANT_POWER = 0.125
# Standard deviation of router logits over the tokens.
ROUTER_SPREAD = 1.5


class PlannedTensor(NamedTuple):
    """A tensor of a synthetic model. Calling `chunks` generates its data in pieces."""

    name: str
    shape: tuple[int, ...]
    type: GGMLType
    chunks: Callable[[], Iterator[sw.Bytes]]


class ModelBuilder:
    """Lists the tensors of a synthetic model. Their data is generated when it is written.

    tiers: types of the precisions of experts, the best first.
    routing: how often experts are used: "uniform", or "zipf" for a Zipf law with exponent zipf_s.
    same_layers: give all layers the experts of the first one, whose data is generated only once.
    """

    def __init__(
        self,
        shape: Shape,
        tiers: list[GGMLType],
        routing: str,
        zipf_s: float,
        seed: int,
        same_layers: bool = False,
    ) -> None:
        self.shape, self.tiers, self.seed = shape, tiers, seed
        self._same_layers = same_layers
        self._made: dict[tuple[str, GGMLType], list[sw.Bytes]] = {}
        s = shape
        use = np.full(s.n_expert, s.n_expert_used / s.n_expert)
        if routing != "uniform":
            use = sw.zipf_usage(s.n_expert, s.n_expert_used, zipf_s)
            self.bias = sw.router_bias(use, s.n_expert_used)
            self.constant_power = CONSTANT_POWER
        else:
            self.bias = np.zeros(s.n_expert)
            self.constant_power = 0.0
        # Balanced signs have mean 0, so that a LayerNorm, which subtracts the mean, keeps them.
        signs = np.where(np.arange(s.n_embd) % 2 == 0, 1.0, -1.0)
        rng = np.random.default_rng([seed, 1])
        rng.shuffle(signs)
        self.direction = signs / math.sqrt(s.n_embd)  # a unit vector

    def tensors(self) -> Iterator[PlannedTensor]:
        """Yield all tensors of the model in file order."""
        s = self.shape
        yield self._embedding()
        for il in range(s.n_layer):
            yield from self._attention(il)
            yield from self._dense_ffn(il) if il < s.n_dense else self._moe(il)
        yield self._norm("output_norm")
        if s.arch == "phimoe":
            yield from (
                self._zeros("output_norm.bias", s.n_embd),
                self._zeros("output.bias", s.n_vocab),
            )
        yield self._matrix(OUTPUT, (s.n_embd, s.n_vocab), 2.0, GGMLType.Q8_0)

    def _rng(self, name: str) -> np.random.Generator:
        return np.random.default_rng(self._key(name))

    def _key(self, name: str, index: int = 0) -> list[int]:
        return [self.seed, 2, index, *name.encode()]

    def _values(
        self, name: str, shape: tuple[int, ...], kind: GGMLType, values: Any
    ) -> PlannedTensor:
        data = np.ascontiguousarray(values, np.float32).reshape(-1)
        return PlannedTensor(name, shape, kind, lambda: iter([sw.encode(kind, data)]))

    def _zeros(self, name: str, n: int) -> PlannedTensor:
        return self._values(name, (n,), GGMLType.F32, np.zeros(n))

    def _norm(self, name: str, n: int | None = None) -> PlannedTensor:
        n = n or self.shape.n_embd
        return self._values(f"{name}.weight", (n,), GGMLType.F32, np.ones(n))

    def _matrix(
        self,
        name: str,
        shape: tuple[int, ...],
        gain: float = 1.0,
        stored_as: GGMLType | None = None,
    ) -> PlannedTensor:
        """Return a matrix of random weights with standard deviation gain / sqrt(row length).

        stored_as: type of the matrix. Default: the model's type for dense matrices.
        """
        kind = stored_as or self.shape.dense_type
        if shape[0] % BLOCK[kind].weights:
            kind = GGMLType.F16
        std = gain / math.sqrt(shape[0])
        n = math.prod(shape)
        if kind is GGMLType.Q8_0:
            return PlannedTensor(name, shape, kind, lambda: iter([self._gaussian(name, n, std)]))
        key = self._key(name)
        return PlannedTensor(name, shape, kind, lambda: iter([sw.random_matrix(key, kind, n, std)]))

    def _gaussian(self, name: str, n: int, std: float) -> sw.Bytes:
        values = self._rng(name).standard_normal(n, dtype=np.float32) * np.float32(std)
        return sw.encode(GGMLType.Q8_0, values)

    def _embedding(self) -> PlannedTensor:
        s, name = self.shape, EMBEDDINGS

        def chunks() -> Iterator[sw.Bytes]:
            values = self._rng(name).standard_normal((s.n_vocab, s.n_embd), dtype=np.float32)
            constant = math.sqrt(self.constant_power * s.n_embd)
            values += (constant * self.direction).astype(np.float32)
            yield sw.encode(GGMLType.Q8_0, values.reshape(-1))

        return PlannedTensor(name, (s.n_embd, s.n_vocab), GGMLType.Q8_0, chunks)

    def _attention(self, il: int) -> Iterator[PlannedTensor]:
        s, p = self.shape, f"blk.{il}."
        yield self._norm(p + "attn_norm")
        yield self._norm(p + "ffn_norm")
        if s.arch == "phimoe":
            for name in ("attn_norm.bias", "ffn_norm.bias", "attn_output.bias"):
                yield self._zeros(p + name, s.n_embd)
        if s.arch == "deepseek2":
            yield self._norm(p + "attn_q_a_norm", Q_RANK)
            yield self._norm(p + "attn_kv_a_norm", KV_RANK)
            yield self._matrix(p + "attn_q_a.weight", (s.n_embd, Q_RANK))
            yield self._matrix(p + "attn_q_b.weight", (Q_RANK, s.n_head * (NOPE_DIM + ROPE_DIM)))
            yield self._matrix(p + "attn_kv_a_mqa.weight", (s.n_embd, KV_RANK + ROPE_DIM))
            yield self._matrix(p + "attn_k_b.weight", (NOPE_DIM, KV_RANK, s.n_head))
            yield self._matrix(p + "attn_v_b.weight", (KV_RANK, V_DIM, s.n_head))
            yield self._matrix(p + "attn_output.weight", (s.n_head * V_DIM, s.n_embd), 0.3)
            return
        n_q, n_kv = s.n_head * s.head_dim, s.n_head_kv * s.head_dim
        if s.arch == "qwen3moe":
            yield self._norm(p + "attn_q_norm", s.head_dim)
            yield self._norm(p + "attn_k_norm", s.head_dim)
        if s.arch == "olmoe":
            yield self._norm(p + "attn_q_norm", n_q)
            yield self._norm(p + "attn_k_norm", n_kv)
        yield self._matrix(p + "attn_q.weight", (s.n_embd, n_q))
        yield self._matrix(p + "attn_k.weight", (s.n_embd, n_kv))
        yield self._matrix(p + "attn_v.weight", (s.n_embd, n_kv))
        yield self._matrix(p + "attn_output.weight", (n_q, s.n_embd), 0.3)

    def _gated(self, prefix: str, suffix: str, n_ff: int) -> Iterator[PlannedTensor]:
        n = self.shape.n_embd
        down_gain = math.sqrt(RESIDUAL_POWER / 2 / sw.SILU_GATED_POWER)
        yield self._matrix(f"{prefix}ffn_gate{suffix}.weight", (n, n_ff))
        yield self._matrix(f"{prefix}ffn_up{suffix}.weight", (n, n_ff))
        yield self._matrix(f"{prefix}ffn_down{suffix}.weight", (n_ff, n), down_gain)

    def _dense_ffn(self, il: int) -> Iterator[PlannedTensor]:
        yield from self._gated(f"blk.{il}.", "", self.shape.n_ff)

    def _moe(self, il: int) -> Iterator[PlannedTensor]:
        s, p = self.shape, f"blk.{il}."
        yield self._router(il)
        if s.arch == "deepseek2":
            values = self._rng(p + "exp_probs_b").standard_normal(s.n_expert) * 0.01
            yield self._values(p + "exp_probs_b.bias", (s.n_expert,), GGMLType.F32, values)
        normed = s.arch in ("qwen3moe", "llama", "deepseek2")
        power = sw.gate_power(self.bias, s.n_expert_used, ROUTER_SPREAD, normed)
        down_std = math.sqrt(RESIDUAL_POWER / (s.n_ff_exp * sw.SILU_GATED_POWER * power))
        into_std = 1 / math.sqrt(s.n_embd)
        wide = (s.n_embd, s.n_ff_exp, s.n_expert)
        matrices = {"gate": (wide, into_std), "up": (wide, into_std)}
        if s.fused:
            matrices = {"gate_up": ((s.n_embd, 2 * s.n_ff_exp, s.n_expert), into_std)}
        matrices["down"] = ((s.n_ff_exp, s.n_embd, s.n_expert), down_std)
        for kind, (shape, std) in matrices.items():
            name = expert_tensor_name(il, KINDS.index(kind))
            for i, tier in enumerate(self.tiers):
                full = expert_tensor_name(il, KINDS.index(kind), tier.tier_name if i else None)
                seed_name = expert_tensor_name(0, KINDS.index(kind)) if self._same_layers else name
                yield PlannedTensor(full, shape, tier, self._experts(seed_name, shape, tier, std))
        if s.n_shared:
            yield from self._gated(p, "_shexp", s.n_shared * s.n_ff_exp)
        if s.arch == "qwen2moe":
            values = self._rng(p + "ffn_gate_inp_shexp").standard_normal(s.n_embd)
            scaled = values / math.sqrt(s.n_embd)
            yield self._values(p + "ffn_gate_inp_shexp.weight", (s.n_embd,), GGMLType.F32, scaled)

    def _experts(
        self, name: str, shape: tuple[int, ...], tier: GGMLType, std: float
    ) -> Callable[[], Iterator[sw.Bytes]]:
        make = drawn_matrix if tier in DRAWN_TYPES else sw.random_matrix

        def chunks() -> Iterator[sw.Bytes]:
            for expert in range(shape[2]):
                key = self._key(name, expert + 1)
                yield make(key, tier, shape[0] * shape[1], std)

        def kept() -> Iterator[sw.Bytes]:
            if (name, tier) not in self._made:
                self._made[name, tier] = list(chunks())
            return iter(self._made[name, tier])

        return kept if self._same_layers else chunks

    def _router(self, il: int) -> PlannedTensor:
        """Return the router of a layer, which makes experts as popular as `routing` demands.

        For a normalized input, its logits are ROUTER_SPREAD * (b + N(0, 1)), with a bias b for each
        expert.

        il: layer number.
        """
        s, name = self.shape, f"blk.{il}.ffn_gate_inp.weight"
        rng = self._rng(name)
        # Variance of the residual stream at this layer. The norm divides by its square root.
        random_power = 1 + RESIDUAL_POWER * il
        rms = math.sqrt(random_power + self.constant_power)
        rows = rng.standard_normal((s.n_expert, s.n_embd))
        rows -= np.outer(rows @ self.direction, self.direction)
        rows *= ROUTER_SPREAD / math.sqrt(s.n_embd) * rms / math.sqrt(random_power)
        if self.constant_power:
            constant = math.sqrt(self.constant_power * s.n_embd) / rms
            bias = ROUTER_SPREAD * rng.permutation(self.bias) / constant
            rows += np.outer(bias, self.direction)
        return self._values(name, (s.n_embd, s.n_expert), GGMLType.F32, rows)
