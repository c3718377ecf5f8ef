"""The TensorRT runtime on a fake device, whose engine is the bundle's own graph in ONNX Runtime."""

from __future__ import annotations

import logging
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.core.errors import UserError
from paceline.core.manifest import Manifest
from paceline.core.model import Segment, Span
from paceline.core.sampling import Sampling
from paceline.edge.runtimes import tensorrt as runtimes
from paceline.edge.runtimes.tensorrt import TensorRtRuntime
from paceline.edge.runtimes.tensorrt_steps import Profile
from paceline.edge.strategies.draft_model import DraftModel

from .fake_cuda import FakeDevice, FakeEngine
from .helpers import Bench, item, proposals

pytest.importorskip("torch")
pytest.importorskip("onnxruntime")
TINY_DRAFTER = Path(__file__).parents[2] / "models" / "tiny-drafter"
CONTEXT = 128
PROFILES = (Profile(3, 8), Profile(1, 32))
VOCABULARY = 2048


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Manifest]:
    """The embedded drafter, exported in float32 with small rows."""
    from paceline.export.bundle import export
    from paceline.export.options import Request
    from paceline.export.watch import Watch

    folder = tmp_path_factory.mktemp("bundle") / "tiny"
    request = Request(str(TINY_DRAFTER), folder, runtime="tensorrt", dtype="float32", max_context=CONTEXT)
    return folder, export(request, Watch()).manifest


@pytest.fixture(scope="module")
def reference() -> Any:
    """The same weights in torch, float32."""
    from paceline.core.lm.loading import load
    from paceline.edge.runtimes.torch import TorchRuntime

    model = load(str(TINY_DRAFTER), dtype="float32", kv_slots=8192, max_context=CONTEXT)
    return TorchRuntime(model, VOCABULARY)


class Machine:
    """A runtime with its fakes."""

    def __init__(self, bundle: tuple[Path, Manifest], rows: int = 6, **device: Any) -> None:
        folder, manifest = bundle
        self.device = FakeDevice(**device)
        self.engine = FakeEngine(folder / "model.onnx", self.device, PROFILES)
        self.runtime = TensorRtRuntime(manifest, self.engine, self.device, rows=rows)

    def shapes(self) -> list[tuple[int, int]]:
        """(rows, tokens) of the steps since the last call."""
        found = [(rows, tokens) for rows, tokens, _ in self.engine.runs]
        self.engine.runs.clear()
        return found


def piece(row: int, start: int, tokens: list[int], rows: int = 1) -> Segment:
    return Segment(Span(row, 0, CONTEXT), start, tokens, rows)


def words(seed: int, count: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(VOCABULARY) for _ in range(count)]


class Twin:
    """Both runtimes over the same texts: every step's candidates must be the same."""

    def __init__(self, machine: Machine, reference: Any) -> None:
        self.machine = machine
        self.reference = reference
        self.spans: dict[int, Span] = {}

    def step(self, *pieces: Segment) -> None:
        for each in pieces:
            if each.span.key not in self.spans:
                self.spans[each.span.key] = self.reference.allocate(CONTEXT)
        ids, logits = self.machine.runtime.forward(pieces)
        wanted = self.reference.forward([each._replace(span=self.spans[each.span.key]) for each in pieces])
        if not len(wanted.ids):
            assert not len(ids)
            return
        np.testing.assert_allclose(logits, wanted.logits, atol=2e-4)
        assert (ids[:, 0] == wanted.ids[:, 0]).all()
        assert ids.dtype == np.int64 and logits.shape == wanted.logits.shape

    def close(self) -> None:
        for span in self.spans.values():
            self.reference.free(span)


