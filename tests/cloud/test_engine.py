"""The target's loop over a toy model and a virtual clock; its drafter is a fake that answers as scripted."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from paceline.cloud.drafting import DrafterState, DraftingConfig
from paceline.cloud.engine import Arrived, Cancel, Engine, EngineConfig, LinkDown, LinkUp, Stop, Submit
from paceline.cloud.requests import Delta, Request
from paceline.core.clock import ManualClock, RealClock
from paceline.core.emulated import ToyLanguage, ToyModel
from paceline.core.model import Segment
from paceline.core.sampling import History, Sampling, adjust, choose, log_probabilities
from paceline.topology.wire import (
    Close,
    Draft,
    Drafted,
    DraftedItem,
    DraftItem,
    Message,
    Status,
    Welcome,
    check_hash,
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
            welcome.get("epoch", EPOCH), "fake", "fake", 99, welcome.get("context", 4096), welcome.get("longest", 16)
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
        **config: int,
    ) -> None:
        self.clock = ManualClock(100.0)
        self.model = StrictModel(kv_slots=slots)
        max_tokens = config.pop("max_tokens", 16_384)
        drafting = DraftingConfig(tuple(drafters), k, deadline, max_tokens)
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

    def opened(self, request: Request | None = None) -> tuple[FakeDrafter, Request, list[int]]:
        """A fake drafter and one session that has its first token and awaits a draft."""
        request = request or ask()
        drafter = FakeDrafter(self)
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


# --- plain -----------------------------------------------------------------------------------------


def many(count: int = 12) -> list[Request]:
    kinds = [
        {},
        {"temperature": 0.0},
        {"top_k": 9, "frequency_penalty": 0.5},
        {"top_p": 0.7, "repetition_penalty": 1.4},
    ]
    return [ask(f"r{i}", [i, *range(i)], 10 + 7 * i % 40, seed=i * 77, **kinds[i % 4]) for i in range(count)]


@pytest.mark.parametrize("lanes", [1, 2, 3, 4])
@pytest.mark.parametrize("drafted", [False, True])
def test_text_is_plain_decoding_at_any_number_of_lanes(lanes: int, drafted: bool) -> None:
    """Twelve sessions of all kinds, five at a time, with and without drafts: the plain sampler's ids and text."""
    requests = many()
    bench = Bench(drafters=("d",) if drafted else (), lanes=lanes, max_sessions=5, prefill_chunk=4)
    if drafted:
        drafter = FakeDrafter(bench)
        drafter.oracle = always_right(requests)
        drafter.up()
    bench.submit(*requests)
    bench.finish()
    for request in requests:
        expected = plain(request)
        assert bench.ids[request.id] == expected
        assert bench.texts[request.id] == b"".join(TOKEN_BYTES[token] for token in expected).decode()
        assert bench.ends[request.id].finish_reason == "length"
    assert (bench.model.used, bench.engine.live_sessions, bench.engine.drafting.live()) == (0, 0, [])
    assert bench.engine.statistics.tokens == sum(len(plain(request)) for request in requests)
    statistics = bench.engine.statistics.snapshot()
    assert statistics["sessions_peak"] == 5
    if drafted:
        assert statistics["acceptance_length"] > 3.5
        assert statistics["drafted_rounds"] > 0.7 * statistics["rounds"]
    else:
        assert statistics["rounds"] == statistics["tokens"] - len(requests)
        assert (statistics["drafted_rounds"], statistics["fallback_rounds"], statistics["acceptance_length"]) == (
            0,
            0,
            1.0,
        )


def test_log_probabilities_are_the_raw_rows() -> None:
    """Log-probabilities come from the target's rows before bias and penalties, one for each id."""
    base = ask(max_tokens=9, frequency_penalty=1.5)
    request = Request(base.id, base.prompt, base.sampling, 9, log_probs=3)
    got: list[Delta] = []
    bench = Bench(drafters=())
    bench.engine._publish = got.extend
    bench.submit(request)
    while bench.engine.step():
        pass
    tokens, state = plain(request), 0
    for token in request.prompt:
        state = LANGUAGE.next_state(state, token)
    entries = [entry for delta in got for entry in delta.log_probs]
    assert [entry.token for entry in entries] == tokens
    for entry, token in zip(entries, tokens, strict=True):
        assert (entry.value, entry.top) == log_probabilities(LANGUAGE.rows([state])[0], token, 3)
        state = LANGUAGE.next_state(state, token)


