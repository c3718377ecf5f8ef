"""`lanes: auto, draft_length: auto` against every fixed setting and against plain decoding, over many cases.

Emulated models on virtual time (a case of minutes takes seconds and always gives the same figures): S/V, agreement,
round trip and requests in flight vary. Each case is measured plainly, with every fixed number of lanes and draft length
of a list, and with both left to the controller. All serve the same stretch of text: where the controller's window lies,
which begins after 50 rounds of each session.

    python benchmarks/auto.py [--cases 64] [--json]
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import sys
from typing import Any

from common import median, verdict
from emulated_cases import Case

LANES = (1, 2, 4)
LENGTHS = (1, 2, 3, 4, 6, 8, 12, 16)
LEAST_OF_BEST, LEAST_OF_PLAIN = 0.97, 0.98
VERIFY_MS = 20.0
LEAST_TOKENS, TOKENS_A_SESSION = 4000, 160  # of a window; the largest case still has a dozen rounds in it
HEAD = "emulated: S/V  agree  rtt ms  in flight |   plain    best (lanes, k) |    auto (lanes, k)  of best  of plain"


def cases(count: int) -> list[Case]:
    """Every ratio, agreement, round trip and load about equally often; the same ones each time."""
    grid = itertools.product((0.25, 0.5, 1.0, 2.0), (0.3, 0.6, 0.8, 0.95), (0.0, 2.0, 10.0, 80.0), (1, 4, 16, 64))
    made = [
        Case(
            step_ms=ratio * VERIFY_MS / 4,
            verify_ms=VERIFY_MS,
            agreement=agreement,
            rtt_ms=rtt,
            in_flight=in_flight,
            flat=False,
            growth=0.1,
            max_batch=8,
        )
        for ratio, agreement, rtt, in_flight in grid
    ]
    random.Random(11).shuffle(made)
    return made[:count]


def measure(case: Case) -> dict[str, Any]:
    """Tokens a second: plain, the best fixed setting, auto; and whether all texts are the same."""
    auto = case.run("auto", "auto", max(LEAST_TOKENS, case.in_flight * TOKENS_A_SESSION))
    windows = {(1, 0): (plain := case.run(1, 0, stretch=auto.stretch))}
    for lanes, k in itertools.product(LANES, LENGTHS):
        if lanes <= case.in_flight:
            windows[lanes, k] = case.run(lanes, k, stretch=auto.stretch)
    best = max(windows, key=lambda setting: windows[setting].rate)
    return {
        "s_over_v": 4 * case.step_ms / case.verify_ms,
        "agreement": case.agreement,
        "rtt_ms": case.rtt_ms,
        "in_flight": case.in_flight,
        "plain": plain.rate,
        "best": windows[best].rate,
        "best_lanes": best[0],
        "best_draft_length": best[1],
        "auto": auto.rate,
        "auto_lanes": auto.plan.lanes,
        "auto_draft_length": auto.plan.draft_length,
        "same_texts": all(window.agrees(plain) for window in (*windows.values(), auto)),
    }


def line(row: dict[str, Any]) -> str:
    """One case for people."""
    return (
        f"{row['s_over_v']:13.2f}{row['agreement']:7.2f}{row['rtt_ms']:8.0f}{row['in_flight']:11d} |"
        f"{row['plain']:8.1f}{row['best']:8.1f} ({row['best_lanes']}, {row['best_draft_length']:2d}) |"
        f"{row['auto']:8.1f} ({row['auto_lanes']}, {row['auto_draft_length']:2d})"
        f"{row['auto'] / row['best']:9.3f}{row['auto'] / row['plain']:10.3f}"
        f"{'' if row['same_texts'] else '  TEXTS DIFFER'}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=64)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = []
    if not options.json:
        print(HEAD)
    for case in cases(options.cases):
        rows.append(row := measure(case))
        if not options.json:
            print(line(row), flush=True)
    of_best = [row["auto"] / row["best"] for row in rows]
    of_plain = [row["auto"] / row["plain"] for row in rows]
    if options.json:
        print(json.dumps({"rows": rows}, indent=2))
    else:
        print(f"{len(rows)} cases; of the best fixed setting: median {median(of_best):.3f}")
    print(verdict("worst of the best fixed setting", min(of_best), LEAST_OF_BEST), file=sys.stderr)
    print(verdict("worst of plain decoding", min(of_plain), LEAST_OF_PLAIN), file=sys.stderr)
    differing = sum(not row["same_texts"] for row in rows)
    print(verdict("cases with another text", differing, 0, at_least=False), file=sys.stderr)
    return int(min(of_best) < LEAST_OF_BEST or min(of_plain) < LEAST_OF_PLAIN or differing > 0)


if __name__ == "__main__":
    sys.exit(main())
