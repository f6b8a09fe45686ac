"""Matrix products of the demo model with hand-written backward passes: experts, attention, output.

Tokens are sorted by expert once per layer. The backward pass of each gather is also a gather, which
is faster than a scatter.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from models.demo.training.kernels import Kernels

# The number of rows of each expert is padded to a multiple of this number.
_ROW_STEP = 128


def _sort_by_expert(
    ids: Tensor, weight: Tensor, experts: int
) -> tuple[list[int], Tensor, Tensor, Tensor]:
    """Sort the (token, expert) pairs of N tokens with k experts each by expert.

    Returns four values: the bounds of each expert's rows [E + 1], the row of each pair [N, k], and
    the token [R] and the routing weight [R] of each row.

    The rows of each expert are padded to a multiple of `_ROW_STEP` with rows of weight 0. Otherwise
    oneDNN would compile a kernel for each new matrix size. R is constant, so unused rows follow
    those of the last expert.
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


class ExpertsFunction(torch.autograd.Function):
    """Computes all experts of a layer, and their gradients, for tokens sorted by expert."""

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


class AttentionFunction(torch.autograd.Function):
    """Computes attention, and its gradients, as plain matrix products.

    For short rows, two products are faster than the fused kernel of the CPU.
    """

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


class HeadLoss(torch.autograd.Function):
    """Computes the output matrix and the cross-entropy in chunks of rows.

    The logits of the whole batch are therefore never in memory.
    """

    CHUNK = 1024

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, h: Tensor, table: Tensor, target: Tensor, weight: Tensor, kernels: Kernels
    ) -> Tensor:
        loss = torch.zeros(())
        dh = torch.empty_like(h)
        dtable = torch.zeros(table.shape, dtype=torch.float32)
        for s in range(0, h.shape[0], HeadLoss.CHUNK):
            t = s + HeadLoss.CHUNK
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