# --- drafts ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("right", "drafted"), [(0, 4), (1, 4), (3, 4), (4, 4), (2, 2), (16, 16)])
def test_a_round_emits_what_agrees_and_one_more(right: int, drafted: int) -> None:
    """Of a draft with so many right tokens before a wrong one, those and the target's own next are emitted."""
    bench = Bench()
    drafter, request, text = bench.opened()
    have = len(bench.ids["r"])
    draft = text[have : have + right]
    draft += [(text[have + right] + 1) % VOCABULARY] * (drafted - right)
    drafter.answer(drafter.last(), draft)
    assert bench.engine.step()
    assert bench.ids["r"] == text[: have + right + 1]
    statistics = bench.engine.statistics
    assert (statistics.drafted_rounds, statistics.drafted_tokens, statistics.emitted_with_draft) == (
        1,
        drafted,
        right + 1,
    )
    assert statistics.snapshot()["acceptance_length"] == right + 1
    item = drafter.last()
    assert unpack_tokens(item.tokens).tolist() == text[have : have + right + 1]
    assert item.base == len(request.prompt) + have
    assert item.check == check_hash([*request.prompt, *text[:have]])
    assert item.sampling is None


def test_the_first_draft_opens_the_session_with_everything() -> None:
    """At once on arrival, before the prompt is computed: all tokens, sampling, prompt length, limit, k = 0."""
    bench = Bench()
    drafter = FakeDrafter(bench)
    drafter.up()
    request = ask(max_tokens=7)
    bench.submit(request)
    bench.engine.step()
    item = drafter.drafts[0]
    assert (item.base, item.check, item.k) == (0, 0, 0)
    assert (item.sampling, item.prompt_length, item.limit) == (request.sampling, 3, 10)
    assert unpack_tokens(item.tokens).tolist() == [1, 2, 3]


