"""A causal language model that runs packed forwards over a KV arena."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from paceline.core.lm.arena import Arena
from paceline.core.lm.attention import Packing, register
from paceline.core.lm.fuse import FusedForward
from paceline.core.lm.varlen import pick
from paceline.core.model import Segment, Span


class LanguageModel:
    """A transformers causal language model over an arena; implements `core.model.PackedModel`.

    Not thread-safe: one engine thread a model. Several models may run in several threads of one process.
    """

    def __init__(self, module: Any, arena: Arena, *, name: str, max_context: int, fused: FusedForward | None) -> None:
        self.name = name
        self.vocabulary_size: int = module.get_output_embeddings().weight.shape[0]
        self.max_context = max_context
        self.kv_slots = arena.slots
        self.arena = arena
        self.module = module
        self._fused = fused
        heads: int = module.config.num_attention_heads
        self._kernel = pick(heads, arena.kv_heads, arena.head_dim, arena.kv.dtype, arena.kv.device)
        module.set_attn_implementation(register())
        # A mask that is 4-D already is passed through by transformers; else it would build one of ΣT × ΣT.
        self._no_mask = torch.zeros(1, 1, 1, 1, device=arena.kv.device)

    @property
    def fused(self) -> bool:
        """Whether the forward runs on fused weights (see fuse.py) instead of the module's own code."""
        return self._fused is not None

    def allocate(self, length: int) -> Span | None:
        """A span for a session of at most `length` tokens; None when there is no room now."""
        return self.arena.allocate(length)

    def free(self, span: Span) -> None:
        """Gives a span back."""
        self.arena.free(span)

    @torch.inference_mode()
    def copy(self, source: Span, target: Span, start: int, stop: int) -> None:
        """Copies the KV of the tokens `start … stop` from one span to the same places in another."""
        self.arena.copy(source, target, start, stop)

    @torch.inference_mode()
    def forward(self, segments: Sequence[Segment]) -> torch.Tensor:
        """One pass over all segments: logits [sum of rows, vocabulary_size], in order.

        float32, in a float64 model float64.

        Raises ValueError for a segment that leaves its span or holds an id outside the vocabulary; nothing is
        written then.
        """
        for segment in segments:
            self._check(segment)
        if not segments:
            return torch.empty(0, self.vocabulary_size)
        packing = Packing(self.arena, segments, self._kernel)
        if self._fused is not None:
            logits = self._fused(packing)
        else:
            logits = self.module(
                input_ids=packing.ids[None],
                position_ids=packing.positions[None],
                attention_mask=self._no_mask,
                use_cache=False,
                logits_to_keep=packing.rows,
                packing=packing,
            ).logits[0]
        return logits if logits.dtype == torch.float64 else logits.float()

    def _check(self, segment: Segment) -> None:
        stop, tokens = segment.start + len(segment.tokens), segment.tokens
        if not self.arena.holds(segment.span):
            raise ValueError(f"{segment.span} is not held in this arena")
        if not tokens or segment.start < 0 or stop > min(segment.span.size, self.max_context):
            room = min(segment.span.size, self.max_context)
            raise ValueError(f"tokens {segment.start}…{stop} of a session with room for {room}")
        if not 0 <= segment.rows <= len(tokens):
            raise ValueError(f"{segment.rows} rows of {len(tokens)} tokens")
        if min(tokens) < 0 or max(tokens) >= self.vocabulary_size:
            raise ValueError(f"a token id outside 0…{self.vocabulary_size - 1}")
