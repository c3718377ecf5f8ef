"""Drafts that were made ahead: for what a round under way may lead to (edge/ahead.py), and whether that pays."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from enum import Enum, auto
from typing import NamedTuple

from paceline.core.measured import Average
from paceline.topology.wire import MAX_BRANCHES, Branch, unpack_tokens

MEAN_ROUNDS = 64  # of lanes, that their time is averaged over
LEAST_SHARE = 0.01  # of a round must be saved
SECONDS_SEEN, FIRST_SECOND = 128, 0.4
FIRST_REST, LONGEST_REST = 5.0, 60.0  # seconds without, after it did not pay


class Branching(NamedTuple):
    """Outcomes of a round that are drafted for ahead, and how often a second choice is right where the first is not."""

    outcomes: int
    second_choice: float


NO_BRANCHES = Branching(0, 0.0)


class Branches:
    """Of one session: the drafts for what may follow the proposal that begins at `position`."""

    def __init__(self) -> None:
        self.begin(-1, ())

    def begin(self, position: int, proposal: Sequence[int]) -> None:
        """A proposal is to be verified; what was drafted ahead for another one is worth nothing."""
        self.position = position
        self._proposal = tuple(proposal)
        self._drafts: dict[tuple[int, ...], array[int]] = {}

    def arrived(self, position: int, branches: Sequence[Branch]) -> bool:
        """Takes what a drafter sent ahead, MAX_BRANCHES in all; False when it is for another round."""
        if position != self.position:
            return False
        for accepted, token, draft in branches[: MAX_BRANCHES - len(self._drafts)]:
            if accepted <= len(self._proposal):
                followed = (*self._proposal[:accepted], token)
                self._drafts[followed] = unpack_tokens(draft)
        return True

    def second_was_right(self, tokens: array[int]) -> bool | None:
        """Whether the token after the accepted ones is the one that was drafted for; None where nobody can say."""
        emitted = tuple(tokens[self.position :])
        pairs = enumerate(zip(emitted, self._proposal, strict=False))
        right = next((place for place, (token, proposed) in pairs if token != proposed), None)
        guesses = [] if right is None else [key for key in self._drafts if len(key) == right + 1]
        return emitted[: len(guesses[0])] in guesses if guesses else None

    def draft(self, tokens: array[int]) -> array[int] | None:
        """The draft that was made for what has been committed since."""
        return self._drafts.get(tuple(tokens[self.position :])) if self._drafts else None


class Phase(Enum):
    """What is being found out, and whether branches are asked for meanwhile."""

    BASE = auto()  # how long rounds are without
    TRIAL = auto()  # and with
    HOLD = auto()  # they pay
    CHECK = auto()  # whether they still do: a few rounds without
    REST = auto()  # they do not


ASKING = (Phase.TRIAL, Phase.HOLD)
ROUNDS = {Phase.BASE: 16, Phase.TRIAL: 32, Phase.HOLD: 512, Phase.CHECK: 16}
SETTLING = 2  # first rounds of a phase, which are still of the one before


class AheadControl:
    """Of one target: asks for branches as long as lanes' rounds are shorter with them than without, as measured.

    What they save shows in that as well as what they cost: steps under way for nothing when a Draft comes, and
    processors or power that the drafter shares with the target. Rounds do not depend on what is accepted.
    """

    def __init__(self) -> None:
        self.rounds = self.hits = self.late = 0  # of sessions, ever
        self.second = Average(SECONDS_SEEN)  # share of rejections after which the second choice was right
        self.phase = Phase.BASE
        self._left = ROUNDS[Phase.BASE]
        self._with, self._without = Average(MEAN_ROUNDS), Average(MEAN_ROUNDS)  # seconds of a lane's round
        self._rest, self._rest_until = FIRST_REST, 0.0

    @property
    def hit_rate(self) -> float:
        return self.hits / self.rounds if self.rounds else 0.0

    @property
    def on(self) -> bool:
        """Whether branches are to be asked for."""
        return self.phase in ASKING

    def branching(self, count: int) -> Branching:
        """What the cost model has to know, where so many branches are asked for."""
        resting = self.phase is Phase.REST
        return Branching(0 if resting else count, self.second.value if self.second.count else FIRST_SECOND)

    def looked(self, shares: Sequence[float]) -> None:
        """A lane's round ended; `shares` of the wait for a draft were saved for those sessions that wanted branches."""
        self.rounds += len(shares)
        self.hits += sum(share >= 1.0 for share in shares)
        self.late += sum(0.0 < share < 1.0 for share in shares)

    def round(self, seconds: float, now: float) -> None:
        """A lane's round took so long, in a setting like that of the one before it."""
        if self.phase is Phase.REST:
            self._without.add(seconds)
            if now >= self._rest_until:
                self._begin(Phase.TRIAL)
            return
        self._left -= 1
        if self._left < ROUNDS[self.phase] - SETTLING:
            (self._with if self.on else self._without).add(seconds)
        if self._left > 0:
            return
        if self.phase is Phase.BASE:
            self._begin(Phase.TRIAL)
        elif self.phase is Phase.HOLD:
            self._begin(Phase.CHECK)
        elif self._with.value <= self._without.value * (1.0 - LEAST_SHARE):
            self._rest = FIRST_REST
            self._begin(Phase.HOLD)
        else:
            self._rest_until = now + self._rest
            self._rest = min(2.0 * self._rest, LONGEST_REST)
            self._begin(Phase.REST)

    def _begin(self, phase: Phase) -> None:
        """What is measured in it is measured anew."""
        self.phase = phase
        self._left = ROUNDS.get(phase, 0)
        if phase is Phase.TRIAL:
            self._with = Average(MEAN_ROUNDS)
        elif phase is Phase.CHECK:
            self._without = Average(MEAN_ROUNDS)
