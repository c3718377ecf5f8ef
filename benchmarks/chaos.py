"""The chaos table: every fault of docs/reliability.md done to a star of real processes under load.

For each scenario: requests served and clients that left, tokens that differ from the plain run, the longest time
a text stood still, seconds until drafts were verified again after the fault, and what was left behind. Exit code 1
when a promise does not hold. What cannot be done on this machine says why.

    python benchmarks/chaos.py [--quick] [--only WORDS] [--transport tcp|mosquitto|amqtt] [--json]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import sys
from dataclasses import asdict

from chaos_scenarios import SCENARIOS, Scenario
from chaos_stage import Row, Stage, broken

HEADINGS = ("requests", "left", "differ", "stall s", "back s", "sessions", "fds", "threads")


async def run(scenarios: list[Scenario], brief: bool, show: bool) -> list[Row]:
    rows = []
    async with Stage(brief) as stage:
        for scenario in scenarios:
            rows.append(await stage.play(scenario))
            if show:
                print(line(rows[-1]), flush=True)
    return rows


def line(row: Row) -> str:
    """One line of the table, its problems below it."""
    if row.skipped is not None:
        return f"{row.scenario:42} skipped: {row.skipped}"
    back = "–" if row.speculation is None else f"{row.speculation:.2f}"
    cells = (
        row.requests,
        row.left,
        row.differing,
        f"{row.longest_stall:.2f}",
        back,
        row.sessions,
        row.fds,
        row.threads,
    )
    text = f"{row.scenario:42}" + "".join(f"{cell!s:>9}" for cell in cells)
    refused = f"   ({row.refused} refused by the target that was gone)" if row.refused else ""
    return "\n".join([text + refused, *(f"    MISS: {problem}" for problem in row.problems)])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="each fault once, as short as it can be")
    parser.add_argument("--only", default="", metavar="WORDS", help="scenarios whose name holds these words")
    parser.add_argument("--transport", choices=["tcp", "mosquitto", "amqtt"], help="those over one transport")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    chosen = [s for s in SCENARIOS if arguments.only in s.name and arguments.transport in (None, s.setup.transport)]
    if not chosen:
        parser.error(f"no scenario is called {arguments.only!r}; there are: {', '.join(one.name for one in SCENARIOS)}")
    logging.getLogger("paceline").setLevel(logging.ERROR)  # nodes that are started again are no news here
    if not arguments.json:
        print(f"{'':42}" + "".join(f"{heading:>9}" for heading in HEADINGS))
    rows = asyncio.run(run(chosen, arguments.quick, not arguments.json))
    if arguments.json:
        print(json.dumps([asdict(row) for row in rows], indent=2))
    else:
        print("every promise holds" if not broken(rows) else f"{len(broken(rows))} scenarios broke a promise")
    return int(bool(broken(rows)))


if __name__ == "__main__":
    sys.exit(main())
