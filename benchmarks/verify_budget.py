"""`verify_budget` against drafts cut evenly: accepted draft tokens for the same number of verified ones.

Emulated models on virtual time, two lanes, so that drafting costs nothing as long as it is quicker than a pass. Texts
differ in how often their drafts are right (agreement ± spread, each text its own, which the drafter's probabilities
state), and a pass verifies so many draft tokens for each of its sessions on average: as the same k for all of them, or
as the likeliest of longer drafts, whosever they are. Without a spread the drafter's probabilities mean nothing here.

    python benchmarks/verify_budget.py [--in-flight 16] [--k 2] [--drafted 8] [--json]
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from typing import Any

from common import verdict
from emulated_cases import Case, Window

CASES = ((0.9, 0.0), (0.8, 0.1), (0.7, 0.2), (0.65, 0.3))  # agreement, spread
TOKENS = 20_000
LANES = 2


def row(window: Window) -> dict[str, float]:
    """Draft tokens verified and accepted; and tokens a second."""
    return {"accepted": window.accepted, "verified": window.verified, "tokens_per_s": window.rate}


def measure(case: Case, k: int, drafted: int) -> dict[str, Any]:
    """Both ways with the same budget, over the same stretch of the same texts."""
    even = case.run(LANES, k, TOKENS)
    budget = k * case.in_flight // LANES
    chosen = replace(case, verify_budget=budget).run(LANES, drafted, stretch=even.stretch)
    return {
        "agreement": case.agreement,
        "spread": case.spread,
        "even": row(even),
        "chosen": row(chosen),
        "ratio": (chosen.accepted / chosen.verified) / (even.accepted / even.verified),
        "same_texts": even.agrees(chosen),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--in-flight", type=int, default=16)
    parser.add_argument("--k", type=int, default=2, help="draft tokens verified for each session, on average")
    parser.add_argument(
        "--drafted", type=int, default=8, help="drafted for each session where the likeliest are chosen"
    )
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = []
    for agreement, spread in CASES:
        case = Case(
            step_ms=1.0, verify_ms=20.0, agreement=agreement, spread=spread, in_flight=options.in_flight, flat=False
        )
        rows.append(measure(case, options.k, options.drafted))
    if options.json:
        print(json.dumps({"rows": rows}, indent=2))
    else:
        print(
            "emulated: agreement ± spread | accepted of verified: even, likeliest | ratio | tokens/s: even, likeliest"
        )
        for one in rows:
            shares = [one[name]["accepted"] / one[name]["verified"] for name in ("even", "chosen")]
            print(
                f"{one['agreement']:15.2f} ± {one['spread']:.2f}     | {shares[0]:.3f}, {shares[1]:.3f} | "
                f"{one['ratio']:.3f} | {one['even']['tokens_per_s']:.1f}, {one['chosen']['tokens_per_s']:.1f}"
            )
    apart = [one["ratio"] for one in rows if one["spread"] > 0]
    print(verdict("least gain where texts differ", min(apart), 1.0), file=sys.stderr)
    differing = sum(not one["same_texts"] for one in rows)
    print(verdict("cases with another text", differing, 0, at_least=False), file=sys.stderr)
    return int(min(apart) < 1.0 or differing > 0)


if __name__ == "__main__":
    sys.exit(main())
