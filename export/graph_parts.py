"""Pieces of a decoder that its body and its attention share: norms, positions and rotary embedding, heads."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.export.graph_family import Decoder
from paceline.export.graph_nodes import SINGLE, Nodes


def norm(nodes: Nodes, value: str, name: str, gain: NDArray[Any], epsilon: float) -> str:
    """RMS norm over the last axis, float32 in and out."""
    weight = nodes.weight(name, gain, SINGLE)
    if nodes.fused:
        return nodes.op("SimplifiedLayerNormalization", value, weight, axis=-1, epsilon=epsilon, stash_type=1)
    square = nodes.op("Pow", value, nodes.constant(2.0, np.float32))
    mean = nodes.op("ReduceMean", square, nodes.constant([-1]), keepdims=1)
    root = nodes.op("Sqrt", nodes.op("Add", mean, nodes.constant(epsilon, np.float32)))
    return nodes.op("Mul", nodes.op("Div", value, root), weight)


def split_heads(nodes: Nodes, model: Decoder, qkv: str) -> list[str]:
    """qkv [batch, tokens, (heads + 2 · kv_heads) · dim] → query, key, value, each [batch, tokens, heads, dim]."""
    heads = nodes.op("Reshape", qkv, nodes.constant([0, 0, -1, model.head_dim]))
    return nodes.ops("Split", 3, heads, nodes.constant([model.heads, model.kv_heads, model.kv_heads]), axis=2)


class Positions:
    """Where this step's tokens stand, and turning heads by it. What a profile does not ask for is not computed.

    clamped: a padding token that would stand past the last slot becomes a second copy of the token in it, id and
    position, so that it writes nothing new.
    """

    def __init__(self, nodes: Nodes, model: Decoder, input_ids: str, past_lengths: str, clamped: bool) -> None:
        self._nodes, self._model, self._input_ids, self._clamped = nodes, model, input_ids, clamped
        self.past_lengths = past_lengths
        self._rows: dict[int, tuple[str, str]] = {}

    @cached_property
    def tokens(self) -> str:
        """int64 [1]: the width of the step."""
        nodes = self._nodes
        return nodes.op("Gather", nodes.op("Shape", self._input_ids), nodes.constant([1]), axis=0)

    @cached_property
    def ids(self) -> str:
        """int64 [batch, tokens]: what the embedding looks up."""
        if not self._clamped:
            return self._input_ids
        index = self._nodes.op("Sub", self._in_table, self._past)
        return self._nodes.op("GatherElements", self._input_ids, index, axis=1)

    @cached_property
    def absolute(self) -> str:
        """int64 [batch, tokens]: past length + index."""
        return self._in_table if self._clamped else self._unclamped

    @cached_property
    def tables(self) -> list[tuple[str, str]]:
        """cos and sin of each rope, [max_context, width / 2]."""
        weight, ropes = self._nodes.weight, self._model.ropes
        with self._nodes.at("positions/"):
            return [(weight(f"cos.{i}", rope.cos), weight(f"sin.{i}", rope.sin)) for i, rope in enumerate(ropes)]

    def turn(self, heads: str, rope: int) -> str:
        """heads [batch, tokens, heads, dim] with their first `width` elements turned; the halves are pairs."""
        nodes, dim, width = self._nodes, self._model.head_dim, self._model.ropes[rope].width
        cos, sin = self._row(rope)
        sizes = [width // 2, width // 2, *([dim - width] if width < dim else [])]
        first, second, *rest = nodes.ops("Split", len(sizes), heads, nodes.constant(sizes), axis=3)
        turned = (
            nodes.op("Sub", nodes.op("Mul", first, cos), nodes.op("Mul", second, sin)),
            nodes.op("Add", nodes.op("Mul", second, cos), nodes.op("Mul", first, sin)),
        )
        return nodes.op("Concat", *turned, *rest, axis=3)

    @cached_property
    def _past(self) -> str:
        return self._nodes.op("Unsqueeze", self.past_lengths, self._nodes.constant([1]))

    @cached_property
    def _unclamped(self) -> str:
        nodes = self._nodes
        width = nodes.op("Squeeze", self.tokens, nodes.constant([0]))
        return nodes.op("Add", self._past, nodes.op("Range", nodes.constant(0), width, nodes.constant(1)))

    @cached_property
    def _in_table(self) -> str:
        """No position is looked up past the end of the tables."""
        return self._nodes.op("Min", self._unclamped, self._nodes.constant(self._model.max_context - 1))

    def _row(self, rope: int) -> tuple[str, str]:
        """This step's cos and sin, [batch, tokens, 1, width / 2]; looked up once."""
        if rope not in self._rows:
            nodes = self._nodes
            with nodes.at("positions/"):
                cos, sin = (
                    nodes.op("Unsqueeze", nodes.op("Gather", table, self._in_table, axis=0), nodes.constant([2]))
                    for table in self.tables[rope]
                )
            self._rows[rope] = cos, sin
        return self._rows[rope]
