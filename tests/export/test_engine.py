"""The engine of a bundle, with the real builder of tensorrt-rtx, which needs no GPU; and what is said when it fails."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from paceline.core import manifest as manifests
from paceline.core.errors import UserError
from paceline.edge.runtimes.tensorrt_steps import Profile
from paceline.export import engine_network, engine_room
from paceline.export.engine import build_engine, build_plan
from paceline.export.engine_config import EngineShapes, keep_timings, use_timings

trt = pytest.importorskip(
    "tensorrt_rtx", reason="tensorrt-rtx is not installed (Linux x86-64: pip install -e '.[dev]')"
)
onnx = pytest.importorskip("onnx")
pytest.importorskip("torch")
MODEL = Path(__file__).parents[2] / "models" / "tiny-drafter"
SHAPES = (Profile(4, 8), Profile(1, 32))


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Profile → a bundle of the embedded drafter, without an engine."""
    from paceline.export.bundle import export
    from paceline.export.options import Request
    from paceline.export.watch import Watch

    found = {}
    for runtime, profile in (("tensorrt", "static-compat"), ("tensorrt", "static-native"), ("onnxruntime", "gqa")):
        folder = tmp_path_factory.mktemp("bundles") / profile
        request: Any = Request(str(MODEL), folder, runtime=runtime, profile=profile, max_context=128)  # type: ignore[arg-type]
        export(request, Watch())
        found[profile] = folder
    return found


@pytest.mark.parametrize(
    ("profile", "counts"),
    [
        ("static-compat", {"SCATTER": 2, "SOFTMAX": 1}),
        ("static-native", {"KV_CACHE_UPDATE": 2, "ATTENTION_INPUT": 1, "ATTENTION_OUTPUT": 1}),
    ],
)
def test_a_bundle_gets_its_engine(
    profile: str, counts: dict[str, int], exported: dict[str, Path], tmp_path: Path
) -> None:
    bundle = Path(shutil.copytree(exported[profile], tmp_path / "bundle"))
    phases: list[tuple[str, float]] = []
    built = build_engine(bundle, library="tensorrt_rtx", progress=lambda phase, share: phases.append((phase, share)))
    assert {name: built.layers.get(name, 0) for name in counts} == counts
    assert built.path == bundle / f"tensorrt_rtx-{trt.__version__}-any.plan"
    assert built.size == built.path.stat().st_size > 2_000_000
    assert phases[0][1] == 0.0 and phases[-1][1] == 1.0 and len(phases) > 2
    manifest = manifests.load(bundle, role="drafter")  # every checksum, the engine's too
    assert manifest.engines[built.path.name] == built.key._asdict()
    assert built.key.version == trt.__version__ and len(built.key.graph) == 32
    again = build_engine(bundle, library="tensorrt_rtx", shapes=EngineShapes(rows=2))
    assert again.path == built.path and len(manifests.load(bundle).engines) == 1
    assert sorted(path.suffix for path in bundle.iterdir() if path.name.startswith((".", "tensorrt"))) == [".plan"]


def test_an_interrupted_build_leaves_nothing(exported: dict[str, Path], tmp_path: Path) -> None:
    bundle = Path(shutil.copytree(exported["static-compat"], tmp_path / "bundle"))
    before = sorted(path.name for path in bundle.iterdir())

    def interrupt(phase: str, share: float) -> None:
        if share > 0:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_engine(bundle, library="tensorrt_rtx", progress=interrupt)
    assert sorted(path.name for path in bundle.iterdir()) == before
    assert manifests.load(bundle).engines == {}


class FakeConfig:
    """A fake of a builder's configuration, which takes and gives timing caches; tensorrt_rtx has none."""

    def __init__(self) -> None:
        self.cache: bytes | None = None

    def create_timing_cache(self, known: bytes) -> bytes | None:
        return None if known == b"broken" else known

    def set_timing_cache(self, cache: bytes, ignore_mismatch: bool) -> bool:
        if cache == b"of another device":
            return False
        self.cache = cache
        return True

    def get_timing_cache(self) -> Any:
        class Cache:
            def serialize(self) -> bytes:
                return b"learnt"

        return Cache()


