"""The whole road from a model to a bundle: weights or graph → parity → tokenizer → checksums → manifest → place."""

from __future__ import annotations

import importlib.metadata
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.core import manifest as manifests
from paceline.core.lm.loading import kv_shape
from paceline.core.manifest import Manifest
from paceline.export.checkpoint import weights
from paceline.export.drafter import DrafterBuild, write_checkpoint
from paceline.export.options import Request
from paceline.export.request import Resolved, resolve
from paceline.export.source import Source
from paceline.export.staging import check_place, check_space, engines_in, staged
from paceline.export.watch import Watch

TOOLS = ("paceline", "torch", "transformers", "safetensors", "onnx", "onnxruntime")


@dataclass(frozen=True)
class Report:
    """What an export did. seconds: step → how long it took; sizes: file → bytes."""

    out: Path
    manifest: Manifest
    seconds: dict[str, float]
    sizes: dict[str, int]
    engines_gone: tuple[str, ...] = ()  # of the bundle that it replaced


def export(request: Request, watch: Watch) -> Report:
    """Makes the bundle and returns what was done; `request.out` is there whole, or as it was before.

    Raises UserError for what the user can mend, ParityFailed for a bundle that does not compute what its model does.
    """
    check_place(request.out, request.force)
    source = Source.open(request.model)
    order = resolve(request, source)
    size = sum(weight.size for weight in weights(source.weight_files, order.dtype))
    check_space(request.out, 2 * size if request.quantize else size)
    engines = tuple(engines_in(request.out))
    with staged(request.out) as folder:
        if request.role == "target":
            write_checkpoint(order, source, folder, watch)
            parts: dict[str, Any] = {}
        else:
            parts = DrafterBuild(order, source, folder, watch).run()
        source.copy_tokenizer(folder)
        licences = source.copy_licences(folder)
        manifest = _sealed(order, source, folder, {**parts, "licences": licences}, watch)
        sizes = {name: (folder / name).stat().st_size for name in manifest.files}
    return Report(request.out, manifest, watch.seconds, sizes, engines)


def _sealed(order: Resolved, source: Source, folder: Path, parts: dict[str, Any], watch: Watch) -> Manifest:
    """Reads back every file that was written, and writes the manifest."""
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    total = sum((folder / name).stat().st_size for name in names)
    layers, kv_heads, head_dim = kv_shape(source.config)
    read = sum(path.stat().st_size for path in source.weight_files)
    with watch.step("checksums", total + read) as progress:
        manifest = Manifest(
            role=order.request.role,
            runtime=order.runtime,
            profile=order.profile,
            model=source.entry(progress),
            tokenizer_fingerprint=source.vocabulary.fingerprint,
            vocabulary_size=min(source.vocabulary.size, source.config.vocab_size),
            layers=layers,
            kv_heads=kv_heads,
            head_dim=head_dim,
            max_context=order.max_context,
            max_sessions=order.request.max_sessions,
            weight_dtype=order.dtype,
            kv_dtype=order.dtype,
            quantization=order.request.quantize,
            tools=_tools(),
            files=manifests.checksums(folder, names, progress),
            **parts,
        )
    manifests.write(manifest, folder)
    return manifest


def _tools() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in TOOLS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
