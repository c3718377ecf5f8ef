"""A drafter's service with its recorder, on a manual clock, and whole runs recorded by it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from paceline.core.emulated import Pace
from paceline.edge.events import Limits
from paceline.edge.recorder import Recorder, RecordingFile
from paceline.edge.report.recording import Recording, read_recording
from paceline.edge.service import DrafterService

from .helpers import EPOCH, Bench, item, proposals


class FakeGauges:
    """Named a fake: a board that draws 5 W, is 45 °C warm, and says what else it is told to."""

    def __init__(self, **more: float) -> None:
        self.figures = {"power": 5.0, "power.VDD_IN": 5.0, "power.VDD_SOC": 2.0, "temp.tj-thermal": 45.0, **more}
        self.about: dict[str, object] = {"sources": ["fake"], "absent": {"nvml": "no"}, "power": ["power.VDD_IN"]}

    def sample(self) -> dict[str, float]:
        return dict(self.figures)


class RecordedBench(Bench):
    """A bench whose service is recorded to `folder`/d.rec."""

    def __init__(self, folder: Path, limits: Limits | None = None, **options: Any) -> None:
        super().__init__(limits, **options)
        self.recorder = Recorder(self.clock, lambda name, message: self.sent.append((name, message)))
        self.service = DrafterService(
            self.strategy, self.clock, limits or Limits(), self.recorder.reply, EPOCH, self.recorder
        )
        self.strategy.observe(self.recorder.lap)
        self.gauges = FakeGauges()
        self.file = RecordingFile(folder, "d", self.recorder, self.clock, lambda: self.gauges, about)

    def recorded(self) -> Recording:
        self.file.write()
        return read_recording(self.file.path)


def about() -> dict[str, Any]:
    """What a drafter says of itself in a recording."""
    spec = {"strategy": "draft_model", "runtime": "emulated", "model": "toy", "device": "cpu"}
    return {"drafter_spec": spec, "environment": {"board": "none"}, "topology": {}}


def recorded_run(folder: Path, rounds: int = 40, **figures: float) -> Path:
    """Two targets with two sessions each, 2 ms a step, 10 ms away between rounds; three of four proposals are right."""
    bench = RecordedBench(folder, Limits(max_batch=2), pace=Pace(forward_ms=2.0))
    bench.gauges = FakeGauges(**figures)
    texts = {(target, session): [session] for target in ("a", "b") for session in (1, 2)}
    held = dict.fromkeys(texts, 0)
    for target in ("a", "b"):
        bench.up(target)
    for _ in range(rounds):
        for target in ("a", "b"):
            asked = [key for key in texts if key[0] == target]
            bench.draft(target, *(item(key[1], texts[key], base=held[key]) for key in asked))
        for target, answer in bench.settle():
            key = target, answer.session
            held[key] = len(texts[key])
            right = proposals(answer)[:3]
            texts[key] = [*texts[key], *right, (proposals(answer)[3] + 1) % 61]
        bench.clock.sleep(0.010)
        bench.file.write()
    return bench.file.path
