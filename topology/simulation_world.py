"""What a simulation is given and what it tells: drafters, targets, requests, faults; figures of the run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from paceline.core.profile import StepTimes


@dataclass(frozen=True)
class Fault:
    """A drafter that is gone (`down`: its links close) or hangs (`hung`: links stay) from `start` to `end` seconds."""

    start: float
    end: float
    kind: Literal["down", "hung"] = "down"


@dataclass(frozen=True)
class SimulatedDrafter:
    """step: a pass over sequences. token_ms: more for each token of it. max_messages: Draft messages in a step, 0 for
    any number; max_sequences: sessions in a step, 0 for any number. max_sessions: held at a time."""

    step: StepTimes
    token_ms: float = 0.0
    max_messages: int = 0
    max_sequences: int = 0
    max_sessions: int = 1 << 30
    faults: tuple[Fault, ...] = ()


@dataclass(frozen=True)
class Requests:
    """What users ask of one target.

    lengths: (prompt, output) tokens of a request, drawn evenly. in_flight: so many at all times; or, where
    `per_second` is given, arrivals of a Poisson process with that rate. count: how many in all, None for no end.
    """

    lengths: tuple[tuple[int, int], ...] = ((64, 256),)
    in_flight: int = 1
    per_second: float | None = None
    count: int | None = None


@dataclass(frozen=True)
class SimulatedTarget:
    """verify: a pass over tokens. drafters: indices, best first. deadline: seconds, None for the learnt one.

    agreement: probability that a draft token is the target's own. rtt: seconds, up + down. verify_budget: draft tokens
    of a lane's pass. group: whose figures are put together.
    """

    verify: StepTimes
    drafters: tuple[int, ...] = ()
    policy: Literal["failover", "spread"] = "failover"
    agreement: float = 0.8
    draft_length: int = 4
    lanes: int = 1
    rtt: float = 0.0
    max_sessions: int = 1 << 30
    prefill_chunk: int = 256
    weight: float = 1.0
    deadline: float | None = None
    verify_budget: int | None = None
    requests: Requests = Requests()
    group: str = ""


@dataclass(frozen=True)
class World:
    """One run. variation: standard deviation of a pass's time over its mean. jitter: mean seconds that a message is
    late by, each way, exponentially distributed. warm_up: seconds at the start that count for nothing."""

    drafters: tuple[SimulatedDrafter, ...]
    targets: tuple[SimulatedTarget, ...]
    seconds: float = 10.0
    warm_up: float = 0.0
    variation: float = 0.0
    jitter: float = 0.0
    seed: int = 0


@dataclass(frozen=True)
class Spread:
    """Of many values: mean, nearest-rank percentiles and (population) standard deviation."""

    count: int
    mean: float
    p50: float
    p99: float
    std: float


@dataclass(frozen=True)
class Figures:
    """Of one group of targets, after the warm-up. Times are in milliseconds.

    tokens_per_s: of one target, on average. round_ms: from one round of a lane to its next. bunch: tokens that came
    at once; gap_ms: between two bunches of a session. token_ms: of a request, a token after the first on average.
    undrafted: share of the session rounds without a draft.
    """

    tokens_per_s: float
    round_ms: Spread
    ttft_ms: Spread
    gap_ms: Spread
    bunch: Spread
    token_ms: Spread
    e2e_ms: Spread
    undrafted: float


@dataclass(frozen=True)
class Outcome:
    """What a run came to, after its warm-up.

    seconds: what was counted; less than the world's where the requests ended before. tokens_per_s: of each target,
    while all its places were taken.
    utilization: of each drafter, the share of time it worked. missed: how often a lane gave a drafter up.
    plain_rounds: share of session rounds without a draft. events: in the whole run.
    """

    seconds: float
    tokens_per_s: tuple[float, ...]
    utilization: tuple[float, ...]
    groups: Mapping[str, Figures]
    missed: int
    plain_rounds: float
    events: int

    @property
    def total_tokens_per_s(self) -> float:
        """Of all targets together."""
        return sum(self.tokens_per_s)
