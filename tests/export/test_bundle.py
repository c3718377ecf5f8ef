"""Whole exports of small models: what is in a bundle, who loads it, and what an interrupted one leaves."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("onnxruntime")
pytest.importorskip("transformers")

import torch

from paceline.core import manifest as manifests
from paceline.core.errors import UnsupportedModel, UserError
from paceline.core.lm.loading import load
from paceline.core.model import Segment
from paceline.core.vocabulary import Vocabulary
from paceline.export import bundle
from paceline.export.bundle import Report
from paceline.export.options import Request
from paceline.export.parity_figures import ParityFailed
from paceline.export.watch import Watch

from .bundle_models import edit_weight, model_folder, need

EMBEDDED = Path(__file__).resolve().parents[2] / "models" / "tiny-drafter"
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "phi3", "gemma3_text")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("models") / "small-llama")


def export(model: Path, out: Path, **options: Any) -> Report:
    return bundle.export(Request(str(model), out, **options), Watch())


def refusal(model: Path, out: Path, **options: Any) -> str:
    """The sentence; and nothing is left beside the bundle's place."""
    above = next(folder for folder in out.parents if folder.is_dir())
    before = sorted(above.iterdir())
    with pytest.raises(UserError) as caught:
        export(model, out, **options)
    assert sorted(above.iterdir()) == before
    return str(caught.value)


def test_a_drafter_bundle_says_what_it_holds(model: Path, tmp_path: Path) -> None:
    """Every field of the manifest, for the default: onnxruntime, gqa, float32."""
    report = export(model, tmp_path / "out", max_context=128, max_sessions=3)
    found = manifests.load(tmp_path / "out", role="drafter")
    assert found == report.manifest
    assert (found.runtime, found.profile, found.weight_dtype, found.kv_dtype) == (
        "onnxruntime",
        "gqa",
        "float32",
        "float32",
    )
    assert (found.layers, found.kv_heads, found.head_dim, found.opset, found.top_k) == (3, 2, 16, 18, 64)
    assert (found.max_context, found.max_sessions, found.vocabulary_size) == (128, 3, 2048)
    assert (found.rows, found.multi_token_batch) == ("contiguous", False)
    assert (found.model.name, found.model.family) == ("small-llama", "llama")
    assert (
        found.tokenizer_fingerprint
        == Vocabulary.load(model).fingerprint
        == Vocabulary.load(tmp_path / "out").fingerprint
    )
    assert set(found.files) == {path.name for path in (tmp_path / "out").iterdir()} - {"manifest.json"}
    assert {"config.json", "model.onnx", "model.onnx.data", "tokenizer.json"} <= set(found.files)
    assert found.tools["onnxruntime"] and found.tools["torch"]
    assert found.parity["agreement"] == {"0": 1.0, "0.8": 1.0} and found.parity["text_positions"] > 700
    assert list(report.seconds) == ["read the model", "write the graph", "compare it with torch", "checksums"]
    assert report.sizes == {name: (tmp_path / "out" / name).stat().st_size for name in found.files}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_exported(family: str, tmp_path: Path) -> None:
    """Each agrees with torch, past its sliding window too, or the export would have failed."""
    model = model_folder(tmp_path / "model", family, num_hidden_layers=2 if family != "gemma3_text" else 3)
    report = export(model, tmp_path / "out", max_context=64, profile="static-compat")
    assert report.manifest.model.family == family
    assert report.manifest.parity["logit_difference"] < 1e-3
    assert "ragged batch, several tokens" in report.manifest.parity["cases"]


@pytest.mark.parametrize(
    ("profile", "dtype"), [("static-compat", "float16"), ("static-native", "float16"), ("static-native", "bfloat16")]
)
def test_a_tensorrt_bundle_holds_a_graph_for_its_builder(model: Path, tmp_path: Path, profile: str, dtype: str) -> None:
    """The engine is built where it will run; the graph is checked here, in float32 where a CPU has no bfloat16."""
    need(profile)
    report = export(model, tmp_path / "out", runtime="tensorrt", profile=profile, dtype=dtype, max_context=64)
    found = report.manifest
    assert (found.runtime, found.profile, found.kv_dtype, found.engines) == ("tensorrt", profile, dtype, {})
    assert found.parity["subject"].endswith("in float32") == (dtype == "bfloat16")


