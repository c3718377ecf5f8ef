"""Muon for the hidden matrices, AdamW for the rest, and a learning-rate schedule over wall-clock time."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn


class Muon(torch.optim.Optimizer):
    """Momentum orthogonalised by Newton-Schulz steps (Jordan et al. 2024), matrices of one shape handled as a batch."""

    def __init__(self, matrices: Iterable[nn.Parameter], lr: float = 0.02, momentum: float = 0.95, decay: float = 0.03):
        shapes: dict[tuple[int, ...], list[nn.Parameter]] = {}
        for matrix in matrices:
            shapes.setdefault(tuple(matrix.shape), []).append(matrix)
        groups = [{"params": members} for members in shapes.values()]
        super().__init__(groups, {"lr": lr, "momentum": momentum, "decay": decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            members: list[nn.Parameter] = group["params"]
            updates = []
            for matrix in members:
                assert matrix.grad is not None
                state = self.state[matrix]
                momentum = state.setdefault("momentum", torch.zeros_like(matrix))
                momentum.lerp_(matrix.grad, 1 - group["momentum"])
                updates.append(matrix.grad.lerp(momentum, group["momentum"]))
            orthogonal = orthogonalise(torch.stack(updates))
            rows, columns = members[0].shape
            scale = max(1.0, rows / columns) ** 0.5
            for matrix, update in zip(members, orthogonal, strict=True):
                matrix.mul_(1 - group["lr"] * group["decay"]).add_(update, alpha=-group["lr"] * scale)


def orthogonalise(matrices: Tensor, steps: int = 5) -> Tensor:
    """Push all singular values of [n, rows, columns] towards 1 with the quintic iteration of Muon."""
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.mT if tall else x


def optimizers(model: nn.Module, muon_lr: float, adam_lr: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the layers, AdamW for embeddings and norms."""
    hidden = [p for name, p in model.named_parameters() if p.ndim == 2 and "layers." in name]
    chosen = {id(p) for p in hidden}
    rest = [p for p in model.parameters() if id(p) not in chosen]
    made: list[torch.optim.Optimizer] = [
        Muon(hidden, lr=muon_lr),
        torch.optim.AdamW(rest, lr=adam_lr, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    for optimizer in made:
        for group in optimizer.param_groups:
            group["peak"] = group["lr"]
    return made


def schedule(progress: float, warmup: float = 0.01, decay: float = 0.4) -> float:
    """Share of the peak learning rate at `progress` of the time, 0..1: warm-up, level, then a straight line to 0.01."""
    if progress < warmup:
        return max(progress / warmup, 0.02)
    if progress < 1 - decay:
        return 1.0
    return max((1 - progress) / decay, 0.01)


def set_rate(made: list[torch.optim.Optimizer], share: float) -> None:
    for optimizer in made:
        for group in optimizer.param_groups:
            group["lr"] = group["peak"] * share
