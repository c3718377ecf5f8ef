"""What of a bundle, a device or a provider does not fit is told in one sentence; nothing is used instead."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from paceline.core.errors import UserError

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")

from paceline.edge.runtimes import onnx_session  # noqa: E402
from paceline.edge.runtimes.onnxruntime import load  # noqa: E402

from .onnx_bundles import make_bundle, small_llama  # noqa: E402


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_bundle(small_llama(), tmp_path_factory.mktemp("bundles") / "gqa", "gqa")


@pytest.fixture(scope="module")
def concat(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One whose nodes a GPU has, too."""
    return make_bundle(small_llama(), tmp_path_factory.mktemp("bundles") / "concat", "concat")


def refusal(folder: Path, **options: Any) -> str:
    with pytest.raises(UserError) as caught:
        load(folder, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_more_than_the_bundle_was_made_for_is_refused(bundle: Path) -> None:
    said = refusal(bundle, max_context=200)
    assert said == (
        f"max_context 200 is more than the bundle {bundle} was made for, 96: "
        "lower it, or export the model with --max-context 200"
    )
    assert "max_sessions 7 is more" in refusal(bundle, max_sessions=7)


def test_less_than_the_bundle_was_made_for_is_what_counts(bundle: Path) -> None:
    runtime = load(bundle, max_context=40, max_sessions=3)
    assert (runtime.max_context, runtime.kv_slots) == (40, 4 * 40)


def test_kv_memory_counts_rows_and_holds_one_session_at_least(bundle: Path) -> None:
    """A row is 2 layers × 2 × 2 heads × 96 slots × 8 × 4 bytes; one more row is needed to move them through."""
    row = 2 * 2 * 2 * 96 * 8 * 4
    assert load(bundle, kv_memory=3 * row + 1).kv_slots == 3 * 96
    assert load(bundle, max_sessions=2, kv_memory=100 * row).kv_slots == 3 * 96
    said = refusal(bundle, kv_memory=row)
    assert f"a row of 96 tokens takes {row} and 2 are needed; give {2 * row}" in said


def test_rows_that_find_no_memory_are_told(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fake_rows(*arguments: Any) -> None:
        raise MemoryError

    monkeypatch.setattr("paceline.edge.runtimes.onnxruntime.HostRows", fake_rows)
    assert "no memory for 7 KV rows of 24576 bytes each: lower max_sessions or kv_memory" in refusal(bundle)


def test_a_changed_file_is_refused_by_name(bundle: Path, tmp_path: Path) -> None:
    broken = make_bundle(small_llama(), tmp_path / "broken", "gqa")
    data = bytearray((broken / "model.onnx.data").read_bytes())
    data[1000] ^= 1
    (broken / "model.onnx.data").write_bytes(data)
    assert "model.onnx.data has another checksum" in refusal(broken)


def test_a_bundle_for_another_runtime_is_refused(tmp_path: Path) -> None:
    other = make_bundle(small_llama(), tmp_path / "other", "gqa", runtime="tensorrt")
    assert "is a bundle for the runtime tensorrt, not for onnxruntime: write runtime: tensorrt" in refusal(other)


def test_a_graph_that_is_none_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(b"no graph")
    with pytest.raises(UserError, match=r"onnxruntime cannot load .*model\.onnx for cpu"):
        onnx_session.open_session(path)


@pytest.mark.skipif(
    "CUDAExecutionProvider" in onnxruntime.get_available_providers(), reason="this onnxruntime was built for CUDA"
)
def test_a_gpu_is_never_replaced_by_the_cpu(concat: Path) -> None:
    said = refusal(concat, device="cuda:0")
    assert said.startswith("device cuda:0 needs CUDAExecutionProvider, which the installed onnxruntime")
    assert "pip install -e '.[gpu]'" in said
    assert "device cuda:1 needs TensorrtExecutionProvider" in refusal(concat, device="cuda:1", provider="tensorrt")
    assert "provider tensorrt runs on a GPU" in refusal(concat, provider="tensorrt")


def test_a_graph_whose_attention_would_run_on_the_cpu_is_refused(bundle: Path) -> None:
    assert "has no kernel on a GPU: export the model with --dtype float16" in refusal(bundle, device="cuda:0")


class FakeCudaPackage:
    """A fake of onnxruntime-gpu on a machine where CUDA does not work: it claims CUDA, and runs on the CPU."""

    __version__ = "1.99"
    __file__ = onnxruntime.__file__
    SessionOptions = onnxruntime.SessionOptions
    asked: Any = None

    @staticmethod
    def get_available_providers() -> list[str]:
        return ["CUDAExecutionProvider", "CPUExecutionProvider"]

    @staticmethod
    def preload_dlls() -> None:
        print("Failed to load libcublas.so.13")

    @classmethod
    def InferenceSession(cls, graph: Path, options: Any, **keywords: Any) -> Any:
        cls.asked = keywords
        return onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])


def test_a_silent_fallback_is_found_out(
    concat: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The package says that it has CUDA, makes a session, and that session runs on the CPU."""
    monkeypatch.setattr(onnx_session, "_import", lambda: FakeCudaPackage)
    monkeypatch.setattr(onnx_session, "_LIBRARIES", {onnx_session.CUDA: "libonnxruntime_providers_shared.so"})
    assert "runs this graph on CPUExecutionProvider only" in refusal(concat, device="cuda:1")
    assert FakeCudaPackage.asked["enable_fallback"] == 0
    assert FakeCudaPackage.asked["providers"][0] == (onnx_session.CUDA, {"device_id": 1})
    assert capsys.readouterr().out == ""


def test_a_missing_library_is_named(concat: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here the provider's own library is what is missing."""
    monkeypatch.setattr(onnx_session, "_import", lambda: FakeCudaPackage)
    monkeypatch.setattr(onnx_session, "_LIBRARIES", {onnx_session.CUDA: "libnowhere.so"})
    assert "libnowhere.so is not found; onnxruntime 1.99 needs NVIDIA's driver, CUDA, cuDNN; install" in refusal(
        concat, device="cuda"
    )


def test_a_drafter_with_a_bundle_needs_neither_torch_nor_onnx(bundle: Path) -> None:
    """What an edge device has: numpy, onnxruntime, tokenizers."""
    code = f"""
import sys
from paceline.edge.drafter import load_strategy
from paceline.edge.runtimes.onnxruntime import load
load({str(bundle)!r})
print(sorted({{"torch", "transformers", "onnx", "onnxscript"}} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.strip() == "[]"
