"""What the service says about itself: times by its own clock, counts that add up."""

from __future__ import annotations

import json

import pytest

from paceline.core.clock import ManualClock, RealClock
from paceline.core.emulated import Pace
from paceline.edge.events import Limits, Received, Stop
from paceline.topology.wire import Draft, Drafted

from .helpers import EPOCH, Bench, item


def test_waiting_and_drafting_are_measured_apart() -> None:
    bench = Bench(Limits(max_batch=1), pace=Pace(forward_ms=2.0))
    bench.up("a")
    bench.draft("a", item(1, [1, 2]), item(2, [3]))
    bench.settle()
    times = [(m.queue_us, m.draft_us) for _, m in bench.sent if isinstance(m, Drafted)]
    assert times == [pytest.approx((0, 8000), abs=1), pytest.approx((8000, 8000), abs=1)]
    snapshot = bench.service.statistics.snapshot()
    assert snapshot["draft_ms"]["p50"] == pytest.approx(8.0)  # type: ignore[index]
    assert snapshot["queue_ms"]["p99"] == pytest.approx(8.0)  # type: ignore[index]


def test_waiting_begins_when_a_draft_comes_not_when_it_is_looked_at() -> None:
    """It came 6 ms ago, while a step was made."""
    clock = ManualClock(5.0)
    bench = Bench(clock=clock, pace=Pace(forward_ms=2.0))
    bench.up("a")
    bench.settle()
    bench.service.inbox.put(Received("a", Draft(EPOCH, [item(1, [1, 2])]), at=5.0))
    clock.sleep(0.006)
    bench.settle()
    (message,) = [message for _, message in bench.sent if isinstance(message, Drafted)]
    assert (message.queue_us, message.draft_us) == pytest.approx((6000, 8000), abs=1)


def test_utilization_is_the_share_of_time_in_forwards() -> None:
    clock = ManualClock(100.0)
    bench = Bench(clock=clock, pace=Pace(forward_ms=10.0))
    bench.up("a")
    bench.ask("a", item(1, [1]))
    clock.sleep(0.080)
    bench.ask("a", item(2, [2]))
    assert bench.service.statistics.utilization == pytest.approx(0.5)


def test_counts_add_up_and_are_json() -> None:
    bench = Bench(Limits(max_sessions=2))
    bench.up("a")
    bench.ask("a", item(1, [1]), item(2, [2], k=2), item(3, [3]))
    bench.ask("a", item(2, [2, 3], base=1, k=0))
    bench.close("a", 1)
    bench.settle()
    snapshot = json.loads(json.dumps(bench.service.statistics.snapshot()))
    assert snapshot["answers"] == {"ok": 3, "warming": 0, "unknown": 0, "full": 1, "beyond": 0}
    assert snapshot["tokens_drafted"] == 6
    assert (snapshot["sessions_peak"], snapshot["live_sessions"]) == (2, 1)


def test_the_loop_waits_without_spinning_and_ends_at_stop() -> None:
    bench = Bench(clock=RealClock())
    assert bench.service.step(timeout=0.01) is False
    bench.up("a")
    bench.draft("a", item(1, [1]))
    assert bench.service.step()
    bench.service.inbox.put(Stop())
    bench.service.run()
    assert len(bench.sent) == 1
