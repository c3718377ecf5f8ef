"""Which engine of a bundle runs here, and what is said when none does."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from paceline.core import manifest as manifests
from paceline.core.errors import UserError
from paceline.core.manifest import Manifest, ModelEntry
from paceline.edge.runtimes import tensorrt, tensorrt_library
from paceline.edge.runtimes.tensorrt_library import (
    EngineKey,
    device_index,
    find_engine,
    graph_checksum,
    import_library,
    jetpack,
    key_here,
    library_of,
)

FOLDER = Path("bundles/small")
GRAPH = {"model.onnx": "1" * 64, "model.onnx.data": "2" * 64}


def manifest_of(*keys: EngineKey, graph: dict[str, str] = GRAPH) -> Manifest:
    return Manifest(
        role="drafter",
        runtime="tensorrt",
        profile="static-compat",
        model=ModelEntry(name="small", family="llama", fingerprint="00"),
        tokenizer_fingerprint="00",
        vocabulary_size=8,
        layers=1,
        kv_heads=1,
        head_dim=64,
        max_context=64,
        max_sessions=2,
        weight_dtype="float16",
        kv_dtype="float16",
        rows="contiguous",
        files={**graph, **{key.file_name: "3" * 64 for key in keys}},
        engines={key.file_name: dict(key._asdict()) for key in keys},
    )


ORIN = EngineKey("tensorrt", "10.3.0", "sm_87", "l4t-36.4.3", graph_checksum(manifest_of()))
THOR = ORIN._replace(version="10.16.1", gpu="sm_110", system="l4t-39.2")


def test_the_engine_of_this_machine_is_found() -> None:
    assert find_engine(FOLDER, manifest_of(THOR, ORIN), ORIN) == FOLDER / "tensorrt-10.3.0-sm_87-l4t-36.4.3.plan"
    assert find_engine(FOLDER, manifest_of(THOR, ORIN), THOR) == FOLDER / "tensorrt-10.16.1-sm_110-l4t-39.2.plan"


def test_without_one_the_command_that_builds_it_is_told() -> None:
    build = "; build one here: paceline engine bundles/small"
    with pytest.raises(UserError, match=f"bundles/small has no TensorRT engine yet{build}$"):
        find_engine(FOLDER, manifest_of(), ORIN)
    foreign = (
        r"has no engine for tensorrt 10\.3\.0, sm_87, l4t-36\.4\.3, only for tensorrt 10\.16\.1, sm_110, l4t-39\.2,"
        f" and engines run nowhere else{build}$"
    )
    with pytest.raises(UserError, match=foreign):
        find_engine(FOLDER, manifest_of(THOR), ORIN)
    newer = manifest_of(ORIN, graph={**GRAPH, "model.onnx": "4" * 64})
    with pytest.raises(UserError, match=f"has an engine of another graph than its model.onnx{build}$"):
        find_engine(FOLDER, newer, ORIN._replace(graph=graph_checksum(newer)))
    with pytest.raises(UserError, match=r"paceline engine bundles/small --library tensorrt_rtx$"):
        find_engine(FOLDER, manifest_of(), key_here("tensorrt_rtx", "1.7.1", "sm_89", "00"))


def test_the_key_names_what_an_engine_depends_on(tmp_path: Path) -> None:
    release = tmp_path / "nv_tegra_release"
    assert key_here("tensorrt", "10.9.0", "sm_89", "aa", release) == ("tensorrt", "10.9.0", "sm_89", "", "aa")
    release.write_text("# R36 (release), REVISION: 4.3, GCID: 38968081, BOARD: generic, EABI: aarch64\n")
    assert key_here("tensorrt", "10.3.0", "sm_87", "aa", release).file_name == "tensorrt-10.3.0-sm_87-l4t-36.4.3.plan"
    assert key_here("tensorrt_rtx", "1.7.1", "sm_89", "aa", release) == ("tensorrt_rtx", "1.7.1", "any", "", "aa")
    release.write_text("something else")
    assert jetpack(release) == ""


def test_the_graphs_checksum_covers_its_data_and_not_the_rest() -> None:
    base = graph_checksum(manifest_of())
    assert base == graph_checksum(manifest_of(ORIN)) == graph_checksum(manifest_of(graph={**GRAPH, "a.json": "5" * 64}))
    assert base != graph_checksum(manifest_of(graph={**GRAPH, "model.onnx.data": "5" * 64}))


def test_the_library_is_that_of_the_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    here = {"tensorrt", "tensorrt_rtx"}
    monkeypatch.setattr(tensorrt_library.importlib.util, "find_spec", lambda name: name if name in here else None)
    rtx = key_here("tensorrt_rtx", "1.7.1", "", "aa")
    assert library_of(manifest_of()) == "tensorrt"
    assert library_of(manifest_of(rtx)) == "tensorrt_rtx"
    assert library_of(manifest_of(rtx, ORIN)) == "tensorrt"
    here.remove("tensorrt")
    assert library_of(manifest_of()) == library_of(manifest_of(rtx, ORIN)) == "tensorrt_rtx"
    assert library_of(manifest_of(ORIN)) == "tensorrt"  # and importing it says what is missing


def test_a_library_that_is_missing_or_too_old_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    old: Any = ModuleType("tensorrt")
    old.__version__ = "10.2.0"
    monkeypatch.setitem(sys.modules, "tensorrt", old)
    with pytest.raises(UserError, match=r"TensorRT 10\.2\.0 is too old: 10\.3 or newer"):
        import_library("tensorrt")
    old.__version__ = "10.16.1.11"
    assert import_library("tensorrt") is old
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    here: list[str] = []
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name in here or None)
    with pytest.raises(UserError, match=r"tensorrt cannot be imported, .* --system-site-packages"):
        import_library("tensorrt")
    here.append("tensorrt_rtx")
    with pytest.raises(UserError, match=r"not installed here, but tensorrt_rtx is: .* with --library tensorrt_rtx"):
        import_library("tensorrt")


def test_devices() -> None:
    assert [device_index(device) for device in ("cuda", "cuda:0", "cuda:2")] == [0, 0, 2]
    with pytest.raises(UserError, match="not on device cpu: write device: cuda:0"):
        device_index("cpu")


def test_a_bundle_that_cannot_run_here_is_refused_in_one_sentence(tmp_path: Path) -> None:
    """On this machine there is no TensorRT, or no GPU, or no engine: whichever is missing is named."""
    for name in GRAPH:
        (tmp_path / name).write_bytes(b"x")
    sums = manifests.checksums(tmp_path, GRAPH)
    manifests.write(manifest_of(graph=sums), tmp_path)
    with pytest.raises(
        UserError, match=r"cannot be imported|not installed|no CUDA device|cuda-bindings|no TensorRT engine yet"
    ):
        tensorrt.load(tmp_path)
    with pytest.raises(UserError, match=r"max_sessions 3 is more than the bundle .* was made for, 2"):
        tensorrt.load(tmp_path, max_sessions=3)
