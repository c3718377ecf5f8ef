"""`draft_ahead` against the best fixed draft length without it: emulated, on virtual time.

The case to hold: one request, a link of half a target pass there and back, four draft tokens in half a pass, first
choices right in 0.8 and second ones in 0.4 of all cases. Around it the table shows where drafting ahead pays (long
links, few requests) and that it is left off, at no loss, where it does not.

    python benchmarks/draft_ahead.py [--cases N] [--json]
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from typing import Any

from common import verdict
from emulated_cases import Case, Window

LENGTHS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12)
VERIFY_MS = 16.0
ASKED = Case(step_ms=VERIFY_MS / 8, verify_ms=VERIFY_MS, rtt_ms=VERIFY_MS / 2, agreement=0.8, second_choice=0.4)
LEAST_GAIN, LEAST_ANYWHERE = 1.25, 0.99
HEAD = "emulated:   V ms  rtt ms  agree  in flight |  without (k) |     with (k)  at once  late | ratio  same text"


def cases() -> list[Case]:
    """The asked one first."""
    loads = [replace(ASKED, in_flight=count) for count in (2, 4, 16)]
    links = [replace(ASKED, rtt_ms=rtt) for rtt in (0.0, 2.0, 16.0, 80.0)]
    agreements = [replace(ASKED, agreement=agreement) for agreement in (0.5, 0.95)]
    stars = [replace(ASKED, targets=count, rtt_ms=2.0) for count in (2, 8)]
    return [ASKED, *links, *agreements, *loads, *stars]


def best(case: Case, branches: int, lengths: list[int]) -> tuple[int, Window]:
    """The draft length with most tokens a second. branches: outcomes beyond the draft length, 0 for none at all."""
    tokens = 2000 * max(case.targets, min(4, case.in_flight))
    windows = {
        k: replace(case, draft_ahead=min(16, k + branches) if branches else 0).run(1, k, tokens) for k in lengths
    }
    k = max(windows, key=lambda length: windows[length].rate)
    return k, windows[k]


def measure(case: Case) -> dict[str, Any]:
    plain_k, without = best(case, 0, list(LENGTHS))
    k, ahead = best(case, 1, sorted({max(1, plain_k + more) for more in (-2, -1, 0, 1)}))
    return {
        "targets": case.targets,
        "rtt_ms": case.rtt_ms,
        "agreement": case.agreement,
        "in_flight": case.in_flight,
        "without": without.rate,
        "without_k": plain_k,
        "with": ahead.rate,
        "with_k": k,
        "at_once": ahead.at_once,
        "late": ahead.late,
        "ratio": ahead.rate / without.rate,
        "identical_text": ahead.agrees(without),
    }


def line(row: dict[str, Any]) -> str:
    load = f"{row['in_flight']}" if row["targets"] == 1 else f"{row['targets']} × 1"
    made = f"{row['at_once']:9.0%}{row['late']:6.0%}"
    case = f"{VERIFY_MS:16.0f}{row['rtt_ms']:8.0f}{row['agreement']:7.2f}{load:>11}"
    return (
        f"{case} |{row['without']:9.1f} ({row['without_k']})"
        f" |{row['with']:9.1f} ({row['with_k']}){made} |{row['ratio']:6.2f}  {row['identical_text']}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--cases", type=int, default=len(cases()), help="only the first ones")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if not options.json:
        print(HEAD)
    rows = []
    for case in cases()[: options.cases]:
        rows.append(measure(case))
        if not options.json:
            print(line(rows[-1]), flush=True)
    if options.json:
        print(json.dumps({"rows": rows}))
    least = min(row["ratio"] for row in rows)
    lines = [
        verdict("one request over a link of half a pass, with / without", rows[0]["ratio"], LEAST_GAIN),
        verdict("the least of all ratios", least, LEAST_ANYWHERE),
        verdict("texts that differ", sum(not row["identical_text"] for row in rows), 0, at_least=False),
    ]
    print("\n".join(lines), file=sys.stderr if options.json else sys.stdout)
    return int(any(line.startswith("MISS") for line in lines))


if __name__ == "__main__":
    sys.exit(main())
