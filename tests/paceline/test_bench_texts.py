"""Whether modes of a bench wrote the same texts: what was compared, and what was not."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.bench import Job, Measured, Mode, Timed, modes
from paceline.bench_texts import Texts, compared, same_texts
from paceline.topology.spec import parse_topology

TEXT = """\
version: 1
name: two
link: {transport: memory}
drafters:
  - {name: d, model: toy, runtime: emulated}
targets:
  - {name: a, model: toy, engine: emulated, drafters: {names: [d]}}
  - {name: b, model: toy, engine: emulated, drafters: {names: [d]}}
"""
GOOD, OTHER = [1, 2], [1, 3]


def chosen(*names: str, text: str = TEXT) -> list[Mode]:
    return modes(parse_topology(text, "two.yaml", Path()), names)


def turn(error: str | None = None, **texts: list[list[int]]) -> Measured:
    """Answers by target; error: of each one's last request."""
    answers = {name: [Timed(0.0, ids, [(1.0, len(ids))], 1.0) for ids in some] for name, some in texts.items()}
    for some in answers.values():
        some[-1].error = error
    return Measured(answers, 1.0, None, 1, 4)


def verdict(found: list[Mode], temperature: float = 0.0, **turns: list[Measured]) -> dict[str, Texts]:
    return compared(found, Job([[1]], 2, 1, 2, temperature), turns)


RIGHT = turn(a=[GOOD, OTHER], b=[OTHER, GOOD])


def test_all_are_compared_with_plain_and_plain_with_nothing() -> None:
    """In whatever order the modes come."""
    found = chosen("lanes", "plain", "star")
    wrong = turn(a=[GOOD, OTHER], b=[OTHER, OTHER])
    said = verdict(found, lanes=[RIGHT], plain=[RIGHT], star=[wrong])
    assert said == {"lanes": Texts.SAME, "plain": Texts.NOT_COMPARED, "star": Texts.DIFFER}
    assert [one.identical for one in said.values()] == [True, None, False]


def test_without_plain_the_first_mode_that_serves_a_target_is_its_reference() -> None:
    """b is served by star first: nothing says that its texts there are right; lanes is compared with them."""
    found = chosen("standard", "star", "lanes")
    standard = turn(a=[GOOD, OTHER])
    said = verdict(found, standard=[standard], star=[RIGHT], lanes=[RIGHT])
    assert list(said.values()) == [Texts.NOT_COMPARED, Texts.NOT_COMPARED, Texts.SAME]
    wrong = turn(a=[GOOD, OTHER], b=[GOOD, GOOD])
    assert verdict(found, standard=[standard], star=[RIGHT], lanes=[wrong])["lanes"] is Texts.DIFFER
    wrong = turn(a=[GOOD, GOOD], b=[OTHER, GOOD])
    assert verdict(found, standard=[standard], star=[wrong], lanes=[RIGHT])["star"] is Texts.DIFFER


@pytest.mark.parametrize(
    "ours", [turn(a=[GOOD, OTHER]), turn(a=[GOOD], b=[OTHER, GOOD]), turn(a=[GOOD, [1]], b=[OTHER, GOOD])]
)
def test_what_is_missing_differs(ours: Measured) -> None:
    """A target, an answer, the end of an answer."""
    assert verdict(chosen("plain", "star"), plain=[RIGHT], star=[ours])["star"] is Texts.DIFFER
    assert not same_texts(ours, RIGHT) and not same_texts(RIGHT, ours)


def test_every_turn_counts() -> None:
    """Also the slowest one of a mode, and plain's own other turns."""
    found, wrong = chosen("plain", "star"), turn(a=[OTHER, OTHER], b=[OTHER, GOOD])
    assert verdict(found, plain=[RIGHT, RIGHT, RIGHT], star=[RIGHT, RIGHT, wrong])["star"] is Texts.DIFFER
    said = verdict(found, plain=[RIGHT, turn(a=[GOOD, OTHER], b=[OTHER, GOOD])], star=[RIGHT, RIGHT])
    assert said["plain"] is Texts.SAME
    assert verdict(found, plain=[RIGHT, wrong], star=[RIGHT, RIGHT])["plain"] is Texts.DIFFER


def test_a_request_that_failed_is_never_the_same() -> None:
    """On either side; another answer that differs is told first."""
    found, cut = chosen("plain", "star"), turn("no room", a=[GOOD, OTHER], b=[OTHER, GOOD])
    assert verdict(found, plain=[RIGHT], star=[cut])["star"] is Texts.FAILED
    assert verdict(found, plain=[cut], star=[RIGHT])["star"] is Texts.FAILED
    assert verdict(found, plain=[RIGHT], star=[turn("no room", a=[OTHER, OTHER], b=[OTHER, GOOD])])["star"] is (
        Texts.DIFFER
    )
    assert not same_texts(cut, cut)


def test_drawn_drafts_are_not_compared() -> None:
    """With rejection and a temperature a drafted text may be another one; greedy ones, and plain turns, may not."""
    text = TEXT.replace("names: [d]}}", "names: [d]}, verification: rejection}")
    found, other = chosen("plain", "star", text=text), turn(a=[OTHER, OTHER], b=[OTHER, GOOD])
    said = verdict(found, 1.0, plain=[RIGHT, RIGHT], star=[other, RIGHT])
    assert (said["star"], said["star"].identical) == (Texts.DRAWN, None)
    assert verdict(found, 1.0, plain=[RIGHT, other], star=[other, other])["plain"] is Texts.DIFFER
    assert verdict(found, 0.0, plain=[RIGHT], star=[other])["star"] is Texts.DIFFER


def test_the_same_texts_are_the_same() -> None:
    """For benchmarks that compare two measurements; two of nothing are not."""
    assert same_texts(RIGHT, turn(a=[GOOD, OTHER], b=[OTHER, GOOD]))
    assert not same_texts(Measured({}, 1.0, None, 1, 4), Measured({}, 1.0, None, 1, 4))
    assert not same_texts(Measured({"a": []}, 1.0, None, 1, 4), Measured({"a": []}, 1.0, None, 1, 4))
