"""The KV arena: one preallocated block of memory that sessions hold contiguous spans of.

Layout `[layer, slot, key|value, kv_head, head_dim]`. Slots outermost, so that a session's past is a strided view
(never a copy) and CUDA kernels can read it through a block table of 256-slot pages; keys beside values, so that one
copy per layer writes both.
"""

from __future__ import annotations

import itertools

import torch

from paceline.core.errors import UserError
from paceline.core.model import Span

PAGE = 256  # slots; flash-attention's smallest page


class Arena:
    """KV memory for `slots` tokens (rounded down to whole pages) and who holds which part of it."""

    def __init__(
        self,
        *,
        layers: int,
        slots: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        self.layers, self.kv_heads, self.head_dim = layers, kv_heads, head_dim
        self.slots = slots // PAGE * PAGE
        self.slot_bytes = slot_bytes(layers, kv_heads, head_dim, dtype)
        if self.slots < PAGE:
            raise UserError(
                f"the KV memory holds {slots} tokens ({_mebibytes(slots * self.slot_bytes)}), but its smallest part is"
                f" {PAGE} tokens ({_mebibytes(PAGE * self.slot_bytes)}): raise kv_memory"
            )
        # Zeros, not empty: a batched read may cover slots nobody wrote, and masked NaN is still NaN. The operating
        # system hands out zeroed pages on first touch, so an unused part of the arena costs nothing.
        try:
            self.kv = torch.zeros(layers, self.slots, 2, kv_heads, head_dim, dtype=dtype, device=device)
        except RuntimeError as error:
            raise UserError(
                f"{device} has no room for the KV memory of {self.slots} tokens × {self.slot_bytes} bytes ="
                f" {_mebibytes(self.slots * self.slot_bytes)}: lower kv_memory"
            ) from error
        self.rows = [layer.view(self.slots, 2 * kv_heads * head_dim) for layer in self.kv]
        self.indices = torch.arange(self.slots, device=device)
        self._holes = [(0, self.slots)]  # (first, size), sorted, never touching each other
        self._held: dict[int, Span] = {}
        self._keys = itertools.count()

    @property
    def free_slots(self) -> int:
        """Slots that nobody holds; not necessarily contiguous."""
        return sum(size for _, size in self._holes)

    def holds(self, span: Span) -> bool:
        """Whether `span` was allocated here and not freed since."""
        return self._held.get(span.key) == span

    def allocate(self, length: int) -> Span | None:
        """The first hole that holds `length` tokens (rounded up to whole pages); None when there is none now.

        Raises UserError when the whole arena would be too small.
        """
        if length < 1:
            raise ValueError(f"a session of {length} tokens")
        size = -(-length // PAGE) * PAGE
        if size > self.slots:
            raise UserError(
                f"a session of {length} tokens needs {size} KV slots × {self.slot_bytes} bytes ="
                f" {_mebibytes(size * self.slot_bytes)}, more than the whole arena of {self.slots} slots"
                f" ({_mebibytes(self.slots * self.slot_bytes)}): raise kv_memory or lower max_context"
            )
        for index, (first, room) in enumerate(self._holes):
            if room >= size:
                self._holes[index : index + 1] = [(first + size, room - size)] if room > size else []
                span = Span(next(self._keys), first, size)
                self._held[span.key] = span
                return span
        return None

    def copy(self, source: Span, target: Span, start: int, stop: int) -> None:
        """The keys and values of the tokens `start … stop`, of all layers at once, to the same places of `target`."""
        if not (self.holds(source) and self.holds(target) and 0 <= start <= stop <= min(source.size, target.size)):
            raise ValueError(f"tokens {start}…{stop} of {source} to {target}: both must be held and have these places")
        self.kv[:, target.first + start : target.first + stop] = self.kv[:, source.first + start : source.first + stop]

    def free(self, span: Span) -> None:
        """Gives `span` back and joins the hole with its neighbours."""
        if not self.holds(span):
            raise ValueError(f"{span} is not held here")
        del self._held[span.key]
        joined: list[tuple[int, int]] = []
        for first, size in sorted([*self._holes, (span.first, span.size)]):
            if joined and sum(joined[-1]) == first:
                joined[-1] = (joined[-1][0], joined[-1][1] + size)
            else:
                joined.append((first, size))
        self._holes = joined


def slot_bytes(layers: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """Bytes that the keys and values of one token take over all layers."""
    return layers * 2 * kv_heads * head_dim * dtype.itemsize


def _mebibytes(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"
