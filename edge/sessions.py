"""What the drafter knows of each session: committed tokens, what of them is computed, and nothing else.

The truth lives at the target. `base + len(tokens)` of a Draft item is the session's version; a lower one than
held is ignored, an equal one answered again, a higher one applied. Whatever does not fit ends in `unknown, held`,
and the target sends again from there. A rollback is nothing but a smaller `computed`.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from paceline.core.model import Span
from paceline.core.sampling import Sampling
from paceline.edge.cache import Cache, Kept
from paceline.edge.session import Phase, Session
from paceline.topology.wire import DraftedItem, DraftItem, Status, unpack_tokens

CLOSED_IDS = 8192  # of a target; a Draft that is later than so many closes opens a session that the next Ping frees
SHORTEST_RETRY_MS = 50


class Memory(Protocol):
    """Where sessions get their spans from."""

    def allocate(self, length: int) -> Span | None: ...

    def free(self, span: Span) -> None: ...


@dataclass(frozen=True)
class Bounds:
    """What limits sessions. idle_seconds: how long without a Draft before one may be evicted."""

    max_sessions: int
    max_context: int
    vocabulary_size: int
    idle_seconds: float
    keeps_kv: bool  # whether spans hold anything worth keeping after a session
    roomy: bool  # whether all sessions fit at their longest: then spans are that long, and any later one can use them


class Sessions:
    """All sessions, scoped to their targets: no target can name another's."""

    def __init__(self, memory: Memory, bounds: Bounds, keeps_tail: bool = True) -> None:
        self.cache = Cache(memory.free)
        self.disturbed = False  # a session with work to do is gone: queues need a look
        self.shares: dict[str, float] = {}  # weights of the connected targets
        self._memory = memory
        self._bounds = bounds
        self._keeps_tail = keeps_tail
        self._sessions: OrderedDict[tuple[str, int], Session] = OrderedDict()  # unused longest first
        self._held: Counter[str] = Counter()  # sessions of each target
        self._closed: dict[str, OrderedDict[int, None]] = {}

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[Session]:
        return iter(self._sessions.values())

    def get(self, target: str, session: int) -> Session | None:
        return self._sessions.get((target, session))

    # --- Draft

    def take(self, target: str, item: DraftItem, now: float) -> Session | DraftedItem | None:
        """Applies one item of a Draft.

        Returns the session when there is something to propose or read; an answer when it is due at once; None when
        the item is to be ignored.
        """
        session = self._sessions.get((target, item.session))
        version = item.base + len(item.tokens) // 4
        if session is None:
            return self._open(target, item, version, now)
        held = len(session.committed)
        if version < held:
            return None
        if item.base > held:
            return answer(item.session, Status.UNKNOWN, held, version)
        if session.hash_before(item.base) != item.check:
            self.release(session)
            return answer(item.session, Status.UNKNOWN, 0, version)
        tokens = unpack_tokens(item.tokens)
        if self._beyond(version, tokens):
            self.release(session)
            return answer(item.session, Status.BEYOND, held, version)
        session.commit(item.base, tokens)
        session.used_at = now
        self._sessions.move_to_end((target, item.session))
        if item.sampling is not None and (item.sampling != session.sampling or item.weights != session.draws):
            self._resample(session, item)
        if version >= session.span.size and not self._widen(session, now):
            return self._full(item, version, now)
        return session

    def _open(self, target: str, item: DraftItem, version: int, now: float) -> Session | DraftedItem | None:
        if item.session in self._closed.get(target, ()):
            return None
        if item.base > 0:
            return answer(item.session, Status.UNKNOWN, 0, version)
        tokens = unpack_tokens(item.tokens)
        if self._beyond(version, tokens):
            return answer(item.session, Status.BEYOND, 0, version)
        length = max(item.limit, version + 1) if item.limit else self._bounds.max_context
        length = min(length, self._bounds.max_context)
        if len(self._sessions) >= self._bounds.max_sessions:
            if self._owed_a_place(target):
                if not self._evict_idle(now) and not self._take_place():
                    return answer(item.session, Status.FULL, 0, version, SHORTEST_RETRY_MS)
            elif not self._evict_idle(now):
                return self._full(item, version, now)
        kept = self.cache.take(target, tokens, length)
        span = kept[0].span if kept else self._longest_span() or self._allocate(length, now)
        if span is None:
            return self._full(item, version, now)
        sampling = item.sampling or Sampling()
        session = Session(
            target, item.session, sampling, item.prompt_length, span, self._keeps_tail, item.weights, committed=tokens
        )
        session.tells = item.log_probs
        if kept:
            session.computed = kept[1]
            if kept[1] == len(tokens) < len(kept[0].tokens):
                session.spare = kept[0].tokens[kept[1] :]
        session.used_at = now
        self._sessions[target, item.session] = session
        self._held[target] += 1
        return session

    def _beyond(self, version: int, tokens: array[int]) -> bool:
        """Past the context window, or holding ids that this drafter's vocabulary lacks: nothing to propose, ever."""
        too_long = version >= self._bounds.max_context
        return too_long or (bool(tokens) and max(tokens) >= self._bounds.vocabulary_size)

    def _resample(self, session: Session, item: DraftItem) -> None:
        session.sampling = item.sampling or session.sampling
        session.draws = item.weights
        session.tells = item.log_probs
        session.prompt_length = item.prompt_length
        session.computed = min(session.computed, len(session.committed))
        session.tail.clear()
        session.history = None
        session.__post_init__()

    # --- room

    def _longest_span(self) -> Span | None:
        """One of max_context where memory is made for that; a chat's next turn has a higher limit than the last."""
        span = None
        while self._bounds.roomy and span is None:
            span = self._memory.allocate(self._bounds.max_context)
            if span is None and not self._make_room():
                break
        return span

    def _allocate(self, length: int, now: float) -> Span | None:
        while True:
            span = self._memory.allocate(length)
            if span is not None:
                return span
            if not (self._make_room() or self._evict_idle(now)):
                return None

    def _make_room(self) -> bool:
        """One thing gives way to sessions, False when there is none: KV that was kept, down to a quarter of what it may
        be, then the forks of the session that was idle longest, then the rest of what was kept."""
        forked = next((session for session in self._sessions.values() if session.forks), None)
        return self.spare_kept() or (forked is not None and self._drop_forks(forked)) or self.cache.evict()

    def spare_kept(self) -> bool:
        """Frees the oldest kept KV for drafting ahead, if a quarter of max_sessions remain kept."""
        return len(self.cache) > self._bounds.max_sessions // 4 and self.cache.evict()

    def _drop_forks(self, session: Session) -> bool:
        forks, session.forks, session.plan = session.forks, [], None
        for fork in forks:
            self._memory.free(fork.span)
        return bool(forks)

    def _evict_idle(self, now: float) -> bool:
        """Frees the session that was idle longest, if that is long enough."""
        for session in self._sessions.values():
            if now - session.used_at <= self._bounds.idle_seconds:
                return False
            if session.phase is Phase.IDLE:
                self.release(session, keep=False)
                return True
        return False

    def _owed_a_place(self, target: str) -> bool:
        """Whether one more session would leave the target within its share of the places."""
        return self._over_share(target, sum(self.shares.values())) <= -1

    def _over_share(self, target: str, weights: float) -> float:
        """Sessions of a target beyond its share: of max_sessions, by its weight in the connected targets' sum."""
        share = self._bounds.max_sessions * self.shares.get(target, 0.0) / weights if weights else 0.0
        return self._held[target] - share

    def _take_place(self) -> bool:
        """Frees the session idle longest of the target most above its share; False when each of its sessions is busy.

        Who takes stays within its share and who gives keeps at least its own, rounded down: places do not wander back.
        """
        weights = sum(self.shares.values())
        rich = max(self.shares, key=lambda name: self._over_share(name, weights))
        oldest = next((s for s in self._sessions.values() if s.target == rich and s.phase is Phase.IDLE), None)
        if oldest is None or self._over_share(rich, weights) <= 0:
            return False
        self.release(oldest)
        return True

    def _widen(self, session: Session, now: float) -> bool:
        """A span for a session that grew past the limit its target named; its KV is computed anew."""
        self._keep(session)
        self._drop_forks(session)
        session.computed, session.spare = 0, None
        session.tail.clear()
        span = self._allocate(self._bounds.max_context, now)
        if span is None:
            self._forget(session)
            return False
        session.span = span
        return True

    def _full(self, item: DraftItem, version: int, now: float) -> DraftedItem:
        """Room may come when the session that is idle longest may be evicted."""
        oldest = next((s.used_at for s in self._sessions.values()), now)
        wait_ms = int((oldest + self._bounds.idle_seconds - now) * 1000)
        return answer(item.session, Status.FULL, 0, version, max(SHORTEST_RETRY_MS, wait_ms))

    # --- ends

    def close(self, target: str, ids: Sequence[int]) -> None:
        """These sessions are over and stay so, also where a Draft of one of them is still to come."""
        closed = self._closed.setdefault(target, OrderedDict())
        for session_id in ids:
            self._release_id(target, session_id)
        closed.update(dict.fromkeys(ids[-CLOSED_IDS:]))
        while len(closed) > CLOSED_IDS:
            closed.popitem(last=False)

    def keep_only(self, target: str, ids: Iterable[int]) -> None:
        """Frees the target's other sessions: it no longer knows them."""
        if not self._held[target]:
            return
        live = set(ids)
        for owner, session_id in list(self._sessions):
            if owner == target and session_id not in live:
                self._release_id(owner, session_id)

    def forget_target(self, target: str) -> None:
        """The link is new or gone: no message of before can come any more, and none of its sessions is held."""
        self.keep_only(target, ())
        self._closed.pop(target, None)
        self._held.pop(target, None)

    def _release_id(self, target: str, session_id: int) -> None:
        session = self._sessions.get((target, session_id))
        if session is not None:
            self.release(session)

    def release(self, session: Session, keep: bool = True) -> None:
        """Forgets a session; it is merely unknown from now on. Its KV stays as a cache if `keep`."""
        if keep:
            self._keep(session)
        else:
            self._memory.free(session.span)
        self._forget(session)

    def _keep(self, session: Session) -> None:
        if self._bounds.keeps_kv:
            self.cache.keep(Kept(session.target, session.computed_tokens(), session.span))
        else:
            self._memory.free(session.span)

    def _forget(self, session: Session) -> None:
        self._drop_forks(session)
        del self._sessions[session.target, session.id]
        self._held[session.target] -= 1
        self.disturbed = self.disturbed or session.phase is not Phase.IDLE
        session.phase = Phase.GONE


def answer(session: int, status: Status, held: int, position: int, retry_after_ms: int = 0) -> DraftedItem:
    """An answer without proposals; `position` says to which version of the session it belongs."""
    return DraftedItem(session, int(status), held, position, b"", retry_after_ms)
