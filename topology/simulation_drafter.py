"""A drafter in the simulation: draft steps that lanes join one token at a time, and prompts read between them."""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from paceline.topology.simulation_world import SimulatedDrafter

if TYPE_CHECKING:
    from paceline.topology.simulation import Simulation
    from paceline.topology.simulation_target import Lane, Session, Target

CHUNK, LEAST_CHUNK = 256, 32  # prompt tokens read in one pass
QUICK = 32  # tokens that ride along in a draft step
CHUNK_SHARE = 0.1  # of the shortest round, for one pass of reading
CHEAP_GROWTH = 1.25  # or what a pass of the least chunk takes, and so much more
READING_WEIGHT = 0.5  # of drafting, token for token
PAUSE_SECONDS = 1.0  # longer gaps between a target's Drafts are no rounds


class DraftMessage:
    """Sessions of one lane that wait for `k` draft tokens each. `turn` is the lane's when it was sent."""

    __slots__ = ("catch_up", "k", "lane", "out", "riders", "sent", "turn", "unjoined")

    def __init__(self, lane: Lane, sent: float) -> None:
        self.lane, self.turn, self.sent = lane, lane.turn, sent
        self.k = 0
        self.riders: list[tuple[Session, int, int]] = []  # warming when last heard of; nobody waits for them
        self.catch_up = 0  # tokens to read first, beside one of each session
        self.unjoined = self.out = 0  # sessions that are not in the batch yet, that are not answered yet

    def add(self, k: int, catch_up: int) -> None:
        """One more session; the whole message takes as many steps as the longest draft in it."""
        self.k = max(self.k, k)
        self.catch_up += catch_up
        self.unjoined += 1
        self.out += 1


class Reading:
    """A session whose context is read, and how many tokens of it are left; it grows while the session goes on."""

    __slots__ = ("left", "length", "session", "warming")

    def __init__(self, session: Session, warming: bool) -> None:
        self.session, self.warming = session, warming  # warming: answered so, it asks again
        self.left = self.length = max(1, session.context)

    def grow(self, length: int) -> None:
        """More of the session is known by now."""
        self.left += length - self.length
        self.length = length


