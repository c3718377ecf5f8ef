"""The packed forward: what it promises whatever the model."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from paceline.core.lm.arena import Arena
from paceline.core.lm.attention import Packing, attend
from paceline.core.lm.loading import wrap
from paceline.core.lm.model import LanguageModel
from paceline.core.lm.varlen import Tables
from paceline.core.model import Segment, Span

MakeModel = Callable[..., Any]
Tokens = Callable[[int, int], list[int]]


def _span(model: LanguageModel, length: int = 300) -> Span:
    span = model.allocate(length)
    assert span
    return span


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_logits_do_not_depend_on_company(name: str, make_model: MakeModel, make_tokens: Tokens) -> None:
    """A session's logits in float64 are the same alone, among sessions as long, and among longer and shorter ones."""
    model = wrap(make_model(name, torch.float64), kv_slots=4096)
    spans = [_span(model) for _ in range(6)]
    lengths = [30, 30, 250, 31, 40, 120]
    texts = [make_tokens(length, length) for length in lengths]
    for span, text in zip(spans, texts, strict=True):
        model.forward([Segment(span, 0, text, 0)])
    for count in (1, 4):
        segments = [Segment(s, n, make_tokens(count, 7), count) for s, n in zip(spans, lengths, strict=True)]
        alone = torch.cat([model.forward([segment]) for segment in segments])
        for company in (segments, segments[:2], segments[2:4], segments[::2], segments[::-1]):
            rows = torch.cat([alone[(i := segments.index(s)) * count : (i + 1) * count] for s in company])
            assert torch.allclose(model.forward(company), rows, rtol=0, atol=1e-12)


def test_rows_come_in_the_order_of_the_segments(make_model: MakeModel, make_tokens: Tokens) -> None:
    """Each segment gets the last `rows` of its logits, none at all if it asks for none, in the caller's order."""
    model = wrap(make_model("llama"), kv_slots=2048)
    spans = [_span(model) for _ in range(3)]
    texts = [make_tokens(length, length) for length in (50, 3, 20)]
    whole = [model.forward([Segment(s, 0, t, len(t))]) for s, t in zip(spans, texts, strict=True)]
    got = model.forward([Segment(s, 0, t, rows) for s, t, rows in zip(spans, texts, (1, 3, 0), strict=True)])
    assert got.shape == (4, model.vocabulary_size)
    assert torch.allclose(got, torch.cat((whole[0][-1:], whole[1])), rtol=0, atol=1e-5)
    assert model.forward([Segment(spans[0], 0, texts[0], 0)]).shape == (0, model.vocabulary_size)


def test_a_segment_that_does_not_fit_writes_nothing(make_model: MakeModel, make_tokens: Tokens) -> None:
    """Wrong spans, positions, rows and ids are refused before any memory changes."""
    model = wrap(make_model("llama"), kv_slots=1024, max_context=280)
    span, gone = _span(model, 280), _span(model, 280)
    model.free(gone)
    before = model.arena.kv.clone()
    good = Segment(span, 0, make_tokens(5, 1), 1)
    for wrong in (
        Segment(gone, 0, [1], 1),
        Segment(Span(span.key, span.first, span.size + 256), 0, [1], 1),
        Segment(span, 280, [1], 1),
        Segment(span, -1, [1], 1),
        Segment(span, 0, [], 0),
        Segment(span, 0, [1], 2),
        Segment(span, 0, [-1], 1),
        Segment(span, 0, [model.vocabulary_size], 1),
    ):
        with pytest.raises(ValueError):
            model.forward([good, wrong])
    assert torch.equal(model.arena.kv, before)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("lengths", [[400, 400, 400], [400, 390, 120]])
def test_no_operation_copies_the_past(
    fused: bool, lengths: list[int], make_model: MakeModel, make_tokens: Tokens
) -> None:
    """No operator of a decode, a verify or a chunk produces a tensor as large as a layer's past."""
    model = wrap(make_model("mistral", sliding_window=None, head_dim=64), kv_slots=4096, fused=fused)
    spans = [_span(model, 500) for _ in lengths]
    for span, length in zip(spans, lengths, strict=True):
        model.forward([Segment(span, 0, make_tokens(length, 3), 0)])
    past = 400 * model.arena.kv_heads * model.arena.head_dim
    for count in (1, 5):
        segments = [Segment(s, n, make_tokens(count, 4), count) for s, n in zip(spans, lengths, strict=True)]
        with _Copies(model.arena, past) as copies:
            model.forward(segments)
        assert copies.seen > 50 and copies.large == []


