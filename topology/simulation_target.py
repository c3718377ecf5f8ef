"""A target in the simulation: requests, prompts in chunks, lanes that wait for drafts, deadlines and failover."""

from __future__ import annotations

import math
from collections import deque
from typing import TYPE_CHECKING

from paceline.topology.simulation_drafter import DraftMessage
from paceline.topology.simulation_world import SimulatedTarget

if TYPE_CHECKING:
    from paceline.topology.simulation import Simulation
    from paceline.topology.simulation_book import Book

TICK = 1e-9  # seconds: event times are rounded to it
FIRST_DEADLINE, SHORTEST_DEADLINE, LONGEST_DEADLINE = 1.0, 0.005, 2.0
SAMPLES_BEFORE_DEADLINE = 16
MISSES = 3  # in a row; then the target decodes plainly
PROBE_SECONDS = 1.0


class Session:
    """One request from its arrival to its last token."""

    __slots__ = (
        "arrived",
        "caught_up",
        "context",
        "delivered",
        "drafter",
        "first",
        "k",
        "look_again",
        "output",
        "prompt_left",
        "remaining",
        "target",
        "took_all",
        "warming",
    )

    def __init__(self, target: Target, arrived: float, prompt: int, output: int) -> None:
        self.target, self.arrived = target, arrived
        self.prompt_left, self.remaining = prompt, output
        self.output = output
        self.context = prompt
        self.drafter: int | None = None
        self.caught_up = False  # its drafter has read it
        self.warming = False  # it is being read, and its drafts are asked for without waiting for them
        self.look_again = 0.0  # for a drafter, where there is none
        self.k = 0  # draft tokens on their way, or here
        self.took_all = 0  # 1 after a round whose draft was accepted to its end
        self.first = self.delivered = 0.0  # when tokens came out: the first, the last ones


class Lane:
    """Sessions that are verified together. `turn` counts its rounds: an answer to an older one comes too late."""

    __slots__ = ("began", "chunk_spent", "deadline", "sessions", "target", "turn", "waiting")

    def __init__(self, target: Target) -> None:
        self.target = target
        self.sessions: list[Session] = []
        self.turn = self.waiting = 0
        self.deadline = math.inf
        self.began = 0.0  # when its last round ended
        self.chunk_spent = False


