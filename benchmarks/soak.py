"""Leave it running: random requests through random faults, on an emulated star of two drafters and two targets.

Prompts, lengths, temperatures, clients that leave, and which fault comes when and where are drawn from one seed. One
drafter and one target are killed again and again, the other two survive everything else; every text is compared with
a plain run's. At the end nothing may be live or left at either end. Exit code 1 when a promise does not hold.

    python benchmarks/soak.py [--requests 2000] [--minutes 20] [--seed 1]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import signal
import sys
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import httpx
from chaos_load import Answer, Reference, Request, ask, differing, now, plain_client, random_request
from chaos_setup import REFERENCE, Setup
from chaos_stage import STALL_LIMIT, quiet, speculating
from chaos_world import Footprint, World

from paceline.core.errors import PacelineError
from paceline.topology.netem import PARTITION, Faults

MORTAL_DRAFTER, MORTAL_TARGET = "drafter-0", "target-0"
WORKERS = 4  # of each target
IMPATIENT = 0.15
REPORT_SECONDS = 30.0

Fault = Callable[[World, Random], Awaitable[None]]


@dataclass
class Tally:
    """What has happened so far."""

    served: int = 0
    left: int = 0
    again: int = 0  # asked again after a target that was killed or had not come back
    tokens: int = 0
    differing: int = 0
    stalls: list[tuple[float, float]] = field(default_factory=list)  # seconds and when, at the target that survives
    faults: list[tuple[str, float, float]] = field(default_factory=list)  # name, from, until
    problems: list[str] = field(default_factory=list)

    @property
    def done(self) -> int:
        return self.served + self.left


# --- users


class Users:
    """Workers that share one stream of random requests, until so many were asked or the time is up."""

    def __init__(self, world: World, tally: Tally, requests: int, until: float, seed: int) -> None:
        self.world, self.tally, self.until = world, tally, until
        self.random = Random(seed)
        self.unasked = requests
        self.reference = Reference(world.endpoints[REFERENCE])

    async def run(self) -> None:
        await asyncio.gather(*(self._user(name) for name in self.world.targets for _ in range(WORKERS)))

    async def _user(self, target: str) -> None:
        async with plain_client() as client:
            while self.unasked > 0 and now() < self.until:
                self.unasked -= 1
                request = random_request(self.random, self.random.choice(((1, 8), (20, 120), (100, 400))))
                if self.random.random() < IMPATIENT:
                    await self._leave(client, target, request)
                else:
                    await self._stay(client, target, request)

    async def _leave(self, client: httpx.AsyncClient, target: str, request: Request) -> None:
        with contextlib.suppress(asyncio.TimeoutError, PacelineError):
            await asyncio.wait_for(ask(client, self.world.endpoints[target], request), self.random.uniform(0.0, 0.5))
        self.tally.left += 1

    async def _stay(self, client: httpx.AsyncClient, target: str, request: Request) -> None:
        """Asks until there is an answer, and compares it."""
        while now() < self.until:
            try:
                answer = await ask(client, self.world.endpoints[target], request)
            except PacelineError as error:
                self.tally.again += 1
                if target != MORTAL_TARGET:
                    self.tally.problems.append(f"{target} failed: {error}")
                await asyncio.sleep(0.2)
            else:
                await self.reference.prepare([request])
                self._count(answer, self.reference.answers.pop(request))
                return

    def _count(self, answer: Answer, plain: Answer) -> None:
        self.tally.served += 1
        self.tally.tokens += len(answer.token_ids)
        self.tally.differing += differing(answer, plain)
        if answer.target != MORTAL_TARGET:
            self.tally.stalls.append((answer.longest_gap, answer.gap_at))


# --- faults


async def _killed(world: World, random: Random) -> None:
    await world.restart(MORTAL_DRAFTER, signal.SIGKILL)


async def _terminated(world: World, random: Random) -> None:
    await world.restart(MORTAL_DRAFTER, signal.SIGTERM)


async def _drafter_hung(world: World, random: Random) -> None:
    await world.freeze(random.choice(world.drafters), random.uniform(0.1, 5.0))


async def _target_killed(world: World, random: Random) -> None:
    await world.restart(MORTAL_TARGET, signal.SIGKILL)


async def _target_hung(world: World, random: Random) -> None:
    await world.freeze(MORTAL_TARGET, random.uniform(0.1, 6.0))


async def _reset(world: World, random: Random) -> None:
    world.links[random.choice(world.drafters)].reset()


def _network(faults: Faults) -> Fault:
    """On the link of one drafter, or of both, in one direction or in both."""

    async def play(world: World, random: Random) -> None:
        upwards, downwards = random.choice(((True, True), (True, False), (False, True)))
        links = random.choice(([world.links[random.choice(world.drafters)]], list(world.links.values())))
        for link in links:
            link.apply(faults, to_upstream=upwards, to_client=downwards)
        await asyncio.sleep(random.uniform(0.1, 5.0))
        for link in links:
            link.clear()

    return play


FAULTS: dict[str, Fault] = {
    "drafter killed": _killed,
    "drafter restarted": _terminated,
    "drafter hung": _drafter_hung,
    "target killed": _target_killed,
    "target hung": _target_hung,
    "connections reset": _reset,
    "partition": _network(PARTITION),
    "loss": _network(Faults(loss=0.1)),
    "delay": _network(Faults(delay=0.05, jitter=0.02)),
    "duplication": _network(Faults(duplication=0.2)),
    "reordering": _network(Faults(reordering=0.2)),
    "corruption": _network(Faults(corruption=0.05)),
    "throttle": _network(Faults(rate=8000.0)),
    "all of the network's": _network(Faults(0.02, 0.01, 0.05, 0.05, 0.1, 0.01)),
}


async def misfortune(world: World, tally: Tally, seed: int) -> None:
    """One fault after another, for ever."""
    random = Random(seed)
    while True:
        name = random.choice(list(FAULTS))
        began = now()
        await FAULTS[name](world, random)
        tally.faults.append((name, began, now()))
        await asyncio.sleep(random.uniform(0.0, 1.0))


# --- the run


async def soak(requests: int, minutes: float, seed: int, patience: float = 1.0) -> list[str]:
    """Plays it all and prints what came of it; the promises that did not hold."""
    tally = Tally()
    started = now()
    async with World(Setup(drafters=2, policy="spread")) as world:
        tally.problems = world.problems
        await Users(world, Tally(), 40, now() + 60.0, seed).run()  # what a first request makes once is there now
        await quiet(world)
        before = world.footprints()
        diary = Diary(world, tally, requests)
        background = [asyncio.create_task(misfortune(world, tally, seed + 2)), asyncio.create_task(diary.keep())]
        await Users(world, tally, requests, started + 60.0 * minutes, seed + 1).run()
        for task in background:
            task.cancel()
        await asyncio.gather(*background, return_exceptions=True)
        await world.recover()
        last = Users(world, Tally(), 40, now() + 60.0, seed + 3)
        back, _ = await asyncio.gather(speculating(world), last.run())
        await quiet(world, before)
        print_tally(tally, now() - started, back)
        diary.print_processes(before)
        tally.problems += left_behind(world, before)
    if tally.differing:
        tally.problems.append(f"{tally.differing} tokens differ")
    longest, _ = max(tally.stalls, default=(0.0, 0.0))
    if longest > patience * STALL_LIMIT:
        tally.problems.append(f"a text stood still for {longest:.2f} s")
    if tally.done < requests:
        tally.problems.append(f"{requests - tally.done} requests were left when the time was up")
    return tally.problems


@dataclass
class Diary:
    """Tells how far it is, and remembers every process's memory at a tenth of the way."""

    world: World
    tally: Tally
    requests: int
    memory: dict[str, tuple[int, float]] = field(default_factory=dict)  # pid, MB

    async def keep(self) -> None:
        told = now()
        while True:
            await asyncio.sleep(0.5)
            if not self.memory and self.tally.done >= self.requests / 10:
                self.memory = {name: self._memory(name) for name in self.world.nodes}
            if now() - told > REPORT_SECONDS:
                told = now()
                print(f"{self.tally.done} of {self.requests} requests, {len(self.tally.faults)} faults", flush=True)

    def _memory(self, name: str) -> tuple[int, float]:
        pid = self.world.pid(name)
        return pid, resident_megabytes(pid)

    def print_processes(self, before: dict[str, Footprint]) -> None:
        """A line a process. Memory is compared only where it is the same process still."""
        after = self.world.footprints()
        print(f"{'':12}{'restarts':>10}{'MB at 10 %':>12}{'MB at end':>12}{'fds':>12}{'threads':>12}")
        for name in self.world.nodes:
            pid, megabytes = self._memory(name)
            earlier = self.memory.get(name, (0, 0.0))
            tenth = f"{earlier[1]:.1f}" if earlier[0] == pid else "restarted"
            fds = f"{before[name].fds} → {after[name].fds}"
            threads = f"{before[name].threads} → {after[name].threads}"
            restarts = self.world.supervisor.children[name].restarts
            print(f"{name:12}{restarts:>10}{tenth:>12}{megabytes:>12.1f}{fds:>12}{threads:>12}")


