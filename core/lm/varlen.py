"""CUDA: one attention kernel over all sessions of a forward, reading the arena through a block table.

flash-attn's kernel if it is installed, else the one in torch; float16 and bfloat16 only. A kernel is tried against
plain attention when a model loads, because releases and GPUs differ in what they support.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F

from paceline.core.lm.arena import PAGE, Arena
from paceline.core.model import Segment, Span

log = logging.getLogger(__name__)


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


# (query [ΣT, heads, dim], keys and values [pages, 256, kv_heads, dim], tables, scaling, keys to the left or -1)
Kernel = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Tables, float, int], torch.Tensor]


def varlen_attention(
    kernel: Kernel,
    arena: Arena,
    tables: Tables,
    layer: int,
    query: torch.Tensor,
    heads: int,
    scaling: float,
    window: int | None,
) -> torch.Tensor:
    """Causal attention of query [ΣT, ≥ heads·dim] over the arena → [ΣT, heads·dim]."""
    pages = arena.kv[layer].view(-1, PAGE, 2, arena.kv_heads, arena.head_dim)
    rows = query[:, : heads * arena.head_dim].reshape(-1, heads, arena.head_dim)
    left = -1 if window is None else window - 1
    return kernel(rows, pages[:, :, 0], pages[:, :, 1], tables, scaling, left).reshape(-1, heads * arena.head_dim)


def pick(heads: int, kv_heads: int, dim: int, dtype: torch.dtype, device: torch.device) -> Kernel | None:
    """The first installed kernel that gives what plain attention gives here; None on a CPU and in full precision."""
    if device.type != "cuda" or dtype not in (torch.float16, torch.bfloat16):
        return None
    for name, kernel in _installed():
        try:
            if _agrees(kernel, heads, kv_heads, dim, dtype, device):
                return kernel
            log.warning("attention kernel %s gives wrong values on %s: not used", name, device)
        except (RuntimeError, TypeError, ValueError) as error:
            log.warning("attention kernel %s does not run on %s: %s", name, device, error)
    log.warning("no attention kernel reads a block table here: one call a session instead")
    return None


def _agrees(kernel: Kernel, heads: int, kv_heads: int, dim: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Two queries at the end of 300 keys, which lie in the second and third of three pages."""
    pages = torch.randn(3, PAGE, 2, kv_heads, dim, dtype=dtype, device=device)
    query = torch.randn(2, heads, dim, dtype=dtype, device=device)
    tables = Tables.of([Segment(Span(0, PAGE, 2 * PAGE), 298, [0, 0], 0)], device)
    got = kernel(query, pages[:, :, 0], pages[:, :, 1], tables, dim**-0.5, -1)
    key, value = pages[1:].flatten(0, 1)[:300].unbind(1)
    mask = torch.ones(2, 300, dtype=torch.bool, device=device).tril(298)
    expected = F.scaled_dot_product_attention(
        query.transpose(0, 1)[None], key.transpose(0, 1)[None], value.transpose(0, 1)[None], mask, enable_gqa=True
    )[0].transpose(0, 1)
    return torch.allclose(got.float(), expected.float(), rtol=0, atol=0.05)


def _installed() -> Iterator[tuple[str, Kernel]]:
    try:
        from flash_attn import flash_attn_varlen_func  # type: ignore[import-not-found,unused-ignore]

        yield "flash-attn", lambda q, k, v, t, scaling, left: flash_attn_varlen_func(
            q, k, v, t.queries, t.keys, t.longest_query, t.longest_key,
            softmax_scale=scaling, causal=True, window_size=(left, 0), block_table=t.blocks,
        )  # fmt: skip
    except ImportError:
        pass
    try:
        from torch.nn.attention import varlen
    except ImportError:
        return
    call: Any = varlen.varlen_attn
    if "block_table" in inspect.signature(call).parameters:
        yield "torch varlen", lambda q, k, v, t, scaling, left: call(
            q, k, v, t.queries, t.keys, t.longest_query, t.longest_key,
            scale=scaling, window_size=(left, 0), enable_gqa=True, seqused_k=t.used, block_table=t.blocks,
        )  # fmt: skip
