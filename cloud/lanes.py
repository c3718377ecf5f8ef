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

    def ready(self, now: float) -> bool:
        """Every draft is here or given up."""
        return bool(self.sessions) and (now >= self.deadline or not any(s.drafts.awaited for s in self.sessions))


class Lanes:
    """All lanes of a target; the next ready one is looked for after the one that went last."""

    def __init__(self, count: int) -> None:
        self.lanes = [Lane(index) for index in range(count)]
        self._last = 0

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
        lane = min(self.lanes, key=lambda lane: len(lane.sessions))
        lane.sessions.append(session)
        return lane

    def leave(self, session: Session) -> None:
        """Removes a session from whichever lane holds it."""
        for lane in self.lanes:
            if session in lane.sessions:
                lane.sessions.remove(session)
                return

    def rebalance(self, lane: Lane) -> tuple[Lane, Session] | None:
        """After a round: out of balance by more than one, one session that ended its round moves over."""
        smallest = min(self.lanes, key=lambda other: len(other.sessions))
        if len(lane.sessions) - len(smallest.sessions) <= 1:
            return None
        smallest.sessions.append(lane.sessions.pop())
        return smallest, smallest.sessions[-1]
