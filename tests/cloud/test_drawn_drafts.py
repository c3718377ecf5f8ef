"""Drafts that were drawn from weights: which of them count, decided without a look at their tokens."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

import msgspec
import pytest

from paceline.cloud.events import Arrived
from paceline.core.rejection import Weights, certain
from paceline.topology.handshake import REJECTION
from paceline.topology.weights import pack_weights
from paceline.topology.wire import Drafted, DraftedItem, DraftItem, decode, encode, pack_tokens

from .helpers import VOCABULARY, Bench, FakeDrafter, ask

OTHERS = Weights(list(range(VOCABULARY)), [1] * VOCABULARY)


def opened(verification: str = "rejection", able: bool = True, **sampling: object) -> tuple[Bench, FakeDrafter]:
    """A bench whose one session has its first token and awaits a draft."""
    bench = Bench()
    drafting = replace(bench.engine.config.drafting, verification=verification)  # type: ignore[arg-type]
    bench.engine.drafting.reconfigure(drafting)
    drafter = FakeDrafter(bench)
    names = ["coupled", REJECTION] if able else ["coupled"]
    drafter.welcome = msgspec.structs.replace(drafter.welcome, capabilities=names)
    drafter.up()
    bench.submit(ask(**sampling))
    assert bench.engine.step()
    drafter.answer(drafter.drafts[0])
    assert bench.engine.step()
    assert not bench.engine.step()
    return bench, drafter


def answer(drafter: FakeDrafter, item: DraftItem, tokens: Sequence[int], rows: Sequence[Weights] | None = None) -> None:
    """A draft with its weights, over the wire; without rows each token was certain."""
    version = item.base + len(item.tokens) // 4
    packed = pack_weights(rows or [certain(token) for token in tokens])
    answered = DraftedItem(item.session, 0, version, version, pack_tokens(tokens))
    message = decode(encode(Drafted(drafter.welcome.epoch, [answered], weights=packed)))
    assert isinstance(message, Drafted)
    drafter.bench.put(Arrived(drafter.name, message))


@pytest.mark.parametrize(
    ("verification", "able", "temperature", "asked"),
    [
        ("rejection", True, 0.9, True),
        ("rejection", True, 0.0, False),
        ("rejection", False, 0.9, False),
        ("coupled", True, 0.9, False),
    ],
)
def test_draws_are_asked_for_at_open_where_they_can_be_used(
    verification: str, able: bool, temperature: float, asked: bool
) -> None:
    """With rejection, at a temperature, of a drafter that says it can; in the Draft that opens the session only."""
    bench, drafter = opened(verification, able, temperature=temperature)
    assert [item.weights for item in drafter.drafts if item.base == 0] == [asked]
    assert not any(item.weights for item in drafter.drafts if item.base)
    assert bench.engine.statistics.fallback_rounds == 1


def test_a_drafter_without_the_capability_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    """Its coupled drafts are used as such, and the log says so."""
    with caplog.at_level(logging.WARNING):
        bench, drafter = opened(able=False)
    assert [record.getMessage() for record in caplog.records] == [
        "drafter d has no rejection: its drafts are coupled ones, the texts are right"
    ]
    drafter.answer(drafter.last(), [1, 2, 3, 4])
    assert bench.engine.step()
    assert bench.engine.statistics.drafted_tokens == 4


def test_a_late_draw_is_dropped_whole() -> None:
    """Also where its first tokens are just what was committed since: whether it is used must not depend on them."""
    bench, drafter = opened()
    item = drafter.last()
    bench.clock.advance(0.101)
    assert bench.engine.step()
    committed = bench.ids["r"][-1]
    answer(drafter, item, [committed, 1, 2, 3])
    assert not bench.engine.step()
    assert not bench.engine.drafting.sessions[item.session].drafts.proposal
    answer(drafter, drafter.last(), [5, 6, 7, 8])
    assert bench.engine.step()
    assert bench.engine.statistics.drafted_tokens == 4


def test_of_two_draws_for_one_place_the_last_is_used_and_none_again() -> None:
    """Which one is decided by time alone; once the round has gone, its place does not come again."""
    bench, drafter = opened()
    item = drafter.last()
    answer(drafter, item, [9, 9, 9, 9])
    answer(drafter, item, [4, 5])
    assert bench.engine.step()
    assert bench.engine.statistics.drafted_tokens == 2
    have = list(bench.ids["r"])
    answer(drafter, item, [9, 9, 9, 9])
    answer(drafter, item, have[-4:])
    assert not bench.engine.step()
    assert bench.ids["r"] == have


def test_a_draft_ends_where_an_id_may_be_unknown_whatever_was_drawn() -> None:
    """The candidates decide, not the token: both drafts are cut at the same place."""
    strange = Weights([3, VOCABULARY], [60_000, 1])
    for drawn in (3, VOCABULARY):
        bench, drafter = opened()
        answer(drafter, drafter.last(), [1, 2, drawn, 4], [certain(1), OTHERS, strange, OTHERS])
        assert bench.engine.step()
        assert bench.engine.statistics.drafted_tokens == 2


def test_weights_that_nobody_asked_for_change_no_text() -> None:
    """With coupled verification the tokens are checked against the target's own, as ever."""
    texts = []
    for drawn in (True, False):
        bench, drafter = opened("coupled")
        if drawn:
            answer(drafter, drafter.last(), [1, 2, 3, 4])
        else:
            drafter.answer(drafter.last(), [1, 2, 3, 4])
        assert bench.engine.step()
        texts.append(list(bench.ids["r"]))
    assert texts[0] == texts[1]


def test_a_cap_cuts_the_draft_before_it_is_verified() -> None:
    """With two tokens left to emit one of four drafted is verified, and the text ends at its length."""
    bench, drafter = opened()
    while not bench.ends:
        left = 40 - len(bench.ids["r"])
        drafted = bench.engine.statistics.drafted_tokens
        answer(drafter, drafter.last(), [1, 2, 3, 4], [OTHERS] * 4) if drafter.last().k else bench.clock.advance(0.2)
        bench.engine.step()
        assert bench.engine.statistics.drafted_tokens - drafted <= max(0, left - 1)
    assert len(bench.ids["r"]) == 40
