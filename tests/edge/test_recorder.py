"""What the recorder notes of real rounds on a manual clock, and how it gets to disk."""

from __future__ import annotations

import logging
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import msgspec
import numpy as np
import pytest

from paceline.core.clock import ManualClock, RealClock
from paceline.core.emulated import Pace
from paceline.edge.events import Limits
from paceline.edge.recorder import Recorder, RecordingFile, Ring
from paceline.edge.report.recording import AHEAD, DRAFT, READ, STEP, json_block, read_recording
from paceline.topology.wire import Drafted, Status, unpack_tokens

from .helpers import PROMPT, Bench, item, proposals, toy_greedy
from .recorded import FakeGauges, RecordedBench, about


def columns(records: Any, *names: str) -> list[tuple[Any, ...]]:
    return [tuple(record[name].item() for name in names) for record in records]


def test_a_round_is_recorded_with_its_steps_and_its_waiting(tmp_path: Path) -> None:
    """Two sessions, one place, 2 ms a step: the second waits 8 ms for the first one's four steps."""
    bench = RecordedBench(tmp_path, Limits(max_batch=1), pace=Pace(forward_ms=2.0))
    bench.up("a")
    bench.draft("a", item(1, [1, 2]), item(2, [3]))
    bench.settle()
    recording = bench.recorded()
    assert recording.targets == ["a"]
    assert columns(recording.steps, "batch", "kind") == [(1, DRAFT)] * 8
    assert recording.steps["total"] == pytest.approx([0.002] * 8, abs=1e-6)
    assert recording.steps["forward"] == pytest.approx([0.002] * 8, abs=1e-6)
    rounds = recording.rounds[np.argsort(recording.rounds["session"])]
    assert columns(rounds, "session", "context", "items", "want", "proposed", "revealed", "status") == [
        (1, 2, 1, 4, 4, -1, 0),
        (2, 1, 1, 4, 4, -1, 0),
    ]
    assert rounds["queue"] == pytest.approx([0.0, 0.008], abs=1e-6)
    assert rounds["work"] == pytest.approx([0.008, 0.008], abs=1e-6)


def test_acceptance_is_what_the_next_draft_tells(tmp_path: Path) -> None:
    """Two of four accepted, then all four, then a Draft that comes twice and one without proposals."""
    bench = RecordedBench(tmp_path)
    bench.up("a")
    first = toy_greedy(PROMPT, 4)
    bench.ask("a", item(1, PROMPT))
    tokens = [*PROMPT, *first[:2], (first[2] + 1) % 61]
    (answer,) = bench.ask("a", item(1, tokens, base=len(PROMPT)))
    bench.ask("a", item(1, tokens, base=len(PROMPT)))
    base, tokens = len(tokens), [*tokens, *proposals(answer), 7]
    bench.ask("a", item(1, tokens, base=base, k=0))
    assert columns(bench.recorded().rounds, "context", "proposed", "revealed") == [
        (6, 4, -1),
        (9, 4, 2),
        (9, 4, -1),
        (14, 0, 4),
    ]


def test_a_prompt_that_is_read_in_chunks_is_recorded_as_reading(tmp_path: Path) -> None:
    """It is answered `warming`, and 300 tokens are read in chunks of 100."""
    bench = RecordedBench(tmp_path, Limits(chunk=100), pace=Pace(forward_ms=1.0))
    bench.up("a")
    bench.ask("a", item(1, [5] * 300, k=4))
    recording = bench.recorded()
    assert columns(recording.rounds, "status", "proposed") == [(int(Status.WARMING), 0)]
    reads = recording.steps[recording.steps["kind"] == READ]
    assert reads["read"].tolist() == [100, 100, 100]


def test_refused_sessions_are_recorded_too(tmp_path: Path) -> None:
    """An answer without a session behind it has no times but its own."""
    bench = RecordedBench(tmp_path, Limits(max_sessions=1))
    bench.up("a")
    bench.ask("a", item(1, [1]), item(2, [2]))
    found = sorted(columns(bench.recorded().rounds, "session", "status", "queue", "work"))
    assert found == [(1, 0, 0.0, 0.0), (2, int(Status.FULL), 0.0, 0.0)]


