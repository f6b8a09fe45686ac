"""The demo model in torch: a Qwen3-MoE language model written for training on a CPU.

Parameters are float32; products run in bfloat16. Each layer keeps its experts in two
stacked tensors, `gate_up` [E, d, 2f] and `down` [E, f, d], so that one expert is one
contiguous matrix and a step needs two products per expert and direction. Tokens are
sorted by expert once per layer; every gather then has a matching gather (never a scatter)
in the backward pass.

`export.py` turns the parameters into the names and shapes of a Hugging Face checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

# Rows of an expert are padded to a multiple of this.
_ROW_STEP = 128


@dataclass(frozen=True)
class ModelConfig:
    """Shape of the model; names follow the Hugging Face configuration where one exists."""

    vocab_size: int = 6144
    hidden_size: int = 256
    num_layers: int = 8
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    num_experts: int = 16
    num_experts_per_tok: int = 4
    moe_intermediate_size: int = 256
    rope_theta: float = 10_000.0
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 1024
    aux_loss_coef: float = 0.01
    z_loss_coef: float = 1e-4

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> ModelConfig:
        known = {f.name for f in fields(cls)}
        unknown = set(values) - known
        if unknown:
            raise ValueError(f"unknown model settings: {', '.join(sorted(unknown))}")
        return cls(**values)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm in float32, returned in the type of `x`."""
    xf = x.float()
    xf = xf * torch.rsqrt(xf.pow(2).mean(-1, keepdim=True) + eps)
    return (xf * weight).to(x.dtype)


