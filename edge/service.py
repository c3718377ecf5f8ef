"""The drafter's loop: drain Q_in → form a batch, fair across targets → catch up → draft → put replies in Q_out.

Synchronous, on one thread, with its clock from outside. Peers talk to it through `inbox` alone, it answers
through `reply` alone. It never idles while there is work, and a session joins the batch at the next token.
"""

from __future__ import annotations

import math
import queue
from collections.abc import Callable, Mapping

from paceline.core.clock import Clock
from paceline.core.measured import Curve
from paceline.core.rejection import Weights
from paceline.edge.ahead import Ahead, Ready
from paceline.edge.events import Event, Limits, PeerDown, PeerUp, Received, Reconfigure, Tally
from paceline.edge.mail import Mail, Piece
from paceline.edge.queues import LEAST_CHUNK, Peer, Queues
from paceline.edge.recorder import Recorder
from paceline.edge.report.recording import AHEAD, DRAFT, READ
from paceline.edge.session import Phase, Session
from paceline.edge.sessions import Bounds, Sessions, answer
from paceline.edge.statistics import Statistics
from paceline.edge.strategies.base import Strategy
from paceline.topology.log_probs import pack_log_probs
from paceline.topology.weights import pack_weights
from paceline.topology.wire import (
    MAX_DRAFT_LENGTH,
    Close,
    Draft,
    Drafted,
    DraftedItem,
    DraftItem,
    Message,
    Ping,
    Status,
    pack_tokens,
)

WORK_A_TURN = 256  # items that are looked at, whatever else has come, before drafting goes on
QUEUE_FULL_RETRY_MS = 100
CHEAP_GROWTH = 1.25
_NAMES = {int(status): status.name.lower() for status in Status}


