"""What a Draft says of each session, and how many sessions one Draft may hold."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from paceline.cloud.sessions import Session
from paceline.topology.wire import DraftItem, pack_tokens

# Of one Draft, far below what a frame may hold (wire.py).
ITEMS_A_DRAFT, TOKENS_A_DRAFT, BIASES_A_DRAFT = 256, 1 << 18, 1 << 13
KEPT_SEND_TIMES = 8


def draft_item(
    session: Session,
    k: int,
    now: float,
    max_tokens: int,
    *,
    draws: bool = False,
    branches: int = 0,
    log_probs: bool = False,
) -> DraftItem:
    """What was committed since the drafter's last acknowledgement, at most max_tokens of it, and how many to propose.

    Notes when that version left. draws: whether the session's drafts are to be drawn from weights. branches: outcomes
    of the next round to draft ahead for. log_probs: whether it is to be said how likely its drafts are.
    """
    state = session.drafts
    base = state.acknowledged
    tokens = session.tokens[base : base + max_tokens]
    version = base + len(tokens)
    state.cut = version < len(session.tokens)
    if state.cut:
        k = 0
    state.unanswered_since = now
    state.sent_at[version] = now
    if len(state.sent_at) > KEPT_SEND_TIMES:
        del state.sent_at[next(iter(state.sent_at))]
    opening = base == 0
    state.branches_asked = branches > 0 and k > 0
    return DraftItem(
        session=session.id,
        base=base,
        tokens=pack_tokens(tokens),
        check=state.check,
        k=k,
        sampling=session.request.sampling if opening else None,
        prompt_length=len(session.request.prompt) if opening else 0,
        limit=session.limit if opening else 0,
        weights=opening and draws,
        branches=branches if k else 0,
        taken=state.taken if k else 0,
        log_probs=opening and log_probs,
    )


def parts(sessions: Sequence[Session]) -> Iterator[list[Session]]:
    """As many sessions as one Draft may hold: many that are opened at once, with long texts, are more than a frame."""
    part: list[Session] = []
    tokens = biases = 0
    for session in sessions:
        opening = session.drafts.acknowledged == 0
        more = len(session.tokens) - session.drafts.acknowledged
        bias = len(session.request.sampling.logit_bias) if opening else 0
        full = len(part) == ITEMS_A_DRAFT or tokens + more > TOKENS_A_DRAFT or biases + bias > BIASES_A_DRAFT
        if part and full:
            yield part
            part, tokens, biases = [], 0, 0
        part.append(session)
        tokens, biases = tokens + more, biases + bias
    yield part