def test_ragged_batches_rollbacks_and_the_end_of_the_context_are_as_in_torch(bundle: Any, reference: Any) -> None:
    machine = Machine(bundle)
    twin = Twin(machine, reference)
    text = {row: words(row, CONTEXT) for row in range(5)}
    twin.step(piece(0, 0, text[0][:70]), piece(1, 0, text[1][:3], 0), piece(2, 0, text[2][:1]))
    assert machine.shapes() == [(1, 32), (1, 32), (1, 8), (2, 4)]  # 70 = 32 + 32 + 6, then 3 and 1 together
    twin.step(piece(0, 70, text[0][70:72]), piece(1, 3, text[1][3:4]), piece(2, 1, text[2][1:6]))
    assert machine.shapes() == [(3, 8)]
    twin.step(piece(1, 2, [7, 8]), piece(2, 4, [9]))  # both roll back and take another way
    twin.step(piece(0, 20, text[3][:100], 1), piece(1, 4, [1]))
    machine.shapes()
    twin.step(piece(0, 120, text[0][:7]), piece(1, 5, [2, 3, 4]))  # padded to 8, row 0 would end at 128: it fits
    assert machine.shapes() == [(2, 8)]
    twin.step(piece(0, 127, [5]), piece(1, 8, [6, 7, 8]))  # padding row 0 would write beyond it
    assert machine.shapes() == [(1, 1), (1, 4)]
    twin.step(piece(0, 125, [5, 6, 7]))  # 4 would not fit, 3 do
    assert machine.shapes() == [(1, 3)]
    twin.close()


def test_more_rows_than_the_engine_takes_are_several_steps(bundle: Any, reference: Any) -> None:
    machine = Machine(bundle)
    twin = Twin(machine, reference)
    twin.step(*[piece(row, 0, words(row, 2)) for row in range(5)])
    assert machine.shapes() == [(3, 2), (2, 2)]
    twin.close()


def test_a_shape_runs_is_recorded_and_is_then_one_launch(bundle: Any, reference: Any) -> None:
    machine = Machine(bundle)
    twin = Twin(machine, reference)
    for position in range(5):
        twin.step(piece(1, position, words(position, 1)), piece(2, position, words(50 + position, 1)))
    assert (machine.device.captures, machine.device.launches) == (1, 4)
    twin.step(piece(2, 5, [3]), piece(3, 0, [4]))  # another window: other addresses, so another graph
    twin.step(piece(2, 6, [3]), piece(3, 1, [4]))
    assert (machine.device.captures, machine.device.launches) == (2, 5)
    twin.step(piece(1, 5, [6]), piece(2, 7, [7]))  # the first is still good
    assert (machine.device.captures, machine.device.launches) == (2, 6)
    for _ in range(3):
        twin.step(piece(0, 0, words(9, 30), 0))  # a prompt's chunk is not worth a graph
    assert (machine.device.captures, machine.device.launches) == (2, 6)
    twin.close()


def test_the_least_recently_used_graph_makes_room(bundle: Any, reference: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtimes, "MOST_GRAPHS", 2)
    machine = Machine(bundle)
    twin = Twin(machine, reference)
    for row in (0, 0, 1, 1, 0, 2, 2, 0, 1):
        twin.step(piece(row, 0, [row]))
    assert machine.device.captures == 3  # of rows 0, 1 and 2; row 1's was given up for row 2's
    assert len(machine.engine.contexts) == 4
    twin.close()


def test_without_graphs_it_says_so_once_and_goes_on(
    bundle: Any, reference: Any, caplog: pytest.LogCaptureFixture
) -> None:
    machine = Machine(bundle, can_capture=False)
    twin = Twin(machine, reference)
    with caplog.at_level(logging.WARNING):
        for position in range(6):
            twin.step(piece(0, position, [position]))
    assert [record.message for record in caplog.records] == [
        "tiny-drafter: no CUDA graphs, steps are slower: cannot be captured (fake)"
    ]
    assert not machine.runtime.graphs and machine.device.launches == 0
    twin.close()


