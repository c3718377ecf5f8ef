"""Proposals follow the target's own rule, over the top 64 tokens (core/sampling.py)."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest

from paceline.core.emulated import ToyLanguage, ToyModel
from paceline.core.sampling import History, Sampling, adjust, choose
from paceline.edge.runtimes.base import top_of
from paceline.edge.runtimes.emulated import EmulatedRuntime

from .helpers import LANGUAGE, Bench, item, proposals

PROMPT = [5, 9, 2, 40, 17, 3]
SAMPLINGS = [
    Sampling(seed=11, temperature=1.0),
    Sampling(seed=12, temperature=0.7, top_p=0.9),
    Sampling(seed=13, temperature=1.3, top_k=8, min_p=0.02),
    Sampling(seed=14, temperature=0.9, presence_penalty=1.5, frequency_penalty=0.5),
    Sampling(seed=15, temperature=0.0, repetition_penalty=1.6),
    Sampling(seed=16, temperature=0.6, logit_bias={7: 6.0, 9: -100.0}),
    Sampling(temperature=0.0),
]


def rule(tokens: Sequence[int], prompt_length: int, k: int, sampling: Sampling, language: ToyLanguage) -> list[int]:
    """The plain sampler over whole rows of the vocabulary."""
    drafted: list[int] = []
    for _ in range(k):
        state = 0
        for token in [*tokens, *drafted]:
            state = language.next_state(state, token)
        row = adjust(language.rows([state])[0], sampling, History(tokens, prompt_length), drafted)
        drafted.append(int(choose(row[None, :], [sampling], [len(tokens) + len(drafted)])[0]))
    return drafted


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=lambda s: f"seed{s.seed}")
def test_proposals_equal_the_plain_samplers_choices_round_after_round(sampling: Sampling) -> None:
    """The vocabulary fits in the top 64, so nothing is lost by looking at those alone."""
    bench = Bench()
    bench.up("a")
    draw = random.Random(sampling.seed)
    tokens, base = list(PROMPT), 0
    for _ in range(40):
        (answer,) = bench.ask("a", item(1, tokens, base, 5, sampling, prompt_length=4))
        assert proposals(answer) == rule(tokens, 4, 5, sampling, LANGUAGE)
        base = len(tokens)
        tokens += [*proposals(answer)[: draw.randrange(6)], draw.randrange(61)]


def test_all_kinds_of_sampling_in_one_batch_choose_as_they_do_alone() -> None:
    bench = Bench()
    bench.up("a")
    answers = bench.ask("a", *[item(n, [*PROMPT, n], sampling=s) for n, s in enumerate(SAMPLINGS)])
    for answer in answers:
        tokens = [*PROMPT, answer.session]
        assert proposals(answer) == rule(tokens, 0, 4, SAMPLINGS[answer.session], LANGUAGE)


def test_a_greedy_batch_never_fetches_more_than_the_best_token() -> None:
    widths = []

    class Watching(EmulatedRuntime):
        def forward(self, segments, width=64):  # type: ignore[no-untyped-def]
            widths.append(width)
            return super().forward(segments, width)

    from paceline.edge.strategies.draft_model import DraftModel

    bench = Bench(strategy=DraftModel(Watching(ToyModel(LANGUAGE))))
    bench.up("a")
    bench.ask("a", item(1, PROMPT), item(2, PROMPT[:3]))
    assert set(widths) == {1}
    bench.ask("a", item(3, PROMPT, sampling=SAMPLINGS[0]))
    assert set(widths) == {1, 64}


def test_a_padded_tail_is_never_proposed() -> None:
    language = ToyLanguage(vocabulary_size=80, seed=1)
    runtime = EmulatedRuntime(ToyModel(language), vocabulary_size=61)
    from paceline.edge.strategies.draft_model import DraftModel

    bench = Bench(strategy=DraftModel(runtime))
    bench.up("a")
    tokens: list[int] = []
    for session in range(40):
        for answer in bench.ask("a", item(session, [session], sampling=SAMPLINGS[session % 7], k=8, limit=100)):
            tokens += proposals(answer)
    assert len(tokens) == 320
    assert max(tokens) < 61


@pytest.mark.parametrize("size", [10, 64, 300, 6000])
def test_the_top_is_sorted_by_logit_and_then_by_id(size: int) -> None:
    draw = np.random.default_rng(size)
    logits = draw.integers(-20, 20, (5, size)).astype(np.float64)  # full of ties, also at the cut
    top = top_of(logits)
    for row in range(5):
        expected = sorted(range(size), key=lambda token: (-logits[row, token], token))[:64]
        assert top.ids[row].tolist() == expected
        assert top.logits[row].tolist() == logits[row, expected].tolist()
    assert top_of(logits, 1).ids[:, 0].tolist() == top.ids[:, 0].tolist()
    assert top_of(np.zeros((0, size))).ids.shape[0] == 0


def test_torch_rows_give_the_same_top() -> None:
    torch = pytest.importorskip("torch")
    from paceline.edge.runtimes import torch as runtime

    draw = np.random.default_rng(1)
    logits = draw.integers(-200, 200, (6, 500)).astype(np.float32)
    for width in (1, 64):
        theirs, ours = runtime._top_of(torch.from_numpy(logits), width), top_of(logits, width)
        assert theirs.ids.tolist() == ours.ids.tolist()
        assert theirs.logits.tolist() == ours.logits.tolist()
