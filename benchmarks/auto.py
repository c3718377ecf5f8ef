"""`lanes: auto, draft_length: auto` against every fixed setting and against plain decoding, over many cases.

Emulated models on virtual time (a case of minutes takes seconds and always gives the same figures): S/V, agreement,
round trip and requests in flight vary. Each case is measured plainly, with every fixed number of lanes and draft length
of a list, and with both left to the controller. All serve the same stretch of text: where the controller's window lies,
which begins after 50 rounds of each session. Fixed settings that a few rounds show to be far behind are left out.

    python benchmarks/auto.py [--cases 64] [--seed 11] [--json]
    python benchmarks/auto.py --real 8      cases in real time against virtual time, `auto` and a fixed setting
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import sys
from collections.abc import Sequence
from typing import Any

import real_time
from common import median, verdict
from emulated_cases import Case

from paceline.core.costs import expected_tokens

LANES = (1, 2, 4)
LENGTHS = (1, 2, 3, 4, 6, 8, 12, 16)
LEAST_OF_BEST, LEAST_OF_PLAIN = 0.97, 0.98
VERIFY_MS = 20.0
REAL_APART, REAL_TOKENS, MOST_IN_FLIGHT = 0.05, 600, 16
LEAST_TOKENS, TOKENS_A_SESSION = 2000, 160  # of a window; the largest case still has a dozen rounds in it
LOOK_ROUNDS, NEAR = 6, 0.85  # of each session; what a setting must bring of the best one, by those rounds
HEAD = "emulated: S/V  agree  rtt ms  in flight |   plain    best (lanes, k) |    auto (lanes, k)  of best  of plain"


def cases(count: int, seed: int = 11) -> list[Case]:
    """Every ratio, agreement, round trip and load about equally often; the same ones each time for the same seed."""
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
    random.Random(seed).shuffle(made)
    return made[:count]


def measure(case: Case) -> dict[str, Any]:
    """Tokens a second: plain, the best fixed setting, auto; and whether all texts are the same."""
    auto = case.run("auto", "auto", max(LEAST_TOKENS, case.in_flight * TOKENS_A_SESSION))
    windows = {(1, 0): (plain := case.run(1, 0, stretch=auto.stretch))}
    for setting in promising(case):
        windows[setting] = case.run(*setting, stretch=auto.stretch)
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


def promising(case: Case) -> list[tuple[int, int]]:
    """The fixed settings that may be best: by how quick their rounds are, and what a round brings on average."""
    rates = {}
    for lanes, k in itertools.product(LANES, LENGTHS):
        if lanes <= case.in_flight:
            gain = expected_tokens(case.agreement, k)
            look = case.run(lanes, k, tokens=int(LOOK_ROUNDS * case.in_flight * gain), warm_rounds=LOOK_ROUNDS // 2)
            rates[lanes, k] = look.rounds_per_s * gain
    return [setting for setting, rate in rates.items() if rate >= NEAR * max(rates.values())]


def line(row: dict[str, Any]) -> str:
    """One case for people."""
    return (
        f"{row['s_over_v']:13.2f}{row['agreement']:7.2f}{row['rtt_ms']:8.0f}{row['in_flight']:11d} |"
        f"{row['plain']:8.1f}{row['best']:8.1f} ({row['best_lanes']}, {row['best_draft_length']:2d}) |"
        f"{row['auto']:8.1f} ({row['auto_lanes']}, {row['auto_draft_length']:2d})"
        f"{row['auto'] / row['best']:9.3f}{row['auto'] / row['plain']:10.3f}"
        f"{'' if row['same_texts'] else '  TEXTS DIFFER'}"
    )


def repeat(candidates: Sequence[Case], count: int) -> int:
    """Real time against virtual time: as many cases, each once as `auto` and once in two lanes at k = 4 (or alone).

    Of each round trip and load some, as far as this machine's processors are not what limits them.
    """
    print("emulated: S/V  agree  rtt ms  in flight  setting |  virtual    real tokens/s   real/virtual")
    apart = []
    for case in [case for case in candidates if case.in_flight <= MOST_IN_FLIGHT][:count]:
        for setting in (("auto", "auto"), (min(2, case.in_flight), 4)):
            virtual = case.run(*setting, tokens=max(REAL_TOKENS, 60 * case.in_flight))
            real = real_time.run(case, *setting, virtual.stretch).rate(*virtual.stretch)
            apart.append(abs(real / virtual.rate - 1.0))
            print(
                f"{4 * case.step_ms / case.verify_ms:13.2f}{case.agreement:7.2f}{case.rtt_ms:8.0f}{case.in_flight:11d}"
                f"  {setting[0]!s:>4}, {setting[1]!s:>4} |{virtual.rate:9.1f}{real:9.1f}{real / virtual.rate:15.3f}",
                flush=True,
            )
    print(verdict("farthest of real from virtual time", max(apart), REAL_APART, at_least=False), file=sys.stderr)
    return int(max(apart) > REAL_APART)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=64)
    parser.add_argument("--seed", type=int, default=11, help="which cases")
    parser.add_argument("--real", type=int, default=0, metavar="N", help="N cases in real time; needs a quiet machine")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.real:
        return repeat(cases(256, options.seed), options.real)
    rows = []
    if not options.json:
        print(HEAD)
    for case in cases(options.cases, options.seed):
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
