"""What a person with the hardware wants to know of a bundle's engine: does it build, is it right, how fast is it."""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from paceline.core import manifest as manifests
from paceline.core.model import Segment, Span
from paceline.edge.runtimes.cuda import Cuda
from paceline.edge.runtimes.tensorrt import TensorRtRuntime, open_engine
from paceline.edge.runtimes.tensorrt_library import Library, device_index, import_library, jetpack
from paceline.export.engine import BuiltEngine, build_engine
from paceline.export.engine_check import Agreement, check_engine, graph_runtime
from paceline.export.engine_config import Progress

# (rows, tokens of each) of a step: one session to eight, one token to a draft's catch-up, then prompts.
TIMED = ((1, 1), (1, 2), (1, 4), (1, 16), (2, 1), (4, 1), (8, 1), (4, 4), (8, 4), (1, 64), (1, 256))
WARM_UP = 5
REPEATS = 50


@dataclass(frozen=True)
class StepTime:
    """Median milliseconds of a step over so many rows and tokens, half a context in; launched: as a CUDA graph."""

    rows: int
    tokens: int
    enqueued: float
    launched: float


@dataclass(frozen=True)
class Verified:
    """A bundle's engine: built, compared, timed. graphs: whether CUDA graphs could be recorded."""

    name: str
    built: BuiltEngine
    agreement: Agreement
    times: list[StepTime]
    graphs: bool


def environment(library: Library, device: str) -> dict[str, str]:
    """Card, versions, memory. UserError when the library or the card is missing."""
    trt = import_library(library)
    with closing(Cuda(device_index(device))) as cuda:
        free, total = cuda.free_memory()
        card = f"{cuda.name}, {cuda.architecture}, {free / 2**30:.1f} of {total / 2**30:.1f} GiB free"
    return {
        "card": card,
        library: trt.__version__,
        "Jetson Linux": jetpack() or "no",
        "machine": f"{platform.machine()}, {platform.release()}, Python {platform.python_version()}",
    }


def verify(folder: Path, library: Library, device: str, progress: Progress = lambda phase, share: None) -> Verified:
    """Builds the engine of a bundle, compares it with its graph, times it. Raises what these raise."""
    manifest = manifests.read(folder)
    reference = graph_runtime(folder, manifest)
    built = build_engine(folder, library=library, device=device, progress=progress)
    agreement = check_engine(folder, built, reference, device, lambda share: progress("Comparing", share))
    manifest = manifests.read(folder)  # with the engine
    engine, cuda = open_engine(folder, manifest, device)
    most = max(profile.rows for profile in engine.profiles)
    sizes = [(rows, tokens) for rows, tokens in TIMED if rows <= most and tokens <= manifest.max_context // 2]
    times = []
    with closing(cuda):
        plain, graphed = (
            TensorRtRuntime(manifest, engine, cuda, rows=most + 1, graphs=graphs) for graphs in (False, True)
        )
        for index, (rows, tokens) in enumerate(sizes):
            progress("Timing", index / len(sizes))
            times.append(StepTime(rows, tokens, *time_steps((plain, graphed), rows, tokens)))
    return Verified(f"{manifest.profile} {manifest.weight_dtype}", built, agreement, times, graphed.graphs)


def time_steps(
    runtimes: Sequence[TensorRtRuntime],
    rows: int,
    tokens: int,
    repeats: int = REPEATS,
    clock: Callable[[], float] = time.perf_counter,
) -> Iterator[float]:
    """Median milliseconds of a step on each runtime, in turns, so that a clock that rises or falls hurts all alike."""
    samples: list[list[float]] = [[] for _ in runtimes]
    start = (runtimes[0].max_context - tokens) // 2
    segments = [Segment(Span(row, 0, 0), start, [1 + row] * tokens, 1) for row in range(rows)]
    for turn in range(WARM_UP + repeats):
        for runtime, times in zip(runtimes, samples, strict=True):
            began = clock()
            runtime.forward(segments, 1)
            if turn >= WARM_UP:
                times.append(1000 * (clock() - began))
    return (statistics.median(times) for times in samples)
