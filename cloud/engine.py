"""The target's loop: continuous batching of sessions in lanes, with or without drafts.

One thread owns everything here. Requests, cancellations and drafts come in through `inbox`; Drafts leave
through the drafters' `send`, output through `publish`. With no drafter it is a plain server: the same code
with k = 0.
"""

from __future__ import annotations

import logging
import queue
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from paceline.cloud.budget import drafts_to_verify
from paceline.cloud.commit import Cut
from paceline.cloud.controller import Controller, Freedom, Plan
from paceline.cloud.drafting import Drafting, DraftingConfig
from paceline.cloud.events import Arrived, Cancel, Drain, Event, LinkDown, LinkUp, Reconfigure, Room, Submit
from paceline.cloud.lanes import Lane, Lanes
from paceline.cloud.passes import Pass, Round
from paceline.cloud.proposals import clear
from paceline.cloud.requests import Delta, Request
from paceline.cloud.sessions import Session
from paceline.cloud.statistics import TargetStatistics
from paceline.cloud.verify import Verified, verify
from paceline.core.clock import Clock, RealClock
from paceline.core.errors import PacelineError
from paceline.core.model import PackedModel, Segment

logger = logging.getLogger(__name__)

EVENTS_A_TURN = 256  # then the lanes go on, whatever else has come


@dataclass(frozen=True)
class EngineConfig:
    """Sizes of a target. prefill_chunk: prompt tokens that may ride along with a lane's round.

    lanes: None for as many as the controller chooses.
    """

    lanes: int | None = 1
    max_sessions: int = 32
    prefill_chunk: int = 256
    drafting: DraftingConfig = field(default_factory=DraftingConfig)


