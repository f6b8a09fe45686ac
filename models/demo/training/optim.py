"""The optimizer: Muon for matrices, AdamW for embeddings, routers and norms."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from models.demo.training.model import DemoModel


def orthogonalise(g: Tensor, steps: int = 4) -> Tensor:
    """Return the nearest semi-orthogonal matrix of each [m, n] matrix, by Newton-Schulz iteration.

    The coefficients of the quintic polynomial are those of Jordan et al. (2024). All singular
    values end near 1.
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    x = g.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.transpose(-2, -1)
    x = x / (x.float().norm(dim=(-2, -1), keepdim=True) + 1e-7).bfloat16()
    for _ in range(steps):
        s = torch.bmm(x, x.transpose(-2, -1))
        x = torch.baddbmm(x, torch.baddbmm(s, s, s, beta=b, alpha=c), x, beta=a)
    return x.transpose(-2, -1) if tall else x


class Muon:
    """The Muon optimizer: momentum with orthogonalized updates.

    Fused matrices are split by columns first.
    """

    def __init__(
        self, params: list[tuple[Tensor, int, Tensor]], momentum: float, decay: float
    ) -> None:
        self.params, self.momentum, self.decay = params, momentum, decay

    @torch.no_grad()
    def step(self, lr: float) -> None:
        for p, pieces, buf in self.params:
            if p.grad is None:
                continue
            buf.mul_(self.momentum).add_(p.grad)
            update = p.grad.add(buf, alpha=self.momentum)
            m = update if update.dim() == 3 else update[None]
            for part, target in zip(
                m.chunk(pieces, dim=-1), p.view_as(m).chunk(pieces, dim=-1), strict=True
            ):
                scale = max(1.0, part.shape[-1] / part.shape[-2]) ** 0.5
                target.mul_(1 - lr * self.decay)
                target.add_(orthogonalise(part).to(p.dtype), alpha=-lr * scale)


class Optimizer:
    """Optimizes matrices with Muon and other parameters with AdamW, in several processes.

    Each process updates the parameters that it owns. Layers are distributed over the processes.
    Embeddings, routers and norms belong to rank 0.

    owned: indices into `model.parameters()`.
    momentum: Muon's buffers in the same order, in shared memory.
    """

    def __init__(
        self,
        model: DemoModel,
        rank: int,
        world: int,
        momentum: list[Tensor],
        muon_lr: float = 0.02,
        adam_lr: float = 3e-3,
    ) -> None:
        index = {id(p): i for i, p in enumerate(model.parameters())}
        matrices: list[tuple[Tensor, int]] = []
        routers: list[Tensor] = []
        everyone: set[int] = set()
        for n, layer in enumerate(model.layers):
            # Split the fused matrix into four: two for the queries, one for the keys, one for the
            # values.
            group = [(layer.qkv, 4), (layer.out, 1), (layer.gate_up, 2), (layer.down, 1)]
            everyone |= {id(p) for p, _ in group}
            routers.append(layer.router)
            if n % world == rank:
                matrices += group
        self.momentum = momentum
        self.muon = Muon([(p, k, momentum[index[id(p)]]) for p, k in matrices], 0.95, 0.02)
        self.muon_lr = muon_lr
        self.adam: torch.optim.AdamW | None = None
        self.plain: list[Tensor] = []
        if rank == 0:
            known = everyone | {id(p) for p in routers} | {id(model.embed)}
            norms = [p for p in model.parameters() if id(p) not in known]
            self.plain = [model.embed, *routers, *norms]
            self.adam = torch.optim.AdamW(
                [
                    {"params": [model.embed], "base": adam_lr, "weight_decay": 0.01},
                    {"params": routers + norms, "base": adam_lr / 2, "weight_decay": 0.0},
                ],
                lr=adam_lr,
                betas=(0.9, 0.97),
                fused=True,
            )
        self.owned = [index[id(p)] for p in [*(p for p, _ in matrices), *self.plain]]

    def step(self, scale: float) -> None:
        if self.adam is not None:
            for group in self.adam.param_groups:
                group["lr"] = group["base"] * scale
            torch.nn.utils.clip_grad_norm_(self.plain, 1.0)
            self.adam.step()
        self.muon.step(self.muon_lr * scale)

    def state_dict(self) -> dict[str, Any]:
        return {"adam": self.adam.state_dict() if self.adam else None, "muon": self.momentum}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the saved state of the optimizer. Only rank 0 calls this method.

        All processes share the buffers of Muon, and rank 0 owns all parameters of AdamW.
        """
        if self.adam is not None:
            self.adam.load_state_dict(state["adam"])
        for buf, old in zip(self.momentum, state["muon"], strict=True):
            buf.copy_(old)
