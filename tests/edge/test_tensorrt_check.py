"""An engine is compared with its graph before it counts, on the fake device: a good one stays, a wrong one goes."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.core import manifest as manifests
from paceline.edge.runtimes.tensorrt import TensorRtRuntime
from paceline.edge.runtimes.tensorrt_library import key_here
from paceline.edge.runtimes.tensorrt_steps import Profile
from paceline.export import engine_check
from paceline.export.engine import BuiltEngine
from paceline.export.engine_check import EngineDiffers, check_engine, graph_runtime
from paceline.export.engine_verify import WARM_UP, time_steps

from .fake_cuda import FakeDevice, FakeEngine

pytest.importorskip("torch")
pytest.importorskip("onnxruntime")
MODEL = Path(__file__).parents[2] / "models" / "tiny-drafter"


KINDS = [("static-compat", "float32"), ("static-compat", "float16"), ("static-native", "float16")]


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Path]:
    """(profile, dtype) → a bundle of the embedded drafter."""
    from paceline.export.bundle import export
    from paceline.export.options import Request
    from paceline.export.watch import Watch

    found = {}
    for profile, dtype in KINDS:
        folder = found[profile, dtype] = tmp_path_factory.mktemp("bundles") / "tiny"
        kind: Any = {"profile": profile, "dtype": dtype}
        export(Request(str(MODEL), folder, runtime="tensorrt", max_context=128, **kind), Watch())
    return found


@pytest.fixture(scope="module")
def exported(bundles: dict[tuple[str, str], Path]) -> Path:
    return bundles["static-compat", "float32"]


class Spoilt:
    """A session whose values come out a little too large."""

    def __init__(self, session: Any) -> None:
        self._session = session

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def run(self, names: None, feeds: Any) -> list[Any]:
        outputs = self._session.run(names, feeds)
        for index, output in enumerate(self._session.get_outputs()):
            if output.name.startswith("value_out"):
                outputs[index] = outputs[index] * np.float32(1.01)
        return outputs  # type: ignore[no-any-return]


def with_fake(folder: Path, monkeypatch: pytest.MonkeyPatch, spoilt: bool) -> BuiltEngine:
    """A bundle with an engine file, which the fake stands in for."""
    manifest = manifests.read(folder)
    key = key_here("tensorrt", "10.3.0", "sm_87", "aa")
    path = folder / key.file_name
    path.write_bytes(b"plan")
    files = {**manifest.files, path.name: manifests.checksum(path)}
    manifests.write(manifest.model_copy(update={"files": files, "engines": {path.name: key._asdict()}}), folder)
    device = FakeDevice()
    engine = FakeEngine(folder / "model.onnx", device, (Profile(2, 8), Profile(1, 64)))
    if spoilt:
        engine.session = Spoilt(engine.session)
    monkeypatch.setattr(engine_check, "open_engine", lambda folder, manifest, name: (engine, device))
    return BuiltEngine(path, key, 4, 1.0, {})


@pytest.mark.parametrize("kind", KINDS)
def test_a_good_engine_stays_and_says_what_was_compared(
    kind: tuple[str, str], bundles: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same graph on both sides, but here padded, in windows and in several steps: that must make no difference."""
    folder = Path(shutil.copytree(bundles[kind], tmp_path / "bundle"))
    built = with_fake(folder, monkeypatch, spoilt=False)
    shares: list[float] = []
    agreement = check_engine(folder, built, graph_runtime(folder, manifests.read(folder)), progress=shares.append)
    assert agreement.difference < (1e-4 if kind[1] == "float32" else 0.01)
    assert agreement.top1 > 0.99 and agreement.positions > 300
    assert shares[-1] == 1.0 and len(shares) == agreement.steps
    manifest = manifests.load(folder, role="drafter")
    assert "as onnxruntime on the CPU, largest difference" in str(manifest.engines[built.path.name]["checked"])


def test_a_wrong_engine_is_named_and_taken_out(exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path(shutil.copytree(exported, tmp_path / "bundle"))
    built = with_fake(folder, monkeypatch, spoilt=True)
    with pytest.raises(EngineDiffers, match=r"differs from onnxruntime on the CPU in `.*` by .* \(allowed 0\.01\)"):
        check_engine(folder, built, graph_runtime(folder, manifests.read(folder)))
    manifest = manifests.load(folder, role="drafter")
    assert manifest.engines == {} and built.path.name not in manifest.files and not built.path.exists()


def test_a_row_that_moves_wrongly_is_noticed(exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path(shutil.copytree(exported, tmp_path / "bundle"))
    built = with_fake(folder, monkeypatch, spoilt=False)
    monkeypatch.setattr(FakeDevice, "copy_rows", lambda self, *sizes: None)
    with pytest.raises(EngineDiffers, match=r"in `a moved row` by"):
        check_engine(folder, built, graph_runtime(folder, manifests.read(folder)))


def test_steps_are_timed_in_turns(exported: Path) -> None:
    manifest = manifests.read(exported)
    runtimes = []
    for graphs in (False, True):
        device = FakeDevice()
        engine = FakeEngine(exported / "model.onnx", device, (Profile(2, 8), Profile(1, 64)))
        runtimes.append(TensorRtRuntime(manifest, engine, device, rows=3, graphs=graphs))
    ticks = itertools.count()
    times = list(time_steps(runtimes, 2, 4, repeats=6, clock=lambda: float(next(ticks))))
    assert times == [1000.0, 1000.0]  # a tick before and one after each step
    assert [runtime._device.launches for runtime in runtimes] == [0, WARM_UP + 6 - 1]  # type: ignore[attr-defined]
