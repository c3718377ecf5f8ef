"""Lanes: the sessions of a target that are verified together, and when a lane may go."""

from __future__ import annotations

from collections.abc import Iterator

from paceline.cloud.sessions import Session


class Lane:
    """Sessions in step. It waits for drafts until `deadline`."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.sessions: list[Session] = []
        self.deadline = 0.0
        self.chunk_spent = False  # a prompt chunk has run since this lane's last round
        self._asked: tuple[float, int, int] | None = None  # when, for how many sessions, for how many tokens

    def round_took(self, now: float, draft_length: int) -> float | None:
        """The lane asks for drafts anew: seconds since it last did, None if it was another setting then."""
        before, self._asked = self._asked, (now, len(self.sessions), draft_length)
        return now - before[0] if before is not None and before[1:] == self._asked[1:] else None

    def ready(self, now: float) -> bool:
        """Every draft is here or given up."""
        return bool(self.sessions) and (now >= self.deadline or not any(s.drafts.awaited for s in self.sessions))


class Lanes:
    """All lanes of a target; the next ready one is looked for after the one that went last.

    Lanes beyond those in use are there until their sessions have moved over.
    """

    def __init__(self, count: int) -> None:
        self.lanes: list[Lane] = []
        self._last = 0
        self.use(count)

    def use(self, count: int) -> None:
        """From now on so many lanes: sessions move as their rounds end."""
        self.in_use = count
        while len(self.lanes) < count:
            self.lanes.append(Lane(len(self.lanes)))
        while len(self.lanes) > count and not self.lanes[-1].sessions:
            self.lanes.pop()

    def __iter__(self) -> Iterator[Lane]:
        return iter(self.lanes)

    @property
    def sessions(self) -> int:
        return sum(len(lane.sessions) for lane in self.lanes)

    def next_ready(self, now: float, peek: bool = False) -> Lane | None:
        """The next lane, in turn, that has nothing to wait for; `peek` leaves the turn as it is."""
        count = len(self.lanes)
        for step in range(1, count + 1):
            lane = self.lanes[(self._last + step) % count]
            if lane.ready(now):
                if not peek:
                    self._last = lane.index
                return lane
        return None

    def wake_at(self) -> float | None:
        """When the first waiting lane gives up; None when no lane waits."""
        waiting = [lane.deadline for lane in self.lanes if lane.sessions]
        return min(waiting) if waiting else None

    def join(self, session: Session) -> Lane:
        """New sessions go to the smaller lane."""
        lane = self._smallest()
        lane.sessions.append(session)
        return lane

    def _smallest(self) -> Lane:
        return min(self.lanes[: self.in_use], key=lambda lane: len(lane.sessions))

    def leave(self, session: Session) -> None:
        """Removes a session from whichever lane holds it."""
        for lane in self.lanes:
            if session in lane.sessions:
                lane.sessions.remove(session)
                return

    def rebalance(self, lane: Lane) -> list[tuple[Lane, Session]]:
        """After a lane's round: who is too many in it moves to the smallest lane."""
        moved = []
        while lane.sessions:
            smallest = self._smallest()
            if lane.index < self.in_use and len(lane.sessions) - len(smallest.sessions) <= 1:
                break
            smallest.sessions.append(lane.sessions.pop())
            moved.append((smallest, smallest.sessions[-1]))
        return moved