def test_a_draft_that_does_not_fit_has_no_times_of_an_earlier_one(tmp_path: Path) -> None:
    """It is answered `unknown` at once, long after the session's last round; and one that is answered at once, too."""
    bench = RecordedBench(tmp_path, pace=Pace(forward_ms=2.0))
    bench.up("a")
    bench.ask("a", item(1, PROMPT))
    bench.clock.sleep(5.0)
    bench.ask("a", item(1, [*PROMPT, 1, 2, 3], base=8))
    bench.ask("a", item(1, PROMPT, k=2))
    rounds = bench.recorded().rounds
    assert columns(rounds, "status", "proposed") == [(0, 4), (int(Status.UNKNOWN), 0), (0, 2)]
    assert rounds["work"] == pytest.approx([0.008, 0.0, 0.0], abs=1e-6)
    assert rounds["received"] == pytest.approx([0.0, 5.008, 5.008], abs=1e-6)


def test_a_draft_that_was_sent_ahead_is_a_round_without_a_message(tmp_path: Path) -> None:
    """All four are right and the branch after them is taken: its steps are told apart, its acceptance comes later."""
    bench = RecordedBench(tmp_path, pace=Pace(forward_ms=2.0))
    bench.up("a")
    bench.draft("a", msgspec.structs.replace(item(1, PROMPT), branches=1))
    bench.settle()
    drafted = [message for _, message in bench.sent if isinstance(message, Drafted)]
    first = list(unpack_tokens(drafted[0].items[0].tokens))
    ((accepted, next_token, ahead),) = next(message.branches for message in drafted if message.branches)[0]
    assert accepted == 4
    tokens = [*PROMPT, *first, next_token]
    bench.draft("a", msgspec.structs.replace(item(1, tokens, base=len(PROMPT)), branches=1, taken=4))
    bench.settle()
    bench.ask("a", item(1, [*tokens, *unpack_tokens(ahead)[:3], 60], base=len(tokens)))
    recording = bench.recorded()
    assert columns(recording.rounds, "items", "context", "proposed", "revealed") == [
        (1, 6, 4, -1),
        (0, 11, 4, 4),
        (1, 15, 4, 3),
    ]
    assert set(recording.steps["kind"].tolist()) == {DRAFT, AHEAD}


def test_a_ring_hands_out_each_record_once_and_counts_what_it_lost() -> None:
    """Also around its end, and where it was overtaken."""
    ring = Ring(STEP, 8)

    def pack(*values: int) -> None:
        for value in values:
            ring.add(float(value), 0, 0, 0, 0, 0, 0, 0)

    def taken() -> tuple[list[float], int]:
        data, lost = ring.take()
        return [fields[0] for fields in STEP.iter_unpack(data)], lost

    assert taken() == ([], 0)
    pack(*range(5))
    assert taken() == ([0, 1, 2, 3, 4], 0)
    pack(*range(5, 13))
    assert taken() == ([5, 6, 7, 8, 9, 10, 11, 12], 0)
    pack(*range(13, 24))
    assert taken() == ([16, 17, 18, 19, 20, 21, 22, 23], 3)
    assert taken() == ([], 0)


def test_files_are_bounded_and_the_last_part_is_kept(tmp_path: Path) -> None:
    """Each file begins with all that a reader needs; two are kept, and read as one."""
    bench = RecordedBench(tmp_path)
    bench.file._limit = 2000
    bench.up("a")
    tokens = list(PROMPT)
    for turn in range(40):
        base = len(tokens) if turn else 0
        (answer,) = bench.ask("a", item(1, tokens, base=0 if not turn else base - 3))
        tokens += proposals(answer)[:3]
        bench.file.write()
    kept = sorted(path.name for path in tmp_path.iterdir())
    assert kept == ["d.rec", "d.rec.1"]
    assert all(path.stat().st_size < 3000 for path in tmp_path.iterdir())
    recording = read_recording(bench.file.path)
    assert recording.cut
    assert recording.targets == ["a"]
    assert 5 < len(recording.rounds) < 40
    assert recording.rounds["revealed"].tolist() == [3] * len(recording.rounds)


def test_an_earlier_start_of_the_drafter_is_left_out(tmp_path: Path) -> None:
    """Its file is kept aside, and a reader sees the newest start alone."""
    for first in (True, False):
        bench = RecordedBench(tmp_path)
        bench.file._info["pid"] = 1 if first else 2
        bench.up("a")
        bench.ask("a", item(1, [1]))
        recording = bench.recorded()
        assert (len(recording.rounds), recording.cut, recording.info["pid"]) == (1, False, 1 if first else 2)
    assert (tmp_path / "d.rec.1").exists()


