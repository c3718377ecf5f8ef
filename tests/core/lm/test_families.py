"""Every supported family against transformers itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from paceline.core.lm.loading import wrap
from paceline.core.lm.model import LanguageModel
from paceline.core.model import Segment, Span

Feed = Callable[[LanguageModel, list[Span], list[list[int]], list[int]], Iterator[list[torch.Tensor]]]
Tokens = Callable[[int, int], list[int]]
LENGTHS = [45, 23, 36, 23]
CHUNKS = [40, 3, 1, 7, 1, 5]


def _spans(model: LanguageModel, count: int) -> list[Span]:
    spans = [model.allocate(128) for _ in range(count)]
    assert all(spans)
    return [span for span in spans if span]


def test_float64_greedy_tokens_equal_transformers_generate(
    family: str, make_model: Callable[..., Any], make_tokens: Tokens, feed: Feed
) -> None:
    """Packed decoding of several sessions emits what transformers' generate emits for each alone."""
    module = make_model(family, torch.float64)
    texts = [make_tokens(length, length + i) for i, length in enumerate(LENGTHS)]
    expected = [
        module.generate(torch.tensor([text]), max_new_tokens=16, min_new_tokens=16, do_sample=False)[0, len(text) :]
        for text in texts
    ]
    model = wrap(module, kv_slots=2048)
    spans = _spans(model, len(texts))
    last = [torch.empty(0)] * len(texts)
    for logits in feed(model, spans, texts, CHUNKS):
        last = [new[-1] if len(new) else old for new, old in zip(logits, last, strict=True)]
    emitted: list[list[int]] = [[int(row.argmax())] for row in last]
    for _ in range(15):
        segments = [
            Segment(span, len(text) + len(out) - 1, [out[-1]], 1)
            for span, text, out in zip(spans, texts, emitted, strict=True)
        ]
        for out, token in zip(emitted, model.forward(segments).argmax(-1).tolist(), strict=True):
            out.append(token)
    assert emitted == [row.tolist() for row in expected]


@pytest.mark.parametrize("fused", [True, False])
def test_float32_logits_equal_a_whole_forward(
    family: str, fused: bool, make_model: Callable[..., Any], make_tokens: Tokens, feed: Feed
) -> None:
    """Mixed chunks, sessions packed together and rolled back positions give the logits of one plain forward."""
    module = make_model(family)
    texts = [make_tokens(length, length + i) for i, length in enumerate(LENGTHS)]
    with torch.inference_mode():
        expected = [module(torch.tensor([text])).logits[0] for text in texts]
    model = wrap(module, kv_slots=2048, fused=fused)
    spans = _spans(model, len(texts))
    # Other tokens first: what is rolled back must leave no trace.
    wrong = [text[:9] + make_tokens(20, 99) for text in texts]
    for _ in feed(model, spans, wrong, [16]):
        pass
    got: list[list[torch.Tensor]] = [[] for _ in texts]
    for logits in feed(model, spans, texts, CHUNKS):
        for rows, new in zip(got, logits, strict=True):
            rows.append(new)
    for rows, reference in zip(got, expected, strict=True):
        scale = reference.abs().max()
        assert torch.allclose(torch.cat(rows) / scale, reference / scale, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-10)])
def test_fused_equals_the_modules_own_code(
    family: str, dtype: torch.dtype, tolerance: float, make_model: Callable[..., Any], make_tokens: Tokens, feed: Feed
) -> None:
    """The fused forward is the module's forward, last bits aside; families of another shape run unfused."""
    module = make_model(family, dtype)
    texts = [make_tokens(length, length + i) for i, length in enumerate(LENGTHS)]
    outputs = []
    for fused in (False, True):
        model = wrap(module, kv_slots=2048, fused=fused)
        outputs.append([torch.cat(rows) for rows in feed(model, _spans(model, len(texts)), texts, CHUNKS)])
    assert model.fused == (
        family not in {"qwen3_moe", "phi3-partial", "olmo2", "gemma2", "gemma3_text", "llama-biased"}
    )
    for plain, fast in zip(*outputs, strict=True):
        assert (plain - fast).abs().max() <= tolerance * plain.abs().max()
