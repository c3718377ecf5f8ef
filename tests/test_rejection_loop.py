"""`verification: rejection` with the real engine and the real drafter service: the target's own texts come out."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from random import Random

import pytest
from scipy import stats

from paceline.cloud.drafting import DraftingConfig
from paceline.cloud.engine import Engine, EngineConfig
from paceline.cloud.events import Arrived, LinkUp, Submit
from paceline.cloud.requests import Delta, Request
from paceline.core.clock import ManualClock
from paceline.core.emulated import ToyLanguage, ToyModel
from paceline.core.sampling import History, Sampling, adjust, choice_seed, probabilities
from paceline.edge.events import Limits, PeerUp, Received
from paceline.edge.runtimes.emulated import EmulatedRuntime
from paceline.edge.service import DrafterService
from paceline.edge.strategies.base import Strategy
from paceline.edge.strategies.draft_model import DraftModel
from paceline.edge.strategies.ngram import NGram
from paceline.topology.handshake import REJECTION
from paceline.topology.wire import Drafted, Hello, Message, Welcome, decode, encode

VOCABULARY = 7
TOKEN_BYTES = [bytes([97 + token]) for token in range(VOCABULARY)]
LANGUAGE = ToyLanguage(VOCABULARY, seed=5)
PROMPT = (1, 2, 1, 2, 1)
LENGTH = 6  # tokens of a text; the first COUNTED are compared
COUNTED = 4


class World:
    """An engine and a drafter, joined by frames of which some are lost, come late or come twice, by its own dice."""

    def __init__(
        self,
        strategy: Strategy,
        trouble: float,
        capabilities: Sequence[str] = ("coupled", REJECTION),
        budget: int | None = None,
    ) -> None:
        self.clock = ManualClock()
        self.dice = Random(2)
        self.trouble = trouble
        drafting = DraftingConfig(("d",), 3, deadline=0.05, verification="rejection", verify_budget=budget)
        config = EngineConfig(2, max_sessions=48, drafting=drafting)
        self.engine = Engine(ToyModel(LANGUAGE, clock=self.clock), TOKEN_BYTES, config, self._publish, self.clock)
        self.service = DrafterService(strategy, self.clock, Limits(max_sessions=48, max_batch=16), self._reply)
        self.to_target: list[bytes] = []
        self.late: list[bytes] = []
        self.drafted_bytes = 0
        self.texts: dict[str, list[int]] = {}
        self.service.inbox.put(PeerUp("t", Hello(1, 0, "test", "t", bytes(32), "", VOCABULARY)))
        welcome = Welcome(1, "toy", strategy.name, 48, strategy.max_context, 16, list(capabilities))
        self.engine.inbox.put(LinkUp("d", welcome, self._send))

    def _send(self, message: Message) -> bool:
        if self.dice.random() >= self.trouble:
            for _ in range(1 + (self.dice.random() < self.trouble)):
                self.service.inbox.put(Received("t", decode(encode(message))))
        return True

    def _reply(self, name: str, message: Message) -> None:
        self.to_target.append(encode(message))
        self.drafted_bytes += len(self.to_target[-1])

    def _publish(self, deltas: list[Delta]) -> None:
        for delta in deltas:
            self.texts.setdefault(delta.request_id, []).extend(delta.token_ids)

    def decode(self, requests: Sequence[Request]) -> list[tuple[int, ...]]:
        for request in requests:
            self.engine.inbox.put(Submit(request))
        self.engine.step()
        while self.engine.live_sessions or self.engine.queued:
            self.engine.step()
            while self.service.step():
                pass
            arriving, self.to_target = self.to_target, []
            for frame in self._delivered(arriving):
                message = decode(frame)
                assert isinstance(message, Drafted)
                self.engine.inbox.put(Arrived("d", message))
            self.clock.advance(0.02)
        return [tuple(self.texts[request.id]) for request in requests]

    def _delivered(self, frames: list[bytes]) -> list[bytes]:
        """What arrives now: some of it, and some of what was held back."""
        now, back = [], self.late
        self.late = []
        for frame in frames + back:
            fate = self.dice.random()
            if fate >= self.trouble or fate < self.trouble / 4:
                now.append(frame)
            if fate < self.trouble / 2:
                self.late.append(frame)
            elif fate < self.trouble:
                self.clock.advance(0.02)
        return now


def draft_model(agreement: float) -> DraftModel:
    return DraftModel(EmulatedRuntime(ToyModel(replace(LANGUAGE, agreement=agreement))))


def requests(sampling: Sampling, count: int) -> list[Request]:
    seeds = [choice_seed(9, index) for index in range(count)]
    return [Request(f"r-{seed}", PROMPT, replace_seed(sampling, seed), LENGTH) for seed in seeds]


def replace_seed(sampling: Sampling, seed: int) -> Sampling:
    fields = {name: getattr(sampling, name) for name in sampling.__struct_fields__}
    return Sampling(**{**fields, "seed": seed})


def expected(sampling: Sampling) -> dict[tuple[int, ...], float]:
    """The target's own probability of every beginning of a text."""
    found = {(): 1.0}
    for _ in range(COUNTED):
        longer = {}
        for text, probability in found.items():
            state = 0
            for token in (*PROMPT, *text):
                state = LANGUAGE.next_state(state, token)
            row = adjust(LANGUAGE.rows([state])[0], sampling, History((*PROMPT, *text), len(PROMPT)))
            for token, share in enumerate(probabilities(row[None, :], [sampling])[0].tolist()):
                longer[(*text, token)] = probability * share
        found = longer
    return found