def test_a_row_is_moved_with_everything_in_it(bundle: Any) -> None:
    machine = Machine(bundle)
    text = words(1, 9)
    machine.runtime.forward([piece(0, 0, text[:8], 0), piece(1, 0, [5, 6, 7], 0)])
    expected = machine.runtime.forward([piece(0, 8, text[8:])])
    machine.runtime.move(0, 4)
    machine.runtime.forward([piece(0, 0, words(2, 20), 0)])  # what is left behind may be overwritten
    moved = machine.runtime.forward([piece(4, 8, text[8:])])
    assert (moved.ids == expected.ids).all() and (moved.logits == expected.logits).all()


def test_proposals_are_those_of_the_torch_runtime(bundle: Any, reference: Any) -> None:
    """Sessions that come, go, roll back and grow, behind the whole service, greedy and sampled."""
    machine = Machine(bundle)
    benches = [Bench(strategy=DraftModel(runtime)) for runtime in (machine.runtime, reference)]
    for bench in benches:
        bench.up("a", VOCABULARY)
    draw = random.Random(4)
    texts: dict[int, list[int]] = {}
    base: dict[int, int] = {}
    compared = 0
    for turn in range(25):
        if len(texts) < 4:
            texts[turn], base[turn] = words(turn, draw.randrange(1, 40)), 0
        asked = [number for number in texts if draw.random() < 0.8]
        drafts = [
            item(n, texts[n], base=base[n], sampling=Sampling(temperature=0.8 if n % 2 else 0.0, seed=n)) for n in asked
        ]
        answers = [{each.session: each for each in bench.ask("a", *drafts)} for bench in benches]
        assert set(answers[0]) == set(answers[1]) == set(asked)
        for number in asked:
            ours, theirs = (found[number] for found in answers)
            assert (ours.status, ours.held, ours.position) == (theirs.status, theirs.held, theirs.position)
            assert proposals(ours) == proposals(theirs)
            compared += len(proposals(ours))
            base[number] = ours.held
            texts[number] += [*proposals(ours)[: draw.randrange(5)], draw.randrange(VOCABULARY)]
            if len(texts[number]) > CONTEXT - 8 or draw.random() < 0.05:
                for bench in benches:
                    bench.close("a", number)
                del texts[number], base[number]
    assert compared > 150
    assert machine.device.captures > 0 and machine.device.launches > machine.device.captures


def test_what_cannot_be_is_said_in_one_sentence(bundle: Any) -> None:
    folder, manifest = bundle
    device = FakeDevice()
    with pytest.raises(UserError, match=r"is no multiple of 256.*--max-context"):
        odd = manifest.model_copy(update={"max_context": 33, "head_dim": 30})
        TensorRtRuntime(odd, FakeEngine(folder / "model.onnx", device, PROFILES), device, rows=5)
    with pytest.raises(UserError, match=r"not of this bundle's graph: they differ in key\.1, value\.1"):
        deeper = manifest.model_copy(update={"layers": 2})
        TensorRtRuntime(deeper, FakeEngine(folder / "model.onnx", device, PROFILES), device, rows=5)
    with pytest.raises(UserError, match=r"KV for 999 sessions and a spare row needs 62 MiB.*lower max_sessions"):
        TensorRtRuntime(manifest, FakeEngine(folder / "model.onnx", device, PROFILES), device, rows=1000)
    with pytest.raises(ValueError, match="one row of logits a session"):
        Machine(bundle).runtime.forward([piece(0, 0, [1, 2], 2)])


def test_equal_logits_are_sorted_by_id() -> None:
    ids, logits = np.array([[9, 4, 7], [1, 2, 3]]), np.array([[2.0, 2.0, 1.0], [3.0, 2.0, 1.0]], np.float32)
    sorted_ids, sorted_logits = runtimes._ties_by_id(ids, logits)
    assert sorted_ids.tolist() == [[4, 9, 7], [1, 2, 3]] and sorted_logits.tolist() == logits.tolist()
