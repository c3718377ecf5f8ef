"""A star with serial service against its formula, one with batching against the serial one, and two lanes against one.

Emulated models on virtual time; standard profile: draft step 2 ms, k = 4, S = 8 ms, V = 40 ms, agreement 0.8.

    python benchmarks/star_formula.py [--tokens 12000]

Serial (max_batch 1, as in the StarSD paper): tokens a second of N targets against N·A/max(N·S, S + V), the spread among
the targets, the drafter's use, and how long users wait between two pieces of a stream. Batched: the same star with a
drafter whose step costs 10 % more for each doubling of its batch. Lanes (MineDraft): two lanes against one at equal
lane size, against 2(S + V)/max(2S, S + V, 2V), with the time between pieces beside it.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from dataclasses import replace

from common import verdict
from emulated_cases import Case, Window

from paceline.core.costs import Situation, full_targets, throughput, two_lane_gain
from paceline.core.profile import StepTimes

K, STEP_MS, VERIFY_MS, AGREEMENT = 4, 2.0, 40.0, 0.8
TARGETS = (1, 2, 4, 8, 16)
MOST_ERROR, MOST_SPREAD, LEAST_USE, LEAST_BATCHED, LEAST_LANES, LEAST_TWO = 0.05, 0.05, 0.97, 2.5, 0.95, 1.85


def spread(window: Window) -> float:
    """How far the fastest and the slowest target are apart, of their mean."""
    return (max(window.each) - min(window.each)) / statistics.mean(window.each)


def star(tokens: int) -> list[str]:
    """The serial star at each N, then the batched one at 16."""
    lines, verdicts, errors, uses = [], [], [], []
    full = full_targets(K * STEP_MS / 1000, VERIFY_MS / 1000, 0.0)
    case = Case(step_ms=STEP_MS, verify_ms=VERIFY_MS, agreement=AGREEMENT)
    situation = Situation(StepTimes.constant(STEP_MS), StepTimes.constant(VERIFY_MS), AGREEMENT)
    sigma = {}
    print(f"star, serial service, emulated: N_full = {full}")
    print("   N   tokens/s   formula   ratio   spread   drafter use   gap σ ms")
    for count in sorted({*TARGETS, full}):
        window = replace(case, targets=count).run(1, K, tokens * max(1, count // 2))
        predicted = count * throughput(replace(situation, targets=count), K)
        errors.append(abs(window.rate / predicted - 1))
        if count > full:
            uses.append(window.utilization)
        sigma[count] = statistics.pstdev(window.gaps_ms)
        print(
            f"{count:4d}{window.rate:11.1f}{predicted:10.1f}{window.rate / predicted:8.3f}{spread(window):9.3f}"
            f"{window.utilization:14.3f}{sigma[count]:11.2f}"
        )
        lines = [verdict("spread among the targets at N = 16", spread(window), MOST_SPREAD, at_least=False)]
    verdicts.append(verdict("largest distance from the formula", max(errors), MOST_ERROR, at_least=False))
    verdicts.append(verdict("drafter use beyond N_full", min(uses), LEAST_USE))
    verdicts += lines
    verdicts.append(
        verdict("gap σ at N_full, ms, beyond that at N = 1 + 10 %", sigma[full] - 1.1 * sigma[1], 0.01, at_least=False)
    )
    gains = {}
    for verify in (10.0, 20.0, 40.0):  # at 40 the rounds themselves, S + V, allow 2.48 and no more
        alike = replace(case, verify_ms=verify, targets=16)
        one = alike.run(1, K, 4 * tokens).rate
        all_at_once = replace(alike, max_batch=16, growth=0.1).run(1, K, 8 * tokens).rate
        gains[verify] = all_at_once / one
        print(f"batched at N = 16, V = {verify:.0f} ms: {all_at_once:.1f} tokens/s, {gains[verify]:.2f} × serial")
    return [*verdicts, verdict("batched over serial at N = 16, V = 20 ms", gains[20.0], LEAST_BATCHED)]


def lanes(tokens: int) -> list[str]:
    """Two lanes against one at equal lane size, for several S/V."""
    print("\ntwo lanes, 4 sessions a lane, emulated; ms between pieces, and ms a token of one request")
    print("  S/V   one lane   two lanes    gain   formula   pieces: one, two   a token: one, two")
    parts = []
    at_one = 0.0
    for ratio in (0.25, 0.5, 1.0, 2.0):
        case = Case(step_ms=ratio * VERIFY_MS / K, verify_ms=VERIFY_MS, agreement=AGREEMENT, in_flight=4)
        one, two = case.run(1, K, tokens), replace(case, in_flight=8).run(2, K, 2 * tokens)
        gain, formula = two.rate / one.rate, two_lane_gain(ratio * VERIFY_MS, VERIFY_MS)
        parts.append(gain / formula)
        at_one = gain if ratio == 1.0 else at_one
        gaps = [statistics.median(window.gaps_ms) for window in (one, two)]
        each = [1000 * 4 / one.rate, 1000 * 8 / two.rate]
        print(
            f"{ratio:5.2f}{one.rate:11.1f}{two.rate:12.1f}{gain:8.3f}{formula:10.3f}"
            f"{gaps[0]:13.1f}, {gaps[1]:.1f}{each[0]:21.1f}, {each[1]:.1f}"
        )
    return [
        verdict("least part of the formula's gain", min(parts), LEAST_LANES),
        verdict("gain at S = V", at_one, LEAST_TWO),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=12_000, help="of one target, in one case")
    options = parser.parse_args()
    verdicts = [*star(options.tokens), *lanes(options.tokens)]
    print("\n" + "\n".join(verdicts))
    return int(any(line.startswith("MISS") for line in verdicts))


if __name__ == "__main__":
    sys.exit(main())