@pytest.mark.parametrize(
    ("found", "used"), [(b"known", b"known"), (None, b""), (b"broken", b""), (b"of another device", b"")]
)
def test_timings_of_earlier_builds_are_used_where_they_fit(found: bytes | None, used: bytes, tmp_path: Path) -> None:
    config, file = FakeConfig(), tmp_path / "cache" / "old.timing"
    if found is not None:
        file.parent.mkdir()
        file.write_bytes(found)
    use_timings(config, file)
    assert config.cache == used
    keep_timings(config, file)
    assert file.read_bytes() == b"learnt" and list(file.parent.iterdir()) == [file]


def test_other_bundles_are_refused_with_the_remedy(exported: dict[str, Path]) -> None:
    with pytest.raises(
        UserError, match=r"has a graph of profile gqa, and TensorRT needs one with fixed KV rows: export the model"
    ):
        build_engine(exported["gqa"], library="tensorrt_rtx")


def changed(source: Path, folder: Path, change: Any) -> Path:
    """A copy of a graph with something changed in its nodes."""
    model = onnx.load(source / "model.onnx")
    change(model.graph)
    onnx.save(model, folder / "model.onnx")
    return folder / "model.onnx"


def test_the_parser_names_the_node_and_its_operator(exported: dict[str, Path], tmp_path: Path) -> None:
    def break_it(graph: Any) -> None:
        node = next(node for node in graph.node if node.op_type == "Softmax")
        node.op_type, node.name = "TensorScatterer", "layer.0/strange"

    path = changed(exported["static-compat"], tmp_path, break_it)
    with pytest.raises(
        UserError, match=r"cannot read .*model.onnx: node layer\.0/strange \(TensorScatterer\): .*needs TensorRT 10\.15"
    ):
        build_plan(trt, path, SHAPES)


def test_a_cache_that_is_read_before_it_is_updated_is_refused(exported: dict[str, Path], tmp_path: Path) -> None:
    def peek(graph: Any) -> None:
        graph.node.append(onnx.helper.make_node("ReduceSum", ["key.0"], ["peeked"], name="peek"))
        graph.output.append(onnx.helper.make_tensor_value_info("peeked", onnx.TensorProto.FLOAT16, [1, 1, 1, 1]))

    path = changed(exported["static-compat"], tmp_path, peek)
    with pytest.raises(UserError, match=r"the graph reads key\.0 in .*before it is updated"):
        build_plan(trt, path, SHAPES)


def test_a_build_that_fails_is_told_in_tensorrts_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from paceline.export.graph import build

    build(MODEL, tmp_path, profile="static-native", dtype="float32", max_context=64)
    plan, layers = build_plan(trt, tmp_path / "model.onnx", SHAPES)  # in several kernels: there is none of its own
    assert plan.nbytes > 0 and layers["ATTENTION_INPUT"] == 1
    monkeypatch.setattr(engine_network, "_allow_decomposition", lambda trt, network: None)
    words = r"could not build .*model.onnx: .*Attention.*not supported by a dedicated kernel.*--profile static-compat"
    with pytest.raises(UserError, match=words):
        build_plan(trt, tmp_path / "model.onnx", SHAPES)


def test_too_little_memory_is_said_with_the_arithmetic(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:  8000000 kB\nMemAvailable:  3000000 kB\nSwapFree:  1000000 kB\n")
    engine_room.check_room(tmp_path, 700 << 20, "tensorrt", meminfo)  # 2.7 + 1 GiB of 3.8
    with pytest.raises(UserError, match=r"about 4\.9 GiB of memory \(4 × 0\.98 GiB .* 3\.8 GiB are available"):
        engine_room.check_room(tmp_path, 1000 << 20, "tensorrt", meminfo)
    with pytest.raises(UserError, match=r"about 5\.1 GiB of memory \(6 × 0\.68 GiB"):
        engine_room.check_room(tmp_path, 700 << 20, "tensorrt_rtx", meminfo)
    assert engine_room.available_memory(tmp_path / "none") is None


def test_too_little_disk_is_said_before_the_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Usage:
        free = 1 << 30

    monkeypatch.setattr(engine_room.shutil, "disk_usage", lambda folder: Usage)
    with pytest.raises(UserError, match=r"needs 1\.2 GiB free for the engine .* and has 1\.0 GiB"):
        engine_room.check_room(tmp_path, 600 << 20, "tensorrt", tmp_path / "none")