def resident_megabytes(pid: int) -> float:
    """0 when the process has gone."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) / 1024.0
    return 0.0


def print_tally(tally: Tally, seconds: float, back: float) -> None:
    print(
        f"{seconds:.0f} s: {tally.served} requests served, {tally.left} clients left in mid-stream, {tally.again} "
        f"times asked again after a target's death; {tally.tokens} tokens, {tally.differing} differ"
    )
    print(f"speculation after all {back:.2f} s; longest stalls at the target that survives:")
    for gap, at in sorted(tally.stalls, reverse=True)[:5]:
        names = [name for name, began, ended in tally.faults if began < at + gap and ended > at]
        print(f"    {gap:.2f} s, during: {', '.join(names) or 'no fault'}")
    counts = Counter(name for name, _, _ in tally.faults)
    print(f"{len(tally.faults)} faults: {', '.join(f'{name} {count}' for name, count in sorted(counts.items()))}")


def left_behind(world: World, before: dict[str, Footprint]) -> list[str]:
    """Live sessions, and processes that hold more than before."""
    after = world.footprints()
    larger = [n for n, one in before.items() if after[n].fds > one.fds or after[n].threads > one.threads]
    live = world.live_sessions()
    return [f"{name} holds more than before" for name in larger] + ([f"{live} sessions are live"] if live else [])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--minutes", type=float, default=20.0, help="at the most")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--patience", type=float, default=1.0, help="times longer that a text may stand still")
    arguments = parser.parse_args()
    logging.getLogger("paceline").setLevel(logging.ERROR)  # nodes that are started again are no news here
    problems = asyncio.run(soak(arguments.requests, arguments.minutes, arguments.seed, arguments.patience))
    print("\n".join(f"MISS: {problem}" for problem in problems) or "every promise holds")
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
