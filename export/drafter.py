"""A drafter's graph or weights, and their parity: the model is loaded once, in float32, and serves both."""

from __future__ import annotations

import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from paceline.core.lm.arena import PAGE
from paceline.core.lm.loading import load
from paceline.core.lm.model import LanguageModel
from paceline.core.manifest import Profile
from paceline.export import graph, parity
from paceline.export.checkpoint import weights, write_shards
from paceline.export.graph import GraphInfo
from paceline.export.parity_cases import ROWS
from paceline.export.parity_figures import Extent
from paceline.export.parity_subjects import GraphSubject, Shape, Subject, TorchSubject
from paceline.export.request import Resolved
from paceline.export.source import Source
from paceline.export.texts import read_texts
from paceline.export.watch import Watch

KEPT = ("max_difference", "logit_difference", "kv_difference", "top1_agreement", "agreement")


class DrafterBuild:
    """What one drafter's export works with."""

    def __init__(self, order: Resolved, source: Source, folder: Path, watch: Watch) -> None:
        self._order, self._source, self._folder, self._watch = order, source, folder, watch
        self._texts = read_texts(order.request.texts, source)
        with watch.step("read the model"):
            self._model = self._load(source.folder, "float32")
            self._reference = self._torch_subject(self._model)

    def run(self) -> dict[str, Any]:
        """Writes the graph or the weights into the folder and checks them; returns their part of the manifest.

        Raises ParityFailed when they do not compute what the model computes.
        """
        profile = self._order.profile
        return self._weights() if profile is None else self._graph(profile)

    def _weights(self) -> dict[str, Any]:
        dtype = self._order.dtype
        write_checkpoint(self._order, self._source, self._folder, self._watch)
        subject = self._torch_subject(self._load(self._folder, dtype, fused=True))
        extent = Extent(self._source.config.num_hidden_layers, self._order.max_context, True, dtype)
        return {"parity": self._compare(subject, extent)}

    def _graph(self, profile: Profile) -> dict[str, Any]:
        self._source.write_config(self._folder, self._order.dtype)
        with tempfile.TemporaryDirectory(dir=self._folder) as beside:
            plain = Path(beside) if self._order.request.quantize else self._folder
            with self._watch.step("write the graph"):
                info = self._write(plain, profile, self._order.dtype)
            found = self._compare_twin(info) if info.dtype == "bfloat16" else self._compare_graph(info, info.path)
            if self._order.request.quantize:
                found = self._quantized(info, found)
        return {
            "opset": info.opset,
            "top_k": info.top_k,
            "rows": info.rows,
            "multi_token_batch": info.multi_token_batch,
            "parity": found,
        }

    def _quantized(self, info: GraphInfo, before: dict[str, Any]) -> dict[str, Any]:
        """Quantises a graph that agreed; what it loses is measured by itself."""
        from paceline.export.quantize import quantize

        kind, path = self._order.request.quantize, self._folder / info.path.name
        assert kind is not None
        with self._watch.step(f"quantise to {kind}"):
            quantize(info.path, path, kind)
        found = self._compare_graph(info, path, kind)
        return {**found, "before_quantization": {name: before[name] for name in KEPT}}

    def _compare_twin(self, info: GraphInfo) -> dict[str, Any]:
        """onnxruntime's CPU does not compute with bfloat16: the same nodes are compared in float32."""
        with tempfile.TemporaryDirectory(dir=self._folder) as beside:
            twin = self._write(Path(beside), info.profile, "float32")
            found = self._compare_graph(twin, twin.path)
        return {**found, "subject": f"{found['subject']}, the same graph in float32"}

    def _compare_graph(self, info: GraphInfo, path: Path, quantized: str = "") -> dict[str, Any]:
        shape = Shape(info.layers, info.kv_heads, info.max_context, info.head_dim, np.dtype(info.dtype))
        subject = GraphSubject(path, info.profile, shape, rows=ROWS)
        extent = Extent(info.layers, info.max_context, info.multi_token_batch, quantized or info.dtype)
        return self._compare(subject, extent, f"compare {quantized or 'it'} with torch")

    def _compare(self, subject: Subject, extent: Extent, step: str = "compare it with torch") -> dict[str, Any]:
        with self._watch.step(step, parity.count(extent, self._texts)) as progress:
            return asdict(parity.check(self._reference, subject, extent, self._texts, progress))

    def _write(self, folder: Path, profile: Profile, dtype: str) -> GraphInfo:
        module, context, size = self._model.module, self._order.max_context, self._source.vocabulary.size
        return graph.write(module, folder, profile, dtype, context, size)

    def _load(self, folder: Path, dtype: str, fused: bool = False) -> LanguageModel:
        context = self._order.max_context
        slots = ROWS * -(-context // PAGE) * PAGE
        return load(folder, dtype=dtype, kv_slots=slots, max_context=context, fused=fused)

    def _torch_subject(self, model: LanguageModel) -> TorchSubject:
        size = min(model.vocabulary_size, self._source.vocabulary.size)
        return TorchSubject(model, rows=ROWS, max_context=self._order.max_context, vocabulary_size=size)


def write_checkpoint(order: Resolved, source: Source, folder: Path, watch: Watch) -> None:
    """The weights as safetensors of the order's dtype, and the configuration."""
    found = weights(source.weight_files, order.dtype)
    with watch.step("convert the weights", sum(weight.size for weight in found)) as progress:
        write_shards(found, folder, progress=progress)
    source.write_config(folder, order.dtype)
