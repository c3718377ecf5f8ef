"""A drafter's bundle names its runtime; what a topology writes about runtimes and providers must fit together."""

from __future__ import annotations

from pathlib import Path

from paceline.core import manifest as manifests
from paceline.core.manifest import Manifest, ModelEntry, RuntimeName

from .spec_helpers import problems, read, with_drafter


def bundle(folder: Path, runtime: RuntimeName) -> Path:
    folder.mkdir()
    manifest = Manifest(
        role="drafter",
        runtime=runtime,
        model=ModelEntry(name="m", family="llama", fingerprint=""),
        tokenizer_fingerprint="",
        vocabulary_size=2,
        layers=1,
        kv_heads=1,
        head_dim=1,
        max_context=8,
        max_sessions=1,
        weight_dtype="float32",
        kv_dtype="float32",
        files={},
    )
    manifests.write(manifest, folder)
    return folder


def runtime_of(text: str, base: Path) -> str:
    return read(text, base).drafter("d").runtime


def test_a_bundle_without_a_runtime_gets_its_manifests(tmp_path: Path) -> None:
    bundle(tmp_path / "graph", "onnxruntime")
    bundle(tmp_path / "engine", "tensorrt")
    text = with_drafter("").replace("org/small", "./graph")
    assert runtime_of(text, tmp_path) == "onnxruntime"
    assert runtime_of(text.replace("./graph", "./engine"), tmp_path) == "tensorrt"
    assert runtime_of(text.replace("./graph", "./nothing"), tmp_path) == "torch"


def test_a_graphs_limits_are_its_drafters_unless_written(tmp_path: Path) -> None:
    bundle(tmp_path / "graph", "onnxruntime")
    bundle(tmp_path / "weights", "torch")
    graph = read(with_drafter("").replace("org/small", "./graph"), tmp_path).drafter("d")
    assert (graph.max_context, graph.max_sessions) == (8, 1)
    written = with_drafter("max_context: 4\nmax_sessions: 3").replace("org/small", "./graph")
    graph = read(written, tmp_path).drafter("d")
    assert (graph.max_context, graph.max_sessions) == (4, 3)
    weights = read(with_drafter("").replace("org/small", "./weights"), tmp_path).drafter("d")
    assert (weights.runtime, weights.max_context, weights.max_sessions) == ("torch", 8, 16)


def test_a_written_runtime_stays(tmp_path: Path) -> None:
    """Where it does not fit the bundle, the drafter says so when it loads."""
    bundle(tmp_path / "graph", "onnxruntime")
    assert runtime_of(with_drafter("runtime: torch").replace("org/small", "./graph"), tmp_path) == "torch"


def test_a_broken_manifest_is_the_drafters_business(tmp_path: Path) -> None:
    """Targets read the same file, and go on without that drafter."""
    (tmp_path / "graph").mkdir()
    (tmp_path / "graph" / "manifest.json").write_text("{")
    assert runtime_of(with_drafter("").replace("org/small", "./graph"), tmp_path) == "torch"


def test_a_provider_needs_onnxruntime_and_a_gpu() -> None:
    gpu = with_drafter("runtime: onnxruntime\nprovider: tensorrt\ndevice: cuda:0")
    assert read(gpu).drafter("d").provider == "tensorrt"
    assert problems(gpu.replace("runtime: onnxruntime", "runtime: torch")) == [
        "star.yaml:7:5: drafters[0].provider: is only for runtime: onnxruntime, not torch"
    ]
    assert problems(gpu.replace("cuda:0", "cpu")) == [
        "star.yaml:7:5: drafters[0].provider: runs on a GPU: write device: cuda:0, or remove it"
    ]
