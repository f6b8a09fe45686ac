"""The optimizer: Muon for matrices, AdamW for embeddings, routers and norms."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from models.demo.model import DemoModel


def orthogonalise(g: Tensor, steps: int = 5) -> Tensor:
    """Nearest semi-orthogonal matrix of each [m, n] in a batch, by Newton-Schulz iteration.

    The quintic's coefficients are those of Jordan et al. (2024): singular values end near 1.
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    x = g.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.transpose(-2, -1)
    x = x / (x.float().norm(dim=(-2, -1), keepdim=True) + 1e-7).bfloat16()
    for _ in range(steps):
        s = x @ x.transpose(-2, -1)
        x = a * x + (b * s + c * (s @ s)) @ x
    return x.transpose(-2, -1) if tall else x


class Muon:
    """Momentum, orthogonalised per matrix; fused matrices are split along their columns."""

    def __init__(self, params: list[tuple[Tensor, int]], momentum: float, decay: float) -> None:
        self.params, self.momentum, self.decay = params, momentum, decay
        self.buffers = [torch.zeros_like(p) for p, _ in params]

    @torch.no_grad()
    def step(self, lr: float) -> None:
        for (p, pieces), buf in zip(self.params, self.buffers, strict=True):
            if p.grad is None:
                continue
            buf.mul_(self.momentum).add_(p.grad)
            update = p.grad + self.momentum * buf
            m = update if update.dim() == 3 else update[None]
            for part, target in zip(
                m.chunk(pieces, dim=-1), p.view_as(m).chunk(pieces, dim=-1), strict=True
            ):
                scale = max(1.0, part.shape[-1] / part.shape[-2]) ** 0.5
                target.mul_(1 - lr * self.decay)
                target.add_(orthogonalise(part).to(p.dtype), alpha=-lr * scale)


class Optimizer:
    """Both halves behind one `step`; `scale` in [0, 1] is the schedule's factor."""

    def __init__(self, model: DemoModel, muon_lr: float = 0.02, adam_lr: float = 3e-3) -> None:
        matrices: list[tuple[Tensor, int]] = []
        routers: list[Tensor] = []
        for layer in model.layers:
            # Four pieces keep queries (two) apart from keys and values.
            matrices += [(layer.qkv, 4), (layer.out, 1), (layer.gate_up, 2), (layer.down, 1)]
            routers.append(layer.router)
        known = {id(p) for p, _ in matrices} | {id(p) for p in routers} | {id(model.embed)}
        norms = [p for p in model.parameters() if id(p) not in known]
        self.muon, self.muon_lr = Muon(matrices, 0.95, 0.02), muon_lr
        self.adam = torch.optim.AdamW(
            [
                {"params": [model.embed], "base": adam_lr, "weight_decay": 0.01},
                {"params": routers, "base": adam_lr / 2, "weight_decay": 0.0},
                {"params": norms, "base": adam_lr / 2, "weight_decay": 0.0},
            ],
            lr=adam_lr,
            betas=(0.9, 0.97),
            fused=True,
        )

    def step(self, scale: float) -> None:
        for group in self.adam.param_groups:
            group["lr"] = group["base"] * scale
        plain = [p for g in self.adam.param_groups for p in g["params"]]
        torch.nn.utils.clip_grad_norm_(plain, 1.0)
        self.adam.step()
        self.muon.step(self.muon_lr * scale)

    def state_dict(self) -> dict[str, Any]:
        return {"adam": self.adam.state_dict(), "muon": self.muon.buffers}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.adam.load_state_dict(state["adam"])
        for buf, old in zip(self.muon.buffers, state["muon"], strict=True):
            buf.copy_(old)
