"""Which slots of the cache each token may see, for attention that is told so."""

from __future__ import annotations

from onnx import TensorProto

from paceline.export.graph_family import Decoder
from paceline.export.graph_nodes import Nodes
from paceline.export.graph_parts import Positions


class Masks:
    """One mask for each window, made when a layer first asks for it.

    slots: int64, the position of what lies in each slot, broadcasts to [batch, 1, tokens, slots]; past every position
    where nothing lies. A token sees its own position and those before it, in a window the last `window` of these.
    """

    def __init__(self, nodes: Nodes, model: Decoder, positions: Positions, slots: str) -> None:
        self._nodes, self._positions, self._slots = nodes, positions, slots
        self._groups = model.heads // model.kv_heads
        self._allowed: dict[int | None, str] = {}
        self._bias: dict[int | None, str] = {}

    def allowed(self, window: int | None) -> str:
        """bool [batch, 1, tokens, slots]."""
        if window not in self._allowed:
            nodes = self._nodes
            with nodes.at(f"mask.{window or 'all'}/"):
                position = nodes.op("Unsqueeze", self._positions.absolute, nodes.constant([1, 3]))
                seen = nodes.op("LessOrEqual", self._slots, position)
                if window is not None:
                    outside = nodes.op("Sub", position, nodes.constant(window))
                    seen = nodes.op("And", seen, nodes.op("Greater", self._slots, outside))
            self._allowed[window] = seen
        return self._allowed[window]

    def bias(self, window: int | None) -> str:
        """The same as what is added to scores, repeated for a group's heads: [batch, 1, groups · tokens, slots]."""
        if window not in self._bias:
            nodes = self._nodes
            allowed = self.allowed(window)
            least = -65504.0 if nodes.dtype == TensorProto.FLOAT16 else -3e38
            zero, never = (nodes.constant(value, nodes.numpy_dtype) for value in (0.0, least))
            with nodes.at(f"mask.{window or 'all'}/"):
                bias = nodes.op("Where", allowed, zero, never)
                self._bias[window] = nodes.op("Concat", *[bias] * self._groups, axis=2) if self._groups > 1 else bias
        return self._bias[window]