@pytest.mark.parametrize(("kind", "least"), [("int8", 0.98), ("int4", 0.9)])
def test_a_quantised_bundle_reports_what_it_lost(tmp_path: Path, kind: str, least: float) -> None:
    """The embedded drafter agreed exactly before; afterwards it is smaller, and chooses otherwise now and then."""
    report = export(EMBEDDED, tmp_path / "out", quantize=kind, max_context=64)
    plain = export(EMBEDDED, tmp_path / "plain", max_context=64)
    found = report.manifest.parity
    assert (report.manifest.quantization, report.manifest.weight_dtype) == (kind, "float32")
    assert found["before_quantization"]["agreement"] == {"0": 1.0, "0.8": 1.0}
    assert least <= min(found["agreement"].values()) <= 1 and found["max_difference"] > 1e-3
    assert report.sizes["model.onnx.data"] < plain.sizes["model.onnx.data"] / 2
    assert set(report.sizes) == set(plain.sizes)


@pytest.mark.parametrize("profile", ["gqa", "static-compat", "concat"])
def test_the_shortest_context_is_checked_as_well(model: Path, tmp_path: Path, profile: str) -> None:
    """Where prompts, texts and the long context are all no longer than it."""
    report = export(model, tmp_path / "out", max_context=16, profile=profile)
    assert report.manifest.parity["text_positions"] == 8 * (16 - 8 + 1)


def test_a_torch_drafter_is_checked_as_well(model: Path, tmp_path: Path) -> None:
    """Half precision, loaded and run as a drafter will."""
    report = export(model, tmp_path / "out", runtime="torch", dtype="bfloat16")
    assert (report.manifest.runtime, report.manifest.profile, report.manifest.max_context) == ("torch", None, 512)
    assert report.manifest.parity["subject"] == "torch bfloat16"
    assert report.manifest.parity["max_difference"] > 0
    assert load(tmp_path / "out", dtype="bfloat16", role="drafter").max_context == 512


def test_a_target_bundle_loads_as_the_model_did(model: Path, tmp_path: Path) -> None:
    """The same logits as the original converted in memory; a topology's `model` may name either."""
    export(model, tmp_path / "out", role="target", dtype="float16")
    content = json.loads((tmp_path / "out" / "config.json").read_text())
    assert content["dtype"] == "float16" and "torch_dtype" not in content
    rows = []
    for path in (model, tmp_path / "out"):
        loaded = load(path, dtype="float16", role="target")
        span = loaded.allocate(8)
        assert span is not None
        rows.append(loaded.forward([Segment(span, 0, [1, 2, 3], 3)]))
    assert torch.equal(*rows)


def test_a_changed_byte_of_a_target_is_refused_at_load(model: Path, tmp_path: Path) -> None:
    """In the middle of the weights, naming the file; and a role or a runtime it was not made for."""
    export(model, tmp_path / "out", role="target")
    with pytest.raises(UserError, match="is a target bundle, but a drafter was to be loaded"):
        load(tmp_path / "out", role="drafter")
    path = tmp_path / "out" / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"out/model\.safetensors has another checksum"):
        load(tmp_path / "out", role="target")
    export(model, tmp_path / "graph", max_context=32)
    with pytest.raises(UserError, match="is a bundle for the runtime onnxruntime, not for torch"):
        load(tmp_path / "graph")


def test_a_changed_byte_of_a_drafter_is_refused_at_load(model: Path, tmp_path: Path) -> None:
    """The runtime reads a whole bundle, and no other."""
    from paceline.edge.runtimes import onnxruntime

    export(model, tmp_path / "out", max_context=32)
    assert onnxruntime.load(tmp_path / "out", threads=1).vocabulary_size == 2048
    for name in ("model.onnx", "model.onnx.data", "tokenizer.json"):
        path = tmp_path / "out" / name
        whole = path.read_bytes()
        path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        with pytest.raises(UserError, match=f"out/{name} has another checksum"):
            onnxruntime.load(tmp_path / "out")
        path.write_bytes(whole)


def test_a_bundle_for_short_sessions_says_so(model: Path, tmp_path: Path) -> None:
    """max_context of a topology is compared with the bundle's."""
    export(model, tmp_path / "out", role="target", max_context=100)
    assert load(tmp_path / "out").max_context == 100
    with pytest.raises(UserError, match=r"max_context 200 is more than the bundle .* was made for, 100"):
        load(tmp_path / "out", max_context=200)


