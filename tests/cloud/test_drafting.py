"""What a drafter is asked for, and how much of a draft that comes in time is emitted."""

from __future__ import annotations

import pytest

from paceline.topology.wire import (
    check_hash,
    unpack_tokens,
)

from .helpers import VOCABULARY, Bench, FakeDrafter, ask, plain


@pytest.mark.parametrize(("right", "drafted"), [(0, 4), (1, 4), (3, 4), (4, 4), (2, 2), (16, 16)])
def test_a_round_emits_what_agrees_and_one_more(right: int, drafted: int) -> None:
    """Of a draft with so many right tokens before a wrong one, those and the target's own next are emitted."""
    bench = Bench()
    drafter, request, text = bench.opened()
    have = len(bench.ids["r"])
    draft = text[have : have + right]
    draft += [(text[have + right] + 1) % VOCABULARY] * (drafted - right)
    drafter.answer(drafter.last(), draft)
    assert bench.engine.step()
    assert bench.ids["r"] == text[: have + right + 1]
    statistics = bench.engine.statistics
    assert (statistics.drafted_rounds, statistics.drafted_tokens, statistics.emitted_with_draft) == (
        1,
        drafted,
        right + 1,
    )
    assert statistics.snapshot()["acceptance_length"] == right + 1
    item = drafter.last()
    assert unpack_tokens(item.tokens).tolist() == text[have : have + right + 1]
    assert item.base == len(request.prompt) + have
    assert item.check == check_hash([*request.prompt, *text[:have]])
    assert item.sampling is None


def test_the_first_draft_opens_the_session_with_everything() -> None:
    """At once on arrival, before the prompt is computed: all tokens, sampling, prompt length, limit, k = 0."""
    bench = Bench()
    drafter = FakeDrafter(bench)
    drafter.up()
    request = ask(max_tokens=7)
    bench.submit(request)
    bench.engine.step()
    item = drafter.drafts[0]
    assert (item.base, item.check, item.k) == (0, 0, 0)
    assert (item.sampling, item.prompt_length, item.limit) == (request.sampling, 3, 10)
    assert unpack_tokens(item.tokens).tolist() == [1, 2, 3]


def test_a_long_prompt_goes_in_several_drafts() -> None:
    """With ten tokens a Draft at most, each next part leaves on the answer to the one before."""
    bench = Bench(max_tokens=10, prefill_chunk=4)
    drafter = FakeDrafter(bench)
    drafter.up()
    request = ask(prompt=list(range(25)))
    bench.submit(request)
    bench.engine.step()
    for _ in range(2):
        drafter.answer(drafter.last())
        bench.engine.step()
    assert [(item.base, len(item.tokens) // 4, item.k) for item in drafter.drafts] == [
        (0, 10, 0),
        (10, 10, 0),
        (20, 5, 0),
    ]
    assert drafter.last().check == check_hash(range(20))


def test_a_draft_is_never_longer_than_what_may_still_be_emitted() -> None:
    """Sixteen right tokens with two left to emit: one draft token is checked, the cap holds, k was asked small."""
    bench = Bench()
    request = ask(max_tokens=4)
    drafter = FakeDrafter(bench)
    drafter.up()
    bench.submit(request)
    bench.engine.step()
    drafter.answer(drafter.last())
    bench.engine.step()
    text = plain(request)
    assert (bench.ids["r"], drafter.last().k) == (text[:2], 1)
    drafter.answer(drafter.last(), [text[2], text[3], *range(14)])
    bench.engine.step()
    assert bench.ids["r"] == text
    assert bench.engine.statistics.drafted_tokens == 1
    assert bench.ends["r"].finish_reason == "length"
    assert len(drafter.drafts) == 2


@pytest.mark.parametrize("wild", [VOCABULARY, VOCABULARY + 1, 2**31, 2**32 - 1])
@pytest.mark.parametrize("right", [0, 2])
def test_ids_outside_the_vocabulary_never_reach_the_model(wild: int, right: int) -> None:
    """A proposal is cut at its first such id; the tokens before it still count, nothing is waited for."""
    bench = Bench()
    drafter, _, text = bench.opened()
    have = len(bench.ids["r"])
    drafter.answer(drafter.last(), [*text[have : have + right], wild, *text[have + right : have + 2]])
    assert bench.engine.step()
    assert bench.ids["r"] == text[: have + right + 1]
    assert bench.engine.statistics.drafted_tokens == right
    drafter.down()
    bench.finish()
    assert bench.ids["r"] == text