def _swiglu(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (F.silu(gate) * up).to(gate_up.dtype)


def _swiglu_backward(gate_up: Tensor, dh: Tensor) -> tuple[Tensor, Tensor]:
    """Gradient of `gate_up`, and the activation again (cheaper than keeping it)."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    dhf = dh.float()
    sig = torch.sigmoid(gate)
    act = gate * sig
    dgate = dhf * up * (sig + act * (1 - sig))
    return torch.cat([dgate, dhf * act], dim=-1).to(dh.dtype), (act * up).to(dh.dtype)


def _combine(y: Tensor, place: Tensor, weight: Tensor) -> Tensor:
    """out[n] = sum_k weight[n, k] * y[place[n, k]]; place [N, k] indexes sorted rows."""
    out = y[place[:, 0]].float() * weight[:, 0:1]
    for j in range(1, place.shape[1]):
        out = out + y[place[:, j]].float() * weight[:, j : j + 1]
    return out.to(y.dtype)


def _combine_backward(
    dout: Tensor, y: Tensor, token: Tensor, row_weight: Tensor
) -> tuple[Tensor, Tensor]:
    """Per sorted row: gradient of the expert output, and of its routing weight."""
    g = dout[token].float()
    return (g * row_weight[:, None]).to(dout.dtype), (g * y.float()).sum(-1)


def _gather_sum(rows: Tensor, place: Tensor) -> Tensor:
    out = rows[place[:, 0]].float()
    for j in range(1, place.shape[1]):
        out = out + rows[place[:, j]].float()
    return out.to(rows.dtype)


class Kernels:
    """The elementwise pieces, compiled when asked for; one instance per process."""

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


def _sort_by_expert(
    ids: Tensor, weight: Tensor, experts: int
) -> tuple[list[int], Tensor, Tensor, Tensor]:
    """Rows sorted by expert: bounds [E + 1], place [N, k], token [R] and weight [R] of a row.

    Each expert's rows are padded to a multiple of `_ROW_STEP` with rows of weight 0: oneDNN
    compiles a kernel for each new matrix size, which would cost more than the product. R is
    fixed, so rows behind the last expert exist and mean nothing.
    """
    flat = ids.reshape(-1).to(torch.uint8).numpy()
    count = np.bincount(flat, minlength=experts)
    size = -(-count // _ROW_STEP) * _ROW_STEP
    bounds = np.concatenate([[0], np.cumsum(size)])
    order = np.argsort(flat, kind="stable")
    shift = bounds[:-1] - np.concatenate([[0], np.cumsum(count)[:-1]])
    row = np.arange(len(flat)) + np.repeat(shift, count)
    place = np.empty(len(flat), np.int64)
    place[order] = row
    token = np.zeros(len(flat) + experts * _ROW_STEP, np.int64)
    token[row] = order // ids.shape[1]
    row_weight = torch.zeros(len(token))
    row_weight[torch.from_numpy(row)] = weight.reshape(-1)[torch.from_numpy(order)]
    places = torch.from_numpy(place).view_as(ids)
    return bounds.tolist(), places, torch.from_numpy(token), row_weight


class _Experts(torch.autograd.Function):
    """All experts of one layer on tokens sorted by expert."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        x: Tensor,
        ids: Tensor,
        weight: Tensor,
        gate_up_w: Tensor,
        down_w: Tensor,
        kernels: Kernels,
    ) -> Tensor:
        experts = gate_up_w.shape[0]
        bounds, place, token, row_weight = _sort_by_expert(ids, weight, experts)
        rows = x.index_select(0, token)
        gate_up = rows.new_empty(rows.shape[0], gate_up_w.shape[2])
        y = torch.empty_like(rows)
        for e in range(experts):
            s, t = bounds[e], bounds[e + 1]
            if s < t:
                torch.mm(rows[s:t], gate_up_w[e], out=gate_up[s:t])
        h = kernels.swiglu(gate_up)
        for e in range(experts):
            s, t = bounds[e], bounds[e + 1]
            if s < t:
                torch.mm(h[s:t], down_w[e], out=y[s:t])
        ctx.save_for_backward(rows, gate_up, y, token, place, row_weight, gate_up_w, down_w)
        ctx.bounds, ctx.kernels = bounds, kernels
        return kernels.combine(y, place, weight)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        rows, gate_up, y, token, place, row_weight, gate_up_w, down_w = ctx.saved_tensors
        bounds, kernels = ctx.bounds, ctx.kernels
        experts = gate_up_w.shape[0]
        dy, drow_weight = kernels.combine_backward(dout.contiguous(), y, token, row_weight)
        dh = dy.new_empty(dy.shape[0], down_w.shape[1])
        for e in range(experts):
            s, t = bounds[e], bounds[e + 1]
            if s < t:
                torch.mm(dy[s:t], down_w[e].t(), out=dh[s:t])
        dgate_up, h = kernels.swiglu_backward(gate_up, dh)
        drows = torch.empty_like(rows)
        dgate_up_w, ddown_w = torch.zeros_like(gate_up_w), torch.zeros_like(down_w)
        for e in range(experts):
            s, t = bounds[e], bounds[e + 1]
            if s < t:
                torch.mm(h[s:t].t(), dy[s:t], out=ddown_w[e])
                torch.mm(dgate_up[s:t], gate_up_w[e].t(), out=drows[s:t])
                torch.mm(rows[s:t].t(), dgate_up[s:t], out=dgate_up_w[e])
        dx = kernels.gather_sum(drows, place)
        return dx, None, drow_weight[place], dgate_up_w, ddown_w, None


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
    """Queries [B*K, G*T, D], keys and values [B*K, T, D]: K kv heads, G queries for each."""
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
    """Masked softmax of [B*K, G*T, T] scores; mask [B, T, T] is 0 or 1.

    The row maximum is not subtracted: queries and keys are normalised, so a score stays
    near sqrt(D), and a pass over the scores is saved.
    """
    batch, length, _ = mask.shape
    s = score.view(batch, -1, length, length).float() * scale
    e = torch.exp(s.clamp(max=60.0)) * mask[:, None]
    return (e * (1 / e.sum(-1, keepdim=True))).to(score.dtype).view_as(score)


def _softmax_backward(prob: Tensor, dprob: Tensor, scale: float) -> Tensor:
    p, d = prob.float(), dprob.float()
    return (p * (d - (p * d).sum(-1, keepdim=True)) * scale).to(prob.dtype)


