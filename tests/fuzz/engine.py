"""A target's engine under two authenticated drafters that answer whatever decodes."""

from __future__ import annotations

from functools import cache

import msgspec

from paceline.cloud.drafting import DraftingConfig
from paceline.cloud.drafts import KEPT_SEND_TIMES
from paceline.cloud.engine import Engine, EngineConfig
from paceline.cloud.events import Arrived, Cancel, LinkDown, LinkUp, Submit
from paceline.cloud.requests import Delta, Request
from paceline.core.clock import ManualClock
from paceline.core.emulated import ToyLanguage, ToyModel
from paceline.core.sampling import Sampling
from paceline.topology.handshake import DRAFT_AHEAD, REJECTION
from paceline.topology.wire import (
    Branch,
    Draft,
    Drafted,
    DraftedItem,
    Message,
    Welcome,
    check_hash,
    decode,
    encode,
    pack_tokens,
    unpack_tokens,
)

from . import messages
from .supply import Supply

VOCABULARY = 16
LANGUAGE = ToyLanguage(VOCABULARY, seed=8)
TOKEN_BYTES = [bytes([97 + token]) for token in range(VOCABULARY)]
DRAFTERS = ("d", "e")
REQUESTS = (
    Request("short", (1, 2, 3), Sampling(seed=1, temperature=0.0), 12),
    Request("long", tuple(range(15)), Sampling(seed=2, temperature=0.8), 9),
    Request("penalties", (4, 4, 4), Sampling(seed=3, frequency_penalty=0.7, top_k=5), 12),
)
MOST_SENT = 2 * len(DRAFTERS)  # messages for one that arrived or one turn


REQUEST = {request.id: request for request in REQUESTS}


@cache
def plain_tokens(name: str) -> list[int]:
    """What the engine says without any drafter."""
    bench = Bench(Supply(b""), drafters=())
    bench.engine.inbox.put(Submit(REQUEST[name]))
    bench.end()
    return bench.ids[name]


