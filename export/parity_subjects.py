"""The two sides of a parity check: torch's packed forward, and a graph in onnxruntime; both show their KV."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from paceline.core.errors import UserError
from paceline.core.lm.model import LanguageModel
from paceline.core.manifest import Profile
from paceline.core.model import Segment, Span
from paceline.edge.runtimes.base import Top, top_of
from paceline.export.parity_cases import Feed

Floats = NDArray[np.float32]


class Subject(Protocol):
    """What is compared: rows of KV, steps over neighbouring rows, candidates of the asked tokens."""

    name: str

    def step(self, feeds: Sequence[Feed]) -> Top:
        """[len(feeds), 64] candidates by falling logit."""

    def kv(self, layer: int, row: int, start: int, stop: int) -> tuple[Floats, Floats]:
        """Keys and values [stop - start, kv_heads, head_dim] that the row holds."""


class TorchSubject:
    """A model of transformers over the KV arena."""

    def __init__(self, model: LanguageModel, *, rows: int, max_context: int, vocabulary_size: int) -> None:
        self.name = f"torch {str(model.arena.kv.dtype).removeprefix('torch.')}"
        self.vocabulary_size = vocabulary_size
        self._model = model
        self._spans = [self._span(max_context) for _ in range(rows)]

    def _span(self, length: int) -> Span:
        span = self._model.allocate(length)
        assert span is not None, "the arena was made for these rows"
        return span

    def logits(self, feeds: Sequence[Feed]) -> list[Floats]:
        """Logits [tokens, vocabulary_size] of every token of each feed."""
        segments = [Segment(self._spans[f.row], f.start, f.tokens, len(f.tokens)) for f in feeds]
        rows = self._model.forward(segments)[:, : self.vocabulary_size].float().numpy()
        return np.split(rows, np.cumsum([len(f.tokens) for f in feeds])[:-1])

    def step(self, feeds: Sequence[Feed]) -> Top:
        every = self.logits(feeds)
        return top_of(np.stack([logits[f.asked] for logits, f in zip(every, feeds, strict=True)]))

    def kv(self, layer: int, row: int, start: int, stop: int) -> tuple[Floats, Floats]:
        first = self._spans[row].first
        keys, values = self._model.arena.kv[layer, first + start : first + stop].float().unbind(1)
        return keys.numpy(), values.numpy()


class Shape(NamedTuple):
    """KV of a graph."""

    layers: int
    kv_heads: int
    max_context: int
    head_dim: int
    dtype: np.dtype[Any]


class GraphSubject:
    """A graph in onnxruntime on the CPU. KV is bound in place, except where the graph appends to it (`concat`)."""

    def __init__(self, path: Path, profile: Profile, shape: Shape, *, rows: int) -> None:
        import onnxruntime

        self.name = f"onnxruntime {onnxruntime.__version__} on the CPU"
        self._appends = profile == "concat"
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # torch computes in between
        try:
            self._session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        except Exception as error:  # onnxruntime's own exceptions have no common base
            needs = "; it needs onnxruntime 1.25 or newer" if profile == "static-native" else ""
            raise UserError(
                f"onnxruntime {onnxruntime.__version__} cannot run this {profile} graph, so it is not checked{needs}:"
                f" {str(error).splitlines()[0]}"
            ) from error
        self._width = next(o.shape[1] for o in self._session.get_outputs() if o.name == "top_logits")
        size = (rows, shape.kv_heads, shape.max_context, shape.head_dim)
        names = [f"{kind}.{layer}" for layer in range(shape.layers) for kind in ("key", "value")]
        # Not zeros: what lies in slots that nothing was written to must not matter.
        self._kv = {name: np.full(size, 7, shape.dtype) for name in names}

    def step(self, feeds: Sequence[Feed]) -> Top:
        first, count = feeds[0].row, len(feeds)
        assert [f.row for f in feeds] == list(range(first, first + count)), "a batch is neighbouring rows"
        width = max(len(f.tokens) for f in feeds)
        inputs = {
            "input_ids": np.array([[*f.tokens, *[0] * (width - len(f.tokens))] for f in feeds], np.int64),
            "past_lengths": np.array([f.start for f in feeds], np.int64),
            "logit_idx": np.array([f.asked for f in feeds], np.int64),
        }
        logits, ids = (self._append if self._appends else self._in_place)(inputs, feeds, slice(first, first + count))
        return Top(ids, logits)

    def _in_place(self, inputs: dict[str, Any], feeds: Sequence[Feed], rows: slice) -> tuple[Any, Any]:
        binding = self._session.io_binding()
        for name, array in inputs.items():
            binding.bind_cpu_input(name, array)
        for name, array in self._kv.items():
            part = array[rows]
            place = ("cpu", 0, part.dtype, part.shape, part.ctypes.data)
            binding.bind_input(name, *place)
            binding.bind_output(_output(name), *place)
        count, width = len(feeds), self._width
        logits, ids = np.empty((count, width), np.float32), np.empty((count, width), np.int64)
        for name, array in (("top_logits", logits), ("top_ids", ids)):
            binding.bind_output(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
        self._session.run_with_iobinding(binding)
        return logits, ids

    def _append(self, inputs: dict[str, Any], feeds: Sequence[Feed], rows: slice) -> tuple[Any, Any]:
        """New entries come at the end of the longest past, and go to each row's own place."""
        past = max(f.start for f in feeds)
        given = {name: np.ascontiguousarray(array[rows, :, :past]) for name, array in self._kv.items()}
        names = [output.name for output in self._session.get_outputs()]
        found = dict(zip(names, self._session.run(names, inputs | given), strict=True))
        for name, array in self._kv.items():
            new = found[_output(name)]
            for index, f in enumerate(feeds):
                array[f.row, :, f.start : f.stop] = new[index, :, past : past + len(f.tokens)]
        return found["top_logits"], found["top_ids"]

    def kv(self, layer: int, row: int, start: int, stop: int) -> tuple[Floats, Floats]:
        keys, values = (self._kv[f"{kind}.{layer}"][row, :, start:stop] for kind in ("key", "value"))
        return keys.swapaxes(0, 1).astype(np.float32), values.swapaxes(0, 1).astype(np.float32)


def _output(name: str) -> str:
    """key.3 → key_out.3."""
    kind, _, layer = name.partition(".")
    return f"{kind}_out.{layer}"
