"""What of a drafter's answer becomes a session's proposal for its next round."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

from paceline.cloud.sessions import Session
from paceline.core.rejection import Weights
from paceline.core.sampling import accepted
from paceline.topology.wire import Branch, DraftedItem, check_hash, unpack_tokens


def propose(session: Session, item: DraftedItem, vocabulary_size: int) -> tuple[int, int]:
    """Keeps the part of a draft that lies beyond what is committed, if what lies before it came true.

    Returns (right, drafted) of the part that was too late, (0, 0) where nothing was.
    """
    state = session.drafts
    late = len(session.tokens) - item.position
    tokens = known(unpack_tokens(item.tokens), vocabulary_size)
    if late == 0:
        _use(session, item.position, tokens)
    elif late > 0 and tokens and state.branches.position != item.position:  # else it was verified, sent ahead
        right = accepted(session.tokens[item.position :], tokens[:late])
        if right == late < len(tokens):
            _use(session, item.position, tokens)
        return right, min(late, len(tokens))
    return 0, 0


def _use(session: Session, position: int, tokens: array[int]) -> None:
    state = session.drafts
    state.branches.begin(position, tokens)
    state.proposal, state.weights, state.awaited = tokens[len(session.tokens) - position :], (), False


def propose_drawn(session: Session, item: DraftedItem, weights: Sequence[Weights], vocabulary_size: int) -> None:
    """Keeps a draft that follows exactly what is committed, up to where it may have been an id unknown here.

    Nothing here may look at a token: it would bias the text (core/rejection.py). So a late draft is dropped whole,
    and of several for one place the one that came last is used.
    """
    if item.position != len(session.tokens):
        return
    unknown = (place for place, row in enumerate(weights) if row.ids[-1] >= vocabulary_size)
    end = next(unknown, len(weights))
    state = session.drafts
    state.proposal, state.weights, state.awaited = unpack_tokens(item.tokens)[:end], weights[:end], False


def take_branch(session: Session, k: int, vocabulary_size: int) -> bool:
    """The draft that was made ahead for exactly what is committed now, if there is one, is the proposal at once."""
    state = session.drafts
    draft = state.branches.draft(session.tokens) if k else None
    draft = known(draft[:k], vocabulary_size) if draft is not None else None
    if not draft:
        return False
    _use(session, len(session.tokens), draft)
    return True


def branches_arrived(session: Session, item: DraftedItem, branches: Sequence[Branch], vocabulary_size: int) -> bool:
    """Drafts came ahead of their round; where that waits already, the right one is used now. True if it was there."""
    state = session.drafts
    return (
        state.branches.arrived(item.position, branches)
        and state.awaited
        and take_branch(session, state.wanted, vocabulary_size)
    )


def acknowledge(session: Session, held: int) -> bool:
    """The drafter holds so many tokens; True if that is news."""
    state = session.drafts
    advanced = held > state.acknowledged
    if advanced:
        state.check = check_hash(session.tokens[state.acknowledged : held], state.check)
        state.acknowledged = held
    return advanced


def known(tokens: array[int], vocabulary_size: int) -> array[int]:
    """The tokens before the first id that the target's vocabulary lacks."""
    if not tokens or max(tokens) < vocabulary_size:
        return tokens
    unknown = (index for index, token in enumerate(tokens) if token >= vocabulary_size)
    return tokens[: next(unknown, len(tokens))]


def clear(sessions: Iterable[Session]) -> None:
    """After a round: what was proposed is used up."""
    for session in sessions:
        session.drafts.proposal = session.drafts.weights = session.drafts.log_probs = ()
        session.drafts.awaited = session.drafts.resent = False
