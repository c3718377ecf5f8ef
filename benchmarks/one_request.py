"""One request and eight in flight: Paceline plain and star over TCP against transformers, in one run.

Each side takes the better of 1 and 2 threads; assisted generation the better of its default schedule (which
drafts more and more while all is accepted) and a constant k = 4, the star the best of k = 2, 4 and 12. All
sides use the same held-out prompts, in turn, several times; medians are printed. Greedy texts of the embedded
target fall into loops, which flatters long drafts; `--temperature 0.8` gives texts that do not repeat.
The floor is a forward of one token without any cache: no eager loop over the modules as they are can be faster.

    python benchmarks/one_request.py [--repeats 3] [--tokens 128] [--temperature 0]
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import httpx
import torch
from common import DRAFTER, TARGET, median, prompts, verdict, write_topology
from transformers import AutoModelForCausalLM, AutoTokenizer

from paceline.star import Star, running_star
from paceline.topology.spec import load_topology

K = 4  # of assisted generation with a constant number of draft tokens
STARS = {"star k=2": 2, "star k=4": 4, "star k=12": 12}
THREADS = (1, 2)
IN_FLIGHT, REQUESTS = 8, 40


class Transformers:
    """transformers' own generation with the same two models."""

    def __init__(self, temperature: float) -> None:
        self.sampling: dict[str, Any] = {"do_sample": False}
        if temperature:
            self.sampling = {"do_sample": True, "temperature": temperature, "top_k": 0}
        self.tokenizer = AutoTokenizer.from_pretrained(TARGET)
        self.target = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32).eval()
        self.drafter = AutoModelForCausalLM.from_pretrained(DRAFTER, dtype=torch.float32).eval()
        self.default_schedule = self.drafter.generation_config.num_assistant_tokens_schedule
        self.default_tokens = self.drafter.generation_config.num_assistant_tokens

    def generate(self, prompt: str, tokens: int, threads: int, assisted: str | None = None) -> tuple[list[int], float]:
        """(new token ids, seconds)."""
        torch.set_num_threads(threads)
        ids = self.tokenizer(prompt, return_tensors="pt")
        options: dict[str, Any] = {"max_new_tokens": tokens, "min_new_tokens": tokens, **self.sampling}
        if assisted:
            config = self.drafter.generation_config
            constant = assisted == "constant"
            config.num_assistant_tokens_schedule = "constant" if constant else self.default_schedule
            config.num_assistant_tokens = K if constant else self.default_tokens
            if constant:
                config.assistant_confidence_threshold = 0.0
            else:
                config.assistant_confidence_threshold = 0.4
            options["assistant_model"] = self.drafter
        started = time.perf_counter()
        with torch.inference_mode():
            out = self.target.generate(**ids, **options)
        return out[0, ids["input_ids"].shape[1] :].tolist(), time.perf_counter() - started

    def floor(self, threads: int, calls: int = 30) -> float:
        """Seconds of a one-token forward without a cache."""
        torch.set_num_threads(threads)
        ids = torch.tensor([[5]])
        times = []
        with torch.inference_mode():
            for _ in range(calls):
                started = time.perf_counter()
                self.target(input_ids=ids, use_cache=False)
                times.append(time.perf_counter() - started)
        return median(times)


def node(kind: str, threads: int) -> str:
    """The name of the target of that kind."""
    return f"{kind.replace(' k=', '-')}-{threads}"


