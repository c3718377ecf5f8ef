"""The first promise, with real processes and sockets: same text with a drafter, without, killed and late.

Runs examples/star.yaml (one drafter, three targets, the embedded pair) at temperature 0 and 0.8, each time
without a drafter, with it, with a drafter that is killed with SIGKILL while texts are being generated, and with
one that starts only then. Prompts go in two halves, the second once the drafter is (back) there. Prints
differing texts and sessions left at both ends. With --mqtt it runs examples/star-mqtt.yaml on mosquitto and on
amqtt, and kills the broker, too.

    python benchmarks/star_identity.py [--mqtt] [--prompts 24] [--tokens 192]
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import ROOT, prompts, verdict

from paceline.deployment import nodes_here
from paceline.star import Star, running_star
from paceline.topology.broker import BROKER_KIND
from paceline.topology.spec import Topology, load_topology
from paceline.topology.spec_checks import BROKER

SCENARIOS = ("drafter", "killed", "late")


async def scenario(name: str, topology: Topology, path: Path, texts: list[str], options: dict[str, Any]) -> Any:
    """A run's report; `killed` and `late` happen in the middle of the first half."""
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder)
        async with running_star(
            topology, path, run_dir, with_drafters=name != "plain", late_drafters=name == "late"
        ) as star:
            half = len(texts) // 2
            trigger = Trigger(star, name, path, half * options["max_tokens"] // 2)
            completions = await star.complete(texts[:half], options, trigger)
            await star.supervisor.wait_ready(star.drafters)
            completions += await star.complete(texts[half:], options)
            await star.settle()
        return star.report(completions)


class Trigger:
    """Counts tokens, and does once what its scenario is about."""

    def __init__(self, star: Star, name: str, path: Path, tokens: int) -> None:
        self.left = tokens
        self.star, self.name, self.path = star, name, path

    def __call__(self, tokens: int) -> None:
        due = self.left > 0
        self.left -= tokens
        if not due or self.left > 0:
            return
        supervisor = self.star.supervisor
        if self.name in ("killed", "broker"):
            pid = supervisor.children["drafter" if self.name == "killed" else BROKER].pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
        elif self.name == "late":
            drafters, _ = nodes_here(self.star.topology, self.path, supervisor.run_dir, everything=True)
            for node in drafters:
                supervisor.start(node)


async def compare(path: Path, texts: list[str], tokens: int) -> bool:
    topology = load_topology(path)
    good = True
    for temperature in (0.0, 0.8):
        options = {"max_tokens": tokens, "temperature": temperature, "seed": 7}
        plain = await scenario("plain", topology, path, texts, options)
        for name in (*SCENARIOS, "broker") if topology.link.local_broker else SCENARIOS:
            report = await scenario(name, topology, path, texts, options)
            pairs = zip(plain["outputs"], report["outputs"], strict=True)
            differing = sum(a["text"] != b["text"] or a["token_ids"] != b["token_ids"] for a, b in pairs)
            live = sum(node["live_sessions_at_end"] or 0 for node in (*report["targets"], *report["drafters"]))
            rounds = [(t["rounds"], t["fallback_rounds"], t["acceptance_length"]) for t in report["targets"]]
            total = sum(r - f for r, f, _ in rounds)
            acceptance = sum((r - f) * a for r, f, a in rounds) / max(total, 1)
            restarts = sum(drafter["restarts"] for drafter in report["drafters"])
            print(
                f"temperature {temperature}, {name:8} differing texts {differing}/{len(texts)}, sessions left {live}, "
                f"acceptance length {acceptance:.2f}, rounds {total} with a draft and "
                f"{sum(f for _, f, _ in rounds)} without, drafter restarts {restarts}",
                flush=True,
            )
            good &= differing == 0 and live == 0 and (name != "killed" or restarts > 0)
            if temperature == 0 and name == "drafter":
                print(verdict("acceptance length, greedy", acceptance, 2.5))
                good &= acceptance >= 2.5
    return good


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("topology", nargs="?", type=Path, default=ROOT / "examples" / "star.yaml")
    parser.add_argument("--mqtt", action="store_true", help="examples/star-mqtt.yaml, on each broker")
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=192)
    arguments = parser.parse_args()
    texts = prompts(arguments.prompts)
    if arguments.mqtt:
        good = True
        for kind in ("mosquitto", "amqtt"):
            print(f"{kind}:")
            os.environ[BROKER_KIND] = kind
            good &= asyncio.run(compare(ROOT / "examples" / "star-mqtt.yaml", texts, arguments.tokens))
    else:
        good = asyncio.run(compare(arguments.topology, texts, arguments.tokens))
    print("every text the same, nothing left behind" if good else "MISS: see above")
    sys.exit(not good)


if __name__ == "__main__":
    main()
