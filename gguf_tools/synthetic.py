"""Writes a random-weight Mixture-of-Experts GGUF of a chosen shape.

For tests and benchmarks: the file loads in unpatched llama.cpp, its activations stay
finite, its experts are as large as a real model's, and how often each expert is used is
known. Equal arguments give equal bytes.

Routing: every token embedding holds one constant direction c beside its random part, and
the router row of expert e is b_e * c plus a random row orthogonal to c. So its logit is
b_e plus noise that differs per token: b = 0 uses all experts alike, and other b give any
skew. With "topics" each half of the vocabulary has a direction of its own, orthogonal to the
other's, and so a Zipf distribution over the experts of its own. Each layer adds little to the
residual stream (RESIDUAL_POWER), as in trained models, so the router of the next layer can be
predicted from this layer's input.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from . import synthetic_weights as sw
from .errors import GGUFError, QuantizeError, TensorShapeError
from .layout import (
    BLOCK,
    DEFAULT_ALIGNMENT,
    EXPERT_ALIGNMENT,
    FORMAT_VERSION,
    KEY_CALIBRATION,
    KEY_FORMAT_VERSION,
    KEY_QUANTIZATION,
    KEY_TIER_BPW,
    KEY_TIERS,
    KINDS,
    GGMLType,
    ValueType,
    bits_per_weight,
    expert_tensor_name,
    type_by_name,
)
from .synthetic_vocab import TOKEN_TYPE, bpe, spm
from .writer import GGUFWriter

ROUTINGS = ("uniform", "zipf", "topics")
RESIDUAL_POWER = 0.1  # variance that one layer adds, in units of the embedding's
CONSTANT_POWER = 0.125  # share of the constant direction, in the same units
ROUTER_SPREAD = 1.5  # standard deviation of the router logits over tokens


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a model. n_ff: dense layers; n_ff_exp: one expert; n_shared: shared experts."""

    arch: str
    n_layer: int
    n_embd: int
    n_ff_exp: int
    n_expert: int
    n_expert_used: int
    n_head: int
    n_head_kv: int
    head_dim: int
    n_vocab: int
    dense_type: GGMLType = GGMLType.Q8_0
    n_ff: int = 0
    n_dense: int = 0
    n_shared: int = 0
    n_groups: int = 0
    n_groups_used: int = 0
    fused: bool = False
    context: int = 4096


_TINY = Shape("", 3, 256, 256, 8, 2, 4, 2, 64, 320, context=2048)
PRESETS = {
    "olmoe": Shape("olmoe", 8, 2048, 1024, 64, 8, 16, 16, 128, 4096, GGMLType.Q4_K),
    "mixtral": Shape("llama", 4, 4096, 14336, 8, 2, 32, 8, 128, 4096, GGMLType.Q4_K),
    "qwen3-30b": Shape("qwen3moe", 6, 2048, 768, 128, 8, 32, 4, 128, 4096, GGMLType.Q4_K),
    "tiny-qwen3moe": replace(_TINY, arch="qwen3moe"),
    "tiny-qwen2moe": replace(_TINY, arch="qwen2moe", n_head_kv=4, n_shared=1),
    "tiny-olmoe": replace(_TINY, arch="olmoe", n_head_kv=4),
    "tiny-mixtral": replace(_TINY, arch="llama"),
    "tiny-deepseek": replace(_TINY, arch="deepseek", n_ff=512, n_dense=1, n_shared=2),
    "tiny-deepseek2": replace(
        _TINY, arch="deepseek2", n_ff=512, n_dense=1, n_shared=1, n_groups=4, n_groups_used=2
    ),
    "tiny-deepseek2-fused": replace(
        _TINY, arch="deepseek2", n_ff=512, n_dense=1, n_shared=1, fused=True
    ),
    "tiny-phimoe": replace(_TINY, arch="phimoe"),
}

# deepseek2 attention of the tiny presets: low ranks of queries and keys, rotated part.
_Q_RANK, _KV_RANK, _ROPE_DIM, _NOPE_DIM, _V_DIM = 64, 64, 32, 32, 32


class _Tensor(NamedTuple):
    name: str
    shape: tuple[int, ...]
    type: GGMLType
    chunks: Callable[[], Iterator[sw.Bytes]]


