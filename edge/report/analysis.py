"""From a recording to the figures of a report. Times are seconds here; what is shown is in milliseconds."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.edge.report.recording import DRAFT, READ, Recording
from paceline.topology.wire import Status

Floats = NDArray[np.float64]

# Where a round's time goes, in its order: key → what people read.
STAGES = {
    "queue": "waits for a place",
    "catch_up": "reads what was committed",
    "model": "model, token by token",
    "top": "likeliest tokens",
    "choose": "rule: bias, penalties, noise",
    "loop": "loop and others' forwards",
    "encode": "encodes",
    "send": "sends",
}
EDGE = 1e-6  # seconds by which a time may be off that was kept as a float32
LATE_CLOCK = 0.97  # below this share of its highest a clock counts as lowered


@dataclass(frozen=True)
class Spread:
    """Of some times, in seconds."""

    mean: float
    p50: float
    p90: float
    p99: float

    @staticmethod
    def of(values: NDArray[Any]) -> Spread:
        if not len(values):
            return Spread(0.0, 0.0, 0.0, 0.0)
        p50, p90, p99 = np.percentile(values, [50, 90, 99], method="inverted_cdf")
        return Spread(float(np.mean(values)), float(p50), float(p90), float(p99))


@dataclass
class Analysis:
    """The figures of one drafter's recording; arrays are per drafted round unless they say otherwise."""

    recording: Recording
    title: str
    rounds: NDArray[Any] = field(init=False)  # those that were answered with proposals
    all_rounds: NDArray[Any] = field(init=False)  # by target, session and time
    accepted_of_all: NDArray[np.int64] = field(init=False)

    def __post_init__(self) -> None:
        every = self.recording.rounds
        self.all_rounds = every[np.lexsort((every["received"], every["session"], every["target"]))]
        self.accepted_of_all = _accepted(self.all_rounds)
        self.rounds = self.all_rounds[self._drafted]

    @cached_property
    def _drafted(self) -> NDArray[np.bool_]:
        every = self.all_rounds
        return np.asarray((every["status"] == int(Status.OK)) & (every["proposed"] > 0))

    # --- time

    @cached_property
    def answered(self) -> Floats:
        """When each round's answer was ready to be encoded."""
        rounds = self.rounds
        return np.asarray(rounds["received"] + rounds["queue"] + rounds["work"], np.float64)

    @cached_property
    def latency(self) -> Floats:
        """From a Draft's arrival to its answer's leaving."""
        left = self.answered + self.rounds["encode"] + self.rounds["send"]
        return np.asarray(left - self.rounds["received"], np.float64)

    @cached_property
    def span(self) -> tuple[float, float]:
        """From the first forward to the end of the last."""
        steps = self.recording.steps
        if not len(steps):
            return 0.0, 0.0
        return float(steps["start"][0]), float(np.max(steps["start"] + steps["total"]))

    @property
    def seconds(self) -> float:
        return self.span[1] - self.span[0]

    @cached_property
    def _steps_of(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Each round's first step, and the one after its last."""
        starts, rounds = self.recording.steps["start"], self.rounds
        low = np.searchsorted(starts, rounds["received"] + rounds["queue"] - EDGE)
        return low, np.maximum(np.searchsorted(starts, self.answered - EDGE), low)

    @cached_property
    def step_of_round(self) -> Floats:
        """What a forward of each round took on average, with the loop around it; 0 where none was needed."""
        low, high = self._steps_of
        return np.asarray(self.rounds["work"] / np.maximum(1, high - low), np.float64)

    @cached_property
    def stages(self) -> dict[str, Floats]:
        """Seconds of each round in each stage; they add up to its latency."""
        steps, rounds = self.recording.steps, self.rounds
        low, high = self._steps_of
        draft, read = steps["kind"] == DRAFT, steps["kind"] == READ

        def within(values: NDArray[Any]) -> Floats:
            sums = np.concatenate([[0.0], np.cumsum(values, dtype=np.float64)])
            return np.asarray(sums[high] - sums[low], np.float64)

        parts = {
            "queue": np.asarray(rounds["queue"], np.float64),
            "catch_up": within(np.where(read, steps["total"], 0.0)),
            "model": within(np.where(draft, _model(steps), 0.0)),
            "top": within(np.where(draft, steps["top"], 0.0)),
            "choose": within(np.where(draft, steps["choose"], 0.0)),
        }
        known = sum(parts[name] for name in ("catch_up", "model", "top", "choose"))
        parts["loop"] = np.maximum(0.0, rounds["work"] - known)
        parts["encode"] = np.asarray(rounds["encode"], np.float64)
        parts["send"] = np.asarray(rounds["send"], np.float64)
        return parts

    @cached_property
    def away(self) -> Floats:
        """From an answer's leaving to the session's next Draft: the link, and the target."""
        every = self.all_rounds
        left = every["received"] + every["queue"] + every["work"] + every["encode"] + every["send"]
        same = _same_session(every)
        gaps = np.asarray(every["received"][1:] - left[:-1], np.float64)
        return np.maximum(0.0, gaps[same & self._drafted[:-1]])

    @cached_property
    def cycle(self) -> Floats:
        """From one Draft of a session to its next."""
        every = self.all_rounds
        return np.asarray(np.diff(every["received"]), np.float64)[_same_session(every) & self._drafted[:-1]]

    @property
    def draft_steps(self) -> NDArray[Any]:
        """One token of each session in the batch."""
        steps = self.recording.steps
        return np.asarray(steps[steps["kind"] == DRAFT])

    def busy(self, kind: int) -> float:
        """Share of the time that forwards of this kind took."""
        steps = self.recording.steps
        work = float(np.sum(steps["total"][steps["kind"] == kind], dtype=np.float64))
        return work / self.seconds if self.seconds > 0 else 0.0

    @property
    def utilization(self) -> float:
        """Of work that sessions waited for; drafting ahead fills idle time and is not in it."""
        return self.busy(DRAFT) + self.busy(READ)

    @property
    def rounds_ahead(self) -> int:
        """How many rounds had their draft at the target before the target asked: no message of theirs came."""
        return int(np.sum(self.rounds["items"] == 0))

    # --- tokens

    @property
    def drafted_tokens(self) -> int:
        return int(np.sum(self.rounds["proposed"], dtype=np.int64))

    @cached_property
    def accepted(self) -> NDArray[np.int64]:
        """Of each round's proposals; -1 where no later Draft of the session tells."""
        return self.accepted_of_all[self._drafted]

    @property
    def accepted_tokens(self) -> int:
        return int(np.sum(self.accepted[self.accepted >= 0]))

    @property
    def acceptance_length(self) -> float:
        """Tokens a round emits at its target, over the rounds that are known."""
        known = self.accepted[self.accepted >= 0]
        return float(np.mean(known)) + 1.0 if len(known) else 0.0

    @property
    def agreement(self) -> float | None:
        """Share of the proposals looked at by a target that were its own token; those after a wrong one are not."""
        known = self.accepted >= 0
        right = int(np.sum(self.accepted[known]))
        wrong = int(np.sum(self.accepted[known] < self.rounds["proposed"][known]))
        return right / (right + wrong) if right + wrong else None

    def committed_rate(self, target: int) -> float:
        """Tokens a second that this target committed, while any of its sessions was in rounds."""
        every = self.all_rounds[self.all_rounds["target"] == target]
        if len(every) < 2:
            return 0.0
        grown = np.diff(every["context"].astype(np.int64))[_same_session(every)]
        seconds = float(np.max(every["received"]) - np.min(every["received"]))
        return float(np.sum(grown)) / seconds if seconds > 0 else 0.0

    def in_flight(self, target: int) -> float:
        """Sessions of this target that were in rounds at a time, on average."""
        every = self.all_rounds[self.all_rounds["target"] == target]
        if len(every) < 2:
            return 1.0
        lived = float(np.sum(np.diff(every["received"])[_same_session(every)]))
        seconds = float(np.max(every["received"]) - np.min(every["received"]))
        return max(1.0, lived / seconds) if seconds > 0 else 1.0

    # --- the device

    @cached_property
    def device(self) -> Device:
        return Device(self)


class Device:
    """What the sensors said, and what the drafter's work cost of it."""

    def __init__(self, analysis: Analysis) -> None:
        self._analysis = analysis
        self.samples = analysis.recording.samples
        self.times = np.array([sample["time"] for sample in self.samples], np.float64)

    def channel(self, name: str) -> tuple[Floats, Floats]:
        """(times, values) of one figure."""
        some = [(sample["time"], sample[name]) for sample in self.samples if name in sample]
        times, values = np.array(some, np.float64).reshape(-1, 2).T
        return times, values

    def names(self, prefix: str) -> list[str]:
        """The figures whose names begin so."""
        return sorted({name for sample in self.samples for name in sample if name.startswith(prefix)})

    @cached_property
    def busy_joules(self) -> float | None:
        """The integral of power over the time in forwards; None where power is not known."""
        times, watts = self.channel("power")
        steps = self._analysis.recording.steps
        if len(times) < 2 or not len(steps):
            return None
        middles = steps["start"] + 0.5 * steps["total"].astype(np.float64)
        return float(np.sum(np.interp(middles, times, watts) * steps["total"]))

    @cached_property
    def joules(self) -> float | None:
        """The integral of power from the first forward to the last, pauses included."""
        times, watts = self.channel("power")
        start, end = self._analysis.span
        if len(times) < 2 or end <= start:
            return None
        inside = times[(times > start) & (times < end)]
        points = np.concatenate([[start], inside, [end]])
        at_points = np.interp(points, times, watts)
        return float(np.sum(np.diff(points) * (at_points[1:] + at_points[:-1]) / 2))

    @property
    def throttled(self) -> list[str]:
        """Alerts that were on, and counters that rose, as people read them."""
        found = []
        for name in self.names("throttle."):
            values = self.channel(name)[1]
            short = name.removeprefix("throttle.")
            if short.endswith("-events"):
                if values[-1] > values[0]:
                    found.append(f"{short.removesuffix('-events')}: {values[-1] - values[0]:.0f} events")
            elif np.any(values > 0):
                found.append(f"{short}: {np.mean(values > 0):.0%} of the time")
        return found

    @property
    def lowered_clock(self) -> tuple[str, float, float] | None:
        """(name, highest, median while drafting) of the GPU's clock, or the CPU's, where it ran below its highest."""
        for name in ("clock.gpu", "clock.cpu0"):
            times, values = self.channel(name)
            start, end = self._analysis.span
            during = values[(times >= start) & (times <= end)]
            if len(during):
                highest, usual = float(np.max(values)), float(np.median(during))
                return (name.removeprefix("clock."), highest, usual) if usual < LATE_CLOCK * highest else None
        return None


def _model(steps: NDArray[Any]) -> NDArray[Any]:
    """Time in the model; all of a step whose parts are not told apart."""
    told = steps["forward"] > 0
    return np.asarray(np.where(told, steps["forward"], steps["total"]))


def _same_session(rounds: NDArray[Any]) -> NDArray[np.bool_]:
    """[N - 1]: whether a round and the next are of one session."""
    same = (rounds["session"][1:] == rounds["session"][:-1]) & (rounds["target"][1:] == rounds["target"][:-1])
    return np.asarray(same)


def _accepted(rounds: NDArray[Any]) -> NDArray[np.int64]:
    """How many proposals of each round its session's next one revealed as accepted; -1: none did."""
    accepted = np.full(len(rounds), -1, np.int64)
    if len(rounds) > 1:
        told = _same_session(rounds) & (rounds["proposed"][:-1] > 0)
        accepted[:-1][told] = rounds["revealed"][1:][told]
    return accepted
