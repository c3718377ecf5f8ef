"""The target's loop over a toy model and a virtual clock; its drafter is a fake that answers as scripted."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

import numpy as np

from paceline.cloud.drafters import Policy
from paceline.cloud.drafting import DraftingConfig
from paceline.cloud.engine import Engine, EngineConfig
from paceline.cloud.events import Arrived, LinkDown, LinkUp, Submit
from paceline.cloud.requests import Delta, Request
from paceline.core.clock import ManualClock
from paceline.core.emulated import ToyLanguage, ToyModel
from paceline.core.model import Segment
from paceline.core.sampling import History, Sampling, adjust, choose
from paceline.topology.wire import (
    Close,
    Draft,
    Drafted,
    DraftedItem,
    DraftItem,
    Message,
    Status,
    Welcome,
    decode,
    encode,
    pack_tokens,
    unpack_tokens,
)

VOCABULARY = 64
LANGUAGE = ToyLanguage(VOCABULARY, seed=3)
TOKEN_BYTES = [bytes([97 + token % 26]) for token in range(VOCABULARY)]
EPOCH = 2**63 + 5


def plain(request: Request) -> list[int]:
    """Plain decoding, one row at a time."""
    tokens, state = list(request.prompt), 0
    for token in tokens:
        state = LANGUAGE.next_state(state, token)
    while len(tokens) < len(request.prompt) + request.max_tokens:
        row = adjust(LANGUAGE.rows([state])[0], request.sampling, History(tokens, len(request.prompt)))
        token = int(choose(row[None, :], [request.sampling], [len(tokens)])[0])
        tokens.append(token)
        if token in request.stop_token_ids:
            break
        state = LANGUAGE.next_state(state, token)
    return tokens[len(request.prompt) :]


def ask(name: str = "r", prompt: Sequence[int] = (1, 2, 3), max_tokens: int = 40, **sampling: object) -> Request:
    return Request(name, tuple(prompt), Sampling(**{"seed": 11, "temperature": 0.9, **sampling}), max_tokens)  # type: ignore[arg-type]


class StrictModel(ToyModel):
    """A toy model that fails as an embedding would on an id outside the vocabulary, and notes every forward."""

    def __init__(self, **options: object) -> None:
        super().__init__(LANGUAGE, **options)  # type: ignore[arg-type]
        self.passes: list[list[Segment]] = []

    def forward(self, segments: Sequence[Segment]) -> np.ndarray:
        if any(not 0 <= token < VOCABULARY for segment in segments for token in segment.tokens):
            raise IndexError("index out of range in self")
        self.passes.append(list(segments))
        return super().forward(segments)

    @property
    def used(self) -> int:
        return self._used


class FakeDrafter:
    """Not a drafter: it holds no model, records what it is sent and answers what a test tells it to."""

    def __init__(self, bench: Bench, name: str = "d", **welcome: int) -> None:
        self.bench, self.name = bench, name
        self.drafts: list[DraftItem] = []
        self.closed: list[int] = []
        self.frames: list[bytes] = []
        self.oracle: Callable[[DraftItem], DraftedItem | None] | None = None
        self.welcome = Welcome(
            welcome.get("epoch", EPOCH),
            "fake",
            "fake",
            welcome.get("sessions", 99),
            welcome.get("context", 4096),
            welcome.get("longest", 16),
        )

    def up(self) -> None:
        self.bench.put(LinkUp(self.name, self.welcome, self.send))

    def down(self) -> None:
        self.bench.put(LinkDown(self.name))

    def send(self, message: Message) -> bool:
        self.frames.append(encode(message))
        message = decode(self.frames[-1])
        if isinstance(message, Close):
            self.closed.extend(message.sessions)
        elif isinstance(message, Draft):
            self.drafts.extend(message.items)
            answers = [self.oracle(item) for item in message.items] if self.oracle else []
            if any(answers):
                self.bench.put(Arrived(self.name, Drafted(self.welcome.epoch, [a for a in answers if a])))
        return True

    def answer(
        self,
        item: DraftItem,
        tokens: Sequence[int] = (),
        status: Status = Status.OK,
        held: int | None = None,
        position: int | None = None,
        retry_after_ms: int = 0,
        epoch: int | None = None,
    ) -> None:
        """Sends one answer; held and position are the item's version unless said otherwise."""
        version = item.base + len(item.tokens) // 4
        answer = DraftedItem(
            item.session,
            int(status),
            version if held is None else held,
            version if position is None else position,
            pack_tokens(tokens),
            retry_after_ms,
        )
        self.bench.put(Arrived(self.name, Drafted(self.welcome.epoch if epoch is None else epoch, [answer])))

    def last(self, session: int | None = None) -> DraftItem:
        return [item for item in self.drafts if session in (None, item.session)][-1]


