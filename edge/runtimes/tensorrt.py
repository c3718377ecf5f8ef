"""The TensorRT runtime: steps over windows of KV rows, written in place, each shape replayed as one CUDA graph.

A step is one copy to the device (ids, lengths, positions of the wanted rows), one run of the engine, one copy back
(the top 64). A shape's first step runs as it comes, its second is recorded, and from then on it is one launch.
The bundle's KV is one buffer: key.0, value.0, key.1, … each `[rows, kv_heads, max_context, head_dim]`.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from paceline.core.errors import PacelineError, UserError
from paceline.core.manifest import Manifest
from paceline.core.model import Segment, Span
from paceline.edge.runtimes.base import TOP, Top
from paceline.edge.runtimes.bundle import open_bundle, rows_within
from paceline.edge.runtimes.cuda import Cuda
from paceline.edge.runtimes.tensorrt_engine import TensorRtEngine
from paceline.edge.runtimes.tensorrt_library import (
    device_index,
    find_engine,
    graph_checksum,
    import_library,
    key_here,
    library_of,
)
from paceline.edge.runtimes.tensorrt_memory import KvRows, StepMemory, StepView
from paceline.edge.runtimes.tensorrt_parts import Context, Device, Engine, Graph
from paceline.edge.runtimes.tensorrt_steps import Step, steps_of

log = logging.getLogger(__name__)

MOST_GRAPHS = 32  # shapes and windows in use at once; the least recently used one makes room


def load(
    folder: str | Path,
    *,
    device: str = "cuda:0",
    max_context: int | None = None,
    max_sessions: int | None = None,
    kv_memory: int | None = None,
) -> TensorRtRuntime:
    """The runtime of a bundle made for tensorrt, with the engine that was built on this machine.

    max_context, max_sessions: default what the bundle was made for. kv_memory: bytes. UserError for what does not fit,
    and with the command that builds the engine where there is none.
    """
    folder = Path(folder)
    manifest = open_bundle(folder, "tensorrt", max_context=max_context, max_sessions=max_sessions)
    rows = rows_within(manifest, max_sessions or manifest.max_sessions, kv_memory)
    engine, cuda = open_engine(folder, manifest, device)
    return TensorRtRuntime(manifest, engine, cuda, rows=rows, name=str(folder), max_context=max_context)


def open_engine(folder: Path, manifest: Manifest, device: str) -> tuple[TensorRtEngine, Cuda]:
    """The engine of this machine in a bundle whose files were checked, and the device with a stream for it."""
    library = library_of(manifest)
    trt = import_library(library)
    cuda = Cuda(device_index(device))
    here = key_here(library, trt.__version__, cuda.architecture, graph_checksum(manifest))
    return TensorRtEngine(trt, find_engine(folder, manifest, here), cuda), cuda


class TensorRtRuntime:
    """A drafter bundle's engine over `rows` KV rows, one of them to move others through.

    max_context: of a session; default what the bundle was made for. graphs: whether repeated shapes become CUDA graphs.
    """

    rows: Literal["any", "contiguous"] = "contiguous"
    multi_token_batch = True
    forks = False

    def __init__(
        self,
        manifest: Manifest,
        engine: Engine,
        device: Device,
        *,
        rows: int,
        name: str = "",
        max_context: int | None = None,
        graphs: bool = True,
    ) -> None:
        self.name = name or manifest.model.name
        self.vocabulary_size = manifest.vocabulary_size
        self.max_context = max_context or manifest.max_context
        self.kv_slots = rows * self.max_context
        self.graphs = graphs
        self._engine = engine
        self._device = device
        self._top = manifest.top_k
        self._row_tokens = manifest.max_context  # what a row has room for
        self._kv = KvRows(manifest, rows, device)
        expected = {"input_ids", "past_lengths", "logit_idx", *self._kv.inputs}
        if engine.inputs != expected:
            differing = ", ".join(sorted(engine.inputs ^ expected))
            raise UserError(f"the engine of {self.name} is not of this bundle's graph: they differ in {differing}")
        largest = max(profile.rows * profile.tokens for profile in engine.profiles)
        most_rows = max(profile.rows for profile in engine.profiles)
        self._memory = StepMemory(device, largest, most_rows, self._top)
        self._contexts: dict[int, Shape] = {}  # by profile, for what is not worth a graph
        self._shapes: OrderedDict[tuple[int, int, int], Shape] = OrderedDict()

    def allocate(self, length: int) -> Span | None:
        raise ValueError("rows are given out by ContiguousRows, in front of this runtime")

    def free(self, span: Span) -> None:
        raise ValueError("rows are given out by ContiguousRows, in front of this runtime")

    def copy(self, source: Span, target: Span, start: int, stop: int) -> None:
        raise ValueError("rows are moved as a whole")

    def move(self, from_row: int, to_row: int) -> None:
        self._device.activate()
        self._kv.move(from_row, to_row)

    def forward(self, segments: Sequence[Segment], width: int = TOP) -> Top:
        if any(segment.rows > 1 for segment in segments):
            raise ValueError("the graph gives one row of logits a session")
        self._device.activate()
        found = [self._run(step) for step in steps_of(segments, self._engine.profiles, self._row_tokens)]
        width = min(width, self._top)
        if not found:
            return Top(np.zeros((0, width), np.int64), np.zeros((0, width), np.float32))
        ids, logits = (np.concatenate(parts) for parts in zip(*found, strict=True))
        return Top(*(rows[:, :width] for rows in _ties_by_id(ids, logits)))

    def _run(self, step: Step) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Top ids and logits of the step's wanted rows."""
        view = self._memory.view(step.rows, step.tokens)
        wanted = []
        for row, piece in enumerate(step.pieces):
            count = len(piece.tokens)
            view.input_ids[row, :count] = piece.tokens
            view.input_ids[row, count:] = piece.tokens[-1]  # any valid id
            view.past_lengths[row] = piece.start
            view.logit_idx[row] = count - 1
            if piece.rows:
                wanted.append(row)
        self._execute(step, view)
        self._device.synchronize()
        return view.top_ids[wanted], view.top_logits[wanted]

    def _execute(self, step: Step, view: StepView) -> None:
        """Puts the step on the stream, by a graph where there is one or is to be one."""
        key = (step.first, step.rows, step.tokens)
        if not self.graphs or not self._is_repeated(step):
            self._enqueue(self._shared_context(step, view, key), view)
            return
        shape = self._shapes.get(key)
        if shape is None:
            self._make_room()
            context = self._engine.context(step.profile)
            self._bind(context, step, view)
            self._enqueue(context, view)  # TensorRT settles what a new shape needs; only then it can be recorded
            self._shapes[key] = Shape(context, key)
            return
        self._shapes.move_to_end(key)
        if shape.graph is None:
            shape.graph = self._record(shape.context, view)
        if shape.graph is None:
            self._enqueue(shape.context, view)
        else:
            shape.graph.launch()

    def _shared_context(self, step: Step, view: StepView, key: tuple[int, int, int]) -> Context:
        """The profile's context without a graph, bound to the step."""
        shape = self._contexts.get(step.profile)
        if shape is None:
            shape = self._contexts[step.profile] = Shape(self._engine.context(step.profile))
        if shape.bound != key:
            self._bind(shape.context, step, view)
            shape.bound = key
        return shape.context

    def _is_repeated(self, step: Step) -> bool:
        """Whether steps of this shape come again and again: a prompt's chunks do not."""
        shared = max(self._engine.profiles, key=lambda profile: profile.rows)
        return step.tokens <= shared.tokens

    def _record(self, context: Context, view: StepView) -> Graph | None:
        try:
            return self._device.capture(lambda: self._enqueue(context, view))
        except PacelineError as error:
            log.warning("%s: no CUDA graphs, steps are slower: %s", self.name, error, extra={"event": "no_graphs"})
            self.graphs = False
            return None

    def _enqueue(self, context: Context, view: StepView) -> None:
        self._device.upload(view.inputs_address, view.inputs)
        context.enqueue()
        self._device.download(view.outputs, view.outputs_address)

    def _bind(self, context: Context, step: Step, view: StepView) -> None:
        kv_shape = (step.rows, *self._kv.row_shape)
        shapes = {
            "input_ids": (step.rows, step.tokens),
            "past_lengths": (step.rows,),
            "logit_idx": (step.rows,),
            **dict.fromkeys(self._kv.inputs, kv_shape),
        }
        context.bind(shapes, {**view.addresses, **self._kv.addresses(step.first)})

    def _make_room(self) -> None:
        if len(self._shapes) >= MOST_GRAPHS:
            _, oldest = self._shapes.popitem(last=False)
            if oldest.graph is not None:
                oldest.graph.close()


class Shape:
    """A context with the window and the tokens (first row, rows, tokens) it is bound to, and its graph, if any."""

    def __init__(self, context: Context, bound: tuple[int, int, int] | None = None) -> None:
        self.context = context
        self.bound = bound
        self.graph: Graph | None = None


def _ties_by_id(ids: NDArray[np.int64], logits: NDArray[np.float32]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Rows sorted by (−logit, id): graphs promise no order among equal logits."""
    if not (logits[:, 1:] == logits[:, :-1]).any():
        return ids, logits
    order = np.lexsort((ids, -logits))
    return np.take_along_axis(ids, order, 1), np.take_along_axis(logits, order, 1)
