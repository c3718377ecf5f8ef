"""Attention and its KV cache, one class a profile; all that differs between the profiles is here."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Protocol

import numpy as np
from onnx import TensorProto

from paceline.export.graph_family import Decoder, Layer
from paceline.export.graph_masks import Masks
from paceline.export.graph_nodes import Nodes
from paceline.export.graph_parts import Positions, norm, split_heads

NOWHERE = 2**31  # past every position


class Attention(Protocol):
    """What the body asks of a profile."""

    def __call__(self, index: int, layer: Layer, qkv: str) -> str:
        """qkv [batch, tokens, (heads + 2 · kv_heads) · head_dim] → [batch, tokens, heads · head_dim]."""


class Caches:
    """Declares each layer's KV inputs and outputs."""

    def __init__(self, nodes: Nodes, model: Decoder, past: str | int, present: str | int) -> None:
        self._nodes = nodes
        self._past: list[str | int] = ["batch", model.kv_heads, past, model.head_dim]
        self._present: list[str | int] = ["batch", model.kv_heads, present, model.head_dim]
        names = [f"{part}.{index}" for index in range(model.layers) for part in ("key", "value")]
        for name in names:
            nodes.input(name, nodes.dtype, self._past)

    def outputs(self, index: int) -> tuple[str, str]:
        names = f"key_out.{index}", f"value_out.{index}"
        for name in names:
            self._nodes.output(name, self._nodes.dtype, self._present)
        return names


class GroupedQuery:
    """gqa: ONNX Runtime's own operator, which writes the cache in place and reads each row's real length only."""

    def __init__(self, nodes: Nodes, model: Decoder, positions: Positions) -> None:
        self._nodes, self._model, self._positions = nodes, model, positions
        self._caches = Caches(nodes, model, model.max_context, model.max_context)
        one = nodes.constant([1])
        last = nodes.op("Sub", nodes.op("Add", positions.past_lengths, positions.tokens), one)
        self._last = nodes.op("Cast", last, to=TensorProto.INT32)
        longest = nodes.op("ReduceMax", self._last, nodes.constant([0]), keepdims=0)
        self._total = nodes.op("Add", longest, nodes.constant(1, np.int32))
        # The operator turns heads itself where the sizes suit it.
        self._turns = model.head_dim % 16 == 0 and all(rope.width % 16 == 0 for rope in model.ropes)

    def __call__(self, index: int, layer: Layer, qkv: str) -> str:
        nodes, model = self._nodes, self._model
        packed = self._turns and layer.query_norm is None
        query, key, value = (qkv, "", "") if packed else self._separate(layer, qkv)
        cos, sin = self._positions.tables[layer.rope] if self._turns else ("", "")
        key_out, value_out = self._caches.outputs(index)
        if layer.window is not None:
            # In ONNX Runtime before 1.24 a window is one token wider. It refuses this version: better than wrong.
            nodes.ir_version, nodes.least_onnxruntime = 12, "1.24"
        inputs = [query, key, value, f"key.{index}", f"value.{index}", self._last, self._total, cos, sin]
        return nodes.ops(
            "GroupQueryAttention",
            3,
            *(inputs if self._turns else inputs[:-2]),
            domain="com.microsoft",
            named=(f"{nodes.scope}attended", key_out, value_out),
            num_heads=model.heads,
            kv_num_heads=model.kv_heads,
            scale=model.scaling,
            do_rotary=int(self._turns),
            local_window_size=layer.window or -1,
        )[0]

    def _separate(self, layer: Layer, qkv: str) -> list[str]:
        """Query, key and value, normed, turned if the operator can't, each [batch, tokens, heads · head_dim]."""
        nodes = self._nodes
        parts = _normed_heads(nodes, self._model, layer, qkv)
        if not self._turns:
            parts[:2] = [self._positions.turn(part, layer.rope) for part in parts[:2]]
        return [nodes.op("Reshape", part, nodes.constant([0, 0, -1])) for part in parts]