class Target:
    """The engine's loop in events: whenever it is idle, the next ready lane goes, or a prompt chunk."""

    def __init__(self, simulation: Simulation, spec: SimulatedTarget, book: Book) -> None:
        self.spec, self.book = spec, book
        self.tokens = 0  # that count
        self.requests = 0  # that have come
        self.places_taken_until = math.inf  # when the first request ended that no other one followed
        self.lanes = [Lane(self) for _ in range(spec.lanes)]
        self._simulation = simulation
        self._waiting: deque[Session] = deque()
        self._prefilling: deque[Session] = deque()
        self._live = 0
        self._busy = False
        self._last = 0
        self._answer_seconds: deque[float] = deque(maxlen=256)
        self._deadline = spec.deadline or FIRST_DEADLINE
        self._answers = self._missed = 0
        self._probe_at = 0.0
        self._timer = math.inf

    # --- requests

    def submit(self, session: Session) -> None:
        """A request has come; `look` takes it up."""
        self._waiting.append(session)

    def look(self) -> None:
        """At what has come while nothing was done."""
        self._admit()
        self._go()

    def _admit(self) -> None:
        while self._waiting and self._live < self.spec.max_sessions:
            session = self._waiting.popleft()
            self._live += 1
            self._prefilling.append(session)
            self.find_drafter(session)

    def find_drafter(self, session: Session) -> None:
        """The session gets a drafter, which begins to read what there is of it; none where none is up and has room."""
        if self.spec.draft_length == 0 or not self.spec.drafters:
            return
        session.look_again = self._simulation.now + PROBE_SECONDS
        drafters = [self._simulation.drafters[index] for index in self.spec.drafters]
        open_ones = [drafter for drafter in drafters if drafter.up and drafter.room > 0]
        if not open_ones:
            return
        chosen = open_ones[0]
        if self.spec.policy == "spread":
            chosen = max(open_ones, key=lambda drafter: drafter.room / drafter.spec.max_sessions)
        session.drafter, session.caught_up, session.warming = chosen.index, False, False
        chosen.sessions[session] = None
        self._simulation.deliver(self.spec.rtt, chosen.read, session)

    def lost(self, session: Session) -> None:
        """Its drafter is gone: another one takes over, or it goes on plainly."""
        session.drafter, session.caught_up = None, False
        for lane in self.lanes:
            if session in lane.sessions and lane.waiting:
                self._give_up(lane)
        self.find_drafter(session)
        self._go()

    def drafter_is_back(self, index: int) -> None:
        """It gets the sessions that have none, and with failover those of drafters that come after it."""
        order = self.spec.drafters
        for session in [*self._prefilling, *(session for lane in self.lanes for session in lane.sessions)]:
            if session.drafter is None:
                self.find_drafter(session)
            elif self.spec.policy == "failover" and order.index(session.drafter) > order.index(index):
                del self._simulation.drafters[session.drafter].sessions[session]
                self.find_drafter(session)

    def is_warming(self, argument: tuple[Session, int]) -> None:
        """A drafter will read a session, but not at once."""
        session, drafter = argument
        session.warming = session.drafter == drafter

    def has_read(self, argument: tuple[Session, int]) -> None:
        """A drafter has read a session."""
        session, drafter = argument
        if session.drafter == drafter:
            session.caught_up, session.warming = True, False

    # --- the loop

    def _go(self) -> None:
        """Starts the next pass, if the model is idle and there is something to do."""
        if self._busy:
            return
        lane = self._next_ready()
        chunks, prompt_tokens = self._prompt_chunks(lane)
        if lane is None and not chunks:
            return
        tokens = prompt_tokens
        if lane is not None:
            self._keep_to_budget(lane.sessions)
            for session in lane.sessions:
                tokens += 1 + session.k
        self._busy = True
        seconds = self._simulation.varied(self.spec.verify.ms(tokens) / 1000.0)
        self._simulation.at(self._simulation.now + seconds, self._done, (lane, chunks), ends_pass=True)

    def _keep_to_budget(self, sessions: list[Session]) -> None:
        """Cuts drafts to what a pass may verify, evenly: all sessions' drafts are as often right here."""
        left = self.spec.verify_budget
        if left is None or sum(session.k for session in sessions) <= left:
            return
        for place, session in enumerate(sorted(sessions, key=lambda session: session.k)):
            session.k = min(session.k, left // (len(sessions) - place))
            left -= session.k

    def _next_ready(self) -> Lane | None:
        count = len(self.lanes)
        for step in range(1, count + 1):
            index = (self._last + step) % count
            lane = self.lanes[index]
            if lane.sessions and not lane.waiting:
                self._last = index
                return lane
        return None

    def _prompt_chunks(self, lane: Lane | None) -> tuple[list[Session], int]:
        """Sessions whose prompt ends in this pass or goes on after it, and the prompt tokens in it."""
        if not self._prefilling:
            return [], 0
        if lane.chunk_spent if lane is not None else any(o.chunk_spent for o in self.lanes if o.sessions):
            return [], 0
        room, chunks = self.spec.prefill_chunk, []
        for session in self._prefilling:
            if not room:
                break
            taken = min(room, session.prompt_left)
            session.prompt_left -= taken
            room -= taken
            chunks.append(session)
        for other in self.lanes:
            other.chunk_spent = True
        return chunks, self.spec.prefill_chunk - room

    def _done(self, argument: tuple[Lane | None, list[Session]]) -> None:
        """A pass is over: commit, next Draft, publish."""
        lane, chunks = argument
        self._busy = False
        if lane is not None:
            self._commit(lane)
        moved: dict[Lane, list[Session]] = {}
        for session in chunks:
            if not session.prompt_left:
                self._prefilling.remove(session)
                self._deliver(session, 1)
                if session.remaining:
                    moved.setdefault(self._join(session), []).append(session)
                else:
                    self._finish(session)
        if lane is not None:
            moved.pop(lane, None)
            lane.chunk_spent = False
            self._rebalance(lane, moved)
            self._ask(lane, lane.sessions)
        for other, sessions in moved.items():
            self._ask(other, sessions)
        self.look()

    def _commit(self, lane: Lane) -> None:
        simulation, agreement = self._simulation, self.spec.agreement
        lane.turn += 1
        for session in lane.sessions[:]:
            k = session.k
            accepted = simulation.accepted(agreement, k)
            session.took_all = int(k > 0 and accepted == k)
            simulation.note_round(k)
            self.book.note("undrafted", float(k == 0))
            self._deliver(session, accepted + 1)
            session.k = 0
            if not session.remaining:
                lane.sessions.remove(session)
                self._finish(session)

    def _deliver(self, session: Session, tokens: int) -> None:
        session.remaining -= tokens
        session.context += tokens
        self.book.tokens(session, tokens)

    def _finish(self, session: Session) -> None:
        self._live -= 1
        if session.drafter is not None:
            self._simulation.drafters[session.drafter].sessions.pop(session, None)
            session.drafter = None
        self._simulation.finished(session)

    def _join(self, session: Session) -> Lane:
        lane = min(self.lanes, key=lambda lane: len(lane.sessions))
        lane.sessions.append(session)
        return lane

    def _rebalance(self, lane: Lane, moved: dict[Lane, list[Session]]) -> None:
        """Who is too many in a lane moves to the smallest one as its round ends."""
        while len(self.lanes) > 1:
            smallest = min(self.lanes, key=lambda other: len(other.sessions))
            if len(lane.sessions) - len(smallest.sessions) <= 1:
                return
            session = lane.sessions.pop()
            smallest.sessions.append(session)
            moved.setdefault(smallest, []).append(session)

    # --- drafts

    def _ask(self, lane: Lane, sessions: list[Session]) -> None:
        """Sends Drafts for `sessions` of a lane and sets until when the lane waits for the answers."""
        simulation, suspect = self._simulation, self._missed >= MISSES
        now = simulation.now
        if sessions is lane.sessions:
            if lane.began and sessions:
                self.book.note("round", now - lane.began)
            lane.began = now if sessions else 0.0
        if suspect and now < self._probe_at:
            return
        messages = self._messages(lane, sessions, suspect)
        for index, message in messages.items():
            message.turn = message.turn if message.out else -1
            simulation.deliver(self.spec.rtt, simulation.drafters[index].draft, message)
        if not messages:
            return
        if suspect:
            self._probe_at = now + PROBE_SECONDS
            return
        awaited = sum(message.out > 0 for message in messages.values())
        if not awaited:
            return
        lane.waiting += awaited
        lane.deadline = now + self._deadline
        if lane.deadline < self._timer:
            self._timer = lane.deadline
            simulation.at(self._timer, self._look_at_deadlines, self._timer)

    def _messages(self, lane: Lane, sessions: list[Session], probe: bool) -> dict[int, DraftMessage]:
        """A Draft to each drafter concerned. Nobody waits for the answer to a probe."""
        now = self._simulation.now
        messages: dict[int, DraftMessage] = {}
        for session in sessions:
            if session.drafter is None and now >= session.look_again:
                self.find_drafter(session)
            k = min(self.spec.draft_length, session.remaining - 1)
            if session.drafter is None or k <= 0 or not (session.caught_up or session.warming):
                continue
            message = messages.get(session.drafter)
            if message is None:
                message = messages[session.drafter] = DraftMessage(lane, now)
                message.turn = -1 if probe else lane.turn
            if session.warming:
                message.riders.append((session, k, session.context))
                continue
            message.add(k, session.took_all)
            session.k = 0 if probe else k
        return messages

    def answered(self, message: DraftMessage) -> None:
        """A message's drafts have arrived: for the lane's round, or too late."""
        lane = message.lane
        seconds = self._simulation.now - message.sent
        self._learn(seconds)
        for session, _, _ in message.riders:
            session.caught_up, session.warming = session.drafter is not None, False
        if message.turn == lane.turn and lane.waiting:
            lane.waiting -= 1
            if not lane.waiting:
                self._missed = 0
                self._go()
        elif self._missed >= MISSES and seconds <= self._deadline:
            self._missed = 0

    def _learn(self, seconds: float) -> None:
        """The deadline is 2 × the 99th percentile of the last 256 answers, late ones included."""
        self._answer_seconds.append(seconds)
        self._answers += 1
        if self.spec.deadline is None and self._answers % SAMPLES_BEFORE_DEADLINE == 0:
            ranked = sorted(self._answer_seconds)
            p99 = ranked[math.ceil(0.99 * len(ranked)) - 1]
            self._deadline = min(LONGEST_DEADLINE, max(SHORTEST_DEADLINE, 2 * p99))

    def _look_at_deadlines(self, set_for: float) -> None:
        """One timer for all lanes, set anew for the next one that may be late."""
        if set_for != self._timer:
            return
        now, late = self._simulation.now, False
        for lane in self.lanes:
            if lane.waiting and lane.deadline <= now + TICK:
                late = True
                self._missed += 1
                self._probe_at = now + PROBE_SECONDS
                self._simulation.note_missed()
                self._give_up(lane)
        self._timer = min((lane.deadline for lane in self.lanes if lane.waiting), default=math.inf)
        if self._timer < math.inf:
            self._simulation.at(self._timer, self._look_at_deadlines, self._timer)
        if late:
            self._go()

    def _give_up(self, lane: Lane) -> None:
        """The lane goes without the drafts it waits for."""
        lane.waiting = 0
        lane.turn += 1
        for session in lane.sessions:
            session.k = 0
