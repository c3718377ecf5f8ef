"""`verify_budget`: which draft tokens are verified, that no more are, and that texts stay what they are."""

from __future__ import annotations

import math
from pathlib import Path
from random import Random

import pytest
import yaml

from paceline.cloud.budget import drafts_to_verify, likeliest, of_draws
from paceline.cloud.requests import Request
from paceline.cloud.sessions import Session
from paceline.core.model import Span
from paceline.core.rejection import Weights
from paceline.core.sampling import Sampling
from paceline.topology.spec import parse_topology
from paceline.virtual import VirtualTarget, VirtualWorld

from .helpers import TOKEN_BYTES, ask


def test_the_likeliest_tokens_are_chosen_whosever_they_are() -> None:
    """Never one that is less likely than one left out, and always a beginning of each draft."""
    chance = Random(1)
    for _ in range(200):
        rows = []
        for _ in range(chance.randint(1, 6)):
            steps = [chance.choice((0.0, -0.1, -1.0)) for _ in range(chance.randint(0, 8))]
            rows.append([sum(steps[: place + 1]) for place in range(len(steps))])
        budget = chance.randint(0, 20)
        counts = likeliest(rows, budget)
        chosen = [value for row, count in zip(rows, counts, strict=True) for value in row[:count]]
        left = [value for row, count in zip(rows, counts, strict=True) for value in row[count:]]
        assert len(chosen) == min(budget, sum(map(len, rows)))
        assert not chosen or not left or min(chosen) >= max(left)


def test_whether_a_drawn_token_is_verified_does_not_depend_on_it() -> None:
    """Its place counts with the likeliest candidate; which one was drawn counts only for the places after it."""
    weights = [Weights([3, 5, 9], [10, 60, 30]), Weights([1, 2], [1, 1]), Weights([4, 8], [9, 1])]
    reference = of_draws([5, 1, 4], weights)
    assert reference == pytest.approx([math.log(0.6), math.log(0.6 * 0.5), math.log(0.6 * 0.5 * 0.9)])
    for place, tokens in ((0, [9, 1, 4]), (1, [5, 2, 4]), (2, [5, 1, 8])):
        assert of_draws(tokens, weights)[: place + 1] == reference[: place + 1]
    assert of_draws([3, 1, 4], weights)[1] == pytest.approx(math.log(0.1 * 0.5))


def proposing(name: str, tokens: list[int], log_probs: list[float] | None = None, late: int = 0) -> Session:
    """A session with a proposal whose first `late` tokens were committed before it came."""
    session = Session(1, ask(name), TOKEN_BYTES, Span(1, 0, 64))
    session.drafts.proposal = tokens
    if log_probs is not None:
        session.drafts.log_probs, session.drafts.log_probs_from = log_probs, len(session.tokens) - late
    return session


def test_what_the_drafter_says_decides_and_else_how_often_it_was_right() -> None:
    """Sure drafts are verified whole, doubtful ones not; of a late draft the log probabilities of the rest count."""
    sure = proposing("sure", [1, 2, 3], [-0.01, -0.01, -0.01])
    doubtful = proposing("doubtful", [4, 5, 6], [-1.0, -0.01, -0.01])
    late = proposing("late", [7, 8], [-9.0, -0.3, -9.0], late=1)
    silent = proposing("silent", [9, 9, 9])
    sessions = [doubtful, sure, silent, late]
    assert drafts_to_verify(sessions, 6, lambda session: 0.8) == [[], [1, 2, 3], [9, 9], [7]]
    assert drafts_to_verify(sessions, None, lambda session: 0.8) == [[4, 5, 6], [1, 2, 3], [9, 9, 9], [7, 8]]
    assert drafts_to_verify(sessions, 0, lambda session: 0.0) == [[], [], [], []]


def world(budget: int | None, lanes: int, k: int, ahead: int = 0) -> VirtualWorld:
    """Twelve sessions whose drafts are more and less often right, on virtual time."""
    language = {"vocabulary_size": 64, "seed": 4}
    drafter = {"name": "d", "model": "toy", "runtime": "emulated", "max_batch": 8}
    drafter["profile"] = {**language, "step_ms": 2, "agreement": 0.7, "agreement_spread": 0.3}
    target = {"name": "t", "model": "toy", "engine": "emulated", "drafters": {"names": ["d"]}, "lanes": lanes}
    target |= {"draft_length": k, "draft_ahead": ahead, "profile": {**language, "verify_ms": {1: 20, 64: 40}}}
    if budget is not None:
        target["verify_budget"] = budget
    data = {"version": 1, "name": "budget", "drafters": [drafter], "targets": [target]}
    return VirtualWorld(parse_topology(yaml.safe_dump(data), "budget.yaml", Path()), rtt=0.004)


def decode(served: VirtualWorld) -> tuple[VirtualTarget, list[list[int]], int]:
    """The target, every text, and the most draft tokens that a pass held."""
    (target,) = served.targets.values()
    model, most = target.engine.model, 0
    forward = model.forward

    def counted(segments):  # type: ignore[no-untyped-def]
        nonlocal most
        most = max(most, sum(segment.rows - 1 for segment in segments if segment.rows))
        return forward(segments)

    model.forward = counted  # type: ignore[method-assign]
    for index in range(12):
        sampling = Sampling(seed=index, temperature=0.0 if index % 2 else 0.7)
        target.submit(Request(f"r{index}", (index + 1, 2, 3), sampling, 60 + index))
    served.run(lambda: all(answer.ended is not None for answer in target.answers.values()))
    return target, [answer.token_ids for answer in target.answers.values()], most


@pytest.mark.parametrize(("budget", "lanes", "ahead"), [(1, 1, 0), (5, 2, 0), (16, 1, 0), (5, 2, 4), (1000, 3, 0)])
def test_texts_stay_and_no_pass_verifies_more(budget: int, lanes: int, ahead: int) -> None:
    """Any budget, one lane or several, with drafts made ahead: the texts of plain decoding."""
    _, plain, _ = decode(world(None, 1, 0))
    target, texts, most = decode(world(budget, lanes, 6, ahead))
    assert texts == plain
    assert 0 < most <= budget
    assert target.engine.statistics.emitted_with_draft > target.engine.statistics.drafted_rounds


def test_equal_budget_brings_more_where_the_likeliest_go_first() -> None:
    """Against drafts cut evenly to as many tokens: k = 2 for each of twelve sessions, up to when the first one ends."""
    right = []
    for budget, k in ((None, 2), (24, 8)):
        served = world(budget, 1, k)
        (target,) = served.targets.values()
        for index in range(12):
            target.submit(Request(f"r{index}", (5 * index + 1, 2, 3), Sampling(temperature=0.0), 200))
        served.run(lambda target=target: any(answer.ended is not None for answer in target.answers.values()))  # type: ignore[misc]
        statistics = target.engine.statistics
        right.append((statistics.emitted_with_draft - statistics.drafted_rounds) / statistics.drafted_tokens)
    assert right[1] > 1.15 * right[0]
