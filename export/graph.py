"""From a Hugging Face folder to the graph of a drafter: `build`.

The graph is written node by node over one description of a decoder, not traced: so it holds what a drafter needs (the
likeliest tokens of one asked position a row, a KV cache of a fixed layout) and nothing else, in four profiles.

Inputs    input_ids int64 [batch, tokens], right-padded with any valid id; past_lengths int64 [batch], a row's tokens
          in the cache, so its first new token's place; logit_idx int64 [batch], the new token whose successor is
          asked for; key.{i}, value.{i} for each layer, any finite numbers where nothing was written yet
Outputs   top_logits float32 [batch, 64] descending, top_ids int64 [batch, 64] (fewer in a smaller vocabulary);
          key_out.{i}, value_out.{i}

| profile       | opset | cache [batch, kv_heads, …, head_dim]                     | runs on                           |
|---------------|-------|----------------------------------------------------------|-----------------------------------|
| gqa           | 18    | rows of max_context, in place; batch > 1: 1 token a step | ONNX Runtime, windows from 1.24   |
| static-compat | 18    | rows of max_context, in place                            | TensorRT from 10.3, ONNX Runtime  |
| static-native | 24    | rows of max_context, in place; no padding past the end   | TensorRT from 10.15 (half types), |
|               |       |                                                          | ONNX Runtime from 1.26            |
| concat        | 18    | past → past + tokens                                     | anything                          |

Weights and products are of `dtype`; norms, the sum that runs through the layers, and logits are float32, which is why
a float16 graph is nearer to float32 than transformers' own float16.

To add a family: read its modeling file beside transformers' Llama. (1) What differs must be data in `Layer` or
`Decoder` (graph_family.py), read off the module there: weights under other names in `layers`, a constant in
`describe`. (2) A new operation goes into `_layer` below under a field that is None for the others. (3) Only a new kind
of attention touches graph_attention.py, once a profile. (4) Add its `model_type` to FAMILIES and a small
random model to tests/export/graph_models.py: every (family × profile) is then checked against transformers itself.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from onnx import TensorProto

from paceline.core.errors import UserError
from paceline.core.lm.loading import check_family, load
from paceline.export import graph_family
from paceline.export.graph_attention import Attention, Concatenated, GroupedQuery, StaticCompat, StaticNative
from paceline.export.graph_family import Decoder, Layer, Linear
from paceline.export.graph_nodes import SINGLE, TYPES, Nodes
from paceline.export.graph_parts import Positions, norm

Profile = Literal["gqa", "static-compat", "static-native", "concat"]
PROFILES: tuple[Profile, ...] = get_args(Profile)
OPSETS: dict[Profile, int] = {"gqa": 18, "static-compat": 18, "static-native": 24, "concat": 18}
ATTENTIONS: dict[Profile, Callable[[Nodes, Decoder, Positions], Attention]] = {
    "gqa": GroupedQuery, "static-compat": StaticCompat, "static-native": StaticNative, "concat": Concatenated,
}  # fmt: skip
TOP = 64


@dataclass(frozen=True)
class GraphInfo:
    """What was built; sizes as in the manifest. `files`: names in the bundle."""

    path: Path
    files: tuple[str, ...]
    profile: Profile
    dtype: str
    opset: int
    family: str
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary_size: int
    max_context: int
    top_k: int
    rows: Literal["any", "contiguous"]
    multi_token_batch: bool
    least_onnxruntime: str  # older ones refuse the graph


def build(
    model_dir: str | Path,
    out_dir: str | Path,
    *,
    profile: Profile = "gqa",
    dtype: str = "float32",
    max_context: int | None = None,
    vocabulary_size: int | None = None,
) -> GraphInfo:
    """Writes model.onnx and model.onnx.data of the model into `out_dir`, which must exist.

    max_context: slots of a row and length of the rope tables; default is the model's own. vocabulary_size: the
    tokenizer's, where the model's rows have a padded tail; the tail never comes out. Raises UserError for what is
    missing or wrong, UnsupportedModel for a family that is not in `graph_family.FAMILIES`.
    """
    module = load(model_dir, dtype="float32", kv_slots=256, max_context=max_context, fused=False).module
    return write(module, Path(out_dir), profile, dtype, max_context, vocabulary_size)


def write(
    module: Any,
    folder: Path,
    profile: Profile,
    dtype: str = "float32",
    max_context: int | None = None,
    vocabulary_size: int | None = None,
) -> GraphInfo:
    """As `build`, for a transformers module in memory, in float32 on the CPU."""
    config = module.config
    graph_family.check(config)
    check_family(config, max_context)
    if profile not in PROFILES:
        raise UserError(f"profile {profile} is not known: use {', '.join(PROFILES)}")
    if dtype not in TYPES:
        raise UserError(f"dtype {dtype} cannot be exported: use {', '.join(TYPES)}")
    context = max_context or config.max_position_embeddings
    model = graph_family.describe(module, context, min(vocabulary_size or config.vocab_size, config.vocab_size))
    with Nodes(folder / "model.onnx", dtype, OPSETS[profile], fused=profile == "gqa") as nodes:
        _decoder(nodes, model, module, profile)
        nodes.save(importlib.metadata.version("paceline"))
    return GraphInfo(
        path=nodes.path,
        files=(nodes.path.name, nodes.path.name + ".data"),
        profile=profile,
        dtype=dtype,
        opset=nodes.opset,
        family=model.family,
        layers=model.layers,
        heads=model.heads,
        kv_heads=model.kv_heads,
        head_dim=model.head_dim,
        vocabulary_size=model.vocabulary_size,
        max_context=context,
        top_k=min(TOP, model.vocabulary_size),
        rows="any" if profile == "concat" else "contiguous",
        multi_token_batch=profile != "gqa",
        least_onnxruntime=nodes.least_onnxruntime,
    )


def _decoder(nodes: Nodes, model: Decoder, module: Any, profile: Profile) -> None:
    input_ids = nodes.input("input_ids", TensorProto.INT64, ["batch", "tokens"])
    past_lengths = nodes.input("past_lengths", TensorProto.INT64, ["batch"])
    logit_idx = nodes.input("logit_idx", TensorProto.INT64, ["batch"])
    with nodes.at("positions/"):
        positions = Positions(nodes, model, input_ids, past_lengths, clamped=profile == "static-compat")
        asked = nodes.op("Unsqueeze", logit_idx, nodes.constant([1]))
        attention = ATTENTIONS[profile](nodes, model, positions)
    embedding = nodes.weight("embedding", model.embedding)
    x = nodes.single(nodes.op("Gather", embedding, positions.ids, axis=0))
    if model.embedding_scale != 1:
        x = nodes.op("Mul", x, nodes.constant(model.embedding_scale, np.float32))
    for index, layer in enumerate(graph_family.layers(module, model.max_context)):
        with nodes.at(f"layer.{index}/"):
            x = _layer(nodes, model, layer, index, x, attention, asked if index == model.layers - 1 else None)
    with nodes.at("head/"):
        _head(nodes, model, x, embedding)


def _layer(
    nodes: Nodes, model: Decoder, layer: Layer, index: int, x: str, attention: Attention, asked: str | None
) -> str:
    """x float32 [batch, tokens, hidden] → the same; [batch, hidden] where only the asked tokens go on."""
    normed = nodes.narrow(norm(nodes, x, "norm", layer.norm, model.epsilon))
    attended = attention(index, layer, _linear(nodes, normed, "qkv", layer.qkv))
    if asked is not None:
        # Nobody reads the last layer's other tokens: their keys and values are written.
        x, attended = (nodes.op("GatherND", value, asked, batch_dims=1) for value in (x, attended))
    block = nodes.single(_linear(nodes, attended, "output", layer.output))
    if layer.after_attention_norm is not None:
        block = norm(nodes, block, "after_attention_norm", layer.after_attention_norm, model.epsilon)
    x = nodes.op("Add", x, block)
    normed = nodes.narrow(norm(nodes, x, "mlp_norm", layer.mlp_norm, model.epsilon))
    sizes = nodes.constant([layer.gate_up.weight.shape[1] // 2] * 2)
    gate, up = nodes.ops("Split", 2, _linear(nodes, normed, "gate_up", layer.gate_up), sizes, axis=-1)
    block = nodes.op("Mul", _activated(nodes, model, gate), up)
    block = nodes.single(_linear(nodes, block, "down", layer.down))
    if layer.after_mlp_norm is not None:
        block = norm(nodes, block, "after_mlp_norm", layer.after_mlp_norm, model.epsilon)
    return nodes.op("Add", x, block)


def _head(nodes: Nodes, model: Decoder, x: str, embedding: str) -> None:
    """x float32 [batch, hidden] → the outputs top_logits and top_ids."""
    normed = nodes.narrow(norm(nodes, x, "norm", model.final_norm, model.epsilon))
    if model.head is not None:
        head = nodes.weight("weight", model.head)
    elif nodes.fused:  # a weight of its own, for what quantises and packs products for the CPU
        head = nodes.weight("weight", model.embedding.T)
    else:
        head = nodes.op("Transpose", embedding, perm=[1, 0])
    logits = nodes.single(nodes.op("MatMul", normed, head))
    if model.logit_softcap is not None:
        cap = nodes.constant(model.logit_softcap, np.float32)
        logits = nodes.op("Mul", nodes.op("Tanh", nodes.op("Div", logits, cap)), cap)
    top = min(TOP, model.vocabulary_size)
    named = ("top_logits", "top_ids")
    nodes.ops("TopK", 2, logits, nodes.constant([top]), axis=-1, largest=1, sorted=1, named=named)
    nodes.output("top_logits", SINGLE, ["batch", top])
    nodes.output("top_ids", TensorProto.INT64, ["batch", top])


def _linear(nodes: Nodes, value: str, name: str, linear: Linear) -> str:
    product = nodes.op("MatMul", value, nodes.weight(f"{name}.weight", linear.weight))
    if linear.bias is None:
        return product
    return nodes.op("Add", product, nodes.weight(f"{name}.bias", linear.bias))


def _activated(nodes: Nodes, model: Decoder, gate: str) -> str:
    if model.activation == "silu":
        return nodes.op("Mul", gate, nodes.op("Sigmoid", gate))
    if nodes.fused:
        return nodes.op("FastGelu", gate, domain="com.microsoft")
    dtype = nodes.numpy_dtype
    cube = nodes.op("Mul", nodes.op("Mul", gate, gate), gate)
    inner = nodes.op("Add", gate, nodes.op("Mul", cube, nodes.constant(0.044715, dtype)))
    tanh = nodes.op("Tanh", nodes.op("Mul", inner, nodes.constant((2 / np.pi) ** 0.5, dtype)))
    half = nodes.op("Mul", gate, nodes.constant(0.5, dtype))
    return nodes.op("Mul", half, nodes.op("Add", tanh, nodes.constant(1.0, dtype)))
