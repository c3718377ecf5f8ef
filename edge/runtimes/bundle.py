"""A drafter bundle as graph runtimes open it: its manifest, checked, against what a topology asks of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from paceline.core import manifest as manifests
from paceline.core.errors import UserError
from paceline.core.manifest import Manifest, RuntimeName
from paceline.edge.runtimes.base import Runtime

GRAPH = "model.onnx"
ITEM_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}


def open_bundle(
    folder: Path,
    runtime: RuntimeName,
    *,
    max_context: int | None = None,
    max_sessions: int | None = None,
    device: str = "cpu",
) -> Manifest:
    """The manifest of a drafter bundle for `runtime`, every checksum compared.

    UserError, one sentence, for a bundle of another runtime, and for more sessions or longer ones than it was made for.
    """
    manifest = manifests.read(folder)
    asked = {"max_context": max_context, "max_sessions": max_sessions, "device": device}
    manifests.fit(manifest, folder, role="drafter", runtime=runtime, **asked)
    return manifests.load(folder, role="drafter")


def load_runtime(
    runtime: str, folder: Path, *, provider: str | None = None, threads: int | None = None, **options: Any
) -> Runtime:
    """The runtime of that name over a bundle. UserError, one sentence, for what does not fit or is not there.

    provider, threads: ONNX Runtime's. options: device, max_context, max_sessions, kv_memory, as either `load` has them.
    """
    if runtime == "tensorrt":
        from paceline.edge.runtimes import tensorrt

        return tensorrt.load(folder, **options)
    from paceline.edge.runtimes import onnxruntime

    return onnxruntime.load(folder, provider=provider, threads=threads, **options)


def row_bytes(manifest: Manifest) -> int:
    """Bytes of one session's keys and values, all layers, at its longest."""
    slot = manifest.kv_heads * manifest.head_dim * ITEM_BYTES[manifest.kv_dtype]
    return 2 * manifest.layers * manifest.max_context * slot


def rows_within(manifest: Manifest, max_sessions: int, kv_memory: int | None) -> int:
    """KV rows to make: one a session and, where a batch must be neighbours, a spare one to move them through.

    kv_memory: bytes; fewer rows are made where it is less than all would take. UserError when it holds no session.
    """
    spare = 1 if manifest.rows == "contiguous" else 0
    if kv_memory is None:
        return max_sessions + spare
    rows = min(kv_memory // row_bytes(manifest), max_sessions + spare)
    if rows < 1 + spare:
        least = (1 + spare) * row_bytes(manifest)
        raise UserError(
            f"kv_memory of {kv_memory} bytes holds no session: a row of {manifest.max_context} tokens takes "
            f"{row_bytes(manifest)} and {1 + spare} are needed; give {least}, or export with a smaller --max-context"
        )
    return rows