def p_value(texts: Sequence[tuple[int, ...]], wanted: dict[tuple[int, ...], float]) -> float:
    """Chi-square of the texts' beginnings; those that are expected less than five times count as one."""
    counts = Counter(text[:COUNTED] for text in texts)
    assert all(wanted[text] > 0 for text in counts)
    likely = [text for text, share in wanted.items() if share * len(texts) >= 5]
    observed = [counts[text] for text in likely]
    shares = [wanted[text] for text in likely]
    if (1 - sum(shares)) * len(texts) >= 5:
        observed.append(len(texts) - sum(observed))
        shares.append(1 - sum(shares))
    total = sum(observed) / math.fsum(shares)
    return float(stats.chisquare(observed, [share * total for share in shares]).pvalue)


PLAIN = Sampling(temperature=1.0)
ALL_STEPS = Sampling(temperature=1.4, top_p=0.95, top_k=6, frequency_penalty=0.6, logit_bias={3: 0.7})


@pytest.mark.parametrize(
    ("agreement", "trouble", "sampling", "budget"),
    [
        (0.9, 0.0, PLAIN, None),
        (0.3, 0.0, PLAIN, None),
        (0.8, 0.1, PLAIN, None),
        (0.7, 0.05, ALL_STEPS, None),
        (0.6, 0.0, PLAIN, 30),
    ],
    ids=["a good drafter", "a bad drafter", "a bad link", "every sampling parameter", "a budget for half of each lane"],
)
def test_texts_follow_the_targets_distribution(
    agreement: float, trouble: float, sampling: Sampling, budget: int | None
) -> None:
    """3 000 seeds through the whole loop, against the target's own probabilities of all texts of four tokens."""
    world = World(draft_model(agreement), trouble, budget=budget)
    texts = world.decode(requests(sampling, 3000))
    statistics = world.engine.statistics
    assert statistics.drafted_tokens > 2500
    assert statistics.emitted_with_draft > 1.2 * statistics.drafted_rounds
    assert p_value(texts, expected(sampling)) > 1e-3


def test_prompt_lookup_proposes_what_is_certain_to_it() -> None:
    """An ngram drafter's proposals are point masses: texts follow the target's distribution all the same."""
    world = World(NGram(max_context=100), 0.0)
    texts = world.decode(requests(PLAIN, 3000))
    assert world.engine.statistics.drafted_tokens > 3000
    assert p_value(texts, expected(PLAIN)) > 1e-3


def test_without_drafts_and_at_temperature_0_the_text_is_that_of_coupled_verification() -> None:
    """Nothing is drawn then: rounds without a draft use the noise of plain decoding."""
    cold = [Request(f"c-{n}", (n % VOCABULARY, 2), Sampling(seed=n, temperature=0.0), LENGTH) for n in range(20)]
    warm = requests(PLAIN, 20)
    lost = World(draft_model(0.8), trouble=1.0)
    fallback = World(draft_model(0.8), trouble=0.0, capabilities=("coupled",))
    drawn = World(draft_model(0.8), trouble=0.0)
    assert fallback.decode(cold) == lost.decode(cold) == drawn.decode(cold)
    assert drawn.engine.statistics.drafted_tokens > 0
    assert fallback.decode(warm) == lost.decode(warm) != drawn.decode(warm)
    assert fallback.engine.statistics.drafted_tokens > 0 == lost.engine.statistics.drafted_tokens
