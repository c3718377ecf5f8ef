"""Real target engine and real drafter service; hypothesis decides what happens to every message between them."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from paceline.cloud.drafting import DraftingConfig
from paceline.cloud.engine import Engine, EngineConfig
from paceline.cloud.events import Arrived, Cancel, LinkDown, LinkUp, Submit
from paceline.cloud.requests import Delta, Request
from paceline.core.clock import ManualClock
from paceline.core.emulated import ToyLanguage, ToyModel
from paceline.core.sampling import History, Sampling, adjust, choose
from paceline.edge.events import Limits, PeerUp, Received
from paceline.edge.runtimes.emulated import EmulatedRuntime
from paceline.edge.service import DrafterService
from paceline.edge.session import Session
from paceline.edge.strategies.draft_model import DraftModel
from paceline.topology.wire import Drafted, Hello, Message, Ping, Welcome, check_hash, decode, encode

VOCABULARY = 16  # small, so that wrong drafts are often right by chance
TOKEN_BYTES = [bytes([97 + token]) for token in range(VOCABULARY)]
LANGUAGE = ToyLanguage(VOCABULARY, seed=8)
DRAFTER_SESSIONS = 2


def plain(request: Request) -> list[int]:
    """Plain decoding, one row at a time."""
    tokens, state = list(request.prompt), 0
    for token in tokens:
        state = LANGUAGE.next_state(state, token)
    for _ in range(request.max_tokens):
        row = adjust(LANGUAGE.rows([state])[0], request.sampling, History(tokens, len(request.prompt)))
        tokens.append(int(choose(row[None, :], [request.sampling], [len(tokens)])[0]))
        if tokens[-1] in request.stop_token_ids:
            break
        state = LANGUAGE.next_state(state, tokens[-1])
    return tokens[len(request.prompt) :]


_which = st.integers(0, 1000)
_samplings = st.builds(
    Sampling,
    seed=st.integers(0, 2**64 - 1),
    temperature=st.sampled_from([0.0, 0.7, 1.2]),
    top_k=st.sampled_from([0, 3]),
    frequency_penalty=st.sampled_from([0.0, 0.8]),
)


class Decoding(RuleBasedStateMachine):
    """Two ends, and every frame between them in a list from which it is delivered, dropped, doubled or left lying."""

    @initialize(lanes=st.integers(1, 3), k=st.sampled_from([1, 4, 16]), part=st.sampled_from([6, 16_384]))
    def start(self, lanes: int, k: int, part: int) -> None:
        self.clock = ManualClock()
        self.model = ToyModel(LANGUAGE, kv_slots=220, clock=self.clock)
        drafting = DraftingConfig(("d",), k, deadline=0.05, max_tokens=part)
        config = EngineConfig(lanes, max_sessions=4, prefill_chunk=7, drafting=drafting)
        self.engine = Engine(self.model, TOKEN_BYTES, config, self._publish, self.clock)
        self.requests: dict[str, Request] = {}
        self.expected: dict[str, list[int]] = {}
        self.ids: dict[str, list[int]] = {}
        self.texts: dict[str, str] = {}
        self.ends: dict[str, str] = {}
        self.to_drafter: list[bytes] = []
        self.to_target: list[bytes] = []
        self.late: list[tuple[bool, bytes]] = []  # to the target?, frame: it arrives when everybody has gone on
        self.versions: dict[Session, int] = {}
        self.up = False
        self.link = self.epoch = 0
        self._new_drafter()
        self._connect()
        for seed in range(3):
            self._submit(20 + seed, 0, Sampling(seed=seed), 40, frozenset())
        for _ in range(3):
            self._play()

    def _new_drafter(self) -> None:
        self.epoch += 1
        self.draft_model = ToyModel(replace(LANGUAGE, agreement=0.7), max_context=60, kv_slots=200, clock=self.clock)
        limits = Limits(max_sessions=DRAFTER_SESSIONS, max_batch=2, max_queue=2, chunk=32, idle_seconds=0.2)
        strategy = DraftModel(EmulatedRuntime(self.draft_model))
        self.service = DrafterService(strategy, self.clock, limits, self._reply, self.epoch)

    def _connect(self) -> None:
        self.link += 1
        self.up = True
        link = self.link
        self.service.inbox.put(PeerUp("t", Hello(1, 0, "test", "t", bytes(32), "", VOCABULARY)))
        welcome = Welcome(self.epoch, "emulated", "draft_model", DRAFTER_SESSIONS, self.service.max_context, 16)
        self.engine.inbox.put(LinkUp("d", welcome, lambda message: self._send(message, link)))

    def _send(self, message: Message, link: int) -> bool:
        if not self.up or link != self.link:
            return False
        self.to_drafter.append(encode(message))
        return True

    def _reply(self, name: str, message: Message) -> None:
        assert name == "t"
        self.to_target.append(encode(message))

    def _publish(self, deltas: list[Delta]) -> None:
        for delta in deltas:
            assert delta.request_id not in self.ends, "output after the end"
            self.ids[delta.request_id] += delta.token_ids
            self.texts[delta.request_id] += delta.text
            if delta.finish_reason is not None:
                self.ends[delta.request_id] = delta.finish_reason

    def _give_drafter(self, frame: bytes) -> None:
        self.service.inbox.put(Received("t", decode(frame)))

    def _give_target(self, frame: bytes) -> None:
        message = decode(frame)
        assert isinstance(message, Drafted)
        self.engine.inbox.put(Arrived("d", message))

    # --- users

    @rule(
        length=st.sampled_from([1, 2, 20, 21, 40, 70]),
        salt=st.integers(0, 2),
        sampling=_samplings,
        max_tokens=st.integers(1, 40),
        end=st.sampled_from([frozenset(), frozenset({3})]),
    )
    def submit(self, length: int, salt: int, sampling: Sampling, max_tokens: int, end: frozenset[int]) -> None:
        self._submit(length, salt, sampling, max_tokens, end)

    def _submit(self, length: int, salt: int, sampling: Sampling, max_tokens: int, end: frozenset[int]) -> None:
        name = f"r{len(self.requests)}"
        prompt = tuple((salt + place * place) % VOCABULARY for place in range(length))  # many begin alike
        request = Request(name, prompt, sampling, max_tokens, stop_token_ids=end)
        self.requests[name], self.expected[name] = request, plain(request)
        self.ids[name], self.texts[name] = [], ""
        self.engine.inbox.put(Submit(request))

    @precondition(lambda self: self.requests)
    @rule(which=_which)
    def cancel(self, which: int) -> None:
        self.engine.inbox.put(Cancel(f"r{which % len(self.requests)}"))

    # --- time and the two loops

    @rule(turns=st.integers(1, 4))
    def target_turns(self, turns: int) -> None:
        for _ in range(turns):
            self.engine.step()

    @rule(turns=st.integers(1, 4))
    def drafter_turns(self, turns: int) -> None:
        for _ in range(turns):
            self.service.step()

    @rule(turns=st.integers(1, 15))
    def play(self, turns: int) -> None:
        """All goes well for a while."""
        for _ in range(turns):
            self._play()

    def _play(self) -> None:
        self.engine.step()
        while self.to_drafter:
            self._give_drafter(self.to_drafter.pop(0))
        for _ in range(20):
            if not self.service.step():
                break
        self.versions_never_go_back()
        while self.to_target:
            self._give_target(self.to_target.pop(0))
        self.clock.advance(0.001)

    @rule(seconds=st.sampled_from([0.001, 0.06, 0.3, 1.1]))
    def advance(self, seconds: float) -> None:
        self.clock.advance(seconds)

    # --- messages

    @precondition(lambda self: self.to_drafter)
    @rule(which=_which)
    def deliver_to_drafter(self, which: int) -> None:
        self._give_drafter(self.to_drafter.pop(which % len(self.to_drafter)))

    @precondition(lambda self: self.to_target)
    @rule(which=_which)
    def deliver_to_target(self, which: int) -> None:
        self._give_target(self.to_target.pop(which % len(self.to_target)))

    def _wire(self, down: bool) -> list[bytes]:
        return self.to_target if (down and self.to_target) or not self.to_drafter else self.to_drafter

    @precondition(lambda self: self.to_drafter or self.to_target)
    @rule(which=_which, down=st.booleans())
    def drop(self, which: int, down: bool) -> None:
        wire = self._wire(down)
        del wire[which % len(wire)]

    @precondition(lambda self: self.to_drafter or self.to_target)
    @rule(which=_which, down=st.booleans(), lost=st.booleans())
    def double_or_delay(self, which: int, down: bool, lost: bool) -> None:
        """A frame will come later, besides being on its way now or not."""
        wire = self._wire(down)
        self.late.append((wire is self.to_target, wire[which % len(wire)]))
        if lost:
            del wire[which % len(wire)]

    @precondition(lambda self: self.late)
    @rule(which=_which)
    def arrives_late(self, which: int) -> None:
        to_target, frame = self.late.pop(which % len(self.late))
        (self._give_target if to_target else self._give_drafter)(frame)

    @rule(which=_which, turns=st.integers(1, 15))
    def play_with_an_echo(self, which: int, turns: int) -> None:
        """What the target sends first comes a second time when later rounds have gone."""
        self.engine.step()
        frames = self.to_drafter[:]
        for _ in range(turns):
            self._play()
        if frames:
            self._give_drafter(frames[which % len(frames)])
        self.service.step()

    @precondition(lambda self: self.up)
    @rule()
    def ping(self) -> None:
        self._send(Ping(0, self.engine.drafting.live()), self.link)

    @precondition(lambda self: self.up)
    @rule()
    def old_ping(self) -> None:
        """One from before there was any session: the drafter frees what it holds, and lacks it afterwards."""
        self._give_drafter(encode(Ping(0, [])))

    # --- links

    @precondition(lambda self: self.up)
    @rule()
    def link_down(self) -> None:
        self.up = False
        self.engine.inbox.put(LinkDown("d"))

    @precondition(lambda self: not self.up)
    @rule()
    def link_up(self) -> None:
        self._connect()

    @rule(noticed=st.booleans())
    def restart_drafter(self, noticed: bool) -> None:
        """A new run under a new epoch; what is on the way still arrives."""
        if noticed and self.up:
            self.engine.inbox.put(LinkDown("d"))
        self._new_drafter()
        self._connect()

    # --- what must hold at every moment

    @invariant()
    def output_is_a_beginning_of_plain_decoding(self) -> None:
        for name, ids in self.ids.items():
            assert ids == self.expected[name][: len(ids)]
            letters = [TOKEN_BYTES[token] for token in ids if token not in self.requests[name].stop_token_ids]
            assert self.texts[name] == b"".join(letters).decode()

    @invariant()
    def versions_never_go_back(self) -> None:
        live = list(self.service.sessions)
        for session in live:
            version = len(session.committed)
            assert version >= self.versions.get(session, 0)
            self.versions[session] = version
        assert len(live) <= DRAFTER_SESSIONS

    @invariant()
    def the_drafter_holds_what_was_committed_and_nothing_else(self) -> None:
        for session in self.service.sessions:
            truth = self.engine.drafting.sessions.get(session.id)
            if truth is not None:
                assert session.committed == truth.tokens[: len(session.committed)]
            tokens = [*session.committed, *session.tail]
            assert session.computed <= len(tokens)
            states = self.draft_model._states[session.span.key]
            state = 0
            for place in range(session.computed):  # its KV is that of its tokens
                state = LANGUAGE.next_state(state, tokens[place])
                assert states[place + 1] == state

    @invariant()
    def acknowledgements_are_of_committed_tokens(self) -> None:
        for session in self.engine.drafting.sessions.values():
            count = session.drafts.acknowledged
            assert count <= len(session.tokens)
            assert session.drafts.check == check_hash(session.tokens[:count])

    @invariant()
    def memory_is_what_live_sessions_hold(self) -> None:
        held = sum(session.span.size for session in self.engine.drafting.sessions.values())
        assert self.model._used == held <= self.model.kv_slots
        assert sorted(self.engine.drafting.live()) == sorted(s.id for s in self.engine._by_request.values())

    # --- the end

    def teardown(self) -> None:
        """All goes well from now on: every text is complete, and neither end holds anything."""
        if not hasattr(self, "engine"):
            return
        if not self.up:
            self._connect()
        while self.late:
            self.arrives_late(0)
        for _ in range(5000):
            self._play()
            if not self.engine.live_sessions and not self.engine.queued:
                break
        for name, expected in self.expected.items():
            end = self.ends[name]
            if end != "cancelled":
                assert self.ids[name] == expected
                assert end == ("stop" if expected[-1] in self.requests[name].stop_token_ids else "length")
        self.ping()
        self._play()
        self._play()
        assert self.model._used == self.engine.live_sessions == len(self.engine.drafting.live()) == 0
        assert len(self.service.sessions) == 0
        while self.service.sessions.cache.evict():
            pass
        assert self.draft_model._used == 0


Decoding.TestCase.settings = settings(
    max_examples=100,
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
)
TestDecoding = Decoding.TestCase
TestDecoding.__doc__ = (
    "Whatever happens to messages, links and drafters, every text is plain decoding's and nothing leaks."
)
