"""How the rate changes with the number of targets, draft length, round trip and requests in flight: curves for a page.

By the formulas alone (while all requests decode), for the plan's largest group of targets by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from paceline.core.costs import MAX_DRAFT_LENGTH
from paceline.topology.planner_advice import setting_words
from paceline.topology.planner_inputs import Group, Inputs
from paceline.topology.planner_steady import PLAIN, Setting, best_settings, steady, total

TARGETS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
RTTS_MS = (0.0, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 40.0, 60.0, 80.0, 100.0)
IN_FLIGHT = (1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True)
class Line:
    """One line of a chart: tokens a second at each x."""

    name: str
    ys: tuple[float, ...]


@dataclass(frozen=True)
class Curve:
    """One chart. here: the plan's own x."""

    title: str
    x_label: str
    xs: tuple[float, ...]
    here: float
    lines: tuple[Line, ...]


def curves(inputs: Inputs, setting: Setting) -> list[Curve]:
    """Four charts. setting: of the largest group that has a drafter; none where no group has one."""
    groups = [group for group in inputs.groups if group.drafters]
    if not groups:
        return []
    group = max(groups, key=lambda one: one.count)
    own = setting_words(setting)

    def rate(group: Group, setting: Setting | None) -> float:
        """setting None: the best one."""
        chosen = [setting] if setting else best_settings([group], inputs.drafters)
        return total([group], steady([group], inputs.drafters, chosen))

    def lines(xs: Sequence[float], change: Callable[[float], Group], best: bool) -> tuple[Line, ...]:
        named = [(own, setting), ("plain decoding", PLAIN)] + ([("best k and lanes", None)] if best else [])
        return tuple(Line(name, tuple(rate(change(x), one) for x in xs)) for name, one in named)

    by_k = [
        Line(f"{lanes} lane{'s' if lanes > 1 else ''}", tuple(rate(group, Setting(lanes, k)) for k in range(1, 17)))
        for lanes in sorted({1, 2, setting.lanes})
        if lanes <= group.decoding
    ]
    plain = rate(group, PLAIN)
    flights = [x for x in IN_FLIGHT if x <= group.max_sessions]
    targets = sorted({*TARGETS, group.count})
    return [
        Curve(
            "Targets on the drafter, all together",
            "targets",
            tuple(map(float, targets)),
            group.count,
            lines(targets, lambda x: replace(group, count=int(x)), False),
        ),
        Curve(
            "Draft length",
            "k, tokens drafted a round",
            tuple(float(k) for k in range(1, MAX_DRAFT_LENGTH + 1)),
            setting.draft_length,
            (*by_k, Line("plain decoding", (plain,) * MAX_DRAFT_LENGTH)),
        ),
        Curve(
            "Distance of the drafter",
            "round trip, ms",
            RTTS_MS,
            group.rtt * 1e3,
            lines(RTTS_MS, lambda x: replace(group, rtt=x / 1e3), True),
        ),
        Curve(
            "Requests in flight at each target",
            "requests in flight",
            tuple(map(float, flights)),
            group.in_flight,
            lines(flights, lambda x: replace(group, in_flight=int(x)), True),
        ),
    ]