class _Attention(torch.autograd.Function):
    """Plain attention: for short rows, two products beat the fused kernel of the CPU."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, kernels: Kernels
    ) -> Tensor:
        scale = q.shape[-1] ** -0.5
        prob = kernels.softmax(torch.bmm(q, k.transpose(1, 2)), mask, scale)
        ctx.save_for_backward(q, k, v, prob)
        ctx.kernels, ctx.scale = kernels, scale
        return torch.bmm(prob, v)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        q, k, v, prob = ctx.saved_tensors
        dprob = torch.bmm(dout, v.transpose(1, 2))
        dv = torch.bmm(prob.transpose(1, 2), dout)
        dscore = ctx.kernels.softmax_backward(prob, dprob, ctx.scale)
        dq = torch.bmm(dscore, k)
        return dq, torch.bmm(dscore.transpose(1, 2), q), dv, None, None


def _attention_out(
    x: Tensor,
    a: Tensor,
    out_w: Tensor,
    norm: Tensor,
    router_w: Tensor,
    dims: tuple[int, int, int, float],
) -> tuple[Tensor, Tensor, Tensor]:
    """(residual stream, router input, router logits) from the attention output."""
    heads, _, head_dim, eps = dims
    batch, length, _ = x.shape
    a = a.view(batch, heads, length, head_dim).transpose(1, 2)
    x = x + a.reshape(batch, length, heads * head_dim) @ out_w
    h = rms_norm(x, norm, eps)
    return x, h, h.float() @ router_w


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of [B, T, H, D] with the two halves of D as pairs."""
    a, b = x.float().chunk(2, dim=-1)
    c, s = cos[None, :, None, :], sin[None, :, None, :]
    return torch.cat([a * c - b * s, b * c + a * s], dim=-1).to(x.dtype)