class Drafter:
    """Work-conserving and fair: never idle while there is work, and its targets take turns."""

    def __init__(self, simulation: Simulation, spec: SimulatedDrafter, index: int) -> None:
        self.spec, self.index = spec, index
        self.up = True
        self.sessions: dict[Session, None] = {}  # in the order they came, so that runs repeat
        self.busy_seconds = 0.0
        self._simulation = simulation
        self._clear()

    def _clear(self) -> None:
        self._queue: list[tuple[float, int, DraftMessage]] = []  # by the turn in which it is served
        self._order = itertools.count()
        self._had: dict[Target, float] = {}
        self._virtual = 0.0
        self._reading: deque[Reading] = deque()
        self._unread: dict[Session, Reading] = {}
        self._credit = 0.0  # tokens that may be read before the next draft step
        self._chunk = CHUNK
        self._rounds: dict[Target, tuple[float, float]] = {}  # when it asked last, and its smoothed round
        self._due: dict[int, list[tuple[DraftMessage, int]]] = {}  # step number → who is complete after it
        self._step = 0
        self._sequences = self._messages = 0
        self._catch_up = 0  # tokens that the next step reads beside one of each sequence
        self._working = False
        self._life = object()  # a pass that was going on when the drafter died ends for nobody

    @property
    def room(self) -> int:
        """How many more sessions it takes."""
        return self.spec.max_sessions - len(self.sessions)

    # --- what arrives

    def draft(self, message: DraftMessage) -> None:
        """A Draft has arrived; it is served by its tag (self-clocked fair queueing), like those of the real drafter."""
        if not self.up:
            return
        message.riders = [rider for rider in message.riders if self._rides(message, *rider)]
        if not message.out:
            return
        target = message.lane.target
        self._asks(target)
        items = 1 if self.spec.max_messages else message.unjoined  # the rest of a message comes along with its first
        place = max(self._virtual, self._had.get(target, 0.0)) + items * (message.k + 2) / target.spec.weight
        self._had[target] = place
        heapq.heappush(self._queue, (place, next(self._order), message))
        if not self._working:
            self._begin()

    def read(self, session: Session) -> None:
        """A session is opened: its context is to be read before anything is drafted for it. One that has to wait for
        others is answered `warming` at once, and not again when it has been read."""
        if not self.up or session not in self.sessions:
            return
        waiting = sum(other.left for other in self._reading) + session.context
        entry = self._unread[session] = Reading(session, warming=waiting > self._chunk)
        if entry.warming:
            self._simulation.deliver(session.target.spec.rtt, session.target.is_warming, (session, self.index))
        self._reading.append(entry)
        if not self._working:
            self._begin()

    def _rides(self, message: DraftMessage, session: Session, k: int, length: int) -> bool:
        """Whether a session that was warming takes part in its lane's message: it is read, but for a little."""
        entry = self._unread.get(session)
        if entry is not None:
            entry.grow(length)
            if entry.left > QUICK:
                return False
            if entry in self._reading:  # else the pass that reads the last of it is going on
                self._reading.remove(entry)
            del self._unread[session]
        message.add(k, entry.left if entry is not None else 0)
        return True

    def die(self) -> None:
        self.up = False
        self._clear()

    def revive(self) -> None:
        self.up = True

    # --- passes

    def _begin(self) -> None:
        """The next pass, of reading or of drafting, by credit where there is both; idle when there is neither."""
        self._join()
        self._working = True
        if self._reading and (not self._sequences or self._credit >= min(self._chunk, self._reading[0].left)):
            self._begin_read()
        elif self._sequences:
            self._credit = self._credit + READING_WEIGHT * self._sequences if self._reading else 0.0
            tokens = self._sequences + self._catch_up
            self._catch_up = 0
            self._run(self._sequences, tokens, self._stepped, self._life)
        else:
            self._working = False

    def _join(self) -> None:
        """Free places go to whoever waits at the head of the queue."""
        queue, spec = self._queue, self.spec
        while queue:
            if spec.max_messages and self._messages >= spec.max_messages:
                return
            place, _, message = queue[0]
            free = spec.max_sequences - self._sequences if spec.max_sequences else message.unjoined
            count = min(free, message.unjoined)
            if count <= 0:
                return
            self._virtual = place
            if message.unjoined == message.out:
                self._messages += 1
                self._catch_up += message.catch_up
            message.unjoined -= count
            self._sequences += count
            self._due.setdefault(self._step + message.k, []).append((message, count))
            if message.unjoined:
                return
            heapq.heappop(queue)

    def _run(self, sequences: int, tokens: int, then: Callable[[Any], None], argument: object) -> None:
        """One pass; a fault in which the drafter hangs makes it so much longer."""
        seconds = self._simulation.varied((self.spec.step.ms(sequences) + self.spec.token_ms * tokens) / 1000.0)
        start = self._simulation.now
        for fault in self.spec.faults:
            if fault.kind == "hung" and fault.start < start + seconds and start < fault.end:
                start = fault.end - max(0.0, fault.start - start)
        self.busy_seconds += self._simulation.counted(start, start + seconds)
        self._simulation.at(start + seconds, then, argument, ends_pass=True)

    def _stepped(self, life: object) -> None:
        if life is not self._life:
            return
        self._step += 1
        for message, count in self._due.pop(self._step, ()):
            self._sequences -= count
            message.out -= count
            if not message.out:
                self._messages -= 1
                target = message.lane.target
                self._simulation.deliver(target.spec.rtt, target.answered, message)
        self._begin()

    def _begin_read(self) -> None:
        """One chunk of as many sessions as it holds."""
        self._chunk = self._fitting_chunk()
        room, count = self._chunk, 0
        self._credit = max(0.0, self._credit - min(room, self._reading[0].left))
        done: list[Session] = []
        while self._reading:
            entry = self._reading[0]
            taken = min(room, entry.left)
            entry.left -= taken
            room -= taken
            count += 1
            if not entry.left:
                done.append(self._reading.popleft().session)
            if room < LEAST_CHUNK:
                break
        self._run(count, self._chunk - room, self._has_read, (self._life, done))

    def _fitting_chunk(self) -> int:
        """What takes a small share of the shortest round of any target, so that its Draft waits little for it."""
        now = self._simulation.now
        rounds = [seconds for at, seconds in self._rounds.values() if now - at < PAUSE_SECONDS]
        pass_ms, token_ms = self.spec.step.ms(1), self.spec.token_ms
        least = CHEAP_GROWTH * (pass_ms + LEAST_CHUNK * token_ms)
        allowed = max(CHUNK_SHARE * min(rounds, default=math.inf) * 1e3, least)
        return int(min(CHUNK, (allowed - pass_ms) / token_ms)) if token_ms else CHUNK

    def _asks(self, target: Target) -> None:
        """Notes when a target asks for drafts, to know how long its rounds are."""
        now = self._simulation.now
        at, known = self._rounds.get(target, (-math.inf, math.inf))
        gap = now - at
        if gap < PAUSE_SECONDS:
            known = 0.8 * known + 0.2 * gap if known < math.inf else gap
        self._rounds[target] = (now, known)

    def _has_read(self, argument: tuple[object, list[Session]]) -> None:
        life, done = argument
        if life is not self._life:
            return
        for session in done:
            entry = self._unread.pop(session, None)
            if entry is not None and not entry.warming:
                self._simulation.deliver(session.target.spec.rtt, session.target.has_read, (session, self.index))
        self._begin()
