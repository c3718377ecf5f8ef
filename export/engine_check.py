"""An engine against the graph that it was built from, on the machine that will run it, before it counts as done.

The reference is any runtime of the same weights: ONNX Runtime on the CPU where there is no torch. The steps are those
that a drafter asks for: ragged batches, several tokens, rollbacks, the whole context; then real text, token by token.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

import numpy as np

from paceline.core import manifest as manifests
from paceline.core.errors import PacelineError, UserError
from paceline.core.manifest import Manifest
from paceline.core.model import Segment, Span
from paceline.core.vocabulary import Vocabulary
from paceline.edge.runtimes.base import Runtime, Top
from paceline.edge.runtimes.bundle import GRAPH
from paceline.edge.runtimes.cuda import Cuda
from paceline.edge.runtimes.tensorrt import TensorRtRuntime, open_engine
from paceline.edge.runtimes.tensorrt_library import device_index
from paceline.export.engine import BuiltEngine
from paceline.export.parity_cases import Step, steps

ROWS = 4
TEXT_TOKENS = 96  # of each text
# Largest difference of a logit, in units of the range of the top 64; several times what changing the kernels makes.
TOLERANCES = {"float32": 0.01, "float16": 0.05, "bfloat16": 0.25}
LEAST_AGREEMENT = {"float32": 0.995, "float16": 0.97, "bfloat16": 0.9}


class EngineDiffers(PacelineError):
    """An engine does not compute what its graph does; the message names the step."""


@dataclass
class Agreement:
    """difference: the largest of a logit, over the range of the top 64. same: positions of text with the same token."""

    reference: str
    steps: int = 0
    positions: int = 0
    difference: float = 0.0
    same: int = 0

    @property
    def top1(self) -> float:
        return self.same / max(1, self.positions)

    def __str__(self) -> str:
        return (
            f"{self.steps} steps as {self.reference}, largest difference {self.difference:.2g} of the top 64's range,"
            f" same first token at {100 * self.top1:.1f} % of {self.positions} positions"
        )


def can_check(manifest: Manifest, device: str) -> None:
    """UserError when engines cannot be compared here."""
    if manifest.weight_dtype == "bfloat16":
        raise UserError(
            "onnxruntime has no bfloat16 on the CPU to compare the engine with: --no-check builds it all the same"
        )
    try:
        Cuda(device_index(device)).close()
    except UserError as error:
        raise UserError(
            f"{error}; so the engine could not be compared here: --no-check builds it all the same"
        ) from None


def graph_runtime(folder: Path, manifest: Manifest, rows: int = ROWS) -> Runtime:
    """The bundle's graph in ONNX Runtime on the CPU."""
    from paceline.edge.runtimes.onnx_memory import HostRows
    from paceline.edge.runtimes.onnx_session import open_session
    from paceline.edge.runtimes.onnxruntime import OnnxRuntime

    session = open_session(folder / GRAPH)
    name = "onnxruntime on the CPU"
    return OnnxRuntime(session, manifest, HostRows(manifest, rows), rows, name=name, max_context=manifest.max_context)


def compare(
    runtime: Runtime,
    reference: Runtime,
    manifest: Manifest,
    texts: Sequence[Sequence[int]],
    progress: Callable[[], None] = lambda: None,
) -> Agreement:
    """Both runtimes have `ROWS` rows, or spans for as many sessions. Raises EngineDiffers."""
    agreement = Agreement(reference.name)
    spans = [_span(reference, row, manifest.max_context) for row in range(ROWS)]
    allowed = TOLERANCES[manifest.weight_dtype]

    def step(case: str, segments: Sequence[Segment]) -> tuple[Top, Top]:
        got = runtime.forward(segments)
        wanted = reference.forward([each._replace(span=spans[each.span.key]) for each in segments])
        difference = max(
            _difference(*pair) for pair in zip(got.ids, got.logits, wanted.ids, wanted.logits, strict=True)
        )
        if not difference <= allowed:
            raise EngineDiffers(
                f"the engine differs from {reference.name} in `{case}` by {difference:.3g} of the top 64's range"
                f" (allowed {allowed:.3g})"
            )
        agreement.steps += 1
        agreement.difference = max(agreement.difference, difference)
        progress()
        return got, wanted

    rows = [_Row(row) for row in range(ROWS)]
    for plan in _cases(manifest, texts):
        step(plan.case, [rows[feed.row].fed(feed.start, feed.tokens) for feed in plan.feeds])
    for text in texts:
        for position, token in enumerate(_part(manifest, text)):
            got, wanted = step("real text", [rows[0].fed(position, [token])])
            agreement.positions += 1
            agreement.same += int(got.ids[0, 0] == wanted.ids[0, 0])
    last = len(_part(manifest, texts[-1])) - 1
    runtime.move(0, ROWS - 1)
    spans[ROWS - 1] = spans[0]
    step("a moved row", [rows[0].fed(last, texts[0][:1])._replace(span=Span(ROWS - 1, 0, 0))])
    least = LEAST_AGREEMENT[manifest.weight_dtype]
    if not agreement.top1 >= least:
        raise EngineDiffers(
            f"the engine's first token is {reference.name}'s at {100 * agreement.top1:.1f} % of {agreement.positions}"
            f" positions of real text only (at least {100 * least:.1f} % are needed)"
        )
    return agreement


