"""A real model behind the service: its proposals are its own greedy continuation, whatever was rejected before."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from paceline.edge.strategies.draft_model import DraftModel

from .helpers import Bench, item, proposals

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
VOCABULARY = 61


@pytest.fixture(scope="module")
def module() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY + 3,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.5,
        tie_word_embeddings=False,
    )
    return transformers.LlamaForCausalLM(config).to(torch.float64).eval()


def greedy(module: Any, tokens: Sequence[int], k: int) -> list[int]:
    """Without any KV: the whole sequence again for each token, the padded tail left out."""
    drafted: list[int] = []
    for _ in range(k):
        with torch.no_grad():
            row = module(torch.tensor([[*tokens, *drafted]])).logits[0, -1, :VOCABULARY]
        drafted.append(int(row.argmax()))
    return drafted


def test_several_sessions_over_many_rounds(module: Any) -> None:
    from paceline.core.lm.loading import wrap
    from paceline.edge.runtimes.torch import TorchRuntime

    before = module.config._attn_implementation
    runtime = TorchRuntime(wrap(module, kv_slots=2048, max_context=500), VOCABULARY)
    bench = Bench(strategy=DraftModel(runtime))
    bench.up("a")
    draw = random.Random(0)
    tokens = {n: [draw.randrange(VOCABULARY) for _ in range(5 + 40 * n)] for n in range(4)}
    base = dict.fromkeys(tokens, 0)
    expected, got = [], []
    for _ in range(6):
        answers = bench.ask("a", *[item(n, tokens[n], base=base[n]) for n in tokens])
        for answer in answers:
            number = answer.session
            got.append((list(tokens[number]), proposals(answer)))
            base[number] = answer.held
            tokens[number] += [*proposals(answer)[: draw.randrange(5)], draw.randrange(VOCABULARY)]
    module.set_attn_implementation(before)
    expected = [(prefix, greedy(module, prefix, 4)) for prefix, _ in got]
    assert got == expected
    bench.close("a", *tokens)
    bench.settle()
    while bench.service.sessions.cache.evict():
        pass
    assert runtime._model.arena.free_slots == 2048  # type: ignore[attr-defined]