async def completion(
    star: Star, name: str, texts: list[str], tokens: int, temperature: float = 0.0
) -> tuple[list[list[int]], float]:
    """(token ids of each text, seconds until the last). Not streamed, as transformers' generate is not."""
    url = f"http://{star.topology.target(name).api.listen}/v1/completions"
    options = {
        "max_tokens": tokens,
        "temperature": temperature,
        "seed": 5,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    async with httpx.AsyncClient(timeout=None, trust_env=False, limits=httpx.Limits(max_connections=None)) as client:
        started = time.perf_counter()
        done = await asyncio.gather(*(client.post(url, json={"prompt": text, **options}) for text in texts))
        seconds = time.perf_counter() - started
    return [response.json()["choices"][0]["token_ids"] for response in done], seconds


async def measure(repeats: int, tokens: int, temperature: float) -> dict[str, list[float]]:
    """Milliseconds a token, by side; sides take turns within every repeat."""
    times: dict[str, list[float]] = defaultdict(list)
    texts = prompts(REQUESTS)
    reference = Transformers(temperature)
    limits = {"max_context": 1024, "max_sessions": IN_FLIGHT}  # more requests wait, so that eight are always running
    with tempfile.TemporaryDirectory() as folder:
        room = {"max_context": 1024, "max_sessions": 4 * IN_FLIGHT}
        drafters = [{"name": f"drafter-{n}", "threads": n, **room} for n in THREADS]
        targets = [{"name": f"plain-{n}", "threads": n, **limits} for n in THREADS]
        targets += [
            {"name": node(kind, n), "threads": n, "draft_length": k, "drafters": {"names": [f"drafter-{n}"]}, **limits}
            for n in THREADS
            for kind, k in STARS.items()
        ]
        path = write_topology(Path(folder) / "one-request.yaml", drafters, targets, 7500)
        async with running_star(load_topology(path), path, Path(folder)) as star:
            for name in star.targets:
                await completion(star, name, texts[:2], 64)  # warm-up
            for repeat in range(repeats):
                text = texts[repeat % len(texts)]
                outputs = {}
                for n in THREADS:
                    outputs["generate"], seconds = reference.generate(text, tokens, n)
                    times[f"generate {n}"].append(seconds / tokens * 1e3)
                    for kind in ("default", "constant"):
                        outputs[f"assisted {kind}"], seconds = reference.generate(text, tokens, n, kind)
                        times[f"assisted {kind} {n}"].append(seconds / tokens * 1e3)
                    times[f"floor {n}"].append(reference.floor(n) * 1e3)
                    for kind in ("plain", *STARS):
                        (outputs[kind],), seconds = await completion(star, node(kind, n), [text], tokens, temperature)
                        times[f"{kind} {n}"].append(seconds / tokens * 1e3)
                        ids, seconds = await completion(star, node(kind, n), texts, tokens, temperature)
                        times[f"{kind}, 8 in flight {n}"].append(seconds / (tokens * REQUESTS) * 1e3)
                        assert outputs[kind] in ids
                if temperature:  # transformers draws its own numbers
                    outputs = {name: ids for name, ids in outputs.items() if name in ("plain", *STARS)}
                differing = [name for name, ids in outputs.items() if ids != outputs["plain"]]
                print(f"repeat {repeat + 1}/{repeats}: same text on every side: {differing or 'yes'}", flush=True)
        for name in star.targets:
            times[f"acceptance {name}"].append(star.supervisor.status(name).get("acceptance_length", 0.0))
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    arguments = parser.parse_args()
    times = asyncio.run(measure(arguments.repeats, arguments.tokens, arguments.temperature))
    print(f"\n{'side':24} {'1 thread':>10} {'2 threads':>10}   ms a token, median of {arguments.repeats}")
    best: dict[str, float] = {}
    ours = [f"{kind}{many}" for many in ("", ", 8 in flight") for kind in ("plain", *STARS)]
    for side in ("floor", "generate", "assisted default", "assisted constant", *ours):
        one, two = (median(times[f"{side} {n}"]) for n in THREADS)
        best[side] = min(one, two)
        print(f"{side:24} {one:10.2f} {two:10.2f}")
    best["star"] = min(best[kind] for kind in STARS)
    best["star, 8 in flight"] = min(best[f"{kind}, 8 in flight"] for kind in STARS)
    best["assisted"] = min(best["assisted default"], best["assisted constant"])
    for kind in STARS:
        print(f"acceptance length, {kind}: {times[f'acceptance {node(kind, 1)}'][0]:.2f}")
    print()
    print(verdict("plain against generate", best["generate"] / best["plain"], 1.15))
    print(verdict("star against assisted", best["assisted"] / best["star"], 1.2))
    print(verdict("star against plain, one request", best["plain"] / best["star"], 1.0))
    print(
        verdict("8 in flight, plain: throughput against one request's", best["plain"] / best["plain, 8 in flight"], 3.0)
    )
    print(verdict("8 in flight, star against plain", best["plain, 8 in flight"] / best["star, 8 in flight"], 1.1))


if __name__ == "__main__":
    main()
