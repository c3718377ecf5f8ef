"""What a drafter says of its proposals: how likely each was to it, if the target wants to know."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import pytest

from paceline.core.emulated import ToyLanguage
from paceline.core.sampling import History, Sampling, adjust, probabilities
from paceline.topology.log_probs import UNIT, log_probs_of_items
from paceline.topology.wire import Drafted, DraftItem

from .helpers import LANGUAGE, PROMPT, Bench, item, opened, proposals

SAMPLINGS = [
    Sampling(temperature=0.0),
    Sampling(seed=11, temperature=0.8),
    Sampling(seed=12, temperature=1.3, top_p=0.9, top_k=9),
    Sampling(seed=13, temperature=0.9, presence_penalty=1.5, repetition_penalty=1.2, logit_bias={7: 2.0}),
]


def asked(asked_for: DraftItem) -> DraftItem:
    """The item of a target with a budget."""
    return msgspec.structs.replace(asked_for, log_probs=asked_for.base == 0)


def answers(bench: Bench, *items: DraftItem) -> dict[int, tuple[list[int], list[float]]]:
    """(proposals, log probabilities) by session."""
    before = len(bench.sent)
    bench.ask("a", *items)
    found = {}
    for _, message in bench.sent[before:]:
        assert isinstance(message, Drafted)
        said = log_probs_of_items(message.log_probs, [len(one.tokens) // 4 for one in message.items])
        for one, values in zip(message.items, said, strict=True):
            found[one.session] = proposals(one), values
    return found


def by_hand(tokens: Sequence[int], drafted: Sequence[int], sampling: Sampling) -> list[float]:
    """Of each drafted token, from the whole rows of the language; a greedy one at temperature 1."""
    values = []
    for place, token in enumerate(drafted):
        state = 0
        for one in [*tokens, *drafted[:place]]:
            state = LANGUAGE.next_state(state, one)
        row = adjust(LANGUAGE.rows([state])[0], sampling, History(tokens, 4), list(drafted[:place]))
        at = msgspec.structs.replace(sampling, temperature=sampling.temperature or 1.0)
        values.append(float(np.log(probabilities(row[None, :], [at])[0][token])))
    return values


def test_each_proposal_comes_with_its_probability_after_all_adjustments() -> None:
    """Sessions with other parameters in one batch, round after round, with kept proposals among them."""
    bench = opened()
    texts = {n: [*PROMPT, n] for n in range(len(SAMPLINGS))}
    base = dict.fromkeys(texts, 0)
    for turn in range(8):
        said = answers(bench, *(asked(item(n, texts[n], base[n], 4, SAMPLINGS[n], prompt_length=4)) for n in texts))
        for n, (drafted, values) in said.items():
            assert len(drafted) == 4
            assert values == pytest.approx(by_hand(texts[n], drafted, SAMPLINGS[n]), abs=1.0 / UNIT)
            base[n] = len(texts[n])
            texts[n] += [*drafted[: turn % 4], (7 * turn + n) % 61]


def test_who_did_not_ask_is_told_nothing() -> None:
    """Not alone, where the message has no such bytes, nor beside a session that did."""
    bench = opened()
    quiet, curious = item(1, PROMPT, 0, 3, SAMPLINGS[0]), asked(item(2, PROMPT, 0, 3, SAMPLINGS[0]))
    assert answers(bench, quiet)[1][1] == []
    assert bench.sent[-1][1].log_probs is None  # type: ignore[union-attr]
    both = answers(bench, item(1, [*PROMPT, 5], len(PROMPT), 3, SAMPLINGS[0]), curious)
    assert both[1][1] == [] and len(both[2][1]) == 3


def test_an_emulated_drafter_says_the_truth() -> None:
    """Its likeliest token is right as often as it says, text by text."""
    target = ToyLanguage(64, seed=2)
    drafter = ToyLanguage(64, seed=2, agreement=0.6, spread=0.3)
    shares = []
    for first in range(12):
        text = state = target.next_state(0, first)
        right, said = 0, 0.0
        for token in range(1500):
            row = drafter.rows([state], [text])[0]
            right += int(row.argmax() == target.rows([state])[0].argmax())
            said = float(np.exp(row.max()) / np.exp(row).sum())
            state = target.next_state(state, token % 64)
        shares.append(said)
        assert right / 1500 == pytest.approx(said, abs=0.04)
    assert max(shares) - min(shares) > 0.3
