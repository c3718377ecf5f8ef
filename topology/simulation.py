"""Discrete-event simulation of drafters and targets: what formulas cannot say.

Random acceptance, passes that vary, bursts of requests, late messages, drafters that fail. It shares no formula with
the planner (core/costs.py): each checks the other. No threads, no clock: a heap of events. Same world, same outcome.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable
from typing import Any

from paceline.topology.simulation_book import Book
from paceline.topology.simulation_drafter import Drafter
from paceline.topology.simulation_target import Session, Target
from paceline.topology.simulation_world import Outcome, World

PASS_ENDS = 1 << 60  # they come last of what is due at the same nanosecond


def simulate(world: World) -> Outcome:
    """Runs a world for its seconds."""
    simulation = Simulation(world)
    simulation.run()
    return simulation.outcome()


class Simulation:
    """Time, chance, and the books of what happened."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.now = 0.0
        self.last_tokens = 0.0  # when some came out
        self._left, self._late = -1.0, 0.0  # when the last message left, and how late it is
        self._random = random.Random(world.seed)
        self._links = random.Random(world.seed)
        self._heap: list[tuple[float, int, Callable[[Any], None], Any]] = []
        self._events = 0
        self._sigma = math.sqrt(math.log1p(world.variation**2))
        self._missed = self._rounds = self._plain = 0
        self.drafters = [Drafter(self, spec, index) for index, spec in enumerate(world.drafters)]
        self._books = {spec.group: Book(self) for spec in world.targets}
        self.targets = [Target(self, spec, self._books[spec.group]) for spec in world.targets]

    def run(self) -> None:
        """Until the world's last second, or until nothing is left to do."""
        for drafter in self.drafters:
            for fault in drafter.spec.faults:
                if fault.kind == "down":
                    self.at(fault.start, self._die, drafter)
                    self.at(fault.end, self._revive, drafter)
        for target in self.targets:
            self._first_requests(target)
        heap, end = self._heap, self.world.seconds
        while heap and heap[0][0] <= end:
            self.now, _, function, argument = heapq.heappop(heap)
            function(argument)
        self.now = end if heap else self.last_tokens  # timers may go on after the last request

    # --- time and chance

    def at(self, time: float, function: Callable[[Any], None], argument: object, *, ends_pass: bool = False) -> None:
        """Calls function(argument) at that second. What arrives as a pass ends is there before the next one begins."""
        self._events += 1
        order = self._events + PASS_ENDS if ends_pass else self._events
        heapq.heappush(self._heap, (round(time, 9), order, function, argument))

    def deliver(self, rtt: float, function: Callable[[Any], None], argument: object) -> None:
        """The same after a message's way in one direction. What leaves together arrives together."""
        if self.world.jitter and self.now != self._left:
            self._left, self._late = self.now, self._links.expovariate(1.0 / self.world.jitter)
        self.at(self.now + rtt / 2 + self._late, function, argument)

    def varied(self, seconds: float) -> float:
        """A pass's time this once: log-normal around its mean."""
        if not self._sigma:
            return seconds
        return seconds * math.exp(self._random.gauss(-(self._sigma**2) / 2, self._sigma))

    def accepted(self, agreement: float, k: int) -> int:
        """How many of k draft tokens are accepted: geometric, cut at k."""
        if k == 0 or agreement <= 0.0:
            return 0
        if agreement >= 1.0:
            return k
        return min(k, int(math.log(1.0 - self._random.random()) / math.log(agreement)))

    def counted(self, start: float, end: float) -> float:
        """Seconds of that stretch that count: after the warm-up, before the end."""
        return max(0.0, min(end, self.world.seconds) - max(start, self.world.warm_up))

    # --- requests

    def _first_requests(self, target: Target) -> None:
        requests = target.spec.requests
        if requests.per_second is None:
            for _ in range(requests.in_flight):
                self._arrive(target)
            target.look()
        else:
            self._next_arrival(target)

    def _next_arrival(self, target: Target) -> None:
        rate = target.spec.requests.per_second
        if rate and target.requests != target.spec.requests.count:
            self.at(self.now + self._random.expovariate(rate), self._arrive_of_many, target)

    def _arrive_of_many(self, target: Target) -> None:
        self._next_arrival(target)
        self._arrive(target)
        target.look()

    def _arrive(self, target: Target) -> None:
        if target.requests == target.spec.requests.count:
            target.places_taken_until = min(target.places_taken_until, self.now)
            return
        target.requests += 1
        lengths = target.spec.requests.lengths
        prompt, output = lengths[0] if len(lengths) == 1 else self._random.choice(lengths)
        target.submit(Session(target, self.now, prompt, output))

    def finished(self, session: Session) -> None:
        """A request has its last token; where so many are in flight at all times, the next one comes."""
        if session.target.spec.requests.per_second is None:
            self._arrive(session.target)

    # --- faults

    def _die(self, drafter: Drafter) -> None:
        """Its links close: each target learns that after half a round trip."""
        orphans = list(drafter.sessions)
        drafter.sessions.clear()
        drafter.die()
        for session in orphans:
            self.deliver(session.target.spec.rtt, session.target.lost, session)

    def _revive(self, drafter: Drafter) -> None:
        """Targets find it again when they look for a drafter."""
        drafter.revive()
        for target in self.targets:
            if drafter.index in target.spec.drafters:
                target.drafter_is_back(drafter.index)

    # --- what happened

    def note_round(self, k: int) -> None:
        """A session took part in a round, with k draft tokens."""
        self._rounds += 1
        self._plain += k == 0

    def note_missed(self) -> None:
        """A lane did not wait any longer."""
        self._missed += 1

    def _rate(self, target: Target) -> float:
        """Tokens a second while all the target's places were taken."""
        seconds = min(self.now, target.places_taken_until) - self.world.warm_up
        return target.tokens / seconds if seconds > 0 else 0.0

    def outcome(self) -> Outcome:
        """Figures of everything after the warm-up."""
        seconds = max(1e-9, self.now - self.world.warm_up)
        rates = [self._rate(target) for target in self.targets]
        by_group: dict[str, list[float]] = {}
        for target, rate in zip(self.targets, rates, strict=True):
            by_group.setdefault(target.spec.group, []).append(rate)
        return Outcome(
            seconds=seconds,
            tokens_per_s=tuple(rates),
            utilization=tuple(drafter.busy_seconds / seconds for drafter in self.drafters),
            groups={name: self._books[name].figures(sum(of) / len(of)) for name, of in by_group.items()},
            missed=self._missed,
            plain_rounds=self._plain / max(1, self._rounds),
            events=self._events,
        )