def _chunk_loss(logits: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Per row: log of the partition function, and weight * softmax."""
    x = logits.float()
    top = x.amax(-1, keepdim=True)
    e = torch.exp(x - top)
    total = e.sum(-1, keepdim=True)
    return (total.log() + top).squeeze(-1), (e * (weight[:, None] / total)).to(logits.dtype)


class _HeadLoss(torch.autograd.Function):
    """Tied output head and cross-entropy in chunks; logits are never kept."""

    CHUNK = 1024

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, h: Tensor, table: Tensor, target: Tensor, weight: Tensor, kernels: Kernels
    ) -> Tensor:
        loss = torch.zeros(())
        dh = torch.empty_like(h)
        dtable = torch.zeros(table.shape, dtype=torch.float32)
        for s in range(0, h.shape[0], _HeadLoss.CHUNK):
            t = s + _HeadLoss.CHUNK
            logits = h[s:t] @ table.t()
            goal, w = target[s:t, None], weight[s:t]
            log_total, grad = kernels.chunk_loss(logits, w)
            loss += ((log_total - logits.gather(1, goal).squeeze(1).float()) * w).sum()
            grad.scatter_add_(1, goal, -w[:, None].to(grad.dtype))
            torch.mm(grad, table, out=dh[s:t])
            dtable += grad.t() @ h[s:t]
        ctx.save_for_backward(dh, dtable)
        return loss

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        dh, dtable = ctx.saved_tensors
        return dh * dloss, dtable * dloss, None, None, None


class Layer(nn.Module):
    """Parameters of one decoder layer; all matrices are stored input-major."""

    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__()
        d, f = cfg.hidden_size, cfg.moe_intermediate_size
        q, kv = cfg.num_heads * cfg.head_dim, cfg.num_kv_heads * cfg.head_dim
        std, deep = d**-0.5, 1 / math.sqrt(2 * cfg.num_layers)
        self.norm_in = nn.Parameter(torch.ones(d))
        self.norm_post = nn.Parameter(torch.ones(d))
        self.q_norm = nn.Parameter(torch.ones(cfg.head_dim))
        self.k_norm = nn.Parameter(torch.ones(cfg.head_dim))
        self.qkv = nn.Parameter(torch.randn(d, q + 2 * kv) * std)
        self.out = nn.Parameter(torch.randn(q, d) * q**-0.5 * deep)
        self.router = nn.Parameter(torch.randn(d, cfg.num_experts) * 0.02)
        self.gate_up = nn.Parameter(torch.randn(cfg.num_experts, d, 2 * f) * std)
        self.down = nn.Parameter(torch.randn(cfg.num_experts, f, d) * f**-0.5 * deep)


class DemoModel(nn.Module):
    """Decoder with tied embeddings; `loss` trains it, `logits` evaluates it."""

    def __init__(self, cfg: ModelConfig, *, compiled: bool = False) -> None:
        super().__init__()
        if cfg.num_experts > 256:
            raise ValueError("expert ids are sorted as bytes: at most 256 experts a layer")
        self.cfg = cfg
        self.kernels = Kernels(compiled)
        self.embed = nn.Parameter(torch.randn(cfg.vocab_size, cfg.hidden_size) * 0.02)
        self.layers = nn.ModuleList(Layer(cfg) for _ in range(cfg.num_layers))
        self.norm = nn.Parameter(torch.ones(cfg.hidden_size))
        pos = torch.arange(cfg.max_position_embeddings, dtype=torch.float32)
        freq = cfg.rope_theta ** -(
            torch.arange(0, cfg.head_dim, 2, dtype=torch.float32) / cfg.head_dim
        )
        angle = pos[:, None] * freq[None, :]
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)

    def hidden(
        self, tokens: Tensor, doc: Tensor | None = None, dtype: torch.dtype = torch.bfloat16
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Final hidden states [B, T, d], balance loss, and expert load [L, E] (shares).

        `doc` [B, T] numbers the documents packed into a row: a token attends only to
        earlier tokens of its own document.
        """
        cfg = self.cfg
        batch, length = tokens.shape
        k, experts = cfg.num_experts_per_tok, cfg.num_experts
        dims = (cfg.num_heads, cfg.num_kv_heads, cfg.head_dim, cfg.rms_norm_eps)
        causal = torch.ones(length, length, dtype=torch.bool).tril()[None]
        if doc is not None:
            causal = causal & (doc[:, :, None] == doc[:, None, :])
        mask = causal.to(dtype).expand(batch, length, length)
        cos, sin = self.cos[:length], self.sin[:length]
        x = F.embedding(tokens, self.embed).to(dtype)
        aux = torch.zeros(())
        loads = []
        for layer in self.layers:
            q, key, v = self.kernels.attention_in(
                x, layer.norm_in, layer.qkv.to(dtype), layer.q_norm, layer.k_norm, cos, sin, dims
            )
            a = _Attention.apply(q, key, v, mask, self.kernels)
            x, h, router = self.kernels.attention_out(
                x, a, layer.out.to(dtype), layer.norm_post, layer.router, dims
            )
            router = router.view(-1, experts)
            prob = router.softmax(-1)
            top, ids = prob.topk(k, dim=-1)
            weight = top / top.sum(-1, keepdim=True)
            load = torch.bincount(ids.reshape(-1), minlength=experts).float() / ids.numel()
            aux = aux + cfg.aux_loss_coef * experts * (load * prob.mean(0)).sum()
            aux = aux + cfg.z_loss_coef * router.logsumexp(-1).pow(2).mean()
            loads.append(load)
            moe = _Experts.apply(
                h.view(-1, cfg.hidden_size), ids, weight,
                layer.gate_up.to(dtype), layer.down.to(dtype), self.kernels,
            )  # fmt: skip
            x = x + moe.view_as(x)
        return rms_norm(x, self.norm, cfg.rms_norm_eps), aux / cfg.num_layers, torch.stack(loads)

    def loss(
        self, tokens: Tensor, doc: Tensor, target: Tensor, weight: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(mean cross-entropy over weighted positions, balance loss, expert load [L, E])."""
        h, aux, load = self.hidden(tokens, doc)
        keep = weight.reshape(-1).nonzero().squeeze(-1)
        # Padding to whole chunks keeps the shape of the compiled loss fixed.
        pad = -keep.numel() % _HeadLoss.CHUNK
        w = weight.reshape(-1)[keep]
        w = F.pad(w / w.sum(), (0, pad))
        keep = F.pad(keep, (0, pad))
        rows = h.reshape(-1, h.shape[-1]).index_select(0, keep)
        goal = target.reshape(-1)[keep]
        loss = _HeadLoss.apply(rows, self.embed.to(h.dtype), goal, w, self.kernels)
        return loss, aux, load

    @torch.no_grad()
    def logits(self, tokens: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """Logits [B, T, V] in float32."""
        h, _, _ = self.hidden(tokens, dtype=dtype)
        return h.float() @ self.embed.float().t()
