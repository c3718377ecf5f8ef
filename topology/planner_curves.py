"""How the rate changes with the number of targets, draft length, round trip and requests in flight: curves for a page.

By the formulas alone (while all requests decode), for the plan's largest group of targets by itself. The number of
targets goes a little beyond where the drafter is never idle and where the curves cross: far beyond, plain decoding
grows and nothing else can be told apart.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from paceline.core.costs import MAX_DRAFT_LENGTH
from paceline.topology.planner_advice import setting_words
from paceline.topology.planner_inputs import Group, Inputs
from paceline.topology.planner_steady import PLAIN, Setting, best_settings, n_break_even, n_full, steady, total

TARGETS = tuple(sorted(base << shift for base in (2, 3) for shift in range(12)))
FEWEST_TARGETS, BEYOND = 8, 1.5
RTTS_MS = (0.0, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 40.0, 60.0, 80.0, 100.0)
IN_FLIGHT = (1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True)
class Line:
    """One line of a chart: tokens a second at each x."""

    name: str
    ys: tuple[float, ...]


@dataclass(frozen=True)
class Curve:
    """One chart. here: the plan's own x; marks: what happens at other ones."""

    title: str
    x_label: str
    xs: tuple[float, ...]
    here: float
    lines: tuple[Line, ...]
    marks: tuple[tuple[str, float], ...] = ()


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
    marks = _turning_points(inputs, group, setting)
    most = max(FEWEST_TARGETS, group.count, *(BEYOND * at for _, at in marks)) if marks else max(64, group.count)
    targets = sorted({1, *(x for x in TARGETS if x <= most), group.count, *(int(at) for _, at in marks)})
    return [
        Curve(
            "Targets on the drafter, all together",
            "targets",
            tuple(map(float, targets)),
            group.count,
            lines(targets, lambda x: replace(group, count=int(x)), False),
            marks,
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


def _turning_points(inputs: Inputs, group: Group, setting: Setting) -> tuple[tuple[str, float], ...]:
    """N_full and N_break-even, where there are such."""
    full = n_full(steady([group], inputs.drafters, [setting])[0], inputs.drafters)
    even = n_break_even(group, setting, inputs.drafters)
    return tuple((words, float(at)) for words, at in (("never idle from", full), ("pays up to", even)) if at)
