"""The file in which a drafter leaves what it measured, RUN_DIR/NAME.rec: its format, and reading it.

A file is a row of blocks: four letters of kind, a u32 of length, that many bytes, all little-endian.

| kind | holds |
|---|---|
| INFO | JSON, first in every file: format, who recorded, when, on what; the topology |
| PEER | JSON, the targets' names; the numbers of later rounds are places in this list |
| STEP | forwards, as STEP_FIELDS says |
| ROUN | answers, one for each session of a Drafted, as ROUND_FIELDS says |
| SENS | JSON, one sample of the sensors, with its time |
| LOST | JSON, how many steps and rounds were overwritten before they could be written |

Times are seconds on the drafter's monotonic clock; INFO has that clock's zero on the wall clock. When a file is full
it becomes NAME.rec.1, in the place of an older one: of a long run the last part is kept. Kinds and fields are only
added within a format; a reader skips kinds that it does not know, and a block that is cut short ends the file.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter, ValidationError

from paceline.core.errors import UserError
from paceline.edge.report import blocks as content

FORMAT = 1
SUFFIX = ".rec"
HEADER = struct.Struct("<4sI")
LONGEST, LONGEST_STATUS = 256 << 20, 4 << 20  # bytes of a file that is read

DRAFT, READ, AHEAD = 1, 2, 3  # kinds of steps; ahead: for rounds that may come

# name, letter for struct, type for numpy. total covers forward, top and choose.
STEP_FIELDS = (
    ("start", "d", "<f8"),
    ("forward", "f", "<f4"),  # seconds in the model, with the choice of candidates where its graph makes that
    ("top", "f", "<f4"),  # seconds for the likeliest tokens
    ("choose", "f", "<f4"),  # seconds for the rule: bias, penalties, noise
    ("total", "f", "<f4"),
    ("read", "I", "<u4"),  # tokens of prompts, in chunks between draft steps
    ("batch", "H", "<u2"),  # sessions
    ("kind", "H", "<u2"),
)
ROUND_FIELDS = (
    ("received", "d", "<f8"),  # when the Draft was looked at
    ("queue", "f", "<f4"),  # seconds until its first forward
    ("work", "f", "<f4"),  # seconds from there to the answer
    ("encode", "f", "<f4"),  # of the whole message
    ("send", "f", "<f4"),
    ("session", "Q", "<u8"),
    ("context", "I", "<u4"),  # committed tokens held
    ("target", "H", "<u2"),
    ("items", "H", "<u2"),  # sessions in the message; 0: the proposals had been sent ahead
    ("want", "B", "u1"),  # k
    ("proposed", "B", "u1"),
    ("revealed", "b", "i1"),  # accepted of the session's last proposals, which this Draft told; -1: nothing was told
    ("status", "B", "u1"),  # wire.Status
)
STEP = struct.Struct("<" + "".join(letter for _, letter, _ in STEP_FIELDS))
ROUND = struct.Struct("<" + "".join(letter for _, letter, _ in ROUND_FIELDS))
STEP_TYPE = np.dtype([(name, kind) for name, _, kind in STEP_FIELDS])
ROUND_TYPE = np.dtype([(name, kind) for name, _, kind in ROUND_FIELDS])


@dataclass
class Recording:
    """What one start of a drafter left. steps and rounds are structured arrays [N], sorted by time."""

    name: str
    info: dict[str, Any]
    targets: list[str]
    steps: NDArray[Any]
    rounds: NDArray[Any]
    samples: list[dict[str, float]]
    lost: int = 0
    cut: bool = False  # older parts of the run are gone
    statuses: dict[str, dict[str, Any]] = field(default_factory=dict)  # what other nodes left beside it, by name
    damaged: int = 0  # blocks and records that could not be read, and are left out

    def wall(self, seconds: float) -> float:
        """Seconds since 1970 of a time of the recording."""
        return float(self.info["clock_zero"]) + seconds


def block(kind: bytes, payload: bytes) -> bytes:
    """As it stands in a file."""
    return HEADER.pack(kind, len(payload)) + payload


def json_block(kind: bytes, value: Any) -> bytes:
    return block(kind, json.dumps(value, separators=(",", ":")).encode())


def find_recordings(run: Path) -> list[Path]:
    """The recordings of a run directory, or the one file that is named. UserError where there is none."""
    if run.is_file():
        return [run]
    found = sorted(run.glob(f"*{SUFFIX}")) if run.is_dir() else []
    if not found:
        why = "holds no recording of a drafter (NAME.rec)" if run.is_dir() else "is no run directory"
        raise UserError(f"{run} {why}: start the nodes with --run-dir DIR and give that directory")
    return found


def read_recording(path: Path) -> Recording:
    """The newest start in the file, with the part that was rotated away. UserError when it is no recording.

    What is damaged in it is left out, and counted.
    """
    blocks = list(_blocks(path))
    info = _info(path, blocks)
    cut, damaged = bool(info["part"]), 0
    older = path.with_name(path.name + ".1")
    if older.is_file():
        before = list(_blocks(older))
        try:
            theirs = _info(older, before)
        except UserError:  # the run can be shown without it
            damaged += 1
        else:
            if (theirs["started"], theirs["pid"]) == (info["started"], info["pid"]):
                cut, blocks = bool(theirs["part"]), before + blocks
    steps, rounds = _array(blocks, b"STEP", STEP_TYPE), _array(blocks, b"ROUN", ROUND_TYPE)
    good_steps, good_rounds = _sorted(steps, "start"), _sorted(rounds, "received")
    peers = [content.read(content.PEER, data) for kind, data in blocks if kind == b"PEER"]
    samples = [content.read_sample(data) for kind, data in blocks if kind == b"SENS"]
    losses = [content.read(content.LOST, data) for kind, data in blocks if kind == b"LOST"]
    damaged += len(steps) - len(good_steps) + len(rounds) - len(good_rounds)
    return Recording(
        name=info["drafter"],
        info=info,
        targets=max((peer for peer in peers if peer is not None), key=len, default=[]),
        steps=good_steps,
        rounds=good_rounds,
        samples=[sample for sample in samples if sample is not None],
        lost=sum(loss for loss in losses if loss is not None),
        cut=cut,
        statuses=dict(_statuses(path.parent, info["drafter"])),
        damaged=damaged + sum(one is None for one in (*peers, *samples, *losses)),
    )


def _blocks(path: Path) -> Iterator[tuple[bytes, bytes]]:
    try:
        if not path.is_file():  # a pipe of that name would be waited for
            raise UserError(f"{path}: is no regular file, so no recording")
        if path.stat().st_size > LONGEST:
            raise UserError(f"{path}: is larger than any recording")
        data = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None
    at = 0
    while at + HEADER.size <= len(data):
        kind, length = HEADER.unpack_from(data, at)
        at += HEADER.size
        if at + length > len(data):
            return  # it was being written when the machine stopped
        yield kind, data[at : at + length]
        at += length


def _info(path: Path, blocks: Sequence[tuple[bytes, bytes]]) -> dict[str, Any]:
    raw = content.read(TypeAdapter(dict[str, Any]), blocks[0][1]) if blocks and blocks[0][0] == b"INFO" else None
    if raw is None:
        raise UserError(f"{path}: is not a recording of a drafter")
    if type(number := raw.get("format")) is int and number > FORMAT:
        raise UserError(f"{path}: format {number} is not known to this version of paceline; update it")
    try:
        return content.INFO.validate_python(raw).model_dump()
    except ValidationError as error:
        place = ".".join(str(part) for part in error.errors()[0]["loc"])
        raise UserError(f"{path}: its first block is damaged, at {place}: nothing of it can be shown") from None


def _array(blocks: Sequence[tuple[bytes, bytes]], wanted: bytes, kind: np.dtype[Any]) -> NDArray[Any]:
    whole = b"".join(data[: len(data) - len(data) % kind.itemsize] for name, data in blocks if name == wanted)
    return np.frombuffer(whole, kind)


def _sorted(found: NDArray[Any], order: str) -> NDArray[Any]:
    """Those whose times are times, by time."""
    good = found[content.sound(found)]
    return good[np.argsort(good[order], kind="stable")]


def _statuses(folder: Path, own: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The status files of the nodes that ran on this machine."""
    for path in sorted(folder.glob("*.json")):
        try:
            if not path.is_file() or path.stat().st_size > LONGEST_STATUS:
                continue
            status = content.read(content.STATUS, path.read_bytes())
        except OSError:
            continue
        if status is not None and path.stem != own:
            yield path.stem, status.model_dump()
