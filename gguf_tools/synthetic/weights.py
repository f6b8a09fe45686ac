"""Random weights of synthetic models, and router biases with a known skew.

The types q8_0, q4_k and q2_k of one matrix are generated from the same random integers. A lower
tier therefore approximates the better one as in a real quantization, without a quantizer:

    weight = d * 4u * (q - 7.5)      q in 0..15 per weight, u in 8..15 per 32 weights

q4_k stores these values exactly, q8_0 except for the rounding of its half-precision scale, and q2_k
keeps the two upper bits of q. The standard deviation is d * LATTICE_STD. Weights of type f32 and
f16 are normally distributed. They are meant as the source of a real quantization.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from gguf_tools.errors import QuantizeError
from gguf_tools.file.layout import GGMLType

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]


BLOCK_TYPES = (GGMLType.Q8_0, GGMLType.Q4_K, GGMLType.Q2_K)
GAUSSIAN_TYPES = (GGMLType.F32, GGMLType.F16)

_U_LOW, _U_HIGH = 8, 16
_U_RMS = math.sqrt(sum(u * u for u in range(_U_LOW, _U_HIGH)) / (_U_HIGH - _U_LOW))
LATTICE_STD = 4 * _U_RMS * math.sqrt((16**2 - 1) / 12)

# E[(silu(g) * u)^2] for independent standard normal g and u.
SILU_GATED_POWER = 0.3553


def random_matrix(seed: list[int], kind: GGMLType, n_weights: int, std: float) -> Bytes:
    """Return n_weights random weights with standard deviation `std`, encoded as type `kind`.

    With equal seeds, the weights in q8_0, q4_k and q2_k are the same weights in different
    precisions.
    """
    rng = np.random.default_rng(seed)
    if kind in GAUSSIAN_TYPES:
        return encode(kind, rng.standard_normal(n_weights, dtype=np.float32) * np.float32(std))
    n_sub = n_weights // 32
    u = rng.integers(_U_LOW, _U_HIGH, n_sub, dtype=np.uint8)
    # Row c of [n_sub/2, 32] has sub-block 2c in its low nibbles, and 2c+1 in its high ones.
    packed = np.frombuffer(rng.bytes(n_weights // 2), np.uint8).reshape(-1, 32)
    d = std / LATTICE_STD
    if kind is GGMLType.Q4_K:
        return _q4_k(u, packed, d)
    if kind is GGMLType.Q2_K:
        return _q2_k(u, packed, d)
    return _q8_0(u, packed, d)


def encode(kind: GGMLType, values: Floats) -> Bytes:
    """Encode float32 values [n] as the type f32, f16 or q8_0.

    In q8_0, the scale of a block is its largest magnitude / 127. Raises QuantizeError for other
    types.
    """
    if kind is GGMLType.F32:
        return values.astype("<f4").view(np.uint8)
    if kind is GGMLType.F16:
        return values.astype("<f2").view(np.uint8)
    if kind is not GGMLType.Q8_0:
        raise QuantizeError(f"random weights cannot have the type {kind.tier_name}")
    blocks = values.reshape(-1, 32)
    scale = np.abs(blocks).max(axis=1) / np.float32(127)
    inverse = np.where(scale > 0, 1 / np.where(scale > 0, scale, 1), 0).astype(np.float32)
    out = np.empty((len(blocks), 34), np.uint8)
    out[:, :2] = _half(scale)
    out[:, 2:] = np.rint(blocks * inverse[:, None]).astype(np.int8).view(np.uint8)
    return out.reshape(-1)


def _half(values: npt.ArrayLike) -> Bytes:
    return np.atleast_1d(np.asarray(values)).astype("<f2").view(np.uint8).reshape(-1, 2)


def _q4_k(u: Bytes, packed: Bytes, d: float) -> Bytes:
    scale = float(np.float16(d))
    s = (u * 4).reshape(-1, 8)
    low, high = s[:, :4], s[:, 4:]
    out = np.empty((len(s), 144), np.uint8)
    out[:, 0:2] = _half(scale)
    out[:, 2:4] = _half(7.5 * scale)
    # Scale and minimum are the same 6-bit number, which centers the weights around 0.
    out[:, 4:8] = out[:, 8:12] = low | (high >> 4) << 6
    out[:, 12:16] = (high & 15) | (high & 15) << 4
    out[:, 16:] = packed.reshape(-1, 128)
    return out.reshape(-1)


def _q2_k(u: Bytes, packed: Bytes, d: float) -> Bytes:
    scale = float(np.float16(16 * d))
    chunks = packed.reshape(-1, 4, 32)
    # Each byte of q4_k has one code of each of two sub-blocks. Keep the upper two bits of each.
    upper = ((chunks >> 2) & 3) | (chunks >> 6) << 2
    out = np.empty((len(chunks), 84), np.uint8)
    out[:, 0:16] = np.repeat((u | u << 4).reshape(-1, 8), 2, axis=1)
    out[:, 16:80] = (upper[:, 0::2] | upper[:, 1::2] << 4).reshape(-1, 64)
    out[:, 80:82] = _half(scale)
    out[:, 82:84] = _half(1.5 * scale)
    return out.reshape(-1)


def _q8_0(u: Bytes, packed: Bytes, d: float) -> Bytes:
    q = np.stack([packed & 15, packed >> 4], axis=1).reshape(-1, 32)
    out = np.empty((len(u), 34), np.uint8)
    out[:, 0:2] = _half(2 * d * u.astype(np.float32))
    out[:, 2:] = (2 * q.astype(np.int8) - 15).view(np.uint8)
    return out.reshape(-1)


def zipf_usage(n_expert: int, n_used: int, s: float) -> npt.NDArray[np.float64]:
    """Return the probability that a token uses each expert, for popularity by a Zipf law.

    The result [n_expert] is in decreasing order. The probabilities are proportional to rank**-s and
    sum to n_used. They are limited to 0.98, because a token can use an expert only once.
    """
    shape = np.arange(1, n_expert + 1, dtype=np.float64) ** -s
    low, high = 0.0, float(n_expert) / shape[-1]
    for _ in range(100):
        c = (low + high) / 2
        low, high = (c, high) if np.minimum(0.98, c * shape).sum() < n_used else (low, c)
    return np.minimum(0.98, low * shape)


def router_bias(use: npt.NDArray[np.float64], n_used: int) -> npt.NDArray[np.float64]:
    """Return biases b [n_expert] that make a random router use experts with given probabilities.

    For each token, the router adds noise from N(0, 1) to the biases, and uses the n_used experts
    with the largest sums. The biases are found by iteration on a fixed sample of 4096 tokens.

    use: wanted probability [n_expert] that a token uses each expert.
    """
    n_expert = len(use)
    noise = np.random.default_rng(20_26).standard_normal((4096, n_expert))
    bias = np.zeros(n_expert)
    for _ in range(80):
        top = np.argpartition(-(noise + bias), n_used - 1, axis=1)[:, :n_used]
        seen = (np.bincount(top.ravel(), minlength=n_expert) + 0.5) / (len(noise) + 1)
        bias += 0.4 * (np.log(use / (1 - use)) - np.log(seen / (1 - seen)))
        bias -= bias.mean()
    return bias


def gate_power(bias: npt.NDArray[np.float64], n_used: int, spread: float, normed: bool) -> float:
    """Return the sum of the squared routing weights of a token's experts, averaged over tokens.

    The router is random. It adds noise from N(0, 1) to the bias of each expert, multiplies the sum
    by `spread`, and applies softmax. The routing weights of a token are the n_used largest results.

    bias: bias of each expert.
    normed: whether the weights of a token are scaled to sum to 1.
    """
    noise = np.random.default_rng(20_27).standard_normal((2048, len(bias)))
    p = np.exp(spread * (noise + bias))
    p = np.sort(p / p.sum(axis=1, keepdims=True), axis=1)[:, -n_used:]
    if normed:
        p /= p.sum(axis=1, keepdims=True)
    return float((p**2).sum(axis=1).mean())
