"""A drafter's graph and its parity: the model is loaded once, in float32, and serves both."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from paceline.core.errors import UserError
from paceline.core.lm.arena import PAGE
from paceline.core.lm.loading import load
from paceline.core.lm.model import LanguageModel
from paceline.core.manifest import Profile, Quantization
from paceline.export import graph, parity
from paceline.export.checkpoint import weights, write_shards
from paceline.export.graph import GraphInfo
from paceline.export.parity import ROWS, Extent
from paceline.export.parity_subjects import GraphSubject, Shape, Subject, TorchSubject
from paceline.export.request import Resolved
from paceline.export.source import Source
from paceline.export.watch import Watch

MOST_TEXTS = 64
MOST_CHARACTERS = 2000  # of a text; its first tokens count


def build_drafter(order: Resolved, source: Source, folder: Path, watch: Watch) -> dict[str, Any]:
    """Writes the drafter's graph or weights into `folder` and checks them; returns its part of the manifest.

    Raises ParityFailed when it does not compute what the model computes.
    """
    texts = read_texts(order.request.texts, source)
    with watch.step("read the model"):
        model = _load(source.folder, order.max_context, "float32")
        reference = _subject(model, order, source)
    if order.profile is None:
        return _checkpoint(order, source, folder, reference, texts, watch)
    return _graph(order, order.profile, source, folder, model, reference, texts, watch)


def _checkpoint(
    order: Resolved,
    source: Source,
    folder: Path,
    reference: TorchSubject,
    texts: Sequence[Sequence[int]],
    watch: Watch,
) -> dict[str, Any]:
    write_checkpoint(order, source, folder, watch)
    source.write_config(folder, order.dtype)
    subject = _subject(_load(folder, order.max_context, order.dtype, fused=True), order, source)
    extent = Extent(source.config.num_hidden_layers, order.max_context, True, order.dtype)
    return {"parity": _parity(reference, subject, extent, texts, watch)}


def write_checkpoint(order: Resolved, source: Source, folder: Path, watch: Watch) -> None:
    """The weights as safetensors of the order's dtype."""
    found = weights(source.weight_files, order.dtype)
    with watch.step("convert the weights", sum(weight.size for weight in found)) as progress:
        write_shards(found, folder, progress=progress)


def _graph(
    order: Resolved,
    profile: Profile,
    source: Source,
    folder: Path,
    model: LanguageModel,
    reference: TorchSubject,
    texts: Sequence[Sequence[int]],
    watch: Watch,
) -> dict[str, Any]:
    quantize = order.request.quantize
    with tempfile.TemporaryDirectory(dir=folder) as beside:
        with watch.step("write the graph"):
            info = _write(model, Path(beside) if quantize else folder, order, profile, order.dtype, source)
        found = _compare(order, info, model, source, reference, texts, watch)
        if quantize:
            found = _quantized(quantize, info, folder / info.path.name, reference, texts, watch, found)
    source.write_config(folder, order.dtype)
    return {
        "opset": info.opset,
        "top_k": info.top_k,
        "rows": info.rows,
        "multi_token_batch": info.multi_token_batch,
        "parity": found,
    }


def _compare(
    order: Resolved,
    info: GraphInfo,
    model: LanguageModel,
    source: Source,
    reference: TorchSubject,
    texts: Sequence[Sequence[int]],
    watch: Watch,
) -> dict[str, Any]:
    if info.dtype != "bfloat16":
        return _parity(reference, _runner(info, info.path), _extent(info, info.dtype), texts, watch)
    # onnxruntime's CPU does not compute with it: the same nodes are compared in float32.
    with tempfile.TemporaryDirectory(dir=info.path.parent) as beside:
        twin = _write(model, Path(beside), order, info.profile, "float32", source)
        found = _parity(reference, _runner(twin, twin.path), _extent(twin, twin.dtype), texts, watch)
    return {**found, "subject": f"{found['subject']}, the same graph in float32"}


def _quantized(
    kind: Quantization,
    info: GraphInfo,
    path: Path,
    reference: TorchSubject,
    texts: Sequence[Sequence[int]],
    watch: Watch,
    before: dict[str, Any],
) -> dict[str, Any]:
    """Quantises a graph that agreed; what it loses is measured by itself."""
    from paceline.export.quantize import quantize

    with watch.step(f"quantise to {kind}"):
        quantize(info.path, path, kind)
    found = _parity(reference, _runner(info, path), _extent(info, kind), texts, watch, f"compare {kind} with torch")
    kept = ("max_difference", "logit_difference", "kv_difference", "top1_agreement", "agreement")
    return {**found, "before_quantization": {name: before[name] for name in kept}}


def _extent(info: GraphInfo, precision: str) -> Extent:
    return Extent(info.layers, info.max_context, info.multi_token_batch, precision)


def _write(
    model: LanguageModel, folder: Path, order: Resolved, profile: Profile, dtype: str, source: Source
) -> GraphInfo:
    return graph.write(model.module, folder, profile, dtype, order.max_context, source.vocabulary.size)


def _runner(info: GraphInfo, path: Path) -> GraphSubject:
    shape = Shape(info.layers, info.kv_heads, info.max_context, info.head_dim, np.dtype(info.dtype))
    return GraphSubject(path, info.profile, shape, rows=ROWS)


def _parity(
    reference: TorchSubject,
    subject: Subject,
    extent: Extent,
    texts: Sequence[Sequence[int]],
    watch: Watch,
    step: str = "compare with torch",
) -> dict[str, Any]:
    with watch.step(step, parity.count(extent, texts)) as progress:
        return asdict(parity.check(reference, subject, extent, texts, progress))


def _load(folder: Path, max_context: int, dtype: str, fused: bool = False) -> LanguageModel:
    slots = ROWS * -(-max_context // PAGE) * PAGE
    return load(folder, dtype=dtype, kv_slots=slots, max_context=max_context, fused=fused)


def _subject(model: LanguageModel, order: Resolved, source: Source) -> TorchSubject:
    size = min(model.vocabulary_size, source.vocabulary.size)
    return TorchSubject(model, rows=ROWS, max_context=order.max_context, vocabulary_size=size)


def read_texts(path: Path | None, source: Source) -> list[list[int]]:
    """Token ids of the texts to compare on: lines of JSON with `text` or `prompt`, or a few that come along."""
    if path is None:
        found: list[str] = json.loads((files("paceline.export") / "texts.json").read_text(encoding="utf-8"))
    else:
        found = _lines(path)
    texts = [source.vocabulary.encode(text[:MOST_CHARACTERS]) for text in found[:MOST_TEXTS]]
    limit = source.config.vocab_size
    texts = [ids for ids in texts if ids and max(ids) < limit]
    if not texts:
        raise UserError(f"{path or 'the tokenizer'}: no text becomes tokens that this model knows")
    return texts


def _lines(path: Path) -> list[str]:
    try:
        records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        return [str(record.get("text") or record["prompt"]) for record in records]
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--texts {path}: {error}") from None
    except (ValueError, KeyError, AttributeError, TypeError):
        raise UserError(f'--texts {path}: each line must be JSON with a "text" or a "prompt"') from None
