"""Where two lanes meet at a drafter, whose steps end as they will, a hair decides which phase they lock into.

S = 2 V, agreement 0.95, four requests in two lanes, k = 4: emulated, on virtual time, with draft steps and round trips
that differ by as little as real clocks do. The spread is what real time may be off by in such a case.

    python benchmarks/phase_lock.py
"""

from __future__ import annotations

import itertools
import sys
from dataclasses import replace

from emulated_cases import Case

CASE = Case(step_ms=10.0, verify_ms=20.0, agreement=0.95, rtt_ms=2.0, in_flight=4, flat=False, growth=0.1, max_batch=8)
STEPS_MS, RTTS_MS = (10.0, 10.1, 10.2, 10.3), (1.6, 2.0, 2.4, 2.8, 3.2)


def main() -> int:
    rates = []
    print("emulated: rtt ms  step ms  tokens/s")
    for rtt, step in itertools.product(RTTS_MS, STEPS_MS):
        rates.append(replace(CASE, rtt_ms=rtt, step_ms=step).run(2, 4, 3000).rate)
        print(f"{rtt:16.1f}{step:9.1f}{rates[-1]:10.1f}")
    print(f"from {min(rates):.0f} to {max(rates):.0f} tokens/s: {max(rates) / min(rates) - 1:.0%}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