def write(
    path: Path | str,
    shape: Shape | str,
    *,
    tiers: tuple[str, ...] = ("q4_k",),
    routing: str = "uniform",
    zipf_s: float = 1.0,
    seed: int = 0,
    alignment: int | None = None,
    progress: Callable[[float], None] | None = None,
) -> Path:
    """Writes the model and returns its path.

    tiers: one type gives an ordinary GGUF; several, best first, give the multi-tier file
    (the best under the standard names, aligned to 4096 bytes). The same seed with another
    single tier gives a second precision of the same model. q8_0, q4_k and q2_k approximate
    the same weights; f32 and f16 are Gaussians of their own and stand alone.
    Raises TensorShapeError, QuantizeError or WriteError, all GGUFError.
    """
    if isinstance(shape, str):
        shape = preset(shape)
    types = _checked(shape, tiers, routing)
    alignment = alignment or (DEFAULT_ALIGNMENT if len(types) == 1 else EXPERT_ALIGNMENT)
    tensors = list(_Builder(shape, types, routing, zipf_s, seed).tensors())
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with GGUFWriter(path, alignment) as writer:
        for key, value in _metadata(shape, types).items():
            writer.meta(key, value, element=ValueType.INT32 if key == TOKEN_TYPE else None)
        for tensor in tensors:
            writer.declare(tensor.name, tensor.shape, tensor.type)
        writer.begin()
        for tensor in tensors:
            writer.write_tensor(tensor.name, tensor.chunks())
            if progress:
                declared = writer.tensors[tensor.name]
                progress((declared.offset + declared.nbytes) / writer.data_bytes)
    return path


def preset(name: str) -> Shape:
    """The shape of that name; TensorShapeError lists the known ones."""
    if name not in PRESETS:
        raise TensorShapeError(f"unknown shape '{name}': known are {', '.join(PRESETS)}")
    return PRESETS[name]


def _checked(shape: Shape, tiers: tuple[str, ...], routing: str) -> list[GGMLType]:
    types = []
    for name in tiers:
        kind = type_by_name(name)
        if kind is None or kind not in (*sw.FLOAT_TYPES, *sw.BLOCK_TYPES):
            known = ", ".join(each.tier_name for each in (*sw.FLOAT_TYPES, *sw.BLOCK_TYPES))
            raise QuantizeError(f"no random weights of type '{name}': known are {known}")
        types.append(kind)
    if len(types) > 1 and not set(types) <= set(sw.BLOCK_TYPES):
        raise QuantizeError("f32 and f16 stand alone: pack such a file to get more tiers")
    if routing not in ROUTINGS:
        raise QuantizeError(f"unknown routing '{routing}': known are {', '.join(ROUTINGS)}")
    return types