class Bench:
    """The engine and its clock; frames that it sent; what it published."""

    def __init__(self, supply: Supply, drafters: tuple[str, ...] = DRAFTERS) -> None:
        self.supply = supply
        self.clock = ManualClock()
        self.model = ToyModel(LANGUAGE, kv_slots=64, clock=self.clock)
        self.exact = supply.below(4) < 3 or not drafters  # a text by rejection depends on what was drafted
        drafting = DraftingConfig(
            drafters,
            supply.choose((4, 1, 16)),
            deadline=0.05,
            max_tokens=8,
            verification="coupled" if self.exact else "rejection",
            draft_ahead=supply.choose((0, 5)),
        )
        config = EngineConfig(1 + supply.below(2), max_sessions=2, prefill_chunk=7, drafting=drafting)
        self.engine = Engine(self.model, TOKEN_BYTES, config, self._publish, self.clock)
        self.ids: dict[str, list[int]] = {request.id: [] for request in REQUESTS}
        self.ends: dict[str, str] = {}
        self.submitted: set[str] = set()
        self.sent = 0

    def _publish(self, deltas: list[Delta]) -> None:
        for delta in deltas:
            assert delta.request_id not in self.ends
            self.ids[delta.request_id] += delta.token_ids
            if delta.finish_reason is not None:
                self.ends[delta.request_id] = delta.finish_reason

    def _send(self, message: Message) -> bool:
        assert decode(encode(message)) == message
        if isinstance(message, Draft):
            for item in message.items:
                truth = self.engine.drafting.sessions[item.session].tokens
                tokens = unpack_tokens(item.tokens)
                assert tokens == truth[item.base : item.base + len(tokens)]
                assert item.check == check_hash(truth[: item.base])
        self.sent += 1
        return bool(self.supply.below(8) < 7)

    def play(self) -> None:
        """One thing that happens."""
        supply = self.supply
        name = supply.choose(DRAFTERS)
        form = supply.below(12)
        if form < 5:
            message = messages.received(self._drafted(name))
            if isinstance(message, Drafted):
                self.engine.inbox.put(Arrived(name, message))
        elif form == 5:
            request = supply.choose(REQUESTS)
            if request.id not in self.submitted:
                self.submitted.add(request.id)
                self.engine.inbox.put(Submit(request))
        elif form == 6:
            self.clock.advance(supply.choose((0.001, 0.04, 0.06, 1.5)))
        elif form == 7:
            self.engine.inbox.put(LinkDown(name) if supply.below(2) else LinkUp(name, self._welcome(), self._send))
        elif form == 8 and supply.below(4) == 0:
            self.engine.inbox.put(Cancel(supply.choose(REQUESTS).id))
        else:
            self.sent = 0
            waiting = 1 + self.engine.inbox.qsize()
            self.engine.step()
            assert self.sent <= MOST_SENT * waiting + len(REQUESTS), "answers multiply"
            self._check()

    def _welcome(self) -> Welcome:
        number = self.supply.number
        wild = self.supply.below(4) == 0
        longest, context = (number(), number()) if wild else (16, self.supply.choose((100, 10)))
        return Welcome(7, "m", "draft_model", 4, context, longest, [DRAFT_AHEAD, REJECTION][: 1 + self.supply.below(2)])

    def _drafted(self, name: str) -> Drafted:
        supply = self.supply
        sessions = list(self.engine.drafting.sessions.values())
        items, proposed = [], []
        for _ in range(1 + supply.below(3)):
            if not sessions or supply.below(16) == 0:
                items.append(DraftedItem(supply.number(), supply.below(8), supply.number(), supply.number()))
                continue
            session = supply.choose(sessions)
            length = len(session.tokens)
            status = supply.choose((0, 0, 0, 0, 1, 2, 3, 4, 5, -1))
            right = plain_tokens(session.request.id)[length - len(session.request.prompt) :]
            tokens = right[:4] if supply.below(2) else messages.tokens(supply, VOCABULARY, 17)
            held, position = messages.near(supply, length), messages.near(supply, length)
            items.append(DraftedItem(session.id, status, held, position, pack_tokens(tokens), supply.number()))
            proposed += tokens
        weights = None if self.exact and supply.below(8) else messages.weights(supply, proposed)
        epoch = 7 if supply.below(16) else supply.number()
        if supply.below(4) == 0:
            items = [msgspec.structs.replace(item, tokens=b"") for item in items]
            branches = [self._branches(item) for item in items]
            return Drafted(epoch, items, branches=branches)
        return Drafted(epoch, items, supply.number(), supply.number(), weights=weights)

    def _branches(self, item: DraftedItem) -> list[Branch]:
        """Of outcomes that may come true, with drafts that may be right."""
        supply, found = self.supply, []
        session = self.engine.drafting.sessions.get(item.session)
        for _ in range(supply.below(4)):
            right = (
                plain_tokens(session.request.id)[len(session.tokens) - len(session.request.prompt) :] if session else []
            )
            count = supply.below(6)
            token = right[count] if count < len(right) and supply.below(4) else supply.number() & 0xFFFFFFFF
            draft = right[count + 1 : count + 5] if supply.below(2) else messages.tokens(supply, VOCABULARY, 17)
            found.append((count, token, pack_tokens(draft)))
        return found

    def _check(self) -> None:
        for name, ids in self.ids.items():
            assert not ids or not self.exact or ids == plain_tokens(name)[: len(ids)]
            assert all(0 <= token < VOCABULARY for token in ids)
        for session in self.engine.drafting.sessions.values():
            state = session.drafts
            assert state.acknowledged <= len(session.tokens)
            assert state.check == check_hash(session.tokens[: state.acknowledged])
            assert len(state.sent_at) <= KEPT_SEND_TIMES
            assert all(0 <= token < VOCABULARY for token in state.proposal)

    def end(self) -> None:
        """Every request ends with its whole text, and nothing is held."""
        for _ in range(2000):
            if not self.engine.step():
                if not self.engine.live_sessions and not self.engine.queued:
                    break
                self.clock.advance(0.06)
        else:
            raise AssertionError("it does not end")
        assert self.model._used == 0 and not self.engine.drafting.sessions


def one(data: bytes) -> None:
    """Nothing a drafter answers raises, changes a coupled text, delays it for ever, or makes messages multiply."""
    bench = Bench(Supply(data))
    for name in DRAFTERS:
        bench.engine.inbox.put(LinkUp(name, bench._welcome(), bench._send))
    while bench.supply.left:
        bench.play()
    bench.end()
    for name in bench.submitted:
        if bench.ends[name] != "cancelled":
            assert len(bench.ids[name]) == REQUEST[name].max_tokens
            assert bench.ids[name] == plain_tokens(name) or not bench.exact
