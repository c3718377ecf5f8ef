"""What a simulation writes down, a group of targets a book, and the figures it comes to."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

from paceline.topology.simulation_world import Figures, Spread

if TYPE_CHECKING:
    from paceline.topology.simulation import Simulation
    from paceline.topology.simulation_target import Session

NAMES = ("round", "ttft", "gap", "bunch", "token", "e2e", "undrafted")


class Book:
    """Times in seconds, of what happened after the warm-up."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._values = {name: array("d") for name in NAMES}

    def note(self, name: str, value: float) -> None:
        """One value, if it counts by now."""
        if self._simulation.now >= self._simulation.world.warm_up:
            self._values[name].append(value)

    def tokens(self, session: Session, count: int) -> None:
        """Tokens of a session come out."""
        now = self._simulation.last_tokens = self._simulation.now
        if session.delivered:
            if now >= self._simulation.world.warm_up:
                self._values["gap"].append(now - session.delivered)
                self._values["bunch"].append(count)
        else:
            session.first = now
            self.note("ttft", now - session.arrived)
        session.delivered = now
        if self._simulation.world.warm_up <= now <= session.target.places_taken_until:
            session.target.tokens += count
        if not session.remaining:
            self.note("e2e", now - session.arrived)
            if session.output > 1:
                self.note("token", (now - session.first) / (session.output - 1))

    def figures(self, tokens_per_s: float) -> Figures:
        """Everything written down, in milliseconds."""
        values = self._values
        return Figures(
            tokens_per_s,
            spread(values["round"], 1e3),
            spread(values["ttft"], 1e3),
            spread(values["gap"], 1e3),
            spread(values["bunch"]),
            spread(values["token"], 1e3),
            spread(values["e2e"], 1e3),
            spread(values["undrafted"]).mean,
        )


def spread(values: array[float], scale: float = 1.0) -> Spread:
    """Mean, percentiles and deviation, each times `scale`; zeros of no values."""
    import numpy as np

    if not values:
        return Spread(0, 0.0, 0.0, 0.0, 0.0)
    data = np.frombuffer(values, np.float64) * scale
    p50, p99 = np.percentile(data, [50, 99], method="inverted_cdf")
    return Spread(len(values), float(data.mean()), float(p50), float(p99), float(data.std()))
