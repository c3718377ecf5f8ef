"""What the engine publishes is what plain decoding says, however many lanes and with drafts or without."""

from __future__ import annotations

import pytest

from paceline.cloud.requests import Delta, Request
from paceline.core.sampling import log_probabilities

from .helpers import LANGUAGE, TOKEN_BYTES, Bench, FakeDrafter, always_right, ask, plain


def many(count: int = 12) -> list[Request]:
    kinds = [
        {},
        {"temperature": 0.0},
        {"top_k": 9, "frequency_penalty": 0.5},
        {"top_p": 0.7, "repetition_penalty": 1.4},
    ]
    return [ask(f"r{i}", [i, *range(i)], 10 + 7 * i % 40, seed=i * 77, **kinds[i % 4]) for i in range(count)]


@pytest.mark.parametrize("lanes", [1, 2, 3, 4])
@pytest.mark.parametrize("drafted", [False, True])
def test_text_is_plain_decoding_at_any_number_of_lanes(lanes: int, drafted: bool) -> None:
    """Twelve sessions of all kinds, five at a time, with and without drafts: the plain sampler's ids and text."""
    requests = many()
    bench = Bench(drafters=("d",) if drafted else (), lanes=lanes, max_sessions=5, prefill_chunk=4)
    if drafted:
        drafter = FakeDrafter(bench)
        drafter.oracle = always_right(requests)
        drafter.up()
    bench.submit(*requests)
    bench.finish()
    for request in requests:
        expected = plain(request)
        assert bench.ids[request.id] == expected
        assert bench.texts[request.id] == b"".join(TOKEN_BYTES[token] for token in expected).decode()
        assert bench.ends[request.id].finish_reason == "length"
    assert (bench.model.used, bench.engine.live_sessions, bench.engine.drafting.live()) == (0, 0, [])
    assert bench.engine.statistics.tokens == sum(len(plain(request)) for request in requests)
    statistics = bench.engine.statistics.snapshot()
    assert statistics["sessions_peak"] == 5
    if drafted:
        assert statistics["acceptance_length"] > 3.5
        assert statistics["drafted_rounds"] > 0.7 * statistics["rounds"]
    else:
        assert statistics["rounds"] == statistics["tokens"] - len(requests)
        assert (statistics["drafted_rounds"], statistics["fallback_rounds"], statistics["acceptance_length"]) == (
            0,
            0,
            1.0,
        )


def test_log_probabilities_are_the_raw_rows() -> None:
    """Log-probabilities come from the target's rows before bias and penalties, one for each id."""
    base = ask(max_tokens=9, frequency_penalty=1.5)
    request = Request(base.id, base.prompt, base.sampling, 9, log_probs=3)
    got: list[Delta] = []
    bench = Bench(drafters=())
    bench.engine._publish = got.extend
    bench.submit(request)
    while bench.engine.step():
        pass
    tokens, state = plain(request), 0
    for token in request.prompt:
        state = LANGUAGE.next_state(state, token)
    entries = [entry for delta in got for entry in delta.log_probs]
    assert [entry.token for entry in entries] == tokens
    for entry, token in zip(entries, tokens, strict=True):
        assert (entry.value, entry.top) == log_probabilities(LANGUAGE.rows([state])[0], token, 3)
        state = LANGUAGE.next_state(state, token)
