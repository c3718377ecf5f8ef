"""From rows of logits to what may be committed: the target's own choice at every position."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from paceline.cloud.requests import LogProb
from paceline.cloud.sessions import Session
from paceline.core.sampling import Array, accepted, adjust, choose, log_probabilities


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
    samplings, positions = [], []
    adjusted = logits
    row = 0
    for session, draft in zip(sessions, drafts, strict=True):
        sampling = session.request.sampling
        first = len(session.tokens)
        for index in range(len(draft) + 1):
            samplings.append(sampling)
            positions.append(first + index)
            if session.history is not None:
                if adjusted is logits:
                    adjusted = _float64_copy(logits)
                adjusted[row] = adjust(logits[row], sampling, session.history, draft[:index])
            row += 1
    chosen = choose(adjusted, samplings, positions).tolist() if row else []
    results, row = [], 0
    for session, draft in zip(sessions, drafts, strict=True):
        own = chosen[row : row + len(draft) + 1]
        tokens = own[: accepted(own, draft) + 1]
        results.append(Verified(session, tokens, _log_probs(logits[row:], session, tokens), len(draft)))
        row += len(draft) + 1
    return results


def _log_probs(rows: Array, session: Session, tokens: Sequence[int]) -> list[LogProb]:
    top = session.request.log_probs
    if top is None:
        return []
    return [LogProb(token, *log_probabilities(rows[index], token, top)) for index, token in enumerate(tokens)]


def _float64_copy(logits: Array) -> Array:
    return logits.astype("float64") if hasattr(logits, "astype") else logits.double().clone()
