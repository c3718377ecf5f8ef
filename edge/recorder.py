"""What a drafter notes of every forward and every answer, and how it gets to disk (format: report/recording.py).

The service's thread packs numbers into two rings made beforehand, and does nothing else. Twice a second the I/O side
copies what is new to the file, on a thread of its own: neither links nor drafting ever wait for a disk or a sensor.
"""

from __future__ import annotations

import logging
import os
import struct
import time
from array import array
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import anyio

from paceline.core.clock import Clock
from paceline.edge.report.recording import FORMAT, ROUND, STEP, SUFFIX, block, json_block
from paceline.edge.session import Session
from paceline.topology.wire import Drafted, DraftedItem, Message, Status, pack_tokens, unpack_tokens

log = logging.getLogger(__name__)

RING_RECORDS = 1 << 14  # of each ring: at 10 000 steps a second they hold more than a second and a half
FLUSH_SECONDS = 0.5
NOTHING = 0, b"", -1, 0  # a note on a session of which nothing is known
FILE_BYTES = 16 << 20  # then the file becomes NAME.rec.1; both together are twice that at the most


class Ring:
    """The last records, packed one after the other. One thread adds, another takes what is new."""

    def __init__(self, record: struct.Struct, records: int = RING_RECORDS) -> None:
        self._size = record.size
        self._bytes = bytearray(record.size * records)
        self._capacity = records
        self._pack = record.pack_into
        self._at = 0  # where the next record goes
        self._count = 0  # ever added
        self._taken = 0

    def add(self, *fields: float) -> None:
        at = self._at
        self._pack(self._bytes, at, *fields)
        at += self._size
        self._at = at if at < len(self._bytes) else 0
        self._count += 1

    def take(self) -> tuple[bytes, int]:
        """(records since the last call, how many were overwritten before they could be copied)."""
        count = self._count
        first = max(self._taken, count - self._capacity)
        start, end = first % self._capacity * self._size, count % self._capacity * self._size
        whole = first < count and end <= start
        data = bytes(self._bytes[start:] + self._bytes[:end] if whole else self._bytes[start:end])
        spoiled = min(count - first, max(0, self._count - self._capacity - first))  # overtaken while they were copied
        lost = first - self._taken + spoiled
        self._taken = count
        return data[spoiled * self._size :], lost


class Recorder:
    """The service's side. Every method but `blocks` is called on the service's thread."""

    def __init__(self, clock: Clock, reply: Callable[[str, Message], None]) -> None:
        """reply: how answers leave; `encoded` is to be called between encoding and sending one."""
        self.steps, self.rounds = Ring(STEP), Ring(ROUND)
        self.find: Callable[[str, int], Session | None] = lambda target, session: None
        self._now = clock.now
        self._send = reply
        self._targets: dict[str, int] = {}
        self._told = 0  # targets that the file knows of
        self._laps: list[float] = []
        self._encoded_at = 0.0

    # --- forwards

    def lap(self) -> None:
        """A part of a forward is over: the model, then the choice of candidates where that is a part of its own."""
        self._laps.append(self._now())

    def forward(self, kind: int, batch: int, start: float, end: float, read: int = 0) -> None:
        """A forward over so many sessions, from `start` to `end`. read: tokens, where it is a chunk of prompts."""
        laps = self._laps
        if not laps:
            self.steps.add(start, 0.0, 0.0, 0.0, end - start, read, batch, kind)
            return
        model, last = laps[0], laps[-1]
        laps.clear()
        self.steps.add(start, model - start, last - model, end - last, end - start, read, batch, kind)

    # --- rounds

    def arrived(self, session: Session, k: int) -> None:
        """A Draft of the session was applied: it tells how many of the last proposals the target accepted."""
        position, proposals, revealed, _ = session.note or NOTHING
        if proposals and revealed < 0 and len(session.committed) > position:
            revealed = _accepted(session.committed[position:], proposals)
        session.note = position, proposals, revealed, k

    def taken(self, session: Session, count: int) -> None:
        """The target verifies so many proposals that it was sent ahead: a round without a message."""
        held = len(session.committed)
        answer = DraftedItem(session.id, int(Status.OK), held, held, pack_tokens(session.tail[:count]))
        self._round(self._number(session.target), session, answer, session.received_at, 0.0, 0.0, 0)

    def encoded(self) -> None:
        """The message being sent is encoded."""
        self._encoded_at = self._now()

    def reply(self, target: str, message: Message) -> None:
        """Sends, and notes each session's answer."""
        start = self._encoded_at = self._now()
        self._send(target, message)
        if not isinstance(message, Drafted) or message.branches is not None:
            return
        encode, send = self._encoded_at - start, self._now() - self._encoded_at
        number, find, count = self._number(target), self.find, len(message.items)
        for item in message.items:
            self._round(number, find(target, item.session), item, start, encode, send, count)

    def _round(
        self,
        target: int,
        session: Session | None,
        item: DraftedItem,
        answered: float,
        encode: float,
        send: float,
        items: int,
    ) -> None:
        received, queue, work, want, revealed = answered, 0.0, 0.0, 0, -1
        proposed = len(item.tokens) >> 2
        if session is not None and item.status != Status.UNKNOWN:  # then its times are of an earlier Draft
            received, started = session.received_at, session.started_at
            if started < received:  # no forward was needed
                started = answered
            queue, work = started - received, answered - started
            revealed, want = (session.note or NOTHING)[2:]
            session.note = item.position, item.tokens, -1, want
        self.rounds.add(
            received, queue, work, encode, send, item.session, item.held, target, items,
            want, proposed, revealed, item.status,
        )  # fmt: skip

    def _number(self, target: str) -> int:
        number = self._targets.get(target)
        if number is None:
            number = self._targets[target] = len(self._targets)
        return number

    # --- the I/O side

    def blocks(self, everything: bool = False) -> Iterator[bytes]:
        """What is new, for the file; `everything`: as if nothing had been told yet."""
        if everything:
            self._told = 0
        names = list(self._targets)
        if len(names) > self._told:
            self._told = len(names)
            yield json_block(b"PEER", names)
        lost = 0
        for kind, ring in ((b"STEP", self.steps), (b"ROUN", self.rounds)):
            data, missed = ring.take()
            lost += missed
            if data:
                yield block(kind, data)
        if lost:
            yield json_block(b"LOST", lost)


