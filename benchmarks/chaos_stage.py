"""Plays scenarios, one after the other, and looks at what is left after each.

Around each: a quiet star is looked at, users start, the scenario does its damage, speculation must be back, users
stop, and the star must be as quiet and as small as before. What a star promises is in `check`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

from chaos_load import Answer, Load, Reference, differing, now, random_request
from chaos_scenarios import Scenario
from chaos_setup import REFERENCE, Setup
from chaos_world import Footprint, World

from paceline.cloud.drafters import MAX_DEADLINE
from paceline.core.errors import PacelineError

BUSY_MACHINE = 1.0  # seconds that a machine with more processes than processors may add
STALL_LIMIT = MAX_DEADLINE + BUSY_MACHINE
STRIKES = 3  # rounds that may wait for a deadline before a lane decodes plainly
RETURN_LIMIT = 2.0
SETTLE_SECONDS = 8.0


@dataclass
class Row:
    """What a scenario came to. Times in seconds; None: not measured. problems: every promise that did not hold."""

    scenario: str
    requests: int = 0
    refused: int = 0  # of targets that were killed or hung themselves
    left: int = 0
    differing: int = 0
    longest_stall: float = 0.0
    speculation: float | None = None
    sessions: int = 0
    fds: int = 0
    threads: int = 0
    seconds: float = 0.0
    skipped: str | None = None
    problems: list[str] = field(default_factory=list)


class Stage:
    """Keeps one star between scenarios of the same setup. `async with Stage() as stage`."""

    def __init__(self, brief: bool = True, requests: int = 24, patience: float = 1.0) -> None:
        """patience: times longer that anything may take, for machines that are busy with other things."""
        self.brief = brief
        self.patience = patience
        random = Random(5)
        self.requests = [random_request(random) for _ in range(requests)]
        self.world: World | None = None
        self.reference: Reference | None = None

    async def __aenter__(self) -> Stage:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._strike()

    async def play(self, scenario: Scenario) -> Row:
        """One scenario. A star on which a promise failed is not used again."""
        started = now()
        row = Row(scenario.name, skipped=scenario.setup.why_not())
        if row.skipped is None:
            try:
                await self._play(await self._build(scenario.setup), scenario, row)
            except PacelineError as error:
                row.problems.append(f"the star could not be kept running: {error}")
            if row.problems:
                await self._strike()
        row.seconds = now() - started
        return row

    async def _build(self, setup: Setup) -> World:
        """The star of the last scenario if it fits, else a new one that has served its first users."""
        if self.world is not None and self.world.setup == setup:
            return self.world
        await self._strike()
        self.world = await World(setup, self.brief).__aenter__()
        answers = self.reference.answers if self.reference is not None else {}
        self.reference = Reference(self.world.endpoints[REFERENCE])
        self.reference.answers = answers  # the same language on every star: pace and faults do not change a token
        await self.reference.prepare(self.requests)
        async with Load([self.world.endpoints[name] for name in self.world.targets], self.requests) as load:
            await self.world.until(lambda: len(load.answers) >= 2 * load.workers, "the first answers")
        await quiet(self.world)
        return self.world

    async def _strike(self) -> None:
        world, self.world = self.world, None
        if world is not None:
            await world.__aexit__(None, None, None)

    async def _play(self, world: World, scenario: Scenario, row: Row) -> None:
        world.problems = row.problems
        before = world.footprints()
        endpoints = [world.endpoints[name] for name in world.targets]
        async with Load(endpoints, self.requests, impatience=scenario.impatience) as load:
            if scenario.speculates:
                await speculating(world)
            for _ in range(1 if world.brief else 3):
                await scenario.play(world)
                if scenario.speculates:
                    row.speculation = max(row.speculation or 0.0, await speculating(world))
        row.left = load.left
        await quiet(world, before)
        self._check(world, scenario, row, load, before)

    def _check(self, world: World, scenario: Scenario, row: Row, load: Load, before: dict[str, Footprint]) -> None:
        """(a) every text, (b) every wait, (c) every session, (d) every file and thread, (e) speculation again."""
        assert self.reference is not None
        row.requests = len(load.answers)
        row.refused = len(load.failed)
        row.differing = sum(differing(answer, self.reference[answer.request]) for answer in load.answers)
        unharmed = [answer for answer in load.answers if answer.target not in scenario.casualties]
        row.longest_stall = max((answer.longest_gap for answer in unharmed), default=0.0)
        row.sessions = world.live_sessions()
        after = world.footprints()
        row.fds = sum(max(0, after[name].fds - before[name].fds) for name in before)
        row.threads = sum(max(0, after[name].threads - before[name].threads) for name in before)

        slow = [answer.seconds for answer in unharmed if answer.seconds > self._limit(answer, scenario)]
        strangers = [words for target, words in load.failed if target not in scenario.casualties]
        promises = {
            f"{row.differing} tokens differ": row.differing == 0,
            "no request was served": row.requests > 0,
            f"{len(strangers)} requests failed, first: {strangers[:1]}": not strangers,
            f"a text stood still for {row.longest_stall:.2f} s": row.longest_stall <= self.patience * STALL_LIMIT,
            f"{len(slow)} requests took too long, up to {max(slow, default=0.0):.1f} s": not slow,
            f"{row.sessions} sessions are left": row.sessions == 0,
            f"{row.fds} file descriptors are left": row.fds == 0,
            f"{row.threads} threads are left": row.threads == 0,
            f"speculation came back after {row.speculation or 0:.2f} s": (row.speculation or 0)
            <= self.patience * RETURN_LIMIT,
        }
        row.problems += [sentence for sentence, holds in promises.items() if not holds]

    def _limit(self, answer: Answer, scenario: Scenario) -> float:
        """Twice the plain time, three deadlines, and what a slow network adds to each round: its deadline is learnt."""
        assert self.reference is not None
        plain = self.reference[answer.request].seconds
        network = 2 * scenario.round_trip * len(answer.token_ids)
        return self.patience * (2 * plain + STRIKES * MAX_DEADLINE + BUSY_MACHINE + network)


async def speculating(world: World, seconds: float = 15.0) -> float:
    """Seconds until every target has verified drafts from now on, to a tenth: status files are no faster."""
    started = now()
    await world.fresh_statuses(world.targets)
    before = {name: world.drafted_rounds(name) for name in world.targets}

    def back() -> bool:
        return all(_grown(world.drafted_rounds(name), rounds) for name, rounds in before.items())

    await world.until(back, "speculation to be back", seconds)
    return now() - started


def _grown(counted: tuple[int, int], before: tuple[int, int]) -> bool:
    """A new process counts from zero."""
    return counted[1] > (before[1] if counted[0] == before[0] else 0)


async def quiet(world: World, before: dict[str, Footprint] | None = None) -> None:
    """Waits until nothing is live and every process holds no more than before; what stays, the checks will find."""
    deadline = now() + SETTLE_SECONDS
    while now() < deadline:
        await world.fresh_statuses(world.nodes)
        if world.live_sessions() == 0 and (before is None or _no_more(world.footprints(), before)):
            return


def _no_more(after: dict[str, Footprint], before: dict[str, Footprint]) -> bool:
    return all(
        name in after and after[name].fds <= one.fds and after[name].threads <= one.threads
        for name, one in before.items()
    )


def broken(rows: Sequence[Row]) -> list[Row]:
    """The rows with a promise that did not hold."""
    return [row for row in rows if row.problems]
