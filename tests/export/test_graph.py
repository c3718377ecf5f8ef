"""What a graph file holds besides right numbers: names, shapes, types, versions, weights; and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("onnxruntime")
pytest.importorskip("transformers")

import onnx
from onnx import TensorProto
from onnx.external_data_helper import ExternalDataInfo, uses_external_data

from paceline.core.errors import UnsupportedModel, UserError
from paceline.export.graph import PROFILES, Profile, build, write

from .graph_models import CONTEXT, MODELS, ROWS, TOKENIZER, make

DRAFTER = Path(__file__).parents[2] / "models" / "tiny-drafter"


def graph(path: Path) -> Any:
    """The model without its weights."""
    return onnx.load(path, load_external_data=False)


def shapes(values: Any) -> dict[str, tuple[int, list[str | int]]]:
    """Name → (element type, dimensions) of a graph's inputs or outputs."""
    return {
        value.name: (
            value.type.tensor_type.elem_type,
            [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim],
        )
        for value in values
    }


@pytest.mark.parametrize("profile", PROFILES)
def test_inputs_and_outputs_are_the_contract(profile: Profile, tmp_path: Path) -> None:
    """Runtimes bind by these names, types and shapes."""
    info = write(make("qwen3"), tmp_path, profile, "float16", CONTEXT, TOKENIZER)
    half, long = TensorProto.FLOAT16, TensorProto.INT64
    past, present = ("past", "present") if profile == "concat" else (CONTEXT, CONTEXT)
    names = [f"{part}{{}}.{layer}" for layer in range(2) for part in ("key", "value")]
    content = graph(info.path).graph
    assert shapes(content.input) == {
        "input_ids": (long, ["batch", "tokens"]),
        "past_lengths": (long, ["batch"]),
        "logit_idx": (long, ["batch"]),
        **{name.format(""): (half, ["batch", 2, past, 32]) for name in names},
    }
    assert shapes(content.output) == {
        "top_logits": (TensorProto.FLOAT, ["batch", 64]),
        "top_ids": (long, ["batch", 64]),
        **{name.format("_out"): (half, ["batch", 2, present, 32]) for name in names},
    }
    assert info.rows == ("any" if profile == "concat" else "contiguous")
    assert info.multi_token_batch == (profile != "gqa")
    assert (info.vocabulary_size, info.max_context, info.top_k) == (TOKENIZER, CONTEXT, 64)
    assert (info.layers, info.heads, info.kv_heads, info.head_dim) == (2, 6, 2, 32)


@pytest.mark.parametrize("profile", ["static-compat", "static-native", "concat"])
@pytest.mark.parametrize("name", MODELS)
def test_standard_profiles_pass_onnx_own_checker(name: str, profile: Profile, tmp_path: Path) -> None:
    """Only operators of the opset that the file declares, with attributes and types that fit."""
    info = write(make(name), tmp_path, profile, "bfloat16", CONTEXT)
    onnx.checker.check_model(info.path, full_check=True)
    content = graph(info.path)
    assert {entry.domain: entry.version for entry in content.opset_import} == {"": info.opset}
    assert info.opset == (24 if profile == "static-native" else 18)
    assert content.ir_version == (12 if profile == "static-native" else 8)


@pytest.mark.parametrize(("name", "least"), [("llama", "1.20"), ("mistral", "1.24")])
def test_old_onnxruntime_refuses_windows(name: str, least: str, tmp_path: Path) -> None:
    """Before 1.24 it makes windows one wider: such a graph has the file version that it does not load."""
    info = write(make(name), tmp_path, "gqa", "float32", CONTEXT)
    assert info.least_onnxruntime == least
    assert graph(info.path).ir_version == (8 if least == "1.20" else 12)
    # A window that no row outgrows is none.
    assert write(make("mistral"), tmp_path, "gqa", "float32", 13).least_onnxruntime == "1.20"


@pytest.mark.parametrize("profile", PROFILES)
def test_weights_are_apart_aligned_and_narrow(profile: Profile, tmp_path: Path) -> None:
    """Weights lie in model.onnx.data in the graph's dtype, norms in float32; nothing overlaps, nothing is missing."""
    info = write(make("gemma3_text"), tmp_path, profile, "float16", CONTEXT, TOKENIZER)
    data = (tmp_path / "model.onnx.data").stat().st_size
    end = 0
    for tensor in graph(info.path).graph.initializer:
        if "norm" in tensor.name:
            assert tensor.data_type == TensorProto.FLOAT, tensor.name
        elif "weight" in tensor.name or tensor.name == "embedding":
            assert tensor.data_type == TensorProto.FLOAT16, tensor.name
        if uses_external_data(tensor):
            place = ExternalDataInfo(tensor)
            assert place.location == "model.onnx.data"
            assert place.offset % 65536 == 0
            assert place.offset >= end
            end = place.offset + place.length
    assert end == data
    assert info.files == ("model.onnx", "model.onnx.data")