class Engine:
    """Sessions, lanes and one model.

    publish: called on the engine's thread with all deltas of a round; it must not block.
    token_bytes: id → bytes, empty for special tokens.
    """

    def __init__(
        self,
        model: PackedModel,
        token_bytes: Sequence[bytes],
        config: EngineConfig,
        publish: Callable[[list[Delta]], None],
        clock: Clock | None = None,
    ) -> None:
        self.inbox: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.model = model
        self.config = config
        self._vocabulary_size = min(model.vocabulary_size, len(token_bytes))  # the tail may be padding
        self.controller = Controller(Freedom(config.lanes, config.drafting.draft_length, config.drafting.verify_budget))
        self.drafting = Drafting(config.drafting, self._vocabulary_size, self.controller)
        self.statistics = TargetStatistics()
        self._token_bytes = token_bytes
        self._publish = publish
        self._clock = clock or RealClock()
        self._lanes = Lanes(config.lanes or 1)
        self._waiting: deque[Request] = deque()  # no room yet
        self._prefilling: deque[Session] = deque()
        self._by_request: dict[str, Session] = {}
        self._deltas: list[Delta] = []
        self._held_back: Event | None = None  # looked at next
        self._under_way = Pass(None, [], [])
        self._pass_seconds = 0.0  # that the last forward took
        self._running = True
        self.failure: Exception | None = None

    # --- the loop

    def run(self) -> None:
        """Until a Stop arrives. A model that fails ends every request with its error, and the loop."""
        try:
            while self._running:
                self.step(block=True)
        except Exception as error:
            self.failure = error
            logger.exception("the engine stopped")
            self._abandon(f"the target's model failed: {error}")

    def _abandon(self, sentence: str) -> None:
        """Publishes what was decided but not yet said, and an error for every request that has not ended."""
        deltas, self._deltas = self._deltas, []
        ended = {delta.request_id for delta in deltas if delta.finish_reason is not None}
        ids = [*self._by_request, *(request.id for request in self._waiting)]
        events = [] if self._held_back is None else [self._held_back]
        while not self.inbox.empty():
            events.append(self.inbox.get_nowait())
        ids += [event.request.id for event in events if isinstance(event, Submit)]
        failed = [Delta(id, finish_reason="error", error=sentence) for id in ids if id not in ended]
        self._publish(deltas + failed)

    def step(self, block: bool = False) -> bool:
        """One turn: receive → pick a lane → forward → commit → next Draft → publish. True if it did work."""
        if not self.begin(block):
            return False
        self.finish()
        return True

    def begin(self, block: bool = False) -> bool:
        """The first half of a turn, up to the forward; False when there was nothing to do."""
        self._receive(block)
        lane = self._lanes.next_ready(self._clock.now())
        chunks = self._prompt_chunks(lane)
        if lane is None and not chunks:
            self._flush()
            return False
        if lane is not None:
            self.drafting.give_up(lane.sessions, self._clock.now())
        sessions = lane.sessions[:] if lane is not None else []
        self._under_way = Pass(lane, sessions, self._forward(sessions, chunks))
        return True

    def finish(self) -> None:
        """The second half: what the forward found becomes the truth."""
        lane, sessions, verified = self._under_way
        done = self._commit(sessions, verified)
        self._end(done.ended)
        self._receive_drafts()
        drafts = [(one.session, len(one.tokens) - 1, one.drafted) for one in verified if one.drafted]
        self.drafting.verified(drafts, self._pass_seconds, self._clock.now())
        self._send_drafts(lane, done.joined)
        self._publish_round(len(sessions), verified, done.cuts)

    @property
    def _speculates(self) -> bool:
        drafting = self.config.drafting
        return bool(drafting.drafters) and drafting.draft_length != 0

    @property
    def live_sessions(self) -> int:
        """Sessions that hold KV now."""
        return len(self._by_request)

    @property
    def queued(self) -> int:
        """Requests that wait for room; safe from any thread."""
        return len(self._waiting)

    # --- receive

    def _receive(self, block: bool) -> None:
        self._admit()  # the last round may have made room; nothing else would wake a waiting request
        timeout = self._patience() if block else 0.0
        if self._held_back is not None:
            event, self._held_back, timeout = self._held_back, None, 0.0
            self._handle(event)
        try:
            event = self.inbox.get(timeout=timeout) if timeout != 0.0 else self.inbox.get_nowait()
            for _ in range(EVENTS_A_TURN):
                self._handle(event)
                event = self.inbox.get_nowait()
            self._handle(event)
        except queue.Empty:
            pass
        self._admit()

    def _receive_drafts(self) -> None:
        """Drafts that were made ahead came during the forward: they are looked at before others are asked for."""
        if not self.config.drafting.draft_ahead:
            return
        for _ in range(EVENTS_A_TURN):
            if self._held_back is not None or self.inbox.empty():
                return
            event = self.inbox.get_nowait()
            if not isinstance(event, Arrived):
                self._held_back = event
                return
            self._handle(event)

    def wake_at(self) -> float | None:
        """When something is to be done without being told, on the engine's clock; None for never."""
        now = self._clock.now()
        if (
            self._held_back is not None
            or self._deltas
            or self._lanes.next_ready(now, peek=True) is not None
            or self._prompt_chunk_allowed(None)
        ):
            return now
        return self._lanes.wake_at()

    def _patience(self) -> float | None:
        """Seconds that may be spent waiting for an event; None for any time."""
        wake_at = self.wake_at()
        if wake_at is None:
            return None
        seconds = wake_at - self._clock.now()
        return max(seconds, 1e-4) if seconds > 0 else 0.0

    def _handle(self, event: Event) -> None:
        now = self._clock.now()
        if isinstance(event, Arrived):
            self.drafting.arrived(event.drafter, event.message, now if event.at is None else event.at)
        elif isinstance(event, Submit):
            self._waiting.append(event.request)
        elif isinstance(event, Cancel):
            self._cancel(event.request_id)
        elif isinstance(event, LinkUp):
            self.drafting.link_up(event.drafter, event.welcome, event.send, now)
        elif isinstance(event, LinkDown):
            self.drafting.link_down(event.drafter, now)
        elif isinstance(event, Room):
            self.drafting.said_room(event.drafter, event.free_sessions, now)
        elif isinstance(event, Reconfigure):
            self.config = event.config
            new = event.config.drafting
            self.controller.set_freedom(Freedom(event.config.lanes, new.draft_length, new.verify_budget))
            self.drafting.reconfigure(event.config.drafting)
        elif isinstance(event, Drain):
            self._refuse_waiting(event.reason)
        else:
            self._running = False

    def _refuse_waiting(self, reason: str) -> None:
        """Only further choices of calls that have begun still wait for room."""
        begun = {session.request.call for session in self._by_request.values()}
        for request in self._waiting:
            if request.call not in begun:
                self._deltas.append(Delta(request.id, finish_reason="error", error=reason, leaving=True))
        self._waiting = deque(request for request in self._waiting if request.call in begun)

    def _admit(self) -> None:
        """Waiting requests become sessions, in order, as long as there is room."""
        while self._waiting and len(self._by_request) < self.config.max_sessions:
            request = self._waiting[0]
            try:
                span = self.model.allocate(len(request.prompt) + request.max_tokens)
            except PacelineError as error:  # it can never fit
                self._deltas.append(Delta(request.id, finish_reason="error", error=str(error)))
                self._waiting.popleft()
                continue
            if span is None:
                return
            self._waiting.popleft()
            session = Session(self.drafting.new_id(), request, self._token_bytes, span)
            self._by_request[request.id] = session
            self._prefilling.append(session)
            self.drafting.open(session, self._clock.now())
            self.statistics.opened(len(self._by_request))

    def _cancel(self, request_id: str) -> None:
        session = self._by_request.get(request_id)
        waiting = deque(request for request in self._waiting if request.id != request_id)
        if session is not None:
            self._end([session])
        elif len(waiting) == len(self._waiting):
            return  # it ended by itself a moment ago
        self._waiting = waiting
        self._deltas.append(Delta(request_id, finish_reason="cancelled"))

    # --- forward

    def _prompt_chunk_allowed(self, lane: Lane | None) -> bool:
        """At most one chunk between two rounds of a lane, so a long prompt delays others by one chunk only."""
        if not self._prefilling:
            return False
        if lane is not None:
            return not lane.chunk_spent
        return all(other.chunk_spent is False for other in self._lanes if other.sessions)

    def _prompt_chunks(self, lane: Lane | None) -> list[Segment]:
        """The next prompt tokens, up to one chunk, of as many sessions as that holds."""
        if not self._prompt_chunk_allowed(lane):
            return []
        room = self.config.prefill_chunk
        chunks: list[Segment] = []
        for session in self._prefilling:
            if room == 0:
                break
            start = session.kv_length
            tokens = session.tokens[start : start + room]
            room -= len(tokens)
            last = start + len(tokens) == len(session.tokens)
            chunks.append(Segment(session.span, start, tokens, 1 if last else 0))
        for other in self._lanes:
            other.chunk_spent = True
        return chunks

    def _forward(self, sessions: Sequence[Session], chunks: list[Segment]) -> list[Verified]:
        """One packed forward over a lane's drafts and the prompt chunks; what each session may commit."""
        segments, asking = [], list(sessions)
        drafts = drafts_to_verify(sessions, self.config.drafting.verify_budget, self.controller.agreement_of)
        for session, draft in zip(sessions, drafts, strict=True):
            tokens = [session.tokens[-1], *draft]
            segments.append(Segment(session.span, session.kv_length, tokens, len(tokens)))
        for session, chunk in zip(list(self._prefilling), chunks, strict=False):
            session.kv_length += len(chunk.tokens)
            if chunk.rows:
                asking.append(session)
                drafts.append([])
                self._prefilling.remove(session)
        started = self._clock.now()
        logits = self.model.forward(segments + chunks)[:, : self._vocabulary_size]
        verified = verify(logits, asking, drafts)
        self._pass_seconds = seconds = self._clock.now() - started
        self.statistics.forward(seconds, bool(sessions), bool(chunks))
        if chunks:
            self.controller.disturbed()
        else:
            self.controller.verified(sum(len(segment.tokens) for segment in segments), seconds, len(sessions))
        return verified

    # --- commit, next Draft, publish

    def _commit(self, sessions: Sequence[Session], verified: Sequence[Verified]) -> Round:
        """Makes the verified tokens the truth."""
        done = Round([], [], [])
        for index, (session, tokens, _, _) in enumerate(verified):
            cut = session.output.cut(tokens)
            session.extend(cut.token_ids)
            done.cuts.append(cut)
            if cut.finish_reason is not None:
                done.ended.append(session)
            elif index >= len(sessions):
                done.joined.append((self._lanes.join(session), session))
        clear(sessions)
        return done

    def _send_drafts(self, lane: Lane | None, joined: Sequence[tuple[Lane, Session]]) -> None:
        """The lane's next Draft leaves now; a session that joined another lane asks for its first one."""
        now = self._clock.now()
        moved = [(other, session) for other, session in joined if other is not lane]
        if lane is not None:
            lane.chunk_spent = False
            self._lanes.use(self._decide(now).lanes)
            moved += self._lanes.rebalance(lane)
            self.drafting.request(lane, lane.sessions, now)
        asking: dict[int, tuple[Lane, list[Session]]] = {}
        for other, session in moved:
            asking.setdefault(other.index, (other, []))[1].append(session)
        for other, sessions in asking.values():
            self.drafting.request(other, sessions, now)

    def _decide(self, now: float) -> Plan:
        decoding = [session for lane in self._lanes for session in lane.sessions]
        branching = self.drafting.ahead.branching(self.config.drafting.draft_ahead)
        return self.controller.decide(decoding, self.drafting.drafters.values(), now, branching)

    def _end(self, sessions: Sequence[Session]) -> None:
        """Frees the sessions at both ends."""
        if not sessions:
            return
        for session in sessions:
            self._lanes.leave(session)
            if session in self._prefilling:
                self._prefilling.remove(session)
            del self._by_request[session.request.id]
            self.model.free(session.span)
        self.drafting.close(sessions)

    def _publish_round(self, in_lane: int, verified: Sequence[Verified], cuts: Sequence[Cut]) -> None:
        """Texts and counts, after the next Draft has left; the first `in_lane` sessions were in the lane."""
        for index, ((session, _, log_probs, drafted), cut) in enumerate(zip(verified, cuts, strict=True)):
            tokens, finish_reason = cut
            if index < in_lane:
                self.statistics.round(len(tokens), drafted, self._speculates)
            else:
                self.statistics.first_token()
            text = session.output.text()
            self._deltas.append(Delta(session.request.id, tokens, text, log_probs[: len(tokens)], finish_reason))
        self._flush()

    def _flush(self) -> None:
        if self._deltas:
            self._publish(self._deltas)
            self._deltas = []
