"""How large a world the simulation takes: 10 000 targets and 100 drafters over 10 simulated seconds.

    python benchmarks/planner_scale.py [--targets 10000] [--drafters 100] [--seconds 10]

Prints for three worlds the time of one thread that it took, beside the limit of five minutes. Times are assumed ones.
"""

from __future__ import annotations

import argparse
import time

from common import verdict

from paceline.core.profile import StepTimes
from paceline.topology.simulation import simulate
from paceline.topology.simulation_world import Fault, Requests, SimulatedDrafter, SimulatedTarget, World

LIMIT = 300.0  # seconds


def star(targets: int, drafters: int, seconds: float, *, serial: bool, bursts: bool) -> World:
    """Each drafter serves its share of the targets. bursts: Poisson arrivals, passes that vary, late messages, and
    every tenth drafter gone for two seconds, its targets served by the next one meanwhile."""
    faults = (Fault(3.0, 5.0),) if bursts else ()
    step = StepTimes.doubling(2.0, 0.1)
    nodes = tuple(
        SimulatedDrafter(
            step, 0.01, max_messages=1 if serial else 0, faults=faults if index % 10 == 0 else (), max_sessions=1 << 20
        )
        for index in range(drafters)
    )
    requests = Requests(((64, 64), (256, 128)), in_flight=4, per_second=2.0 if bursts else None)
    verify = StepTimes(((1, 20.0), (64, 30.0), (1024, 200.0)))

    def target(index: int) -> SimulatedTarget:
        own = index % drafters
        return SimulatedTarget(verify, (own, (own + 1) % drafters), lanes=2, rtt=0.01, requests=requests)

    variation, jitter = (0.1, 0.001) if bursts else (0.0, 0.0)
    return World(nodes, tuple(map(target, range(targets))), seconds, variation=variation, jitter=jitter)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--targets", type=int, default=10_000)
    parser.add_argument("--drafters", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=10.0)
    options = parser.parse_args()
    for name, serial, bursts in (
        ("serial drafters", True, False),
        ("batching drafters", False, False),
        ("bursts, variance, failures", False, True),
    ):
        world = star(options.targets, options.drafters, options.seconds, serial=serial, bursts=bursts)
        began, cpu = time.perf_counter(), time.process_time()
        outcome = simulate(world)
        wall, took = time.perf_counter() - began, time.process_time() - cpu
        ttft = outcome.groups[""].ttft_ms
        print(
            f"{name}: {outcome.events:,} events, {outcome.events / took:,.0f} a second; "
            f"{outcome.total_tokens_per_s:,.0f} tokens/s, first token p99 {ttft.p99:.0f} ms; {wall:.0f} s by the wall"
        )
        print(verdict(f"CPU seconds for {options.seconds:g} simulated ones", took, LIMIT, at_least=False))


if __name__ == "__main__":
    main()
