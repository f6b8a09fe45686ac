"""Elementwise kernels of the demo model's layers, forward and backward, and their compilation.

Parameters are float32. Matrix products use bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return `x` after a root-mean-square norm. It is computed in float32."""
    xf = x.float()
    xf = xf * torch.rsqrt(xf.pow(2).mean(-1, keepdim=True) + eps)
    return (xf * weight).to(x.dtype)


def _swiglu(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (F.silu(gate) * up).to(gate_up.dtype)


def _swiglu_backward(gate_up: Tensor, dh: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradient of `gate_up`, and the output of SwiGLU.

    `dh` is the gradient of that output. The output is computed again, because that costs less than
    storing it in the forward pass.
    """
    gate, up = gate_up.float().chunk(2, dim=-1)
    dhf = dh.float()
    sig = torch.sigmoid(gate)
    act = gate * sig
    dgate = dhf * up * (sig + act * (1 - sig))
    return torch.cat([dgate, dhf * act], dim=-1).to(dh.dtype), (act * up).to(dh.dtype)


def _combine(y: Tensor, place: Tensor, weight: Tensor) -> Tensor:
    """Sum the outputs of each token's experts, multiplied by the routing weights.

    out[n] = sum over k of weight[n, k] * y[place[n, k]]. The rows of y are sorted by expert. place
    [N, k] has the row of each token and expert.
    """
    out = y[place[:, 0]].float() * weight[:, 0:1]
    for j in range(1, place.shape[1]):
        out = out + y[place[:, j]].float() * weight[:, j : j + 1]
    return out.to(y.dtype)


def _combine_backward(
    dout: Tensor, y: Tensor, token: Tensor, row_weight: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients of the expert outputs and of the routing weights.

    Each has one row per pair of token and expert, sorted by expert.
    """
    g = dout[token].float()
    return (g * row_weight[:, None]).to(dout.dtype), (g * y.float()).sum(-1)


def _gather_sum(rows: Tensor, place: Tensor) -> Tensor:
    out = rows[place[:, 0]].float()
    for j in range(1, place.shape[1]):
        out = out + rows[place[:, j]].float()
    return out.to(rows.dtype)


def _attention_in(
    x: Tensor,
    norm: Tensor,
    qkv_w: Tensor,
    q_norm: Tensor,
    k_norm: Tensor,
    cos: Tensor,
    sin: Tensor,
    dims: tuple[int, int, int, float],
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the queries, keys and values of an attention layer, from its input x [B, T, d].

    Queries are [B*K, G*T, D] for K key heads with G query heads each. Keys and values are [B*K, T,
    D].
    """
    heads, kv_heads, head_dim, eps = dims
    batch, length, _ = x.shape
    group = heads // kv_heads
    qkv = rms_norm(x, norm, eps) @ qkv_w
    q, k, v = qkv.split([heads * head_dim, kv_heads * head_dim, kv_heads * head_dim], dim=-1)
    q = _rotate(rms_norm(q.view(batch, length, heads, head_dim), q_norm, eps), cos, sin)
    k = _rotate(rms_norm(k.view(batch, length, kv_heads, head_dim), k_norm, eps), cos, sin)
    v = v.view(batch, length, kv_heads, head_dim)
    q = q.transpose(1, 2).reshape(batch * kv_heads, group * length, head_dim)
    k = k.transpose(1, 2).reshape(batch * kv_heads, length, head_dim)
    return q, k, v.transpose(1, 2).reshape(batch * kv_heads, length, head_dim)


def _softmax(score: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Return the softmax of scores [B*K, G*T, T] over the tokens that `mask` [B, T, T] permits.

    The row maximum is not subtracted, which saves a pass over the scores. This is safe, because
    queries and keys are normalized and scores are at most about sqrt(D).
    """
    batch, length, _ = mask.shape
    s = score.view(batch, -1, length, length).float() * scale
    e = torch.exp(s.clamp(max=60.0)) * mask[:, None]
    return (e * (1 / e.sum(-1, keepdim=True))).to(score.dtype).view_as(score)


def _softmax_backward(prob: Tensor, dprob: Tensor, scale: float) -> Tensor:
    p, d = prob.float(), dprob.float()
    return (p * (d - (p * d).sum(-1, keepdim=True)) * scale).to(prob.dtype)


def _attention_out(
    x: Tensor,
    a: Tensor,
    out_w: Tensor,
    norm: Tensor,
    router_w: Tensor,
    dims: tuple[int, int, int, float],
) -> tuple[Tensor, Tensor, Tensor]:
    """Return residual stream, router input and router logits from an attention output `a`."""
    heads, _, head_dim, eps = dims
    batch, length, _ = x.shape
    a = a.view(batch, heads, length, head_dim).transpose(1, 2)
    x = x + a.reshape(batch, length, heads * head_dim) @ out_w
    h = rms_norm(x, norm, eps)
    return x, h, h.float() @ router_w


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary position embeddings to x [B, T, H, D].

    Each pair has one element from the first half of D and one from the second half.
    """
    a, b = x.float().chunk(2, dim=-1)
    c, s = cos[None, :, None, :], sin[None, :, None, :]
    return torch.cat([a * c - b * s, b * c + a * s], dim=-1).to(x.dtype)


def _chunk_loss(logits: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return, for each row of logits, the log of the partition function, and weight * softmax."""
    x = logits.float()
    top = x.amax(-1, keepdim=True)
    e = torch.exp(x - top)
    total = e.sum(-1, keepdim=True)
    return (total.log() + top).squeeze(-1), (e * (weight[:, None] / total)).to(logits.dtype)


class Kernels:
    """The elementwise functions of the model, compiled with torch if requested.

    Each process has one instance.
    """

    def __init__(self, compiled: bool) -> None:
        wrap: Callable[..., Any] = (
            (lambda f: torch.compile(f, dynamic=False)) if compiled else (lambda f: f)
        )
        self.compiled = compiled
        self.swiglu = wrap(_swiglu)
        self.swiglu_backward = wrap(_swiglu_backward)
        self.combine = wrap(_combine)
        self.combine_backward = wrap(_combine_backward)
        self.gather_sum = wrap(_gather_sum)
        self.attention_in = wrap(_attention_in)
        self.attention_out = wrap(_attention_out)
        self.softmax = wrap(_softmax)
        self.softmax_backward = wrap(_softmax_backward)
        self.chunk_loss = wrap(_chunk_loss)