def test_sinks_and_softcap_follow_their_formula() -> None:
    """Attention sinks take part in the softmax only; a softcap bends the scores before the mask."""
    torch.manual_seed(0)
    arena = Arena(layers=1, slots=256, kv_heads=2, head_dim=8, dtype=torch.float64)
    span = arena.allocate(20)
    assert span
    arena.kv[0, :20] = torch.randn(20, 2, 2, 8, dtype=torch.float64)
    query, sinks = torch.randn(4, 32, dtype=torch.float64), torch.randn(4, dtype=torch.float64)
    packing = Packing(arena, [Segment(span, 16, [0] * 4, 0)])
    got = attend(packing, 0, query, 4, 0.5, window=6, softcap=2.0, sinks=sinks).view(4, 4, 8)
    for head in range(4):
        key, value = arena.kv[0, :20, 0, head // 2], arena.kv[0, :20, 1, head // 2]
        for row in range(4):
            scores = 2 * torch.tanh(query[row, head * 8 : head * 8 + 8] @ key.T * 0.5 / 2)
            visible = torch.cat((scores[11 + row : 17 + row], sinks[head : head + 1])).softmax(0)[:-1]
            assert torch.allclose(got[row, head], visible @ value[11 + row : 17 + row], rtol=0, atol=1e-12)


@pytest.mark.parametrize("window", [None, 100])
def test_block_tables_describe_the_arena(window: int | None) -> None:
    """A kernel that sees pages and tables only, as CUDA's do, attends to the same keys as views of the spans."""
    torch.manual_seed(0)
    arena = Arena(layers=2, slots=4096, kv_heads=2, head_dim=8, dtype=torch.float64)
    arena.kv.normal_()
    spans = [arena.allocate(length) for length in (300, 700, 40, 520)]
    segments = [
        Segment(span, start, [0] * count, 0)
        for span, start, count in zip(spans, (290, 600, 0, 0), (3, 1, 1, 512), strict=True)
        if span
    ]
    query = torch.randn(517, 32, dtype=torch.float64)
    plain = attend(Packing(arena, segments), 1, query, 4, 0.5, window=window)
    paged = attend(Packing(arena, segments, _paged), 1, query, 4, 0.5, window=window)
    assert torch.allclose(plain, paged, rtol=0, atol=1e-12)


def _paged(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, tables: Tables, scaling: float, left: int
) -> torch.Tensor:
    outputs = []
    for i, used in enumerate(tables.used.tolist()):
        first, last = tables.queries[i : i + 2].tolist()
        pages = tables.blocks[i].long()
        key, value = (x[pages].flatten(0, 1)[:used].transpose(0, 1) for x in (keys, values))
        shown = torch.ones(last - first, used, dtype=torch.bool).tril(used - (last - first))
        if left >= 0:
            shown = shown.triu(used - (last - first) - left)
        part = query[first:last].transpose(0, 1)
        outputs.append(
            F.scaled_dot_product_attention(part[None], key[None], value[None], shown, scale=scaling, enable_gqa=True)
        )
    return torch.cat([part[0].transpose(0, 1) for part in outputs])


def test_two_models_run_in_two_threads(make_model: MakeModel, make_tokens: Tokens) -> None:
    """A drafter and a target in one process do not disturb each other."""
    models = [wrap(make_model(name, torch.float64), kv_slots=1024) for name in ("llama", "gemma3_text")]
    text = make_tokens(40, 5)
    expected = [model.forward([Segment(_span(model), 0, text, 40)]) for model in models]
    wrong: list[int] = []

    def work(index: int) -> None:
        model = models[index]
        span = _span(model)
        for _ in range(10):
            rows = [model.forward([Segment(span, at, text[at : at + 8], 8)]) for at in range(0, 40, 8)]
            if not torch.allclose(torch.cat(rows), expected[index], rtol=0, atol=1e-10):
                wrong.append(index)

    threads = [threading.Thread(target=work, args=(index,)) for index in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA here")
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cuda_gives_the_cpus_logits(name: str, dtype: torch.dtype, make_model: MakeModel, make_tokens: Tokens) -> None:
    """On CUDA, by kernels over the block table in half types, a packed forward agrees with the CPU's."""
    texts = [make_tokens(length, length) for length in (300, 40, 41)]
    outputs = []
    for device, kind in (("cpu", torch.float32), ("cuda", dtype)):
        model = wrap(make_model(name, kind).to(device), kv_slots=4096)
        spans = [_span(model, 400) for _ in texts]
        model.forward([Segment(s, 0, t[:-3], 0) for s, t in zip(spans, texts, strict=True)])
        rows = model.forward([Segment(s, len(t) - 3, t[-3:], 3) for s, t in zip(spans, texts, strict=True)])
        outputs.append(rows.cpu())
    tolerance = 1e-3 if dtype == torch.float32 else 0.1
    assert (outputs[0] - outputs[1]).abs().max() < tolerance * outputs[0].abs().max()


class _Copies(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes every operator whose result is new memory of at least `size` elements."""

    def __init__(self, arena: Arena, size: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._arena, self._size = arena.kv.untyped_storage().data_ptr(), size
        self.seen = 0
        self.large: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, torch.Tensor):
                self.seen += 1
                if tensor.numel() >= self._size and tensor.untyped_storage().data_ptr() != self._arena:
                    self.large.append(f"{func}: {tuple(tensor.shape)}")
        return result
