"""A target as the drafter's service sees it: it sends Drafts, keeps what comes back, and commits as it likes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paceline.core.clock import Clock, ManualClock
from paceline.core.emulated import ToyLanguage, ToyModel
from paceline.core.sampling import Sampling
from paceline.edge.events import Limits, PeerDown, PeerUp, Received
from paceline.edge.runtimes.emulated import EmulatedRuntime
from paceline.edge.service import DrafterService
from paceline.edge.strategies.draft_model import DraftModel
from paceline.topology.wire import (
    Close,
    Draft,
    Drafted,
    DraftedItem,
    DraftItem,
    Hello,
    Message,
    Ping,
    check_hash,
    pack_tokens,
    unpack_tokens,
)

EPOCH = 7
GREEDY = Sampling(temperature=0.0)
LANGUAGE = ToyLanguage(vocabulary_size=61, seed=3)
PROMPT = [5, 9, 2, 40, 17, 3]


class CountingModel(ToyModel):
    """The toy model, with what it was asked for counted."""

    def __init__(self, language: ToyLanguage = LANGUAGE, **options: Any) -> None:
        super().__init__(language, **options)
        self.tokens_computed = 0
        self.forwards: list[tuple[int, ...]] = []  # tokens of each segment

    def forward(self, segments: Any) -> Any:
        self.forwards.append(tuple(len(segment.tokens) for segment in segments))
        self.tokens_computed += sum(self.forwards[-1])
        return super().forward(segments)

    @property
    def used_slots(self) -> int:
        return self._used


class Bench:
    """A service on a manual clock, and everything it replied, in order."""

    def __init__(self, limits: Limits | None = None, clock: Clock | None = None, strategy: Any = None, **model: Any):
        self.clock = clock or ManualClock()
        self.model = CountingModel(clock=self.clock, **model)
        self.strategy = strategy or DraftModel(EmulatedRuntime(self.model))
        self.sent: list[tuple[str, Message]] = []
        self.service = DrafterService(
            self.strategy,
            self.clock,
            limits or Limits(),
            lambda name, message: self.sent.append((name, message)),
            EPOCH,
        )

    def up(self, name: str, vocabulary_size: int = 61) -> None:
        self.service.inbox.put(PeerUp(name, hello(name, vocabulary_size)))

    def down(self, name: str) -> None:
        self.service.inbox.put(PeerDown(name))

    def put(self, name: str, message: Message) -> None:
        self.service.inbox.put(Received(name, message))

    def draft(self, name: str, *items: DraftItem, epoch: int = EPOCH) -> None:
        self.put(name, Draft(epoch, list(items)))

    def close(self, name: str, *sessions: int) -> None:
        self.put(name, Close(EPOCH, list(sessions)))

    def ping(self, name: str, *sessions: int) -> None:
        self.put(name, Ping(0, list(sessions)))

    def settle(self, limit: int = 10_000) -> list[tuple[str, DraftedItem]]:
        """Runs until nothing is left to do; what was answered meanwhile, item by item."""
        before = len(self.sent)
        for _ in range(limit):
            if not self.service.step() and not self.service.busy:
                return items(self.sent[before:])
        raise AssertionError("the service never comes to rest")

    def ask(self, name: str, *drafts: DraftItem) -> list[DraftedItem]:
        """Sends one Draft and returns its answers."""
        self.draft(name, *drafts)
        return [item for target, item in self.settle() if target == name]


def opened(**options: Any) -> Bench:
    """A bench with one target, "a", connected."""
    bench = Bench(**options)
    bench.up("a")
    return bench


def items(sent: Sequence[tuple[str, Message]]) -> list[tuple[str, DraftedItem]]:
    return [(name, item) for name, message in sent if isinstance(message, Drafted) for item in message.items]


def hello(name: str, vocabulary_size: int = 61) -> Hello:
    return Hello(1, 0, "test", name, b"n" * 32, "", vocabulary_size)


def item(
    session: int,
    tokens: Sequence[int],
    base: int = 0,
    k: int = 4,
    sampling: Sampling | None = GREEDY,
    prompt_length: int = 0,
    limit: int = 0,
) -> DraftItem:
    """What a correct target sends: `tokens` are all of the session's, those before `base` are known to be held."""
    return DraftItem(
        session=session,
        base=base,
        tokens=pack_tokens(tokens[base:]),
        check=check_hash(tokens[:base]),
        k=k,
        sampling=sampling if base == 0 else None,
        prompt_length=prompt_length,
        limit=limit,
    )


def proposals(answer: DraftedItem) -> list[int]:
    return list(unpack_tokens(answer.tokens))


def toy_greedy(tokens: Sequence[int], k: int, language: ToyLanguage = LANGUAGE) -> list[int]:
    """The `k` likeliest tokens after `tokens`, straight from the language."""
    state = 0
    for token in tokens:
        state = language.next_state(state, token)
    result = []
    for _ in range(k):
        result.append(int(language.rows([state])[0].argmax()))
        state = language.next_state(state, result[-1])
    return result
