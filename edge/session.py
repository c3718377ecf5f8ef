"""One session as the drafter sees it: committed tokens, proposals after them, and how much of both is computed."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from paceline.core.model import Span
from paceline.core.rejection import Weights
from paceline.core.sampling import History, Sampling
from paceline.edge.cache import common_prefix
from paceline.topology.wire import check_hash

MOST_TOLD = 64  # then those of committed tokens are forgotten


class Phase(IntEnum):
    """What the service is doing for a session."""

    IDLE = 0  # nothing is asked
    QUEUED = 1  # waits for a place in the batch
    DRAFTING = 2  # in the batch
    READING = 3  # catches up in chunks, between draft steps
    GONE = 4  # closed, freed or evicted


@dataclass(eq=False)
class Fork:
    """A span beside a session's own; its KV holds the first `valid` of the session's tokens. busy: it is drafted in."""

    span: Span
    valid: int = 0
    busy: bool = False


@dataclass(eq=False)
class Session:
    """One session, and what is asked for it now.

    computed: how many of `committed + tail` are in the span's KV, from the first on.
    tail: proposals that follow `committed`.
    spare: committed-to-be tokens that a handed-over span holds beyond `computed`.
    draws: whether proposals are drawn from weights (core/rejection.py); `weights` are those of the tail.
    vocabulary_size: the target's.
    branches: for so many outcomes of a round the next draft is made ahead (ahead.py): `plan`, in the spans of `forks`.
    seconds: the choice after each proposal of the tail, where it was looked for.
    tells: whether the target wants to know how likely proposals are; `log_probs`, by their places in the text.
    """

    target: str
    id: int
    sampling: Sampling
    prompt_length: int
    span: Span
    keeps_tail: bool = True
    draws: bool = False
    vocabulary_size: int = 1 << 32
    committed: array[int] = field(default_factory=lambda: array("I"))
    computed: int = 0
    tail: list[int] = field(default_factory=list)
    weights: list[Weights] = field(default_factory=list)
    seconds: list[int | None] = field(default_factory=list)
    tells: bool = False
    log_probs: dict[int, float] = field(default_factory=dict)
    spare: array[int] | None = None
    history: History | None = None  # what penalties look at, of `history_length` committed tokens
    history_length: int = 0
    index: Any = None  # a strategy's own notes on the committed tokens
    checked: int = 0  # so many tokens are covered by `check`
    check: int = 0
    branches: int = 0
    plan: Any = None
    note: tuple[int, bytes, int, int] | None = None  # the recorder's: what was proposed where, how much was right, k
    forks: list[Fork] = field(default_factory=list)
    rewrites: int = 0  # how often committed tokens were not what they had been
    used_at: float = 0.0
    phase: Phase = Phase.IDLE
    want: int = 0
    owes: bool = False
    message: int = 0
    received_at: float = 0.0
    started_at: float = -1.0  # of the newest Draft once it is not before received_at

    def __post_init__(self) -> None:
        self.plain = self.sampling.temperature <= 0 and not self.sampling.adjusts
        self.draws = self.draws and self.sampling.temperature > 0

    @property
    def behind(self) -> int:
        """Committed tokens that are not computed."""
        return max(0, len(self.committed) - self.computed)

    def pending(self, start: int) -> array[int] | list[int]:
        """The tokens from `start` on, committed and proposed."""
        held = len(self.committed)
        if start >= held:
            return self.tail[start - held :]
        return [*self.committed[start:], *self.tail] if self.tail else self.committed[start:]

    def propose(self, token: int, second: int | None = None) -> None:
        """One more token of the tail, and the choice after it."""
        drafted = len(self.tail)
        self.tail.append(token)
        if second is not None or self.seconds:
            del self.seconds[drafted:]
            self.seconds += [*([None] * (drafted - len(self.seconds))), second]

    def tell(self, log_prob: float) -> None:
        """How likely the token is that will be proposed next."""
        held = len(self.committed)
        if len(self.log_probs) > MOST_TOLD:
            self.log_probs = {place: value for place, value in self.log_probs.items() if place >= held}
        self.log_probs[held + len(self.tail)] = log_prob

    def hash_before(self, base: int) -> int:
        """wire.check_hash of the first `base` tokens, continued from the last one asked for."""
        if base < self.checked:
            self.checked = self.check = 0
        self.check = check_hash(self.committed[self.checked : base], self.check)
        self.checked = base
        return self.check

    def commit(self, base: int, tokens: array[int]) -> None:
        """Sets what follows the first `base` tokens; KV stays for the longest common prefix."""
        held = len(self.committed)
        if base < held:
            overlap = self.committed[base:]
            if overlap != tokens[: held - base]:
                self._rewrite(base, tokens)
                return
            tokens = tokens[held - base :]
        if not tokens:
            return
        common = 0
        for proposed, token in zip(self.tail, tokens, strict=False):
            if proposed != token:
                break
            common += 1
        self.committed.extend(tokens)
        if common == len(tokens) and self.keeps_tail and not self.draws:
            del self.tail[:common], self.seconds[:common]
        else:  # draws belong to the committed count that they were made at: all of them are made anew
            self.computed = min(self.computed, held + common)
            self.tail.clear()
            self.seconds.clear()
        if self.spare is not None:
            self._use_spare(held, tokens)

    def _rewrite(self, base: int, tokens: array[int]) -> None:
        known = self.committed[base:]
        known.extend(self.tail)
        self.computed = min(self.computed, base + common_prefix(known, tokens))
        del self.committed[base:]
        self.committed.extend(tokens)
        self.tail.clear()
        self.seconds.clear()
        self.rewrites += 1
        for fork in self.forks:
            fork.valid = min(fork.valid, base)
        self.spare = self.history = self.index = None
        if self.checked > base:
            self.checked = self.check = 0

    def _use_spare(self, held: int, tokens: array[int]) -> None:
        spare, self.spare = self.spare, None
        if spare is None or self.computed != held:
            return
        common = common_prefix(spare, tokens)
        self.computed += common
        if common == len(tokens) and common < len(spare):
            self.spare = spare[common:]

    def computed_tokens(self) -> array[int]:
        """The tokens that the span's KV holds."""
        tokens = self.committed[: self.computed]
        if self.computed > len(self.committed):
            tokens.extend(self.tail[: self.computed - len(self.committed)])
        elif self.spare is not None and self.computed == len(self.committed):
            tokens.extend(self.spare)
        return tokens
