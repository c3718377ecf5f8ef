"""A recording as a trace that ui.perfetto.dev and chrome://tracing show (the Trace Event Format, JSON).

One process is the drafter, with a track for forwards and one for sends; each target is another, with a track a
session. Times are microseconds since the first event.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from paceline.edge.report.recording import AHEAD, DRAFT, Recording
from paceline.topology.wire import Status

DRAFTER, FORWARDS, SENDS = 1, 1, 2  # process, and its tracks
FIRST_TARGET = 2
SAME_MESSAGE = 5e-6  # seconds
COUNTERS = {"power": "power W", "load.gpu": "GPU load %", "clock.gpu": "GPU clock MHz", "load.cpu": "CPU load %"}

Event = dict[str, Any]


def trace(recording: Recording, last: float | None = None) -> dict[str, Any]:
    """The whole recording, or its last so many seconds."""
    steps, rounds = recording.steps, recording.rounds
    begins = [float(times[0]) for times in (steps["start"], rounds["received"]) if len(times)]
    ends = [float(times[-1]) for times in (steps["start"], rounds["received"]) if len(times)]
    start = min(begins, default=0.0)
    if last is not None:
        start = max(start, max(ends, default=0.0) - last)
    kinds = (_forwards, _sends, _rounds, _counters)
    events = [*_names(recording), *(event for kind in kinds for event in kind(recording, start))]
    about = {"drafter": recording.name, **{key: str(value) for key, value in recording.info["environment"].items()}}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}


def _names(recording: Recording) -> Iterator[Event]:
    yield _name("process_name", DRAFTER, 0, f"drafter {recording.name}")
    yield _name("thread_name", DRAFTER, FORWARDS, "forwards of the batch")
    yield _name("thread_name", DRAFTER, SENDS, "encode and send")
    for number, target in enumerate(recording.targets):
        yield _name("process_name", FIRST_TARGET + number, 0, f"target {target}")


def _name(kind: str, process: int, track: int, name: str) -> Event:
    return {"ph": "M", "name": kind, "pid": process, "tid": track, "args": {"name": name}}


def _slice(name: str, process: int, track: int, start: float, seconds: float, **args: Any) -> Event:
    """start: seconds since the trace's."""
    times = {"ts": round(start * 1e6, 3), "dur": round(max(0.0, seconds) * 1e6, 3)}
    return {"ph": "X", "name": name, "pid": process, "tid": track, **times, "args": args}


def _forwards(recording: Recording, start: float) -> Iterator[Event]:
    """Each forward, what it is made of inside, and the batch as a curve."""
    names = {DRAFT: "draft", AHEAD: "draft ahead"}
    steps = recording.steps
    for step in steps[steps["start"] >= start].tolist():
        at, forward, top, choose, total, read, batch, kind = step
        at -= start
        name = names.get(kind, "read")
        yield _slice(f"{name} × {batch}", DRAFTER, FORWARDS, at, total, sessions=batch, read=read)
        if forward:
            yield _slice("model", DRAFTER, FORWARDS, at, forward)
            if top:
                yield _slice("likeliest tokens", DRAFTER, FORWARDS, at + forward, top)
            yield _slice("rule", DRAFTER, FORWARDS, at + total - choose, choose)
        yield _counter("batch", at, batch)
        yield _counter("batch", at + total, 0)


def _rounds(recording: Recording, start: float) -> Iterator[Event]:
    """On each session's track: its rounds, and between them the link and the target."""
    rounds = recording.rounds[recording.rounds["received"] >= start]
    order = np.lexsort((rounds["received"], rounds["session"], rounds["target"]))
    tracks: dict[tuple[int, int], int] = {}
    left_at: dict[tuple[int, int], float] = {}
    for one in rounds[order].tolist():
        received, queue, work, encode, send, session, context, target, _, want, proposed, revealed, status = one
        process, key, at = FIRST_TARGET + target, (target, session), received - start
        if key not in tracks:
            tracks[key] = 1 + sum(known[0] == target for known in tracks)
            yield _name("thread_name", process, tracks[key], f"session {tracks[key]}")
        track, answered = tracks[key], at + queue + work
        if key in left_at and at > left_at[key]:
            told = {"accepted": revealed} if revealed >= 0 else {}
            yield _slice("link and target", process, track, left_at[key], at - left_at[key], **told)
        left_at[key] = answered + encode + send
        name = "round" if status == Status.OK else Status(status).name.lower() if status in _STATUSES else str(status)
        args = {"context": context, "k": want, "proposed": proposed, "session": str(session)}
        yield _slice(name, process, track, at, left_at[key] - at, **args)
        parts = ("queue", at, queue), ("draft", at + queue, work), ("send", answered, encode + send)
        for part, begin, seconds in parts:
            if seconds > 0:
                yield _slice(part, process, track, begin, seconds)


def _sends(recording: Recording, start: float) -> Iterator[Event]:
    """One for each message; its sessions have the same time, but for what a float32 loses."""
    rounds = recording.rounds[(recording.rounds["received"] >= start) & (recording.rounds["items"] > 0)]
    answered = rounds["received"] + rounds["queue"] + rounds["work"] - start
    last = [-1.0] * (len(recording.targets) + 1)
    for place in np.argsort(answered, kind="stable"):
        one, at = rounds[place], float(answered[place])
        target = min(int(one["target"]), len(recording.targets))
        if at - last[target] > SAME_MESSAGE:
            last[target] = at
            name = recording.targets[target] if target < len(recording.targets) else "a target"
            seconds = float(one["encode"]) + float(one["send"])
            yield _slice(f"to {name}", DRAFTER, SENDS, at, seconds, sessions=int(one["items"]))


_STATUSES = {int(status) for status in Status}


def _counters(recording: Recording, start: float) -> Iterator[Event]:
    for sample in recording.samples:
        if sample["time"] < start:
            continue
        for name, value in sample.items():
            shown = COUNTERS.get(name) or (f"{name.removeprefix('temp.')} °C" if name.startswith("temp.") else None)
            if shown:
                yield _counter(shown, sample["time"] - start, value)


def _counter(name: str, at: float, value: float) -> Event:
    return {"ph": "C", "name": name, "pid": DRAFTER, "tid": 0, "ts": round(at * 1e6, 3), "args": {"value": value}}