def _accepted(committed: array[int], proposals: bytes) -> int:
    """How many first proposals are what was committed."""
    proposed = unpack_tokens(proposals)
    if committed[: len(proposed)] == proposed:
        return len(proposed)
    for place, (token, proposal) in enumerate(zip(committed, proposed, strict=False)):
        if token != proposal:
            return place
    return len(committed)


class Gauges(Protocol):
    """Where samples come from; edge/sensors.py."""

    def sample(self) -> dict[str, float]: ...

    @property
    def about(self) -> dict[str, object]: ...


class RecordingFile:
    """RUN_DIR/NAME.rec, of bounded size. A disk that is full costs what does not fit, and is told once."""

    def __init__(
        self,
        run_dir: Path,
        name: str,
        recorder: Recorder,
        clock: Clock,
        sensors: Callable[[], Gauges],
        about: Callable[[], Mapping[str, Any]],
        limit: int = FILE_BYTES,
    ) -> None:
        """sensors, about: looks for them, and for what else the first block says, which may take a moment."""
        self.path = run_dir / f"{name}{SUFFIX}"
        self._recorder = recorder
        self._clock = clock
        self._look = sensors
        self._sensors: Gauges | None = None
        self._limit = limit
        self._size = 0
        self._part = -1  # no file yet
        self._trouble = ""
        zero = time.time() - clock.now()
        self._info = {"format": FORMAT, "drafter": name, "pid": os.getpid(), "started": time.time(), "clock_zero": zero}
        self._about = about

    async def keep(self) -> None:
        """Writes until cancelled; what came last is left to `write`."""
        while True:
            await anyio.to_thread.run_sync(self.write)
            await anyio.sleep(FLUSH_SECONDS)

    def write(self) -> None:
        """One sample of the sensors, and what is new in the rings. Blocks; never raises for a disk."""
        if self._sensors is None:
            self._sensors = self._look()
        sample = {"time": self._clock.now(), **self._sensors.sample()}
        starts = self._part < 0 or self._size > self._limit or not self.path.exists()
        again = starts or bool(self._trouble)  # the file lacks what was told before
        try:
            data = b"".join([*self._recorder.blocks(everything=again), json_block(b"SENS", sample)])
            if starts:
                self._begin()
            with self.path.open("r+b") as file:
                file.seek(self._size)
                file.truncate()  # half a block, of when the disk was full
                file.write(data)
            self._size += len(data)
            self._trouble = ""
        except OSError as error:
            trouble = error.strerror or str(error)
            if trouble != self._trouble:
                log.warning("cannot record to %s: %s; drafting goes on, this is lost", self.path, trouble)
            self._trouble = trouble

    def _begin(self) -> None:
        """A new file; the one before it is kept beside it."""
        assert self._sensors is not None
        part = {"part": self._part + 1, "sensors": self._sensors.about}
        first = json_block(b"INFO", {**self._info, **part, **self._about()})
        partial = self.path.with_suffix(".partial-rec")
        partial.write_bytes(first)
        if self.path.exists():
            self.path.replace(self.path.with_name(self.path.name + ".1"))
        partial.replace(self.path)
        self._size = len(first)
        self._part += 1