class Bench:
    """An engine, its clock and what it published."""

    def __init__(
        self,
        *,
        drafters: Sequence[str] = ("d",),
        k: int = 4,
        deadline: float | None = 0.1,
        slots: int = 4096,
        policy: Policy = "failover",
        **config: int,
    ) -> None:
        self.clock = ManualClock(100.0)
        self.model = StrictModel(kv_slots=slots)
        max_tokens = config.pop("max_tokens", 16_384)
        drafting = DraftingConfig(tuple(drafters), k, deadline, max_tokens, policy)
        self.engine = Engine(
            self.model, TOKEN_BYTES, EngineConfig(drafting=drafting, **config), self.publish, self.clock
        )
        self.put = self.engine.inbox.put
        self.ids: dict[str, list[int]] = defaultdict(list)
        self.texts: dict[str, str] = defaultdict(str)
        self.ends: dict[str, Delta] = {}

    def publish(self, deltas: list[Delta]) -> None:
        for delta in deltas:
            assert delta.request_id not in self.ends, "output after the end"
            self.ids[delta.request_id] += delta.token_ids
            self.texts[delta.request_id] += delta.text
            if delta.finish_reason is not None:
                self.ends[delta.request_id] = delta

    def submit(self, *requests: Request) -> None:
        for request in requests:
            self.put(Submit(request))

    def finish(self, turns: int = 5000) -> None:
        """Steps, letting time pass where nothing is to be done, until every request has ended."""
        for _ in range(turns):
            if not self.engine.step():
                if not self.engine.live_sessions and not self.engine.queued:
                    return
                self.clock.advance(0.01)
        raise AssertionError("it does not end")

    def opened_first(self, name: str) -> tuple[FakeDrafter, Request, list[int]]:
        """As `opened`, of a drafter by that name, with a longer text."""
        return self.opened(ask(max_tokens=200), name)

    def opened(self, request: Request | None = None, name: str = "d") -> tuple[FakeDrafter, Request, list[int]]:
        """A fake drafter and one session that has its first token and awaits a draft."""
        request = request or ask()
        drafter = FakeDrafter(self, name)
        drafter.up()
        self.submit(request)
        assert self.engine.step()  # the prompt
        drafter.answer(drafter.drafts[0])  # it has read the prompt
        assert self.engine.step()  # the first token is there, the first round had nothing to wait for
        assert not self.engine.step()
        assert drafter.last().k == 4
        return drafter, request, plain(request)


def always_right(requests: Sequence[Request]) -> Callable[[DraftItem], DraftedItem | None]:
    """Answers every Draft with what plain decoding says next; it learns whose session it is from the prompt."""
    texts = {request.prompt: [*request.prompt, *plain(request)] for request in requests}
    sessions: dict[int, list[int]] = {}

    def oracle(item: DraftItem) -> DraftedItem | None:
        version = item.base + len(item.tokens) // 4
        if item.base == 0:
            tokens = unpack_tokens(item.tokens).tolist()
            sessions[item.session] = next(
                text for prompt, text in texts.items() if tuple(tokens[: len(prompt)]) == prompt
            )
        elif item.k == 0:
            return None
        tokens = sessions[item.session][version : version + item.k]
        return DraftedItem(item.session, int(Status.OK), version, version, pack_tokens(tokens))

    return oracle
