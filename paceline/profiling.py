"""Step times of a model on this device: what an emulated node needs to stand in for it, and `plan` to predict."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from paceline.core.clock import Clock
from paceline.core.errors import UserError
from paceline.core.model import Segment, Span

CHUNK = 256  # tokens of a prompt in one pass
WARM_TURNS = 2


class Measured(Protocol):
    """A model, or a drafter's runtime."""

    def allocate(self, length: int) -> Span | None: ...

    def free(self, span: Span) -> None: ...

    def forward(self, segments: Sequence[Segment]) -> Any: ...


@dataclass(frozen=True)
class Measurement:
    """What `measure` found. times: milliseconds of each pass of a kind (step or verify) and a size.

    profile: the keys of a topology's `profile`. raised: (kind, size) → the median, where the profile has a smaller
    pass's longer one instead.
    """

    profile: dict[str, object]
    times: dict[tuple[str, int], list[float]]
    raised: dict[tuple[str, int], float]

    def spread(self, kind: str) -> dict[int, tuple[float, float]]:
        """By size: from the 10th to the 90th percentile."""
        return {size: spread(times) for (of, size), times in self.times.items() if of == kind}


def spread(times: list[float]) -> tuple[float, float]:
    """The 10th and the 90th percentile, each one of the times."""
    ordered = sorted(times)
    return ordered[(len(ordered) - 1) // 10], ordered[-1 - (len(ordered) - 1) // 10]


def measure(
    model: Measured,
    clock: Clock,
    *,
    context: int,
    sessions: int,
    draft_length: int | None,
    repeats: int,
    progress: Callable[[int], None] = lambda turns: None,
) -> Measurement:
    """A profile's step times in milliseconds: step_ms by sequences, verify_ms by tokens, prompt_token_ms.

    Every session holds `context` tokens. A step is one token of each of 1, 2, 4 … sequences; a verification is
    draft_length + 1 tokens of each; all kinds take turns, and the median of the repeats counts. draft_length: None
    for what only drafts, and has no verify_ms.
    """
    spans = _filled(model, sessions, context, draft_length)
    kinds = [*_kinds(spans, context, draft_length), ("chunk", CHUNK, [Segment(spans[0], 0, _tokens(CHUNK), 1)])]
    times: dict[tuple[str, int], list[float]] = {(kind, size): [] for kind, size, _ in kinds}
    for turn in range(WARM_TURNS + repeats):
        for kind, size, segments in kinds:
            start = clock.now()
            model.forward(segments)
            if turn >= WARM_TURNS:
                times[kind, size].append(1000.0 * (clock.now() - start))
        progress(1)
    for span in spans:
        model.free(span)
    found = {key: statistics.median(some) for key, some in times.items()}
    step = {size: round(ms, 3) for (kind, size), ms in found.items() if kind == "step"}
    verify = {size: round(ms, 3) for (kind, size), ms in found.items() if kind == "verify"}
    per_token = max(0.0, (found["chunk", CHUNK] - found["step", 1]) / (CHUNK - 1))
    curves = {"step": _rising(step), **({"verify": _rising({1: step[1], **verify})} if verify else {})}
    del times["chunk", CHUNK]
    profile: dict[str, object] = {f"{kind}_ms": curve for kind, curve in curves.items()}
    raised = {key: found[key] for key in times if curves[key[0]][key[1]] > round(found[key], 3)}
    return Measurement({**profile, "prompt_token_ms": round(per_token, 4)}, times, raised)


def turns(repeats: int) -> int:
    """How often `progress` is told."""
    return WARM_TURNS + repeats


def _kinds(spans: Sequence[Span], context: int, draft_length: int | None) -> Iterator[tuple[str, int, list[Segment]]]:
    for kind, tokens in (("step", 1), *([("verify", draft_length + 1)] if draft_length is not None else [])):
        count = 1
        while count <= len(spans):
            segments = [Segment(span, context, _tokens(tokens), tokens) for span in spans[:count]]
            yield kind, count if kind == "step" else count * tokens, segments
            count *= 2


def _filled(model: Measured, sessions: int, context: int, draft_length: int | None) -> list[Span]:
    spans = []
    for _ in range(sessions):
        span = model.allocate(max(context, CHUNK) + (draft_length or 0) + 1)
        if span is None:
            raise UserError(f"there is no room for {sessions} sessions of {context} tokens: ask for fewer, or shorter")
        spans.append(span)
        for start in range(0, context, CHUNK):
            model.forward([Segment(span, start, _tokens(min(CHUNK, context - start)), 0)])
    return spans


def _rising(points: dict[int, float]) -> dict[int, float]:
    """A larger pass is never quicker; where it seems so the clock was unlucky."""
    highest, rising = 0.0, {}
    for size in sorted(points):
        highest = max(highest, points[size])
        rising[size] = highest
    return rising


def _tokens(count: int) -> list[int]:
    return [7 * index % 251 for index in range(count)]