class DrafterService:
    """Serves all targets of one drafter.

    reply is called on the service's thread and must not block. epoch names this run: sessions belong to it.
    """

    def __init__(
        self,
        strategy: Strategy,
        clock: Clock,
        limits: Limits,
        reply: Callable[[str, Message], None],
        epoch: int = 1,
        recorder: Recorder | None = None,
    ) -> None:
        self.inbox: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.epoch = epoch
        self.max_context = strategy.max_context
        self.statistics = Statistics()
        bounds = Bounds(
            max_sessions=limits.max_sessions,
            max_context=strategy.max_context,
            vocabulary_size=strategy.vocabulary_size,
            idle_seconds=limits.idle_seconds,
            keeps_kv=strategy.keeps_kv,
            roomy=limits.max_sessions * strategy.max_context <= strategy.kv_slots,
        )
        self.sessions = Sessions(strategy, bounds, strategy.keeps_tail)
        self._mail = Mail()
        self._queues = Queues(limits, strategy.reads_together)
        self._ahead = Ahead(strategy, limits.max_ahead, self.sessions.spare_kept)
        self._strategy = strategy
        self._clock = clock
        self._limits = limits
        self._reply = reply
        self._recorder = recorder
        if recorder is not None:
            recorder.find = self.sessions.get
        self._chunk = limits.chunk
        self._reading = Curve()  # of chunks, over their tokens
        self._stopped = self._abandoned = False

    # --- the loop

    def run(self) -> None:
        """Works until Stop; what is in the batch then is still answered."""
        while not self._stopped:
            self.step(timeout=None)
        while self._queues.batch and not self._abandoned:
            self._draft()

    def abandon(self) -> None:
        """From any thread, after Stop: no more than the step being made now."""
        self._abandoned = True

    def step(self, timeout: float | None = 0.0) -> bool:
        """One unit of work: what arrived, then one forward; False when there was nothing to do.

        Waits for a message up to `timeout` seconds (None: for ever), but only where nothing else is to be done.
        """
        received = self._drain(timeout)
        if self._stopped:
            return received
        self._queues.fill_batch(self._clock.now())
        if reads := self._queues.turn_to_read(self._chunk):
            self._catch_up(reads)
        elif self._queues.batch:
            self._draft()
        elif self._ahead:
            self._draft_ahead()
        else:
            return received
        return True

    @property
    def busy(self) -> bool:
        """Whether something waits to be looked at, drafted, read or drafted ahead."""
        return bool(self._mail) or self._queues.busy or bool(self._ahead)

    # --- drain

    def _drain(self, timeout: float | None) -> bool:
        waits = timeout != 0.0 and not self.busy
        received = bool(self._mail)
        try:
            event = self.inbox.get(timeout=timeout) if waits else self.inbox.get_nowait()
            received = True
            self._sort(event)
            for _ in range(self.inbox.qsize()):
                self._sort(self.inbox.get_nowait())
        except queue.Empty:
            pass
        left = WORK_A_TURN
        while left > 0 and self._mail and not self._stopped:
            target, piece = self._mail.take()
            self._on_piece(self._queues.peers[target], piece)
            left -= piece.work
        if received:
            self.statistics.live(len(self.sessions))
        return received

    def _sort(self, event: Event) -> None:
        """Messages wait for their target's turn; all else takes effect at once."""
        peers = self._queues.peers
        if isinstance(event, Received):
            self._mail.put(event.name, event.message, event.at)
        elif isinstance(event, PeerUp):
            self._mail.open(event.name, event.tally or Tally())
            self.sessions.forget_target(event.name)
            self.sessions.shares[event.name] = self._limits.weights.get(event.name, 1.0)
            peers[event.name] = Peer(event.name, event.hello.vocabulary_size)
        elif isinstance(event, PeerDown):
            self._mail.close(event.name)
            self.sessions.forget_target(event.name)
            self.sessions.shares.pop(event.name, None)
            peers.pop(event.name, None)
        elif isinstance(event, Reconfigure):
            self._limits = self._queues.limits = event.limits
            self.sessions.shares = {name: event.limits.weights.get(name, 1.0) for name in peers}
        else:
            self._stopped = True
        self._drop_gone()

    def _drop_gone(self) -> None:
        if self.sessions.disturbed:
            self.sessions.disturbed = False
            self._queues.drop_gone()

    def _on_piece(self, peer: Peer, piece: Piece) -> None:
        message = piece.message
        if isinstance(message, Draft):
            self.statistics.drafts_received += piece.last
            self._on_draft(peer, message, piece.number, piece.at)
        elif isinstance(message, Close):
            if message.epoch == self.epoch:
                self.sessions.close(peer.name, message.sessions)
        elif isinstance(message, Ping) and message.sessions is not None:
            self.sessions.keep_only(peer.name, message.sessions)
        self._drop_gone()

    def _on_draft(self, peer: Peer, draft: Draft, number: int, at: float | None) -> None:
        """number: of the message that these items came in; at: when it came, maybe while a step was made."""
        now = self._clock.now()
        came = now if at is None else min(at, now)
        answers = []
        for item in draft.items:
            if draft.epoch != self.epoch:
                answers.append(answer(item.session, Status.UNKNOWN, 0, item.base + len(item.tokens) // 4))
                continue
            taken = self.sessions.take(peer.name, item, now)
            if isinstance(taken, Session):
                if self._recorder is not None:
                    self._recorder.arrived(taken, item.k)
                self._ahead.settle(taken)
                taken = self._schedule(peer, taken, item, number, came)
            if taken is not None:
                answers.append(taken)
        if any(item.k for item in draft.items):
            peer.asks(now)
        if answers:
            self._send(peer.name, answers, 0, 0)

    def _schedule(self, peer: Peer, session: Session, item: DraftItem, number: int, came: float) -> DraftedItem | None:
        """What becomes of a session that was asked for: an answer at once, a place in the queue, or reading."""
        held = len(session.committed)
        room = min(session.span.size, self.max_context) - held
        session.want = max(0, min(item.k, MAX_DRAFT_LENGTH, room)) if held else 0
        session.branches = item.branches if self._strategy.forks else 0
        session.owes = True
        session.vocabulary_size = peer.vocabulary_size or session.vocabulary_size
        session.message = number
        session.received_at = came
        behind = session.behind
        if item.taken and not behind and len(session.tail) >= item.taken:
            self._queues.leave(session)
            session.owes = False
            self._ahead.prepare(session, item.taken, session.want)
            if self._recorder is not None:
                self._recorder.taken(session, item.taken)
            return None
        reads = behind > self._strategy.quick
        if not behind and len(session.tail) >= session.want:
            self._queues.leave(session)
            return self._proposals(session, peer.vocabulary_size)
        if (session.phase is Phase.READING) != reads:
            self._queues.leave(session)
        if session.phase is Phase.IDLE:
            if self._queues.full(peer.name):
                return answer(session.id, Status.FULL, held, held, QUEUE_FULL_RETRY_MS)
            (self._queues.read_later if reads else self._queues.enqueue)(session)
        if reads and behind + self._queues.ahead(session) > self._chunk:
            session.want, session.owes = 0, False  # it is answered now, and read in the background
            return answer(session.id, Status.WARMING, held, held)
        return None

    # --- catch up

    def _catch_up(self, reads: list[tuple[Session, int]]) -> None:
        start = self._clock.now()
        self._strategy.read(reads)
        end = self._clock.now()
        count = sum(count for _, count in reads)
        if self._recorder is not None:
            self._recorder.forward(READ, len(reads), start, end, count)
        self.statistics.worked(start, end)
        self.statistics.tokens_read += count
        self._chunk = self._fitting_chunk(count, end - start)
        for session, _ in reads:
            if session.started_at < session.received_at:
                session.started_at = start
            self._after_reading(session, end)

    def _fitting_chunk(self, count: int, seconds: float) -> int:
        """A chunk is what takes about chunk_share of the shortest round, judged by the last one's speed; or more, where
        a larger pass is known to take no longer, as on a GPU that has time for more."""
        budget = self._limits.chunk_share * self._queues.shortest_round(self._clock.now())
        if seconds <= 0 or budget == math.inf:
            return self._limits.chunk
        self._reading.add(count, seconds)
        fitting = max(LEAST_CHUNK, min(self._limits.chunk, int(budget * count / seconds)))
        times = self._reading.times()
        if times.points[0][0] > fitting:  # nothing so small has been tried
            return fitting
        allowed = max(1000.0 * budget, CHEAP_GROWTH * times.ms(fitting))
        while fitting < self._limits.chunk and times.ms(min(2 * fitting, self._limits.chunk)) <= allowed:
            fitting = min(2 * fitting, self._limits.chunk)
        return fitting

    def _after_reading(self, session: Session, now: float) -> None:
        if session.behind > (self._strategy.quick if session.want else 0):
            return
        self._queues.leave(session)
        if session.want:
            self._queues.enqueue(session)
        elif session.owes:
            self._answer({session.target: [session]}, now)

    # --- draft and answer

    def _draft(self) -> None:
        start = self._clock.now()
        done = self._strategy.advance(self._queues.batch)
        end = self._clock.now()
        if self._recorder is not None:
            self._recorder.forward(DRAFT, len(self._queues.batch), start, end)
        self.statistics.worked(start, end)
        if done:
            self._queues.drop_finished(done)
            finished: dict[str, list[Session]] = {}
            for session in done:
                if session.owes:
                    finished.setdefault(session.target, []).append(session)
            self._answer(finished, end)

    def _draft_ahead(self) -> None:
        """One step for rounds that may come; what is ready leaves, a message for each target."""
        ready: dict[str, list[Ready]] = {}
        start, before = self._clock.now(), self._ahead.tokens
        for one in self._ahead.step():
            ready.setdefault(one.session.target, []).append(one)
        end = self._clock.now()
        self.statistics.ahead_seconds += end - start
        if self._recorder is not None:
            self._recorder.forward(AHEAD, self._ahead.tokens - before, start, end)
        for target, group in ready.items():
            items = [DraftedItem(r.session.id, int(Status.OK), r.position, r.position) for r in group]
            self.statistics.branches += sum(len(r.branches) for r in group)
            self._reply(target, Drafted(self.epoch, items, branches=[r.branches for r in group]))
        self.statistics.tokens_ahead = self._ahead.tokens

    def _answer(self, finished: Mapping[str, list[Session]], now: float) -> None:
        """One Drafted for each target, with the longest wait and the longest work among its sessions."""
        for target, sessions in finished.items():
            received = min(session.received_at for session in sessions)
            started = max(received, min(session.started_at for session in sessions))  # a newer Draft starts anew
            vocabulary_size = self._queues.peers[target].vocabulary_size
            items = [self._proposals(session, vocabulary_size) for session in sessions]
            self.statistics.queue_ms.add((started - received) * 1e3)
            self.statistics.draft_ms.add((now - started) * 1e3)
            self._send(target, items, int((started - received) * 1e6), int((now - started) * 1e6))

    def _proposals(self, session: Session, vocabulary_size: int) -> DraftedItem:
        session.owes = False
        held = len(session.committed)
        tokens = session.tail[: session.want]
        if 0 < vocabulary_size < self._strategy.vocabulary_size:
            tokens = _within(tokens, vocabulary_size)
        self.statistics.tokens_drafted += len(tokens)
        if len(tokens) == session.want:
            self._ahead.prepare(session, len(tokens), len(tokens))
        return DraftedItem(session.id, int(Status.OK), held, held, pack_tokens(tokens))

    def _send(self, target: str, items: list[DraftedItem], queue_us: int, draft_us: int) -> None:
        for item in items:
            self.statistics.answers[_NAMES[item.status]] += 1
        log_probs, weights = self._log_probs(target, items), self._weights(target, items)
        self._reply(target, Drafted(self.epoch, items, queue_us, draft_us, log_probs=log_probs, weights=weights))

    def _log_probs(self, target: str, items: list[DraftedItem]) -> bytes | None:
        """How likely the proposed tokens are; None where nobody wants to know."""
        rows: list[float | None] = []
        for item in items:
            session, count = self.sessions.get(target, item.session), len(item.tokens) // 4
            said = session.log_probs if session is not None and session.tells else {}
            rows += [said.get(place) for place in range(item.position, item.position + count)]
        return pack_log_probs(rows) if any(row is not None for row in rows) else None

    def _weights(self, target: str, items: list[DraftedItem]) -> bytes | None:
        """What the proposed tokens were drawn from; None where none was drawn."""
        rows: list[Weights | None] = []
        for item in items:
            session, count = self.sessions.get(target, item.session), len(item.tokens) // 4
            rows += session.weights[:count] if session is not None and session.draws else [None] * count
        return pack_weights(rows) if any(rows) else None


def _within(tokens: list[int], vocabulary_size: int) -> list[int]:
    """The first tokens that the target knows."""
    for place, token in enumerate(tokens):
        if token >= vocabulary_size:
            return tokens[:place]
    return tokens
