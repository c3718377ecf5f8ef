"""How far the planner is from the engines: predicted and measured tokens/s over a grid, on virtual time.

    python benchmarks/planner_accuracy.py [--cases 120] [--all]

S/V, agreement, distance of the drafter, requests in flight, lanes, a pass that costs by its tokens or does not, and a
drafter that drafts for one lane at a time or for eight; a random choice of the grid unless --all. Measured as
`paceline bench` does it. Emulated: the times are assumed.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys

from common import median, verdict
from emulated_cases import LANGUAGE, Case

from paceline.bench import Job, Mode, tokens_per_second
from paceline.bench_virtual import measure
from paceline.topology.planner import predicted_tokens_per_s
from paceline.topology.planner_inputs import Conditions

GRID = ((0.25, 0.5, 1.0, 2.0), (0.3, 0.8, 0.95), (0.0, 20.0, 80.0), (1, 8, 64), (1, 2), (True, False), (1, 8))
K, V, PROMPT, OUTPUT = 4, 20.0, 61, 64
MEDIAN, WORST = 7.0, 15.0  # percent


def error(
    ratio: float, agreement: float, rtt_ms: float, in_flight: int, lanes: int, flat: bool, max_batch: int
) -> float:
    """Predicted over measured, less one."""
    case = Case(
        step_ms=ratio * V / K,
        agreement=agreement,
        rtt_ms=rtt_ms,
        in_flight=in_flight,
        flat=flat,
        growth=0.1,
        max_batch=max_batch,
    )
    topology = case.topology(lanes, K)
    requests = max(12, 4 * in_flight)
    chance, tokens = random.Random(0), range(LANGUAGE["vocabulary_size"])
    prompts = [chance.choices(tokens, k=PROMPT) for _ in range(requests + in_flight)]  # no two begin alike: cold caches
    measured = measure(Mode("case", topology, ("t0",)), Job(prompts, requests, in_flight, OUTPUT), rtt_ms / 1e3)
    conditions = Conditions(PROMPT, OUTPUT, in_flight, rtt_ms / 1e3, requests=requests)
    return predicted_tokens_per_s(topology, conditions) / tokens_per_second(measured.answers["t0"]) - 1.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=120)
    parser.add_argument("--all", action="store_true")
    options = parser.parse_args()
    grid = list(itertools.product(*GRID))
    chosen = grid if options.all else random.Random(0).sample(grid, options.cases)
    errors = []
    print("S/V   a     RTT ms  in flight  lanes  flat   batch  error")
    for case in chosen:
        errors.append(error(*case))
        ratio, agreement, rtt_ms, in_flight, lanes, flat, batch = case
        row = f"{ratio:<6}{agreement:<6}{rtt_ms:<8}{in_flight:<11}{lanes:<7}{flat!s:<7}{batch:<7}{errors[-1]:+.1%}"
        print(row, flush=True)
    sizes = [100 * abs(one) for one in errors]
    print(verdict(f"median error of {len(sizes)} cases, %", median(sizes), MEDIAN, at_least=False))
    print(verdict("worst error, %", max(sizes), WORST, at_least=False))
    return int(median(sizes) > MEDIAN or max(sizes) > WORST)


if __name__ == "__main__":
    sys.exit(main())
