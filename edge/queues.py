"""Which sessions wait for what, and whose turn it is: places in the batch, and time for reading prompts."""

from __future__ import annotations

import math
from collections import deque
from typing import NamedTuple

from paceline.edge.events import Limits
from paceline.edge.fairness import FairQueueing
from paceline.edge.session import Phase, Session

LEAST_CHUNK = 32  # tokens; shorter chunks cost more passes than they save waiting
READING_WEIGHT = 0.5  # of a target's own: its drafts are waited for, its prompts mostly are not
PAUSE_SECONDS = 1.0  # longer gaps between Drafts are no rounds


class Peer:
    """One connected target: who of its sessions waits for what."""

    def __init__(self, name: str, vocabulary_size: int) -> None:
        self.name = name
        self.vocabulary_size = vocabulary_size
        self.queue: deque[Session] = deque()  # for a place in the batch
        self.reading: deque[Session] = deque()  # for the next chunk; the first reads to its end
        self._asked_at = -math.inf
        self._round_seconds = math.inf

    def asks(self, now: float) -> None:
        """Notes that drafts are asked for, to know how long the target's rounds are."""
        gap, self._asked_at = now - self._asked_at, now
        if gap < PAUSE_SECONDS:
            known = self._round_seconds < math.inf
            self._round_seconds = 0.8 * self._round_seconds + 0.2 * gap if known else gap

    def round_seconds(self, now: float) -> float:
        """The smoothed time between two Drafts that ask for proposals; infinite when none came lately."""
        return self._round_seconds if now - self._asked_at < PAUSE_SECONDS else math.inf


class _Turn(NamedTuple):
    """What takes turns in time: each target's drafting and each target's reading."""

    target: str
    reads: bool


class Queues:
    """The batch and everybody who waits, fair across targets in tokens."""

    def __init__(self, limits: Limits, reads_together: bool) -> None:
        self.peers: dict[str, Peer] = {}
        self.batch: list[Session] = []
        self.limits = limits
        self._reads_together = reads_together
        self._places = FairQueueing[str](weight=lambda name: limits.weights.get(name, 1.0))
        self._turns = FairQueueing[_Turn](weight=self._turn_weight)

    def _turn_weight(self, turn: _Turn) -> float:
        return self.limits.weights.get(turn.target, 1.0) * (READING_WEIGHT if turn.reads else 1.0)

    @property
    def busy(self) -> bool:
        """Whether something waits to be drafted or read."""
        return bool(self.batch) or any(peer.queue or peer.reading for peer in self.peers.values())

    # --- who waits

    def enqueue(self, session: Session) -> None:
        """It gets a place in the batch as soon as there is one."""
        self.peers[session.target].queue.append(session)
        session.phase = Phase.QUEUED

    def read_later(self, session: Session) -> None:
        """It is read in chunks, between draft steps."""
        self.peers[session.target].reading.append(session)
        session.phase = Phase.READING

    def full(self, target: str) -> bool:
        """Whether no more sessions of the target may wait."""
        peer = self.peers[target]
        return len(peer.queue) + len(peer.reading) >= self.limits.max_queue

    def ahead(self, session: Session) -> int:
        """Tokens that others read first, at most."""
        return sum(s.behind for peer in self.peers.values() for s in peer.reading if s is not session)

    def leave(self, session: Session) -> None:
        """Takes a session out of wherever it is."""
        peer = self.peers[session.target]
        if session.phase is Phase.QUEUED:
            peer.queue.remove(session)
        elif session.phase is Phase.READING:
            peer.reading.remove(session)
        elif session.phase is Phase.DRAFTING:
            self.batch.remove(session)
        session.phase = Phase.IDLE

    def drop_gone(self) -> None:
        """Forgets sessions that are closed, freed or refused."""
        self.batch = [s for s in self.batch if s.phase is not Phase.GONE]
        for peer in self.peers.values():
            peer.queue = deque(s for s in peer.queue if s.phase is not Phase.GONE)
            peer.reading = deque(s for s in peer.reading if s.phase is not Phase.GONE)

    def drop_finished(self, finished: list[Session]) -> None:
        """Takes complete sessions out of the batch."""
        for session in finished:
            session.phase = Phase.IDLE
        whole = len(finished) == len(self.batch)
        self.batch = [] if whole else [s for s in self.batch if s.phase is Phase.DRAFTING]

    # --- places in the batch

    def fill_batch(self, now: float) -> None:
        """Gives free places to waiting sessions; where they are too few, in turns across targets."""
        waiting = [peer for peer in self.peers.values() if peer.queue]
        if not waiting:
            return
        free = self.limits.max_batch - len(self.batch)
        if not self.limits.max_messages and sum(len(peer.queue) for peer in waiting) <= free:
            for peer in waiting:
                while peer.queue:
                    self._join(peer, now)
            return
        while free > 0:
            costs = {p.name: p.queue[0].behind + p.queue[0].want + 1 for p in waiting if p.queue and self._may_join(p)}
            if not costs:
                return
            self._join(self.peers[self._places.next(costs)], now)
            free -= 1

    def _may_join(self, peer: Peer) -> bool:
        """Whether the target's next session belongs to a message that is drafted for, or another one may begin."""
        if not self.limits.max_messages:
            return True
        messages = {session.message for session in self.batch}
        return len(messages) < self.limits.max_messages or peer.queue[0].message in messages

    def _join(self, peer: Peer, now: float) -> None:
        session = peer.queue.popleft()
        session.phase = Phase.DRAFTING
        if session.started_at < session.received_at:  # else its chunks were read already
            session.started_at = now
        self.batch.append(session)

    # --- time for reading

    def shortest_round(self, now: float) -> float:
        """Seconds of the shortest rounds of all targets, infinite when none is at work."""
        return min((peer.round_seconds(now) for peer in self.peers.values()), default=math.inf)

    def turn_to_read(self, chunk: int) -> list[tuple[Session, int]]:
        """At most `chunk` tokens to read now, of one target's sessions; nothing when it is the batch's turn."""
        readers = {_Turn(p.name, True): min(chunk, p.reading[0].behind) for p in self.peers.values() if p.reading}
        if not readers:
            return []
        drafters: dict[_Turn, int] = {}
        for session in self.batch:
            turn = _Turn(session.target, False)
            drafters[turn] = drafters.get(turn, 0) + 1
        turn = self._turns.next({**drafters, **readers})
        if turn.reads:
            return self._chunks(self.peers[turn.target], chunk)
        for other, cost in drafters.items():
            if other != turn:
                self._turns.charge(other, cost)  # one step serves the whole batch
        return []

    def _chunks(self, peer: Peer, left: int) -> list[tuple[Session, int]]:
        reads = []
        for session in peer.reading:
            count = min(left, session.behind - (1 if session.want else 0))  # the draft step needs the last one's row
            reads.append((session, count))
            left -= count
            if left < LEAST_CHUNK or not self._reads_together:
                break
        return reads
