"""Whatever targets, links and time do to the service, its promises hold: a random walk over messages."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from paceline.core.sampling import Sampling
from paceline.edge.cache import LEAST_PREFIX
from paceline.edge.events import Limits
from paceline.topology.wire import Drafted, DraftItem, Status

from .helpers import EPOCH, Bench, item, proposals

TARGETS = ("a", "b")
SAMPLINGS = (
    Sampling(temperature=0.0),
    Sampling(seed=5, temperature=0.8),
    Sampling(seed=6, temperature=1.2, top_p=0.8, presence_penalty=0.6, repetition_penalty=1.2),
)


class Truth:
    """A session as its target knows it."""

    def __init__(self, target: str, number: int, tokens: list[int], sampling: Sampling) -> None:
        self.target, self.id, self.tokens, self.sampling = target, number, tokens, sampling
        self.prompt_length = len(tokens)
        self.acknowledged = 0
        self.closed = False

    def item(self, k: int) -> DraftItem:
        return item(self.id, self.tokens, self.acknowledged, k, self.sampling, self.prompt_length)


class ServiceMachine(RuleBasedStateMachine):
    """Two targets with up to a handful of sessions each, one service with little room."""

    @initialize(kv_slots=st.sampled_from((900, 500)))
    def start(self, kv_slots: int) -> None:
        limits = Limits(max_sessions=4, max_batch=2, chunk=64)
        self.bench = Bench(limits, max_context=200, kv_slots=kv_slots)
        for name in TARGETS:
            self.bench.up(name)
        self.truths: dict[tuple[str, int], Truth] = {}
        self.owed: set[tuple[str, int, int]] = set()  # (target, session, version) of accepted drafts with k > 0
        self.held: dict[tuple[str, int], int] = {}
        self.delayed: list[tuple[str, DraftItem]] = []
        self.ids = {name: 0 for name in TARGETS}
        self.seen = 0

    # --- what targets do

    @rule(
        name=st.sampled_from(TARGETS),
        length=st.integers(1, 150),
        shared=st.booleans(),
        pick=st.sampled_from(SAMPLINGS),
    )
    def open(self, name: str, length: int, shared: bool, pick: Sampling) -> None:
        self.ids[name] += 1
        number = self.ids[name]
        tokens = [(7 * i + (0 if shared else number)) % 61 for i in range(length)]
        self.truths[name, number] = Truth(name, number, tokens, pick)
        self.send(self.truths[name, number], 0)

    @precondition(lambda self: self.live())
    @rule(data=st.data(), k=st.integers(0, 6), late=st.sampled_from((False, False, True)))
    def ask(self, data: st.DataObject, k: int, late: bool) -> None:
        """The Draft is sent at once, or held up on its way."""
        truth = data.draw(st.sampled_from(self.live()))
        if late:
            self.delayed.append((truth.target, truth.item(k)))
        else:
            self.send(truth, k)

    @precondition(lambda self: self.live())
    @rule(data=st.data(), rounds=st.integers(1, 3), k=st.integers(1, 6), lost=st.booleans())
    def play(self, data: st.DataObject, rounds: int, k: int, lost: bool) -> None:
        """Some whole rounds: draft, accept some of it, commit, also where the answer was lost."""
        truth = data.draw(st.sampled_from(self.live()))
        for _ in range(rounds):
            self.commit(truth, data.draw(st.integers(0, k)), data.draw(st.integers(0, 60)))
            acknowledged = truth.acknowledged
            self.delayed.append((truth.target, truth.item(data.draw(st.integers(0, 6)))))
            self.send(truth, k)
            self.settle()
            if lost:
                truth.acknowledged = acknowledged

    @precondition(lambda self: self.live())
    @rule(data=st.data(), accepted=st.integers(0, 6), own=st.integers(0, 60))
    def decode(self, data: st.DataObject, accepted: int, own: int) -> None:
        """The target goes on without saying so."""
        self.commit(data.draw(st.sampled_from(self.live())), accepted, own)

    def commit(self, truth: Truth, accepted: int, own: int) -> None:
        """What a drafter would propose, as far as it is accepted, and a token of the target's own."""
        if accepted and len(truth.tokens) < 180:
            truth.tokens += fresh_proposals(truth, accepted)
        truth.tokens.append(own)

    @precondition(lambda self: self.delayed)
    @rule(data=st.data(), again=st.booleans())
    def deliver_late(self, data: st.DataObject, again: bool) -> None:
        """A message arrives out of order, and maybe not for the last time."""
        place = data.draw(st.integers(0, len(self.delayed) - 1))
        target, message = self.delayed[place] if again else self.delayed.pop(place)
        self.bench.draft(target, message)

    @precondition(lambda self: self.live())
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        truth = data.draw(st.sampled_from(self.live()))
        truth.closed = True
        self.forget(truth)
        self.bench.close(truth.target, truth.id)

    @rule(name=st.sampled_from(TARGETS), forgets=st.sampled_from((0, 0, 1, 5)))
    def ping(self, name: str, forgets: int) -> None:
        """The target lists its sessions; now and then it has forgotten some."""
        live = [truth for truth in self.live() if truth.target == name]
        listed = live[forgets:]
        for truth in live:
            if truth not in listed:
                self.forget(truth)
        self.bench.ping(name, *[truth.id for truth in listed])

    @precondition(lambda self: len(self.bench.sent) > 5)
    @rule(name=st.sampled_from(TARGETS), loses=st.booleans())
    def reconnect(self, name: str, loses: bool) -> None:
        """A new Hello, maybe after the loss was noticed; nothing of the old link can arrive any more."""
        if loses:
            self.bench.down(name)
        self.bench.up(name)
        self.delayed = [(target, message) for target, message in self.delayed if target != name]
        for truth in list(self.truths.values()):
            if truth.target == name:
                self.forget(truth)
                if truth.closed:
                    del self.truths[truth.target, truth.id]

    @rule(steps=st.integers(1, 4))
    def work(self, steps: int) -> None:
        for _ in range(steps):
            self.bench.service.step()
        self.check_replies()

    @rule(seconds=st.sampled_from((0.5, 4.0, 11.0)))
    def wait(self, seconds: float) -> None:
        """Idle sessions become evictable."""
        self.bench.clock.sleep(seconds)

    @rule()
    def settle(self) -> None:
        """Whatever was accepted is answered."""
        self.bench.settle()
        self.check_replies()
        assert not self.owed

    # --- what must hold

    def teardown(self) -> None:
        if not hasattr(self, "bench"):
            return
        self.settle()
        for truth in self.truths.values():
            self.bench.close(truth.target, truth.id)
        for target, message in self.delayed:
            self.bench.draft(target, message)
        self.bench.settle()
        service, cache = self.bench.service, self.bench.service.sessions.cache
        assert len(service.sessions) == 0
        assert not service.busy
        while cache.evict():
            pass
        assert self.bench.model.used_slots == 0

    @invariant()
    def versions_never_go_back(self) -> None:
        if not hasattr(self, "bench"):
            return
        now = {(s.target, s.id): s for s in self.bench.service.sessions}
        for key, session in now.items():
            if self.held.get(key, (0, None))[1] is session:
                assert len(session.committed) >= self.held[key][0]
            assert session.computed <= len(session.committed) + len(session.tail) <= session.span.size
        self.held = {key: (len(session.committed), session) for key, session in now.items()}

    @invariant()
    def spans_are_owned_once(self) -> None:
        if not hasattr(self, "bench"):
            return
        sessions = self.bench.service.sessions
        spans = [session.span for session in sessions] + list(sessions.cache._kept)
        assert len({span.key for span in spans}) == len(spans)
        assert sum(span.size for span in spans) == self.bench.model.used_slots
        assert all(len(kept.tokens) >= LEAST_PREFIX for kept in sessions.cache._kept.values())

    # --- helpers

    def live(self) -> list[Truth]:
        return [truth for truth in self.truths.values() if not truth.closed]

    def forget(self, truth: Truth) -> None:
        truth.acknowledged = 0
        self.owed = {owed for owed in self.owed if owed[:2] != (truth.target, truth.id)}

    def send(self, truth: Truth, k: int) -> None:
        """A Draft in order. Earlier ones of the session are superseded by it."""
        self.owed = {owed for owed in self.owed if owed[:2] != (truth.target, truth.id)}
        if k:
            self.owed.add((truth.target, truth.id, len(truth.tokens)))
        self.bench.draft(truth.target, truth.item(k))

    def check_replies(self) -> None:
        for target, message in self.bench.sent[self.seen :]:
            assert isinstance(message, Drafted) and message.epoch == EPOCH
            for answer in message.items:
                self.check_answer(target, answer)
        self.seen = len(self.bench.sent)

    def check_answer(self, target: str, answer) -> None:  # type: ignore[no-untyped-def]
        truth = self.truths.get((target, answer.session))
        if truth is None:
            return  # of before a reconnect
        assert answer.held <= len(truth.tokens)
        self.owed = {owed for owed in self.owed if owed[:2] != (target, answer.session) or owed[2] > answer.position}
        if answer.status == Status.UNKNOWN:
            truth.acknowledged = answer.held
        elif answer.status in (Status.OK, Status.WARMING):
            truth.acknowledged = max(truth.acknowledged, answer.held)
        if answer.status == Status.OK and answer.tokens:
            assert answer.position == answer.held
            drafted = proposals(answer)
            assert drafted == fresh_proposals(truth, len(drafted), answer.position)
        else:
            assert answer.status == Status.OK or not answer.tokens


def fresh_proposals(truth: Truth, k: int, position: int | None = None) -> list[int]:
    """What a service that knows nothing else proposes after the session's first `position` tokens."""
    bench = Bench(max_context=400)
    bench.up("x")
    tokens = truth.tokens[:position]
    answers = bench.ask("x", item(1, tokens, 0, k, truth.sampling, truth.prompt_length))
    return proposals(answers[-1])


TestService = ServiceMachine.TestCase
TestService.settings = settings(
    max_examples=120, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
)
