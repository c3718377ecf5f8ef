"""A bundle's graph behind the service: torch's candidates, whatever the batch and the history of its rows."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

from paceline.core.errors import UserError
from paceline.core.manifest import Manifest, Profile
from paceline.core.model import Segment, Span
from paceline.edge.rows import ContiguousRows
from paceline.edge.runtimes.base import Runtime, Top
from paceline.edge.strategies.draft_model import DraftModel

from .helpers import Bench, item, proposals

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

import torch
from transformers import AutoModelForCausalLM

from paceline.core.lm.loading import wrap
from paceline.edge.runtimes.onnx_memory import DeviceRows
from paceline.edge.runtimes.onnxruntime import load
from paceline.edge.runtimes.torch import TorchRuntime

from .fake_cuda import BASE, FakeDevice
from .onnx_bundles import CONTEXT, VOCABULARY, make_bundle, small_llama
from .test_torch_runtime import greedy

PROFILES = [profile for profile in get_args(Profile) if profile != "static-native"]  # that one has no float32 graph
SESSIONS = 4
CLEAR = 0.05  # between the two likeliest logits
DRAFTER = Path(__file__).parents[2] / "models" / "tiny-drafter"


@pytest.fixture(scope="module")
def module() -> Any:
    return small_llama()


@pytest.fixture(scope="module", params=PROFILES)
def bundle(request: pytest.FixtureRequest, module: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_bundle(module, tmp_path_factory.mktemp("bundles") / request.param, request.param)


@pytest.fixture
def torch_runtime(module: Any) -> TorchRuntime:
    return TorchRuntime(wrap(copy.deepcopy(module), kv_slots=SESSIONS * 256, max_context=CONTEXT), VOCABULARY)


def arranged(folder: Path, **options: Any) -> Runtime:
    """A bundle's runtime whose sessions may lie anywhere."""
    runtime = load(folder, threads=1, **options)
    return ContiguousRows(runtime) if runtime.rows == "contiguous" else runtime


def difference(one: Top, other: Top) -> float:
    """The largest between two runtimes' logits; their first tokens must be the same unless the second is as likely."""
    assert len(one.ids) == len(other.ids)
    if not len(one.ids):
        return 0.0
    clear = one.logits[:, 0] - one.logits[:, 1] > CLEAR
    assert np.array_equal(one.ids[clear, 0], other.ids[clear, 0])
    return float(np.abs(one.logits - other.logits).max())


def worst_difference(torch_runtime: Runtime, runtime: Runtime, vocabulary: int = VOCABULARY) -> float:
    """Over ragged batches, chunks, rollbacks and rewrites, up to the last place of a row."""
    draw = random.Random(1)
    spans = [(torch_runtime.allocate(CONTEXT), runtime.allocate(CONTEXT)) for _ in range(SESSIONS)]
    held, worst, full = [0] * SESSIONS, 0.0, 0
    for _ in range(200):
        batch = draw.sample(range(SESSIONS), draw.randrange(1, SESSIONS + 1))
        several = len(batch) == 1 or runtime.multi_token_batch
        ours, theirs = [], []
        for number in batch:
            start = max(0, held[number] - max(0, draw.randrange(-3, 3)))
            start = start if start < CONTEXT else draw.randrange(CONTEXT)
            count = min(draw.randrange(1, 30 if len(batch) == 1 else 6) if several else 1, CONTEXT - start)
            tokens = [draw.randrange(vocabulary) for _ in range(count)]
            held[number], asked = start + count, int(draw.random() < 0.8)
            full += held[number] == CONTEXT
            for segments, span in zip((theirs, ours), spans[number], strict=True):
                segments.append(Segment(span, start, tokens, asked))  # type: ignore[arg-type]
        worst = max(worst, difference(torch_runtime.forward(theirs), runtime.forward(ours)))
    assert full > 3
    return worst


def test_batches_of_every_shape_give_what_torch_gives(bundle: Path, torch_runtime: TorchRuntime) -> None:
    """In float32, with logits up to about 50."""
    assert worst_difference(torch_runtime, arranged(bundle, max_sessions=SESSIONS)) < 1e-3


@pytest.mark.parametrize("profile", get_args(Profile))
def test_half_precision_is_as_near_as_it_can_be(profile: Profile, tmp_path: Path) -> None:
    """Weights and KV of the embedded drafter in float16, which is what it is stored in."""
    module = AutoModelForCausalLM.from_pretrained(DRAFTER, dtype=torch.float32)
    size = module.config.vocab_size
    folder = make_bundle(module, tmp_path / "half", profile, dtype="float16", vocabulary_size=size)
    try:
        runtime = arranged(folder, max_sessions=SESSIONS)
    except UserError as error:
        if profile == "static-native" and "opset" in str(error).lower():
            pytest.skip(f"this onnxruntime is too old for the profile: {error}")
        raise
    model = wrap(module, kv_slots=SESSIONS * 256, max_context=CONTEXT)
    assert worst_difference(TorchRuntime(model), runtime, size) < 0.05


