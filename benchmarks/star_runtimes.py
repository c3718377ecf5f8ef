"""The star served by ONNX Runtime: the same texts as without a drafter, and torch's acceptance. Real processes.

Exports the embedded drafter in float32, 8 and 4 bits and runs examples/star.yaml (one drafter, three targets) with
torch and with each bundle in the drafter's place, at temperature 0 and 0.8. Prints differing texts, acceptance
lengths and their ratios to torch's, and the median time that the drafter took for a Draft.

    python benchmarks/star_runtimes.py [--prompts 24] [--tokens 128] [--kinds int8]
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml
from common import DRAFTER, ROOT, TARGET, prompts, verdict
from star_identity import scenario

from paceline.core.manifest import Quantization
from paceline.export.bundle import export
from paceline.export.options import Request
from paceline.export.watch import Watch
from paceline.topology.spec import load_topology

KINDS: dict[str, Quantization | None] = {"float32": None, "int8": "int8", "int4": "int4"}
WITHIN = 0.02  # of torch's acceptance length


def write_star(path: Path, model: Path) -> Path:
    """examples/star.yaml with another model in the drafter's place; a bundle brings its runtime."""
    star = yaml.safe_load((ROOT / "examples" / "star.yaml").read_text(encoding="utf-8"))
    (drafter,) = star["drafters"]
    drafter["model"] = str(model)
    del drafter["runtime"]
    for target in star["targets"]:
        target["model"] = str(TARGET)
    path.write_text(yaml.safe_dump(star, sort_keys=False), encoding="utf-8")
    return path


async def measure(path: Path, texts: list[str], options: dict[str, Any], name: str) -> dict[str, Any]:
    return await scenario(name, load_topology(path), path, texts, options)  # type: ignore[no-any-return]


def acceptance_length(report: dict[str, Any]) -> float:
    """Tokens a round, of the rounds that had a draft."""
    drafted = [(t["rounds"] - t["fallback_rounds"], t["acceptance_length"]) for t in report["targets"]]
    return sum(count * length for count, length in drafted) / max(1, sum(count for count, _ in drafted))


async def compare(stars: dict[str, Path], texts: list[str], tokens: int) -> bool:
    good = True
    for temperature in (0.0, 0.8):
        options = {"max_tokens": tokens, "temperature": temperature, "seed": 7}
        plain = await measure(stars["torch"], texts, options, "plain")
        torch_length = 0.0
        for name, path in stars.items():
            report = await measure(path, texts, options, "drafter")
            pairs = zip(plain["outputs"], report["outputs"], strict=True)
            differing = sum(a["token_ids"] != b["token_ids"] or a["text"] != b["text"] for a, b in pairs)
            length = acceptance_length(report)
            torch_length = torch_length or length
            (drafter,) = report["drafters"]
            print(
                f"temperature {temperature}, {name:12} differing texts {differing}/{len(texts)}, acceptance length "
                f"{length:.3f} ({length / torch_length:.3f} × torch's), {drafter['draft_ms']['p50']:.2f} ms a Draft",
                flush=True,
            )
            good &= differing == 0
            if name == "float32" or (name != "torch" and temperature > 0):  # greedily these texts soon loop
                print(verdict(f"{name}: acceptance, × torch's", length / torch_length, 1 - WITHIN))
                good &= length >= (1 - WITHIN) * torch_length
    return good


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), help="of weights (default: all)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        stars = {"torch": write_star(Path(folder) / "torch.yaml", DRAFTER)}
        for name in arguments.kinds:
            out = Path(folder) / name
            export(Request(str(DRAFTER), out, quantize=KINDS[name], max_context=1024), Watch())
            stars[name] = write_star(Path(folder) / f"{name}.yaml", out)
        good = asyncio.run(compare(stars, prompts(arguments.prompts), arguments.tokens))
    print("every text the same, acceptance as torch's" if good else "MISS: see above")
    sys.exit(not good)


if __name__ == "__main__":
    main()