def test_a_failed_check_leaves_nothing(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph written wrongly is no bundle, and an older bundle stays as it is."""
    from paceline.export import graph

    export(model, tmp_path / "out", max_context=64)
    before = (tmp_path / "out" / "manifest.json").read_bytes()
    right = graph.write

    def wrong(*arguments: Any, **keywords: Any) -> Any:
        info = right(*arguments, **keywords)
        edit_weight(info.path, "layer.1/qkv.weight", lambda values: values * 1.1)
        return info

    monkeypatch.setattr(graph, "write", wrong)
    with pytest.raises(ParityFailed, match="layer 1's keys and values differ first"):
        export(model, tmp_path / "out", max_context=64, force=True)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert (tmp_path / "out" / "manifest.json").read_bytes() == before


@pytest.mark.parametrize("runtime", ["onnxruntime", "torch"])
def test_a_drafter_does_not_start_on_a_bundle_with_another_tokenizer(tmp_path: Path, runtime: str) -> None:
    """Nor with another number of ids: each target would turn it away, and the star decode plainly."""
    from paceline.edge.drafter import load_strategy
    from paceline.topology.spec_models import DrafterSpec

    out = tmp_path / "out"
    export(EMBEDDED, out, runtime=runtime, max_context=256, max_sessions=1)
    spec = DrafterSpec.model_validate(
        {
            "name": "d",
            "listen": "127.0.0.1:7",
            "model": str(out),
            "runtime": runtime,
            "max_context": 256,
            "max_sessions": 1,
            "threads": 1,
        },
        context={"base": tmp_path},
    )
    assert load_strategy(spec).vocabulary == Vocabulary.load(EMBEDDED).identity
    found = manifests.load(out)
    manifests.write(found.model_copy(update={"vocabulary_size": 100}), out)
    with pytest.raises(UserError, match="says vocabulary_size 100, but the model has 2048 ids"):
        load_strategy(spec)
    manifests.write(found.model_copy(update={"tokenizer_fingerprint": "ab"}), out)
    with pytest.raises(UserError, match="is not the tokenizer that"):
        load_strategy(spec)


def test_an_interrupted_export_leaves_nothing(model: Path, tmp_path: Path) -> None:
    """Ctrl-C in the middle of a step; what a killed one left is removed by the next."""

    class Interrupted(Watch):
        def begin(self, step: str, total: int | None) -> None:
            if step == "checksums":
                assert [path.name for path in tmp_path.iterdir()] == [f".out.{os.getpid()}.partial"]
                raise KeyboardInterrupt

    (tmp_path / ".out.999999999.partial").mkdir()
    with pytest.raises(KeyboardInterrupt):
        bundle.export(Request(str(model), tmp_path / "out", role="target"), Interrupted())
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(AssertionError):
        bundle.export(Request(str(model), tmp_path / "new" / "folder" / "out", role="target"), Interrupted())
    assert list(tmp_path.iterdir()) == []


def test_an_older_bundle_is_replaced_only_by_force_and_nothing_else_ever(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """--force is for bundles: a folder of the user's own is never removed."""
    out = tmp_path / "out"
    export(model, out, role="target")
    assert refusal(model, out, role="target") == f"--out {out} holds a bundle already: --force replaces it"
    (out / "a.plan").write_bytes(b"engine")
    assert export(model, out, role="target", dtype="float16", force=True).engines_gone == ("a.plan",)
    assert manifests.load(out).weight_dtype == "float16"
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    export(model, Path("."), role="target")
    assert manifests.load(tmp_path / "empty").role == "target"
    mine = tmp_path / "mine"
    shutil.copytree(model, mine)
    assert "is there already and is no bundle" in refusal(model, mine, role="target", force=True)
    assert (
        "there is no folder" in refusal(model, tmp_path / "nowhere" / "out") if (tmp_path / "nowhere").mkdir() else True
    )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"role": "target", "runtime": "tensorrt"}, "a target bundle holds weights for torch"),
        ({"role": "target", "profile": "gqa"}, "--profile gqa is for graphs"),
        ({"runtime": "torch", "quantize": "int8"}, "--quantize int8 is for graphs"),
        ({"runtime": "tensorrt", "profile": "gqa"}, "--profile gqa: tensorrt runs static-compat, static-native"),
        ({"profile": "static-native"}, "--profile static-native: onnxruntime runs gqa, concat, static-compat"),
        ({"dtype": "bfloat16"}, "--dtype bfloat16: a gqa graph has float32 or float16"),
        ({"quantize": "int4", "dtype": "float16"}, "only float32 graphs for onnxruntime are quantised"),
        ({"max_context": 1000}, "--max-context 1000: this model has 512 positions"),
        ({"texts": Path("none.jsonl")}, "--texts none.jsonl"),
    ],
)
def test_what_does_not_go_together_is_refused(model: Path, tmp_path: Path, options: dict[str, Any], words: str) -> None:
    """Before anything is written."""
    assert words in refusal(model, tmp_path / "out", **options)