def test_a_block_that_was_cut_short_ends_the_file(tmp_path: Path) -> None:
    """As a machine leaves it that lost its power."""
    bench = RecordedBench(tmp_path)
    bench.up("a")
    bench.ask("a", item(1, [1]))
    bench.recorded()
    data = bench.file.path.read_bytes()
    bench.file.path.write_bytes(data[:-5])
    cut = read_recording(bench.file.path)
    assert (len(cut.rounds), len(cut.samples)) == (1, 0)
    bench.file.path.write_bytes(data + json_block(b"WHAT", {"a": 1}) + b"STEP\xff")
    assert len(read_recording(bench.file.path).samples) == 1


@pytest.fixture
def small_disk() -> Iterator[Callable[[], None]]:
    """No file of this process may grow beyond 4 000 bytes, until what it yields is called."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4000, before[1]))
    yield lambda: resource.setrlimit(resource.RLIMIT_FSIZE, before)
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_costs_the_recording_and_is_told_once(
    tmp_path: Path, small_disk: Callable[[], None], caplog: pytest.LogCaptureFixture
) -> None:
    """What fits is readable, drafting goes on, and once there is room again the recording does, too."""
    bench = RecordedBench(tmp_path)
    bench.up("a")
    with caplog.at_level(logging.WARNING):
        for session in range(30):
            assert len(bench.ask("a", item(session, PROMPT))) == 1
            bench.file.write()
    assert [record.message.partition(":")[2] for record in caplog.records] == [
        " File too large; drafting goes on, this is lost"
    ]
    before = len(read_recording(bench.file.path).rounds)
    assert 0 < before < 20
    small_disk()
    bench.ask("a", item(99, PROMPT))
    recording = bench.recorded()
    assert (recording.rounds["session"][-1], recording.targets) == (99, ["a"])
    assert len(recording.rounds) in (before, before + 1)  # the last write that failed may have looked complete


def test_a_file_that_cannot_be_begun_leaves_the_one_before_it(tmp_path: Path, small_disk: Callable[[], None]) -> None:
    """There is no room for the first block of a new file: what is there stays readable, and later all goes on."""
    bench = RecordedBench(tmp_path)
    bench.up("a")
    bench.ask("a", item(1, PROMPT))
    bench.recorded()
    bench.file._limit = 1
    bench.file._about = lambda: {**about(), "environment": {"board": "x" * 5000}}
    bench.file.write()
    assert len(read_recording(bench.file.path).rounds) == 1
    small_disk()
    bench.ask("a", item(2, PROMPT))
    assert bench.recorded().rounds["session"].tolist() == [1, 2]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["d.rec", "d.rec.1"]


def test_a_run_directory_that_is_gone_is_no_failure(tmp_path: Path) -> None:
    """Nothing is raised, and the file is there as soon as the directory is."""
    bench = RecordedBench(tmp_path / "later")
    bench.file.write()
    (tmp_path / "later").mkdir()
    assert bench.recorded().info["drafter"] == "d"


def test_the_io_side_writes_by_itself_until_cancelled(tmp_path: Path) -> None:
    """On asyncio, as the drafter runs it."""
    recorder = Recorder(RealClock(), lambda name, message: None)
    file = RecordingFile(tmp_path, "d", recorder, RealClock(), FakeGauges, about)

    async def until_written() -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(file.keep)
            with anyio.fail_after(10):
                while not file.path.exists() or not read_recording(file.path).samples:
                    await anyio.sleep(0.005)
            tasks.cancel_scope.cancel()

    anyio.run(until_written)
    assert read_recording(file.path).samples[0]["power"] == 5.0


def test_recording_changes_nothing_that_is_sent(tmp_path: Path) -> None:
    """The same Drafts have the same answers with and without a recorder."""
    plain, recorded = Bench(clock=ManualClock()), RecordedBench(tmp_path, clock=ManualClock())
    for bench in (plain, recorded):
        bench.up("a")
        bench.ask("a", item(1, PROMPT), item(2, [1], k=2))
        bench.ask("a", item(1, [*PROMPT, 8], base=6))
    assert plain.sent == recorded.sent
