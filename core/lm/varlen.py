"""CUDA: one attention kernel over all sessions of a forward, reading the arena through a block table.

flash-attn's kernel if it is installed, else the one in torch; float16 and bfloat16 only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from paceline.core.lm.arena import PAGE, Arena
from paceline.core.model import Segment


@dataclass(frozen=True)
class Tables:
    """int32 tensors: query and key offsets [n + 1], keys in use [n], pages [n, most pages of a session]."""

    queries: torch.Tensor
    keys: torch.Tensor
    used: torch.Tensor
    blocks: torch.Tensor
    longest_query: int
    longest_key: int

    @classmethod
    def of(cls, segments: Sequence[Segment], device: torch.device) -> Tables:
        """The tables of one forward; `segments` in the order of its tokens."""
        lengths = [len(s.tokens) for s in segments]
        used = [s.start + len(s.tokens) for s in segments]
        width = -(-max(used) // PAGE)
        # A row is padded with the span's own first page: never read, always valid.
        pages = [
            [s.span.first // PAGE + (page if page * PAGE < s.span.size else 0) for page in range(width)]
            for s in segments
        ]

        def table(values: Any) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int32, device=device)

        offsets, key_offsets = [0, *accumulate(lengths)], [0, *accumulate(used)]
        return cls(table(offsets), table(key_offsets), table(used), table(pages), max(lengths), max(used))


def varlen_attention(
    arena: Arena, tables: Tables, layer: int, query: torch.Tensor, heads: int, scaling: float, window: int | None
) -> torch.Tensor | None:
    """Attention of query [ΣT, ≥ heads·dim] → [ΣT, heads·dim]; None when no kernel is installed that can do it."""
    kernel = _kernel()
    if kernel is None or query.dtype not in (torch.float16, torch.bfloat16) or arena.head_dim > 256:
        return None
    pages = arena.kv[layer].view(-1, PAGE, 2, arena.kv_heads, arena.head_dim)
    rows = query[:, : heads * arena.head_dim].reshape(-1, heads, arena.head_dim)
    out = kernel(rows, pages[:, :, 0], pages[:, :, 1], tables, scaling, (-1 if window is None else window - 1, 0))
    attended: torch.Tensor = out.reshape(-1, heads * arena.head_dim)
    return attended


def _kernel() -> Any | None:
    try:
        from flash_attn import flash_attn_varlen_func  # type: ignore[import-not-found,unused-ignore]

        return lambda q, k, v, t, scaling, window: flash_attn_varlen_func(
            q, k, v, t.queries, t.keys, t.longest_query, t.longest_key,
            softmax_scale=scaling, causal=True, window_size=window, block_table=t.blocks,
        )  # fmt: skip
    except ImportError:
        pass
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return lambda q, k, v, t, scaling, window: varlen_attn(
        q, k, v, t.queries, t.keys, t.longest_query, t.longest_key,
        scale=scaling, window_size=window, enable_gqa=True, seqused_k=t.used, block_table=t.blocks,
    )  # fmt: skip
