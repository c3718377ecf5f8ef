"""What a user asks of a target and what comes back, token by token."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from paceline.core.sampling import Sampling

FinishReason = Literal["stop", "length", "cancelled", "error"]


@dataclass(frozen=True)
class Request:
    """One sequence to generate.

    id: CALL-INDEX, the choices of one call differ in the index. seed is resolved (see sampling.choice_seed) before it
    gets here. stop_token_ids already holds the model's end tokens unless the user asked to ignore them.
    """

    id: str
    prompt: tuple[int, ...]
    sampling: Sampling
    max_tokens: int
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    log_probs: int | None = None  # how many alternatives; None for no log-probabilities at all

    @property
    def call(self) -> str:
        """What the choices of one call share."""
        return self.id.rpartition("-")[0]


@dataclass(frozen=True)
class LogProb:
    """Natural log-probability of an emitted token and of the likeliest ones, from the target's raw row."""

    token: int
    value: float
    top: list[tuple[int, float]]


@dataclass
class Delta:
    """What one round added to one request; the last one carries finish_reason."""

    request_id: str
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    log_probs: list[LogProb] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    error: str | None = None
    leaving: bool = False  # the error is that this target leaves: another one can serve the request
