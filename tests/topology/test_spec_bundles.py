"""A drafter's bundle names its runtime; what a topology writes about runtimes and providers must fit together."""

from __future__ import annotations

from pathlib import Path

from paceline.core import manifest as manifests
from paceline.core.manifest import Manifest, ModelEntry, Profile, Role, RuntimeName
from paceline.topology.spec import DrafterSpec, parse_topology
from paceline.topology.spec_bundles import DRAFTS_AHEAD, bundles, drafts_ahead

from .spec_helpers import problems, read, with_drafter, with_target


def bundle(folder: Path, runtime: RuntimeName, profile: Profile | None = None, role: Role = "drafter") -> Path:
    folder.mkdir()
    manifest = Manifest(
        role=role,
        runtime=runtime,
        profile=profile,
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
    return at_a_node(text, base).runtime


def at_a_node(text: str, base: Path) -> DrafterSpec:
    """The drafter as a node reads it, whose own bundle is looked at when it is loaded."""
    return parse_topology(text, "star.yaml", base, look_at_bundles=False).drafter("d")


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
    graph = at_a_node(written, tmp_path)
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
    gpu = with_drafter("runtime: onnxruntime\nprovider: tensorrt\ndevice: cuda:0").replace("org/small", "/absent")
    assert read(gpu).drafter("d").provider == "tensorrt"
    assert problems(gpu.replace("runtime: onnxruntime", "runtime: torch")) == [
        "star.yaml:7:5: drafters[0].provider: is only for runtime: onnxruntime, not torch"
    ]
    assert problems(gpu.replace("cuda:0", "cpu")) == [
        "star.yaml:7:5: drafters[0].provider: runs on a GPU: write device: cuda:0, or remove it"
    ]


def test_what_is_no_bundle_is_refused_where_the_runtime_takes_one(tmp_path: Path) -> None:
    """A folder of this machine, or a hub id; what is absent or on another host is not looked at."""
    (tmp_path / "weights").mkdir()
    text = with_drafter("runtime: onnxruntime")
    why = "is no bundle: it has no manifest.json; make one with `paceline export`"
    assert problems(text.replace("org/small", "./weights"), tmp_path) == [
        f"star.yaml:5:12: drafters[0].model: {tmp_path}/weights {why}"
    ]
    assert problems(text) == [f"star.yaml:5:12: drafters[0].model: org/small {why}"]
    assert read(text.replace("org/small", "./absent"), tmp_path).drafter("d").runtime == "onnxruntime"
    here = at_a_node(text, tmp_path)
    there = here.model_copy(update={"host": "orin"})
    assert [len(list(bundles({0: one}, {}))) for one in (here, there)] == [1, 0]
    assert len(list(bundles({0: there}, {}, ["orin"]))) == 1


def test_a_broken_or_unfit_bundle_is_refused(tmp_path: Path) -> None:
    """One sentence each, at what was written; the same that loading it would say."""
    graph = bundle(tmp_path / "graph", "onnxruntime", "gqa")
    text = with_drafter("max_context: 9\nmax_sessions: 2").replace("org/small", "./graph")
    assert problems(text, tmp_path) == [
        f"star.yaml:6:18: drafters[0].max_context: max_context 9 is more than the bundle {graph} was made for, 8: "
        "lower it, or export the model with --max-context 9",
        f"star.yaml:7:19: drafters[0].max_sessions: max_sessions 2 is more than the bundle {graph} was made for, 1: "
        "lower it, or export the model with --max-sessions 2",
    ]
    assert problems(with_drafter("runtime: torch\nmax_context: 8").replace("org/small", "./graph"), tmp_path) == [
        f"star.yaml:6:14: drafters[0].runtime: {graph} is a bundle for the runtime onnxruntime, not for torch: "
        "write runtime: onnxruntime, or export the model with --runtime torch"
    ]
    (line,) = problems(with_drafter("device: cuda").replace("org/small", "./graph"), tmp_path)
    assert line.startswith(f"star.yaml:6:13: drafters[0].device: {graph} is a gqa graph in float32")
    (graph / "manifest.json").write_text("{")
    (line,) = problems(with_drafter("").replace("org/small", "./graph"), tmp_path)
    assert line.startswith(f"star.yaml:5:12: drafters[0].model: {graph}/manifest.json is no JSON")


def test_a_bundle_for_tensorrt_needs_a_gpu_without_its_runtime_written(tmp_path: Path) -> None:
    bundle(tmp_path / "engine", "tensorrt")
    text = with_drafter("").replace("org/small", "./engine")
    (line,) = problems(text, tmp_path)
    assert line.endswith(": drafters[0].runtime: tensorrt runs on a GPU: write device: cuda:0 beside it")
    (finding,) = bundles({0: at_a_node(text, tmp_path)}, {})
    assert finding.message == "tensorrt runs on a GPU: write device: cuda:0 beside it"


def test_a_targets_bundle_is_a_targets(tmp_path: Path) -> None:
    graph, weights = bundle(tmp_path / "graph", "onnxruntime"), bundle(tmp_path / "weights", "torch", role="target")
    assert problems(with_target("max_context: 8").replace("org/large", "./graph"), tmp_path) == [
        f"star.yaml:8:12: targets[0].model: {graph} is a drafter bundle, but a target was to be loaded: "
        "export the model with --role target"
    ]
    assert problems(with_target("max_context: 9").replace("org/large", "./weights"), tmp_path) == [
        f"star.yaml:10:18: targets[0].max_context: max_context 9 is more than the bundle {weights} was made for, 8: "
        "lower it, or export the model with --max-context 9"
    ]
    assert read(with_target("max_context: 8").replace("org/large", "./weights"), tmp_path).target("t").max_context == 8


def test_draft_ahead_needs_a_drafter_that_can(tmp_path: Path) -> None:
    """By strategy, runtime and the graph's profile; one of several is enough."""
    for profile in ("gqa", "static-native", "concat"):
        bundle(tmp_path / profile, "onnxruntime", profile)
    bundle(tmp_path / "engine", "tensorrt", "static-compat")
    why = f"cannot draft ahead, which takes {DRAFTS_AHEAD}; remove it"
    text = with_target("draft_ahead: 5")

    def with_model(*lines: str) -> str:
        return text.replace("    model: org/small\n", "".join(f"    {line}\n" for line in lines))

    for lines in (
        ["model: ./gqa"],
        ["model: ./static-native"],
        ["strategy: ngram"],
        ["model: ./engine", "device: cuda"],
        ["model: /absent", "runtime: tensorrt", "device: cuda"],
    ):
        (line,) = problems(with_model(*lines), tmp_path)
        assert line.split(": ", 1)[1] == f"targets[0].draft_ahead: d {why}"
    assert drafts_ahead(read(with_model("model: ./concat"), tmp_path).drafter("d"))
    for model in ("model: org/small", "model: /absent\n    runtime: onnxruntime"):
        assert read(with_model(model)).target("t").draft_ahead == 5
    both = text.replace("drafters:\n", "drafters:\n  - {name: n, strategy: ngram}\n", 1).replace("[d]", "[n, d]")
    assert read(both).target("t").draft_ahead == 5
    (line,) = problems(both.replace("org/small", "./gqa"), tmp_path)
    assert line.endswith(f"targets[0].draft_ahead: none of n, d can {why.removeprefix('cannot ')}")


def test_what_a_topology_says_of_runtimes_is_what_they_can() -> None:
    """`forks` of each, and of a strategy without a runtime."""
    from paceline.edge.runtimes.base import PackedRuntime
    from paceline.edge.runtimes.onnx_concat import ConcatRuntime
    from paceline.edge.runtimes.onnxruntime import OnnxRuntime
    from paceline.edge.runtimes.tensorrt import TensorRtRuntime
    from paceline.edge.strategies.ngram import NGram

    drafter = read(with_drafter("")).drafter("d")
    says = {name: drafts_ahead(drafter.model_copy(update={"runtime": name})) for name in ("torch", "tensorrt")}
    assert says == {"torch": PackedRuntime.forks, "tensorrt": TensorRtRuntime.forks}
    assert (ConcatRuntime.forks, OnnxRuntime.forks) == (True, False)
    assert drafts_ahead(drafter.model_copy(update={"strategy": "ngram"})) == NGram.forks
