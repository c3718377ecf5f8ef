"""ONNX → TensorRT engine, on the machine that will run it: room → parse → configure → build → file → manifest.

Needs neither torch nor the onnx package, so that a Jetson can do it; for `tensorrt_rtx` it needs no GPU either.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.core import manifest as manifests
from paceline.core.errors import UserError
from paceline.core.manifest import Manifest
from paceline.edge.runtimes.bundle import GRAPH
from paceline.edge.runtimes.tensorrt_library import (
    EngineKey,
    Library,
    device_index,
    graph_checksum,
    import_library,
    key_here,
    logger_of,
)
from paceline.edge.runtimes.tensorrt_steps import Profile
from paceline.export.engine_config import EngineShapes, Progress, configure, keep_timings, monitor_of
from paceline.export.engine_network import layer_counts, parse
from paceline.export.engine_room import check_room
from paceline.topology.spec_values import cache_folder

PROFILES = ("static-native", "static-compat")
DEFAULT_SHAPES = EngineShapes()


@dataclass(frozen=True)
class BuiltEngine:
    """An engine in its bundle. layers: type → count in the network. size: bytes."""

    path: Path
    key: EngineKey
    size: int
    seconds: float
    layers: dict[str, int]


def build_engine(
    folder: Path,
    *,
    library: Library = "tensorrt",
    device: str = "cuda:0",
    shapes: EngineShapes = DEFAULT_SHAPES,
    check_memory: bool = True,
    progress: Progress = lambda phase, share: None,
) -> BuiltEngine:
    """Builds the engine of a drafter bundle for this machine, and enters it in the manifest.

    device: the GPU that it is for. UserError for what the user can mend, in one sentence.
    """
    manifest = manifests.load(folder, role="drafter")
    look_at_graph(folder, manifest)
    trt = import_library(library)
    key = key_here(library, trt.__version__, _architecture(library, device), graph_checksum(manifest))
    weights = sum((folder / name).stat().st_size for name in manifest.files if name.endswith((".onnx", ".data")))
    if check_memory:
        check_room(folder, weights, library)
    began = time.monotonic()
    plan, layers = build_plan(
        trt,
        folder / GRAPH,
        shapes.profiles(manifest),
        timing_cache=_timing_cache(key),
        progress=progress,
    )
    path = folder / key.file_name
    _write(path, plan)
    _enter(folder, manifest, key)
    return BuiltEngine(path, key, path.stat().st_size, time.monotonic() - began, layers)


def look_at_graph(folder: Path, manifest: Manifest) -> None:
    """UserError for a bundle that no engine can be built of, wherever that is tried."""
    if manifest.profile in PROFILES:
        return
    kind = f"a graph of profile {manifest.profile}" if manifest.profile else "no graph"
    raise UserError(
        f"{folder} has {kind}, and TensorRT needs one with fixed KV rows: export the model with --runtime tensorrt,"
        f" which makes the profiles {' and '.join(PROFILES)}"
    )


def build_plan(
    trt: Any,
    graph: Path,
    profiles: Sequence[Profile],
    *,
    timing_cache: Path | None = None,
    progress: Progress = lambda phase, share: None,
) -> tuple[Any, dict[str, int]]:
    """(serialized engine, layers of the network) of an ONNX file. profiles: the most that each has to take."""
    logger = logger_of(trt)
    logger.errors.clear()
    try:
        builder = trt.Builder(logger)
    except TypeError:  # how the bindings tell that there is none
        raise UserError(f"TensorRT cannot build here: {_words(logger)}; see `paceline doctor`") from None
    network = parse(trt, builder, graph)
    layers = layer_counts(network)
    config = configure(trt, builder, network, profiles, timing_cache)
    monitor = config.progress_monitor = monitor_of(trt, progress)
    logger.errors.clear()
    plan = builder.build_serialized_network(network, config)
    if monitor.error is not None:
        raise monitor.error
    if plan is None:
        advice = "; --profile static-compat builds everywhere" if "KV_CACHE_UPDATE" in layers else ""
        raise UserError(f"TensorRT {trt.__version__} could not build {graph}: {_words(logger)}{advice}")
    if timing_cache is not None:
        keep_timings(config, timing_cache)
    return plan, layers


def _write(path: Path, plan: Any) -> None:
    """Whole or not at all: an engine that is half there would load nowhere."""
    temporary = path.with_name(f".{path.name}.new")
    with temporary.open("wb") as file:
        file.write(plan)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def _enter(folder: Path, manifest: Manifest, key: EngineKey) -> None:
    """The engine beside those of other machines, in place of an older one of this."""
    name = key.file_name
    files = {**manifest.files, name: manifests.checksum(folder / name)}
    engines = {**manifest.engines, name: dict(key._asdict())}
    manifests.write(manifest.model_copy(update={"files": files, "engines": engines}), folder)


def _timing_cache(key: EngineKey) -> Path | None:
    """Where kernels' timings are kept from one build to the next. tensorrt_rtx times none."""
    if key.library == "tensorrt_rtx":
        return None
    return cache_folder() / key.file_name.replace(".plan", ".timing")


def _architecture(library: Library, device: str) -> str:
    if library == "tensorrt_rtx":
        return ""
    from paceline.edge.runtimes.cuda import Cuda

    return Cuda(device_index(device)).architecture


def _words(logger: Any) -> str:
    return "; ".join(logger.errors) or "it gave no reason"
