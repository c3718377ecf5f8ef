"""What users notice while somebody's 4 000-token prompt is read in: inter-token time beside a prompt.

One target (and one drafter in the second part), real processes. Four streams run; in the second half of the time
long prompts are read, one after another. A prompt chunk may delay a round once, so the p99 of the gaps must stay
under the chunk's own time plus 1.5 × the p99 without prompts. A chunk late in a prompt attends to more and takes
longer than an early one, so p99 is compared with p99.

    python benchmarks/prefill_interference.py [--tokens 300] [--prompts 4]
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import tempfile
from pathlib import Path

from common import MODELS, prompts, verdict, write_topology

from paceline.core.percentiles import percentile
from paceline.star import Star, running_star
from paceline.topology.spec import load_topology

STREAMS, PROMPT_TOKENS, CHUNK = 4, 4000, 256


def long_prompts(count: int) -> list[list[int]]:
    """Token ids of the held-out files, one after another, `PROMPT_TOKENS` each."""
    from paceline.core.vocabulary import Vocabulary

    vocabulary = Vocabulary.load(MODELS / "tiny-target")
    lines = (MODELS / "held-out.jsonl").read_text(encoding="utf-8").splitlines()
    ids = vocabulary.encode("".join(json.loads(line)["text"] for line in lines))
    while len(ids) < count * PROMPT_TOKENS:
        ids += ids
    return [ids[start : start + PROMPT_TOKENS] for start in range(0, count * PROMPT_TOKENS, PROMPT_TOKENS)]


async def gaps(star: Star, name: str, tokens: int, long: list[list[int]]) -> list[float]:
    """Gaps in ms between the pieces of the streams; while `long` prompts are read, if there are any."""
    options = {"max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    streams = asyncio.create_task(star.complete(prompts(STREAMS), options, targets=[name]))
    windows = []
    await asyncio.sleep(0.3)
    for prompt in long:
        one = {"max_tokens": 1, "temperature": 0}
        (done,) = await star.complete([prompt], one, targets=[name])
        windows.append((done.sent, done.arrivals[-1]))
    found = []
    for stream in await streams:
        for sooner, later in itertools.pairwise(stream.arrivals):
            if not long or any(start <= later and sooner <= end for start, end in windows):
                found.append((later - sooner) * 1e3)
    return found


async def main_async(tokens: int, count: int) -> None:
    shape = {"max_context": 6144, "max_sessions": 8, "threads": 1, "prefill_chunk": CHUNK}
    with tempfile.TemporaryDirectory() as folder:
        drafter = {"name": "drafter", "max_context": 6144, "max_sessions": 8, "threads": 1}
        targets = [{"name": "plain", **shape}, {"name": "star", "drafters": {"names": ["drafter"]}, **shape}]
        path = write_topology(Path(folder) / "prefill.yaml", [drafter], targets, 7600)
        async with running_star(load_topology(path), path, Path(folder)) as star:
            for name in ("plain", "star"):
                await gaps(star, name, 64, long_prompts(1))  # warm-up
                normal = await gaps(star, name, tokens, [])
                beside = await gaps(star, name, tokens, long_prompts(count))
                await asyncio.sleep(1.0)
                chunk = star.supervisor.status(name)["prefill_ms"]
                p99, usual = percentile(beside, 99), percentile(normal, 99)
                print(
                    f"{name}: gap p50 {percentile(normal, 50):.1f} ms, p99 {usual:.1f} ms; beside a prompt p50 "
                    f"{percentile(beside, 50):.1f} ms, p99 {p99:.1f} ms ({len(beside)} gaps); a pass with a chunk "
                    f"p50 {chunk['p50']:.1f} ms, p99 {chunk['p99']:.1f} ms"
                )
                print(
                    verdict(
                        f"{name}: p99 / (chunk p99 + 1.5 × normal p99)",
                        p99 / (chunk["p99"] + 1.5 * usual),
                        1,
                        at_least=False,
                    )
                )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=300)
    parser.add_argument("--prompts", type=int, default=4)
    arguments = parser.parse_args()
    asyncio.run(main_async(arguments.tokens, arguments.prompts))


if __name__ == "__main__":
    main()
