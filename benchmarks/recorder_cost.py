"""What recording costs the drafter: its share of a round's time, and of a second's.

Two services with the same emulated drafter take the same Drafts in turn, one of them recorded to a file, with this
machine's sensors. Frames are decoded and encoded as on a link; nobody waits for sockets. The model takes no time but
its own arithmetic, so that the framework goes as fast as it can and microseconds show; then what was added is compared
with a round of the standard profile, 2 ms a step, too. What the I/O side does twice a second is timed apart: it has a
thread of its own, and waits for sensors and disks there.

    python benchmarks/recorder_cost.py [--rounds 3000] [--sessions 8]
"""

from __future__ import annotations

import argparse
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from common import median, verdict

from paceline.core.clock import RealClock
from paceline.core.emulated import Pace, ToyLanguage, ToyModel
from paceline.core.sampling import Sampling
from paceline.edge.events import Limits, PeerUp, Received
from paceline.edge.recorder import Recorder, RecordingFile
from paceline.edge.runtimes.emulated import EmulatedRuntime
from paceline.edge.sensors import Sensors
from paceline.edge.service import DrafterService
from paceline.edge.strategies.draft_model import DraftModel
from paceline.topology.process import settle_runtime
from paceline.topology.wire import (
    Draft,
    Drafted,
    DraftItem,
    Hello,
    Message,
    check_hash,
    decode,
    encode,
    pack_tokens,
    unpack_tokens,
)

K, WARM_UP, VOCABULARY = 4, 50, 257
STANDARD_STEP_MS, STANDARD_ROUNDS = 2.0, 100


class Drafter:
    """A drafter's service; with a folder, it is recorded there."""

    def __init__(self, step_ms: float, folder: Path | None) -> None:
        self.answers: list[bytes] = []
        clock = RealClock()
        model = ToyModel(ToyLanguage(VOCABULARY), max_context=1 << 20, kv_slots=1 << 30, pace=Pace(step_ms))
        strategy = DraftModel(EmulatedRuntime(model))
        self.recorder = Recorder(clock, self._reply) if folder is not None else None
        reply = self._reply if self.recorder is None else self.recorder.reply
        self.service = DrafterService(strategy, clock, Limits(max_batch=64), reply, 1, self.recorder)
        self.file: RecordingFile | None = None
        if self.recorder is not None and folder is not None:
            strategy.observe(self.recorder.lap)
            self.file = RecordingFile(folder, "drafter", self.recorder, clock, Sensors, dict)
        self.service.inbox.put(PeerUp("target", Hello(1, 0, "bench", "target", b"", "", VOCABULARY)))

    def _reply(self, target: str, message: Message) -> None:
        frame = encode(message)
        if self.recorder is not None:
            self.recorder.encoded()
        self.answers.append(frame)

    def round(self, frame: bytes) -> tuple[float, Drafted]:
        """(seconds, answer)."""
        start = time.perf_counter()
        self.service.inbox.put(Received("target", decode(frame), time.monotonic()))
        while self.service.step():
            pass
        seconds = time.perf_counter() - start
        (answer,) = map(decode, self.answers)
        self.answers.clear()
        assert isinstance(answer, Drafted)
        return seconds, answer


@dataclass
class Lane:
    """What a target sends whose own choices are the drafts'."""

    sessions: int
    held: list[int] = field(default_factory=list)
    checks: list[int] = field(default_factory=list)
    new: list[list[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.held, self.checks = [0] * self.sessions, [0] * self.sessions
        self.new = [[1 + session] for session in range(self.sessions)]

    def draft(self) -> bytes:
        items = []
        for session, new in enumerate(self.new):
            opens = None if self.held[session] else Sampling(temperature=0.0)
            items.append(DraftItem(session, self.held[session], pack_tokens(new), self.checks[session], K, opens))
        return encode(Draft(1, items))

    def commit(self, answer: Drafted) -> None:
        for item in answer.items:
            self.checks[item.session] = check_hash(self.new[item.session], self.checks[item.session])
            self.held[item.session] += len(self.new[item.session])
            self.new[item.session] = [*unpack_tokens(item.tokens), item.session]


def measure(sessions: int, rounds: int, folder: Path) -> tuple[float, float, float]:
    """Medians: seconds of a round, what the recorder adds to it, pair by pair, and of one write of the I/O side."""
    plain, recorded, lane = Drafter(0.0, None), Drafter(0.0, folder), Lane(sessions)
    assert recorded.file is not None
    without, added, writes, written = [], [], [], time.monotonic()
    for index in range(rounds + WARM_UP):
        frame = lane.draft()
        pair = (plain, recorded) if index % 2 else (recorded, plain)
        seconds = {}
        for drafter in pair:
            seconds[drafter], answer = drafter.round(frame)
        lane.commit(answer)
        if index >= WARM_UP:
            without.append(seconds[plain])
            added.append(seconds[recorded] - seconds[plain])
        if time.monotonic() - written > 0.5:
            before = time.thread_time()
            recorded.file.write()
            writes.append(time.thread_time() - before)
            written = time.monotonic()
    return median(without), median(added), median(writes)


def standard_round(sessions: int) -> float:
    """Median seconds of a round with the standard profile, not recorded."""
    drafter, lane, times = Drafter(STANDARD_STEP_MS, None), Lane(sessions), []
    for _ in range(STANDARD_ROUNDS):
        seconds, answer = drafter.round(lane.draft())
        lane.commit(answer)
        times.append(seconds)
    return median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3000)
    parser.add_argument("--sessions", type=int, default=8)
    arguments = parser.parse_args()
    settle_runtime()
    with tempfile.TemporaryDirectory() as folder:
        for sessions in sorted({1, arguments.sessions}):
            place = Path(folder) / str(sessions)
            place.mkdir()
            without, added, write = measure(sessions, arguments.rounds, place)
            standard = standard_round(sessions)
            full = 100 * added / without
            print(f"emulated, {sessions} sessions: a round takes {without * 1e6:.0f} µs at full speed, ", end="")
            print(f"and {standard * 1e3:.1f} ms with 2 ms a step; recording adds {added * 1e6:.1f} µs ", end="")
            print(f"({full:.1f} % at full speed), and {write * 1e3:.2f} ms of CPU twice a second beside it")
            share = 100 * (added / standard + 2 * write)
            print(verdict("  recording, % of the standard drafter's time, both sides", share, 1.0, at_least=False))


if __name__ == "__main__":
    main()