def test_tied_weights_are_stored_once_but_for_the_cpu(tmp_path: Path) -> None:
    """The embedding is the head; where the head is quantised or packed for the CPU it is a matrix of its own."""
    names = {}
    for profile in PROFILES:
        write(make("llama-tied"), tmp_path, profile, "float32", CONTEXT, TOKENIZER)
        tensors = graph(tmp_path / "model.onnx").graph.initializer
        names[profile] = {tensor.name: list(tensor.dims) for tensor in tensors}
        assert names[profile]["embedding"] == [TOKENIZER, 48]
    assert names["gqa"]["head/weight"] == [48, TOKENIZER]
    assert all("head/weight" not in names[profile] for profile in PROFILES[1:])


def test_the_head_sees_asked_tokens_only(tmp_path: Path) -> None:
    """After the last layer's attention one token a row goes on: its output, MLP and the vocabulary cost no more."""
    info = write(make("llama"), tmp_path, "concat", "float32", CONTEXT)
    inferred = onnx.shape_inference.infer_shapes(onnx.load(info.path))
    found = shapes(inferred.graph.value_info)
    (logits,) = (shape for _, shape in found.values() if shape[-1:] == [ROWS])
    assert logits == ["batch", ROWS]
    assert len([1 for node in inferred.graph.node if node.op_type == "GatherND"]) == 2


def test_built_from_a_folder(tmp_path: Path) -> None:
    """The embedded drafter, read from its folder; without a context of its own it gets the model's."""
    info = build(DRAFTER, tmp_path, profile="gqa", vocabulary_size=2048)
    assert (info.family, info.layers, info.heads, info.kv_heads, info.head_dim) == ("llama", 1, 6, 2, 32)
    assert (info.max_context, info.vocabulary_size) == (8192, 2048)
    operators = [node.op_type for node in graph(info.path).graph.node]
    assert operators.count("GroupQueryAttention") == 1
    assert operators.count("MatMul") == 5  # projections, output, gate and up, down, head


def test_small_vocabularies_give_all_they_have(tmp_path: Path) -> None:
    """Fewer tokens than 64 come out, sorted, where there are no more."""
    info = write(make("llama"), tmp_path, "gqa", "float32", CONTEXT, 40)
    assert info.top_k == 40
    assert shapes(graph(info.path).graph.output)["top_ids"] == (TensorProto.INT64, ["batch", 40])


def test_what_cannot_be_exported_is_refused_in_words(tmp_path: Path) -> None:
    """A family, an activation, a profile, a dtype, a context: each by name, with what there is."""
    import transformers

    def config(family: str, **settings: Any) -> Any:
        module = make("llama")
        module.config = transformers.AutoConfig.for_model(family, **settings)
        return module

    with pytest.raises(UnsupportedModel, match="gpt2 cannot be exported to ONNX; these families can: llama, mistral"):
        write(config("gpt2"), tmp_path, "gqa")
    with pytest.raises(UnsupportedModel, match="llama: activation relu cannot be exported; known are silu"):
        write(config("llama", hidden_act="relu"), tmp_path, "gqa")
    with pytest.raises(UserError, match="profile paged is not known: use gqa, static-compat, static-native, concat"):
        write(make("llama"), tmp_path, "paged")  # type: ignore[arg-type]
    with pytest.raises(UserError, match="dtype int8 cannot be exported: use float32, float16, bfloat16"):
        write(make("llama"), tmp_path, "gqa", "int8")
    with pytest.raises(UserError, match="max_context 513 is more than this llama model's 512 positions"):
        write(make("llama"), tmp_path, "gqa", max_context=513)
    with pytest.raises(UnsupportedModel, match=r"longrope rope depends on the longest session .* max_context up to 64"):
        write(make("phi3-longrope"), tmp_path, "gqa")
    with pytest.raises(UserError, match=r"no model at .*nowhere"):
        build(tmp_path / "nowhere", tmp_path)
    assert not list(tmp_path.iterdir())