def test_a_model_that_cannot_be_had_is_refused(model: Path, tmp_path: Path) -> None:
    """A bundle, a family that graphs do not cover, and a folder without safetensors."""
    export(model, tmp_path / "out", role="target")
    assert "is a bundle already" in refusal(tmp_path / "out", tmp_path / "again")
    strange = model_folder(tmp_path / "strange")
    config = json.loads((strange / "config.json").read_text())
    (strange / "config.json").write_text(json.dumps(config | {"model_type": "olmo2"}))
    with pytest.raises(UnsupportedModel, match="olmo2 cannot be exported to ONNX"):
        export(strange, tmp_path / "again")
    (strange / "model.safetensors").unlink()
    assert "has no *.safetensors" in refusal(strange, tmp_path / "again")


def test_the_weights_are_those_that_the_index_names(model: Path, tmp_path: Path) -> None:
    """Some models carry the same weights once more in another layout; and a shard may be missing."""
    from safetensors.torch import load_file, save_file

    folder = tmp_path / "model"
    shutil.copytree(model, folder)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").rename(folder / "consolidated.safetensors")
    names = sorted(tensors)
    parts = {"a.safetensors": names[:9], "b.safetensors": names[9:]}
    for name, part in parts.items():
        save_file({key: tensors[key] for key in part}, folder / name, metadata={"format": "pt"})
    places = {key: name for name, part in parts.items() for key in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    export(folder, tmp_path / "out", role="target")
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == tensors.keys()
    (folder / "b.safetensors").unlink()
    assert "b.safetensors is missing, but model.safetensors.index.json names it" in refusal(folder, tmp_path / "again")
    (folder / "model.safetensors.index.json").write_text("[]")
    assert "has no weight_map" in refusal(folder, tmp_path / "again")


def test_licences_come_along(tmp_path: Path) -> None:
    """The file, and what the model's card declares."""
    model = model_folder(tmp_path / "model")
    (model / "LICENSE").write_text("Do as you please.")
    (model / "README.md").write_text("---\nlanguage: en\nlicense: apache-2.0\n---\n# A model\nlicense: none\n")
    report = export(model, tmp_path / "out", role="target")
    assert report.manifest.licences == ["apache-2.0", "LICENSE"]
    assert (tmp_path / "out" / "LICENSE").read_text() == "Do as you please."


def test_the_fingerprint_is_of_the_weights(model: Path, tmp_path: Path) -> None:
    """The same for two exports of one model, another when a weight is another."""
    other = tmp_path / "other"
    shutil.copytree(model, other)
    path = other / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    prints = [
        export(folder, tmp_path / name, role="target", dtype=dtype).manifest.model.fingerprint
        for folder, name, dtype in ((model, "a", "float32"), (model, "b", "float16"), (other, "c", "float32"))
    ]
    assert prints[0] == prints[1] != prints[2]


def test_texts_of_the_users_own(model: Path, tmp_path: Path) -> None:
    """Lines with `text` or `prompt`; anything else is refused naming the file."""
    lines = [{"text": "import os\n" * 30}, {"prompt": "def add(a, b):\n" * 20}]
    (tmp_path / "texts.jsonl").write_text("\n".join(map(json.dumps, lines)))
    report = export(model, tmp_path / "out", max_context=64, texts=tmp_path / "texts.jsonl")
    assert 60 < report.manifest.parity["text_positions"] <= 2 * 64
    (tmp_path / "texts.jsonl").write_text('{"prompt": "short"}')
    assert "none becomes 33 tokens or more" in refusal(model, tmp_path / "again", texts=tmp_path / "texts.jsonl")
    (tmp_path / "texts.jsonl").write_text('{"prose": "no"}')
    assert 'each line must be JSON with a "text" or a "prompt"' in refusal(
        model, tmp_path / "again", texts=tmp_path / "texts.jsonl"
    )
