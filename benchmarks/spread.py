"""Eight drafters and two targets with `policy: spread`: how even the load is, and how soon a killed drafter's
sessions are elsewhere.

Emulated models, real processes and sockets. Requests of random lengths keep 32 sessions open at each target; load is
what each drafter drafted meanwhile. Then one drafter is killed with SIGKILL in the midst of it, several times: each
time until every session of it is at another drafter, as the targets' /health says, asked every 10 ms.

    python benchmarks/spread.py [--seconds 20] [--kills 5] [--json]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import yaml
from common import median, verdict

from paceline.star import Star, running_star
from paceline.topology.spec import load_topology

DRAFTERS, TARGETS, IN_FLIGHT = 8, 2, 32
LANGUAGE = {"vocabulary_size": 300, "seed": 3}
MOST_UNEVEN, MOST_SECONDS = 0.15, 1.0
FIRST_PORT = 17_400


def topology(folder: Path) -> Path:
    """The file; every drafter could hold 16 sessions, so that half of all places are taken."""
    names = [f"drafter-{index}" for index in range(DRAFTERS)]
    drafters = [
        {
            "name": name,
            "model": "toy",
            "runtime": "emulated",
            "listen": f"127.0.0.1:{FIRST_PORT + index}",
            "profile": {**LANGUAGE, "step_ms": 2, "agreement": 0.8},
        }
        for index, name in enumerate(names)
    ]
    targets = [
        {
            "name": f"target-{index}",
            "model": "toy",
            "engine": "emulated",
            "drafters": {"names": names, "policy": "spread"},
            "api": {"listen": f"127.0.0.1:{FIRST_PORT + 50 + index}"},
            "profile": {**LANGUAGE, "verify_ms": 40},
        }
        for index in range(TARGETS)
    ]
    path = folder / "spread.yaml"
    path.write_text(yaml.safe_dump({"version": 1, "name": "spread", "drafters": drafters, "targets": targets}))
    return path


async def keep_busy(star: Star, client: httpx.AsyncClient, stop: asyncio.Event) -> None:
    """One user after the other at each of IN_FLIGHT places of each target."""
    numbers = random.Random(5)

    async def user(target: str) -> None:
        url = star.endpoint(target).url
        while not stop.is_set():
            prompt = [numbers.randrange(256) for _ in range(numbers.randrange(8, 64))]
            body = {"prompt": prompt, "max_tokens": numbers.randrange(50, 400), "temperature": 0.8}
            response = await client.post(url, json=body)
            response.raise_for_status()

    await asyncio.gather(*(user(target) for target in star.targets for _ in range(IN_FLIGHT)))


def drafted(star: Star) -> dict[str, int]:
    return {name: star.supervisor.status(name).get("tokens_drafted", 0) for name in star.drafters}


async def sessions_at(star: Star, client: httpx.AsyncClient, drafter: str) -> int:
    """Sessions that the targets have at a drafter."""
    total = 0
    for name in star.targets:
        url = star.endpoint(name).url.replace("/v1/completions", "/health")
        total += (await client.get(url)).json()["sessions_at"][drafter]
    return total


async def kill(star: Star, client: httpx.AsyncClient, drafter: str) -> dict[str, float]:
    """Seconds from SIGKILL until no session is left at the drafter; and how many there were."""
    before = await sessions_at(star, client, drafter)
    pid = star.supervisor.children[drafter].pid
    assert pid is not None and before > 0
    os.kill(pid, signal.SIGKILL)
    start = time.monotonic()
    while await sessions_at(star, client, drafter):
        if time.monotonic() - start > 10:
            raise SystemExit(f"sessions stay at {drafter}, which is dead")
        await asyncio.sleep(0.01)
    moved = time.monotonic() - start
    await star.supervisor.wait_ready([drafter])
    return {"sessions": before, "seconds": moved}


async def measure(seconds: float, kills: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        path = topology(Path(folder))
        async with (
            running_star(load_topology(path), path, Path(folder)) as star,
            httpx.AsyncClient(timeout=None, limits=httpx.Limits(max_connections=None), trust_env=False) as client,
        ):
            stop = asyncio.Event()
            load = asyncio.create_task(keep_busy(star, client, stop))
            await asyncio.sleep(3.0)
            before = drafted(star)
            await asyncio.sleep(seconds)
            after = drafted(star)
            killed = []
            for index in range(kills):
                killed.append(await kill(star, client, star.drafters[index % DRAFTERS]))
                await asyncio.sleep(2.0)
            stop.set()
            await load
            await star.settle()
            left = sum(
                star.supervisor.status(name).get("live_sessions", -1) for name in (*star.targets, *star.drafters)
            )
    loads = {name: after[name] - before[name] for name in after}
    mean = sum(loads.values()) / len(loads)
    uneven = max(abs(load - mean) / mean for load in loads.values())
    return {"tokens_drafted": loads, "uneven": uneven, "killed": killed, "sessions_left": left}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found = asyncio.run(measure(options.seconds, options.kills))
    if options.json:
        print(json.dumps(found, indent=2))
    else:
        print("drafted tokens:", ", ".join(f"{name} {count}" for name, count in found["tokens_drafted"].items()))
        print(
            "killed:", ", ".join(f"{one['sessions']:.0f} sessions in {one['seconds']:.3f} s" for one in found["killed"])
        )
        print("median", f"{median([one['seconds'] for one in found['killed']]):.3f} s")
    worst = max(one["seconds"] for one in found["killed"])
    print(verdict("largest distance from the mean load", found["uneven"], MOST_UNEVEN, at_least=False))
    print(verdict("slowest move after a kill, s", worst, MOST_SECONDS, at_least=False))
    print(verdict("sessions left at the end", found["sessions_left"], 0, at_least=False))
    return int(found["uneven"] > MOST_UNEVEN or worst > MOST_SECONDS or found["sessions_left"] != 0)


if __name__ == "__main__":
    sys.exit(main())
