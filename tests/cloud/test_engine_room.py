"""Requests are cancelled, wait for room, can never fit or lose their model."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np

from paceline.cloud.engine import Engine, EngineConfig
from paceline.cloud.events import Cancel, Stop, Submit
from paceline.cloud.requests import Delta
from paceline.core.clock import ManualClock, RealClock
from paceline.core.model import Segment

from .helpers import TOKEN_BYTES, Bench, StrictModel, ask, plain


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