class _Builder:
    """Lists the tensors of a model; their bytes are made when they are written."""

    def __init__(
        self, shape: Shape, tiers: list[GGMLType], routing: str, zipf_s: float, seed: int
    ) -> None:
        self.shape, self.tiers, self.seed = shape, tiers, seed
        s = shape
        use = np.full(s.n_expert, s.n_expert_used / s.n_expert)
        if routing != "uniform":
            use = sw.zipf_use(s.n_expert, s.n_expert_used, zipf_s)
            self.bias = sw.router_bias(use, s.n_expert_used)
            self.constant_power = CONSTANT_POWER
        else:
            self.bias = np.zeros(s.n_expert)
            self.constant_power = 0.0
        # Balanced signs: a LayerNorm that subtracts the mean leaves the direction alone.
        signs = np.where(np.arange(s.n_embd) % 2 == 0, 1.0, -1.0)
        rng = np.random.default_rng([seed, 1])
        rng.shuffle(signs)
        directions = [signs]
        if routing == "topics":  # another sign for half of each sign: orthogonal, and balanced too
            other = signs.copy()
            for sign in (1.0, -1.0):
                same = np.flatnonzero(signs == sign)
                other[rng.permutation(same)[: len(same) // 2]] = -sign
            directions.append(other)
        self.directions = np.stack(directions) / math.sqrt(s.n_embd)  # of each part of the tokens

    def tensors(self) -> Iterator[_Tensor]:
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
        yield self._matrix("output.weight", (s.n_embd, s.n_vocab), 2.0, GGMLType.Q8_0)

    def _rng(self, name: str) -> np.random.Generator:
        return np.random.default_rng(self._key(name))

    def _key(self, name: str, index: int = 0) -> list[int]:
        return [self.seed, 2, index, *name.encode()]

    def _values(self, name: str, shape: tuple[int, ...], kind: GGMLType, values: Any) -> _Tensor:
        data = np.ascontiguousarray(values, np.float32).reshape(-1)
        return _Tensor(name, shape, kind, lambda: iter([sw.encode(kind, data)]))

    def _zeros(self, name: str, n: int) -> _Tensor:
        return self._values(name, (n,), GGMLType.F32, np.zeros(n))

    def _norm(self, name: str, n: int | None = None) -> _Tensor:
        n = n or self.shape.n_embd
        return self._values(f"{name}.weight", (n,), GGMLType.F32, np.ones(n))

    def _matrix(
        self,
        name: str,
        shape: tuple[int, ...],
        gain: float = 1.0,
        stored_as: GGMLType | None = None,
    ) -> _Tensor:
        """Dense weights of standard deviation gain / sqrt(rows in)."""
        kind = stored_as or self.shape.dense_type
        if shape[0] % BLOCK[kind].weights:
            kind = GGMLType.F16
        std = gain / math.sqrt(shape[0])
        n = math.prod(shape)
        if kind is GGMLType.Q8_0:
            return _Tensor(name, shape, kind, lambda: iter([self._gaussian(name, n, std)]))
        key = self._key(name)
        return _Tensor(name, shape, kind, lambda: iter([sw.random_matrix(key, kind, n, std)]))

    def _gaussian(self, name: str, n: int, std: float) -> sw.Bytes:
        values = self._rng(name).standard_normal(n, dtype=np.float32) * np.float32(std)
        return sw.encode(GGMLType.Q8_0, values)

    def _embedding(self) -> _Tensor:
        s, name = self.shape, "token_embd.weight"

        def chunks() -> Iterator[sw.Bytes]:
            values = self._rng(name).standard_normal((s.n_vocab, s.n_embd), dtype=np.float32)
            constant = math.sqrt(self.constant_power * s.n_embd)
            each = s.n_vocab // len(self.directions)
            for part, direction in enumerate(self.directions):
                end = None if part + 1 == len(self.directions) else (part + 1) * each
                values[part * each : end] += (constant * direction).astype(np.float32)
            yield sw.encode(GGMLType.Q8_0, values.reshape(-1))

        return _Tensor(name, (s.n_embd, s.n_vocab), GGMLType.Q8_0, chunks)

    def _attention(self, il: int) -> Iterator[_Tensor]:
        s, p = self.shape, f"blk.{il}."
        yield self._norm(p + "attn_norm")
        yield self._norm(p + "ffn_norm")
        if s.arch == "phimoe":
            for name in ("attn_norm.bias", "ffn_norm.bias", "attn_output.bias"):
                yield self._zeros(p + name, s.n_embd)
        if s.arch == "deepseek2":
            yield self._norm(p + "attn_q_a_norm", _Q_RANK)
            yield self._norm(p + "attn_kv_a_norm", _KV_RANK)
            yield self._matrix(p + "attn_q_a.weight", (s.n_embd, _Q_RANK))
            yield self._matrix(p + "attn_q_b.weight", (_Q_RANK, s.n_head * (_NOPE_DIM + _ROPE_DIM)))
            yield self._matrix(p + "attn_kv_a_mqa.weight", (s.n_embd, _KV_RANK + _ROPE_DIM))
            yield self._matrix(p + "attn_k_b.weight", (_NOPE_DIM, _KV_RANK, s.n_head))
            yield self._matrix(p + "attn_v_b.weight", (_KV_RANK, _V_DIM, s.n_head))
            yield self._matrix(p + "attn_output.weight", (s.n_head * _V_DIM, s.n_embd), 0.3)
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

    def _gated(self, prefix: str, suffix: str, n_ff: int) -> Iterator[_Tensor]:
        n = self.shape.n_embd
        down_gain = math.sqrt(RESIDUAL_POWER / 2 / sw.SILU_GATED_POWER)
        yield self._matrix(f"{prefix}ffn_gate{suffix}.weight", (n, n_ff))
        yield self._matrix(f"{prefix}ffn_up{suffix}.weight", (n, n_ff))
        yield self._matrix(f"{prefix}ffn_down{suffix}.weight", (n_ff, n), down_gain)

    def _dense_ffn(self, il: int) -> Iterator[_Tensor]:
        yield from self._gated(f"blk.{il}.", "", self.shape.n_ff)

    def _moe(self, il: int) -> Iterator[_Tensor]:
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
                yield _Tensor(full, shape, tier, self._experts(name, shape, tier, std))
        if s.n_shared:
            yield from self._gated(p, "_shexp", s.n_shared * s.n_ff_exp)
        if s.arch == "qwen2moe":
            values = self._rng(p + "ffn_gate_inp_shexp").standard_normal(s.n_embd)
            scaled = values / math.sqrt(s.n_embd)
            yield self._values(p + "ffn_gate_inp_shexp.weight", (s.n_embd,), GGMLType.F32, scaled)

    def _experts(
        self, name: str, shape: tuple[int, ...], tier: GGMLType, std: float
    ) -> Callable[[], Iterator[sw.Bytes]]:
        def chunks() -> Iterator[sw.Bytes]:
            for expert in range(shape[2]):
                key = self._key(name, expert + 1)
                yield sw.random_matrix(key, tier, shape[0] * shape[1], std)

        return chunks

    def _router(self, il: int) -> _Tensor:
        """Rows [n_expert, n_embd] whose logits on a normalised input are b + N(0, 1), scaled."""
        s, name = self.shape, f"blk.{il}.ffn_gate_inp.weight"
        rng = self._rng(name)
        # After l layers the stream has this power, and the norm divides by its root.
        random_power = 1 + RESIDUAL_POWER * il
        rms = math.sqrt(random_power + self.constant_power)
        rows = rng.standard_normal((s.n_expert, s.n_embd))
        for direction in self.directions:
            rows -= np.outer(rows @ direction, direction)
        rows *= ROUTER_SPREAD / math.sqrt(s.n_embd) * rms / math.sqrt(random_power)
        if self.constant_power:
            constant = math.sqrt(self.constant_power * s.n_embd) / rms
            for direction in self.directions:
                bias = ROUTER_SPREAD * rng.permutation(self.bias) / constant
                rows += np.outer(bias, direction)
        return self._values(name, (s.n_embd, s.n_expert), GGMLType.F32, rows)


def _metadata(s: Shape, tiers: list[GGMLType]) -> dict[str, Any]:
    a = s.arch
    meta: dict[str, Any] = {
        "general.architecture": a,
        "general.name": f"random {a} {s.n_layer}x{s.n_expert}",
        f"{a}.context_length": s.context,
        f"{a}.embedding_length": s.n_embd,
        f"{a}.block_count": s.n_layer,
        f"{a}.feed_forward_length": s.n_ff or s.n_ff_exp,
        f"{a}.attention.head_count": s.n_head,
        f"{a}.attention.head_count_kv": s.n_head_kv,
        f"{a}.attention.layer_norm_rms_epsilon": 1e-5,
        f"{a}.rope.freq_base": 10000.0,
        f"{a}.expert_count": s.n_expert,
        f"{a}.expert_used_count": s.n_expert_used,
    }
    if a in ("qwen3moe", "qwen2moe", "deepseek", "deepseek2"):
        meta[f"{a}.expert_feed_forward_length"] = s.n_ff_exp
    if a == "qwen2moe":
        meta[f"{a}.expert_shared_feed_forward_length"] = s.n_shared * s.n_ff_exp
    if a in ("deepseek", "deepseek2"):
        meta[f"{a}.leading_dense_block_count"] = s.n_dense
        meta[f"{a}.expert_shared_count"] = s.n_shared
        meta[f"{a}.expert_weights_scale"] = 1.0
    if a == "deepseek2":
        meta |= {
            f"{a}.attention.head_count_kv": 1,
            f"{a}.attention.q_lora_rank": _Q_RANK,
            f"{a}.attention.kv_lora_rank": _KV_RANK,
            f"{a}.attention.key_length": _KV_RANK + _ROPE_DIM,
            f"{a}.attention.value_length": _KV_RANK,
            f"{a}.attention.key_length_mla": _NOPE_DIM + _ROPE_DIM,
            f"{a}.attention.value_length_mla": _V_DIM,
            f"{a}.rope.dimension_count": _ROPE_DIM,
            f"{a}.expert_gating_func": 2,
            f"{a}.expert_weights_norm": True,
        }
    else:
        meta[f"{a}.attention.key_length"] = s.head_dim
        meta[f"{a}.attention.value_length"] = s.head_dim
        meta[f"{a}.rope.dimension_count"] = s.head_dim
    if s.n_groups:
        meta[f"{a}.expert_group_count"] = s.n_groups
        meta[f"{a}.expert_group_used_count"] = s.n_groups_used
    if len(tiers) > 1:
        meta |= {
            KEY_FORMAT_VERSION: FORMAT_VERSION,
            KEY_TIERS: [tier.tier_name for tier in tiers],
            KEY_TIER_BPW: [bits_per_weight(tier) for tier in tiers],
            KEY_QUANTIZATION: "random",
            KEY_CALIBRATION: "none",
        }
    return meta | (spm(s.n_vocab) if a == "llama" else bpe(s.n_vocab))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m gguf_tools.synthetic", description=__doc__)
    parser.add_argument("path", type=Path)
    parser.add_argument("--shape", choices=tuple(PRESETS), default="olmoe")
    parser.add_argument("--tiers", default="q4_k", help="types, best first, comma separated")
    parser.add_argument("--routing", choices=ROUTINGS, default="uniform")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    try:
        tiers = tuple(args.tiers.split(","))
        write(args.path, args.shape, tiers=tiers, routing=args.routing, seed=args.seed)
    except (GGUFError, OSError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
