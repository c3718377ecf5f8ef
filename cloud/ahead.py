"""Drafts that were made ahead: for what a round under way may lead to (edge/ahead.py), and whether that pays."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

from paceline.core.measured import Average
from paceline.topology.wire import MAX_BRANCHES, Branch, unpack_tokens

LOOK_ROUNDS = 32  # of lanes; then it is judged
LEAST_SHARE = 0.01  # of the time that lanes wait for drafts must be saved
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


class AheadControl:
    """Of one target: what branches save of the time that lanes wait for drafts; for too little none are asked.

    A branch that is there when it is needed saves all of it, one that comes while its Draft is under way a part.
    Against that stands what a draft step under way for nothing costs a Draft that comes meanwhile: half of it.
    """

    def __init__(self) -> None:
        self.rounds = self.hits = self.late = 0  # of sessions, ever
        self.second = Average(SECONDS_SEEN)  # share of rejections after which the second choice was right
        self._saved = Average(LOOK_ROUNDS)  # share of lanes' waiting
        self._looked = 0
        self._rest, self._rest_until = FIRST_REST, 0.0

    @property
    def hit_rate(self) -> float:
        return self.hits / self.rounds if self.rounds else 0.0

    def branching(self, count: int, now: float) -> Branching:
        """What the cost model has to know, where so many branches are asked for."""
        return Branching(count if self.on(now) else 0, self.second.value if self.second.count else FIRST_SECOND)

    def on(self, now: float) -> bool:
        """Whether branches are to be asked for."""
        return now >= self._rest_until

    def looked(self, shares: Sequence[float], wait: float, step: float, now: float) -> None:
        """A lane's round ended; `shares` of the wait for a draft were saved for those sessions that wanted branches.

        wait: seconds from a Draft to its answer. step: seconds of a draft step.
        """
        self.rounds += len(shares)
        self.hits += sum(share >= 1.0 for share in shares)
        self.late += sum(0.0 < share < 1.0 for share in shares)
        self._saved.add(min(shares))
        self._looked += 1
        if self._looked < LOOK_ROUNDS:
            return
        self._looked = 0
        saved = self._saved.value
        if saved * wait >= (1.0 - saved) * step / 2.0 + LEAST_SHARE * wait:
            self._rest = FIRST_REST
            return
        self._rest_until = now + self._rest
        self._rest = min(2.0 * self._rest, LONGEST_REST)
        self._saved = Average(LOOK_ROUNDS)