def test_a_long_prompt_goes_in_several_drafts() -> None:
    """With ten tokens a Draft at most, each next part leaves on the answer to the one before."""
    bench = Bench(max_tokens=10, prefill_chunk=4)
    drafter = FakeDrafter(bench)
    drafter.up()
    request = ask(prompt=list(range(25)))
    bench.submit(request)
    bench.engine.step()
    for _ in range(2):
        drafter.answer(drafter.last())
        bench.engine.step()
    assert [(item.base, len(item.tokens) // 4, item.k) for item in drafter.drafts] == [
        (0, 10, 0),
        (10, 10, 0),
        (20, 5, 0),
    ]
    assert drafter.last().check == check_hash(range(20))


def test_a_draft_is_never_longer_than_what_may_still_be_emitted() -> None:
    """Sixteen right tokens with two left to emit: one draft token is checked, the cap holds, k was asked small."""
    bench = Bench()
    request = ask(max_tokens=4)
    drafter = FakeDrafter(bench)
    drafter.up()
    bench.submit(request)
    bench.engine.step()
    drafter.answer(drafter.last())
    bench.engine.step()
    text = plain(request)
    assert (bench.ids["r"], drafter.last().k) == (text[:2], 1)
    drafter.answer(drafter.last(), [text[2], text[3], *range(14)])
    bench.engine.step()
    assert bench.ids["r"] == text
    assert bench.engine.statistics.drafted_tokens == 1
    assert bench.ends["r"].finish_reason == "length"
    assert len(drafter.drafts) == 2


@pytest.mark.parametrize("wild", [VOCABULARY, VOCABULARY + 1, 2**31, 2**32 - 1])
@pytest.mark.parametrize("right", [0, 2])
def test_ids_outside_the_vocabulary_never_reach_the_model(wild: int, right: int) -> None:
    """A proposal is cut at its first such id; the tokens before it still count, nothing is waited for."""
    bench = Bench()
    drafter, _, text = bench.opened()
    have = len(bench.ids["r"])
    drafter.answer(drafter.last(), [*text[have : have + right], wild, *text[have + right : have + 2]])
    assert bench.engine.step()
    assert bench.ids["r"] == text[: have + right + 1]
    assert bench.engine.statistics.drafted_tokens == right
    drafter.down()
    bench.finish()
    assert bench.ids["r"] == text


def test_a_late_draft_is_trimmed_and_used() -> None:
    """After a missed deadline the round goes plain; of the reply that comes then, all but the first token counts."""
    bench = Bench()
    drafter, _, text = bench.opened()
    have, item = len(bench.ids["r"]), drafter.last()
    bench.clock.advance(0.101)
    assert bench.engine.step()
    assert bench.ids["r"] == text[: have + 1]
    assert bench.engine.statistics.fallback_rounds == 2  # the first round had no draft either
    assert not bench.engine.step()
    drafter.answer(item, text[have : have + 4])
    assert bench.engine.step()
    assert bench.ids["r"] == text[: have + 5]
    assert bench.engine.statistics.drafted_tokens == 3


def test_a_late_draft_that_did_not_come_true_is_dropped() -> None:
    """A reply whose first token is not what was committed is no draft; the lane waits on for the right one."""
    bench = Bench()
    drafter, _, text = bench.opened()
    have, item = len(bench.ids["r"]), drafter.last()
    bench.clock.advance(0.101)
    assert bench.engine.step()
    drafter.answer(item, [(text[have] + 1) % VOCABULARY, *text[have + 1 : have + 4]])
    assert not bench.engine.step()
    drafter.answer(drafter.last(), text[have + 1 : have + 5])
    assert bench.engine.step()
    assert bench.ids["r"] == text[: have + 6]


@pytest.mark.parametrize("shift", [-60, -2, 1, 50])
def test_a_draft_for_another_position_changes_nothing(shift: int) -> None:
    """Positions before what was asked, or beyond what is committed, are no draft for this round."""
    bench = Bench()
    drafter, _, text = bench.opened()
    have, item = len(bench.ids["r"]), drafter.last()
    at = item.base + len(item.tokens) // 4
    drafter.answer(item, [9, 9, 9, 9], position=max(0, at + shift))
    assert not bench.engine.step()
    bench.clock.advance(0.101)
    assert bench.engine.step()
    assert bench.ids["r"] == text[: have + 1]
    assert bench.engine.statistics.drafted_tokens == 0


def test_a_doubled_answer_is_used_once() -> None:
    """The second copy of a reply whose tokens are all committed is no draft."""
    bench = Bench()
    drafter, _, text = bench.opened()
    have, item = len(bench.ids["r"]), drafter.last()
    drafter.answer(item, text[have : have + 4])
    assert bench.engine.step()
    drafter.answer(item, text[have : have + 4])
    assert not bench.engine.step()
    assert bench.engine.statistics.drafted_rounds == 1
    assert bench.ids["r"] == text[: have + 5]


@pytest.mark.parametrize("wrong", ["epoch", "session", "held"])
def test_answers_of_another_run_session_or_future_are_dropped(wrong: str) -> None:
    """Another epoch, an unknown session, more held than was ever committed: nothing happens."""
    bench = Bench()
    drafter, _, text = bench.opened()
    have, item = len(bench.ids["r"]), drafter.last()
    draft = text[have : have + 4]
    if wrong == "epoch":
        drafter.answer(item, draft, epoch=EPOCH - 1)
    elif wrong == "session":
        drafter.answer(DraftItem(item.session + 1, item.base, item.tokens, item.check, item.k), draft)
    else:
        drafter.answer(item, draft, held=10_000)
    assert not bench.engine.step()
    drafter.answer(item, draft)
    assert bench.engine.step()
    assert bench.ids["r"] == text[: have + 5]


# --- answers other than drafts ---------------------------------------------------------------------


@pytest.mark.parametrize("held", [0, 2, 4])
def test_unknown_is_answered_from_what_is_held(held: int) -> None:
    """The tokens after `held` leave at once, with the hash of those before it; the lane does not wait."""
    bench = Bench()
    drafter, request, text = bench.opened()
    have = len(bench.ids["r"])
    committed = [*request.prompt, *text[:have]]
    bench.engine.drafting.sessions[drafter.last().session].drafts.acknowledged = 3
    drafter.answer(drafter.last(), status=Status.UNKNOWN, held=held)
    assert bench.engine.step()
    again = drafter.last()
    assert (again.base, unpack_tokens(again.tokens).tolist()) == (held, committed[held:])
    assert (again.check, again.k) == (check_hash(committed[:held]), 4)
    assert (again.sampling is not None) == (held == 0)
    assert bench.ids["r"] == text[: have + 1]
    drafter.answer(again, text[have : have + 4])
    assert bench.engine.step()
    assert bench.ids["r"] == text[: have + 5]


def test_unknown_twice_at_the_same_place_starts_over() -> None:
    """The drafter holds that many tokens, but others: the session is sent whole with the next round."""
    bench = Bench()
    drafter, request, _ = bench.opened()
    session = bench.engine.drafting.sessions[drafter.last().session]
    count = len(drafter.drafts)
    drafter.answer(drafter.last(), status=Status.UNKNOWN, held=session.drafts.acknowledged)
    assert bench.engine.step()
    item = drafter.last()
    assert len(drafter.drafts) == count + 1
    assert (item.base, item.check, item.sampling) == (0, 0, request.sampling)
    assert unpack_tokens(item.tokens).tolist() == [*request.prompt, *bench.ids["r"]]


def test_full_is_asked_again_after_its_time() -> None:
    """For retry_after_ms the session decodes plainly without waiting or asking; then it is asked again."""
    bench = Bench()
    drafter, _, text = bench.opened()
    drafter.answer(drafter.last(), status=Status.FULL, retry_after_ms=500)
    count = len(drafter.drafts)
    for _ in range(10):
        assert bench.engine.step()
    assert len(drafter.drafts) == count
    bench.clock.advance(0.501)
    assert bench.engine.step()
    assert len(drafter.drafts) == count + 1
    assert drafter.last().k == 4
    assert bench.ids["r"] == text[: len(bench.ids["r"])]


def test_beyond_is_never_asked_again_and_concerns_that_session_alone() -> None:
    """Past the drafter's window a session decodes plainly for good; another one is drafted for."""
    bench = Bench()
    drafter, _, text = bench.opened()
    drafter.answer(drafter.last(), status=Status.BEYOND)
    count = len(drafter.drafts)
    for _ in range(5):
        assert bench.engine.step()
        bench.clock.advance(3.0)
    assert len(drafter.drafts) == count
    bench.submit(ask("other", [5, 5], seed=4))
    assert bench.engine.step()
    assert drafter.last().prompt_length == 2
    bench.finish()
    assert bench.ids["r"] == text


def test_a_session_longer_than_the_drafters_context_asks_for_less() -> None:
    """k shrinks to what fits in the drafter's window, then the session is no longer asked for."""
    bench = Bench()
    request = ask(max_tokens=20)
    drafter = FakeDrafter(bench, context=11)
    drafter.oracle = always_right([request])
    drafter.up()
    bench.submit(request)
    bench.finish()
    assert bench.ids["r"] == plain(request)
    assert max(item.base + len(item.tokens) // 4 + item.k for item in drafter.drafts) == 11


def test_warming_is_not_waited_for() -> None:
    """A drafter that still reads is not waited for, until it has answered a draft."""
    bench = Bench()
    drafter, _, text = bench.opened()
    have = len(bench.ids["r"])
    drafter.answer(drafter.last(), status=Status.WARMING)
    assert bench.engine.step() and bench.engine.step()
    assert bench.ids["r"] == text[: have + 2]
    drafter.answer(drafter.last(), text[have + 1 : have + 5])
    assert bench.engine.step()
    assert bench.engine.statistics.drafted_rounds == 1
    assert bench.ids["r"] == text[: have + 6]
    assert not bench.engine.step()  # it is waited for again


# --- deadlines, links ------------------------------------------------------------------------------


def miss(bench: Bench, times: int) -> None:
    for _ in range(times):
        assert not bench.engine.step()
        bench.clock.advance(0.101)
        assert bench.engine.step()


def test_three_misses_make_a_lane_plain_with_one_probe_a_second() -> None:
    """Two misses still wait; after the third nothing is waited for and one Draft a second leaves."""
    bench = Bench()
    drafter, _, text = bench.opened(ask(max_tokens=400))
    miss(bench, 3)
    count = len(drafter.drafts)
    for _ in range(50):
        assert bench.engine.step()
        bench.clock.advance(0.01)
    assert len(drafter.drafts) == count  # the third round's own request was the probe
    bench.clock.advance(0.6)
    assert bench.engine.step() and bench.engine.step()
    assert len(drafter.drafts) == count + 1
    assert drafter.last().k == 4
    assert bench.ids["r"] == text[: len(bench.ids["r"])]


def test_two_misses_and_a_draft_begin_the_count_anew() -> None:
    """A draft in time between misses keeps the lane waiting."""
    bench = Bench()
    drafter, _, text = bench.opened(ask(max_tokens=400))
    miss(bench, 2)
    have = len(bench.ids["r"])
    drafter.answer(drafter.last(), text[have : have + 4])
    assert bench.engine.step()
    miss(bench, 2)
    assert not bench.engine.step()


@pytest.mark.parametrize("useful", [True, False])
def test_an_answer_to_the_probe_ends_plain_decoding(useful: bool) -> None:
    """A late draft that can be used, or one that came in time and could not, makes the lane wait again."""
    bench = Bench()
    drafter, _, text = bench.opened(ask(max_tokens=400))
    miss(bench, 3)
    assert bench.engine.step()
    have, item = len(bench.ids["r"]), drafter.last()
    at = item.base + len(item.tokens) // 4 - 3  # in the output
    if useful:
        bench.clock.advance(30.0)
        drafter.answer(item, text[at : at + 4])
    else:
        bench.clock.advance(0.05)
        drafter.answer(item, [(text[at] + 1) % VOCABULARY])
    assert bench.engine.step()
    assert len(bench.ids["r"]) > have
    assert drafter.last().base + len(drafter.last().tokens) // 4 == 3 + len(bench.ids["r"])
    assert not bench.engine.step()


def test_a_useless_answer_past_the_deadline_leaves_the_lane_plain() -> None:
    """A drafter that is slower than its deadline and never right in time is not waited for."""
    bench = Bench()
    drafter, _, text = bench.opened(ask(max_tokens=400))
    miss(bench, 3)
    assert bench.engine.step()
    item = drafter.last()
    at = item.base + len(item.tokens) // 4 - 3
    bench.clock.advance(0.2)
    drafter.answer(item, [(text[at] + 1) % VOCABULARY])
    assert bench.engine.step() and bench.engine.step() and bench.engine.step()


def test_deadline_is_twice_the_p99_of_arrivals_within_bounds() -> None:
    """1 s until 16 samples, then 2 × p99, 5 ms at least and 2 s at most; a fixed one is fixed."""
    state = DrafterState("d", None)
    for _ in range(15):
        state.arrivals.add(0.02)
    assert state.deadline() == 1.0
    state.arrivals.add(0.02)
    assert state.deadline() == pytest.approx(0.04)
    for value, expected in ((0.0001, 0.005), (9.0, 2.0), (0.1, 0.2)):
        for _ in range(256):
            state.arrivals.add(value)
        assert state.deadline() == pytest.approx(expected)
    assert DrafterState("d", 0.3).deadline() == 0.3


def test_a_late_reply_has_the_deadline_measured_anew_at_once() -> None:
    """When a link becomes slow, the third late reply moves the p99 of 256, and the deadline with it."""
    state = DrafterState("d", None)
    for _ in range(256):
        state.answered(0.01)
    assert state.deadline() == pytest.approx(0.02)
    for expected in (0.02, 0.02, 0.1):
        state.answered(0.05)
        assert state.deadline() == pytest.approx(expected)


def test_late_replies_count_towards_the_deadline() -> None:
    """A reply after the round has gone is still a measurement of send→arrival."""
    bench = Bench()
    drafter, _, text = bench.opened()
    have, item = len(bench.ids["r"]), drafter.last()
    bench.clock.advance(0.101)
    assert bench.engine.step()
    bench.clock.advance(0.05)
    drafter.answer(item, text[have : have + 4])
    assert bench.engine.step()
    arrivals = bench.engine.drafting.drafters["d"].arrivals
    assert arrivals.percentile(100) == pytest.approx(0.151)


def test_a_drafter_whose_link_is_down_is_not_waited_for() -> None:
    """The lane goes on in the same turn, without time passing, and nothing is sent."""
    bench = Bench()
    drafter, _, text = bench.opened()
    count = len(drafter.frames)
    drafter.down()
    before = bench.clock.now()
    for _ in range(5):
        assert bench.engine.step()
    assert bench.clock.now() == before
    assert len(drafter.frames) == count
    assert bench.ids["r"] == text[: len(bench.ids["r"])]


def test_link_up_sends_open_sessions_again() -> None:
    """A drafter that is back holds nothing: all committed tokens and the sampling leave at once."""
    bench = Bench()
    drafter, request, text = bench.opened()
    drafter.down()
    assert bench.engine.step()
    again = FakeDrafter(bench, epoch=77)
    again.up()
    assert bench.engine.step()
    have = len(bench.ids["r"])
    item = again.drafts[0]
    assert (item.base, item.k, item.sampling, item.prompt_length) == (0, 0, request.sampling, 3)
    assert unpack_tokens(item.tokens).tolist() == [*request.prompt, *text[: have - 1]]
    again.answer(item)
    drafter.answer(drafter.last(), [7, 7], epoch=EPOCH)  # of the run that is gone
    assert bench.engine.step()
    have = len(bench.ids["r"])
    assert (again.last().base, again.last().k) == (len(unpack_tokens(item.tokens)), 4)
    again.answer(again.last(), text[have : have + 4])
    assert bench.engine.step()
    assert bench.ids["r"] == text[: have + 5]


def test_sessions_go_to_the_next_drafter_when_theirs_is_gone() -> None:
    """With two drafters the second takes over from the first, with the whole session."""
    bench = Bench(drafters=("d", "e"))
    second = FakeDrafter(bench, "e", epoch=5)
    drafter, request, text = bench.opened()
    second.up()
    drafter.down()
    assert bench.engine.step()
    item = second.last()
    assert (item.base, item.prompt_length, item.sampling) == (0, 3, request.sampling)
    second.answer(item, text[len(bench.ids["r"]) :][:4])
    assert bench.engine.step()
    assert bench.engine.statistics.emitted_with_draft == 5


# --- room, cancellation ----------------------------------------------------------------------------


def test_cancel_frees_both_ends_and_nobody_else() -> None:
    """The session's KV and soft state are gone at once, the drafter is told, another request goes on."""
    bench = Bench()
    drafter, _, _ = bench.opened()
    session = drafter.last().session
    other = ask("other", [9], seed=1)
    bench.submit(other)
    bench.engine.step()
    bench.put(Cancel("r"))
    bench.engine.step()
    assert bench.ends["r"].finish_reason == "cancelled"
    assert drafter.closed == [session]
    assert bench.model.used == 1 + 40
    assert session not in bench.engine.drafting.live()
    bench.finish()
    assert bench.ids["other"] == plain(other)
    assert bench.model.used == 0


def test_cancel_of_a_queued_or_unknown_or_ended_request() -> None:
    """A queued request never starts; cancelling what has ended or never was says nothing more."""
    bench = Bench(drafters=(), max_sessions=1)
    first, second = ask("first", max_tokens=3), ask("second")
    bench.submit(first, second)
    bench.engine.step()
    assert bench.engine.queued == 1
    bench.put(Cancel("second"))
    bench.finish()
    assert bench.ends["second"].finish_reason == "cancelled"
    assert bench.ids["second"] == []
    bench.put(Cancel("first"))
    bench.put(Cancel("never"))
    bench.engine.step()
    assert bench.ends["first"].finish_reason == "length"
    assert set(bench.ends) == {"first", "second"}


def test_cancel_while_the_prompt_is_read() -> None:
    """A session that has not its first token yet is freed as well."""
    bench = Bench(prefill_chunk=2)
    bench.submit(ask(prompt=range(20)))
    bench.engine.step()
    bench.put(Cancel("r"))
    assert not bench.engine.step()
    assert bench.ends["r"].finish_reason == "cancelled"
    assert (bench.model.used, bench.engine.live_sessions) == (0, 0)


def test_what_does_not_fit_now_waits_its_turn() -> None:
    """Out of KV memory: queued in order, admitted when room comes, same text."""
    bench = Bench(drafters=(), slots=100)
    requests = [ask(f"r{i}", [i], 40, seed=i) for i in range(5)]
    bench.submit(*requests)
    bench.engine.step()
    assert (bench.engine.live_sessions, bench.engine.queued, bench.model.used) == (2, 3, 82)
    bench.finish()
    assert {request.id: bench.ids[request.id] for request in requests} == {r.id: plain(r) for r in requests}
    assert bench.engine.statistics.sessions_peak == 2


def test_what_can_never_fit_is_refused_and_blocks_nobody() -> None:
    """A request larger than the whole memory ends with an error that has the arithmetic; the next one runs."""
    bench = Bench(drafters=(), slots=100)
    bench.submit(ask("huge", max_tokens=98), ask("small", max_tokens=5))
    bench.finish()
    assert bench.ends["huge"].finish_reason == "error"
    assert "101 tokens" in (bench.ends["huge"].error or "") and "100 slots" in (bench.ends["huge"].error or "")
    assert bench.ids["small"] == plain(ask("small", max_tokens=5))


def test_a_queued_request_starts_when_the_last_session_ends() -> None:
    """The loop that blocks on its inbox does not sleep while room has come for a request that waits."""
    done = threading.Event()
    ends: list[str] = []

    def publish(deltas: list[Delta]) -> None:
        ends.extend(delta.request_id for delta in deltas if delta.finish_reason == "length")
        if len(ends) == 2:
            done.set()

    engine = Engine(StrictModel(), TOKEN_BYTES, EngineConfig(max_sessions=1), publish, RealClock())
    engine.inbox.put(Submit(ask("a", max_tokens=3)))
    engine.inbox.put(Submit(ask("b", max_tokens=3)))
    thread = threading.Thread(target=engine.run, name="engine", daemon=True)
    thread.start()
    assert done.wait(20)
    engine.inbox.put(Stop())
    thread.join(20)
    assert not thread.is_alive()
    assert ends == ["a", "b"]


def test_a_model_that_fails_ends_every_request_with_its_error() -> None:
    """Live and queued requests end with the reason; the loop ends and keeps the exception."""

    class Broken(StrictModel):
        def forward(self, segments: Sequence[Segment]) -> np.ndarray:
            raise RuntimeError("the device is gone")

    ends: list[Delta] = []
    engine = Engine(Broken(), TOKEN_BYTES, EngineConfig(max_sessions=1), ends.extend, ManualClock())
    engine.inbox.put(Submit(ask("a")))
    engine.inbox.put(Submit(ask("b")))
    engine.run()
    assert [(delta.request_id, delta.finish_reason) for delta in ends] == [("a", "error"), ("b", "error")]
    assert "the device is gone" in (ends[0].error or "")
    assert isinstance(engine.failure, RuntimeError)


# --- lanes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("lanes", [1, 2])
def test_one_prompt_chunk_between_two_rounds_of_a_lane(lanes: int) -> None:
    """While others decode, a long prompt takes at most one chunk a round; alone it takes chunk after chunk."""
    bench = Bench(drafters=(), lanes=lanes, prefill_chunk=8)
    bench.submit(*[ask(f"r{i}", [i], 100, seed=i) for i in range(4)])
    for _ in range(3):
        bench.engine.step()
    bench.submit(ask("long", [t % VOCABULARY for t in range(60)], 30))
    bench.model.passes.clear()
    for _ in range(40):
        bench.engine.step()
    chunks = [[s for s in segments if len(s.tokens) > 1] for segments in bench.model.passes]
    assert max(len(some) for some in chunks) == 1
    assert sum(len(some) for some in chunks) == 8
    assert [len(some[0].tokens) for some in chunks if some] == [8] * 7 + [4]
    between: dict[int, int] = defaultdict(int)  # chunks since the last round of each session
    for segments in bench.model.passes:
        carried = sum(len(s.tokens) > 1 for s in segments)
        rounds = [s.span.key for s in segments if len(s.tokens) == 1]
        for key in (1, 2, 3, 4):  # the spans of the sessions that decode
            between[key] += carried
            assert between[key] <= 1
            if key in rounds:
                between[key] = 0
    alone = Bench(drafters=(), prefill_chunk=8)
    alone.submit(ask(prompt=[0] * 60))
    for _ in range(8):
        assert alone.engine.step()
    assert len(alone.ids["r"]) == 1


def test_new_sessions_join_the_smaller_lane_and_lanes_stay_in_balance() -> None:
    """Four sessions are two and two; when both of one lane end, one of the others moves over after its round."""
    bench = Bench(drafters=(), lanes=2)
    lengths = [200, 4, 200, 4]
    bench.submit(*[ask(f"r{i}", [i], length, seed=i) for i, length in enumerate(lengths)])
    bench.engine.step()
    sizes = [len(lane.sessions) for lane in bench.engine._lanes]
    assert sizes == [2, 2]
    while len(bench.ends) < 2:
        bench.engine.step()
    for _ in range(3):
        bench.engine.step()
    assert sorted(len(lane.sessions) for lane in bench.engine._lanes) == [1, 1]
    bench.finish()
    assert bench.ids["r0"] == plain(ask("r0", [0], 200, seed=0))
    assert bench.ids["r2"] == plain(ask("r2", [2], 200, seed=2))


def test_a_session_that_moves_to_another_lane_is_drafted_for() -> None:
    """Moving costs no draft: the session is asked for in the lane it moved to."""
    bench = Bench(lanes=2)
    requests = [ask(f"r{i}", [i + 1], length, seed=i) for i, length in enumerate([60, 6, 60, 6])]
    drafter = FakeDrafter(bench)
    drafter.oracle = always_right(requests)
    drafter.up()
    bench.submit(*requests)
    while len(bench.ends) < 2:
        if not bench.engine.step():
            bench.clock.advance(0.01)
    statistics = bench.engine.statistics
    assert sorted(len(lane.sessions) for lane in bench.engine._lanes) == [0, 2]
    plain_before = statistics.rounds - statistics.drafted_rounds
    while sorted(len(lane.sessions) for lane in bench.engine._lanes) != [1, 1]:
        bench.engine.step()
    for _ in range(8):
        bench.engine.step()
    assert statistics.rounds - statistics.drafted_rounds == plain_before
    bench.finish()
    assert {r.id: bench.ids[r.id] for r in requests} == {r.id: plain(r) for r in requests}


def test_lanes_wait_each_for_its_own_drafts() -> None:
    """While one lane awaits its drafts the other one goes, turn by turn."""
    bench = Bench(lanes=2)
    requests = [ask("a", [1], seed=1), ask("b", [2], seed=2)]
    drafter = FakeDrafter(bench)
    drafter.up()
    bench.submit(*requests)
    bench.engine.step()
    for item in list(drafter.drafts):
        drafter.answer(item)
    while bench.engine.step():
        pass
    a, b = (next(i.session for i in drafter.drafts if i.prompt_length and i.tokens == pack_tokens([t])) for t in (1, 2))
    have = len(bench.ids["b"])
    for _ in range(3):
        drafter.answer(drafter.last(a), plain(requests[0])[len(bench.ids["a"]) :][:4])
        assert bench.engine.step()
        assert not bench.engine.step()
    assert len(bench.ids["b"]) == have
    drafter.answer(drafter.last(b), plain(requests[1])[have : have + 4])
    assert bench.engine.step()
    assert bench.ids["b"] == plain(requests[1])[: have + 5]


# --- the wire --------------------------------------------------------------------------------------


@pytest.mark.parametrize("sessions", [1, 8])
def test_a_normal_round_costs_under_100_bytes_a_session_each_way(sessions: int) -> None:
    """Five committed tokens up, four proposals down, at large epochs and session ids, length prefix included."""
    requests = [ask(f"r{i}", [i + 1], 60, seed=i) for i in range(sessions)]
    bench = Bench()
    drafter = FakeDrafter(bench)
    drafter.oracle = always_right(requests)
    drafter.up()
    bench.submit(*requests)
    down: list[int] = []
    arrived = bench.engine.drafting.arrived

    def measured(name: str, message: Drafted, now: float) -> object:
        if all(len(item.tokens) == 16 for item in message.items):
            down.append(len(encode(message)) + 4)
        return arrived(name, message, now)

    bench.engine.drafting.arrived = measured  # type: ignore[method-assign,assignment]
    bench.finish()
    ups = [decode(frame) for frame in drafter.frames]
    normal = [
        m for m in ups if isinstance(m, Draft) and all(i.base and i.k == 4 and len(i.tokens) == 20 for i in m.items)
    ]
    assert len(normal) > 3 and len(down) > 3
    assert max((len(encode(m)) + 4) / len(m.items) for m in normal) < 100
    assert max(down) / sessions < 100
    assert min(len(encode(m)) for m in normal) > 20
