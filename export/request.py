"""An export's options with the defaults that this model gives them; what does not go together with it is refused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from paceline.core.errors import UserError
from paceline.core.lm.loading import check_family
from paceline.core.manifest import Dtype, Profile, RuntimeName
from paceline.export import graph_family
from paceline.export.options import Request, choose
from paceline.export.source import Source

GRAPH_CONTEXT = 2048  # a topology's default; a graph's rows take memory for all of it


@dataclass(frozen=True)
class Resolved:
    """A request without anything open. profile is None for torch."""

    request: Request
    runtime: RuntimeName
    profile: Profile | None
    dtype: Dtype
    max_context: int


def resolve(request: Request, source: Source) -> Resolved:
    """Raises UserError, one sentence, for options that contradict each other or the model; UnsupportedModel for a
    family that cannot be had."""
    choice = choose(request)
    if choice.profile is not None:
        graph_family.check(source.config)
    dtype = choice.dtype or _own_dtype(source)
    context = _context(request, source, None if choice.profile is None else GRAPH_CONTEXT)
    return Resolved(request, choice.runtime, choice.profile, dtype, context)


def _own_dtype(source: Source) -> Dtype:
    own = str(source.config.dtype or "float32").removeprefix("torch.")
    dtype: Dtype | None = next((known for known in get_args(Dtype) if known == own), None)
    if dtype is None:
        raise UserError(f"this model's weights are {own}: choose --dtype bfloat16, float16 or float32")
    return dtype


def _context(request: Request, source: Source, default: int | None) -> int:
    limit = int(source.config.max_position_embeddings)
    if request.max_context is not None and request.max_context > limit:
        raise UserError(f"--max-context {request.max_context}: this model has {limit} positions; ask for fewer")
    context = request.max_context or min(default or limit, limit)
    check_family(source.config, context)
    return context