class _Masked(ABC):
    """What the profiles share that are told what may be seen: heads turned, the cache written, then attention."""

    def __init__(self, nodes: Nodes, model: Decoder, positions: Positions, caches: Caches, masks: Masks) -> None:
        self._nodes, self._model, self._positions = nodes, model, positions
        self._caches, self._masks = caches, masks

    def __call__(self, index: int, layer: Layer, qkv: str) -> str:
        query, key, value = _normed_heads(self._nodes, self._model, layer, qkv)
        query, key = (self._positions.turn(heads, layer.rope) for heads in (query, key))
        key_out, value_out = self._caches.outputs(index)
        key = self._written(f"key.{index}", self._heads_first(key), key_out)
        value = self._written(f"value.{index}", self._heads_first(value), value_out)
        return self._attended(query, key, value, layer.window)

    @abstractmethod
    def _written(self, cache: str, new: str, name: str) -> str:
        """The cache with `new` [batch, kv_heads, tokens, dim] in it, as the output `name`."""

    def _attended(self, query: str, key: str, value: str, window: int | None) -> str:
        """query [batch, tokens, heads, dim], key, value [batch, kv_heads, slots, dim] → [batch, tokens, heads · dim].

        The query heads of a KV head are rows of one product, so that no key is copied for each of them.
        """
        nodes, model = self._nodes, self._model
        dim, kv_heads, groups = model.head_dim, model.kv_heads, model.heads // model.kv_heads
        query = nodes.op("Mul", query, nodes.constant(model.scaling, nodes.numpy_dtype))
        query = nodes.op("Reshape", query, nodes.constant([0, 0, kv_heads, groups, dim]))
        query = nodes.op("Transpose", query, perm=[0, 2, 3, 1, 4])
        query = nodes.op("Reshape", query, nodes.constant([0, kv_heads, -1, dim]))
        scores = nodes.op("MatMul", query, nodes.op("Transpose", key, perm=[0, 1, 3, 2]))
        weights = nodes.op("Softmax", nodes.op("Add", scores, self._masks.bias(window)), axis=-1)
        out = nodes.op("MatMul", weights, value)
        out = nodes.op("Reshape", out, nodes.constant([0, kv_heads, groups, -1, dim]))
        out = nodes.op("Transpose", out, perm=[0, 3, 1, 2, 4])
        return nodes.op("Reshape", out, nodes.constant([0, 0, model.heads * dim]))

    def _heads_first(self, value: str) -> str:
        return self._nodes.op("Transpose", value, perm=[0, 2, 1, 3])


class _Static(_Masked):
    """Rows of max_context slots, slot n for position n."""

    def __init__(self, nodes: Nodes, model: Decoder, positions: Positions) -> None:
        caches = Caches(nodes, model, model.max_context, model.max_context)
        slots = nodes.constant(np.arange(model.max_context))
        super().__init__(nodes, model, positions, caches, Masks(nodes, model, positions, slots))


class StaticCompat(_Static):
    """static-compat: written with ScatterElements, attention of plain operators; for every TensorRT from 10.3 on."""

    def __init__(self, nodes: Nodes, model: Decoder, positions: Positions) -> None:
        super().__init__(nodes, model, positions)
        place = nodes.op("Unsqueeze", positions.absolute, nodes.constant([1, 3]))
        everywhere = nodes.constant(np.zeros((1, model.kv_heads, 1, model.head_dim)))
        self._places = nodes.op("Add", place, everywhere)

    def _written(self, cache: str, new: str, name: str) -> str:
        return self._nodes.op("ScatterElements", cache, self._places, new, axis=2, named=name)


class StaticNative(_Static):
    """static-native: opset 24's TensorScatter and Attention, which TensorRT from 10.15 on runs as its own cache."""

    def __init__(self, nodes: Nodes, model: Decoder, positions: Positions) -> None:
        super().__init__(nodes, model, positions)
        nodes.least_onnxruntime = "1.26"

    def _written(self, cache: str, new: str, name: str) -> str:
        start = self._positions.past_lengths
        return self._nodes.op("TensorScatter", cache, new, start, axis=2, mode="linear", named=name)

    def _attended(self, query: str, key: str, value: str, window: int | None) -> str:
        nodes, allowed = self._nodes, self._masks.allowed(window)
        out = nodes.op("Attention", self._heads_first(query), key, value, allowed, scale=self._model.scaling)
        return nodes.op("Reshape", self._heads_first(out), nodes.constant([0, 0, -1]))


class Concatenated(_Masked):
    """concat: new keys and values are appended; past is as long as the longest row, and what a row lacks is masked."""

    def __init__(self, nodes: Nodes, model: Decoder, positions: Positions) -> None:
        caches = Caches(nodes, model, "past", "present")
        past = nodes.op("Gather", nodes.op("Shape", "key.0"), nodes.constant(2), axis=0)
        slots = nodes.op("Range", nodes.constant(0), past, nodes.constant(1))
        held = nodes.op("Less", slots, nodes.op("Unsqueeze", positions.past_lengths, nodes.constant([1])))
        old = nodes.op("Where", held, slots, nodes.constant(NOWHERE))
        slots = nodes.op("Unsqueeze", nodes.op("Concat", old, positions.absolute, axis=1), nodes.constant([1, 2]))
        super().__init__(nodes, model, positions, caches, Masks(nodes, model, positions, slots))

    def _written(self, cache: str, new: str, name: str) -> str:
        return self._nodes.op("Concat", cache, new, axis=2, named=name)


def _normed_heads(nodes: Nodes, model: Decoder, layer: Layer, qkv: str) -> list[str]:
    """Query, key and value, each [batch, tokens, heads, head_dim], normed where the family norms heads."""
    parts = split_heads(nodes, model, qkv)
    for index, (name, gain) in enumerate((("query_norm", layer.query_norm), ("key_norm", layer.key_norm))):
        if gain is not None:
            parts[index] = nodes.narrow(norm(nodes, nodes.single(parts[index]), name, gain, model.epsilon))
    return parts
