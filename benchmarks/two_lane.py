"""The embedded pair in two lanes against one, in real processes: the measured ratio beside the planner's.

Both models are profiled here first, one after the other, a thread each; then plain, standard and two lanes serve the
same requests in turn, several times. The planner gets those step times and the agreement that the standard mode's
acceptance length stands for. Where the two processors are threads of one core, each is slower while both are busy,
which a profile of one model alone does not know.

    python benchmarks/two_lane.py [--repeats 3] [--in-flight 8] [--temperature 0.8] [--json]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import DRAFTER, ROOT, TARGET, median

from paceline import bench, bench_real
from paceline.bench_texts import same_texts
from paceline.commands.bench import TEXTS
from paceline.core.costs import agreement_of
from paceline.topology.planner import predicted_tokens_per_s
from paceline.topology.planner_inputs import Conditions
from paceline.topology.planner_profiles import read_profile
from paceline.topology.spec import Profile, load_topology

MODES = ["plain", "standard", "lanes"]
CONTEXT = 96  # tokens that a session of this load holds on average


def profiled(model: Path, sessions: int) -> Profile:
    """Measured in a process of its own, as a node would run."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "profile.yaml"
        command = [sys.executable, "-m", "paceline", "profile", str(model), "--threads", "1"]
        command += ["--context", str(CONTEXT), "--sessions", str(sessions), "--out", str(out)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        return read_profile(out)


def run(repeats: int, in_flight: int, temperature: float) -> dict[str, Any]:
    topology = load_topology(ROOT / "examples" / "two-lane.yaml")
    job = bench.Job(list(TEXTS), 4 * in_flight, in_flight, 128, temperature)
    profiles = {"drafter": profiled(DRAFTER, in_flight), "chat": profiled(TARGET, in_flight)}
    modes = bench.modes(topology, MODES)
    turns: dict[str, list[bench.Measured]] = {mode.name: [] for mode in modes}
    for _ in range(repeats):
        for mode in modes:
            turns[mode.name].append(asyncio.run(bench_real.measure(mode, job)))
    rates = {
        name: median([sum(map(bench.tokens_per_second, one.answers.values())) for one in some])
        for name, some in turns.items()
    }
    length = median([one.acceptance_length or 1.0 for one in turns["standard"]])
    k = topology.targets[0].draft_length
    assert isinstance(k, int)
    conditions = Conditions(8, job.max_tokens, in_flight, agreement=agreement_of(length, k), requests=job.requests)
    predicted = {
        mode.name: predicted_tokens_per_s(mode.topology, conditions, _known(profiles, mode.name)) for mode in modes
    }
    reference = turns["plain"][0]
    return {
        "in_flight": in_flight,
        "temperature": temperature,
        "acceptance_length": length,
        "tokens_per_s": rates,
        "predicted_tokens_per_s": predicted,
        "lanes_over_standard": rates["lanes"] / rates["standard"],
        "predicted_lanes_over_standard": predicted["lanes"] / predicted["standard"],
        "identical_text": all(same_texts(one, reference) for some in turns.values() for one in some),
    }


def _known(profiles: dict[str, Profile], mode: str) -> dict[str, Profile]:
    return {name: one for name, one in profiles.items() if mode != "plain" or name != "drafter"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--in-flight", type=int, default=8)
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found = run(options.repeats, options.in_flight, options.temperature)
    if options.json:
        print(json.dumps(found))
        return 0 if found["identical_text"] else 1
    print(
        f"embedded pair, {found['in_flight']} in flight, temperature {found['temperature']}, acceptance length", end=" "
    )
    print(f"{found['acceptance_length']:.2f}\nmode        tokens/s   planned")
    for mode, rate in found["tokens_per_s"].items():
        print(f"{mode:10}{rate:10.1f}{found['predicted_tokens_per_s'][mode]:10.1f}")
    print(f"two lanes / standard: {found['lanes_over_standard']:.3f}", end="")
    print(f", planned {found['predicted_lanes_over_standard']:.3f}", end="; ")
    print("texts same" if found["identical_text"] else "texts DIFFER")
    return 0 if found["identical_text"] else 1


if __name__ == "__main__":
    sys.exit(main())
