"""The commit function: however tokens arrive, ids, text, log-probabilities and the end are the same."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from paceline.cloud.commit import Committed, Output
from paceline.cloud.requests import LogProb, Request
from paceline.core.sampling import Sampling

# Characters of one to four bytes, whole, cut and mixed; 0 is a special token without bytes, 1 ends a text.
PIECES = [b"", b"", b"a", b"b", b"ab", b"abc", "é".encode(), "é".encode()[:1], "é".encode()[1:], "€".encode()[:2]]
PIECES += ["€".encode()[2:], "😀".encode()[:1], "😀".encode()[1:3], "😀".encode()[3:], b"c\xe2", b"\x82\xacb", b"\xff"]
END = 1
STOPS = ["a", "ab", "bca", "aab", "é", "€b", "b€", "😀", "abab", "\ufffd"]


def request(max_tokens: int = 100, stop: Sequence[str] = (), end: Sequence[int] = (END,)) -> Request:
    return Request("r", (0,), Sampling(), max_tokens, tuple(stop), frozenset(end), log_probs=0)


def run(request: Request, rounds: Sequence[Sequence[int]]) -> tuple[list[int], str, str | None, list[int]]:
    """Commits round after round until the end; checks on the way that nothing follows it."""
    output = Output(request, PIECES)
    ids: list[int] = []
    text, log_probs = "", []
    for tokens in rounds:
        done: Committed = output.commit(tokens, [LogProb(token, -1.0, []) for token in tokens])
        assert done.token_ids == list(tokens[: len(done.token_ids)])
        assert output.length == len(ids) + len(done.token_ids)
        ids += done.token_ids
        text += done.text
        log_probs += [entry.token for entry in done.log_probs]
        if done.finish_reason:
            return ids, text, done.finish_reason, log_probs
        assert len(done.token_ids) == len(tokens)
    return ids, text, None, log_probs


def reference(request: Request, tokens: Sequence[int]) -> tuple[list[int], str, str | None]:
    """The whole text decoded anew after each token, searched from its start; nothing is kept in between."""
    for count in range(1, len(tokens) + 1):
        token = tokens[count - 1]
        data = b"".join(PIECES[t] for t in tokens[:count] if t not in request.stop_token_ids)
        if token in request.stop_token_ids:
            return list(tokens[:count]), data.decode("utf-8", "replace"), "stop"
        shown = data
        for length in (1, 2, 3):  # an incomplete character at the end is not text yet
            if len(data) >= length:
                tail = data[-length:]
                need = 2 if tail[0] in range(0xC2, 0xE0) else 3 if tail[0] in range(0xE0, 0xF0) else 4
                if tail[0] in range(0xC2, 0xF5) and length < need and all(b in range(0x80, 0xC0) for b in tail[1:]):
                    shown = data[:-length]
        text = shown.decode("utf-8", "replace")
        found = [text.index(stop) for stop in request.stop if stop in text]
        if found:
            return list(tokens[:count]), text[: min(found)], "stop"
        if count == request.max_tokens:
            return list(tokens[:count]), data.decode("utf-8", "replace"), "length"
    return list(tokens), "", None


_streams = st.lists(st.integers(0, len(PIECES) - 1), min_size=1, max_size=30)
_requests = st.builds(
    request,
    max_tokens=st.integers(1, 24),
    stop=st.lists(st.sampled_from(STOPS[:-1]), max_size=3, unique=True),
    end=st.sampled_from([(), (END,), (END, 6)]),
)


@settings(max_examples=500, deadline=None)
@given(_requests, _streams, st.lists(st.integers(1, 6), min_size=30, max_size=30))
@example(request(stop=["€b"]), [14, 15, 2], [1] * 30)
@example(request(stop=["abab"]), [4, 4, 2], [2] * 30)
def test_any_chunking_gives_what_one_token_at_a_time_and_a_plain_reference_give(
    request: Request, tokens: list[int], sizes: list[int]
) -> None:
    """Ids, text and finish of any split into rounds equal the single-token run and a search of the whole text."""
    rounds, at = [], 0
    for size in sizes:
        rounds.append(tokens[at : at + size])
        at += size
    rounds = [r for r in rounds if r]
    ids, text, finish, log_probs = run(request, rounds)
    assert run(request, [[token] for token in tokens]) == (ids, text, finish, log_probs)
    assert log_probs == ids
    expected_ids, expected_text, expected_finish = reference(request, tokens)
    assert (ids, finish) == (expected_ids, expected_finish)
    if finish is not None:
        assert text == expected_text


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=12), st.lists(st.integers(1, 5), min_size=60, max_size=60))
def test_characters_are_never_cut_in_a_stream(text: str, sizes: list[int]) -> None:
    """A valid text cut into tokens at any byte streams without a single replacement character."""
    data = text.replace("\ufffd", "").encode()
    pieces, at = [], 0
    for size in sizes:
        pieces.append(data[at : at + size])
        at += size
    output = Output(request(max_tokens=1000, end=()), pieces)
    shown = "".join(output.commit([token]).text for token in range(len(pieces)))
    assert shown.encode() == data
    assert "\ufffd" not in shown


def test_half_a_character_waits_for_its_other_half() -> None:
    """The first byte of é shows nothing, the second shows é."""
    output = Output(request(), PIECES)
    assert output.commit([7]).text == ""
    assert output.commit([8]).text == "é"


def test_tokens_after_an_accepted_end_token_are_dropped() -> None:
    """What a draft said after the end is no output: neither ids nor text nor log-probabilities."""
    ids, text, finish, log_probs = run(request(), [[2, END, 3, 3]])
    assert (ids, text, finish, log_probs) == ([2, END], "a", "stop", [2, END])


def test_the_length_cap_is_not_overshot() -> None:
    """A round of five accepted tokens ends at max_tokens exactly, and an end token there is still a stop."""
    assert run(request(max_tokens=3), [[2], [3, 2, 2, 2, 2]])[:3] == ([2, 3, 2], "aba", "length")
    assert run(request(max_tokens=2), [[2, END, 3]])[:3] == ([2, END], "a", "stop")
    output = Output(request(max_tokens=5), PIECES)
    output.commit([2, 2])
    assert output.remaining == 3


@pytest.mark.parametrize("rounds", [[[2], [3]], [[2, 3]], [[4]], [[2, 3, 2, 2]], [[4, 2]]])
def test_a_stop_string_is_found_across_rounds_and_inside_tokens(rounds: list[list[int]]) -> None:
    """`ab` split over rounds, over tokens of a round, or whole in a token: nothing of it is ever shown."""
    output = Output(request(stop=["ab"]), PIECES)
    texts = []
    for tokens in rounds:
        done = output.commit(tokens)
        texts.append(done.text)
        if done.finish_reason:
            break
    assert done.finish_reason == "stop"
    assert "".join(texts) == ""


def test_a_stop_string_that_ends_inside_a_token_cuts_the_token() -> None:
    """Of `abc` after a stop string `b`, only what is before the stop is text, and the id counts."""
    assert run(request(stop=["b"]), [[2], [5, 2]]) == ([2, 5], "aa", "stop", [2, 5])


def test_the_earliest_of_several_stop_strings_wins() -> None:
    """A token that completes two stop strings is cut at the one that begins first."""
    assert run(request(stop=["c", "bc"]), [[5]])[1] == "a"
    assert run(request(stop=["bc", "c"]), [[5]])[1] == "a"


def test_text_held_back_is_shown_when_it_did_not_become_a_stop_string() -> None:
    """`ab` held for `abab` comes out when the text goes on otherwise, and at the end."""
    output = Output(request(stop=["abab"], max_tokens=3), PIECES)
    assert output.commit([4]).text == ""
    assert output.commit([5]).finish_reason == "stop"  # ab + abc holds abab
    output = Output(request(stop=["abab"], max_tokens=3), PIECES)
    assert output.commit([4]).text == ""
    assert output.commit([3]).text == "abb"
    done = output.commit([4])
    assert (done.text, done.finish_reason) == ("ab", "length")
    output = Output(request(stop=["abab"]), PIECES)
    output.commit([4])
    assert output.commit([END]).text == "ab"


def test_an_incomplete_character_at_the_end_becomes_a_replacement() -> None:
    """Bytes that never became a character are one U+FFFD at the end, like in the whole text."""
    done = Output(request(max_tokens=2), PIECES).commit([2, 7])
    assert (done.text, done.finish_reason) == ("a\ufffd", "length")


def test_log_probabilities_are_optional_and_cut_with_the_ids() -> None:
    """Without log-probabilities none come out; with them exactly one for each id that is kept."""
    assert Output(request(), PIECES).commit([2, 3]).log_probs == []
    kept = Output(request(stop=["b"]), PIECES).commit([2, 3, 2], [LogProb(t, -float(t), []) for t in (2, 3, 2)])
    assert [(entry.token, entry.value) for entry in kept.log_probs] == [(2, -2.0), (3, -3.0)]


def test_ids_past_the_tokenizer_have_no_text() -> None:
    """A padded id is counted and has no bytes."""
    done = Output(request(), PIECES).commit([2, 10_000])
    assert (done.token_ids, done.text) == ([2, 10_000], "a")
