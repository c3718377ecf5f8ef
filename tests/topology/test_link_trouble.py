"""A link that stays down: what is logged, and how seldom."""

from __future__ import annotations

import logging

import pytest

from paceline.topology.link_trouble import MAX_REASONS, REMIND_SECONDS, LinkTrouble

log = logging.getLogger("test.link")


def test_an_unplugged_cable_is_told_once_and_then_every_ten_minutes(caplog: pytest.LogCaptureFixture) -> None:
    """Two reasons that take turns, once a second for 25 minutes: two lines and two reminders, with the name."""
    trouble = LinkTrouble(log, "d1", "10.0.0.7:7070")
    for second in range(1500):
        trouble.found("no route to host" if second % 2 else "did not answer within 1.5 s", 5000.0 + second)
    assert caplog.messages == [
        "no link to drafter d1 at 10.0.0.7:7070: did not answer within 1.5 s",
        "no link to drafter d1 at 10.0.0.7:7070: no route to host",
        "still no link to drafter d1 at 10.0.0.7:7070 after 10 min (did not answer within 1.5 s)",
        "still no link to drafter d1 at 10.0.0.7:7070 after 20 min (did not answer within 1.5 s)",
    ]
    assert caplog.records[0].__dict__["drafter"] == "d1"
    assert trouble.reason == "no route to host"


def test_a_link_that_was_up_is_told_afresh(caplog: pytest.LogCaptureFixture) -> None:
    """The same reason is news again, and time counts from there."""
    trouble = LinkTrouble(log, None, "a:1")
    trouble.found("gone", 0.0)
    trouble.over()
    assert trouble.reason is None
    trouble.found("gone", REMIND_SECONDS)
    trouble.found("gone", REMIND_SECONDS + 1)
    assert caplog.messages == ["no link to the drafter at a:1: gone"] * 2


def test_a_drafter_that_always_has_new_words_cannot_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """After a few reasons only the reminders go on."""
    trouble = LinkTrouble(log, "d1", "a:1")
    for second in range(700):
        trouble.found(f"reason {second}", float(second))
    assert len(caplog.messages) == MAX_REASONS + 1
