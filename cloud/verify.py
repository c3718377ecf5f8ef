"""From rows of logits to what may be committed: the target's own choice at every position."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from paceline.cloud.requests import LogProb
from paceline.cloud.sessions import Session
from paceline.core.sampling import Array, Sampling, accepted, adjust, choose, log_probabilities


class Verified(NamedTuple):
    """A session's tokens of this round: the accepted drafts and one more. `drafted`: how many were proposed."""

    session: Session
    tokens: list[int]
    log_probs: list[LogProb]
    drafted: int


def verify(logits: Array, sessions: Sequence[Session], drafts: Sequence[Sequence[int]]) -> list[Verified]:
    """Samples every row with the rule and keeps each session's prefix that agrees with its draft.

    logits: [sum of (len(draft) + 1), vocabulary], a session's rows in order; row j chooses the token after
    the committed ones and draft[:j].
    """
    if getattr(logits, "is_cpu", False):
        logits = logits.numpy()  # small operations cost less there
    samplings: list[Sampling] = []
    positions: list[int] = []
    for session, draft in zip(sessions, drafts, strict=True):
        first, count = len(session.tokens), len(draft) + 1
        samplings += [session.request.sampling] * count
        positions += range(first, first + count)
    chosen = choose(_adjusted(logits, sessions, drafts), samplings, positions).tolist() if samplings else []
    results, row = [], 0
    for session, draft in zip(sessions, drafts, strict=True):
        end = row + len(draft) + 1
        tokens = chosen[row:end]
        del tokens[accepted(tokens, draft) + 1 :]
        log_probs = [] if session.request.log_probs is None else _log_probs(logits[row:end], session, tokens)
        results.append(Verified(session, tokens, log_probs, len(draft)))
        row = end
    return results


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
