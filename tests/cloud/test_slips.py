"""Slips: what is made of rounds that take longer than the model says, and of sessions that are more or less alike."""

from __future__ import annotations

import random

import pytest

from paceline.cloud.agreement import FIRST_SHARE, Agreement, Prior, prior_of
from paceline.cloud.slips import CURIOSITY, LEAST, MOST, Setting, Slips

TWO, FOUR, PLAIN = Setting(2, 4), Setting(4, 4), Setting(1, 0)


def stretch(slips: Slips, setting: Setting, now: float, seconds: float, expected: float = 0.1) -> float:
    """One round of eight sessions that takes so long; returns when it ends."""
    for _ in range(setting.lanes):
        slips.round(8 // setting.lanes)
    slips.compare(setting, 8, expected, now + seconds)
    return now + seconds


def test_a_setting_is_judged_by_its_own_rounds_and_the_others_a_little() -> None:
    """Rounds that take a fifth longer: so much for that setting, a quarter of it for those that were not tried."""
    slips = Slips()
    now = stretch(slips, TWO, 0.0, 0.3)  # sessions still moved in it
    now = stretch(slips, TWO, now, 0.12)
    assert slips.of(TWO) == pytest.approx(1.2)
    assert slips.of(FOUR) == pytest.approx(1.05 - CURIOSITY)
    assert slips.of(Setting(2, 5)) == pytest.approx(1.05)
    assert slips.of(PLAIN) == 1.0


def test_the_more_settings_are_alike_the_more_is_expected_of_the_rest() -> None:
    """One setting that disappoints sends others to be tried; three say that the model is wrong for all of them."""
    slips, now, expected = Slips(), 0.0, []
    for k in (4, 5, 6):
        for _ in range(2):
            now = stretch(slips, Setting(2, k), now, 0.12)
        expected.append(slips.of(Setting(2, 9)))
    assert expected == sorted(expected) and expected[-1] == pytest.approx(1.1, abs=0.005)


def test_what_was_measured_long_ago_counts_for_little() -> None:
    """A setting that did badly is worth another try after minutes."""
    slips = Slips()
    now = stretch(slips, FOUR, 0.0, 0.14)
    now = stretch(slips, FOUR, now, 0.14)
    before = slips.of(FOUR)
    while now < 600.0:
        now = stretch(slips, TWO, now, 0.1)
    assert before == pytest.approx(1.4)
    assert slips.of(FOUR) == pytest.approx(1.0, abs=0.01)


def test_a_stretch_with_something_else_in_it_says_nothing() -> None:
    """Prompts are read in it, sessions come, or the setting has just changed."""
    slips = Slips()
    now = stretch(slips, TWO, 0.0, 0.1)
    slips.disturbed()
    now = stretch(slips, TWO, now, 0.2)
    now = stretch(slips, FOUR, now, 0.2)
    slips.round(9)
    slips.compare(FOUR, 9, 0.1, now + 0.2)
    assert slips.of(TWO) == slips.of(FOUR) == 1.0 - CURIOSITY


def test_slips_are_bounded() -> None:
    """One absurd measurement does not rule a setting out, or in."""
    for seconds, bound in ((50.0, MOST), (1e-6, LEAST)):
        slips = Slips()
        now = stretch(slips, TWO, 0.0, 0.1)
        stretch(slips, TWO, now, seconds)
        assert slips.of(TWO) == pytest.approx(bound)


def looked_at(shares: list[float], tokens: int) -> list[Agreement]:
    """Sessions with those shares of right tokens, and chance."""
    chance, made = random.Random(5), []
    for share in shares:
        agreement = Agreement(window=1e9)
        for _ in range(tokens):
            agreement.add(int(chance.random() < share), 1)
        made.append(agreement)
    return made


def test_sessions_that_differ_by_chance_alone_are_taken_for_alike() -> None:
    """Thirty-two sessions with one share: each is judged by all of them, not by its own luck."""
    sessions = looked_at([0.9] * 32, 60)
    prior = prior_of(sessions, 0.5)
    assert prior.share == pytest.approx(0.9, abs=0.02)
    assert prior.tokens > 200
    apart = [abs(one.value(prior) - 0.9) for one in sessions]
    assert max(apart) < 0.03 < max(abs(one.value(Prior(0.9, 1.0)) - 0.9) for one in sessions)


def test_sessions_that_differ_are_judged_by_their_own_tokens() -> None:
    """Half of them right, half of them wrong: what is common says next to nothing."""
    sessions = looked_at([0.9] * 8 + [0.1] * 8, 60)
    prior = prior_of(sessions, 0.5)
    assert prior.tokens < 5
    assert sessions[0].value(prior) > 0.75 and sessions[-1].value(prior) < 0.25


def test_before_anything_is_known_the_usual_share_holds() -> None:
    """No session, and sessions without a compared token."""
    assert prior_of([], 0.6).share == pytest.approx(0.6)
    assert prior_of([Agreement(192), Agreement(192)], 0.6).share == pytest.approx(0.6)
    assert Agreement(192).value(Prior()) == FIRST_SHARE


def test_a_text_that_turns_is_noticed_at_once() -> None:
    """Hundreds of right tokens weigh nothing against a dozen wrong ones in a row; chance alone changes little."""
    agreement, chance = Agreement(), random.Random(3)
    for _ in range(3000):
        agreement.add(int(chance.random() < 0.9), 1)
    assert agreement.value(Prior(0.5, 0.0)) == pytest.approx(0.9, abs=0.03)
    assert agreement.tried > 400
    for _ in range(40):
        agreement.add(0, 1)
    assert agreement.value(Prior(0.5, 0.0)) < 0.55
