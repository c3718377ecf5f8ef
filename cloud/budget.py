"""Which draft tokens a lane's pass verifies: all of them, or the likeliest ones that `verify_budget` has room for.

A draft token counts if it and all before it are right: the tokens with the highest product of probabilities go first,
whosever they are (TETRIS, Wu et al., arXiv 2502.15197). A session's tokens never overtake one another, so what is
verified of a draft is a beginning of it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

from paceline.cloud.sessions import Session
from paceline.core.rejection import Weights

LEAST_AGREEMENT = 1e-6


def drafts_to_verify(
    sessions: Sequence[Session], budget: int | None, agreement_of: Callable[[Session], float]
) -> list[list[int]]:
    """Of each session the first tokens of its proposal: none beyond its length limit, at most `budget` in all."""
    drafts = [list(session.drafts.proposal[: max(0, session.output.remaining - 1)]) for session in sessions]
    if budget is None or sum(map(len, drafts)) <= budget:
        return drafts
    chances = [
        _chances(session, len(draft), agreement_of(session)) for session, draft in zip(sessions, drafts, strict=True)
    ]
    return [draft[:count] for draft, count in zip(drafts, likeliest(chances, budget), strict=True)]


def likeliest(chances: Sequence[Sequence[float]], budget: int) -> list[int]:
    """How many of each row's first entries are among the `budget` largest of all; rows never rise."""
    places = ((-chance, place, row) for row, values in enumerate(chances) for place, chance in enumerate(values))
    counts = [0] * len(chances)
    for _, _, row in sorted(places)[:budget]:
        counts[row] += 1
    return counts


def _chances(session: Session, count: int, agreement: float) -> list[float]:
    """Log of the probability that each of the first `count` proposed tokens and all before it are right.

    By what the drafter said of them; where it said nothing, by how often the session's drafts were right.
    """
    state = session.drafts
    if state.weights:
        return of_draws(state.proposal[:count], state.weights[:count])
    said = state.log_probs[len(session.tokens) - state.log_probs_from :][:count] if state.log_probs else ()
    each = said if len(said) == count else [math.log(max(agreement, LEAST_AGREEMENT))] * count
    return list(itertools.accumulate(each))


def of_draws(tokens: Sequence[int], weights: Sequence[Weights]) -> list[float]:
    """Of a draft that was drawn. Whether a token is verified must not depend on which one was drawn there, or the text
    would be biased (core/rejection.py): it counts with the likeliest that might have been, those before it as drawn."""
    chances, before = [], 0.0
    for token, (ids, shares) in zip(tokens, weights, strict=True):
        total = sum(shares)
        chances.append(before + math.log(max(shares) / total))
        before += math.log(shares[ids.index(token)] / total)
    return chances