def count(manifest: Manifest, texts: Sequence[Sequence[int]]) -> int:
    """How often `compare` tells of progress."""
    return sum(1 for _ in _cases(manifest, texts)) + sum(len(_part(manifest, text)) for text in texts) + 1


def _cases(manifest: Manifest, texts: Sequence[Sequence[int]]) -> Iterator[Step]:
    every = [token for text in texts for token in text]
    return steps(every, rows=ROWS, max_context=manifest.max_context, multi_token_batch=True)


def _part(manifest: Manifest, text: Sequence[int]) -> Sequence[int]:
    """What of a text is read token by token."""
    return text[: min(TEXT_TOKENS, manifest.max_context)]


def read_texts(folder: Path, count: int = 8) -> list[list[int]]:
    """Token ids of a few texts that come along, by the bundle's own tokenizer."""
    vocabulary = Vocabulary.load(folder)
    texts: list[str] = json.loads((files("paceline.export") / "texts.json").read_text(encoding="utf-8"))
    return [vocabulary.encode(text[:2000]) for text in texts[:count]]


def check_engine(
    folder: Path,
    built: BuiltEngine,
    reference: Runtime,
    device: str = "cuda:0",
    progress: Callable[[float], None] = lambda share: None,
) -> Agreement:
    """Runs the engine just built beside `reference`. One that differs, or does not run, is taken out of the bundle."""
    agreement: Agreement | None = None
    try:
        manifest = manifests.read(folder)
        engine, cuda = open_engine(folder, manifest, device)
        with closing(cuda):
            runtime = TensorRtRuntime(manifest, engine, cuda, rows=ROWS)
            texts = read_texts(folder)
            total, done = count(manifest, texts), itertools.count(1)
            agreement = compare(runtime, reference, manifest, texts, lambda: progress(next(done) / total))
        return agreement
    finally:
        _settle(folder, built.path, agreement)


def _settle(folder: Path, path: Path, agreement: Agreement | None) -> None:
    """Enters what was measured beside the engine in the manifest, or takes the engine out of it."""
    manifest = manifests.read(folder)
    files, engines = dict(manifest.files), dict(manifest.engines)
    if agreement is None:
        del files[path.name], engines[path.name]
        path.unlink()
    else:
        engines[path.name] = {**engines[path.name], "checked": str(agreement)}
    manifests.write(manifest.model_copy(update={"files": files, "engines": engines}), folder)


class _Row:
    """What was fed to a row. Only what comes before its end counts: padding may have overwritten the rest."""

    def __init__(self, row: int) -> None:
        self._row = row
        self._held: list[int] = []
        self._end = 0

    def fed(self, start: int, tokens: Sequence[int]) -> Segment:
        """New tokens at `start`, with those before it that must be computed again."""
        first = min(start, self._end)
        self._held[start : start + len(tokens)] = tokens
        self._end = start + len(tokens)
        return Segment(Span(self._row, 0, 0), first, self._held[first : self._end], 1)


def _span(runtime: Runtime, row: int, length: int) -> Span:
    """Where a row is in a runtime: the row itself, or a span of its own."""
    if runtime.rows == "contiguous":
        return Span(row, 0, length)
    span = runtime.allocate(length)
    assert span is not None, "the reference was made for these rows"
    return span


def _difference(ids: np.ndarray, logits: np.ndarray, other_ids: np.ndarray, other_logits: np.ndarray) -> float:
    """Of one row: largest difference of a logit that both list, over the range of the second; inf when none is."""
    _, mine, theirs = np.intersect1d(ids, other_ids, return_indices=True)
    if len(mine) < len(ids) // 2 or not np.isfinite(logits).all():
        return float("inf")
    spread = max(float(other_logits.max() - other_logits.min()), 1e-6)
    return float(np.abs(logits[mine] - other_logits[theirs]).max()) / spread
