"""Emulated topologies with standard profiles, measured on virtual time: what several benchmarks stand on."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from paceline.bench import toy_prompts
from paceline.cloud.controller import Plan
from paceline.cloud.requests import Request
from paceline.cloud.statistics import TargetStatistics
from paceline.core.sampling import Sampling, choice_seed
from paceline.topology.spec import Topology, parse_topology
from paceline.virtual import Answer, VirtualWorld

LANGUAGE = {"vocabulary_size": 64, "seed": 3}
MORE_TOKENS = {1: 1.0, 8: 1.05, 64: 1.5, 256: 3.0}  # a pass over so many tokens, against one of one token


@dataclass(frozen=True)
class Case:
    """One situation. Milliseconds: of a draft step, of a target's pass over one token, of the link there and back.

    growth: how much more a draft step costs for each doubling of its sessions. flat: a pass costs the same at any size.
    spread: by how much the agreement of texts differs.
    """

    step_ms: float = 2.0
    verify_ms: float = 20.0
    agreement: float = 0.8
    rtt_ms: float = 0.0
    in_flight: int = 1
    targets: int = 1
    max_batch: int = 1
    growth: float = 0.0
    flat: bool = True
    second_choice: float = 0.4
    draft_ahead: int = 0
    spread: float = 0.0
    verify_budget: int | None = None

    def topology(self, lanes: Any = 1, draft_length: Any = 4) -> Topology:
        step = self.step_ms
        steps = {1 << n: round(step * (1 + self.growth) ** n, 6) for n in range(9)} if self.growth else step
        passes: Any = self.verify_ms
        if not self.flat:
            passes = {size: self.verify_ms * more for size, more in MORE_TOKENS.items()}
        drafter = {
            "name": "d",
            "model": "toy",
            "runtime": "emulated",
            "max_batch": self.max_batch,
            "max_sessions": 2048,
            "max_context": 8192,
            "profile": {
                **LANGUAGE,
                "step_ms": steps,
                "agreement": self.agreement,
                "agreement_spread": self.spread,
                "second_choice": self.second_choice,
            },
        }
        target = {
            "model": "toy",
            "engine": "emulated",
            "drafters": {"names": ["d"]},
            "max_sessions": max(32, self.in_flight),
            "max_context": 8192,
            "lanes": lanes,
            "draft_length": draft_length,
            "draft_ahead": self.draft_ahead,
            "profile": {**LANGUAGE, "verify_ms": passes},
        }
        if self.verify_budget is not None:
            target["verify_budget"] = self.verify_budget
        targets = [{"name": f"t{index}", **target} for index in range(self.targets)]
        data = {"version": 1, "name": "emulated", "drafters": [drafter], "targets": targets}
        return parse_topology(yaml.safe_dump(data), "emulated.yaml", Path())

    def run(
        self,
        lanes: Any = 1,
        draft_length: Any = 4,
        tokens: int = 4000,
        warm_rounds: int = 50,
        stretch: tuple[int, int] | None = None,
    ) -> Window:
        """Serves until the targets have emitted so many tokens after so many rounds of each session.

        stretch: (first, last) tokens of all targets together, in place of both: settings that are compared serve the
        same stretch of text, where the same drafts are wrong.
        """
        world = VirtualWorld(self.topology(lanes, draft_length), self.rtt_ms / 1000.0)
        targets = list(world.targets.values())
        for number, target in enumerate(targets):
            for request in self.requests(number):
                target.submit(request)
        counts = [target.engine.statistics for target in targets]

        def emitted() -> int:
            return sum(one.tokens for one in counts)

        if stretch is None:
            world.run(lambda: all(one.rounds >= warm_rounds * self.in_flight for one in counts))
        else:
            world.run(lambda: emitted() >= stretch[0])
        started, before = max(target.clock.now() for target in targets), [one.tokens for one in counts]
        (drafted, kept), rounds = _drafted(counts), sum(one.rounds for one in counts)
        last = sum(before) + tokens if stretch is None else stretch[1]
        world.run(lambda: emitted() >= last)
        seconds = max(target.clock.now() for target in targets) - started
        each = [(one.tokens - first) / seconds for one, first in zip(counts, before, strict=True)]
        texts = [answer.token_ids for target in targets for answer in target.answers.values()]
        gaps = [gap for target in targets for answer in target.answers.values() for gap in _gaps(answer, started)]
        busy = [drafter.service.statistics.utilization for drafter in world.drafters.values()]
        engine = targets[0].engine
        ahead = engine.drafting.ahead
        verified, accepted = (now - then for now, then in zip(_drafted(counts), (drafted, kept), strict=True))
        return Window(
            each,
            texts,
            gaps,
            busy[0],
            engine.controller.plan,
            stretch=(sum(before), emitted()),
            at_once=ahead.hits / max(1, ahead.rounds),
            late=ahead.late / max(1, ahead.rounds),
            verified=verified,
            accepted=accepted,
            rounds_per_s=(sum(one.rounds for one in counts) - rounds) / seconds,
        )

    def requests(self, number: int) -> list[Request]:
        """Those of one target, in flight for good: none ends within the window."""
        made = []
        for index in range(self.in_flight):
            prompt = tuple(toy_prompts(1, 12, LANGUAGE["vocabulary_size"], first=16 * index)[0])
            sampling = Sampling(seed=choice_seed(number, index), temperature=0.0)
            made.append(Request(f"r{index}", prompt, sampling, 8000))
        return made


@dataclass(frozen=True)
class Window:
    """What was served in a stretch of virtual time.

    each: tokens a second of every target. gaps_ms: between pieces. stretch: tokens of all targets at begin and end.
    at_once, late: share of rounds whose draft was made ahead and there when it was needed, or later. verified,
    accepted: draft tokens. rounds_per_s: of all sessions together.
    """

    each: list[float]
    texts: list[list[int]]
    gaps_ms: list[float]
    utilization: float
    plan: Plan
    stretch: tuple[int, int]
    at_once: float
    late: float
    verified: int
    accepted: int
    rounds_per_s: float

    @property
    def rate(self) -> float:
        """Tokens a second of all targets together."""
        return sum(self.each)

    def agrees(self, other: Window) -> bool:
        """Whether each text is a beginning of the other's or the other way round."""
        pairs = zip(self.texts, other.texts, strict=True)
        return all(ours[: len(theirs)] == theirs[: len(ours)] for ours, theirs in pairs)


def _drafted(counts: Sequence[TargetStatistics]) -> tuple[int, int]:
    """Draft tokens that were verified, and those of them that were right, since start."""
    verified = sum(one.drafted_tokens for one in counts)
    return verified, sum(one.emitted_with_draft - one.drafted_rounds for one in counts)


def _gaps(answer: Answer, since: float) -> list[float]:
    times = [at for at, _ in answer.arrivals if at >= since]
    return [1000.0 * (later - sooner) for sooner, later in itertools.pairwise(times)]
