"""From rows of logits to what may be committed: the target's own choice at every position, or, with a draft that was
drawn from weights, what rejection leaves of it (core/rejection.py)."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from paceline.cloud.requests import LogProb
from paceline.cloud.sessions import Session
from paceline.core.arrays import Array
from paceline.core.rejection import Block, verify_blocks
from paceline.core.sampling import Sampling, accepted, adjust, choose, log_probabilities, probabilities


class Verified(NamedTuple):
    """A session's tokens of this round: the accepted drafts and one more. `drafted`: how many were proposed."""

    session: Session
    tokens: list[int]
    log_probs: list[LogProb]
    drafted: int


def verify(logits: Array, sessions: Sequence[Session], drafts: Sequence[Sequence[int]]) -> list[Verified]:
    """Samples every row with the rule and keeps each session's prefix that agrees with its draft, or verifies a block.

    logits: [sum of (len(draft) + 1), vocabulary], a session's rows in order; row j chooses the token after
    the committed ones and draft[:j].
    """
    if getattr(logits, "is_cpu", False):
        logits = logits.numpy()  # small operations cost less there
    adjusted = _adjusted(logits, sessions, drafts)
    emitted = _emitted(adjusted, sessions, drafts)
    results, row = [], 0
    for session, draft, tokens in zip(sessions, drafts, emitted, strict=True):
        end = row + len(draft) + 1
        log_probs = [] if session.request.log_probs is None else _log_probs(logits[row:end], session, tokens)
        results.append(Verified(session, tokens, log_probs, len(draft)))
        row = end
    return results


def _emitted(logits: Array, sessions: Sequence[Session], drafts: Sequence[Sequence[int]]) -> list[list[int]]:
    """Each session's tokens of this round: a drawn draft is verified as a block, any other as a coupled one."""
    drawn = [bool(draft) and bool(session.drafts.weights) for session, draft in zip(sessions, drafts, strict=True)]
    if not any(drawn):
        return _coupled(logits, sessions, drafts)
    emitted: list[list[int]] = [[] for _ in sessions]
    rows = _rows(drafts)
    for kind, verified in ((False, _coupled), (True, _blocks)):
        places = [place for place, is_drawn in enumerate(drawn) if is_drawn is kind]
        if places:
            part = logits[[row for place in places for row in rows[place]]]
            results = verified(part, [sessions[place] for place in places], [drafts[place] for place in places])
            for place, tokens in zip(places, results, strict=True):
                emitted[place] = tokens
    return emitted


def _rows(drafts: Sequence[Sequence[int]]) -> list[range]:
    """Which rows of logits are whose."""
    ends = list(itertools.accumulate(len(draft) + 1 for draft in drafts))
    return [range(end - len(draft) - 1, end) for end, draft in zip(ends, drafts, strict=True)]


def _coupled(logits: Array, sessions: Sequence[Session], drafts: Sequence[Sequence[int]]) -> list[list[int]]:
    samplings: list[Sampling] = []
    positions: list[int] = []
    for session, draft in zip(sessions, drafts, strict=True):
        first, count = len(session.tokens), len(draft) + 1
        samplings += [session.request.sampling] * count
        positions += range(first, first + count)
    chosen = choose(logits, samplings, positions).tolist() if samplings else []
    results, row = [], 0
    for draft in drafts:
        tokens = chosen[row : row + len(draft) + 1]
        del tokens[accepted(tokens, draft) + 1 :]
        results.append(tokens)
        row += len(draft) + 1
    return results


def _blocks(logits: Array, sessions: Sequence[Session], drafts: Sequence[Sequence[int]]) -> list[list[int]]:
    samplings = [s.request.sampling for s, draft in zip(sessions, drafts, strict=True) for _ in range(len(draft) + 1)]
    blocks = [
        Block(session.request.sampling.seed, len(session.tokens), draft, session.drafts.weights[: len(draft)])
        for session, draft in zip(sessions, drafts, strict=True)
    ]
    return verify_blocks(probabilities(logits, samplings), blocks)


def _adjusted(logits: Array, sessions: Sequence[Session], drafts: Sequence[Sequence[int]]) -> Array:
    """The rows with bias and penalties in, copied only where a session has any."""
    if all(session.history is None for session in sessions):
        return logits
    adjusted, row = _float64_copy(logits), 0
    for session, draft in zip(sessions, drafts, strict=True):
        if session.history is not None:
            for index in range(len(draft) + 1):
                sampling = session.request.sampling
                adjusted[row + index] = adjust(logits[row + index], sampling, session.history, draft[:index])
        row += len(draft) + 1
    return adjusted


def _log_probs(rows: Array, session: Session, tokens: Sequence[int]) -> list[LogProb]:
    top = session.request.log_probs or 0
    return [LogProb(token, *log_probabilities(rows[index], token, top)) for index, token in enumerate(tokens)]


def _float64_copy(logits: Array) -> Array:
    return logits.astype("float64") if hasattr(logits, "astype") else logits.double().clone()