class FakeHostDevice(FakeDevice):
    """A fake of a GPU whose addresses are this process' own, so that ONNX Runtime's CPU can bind them."""

    def allocate(self, size: int) -> int:
        return super().allocate(size) - BASE + int(self.memory.ctypes.data)

    def at(self, address: int, size: int) -> Any:
        return super().at(address - int(self.memory.ctypes.data) + BASE, size)


@pytest.mark.parametrize("profile", ["gqa", "static-compat"])
def test_rows_on_a_device_hold_the_same(
    profile: Profile, module: Any, torch_runtime: TorchRuntime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Addresses of windows and copies of rows, as they are on a GPU."""
    fake = FakeHostDevice()

    def fake_memory(manifest: Manifest, rows: int, device: str) -> DeviceRows:
        memory = DeviceRows(manifest, rows, fake, 0)
        memory.device = device
        return memory

    monkeypatch.setattr("paceline.edge.runtimes.onnxruntime._memory", fake_memory)
    runtime = arranged(make_bundle(module, tmp_path / "b", profile), max_sessions=SESSIONS)
    assert worst_difference(torch_runtime, runtime) < 1e-3
    assert fake.activated  # rows were moved, on the thread that uses them


def test_proposals_are_the_models_own_greedy_continuation(bundle: Path, module: Any) -> None:
    """Several sessions over many rounds through the service, whatever was rejected before."""
    bench = Bench(strategy=DraftModel(load(bundle, threads=1, max_sessions=4)))
    bench.up("a")
    draw = random.Random(0)
    tokens = {number: [draw.randrange(VOCABULARY) for _ in range(5 + 15 * number)] for number in range(4)}
    base = dict.fromkeys(tokens, 0)
    for _ in range(5):
        for answer in bench.ask("a", *[item(number, tokens[number], base=base[number]) for number in tokens]):
            number = answer.session
            assert proposals(answer) == greedy(module, tokens[number], 4)
            base[number] = answer.held
            tokens[number] += [*proposals(answer)[: draw.randrange(5)], draw.randrange(VOCABULARY)]


def test_alone_a_session_catches_up_and_drafts_in_one_step(bundle: Path) -> None:
    """After full acceptance two tokens are new; a batch of one takes both at once in every profile."""
    strategy = DraftModel(load(bundle, threads=1, max_sessions=2))
    bench = Bench(strategy=strategy)
    bench.up("a")
    (answer,) = bench.ask("a", item(1, [5, 9, 2]))
    steps = []
    forward = strategy._runtime.forward
    strategy._runtime.forward = lambda segments, width=64: (
        steps.append(  # type: ignore[method-assign,misc]
            [len(segment.tokens) for segment in segments]
        )
        or forward(segments, width)
    )
    bench.ask("a", item(1, [5, 9, 2, *proposals(answer), 7], base=3))
    assert steps == [[2], [1], [1], [1]]


def test_a_step_writes_into_its_own_rows_only(module: Any, tmp_path: Path) -> None:
    """KV is updated where it lies: nothing outside the batch's window changes, and what was there before stays."""
    runtime: Any = load(make_bundle(module, tmp_path / "b", "gqa"), threads=1)
    slots = runtime._memory._slots
    runtime.forward([Segment(Span(2, 0, CONTEXT), 0, [3, 1, 4, 1, 5], 1)])
    before = slots.copy()
    runtime.forward([Segment(Span(row, 0, CONTEXT), 5 if row == 2 else 0, [7], 1) for row in (1, 2)])
    changed = np.argwhere((slots != before).any(axis=(2, 4)))  # [cache, row, position]
    assert {tuple(place) for place in changed[:, 1:].tolist()} == {(1, 0), (2, 5)}
    assert set(changed[:, 0].tolist()) == {0, 1, 2, 3}  # keys and values of both layers


def test_what_a_graph_cannot_do_is_refused(module: Any, tmp_path: Path) -> None:
    runtime = load(make_bundle(module, tmp_path / "b", "gqa", max_context=32), threads=1)
    row, other = Span(0, 0, 32), Span(1, 0, 32)
    with pytest.raises(ValueError, match="one token a session in a batch, not 2"):
        runtime.forward([Segment(row, 0, [1, 2], 1), Segment(other, 0, [1], 1)])
    with pytest.raises(ValueError, match="one token a session, not for 2"):
        runtime.forward([Segment(row, 0, [1, 2], 2)])
    with pytest.raises(ValueError, match="tokens up to 33 of a session with room for 32"):
        runtime.forward([Segment(row, 31, [1, 2], 1)])


def test_concat_copies_kv_between_sessions(module: Any, tmp_path: Path) -> None:
    """A continuation drafted in a copy proposes what the session itself would."""
    runtime = load(make_bundle(module, tmp_path / "b", "concat"), threads=1)
    one, other = runtime.allocate(CONTEXT), runtime.allocate(CONTEXT)
    assert one is not None and other is not None and runtime.forks
    runtime.forward([Segment(one, 0, [3, 1, 4, 1, 5], 0)])
    runtime.copy(one, other, 0, 5)
    top = runtime.forward([Segment(one, 5, [9], 1), Segment(other, 5, [9], 1)])
    assert np.array_equal(top.ids[0], top.ids[1])
    assert np.array_equal(top.logits[0], top.logits[1])
