"""What goes wrong: one small function a scenario.

A function does the damage to a star under load and returns at the moment from which speculation must be back, or
must never have gone. Everything else is done around it (chaos_stage.py). To add one, write it here:

    @scenario("drafter killed (SIGKILL)")
    async def drafter_killed(world: World) -> None:
        await world.restart("drafter-0", signal.SIGKILL)
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from chaos_load import now
from chaos_setup import REFERENCE, Setup
from chaos_world import BROKER, World

from paceline.topology.netem import PARTITION, Faults

Play = Callable[[World], Awaitable[None]]
STAR = Setup()
SILENCE = 4.0  # seconds: longer than the three missed beats after which a link is given up


@dataclass(frozen=True)
class Scenario:
    """One line of the table.

    casualties: targets whose own users may notice (failures, stalls); all others must not. round_trip: seconds that
    the network itself adds to a round. speculates: whether drafts must flow again at the end. long: not in quick tests.
    """

    name: str
    play: Play
    setup: Setup = STAR
    casualties: tuple[str, ...] = ()
    impatience: float = 0.0
    round_trip: float = 0.0
    speculates: bool = True
    long: bool = False


SCENARIOS: list[Scenario] = []


def scenario(name: str, **options: Any) -> Callable[[Play], Play]:
    """Adds the function below to the table."""

    def add(play: Play) -> Play:
        SCENARIOS.append(Scenario(name, play, **options))
        return play

    return add


# --- processes


@scenario("drafter killed (SIGKILL)")
async def drafter_killed(world: World) -> None:
    await world.restart("drafter-0", signal.SIGKILL)


@scenario("drafter restarted (SIGTERM)")
async def drafter_restarted(world: World) -> None:
    await world.restart("drafter-0", signal.SIGTERM)


@scenario("drafter hung (SIGSTOP, SIGCONT)")
async def drafter_hung(world: World) -> None:
    await world.freeze("drafter-0", SILENCE)


@scenario("drafter hung for a moment", long=True)
async def drafter_hung_briefly(world: World) -> None:
    await world.freeze("drafter-0", 0.7)


@scenario("target killed (SIGKILL)", casualties=("target-0",))
async def target_killed(world: World) -> None:
    await world.restart("target-0", signal.SIGKILL)


@scenario("target hung (SIGSTOP, SIGCONT)", casualties=("target-0",))
async def target_hung(world: World) -> None:
    """The drafter frees its sessions within 5 s, while the target is still silent."""
    frozen = asyncio.create_task(world.freeze("target-0", 6.0))
    given_up = world.logged("drafter-0", "target target-0 is down")
    await world.until(given_up, "the drafter to give the silent target up", 5.5)
    await frozen


# --- the network between targets and drafter


@scenario("partition")
async def partition(world: World) -> None:
    await _network(world, PARTITION, SILENCE, "swallowed")


@scenario("partition towards the drafter", long=True)
async def partition_up(world: World) -> None:
    await _network(world, PARTITION, SILENCE, "swallowed", to_client=False)


@scenario("partition towards the targets", long=True)
async def partition_down(world: World) -> None:
    await _network(world, PARTITION, SILENCE, "swallowed", to_upstream=False)


@scenario("connections reset")
async def reset(world: World) -> None:
    for _ in range(3):
        world.links["drafter-0"].reset()
        await asyncio.sleep(0.3)


@scenario("10 % of frames lost")
async def loss(world: World) -> None:
    await _network(world, Faults(loss=0.1), 2.0, "lost")


@scenario("delay 50 ± 20 ms", round_trip=0.14, long=True)
async def delay(world: World) -> None:
    await _network(world, Faults(delay=0.05, jitter=0.02), 2.0)


@scenario("20 % of frames doubled", long=True)
async def duplication(world: World) -> None:
    await _network(world, Faults(duplication=0.2), 2.0, "doubled")


@scenario("20 % of frames reordered", long=True)
async def reordering(world: World) -> None:
    await _network(world, Faults(reordering=0.2), 2.0, "reordered")


@scenario("5 % of frames corrupted")
async def corruption(world: World) -> None:
    await _network(world, Faults(corruption=0.05), 2.0, "corrupted")


@scenario("throttled to 8 kB/s", round_trip=0.2, long=True)
async def throttle(world: World) -> None:
    await _network(world, Faults(rate=8000.0), 2.0)


@scenario("everything at once", round_trip=0.06)
async def everything(world: World) -> None:
    faults = Faults(delay=0.02, jitter=0.01, loss=0.05, duplication=0.05, reordering=0.1, corruption=0.01)
    await _network(world, faults, 2.0, "lost")
    await world.restart("drafter-0", signal.SIGKILL)


async def _network(world: World, faults: Faults, seconds: float, sign: str = "", **direction: bool) -> None:
    """A bad network for a while. sign: what must have been counted by then, or the fault has not happened."""
    link = world.links["drafter-0"]
    before = link.seen[sign]
    link.apply(faults, **direction)
    await asyncio.sleep(seconds if world.brief else 2 * seconds)
    link.clear()
    world.expect(not sign or link.seen[sign] > before, f"no frame was {sign}")


# --- users


@scenario("clients leave in mid-stream", impatience=0.5)
async def clients_leave(world: World) -> None:
    await asyncio.sleep(2.0 if world.brief else 6.0)


# --- below TCP


@scenario("5 % of packets lost, 20 ± 10 ms (TUN)", setup=Setup(namespace=True), round_trip=0.3)
async def packets_lost(world: World) -> None:
    """Below TCP: what is lost is sent again, late, by the kernel."""
    assert world.pipe is not None
    world.pipe.apply(Faults(delay=0.02, jitter=0.01, loss=0.05, duplication=0.02, reordering=0.05))
    await asyncio.sleep(3.0 if world.brief else 10.0)
    world.pipe.apply(Faults())
    world.expect(world.pipe.seen["lost"] > 0, "no packet was lost")


@scenario("partition below TCP (TUN)", setup=Setup(namespace=True), long=True)
async def packets_swallowed(world: World) -> None:
    assert world.pipe is not None
    world.pipe.apply(PARTITION)
    await asyncio.sleep(SILENCE if world.brief else 2 * SILENCE)
    world.pipe.apply(Faults())


# --- over a broker


async def broker_killed(world: World) -> None:
    await world.restart(BROKER, signal.SIGKILL)


async def broker_restarted(world: World) -> None:
    await world.restart(BROKER, signal.SIGTERM)


async def broker_hung(world: World) -> None:
    await world.freeze(BROKER, SILENCE)


async def broker_cut_off(world: World) -> None:
    """From everyone; what was on its way arrives late, as over TCP."""
    for link in world.links.values():
        link.apply(PARTITION)
    await asyncio.sleep(SILENCE if world.brief else 2 * SILENCE)
    for link in world.links.values():
        link.clear()


async def drafter_cut_off(world: World) -> None:
    await _network(world, PARTITION, SILENCE)


for kind in ("mosquitto", "amqtt"):
    over = {"setup": Setup(transport=kind)}
    scenario(f"{kind}: broker killed (SIGKILL)", long=kind == "amqtt", **over)(broker_killed)
    scenario(f"{kind}: broker restarted (SIGTERM)", long=True, **over)(broker_restarted)
    scenario(f"{kind}: broker hung (SIGSTOP, SIGCONT)", long=True, **over)(broker_hung)
    scenario(f"{kind}: broker cut off from all", long=True, **over)(broker_cut_off)
    scenario(f"{kind}: drafter cut off from it", long=True, **over)(drafter_cut_off)
    scenario(f"{kind}: drafter killed (SIGKILL)", long=True, **over)(drafter_killed)
    scenario(f"{kind}: drafter hung (SIGSTOP, SIGCONT)", long=True, **over)(drafter_hung)
    scenario(f"{kind}: target killed (SIGKILL)", long=True, casualties=("target-0",), **over)(target_killed)
    scenario(f"{kind}: connections reset", long=True, **over)(reset)
    scenario(f"{kind}: delay 50 ± 20 ms", long=True, round_trip=0.28, **over)(delay)


# --- peers


@scenario("drafter answers nonsense (a fake)", setup=Setup(nonsense=True), speculates=False)
async def nonsense(world: World) -> None:
    """None of it is believed. Some of it is waited for, up to the deadline."""
    assert world.fake is not None
    before = world.fake.answers
    await asyncio.sleep(2.0 if world.brief else 6.0)
    world.expect(world.fake.answers > before, "the fake was not asked")


# --- machines


@scenario("wall clocks jump by hours and days", setup=Setup(clock_jumps=True))
async def clock_jumps(world: World) -> None:
    """Faults that need timers happen meanwhile: a partition that only missed beats can find, a restart."""
    seen: set[int] = set()
    world.links["drafter-0"].apply(PARTITION)
    until = now() + SILENCE
    while now() < until:
        seen.add(round(world.status(REFERENCE).get("time", 0.0) / 3600.0))
        await asyncio.sleep(0.05)
    world.links["drafter-0"].clear()
    world.expect(len(seen) >= 4, "the wall clocks did not jump")
    await world.restart("drafter-0", signal.SIGKILL)


@scenario("disk full under logs and status", long=True, setup=Setup(small_disk=True))
async def disk_full(world: World) -> None:
    async with world.full_disk():
        for _ in range(3):
            world.links["drafter-0"].reset()  # so that everyone has something to log
            await asyncio.sleep(0.7)
        await world.restart("drafter-0", signal.SIGKILL)


# --- several drafters


@scenario("first of two drafters killed (failover)", setup=Setup(drafters=2))
async def failover(world: World) -> None:
    await _lose_first(world)


@scenario("one of two drafters killed (spread)", long=True, setup=Setup(drafters=2, policy="spread"))
async def spread(world: World) -> None:
    await _lose_first(world)


async def _lose_first(world: World) -> None:
    """Its sessions are drafted for by the other within a second; once back for one, it has some again."""
    before = world.drafted_tokens("drafter-1")
    killed = asyncio.create_task(world.restart("drafter-0", signal.SIGKILL))
    await world.until(lambda: world.drafted_tokens("drafter-1") > before, "the other drafter to draft", 1.0)
    await killed
    await world.until(lambda: world.drafted_tokens("drafter-0") > 0, "the first drafter to have sessions again", 3.5)
