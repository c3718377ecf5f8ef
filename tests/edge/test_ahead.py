"""Draft ahead: what is sent for an outcome is what would be drafted after it, and others lose nothing by it."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest

from paceline.core.sampling import Sampling
from paceline.edge.events import Limits
from paceline.edge.strategies.draft_model import DraftModel
from paceline.topology.wire import Drafted, DraftItem, Status, unpack_tokens

from .helpers import LANGUAGE, PROMPT, Bench, item, opened, proposals, toy_greedy

K = 3


def ahead(tokens: Sequence[int], base: int = 0, *, session: int = 1, branches: int = 8, **fields: Any) -> DraftItem:
    """A Draft's item that asks for drafts ahead."""
    taken = fields.pop("taken", 0)
    plain = item(session, tokens, base, fields.pop("k", K), **fields)
    return msgspec.structs.replace(plain, branches=branches, taken=taken)


def sent_ahead(bench: Bench, since: int = 0) -> dict[tuple[int, int], list[int]]:
    """(accepted, next) → draft, of all branches sent after the first `since` messages."""
    found = {}
    for _, message in bench.sent[since:]:
        if isinstance(message, Drafted) and message.branches is not None:
            for branches in message.branches:
                found.update({(count, token): list(unpack_tokens(draft)) for count, token, draft in branches})
    return found


def second_choice(tokens: Sequence[int]) -> int:
    """The token after the likeliest one."""
    state = 0
    for token in tokens:
        state = LANGUAGE.next_state(state, token)
    return int(LANGUAGE.rows([state])[0].argsort()[-2])


def test_the_draft_for_each_outcome_is_what_would_be_drafted_after_it() -> None:
    """All right: the session's own next tokens; one wrong: the second choice there, and what follows it."""
    bench = opened()
    (answer,) = [one for one in bench.ask("a", ahead(PROMPT)) if one.tokens]
    drafted = proposals(answer)
    expected = {(K, toy_greedy(PROMPT, K + 1)[-1]): toy_greedy(PROMPT, 2 * K + 1)[K + 1 :]}
    for place in range(K):
        text = [*PROMPT, *drafted[:place]]
        second = second_choice(text)
        expected[place, second] = toy_greedy([*text, second], K)
    assert sent_ahead(bench) == expected
    assert bench.service.statistics.branches == K + 1


def test_only_as_many_outcomes_as_asked_for_the_likeliest_first() -> None:
    """With one branch it is full acceptance; nobody who asks for none gets any."""
    bench = opened()
    bench.ask("a", ahead(PROMPT, branches=1))
    assert [count for count, _ in sent_ahead(bench)] == [K]
    before = len(bench.sent)
    bench.ask("a", item(2, PROMPT))
    assert sent_ahead(bench, before) == {}


def test_a_branch_that_was_taken_is_not_answered_and_not_computed_again() -> None:
    """The next branches follow it at once, at the cost of their own tokens."""
    bench = opened()
    (answer,) = [one for one in bench.ask("a", ahead(PROMPT)) if one.tokens]
    place = 1
    text = [*PROMPT, *proposals(answer)[:place]]
    text.append(second_choice(text))
    before, computed = len(bench.sent), bench.model.tokens_computed
    answers = bench.ask("a", ahead(text, base=len(PROMPT), taken=K))
    assert [one for one in answers if one.tokens] == []
    assert {one.held for one in answers} == {len(text)}
    branches = sent_ahead(bench, before)
    assert len(branches) == K + 1
    proposal = toy_greedy(text, K)
    for (count, token), draft in branches.items():
        assert draft == toy_greedy([*text, *proposal[:count], token], K)
    # Three rejections of K + 1 tokens each, and the session's own 2 K + 2 less what it had by then.
    assert bench.model.tokens_computed - computed <= 3 * (K + 1) + 2 * K + 2


def test_a_missed_outcome_is_answered_as_ever() -> None:
    """A token that no branch foresaw: proposals come for it, then branches for what follows."""
    bench = opened()
    bench.ask("a", ahead(PROMPT))
    text = [*PROMPT, (second_choice(PROMPT) + 1) % LANGUAGE.vocabulary_size]
    (answer,) = [one for one in bench.ask("a", ahead(text, base=len(PROMPT))) if one.tokens]
    assert proposals(answer) == toy_greedy(text, K)


def test_what_is_taken_but_not_there_is_drafted_after_all() -> None:
    """A drafter that lost its branch answers: the target drops it as late, and branches follow."""
    bench = opened()
    answers = bench.ask("a", ahead(PROMPT, taken=K))
    assert [proposals(one) for one in answers if one.tokens] == [toy_greedy(PROMPT, K)]
    assert len(sent_ahead(bench)) == K + 1


def test_nothing_is_drafted_ahead_while_another_session_waits() -> None:
    """Between two steps ahead a Draft comes: all steps are its own until it is answered."""
    bench = opened()
    bench.draft("a", ahead(PROMPT))
    while not any(isinstance(message, Drafted) and message.items[0].tokens for _, message in bench.sent):
        bench.service.step()
    bench.service.step()  # one step ahead
    assert len(bench.model.forwards[-1]) > 1
    bench.draft("a", item(2, [7, 7, *PROMPT]))
    before = len(bench.model.forwards)
    while bench.sent[-1][1].items[0].session != 2:  # type: ignore[union-attr]
        bench.service.step()
    assert [len(tokens) for tokens in bench.model.forwards[before:]] == [1] * 4
    bench.settle()
    assert len(sent_ahead(bench)) == K + 1


def test_a_step_holds_no_more_sequences_than_the_batch() -> None:
    """With two places, a step ahead has two."""
    bench = opened(limits=Limits(max_ahead=2))
    bench.ask("a", ahead(PROMPT))
    assert max(map(len, bench.model.forwards)) == 2  # of Limits.max_ahead
    assert len(sent_ahead(bench)) == K + 1


def test_forks_are_freed_with_their_session_and_give_way_to_others() -> None:
    """Memory for exactly two sessions: the second one opens, and nothing is left when both are closed."""
    bench = opened(limits=Limits(max_sessions=2), kv_slots=120, max_context=64)
    bench.ask("a", ahead(PROMPT, limit=60))
    assert bench.model.used_slots > 60
    (answer,) = bench.ask("a", item(2, [7, *PROMPT], limit=60))
    assert answer.status == Status.OK and proposals(answer) == toy_greedy([7, *PROMPT], 4)
    assert bench.model.used_slots == 120
    bench.ask("a", ahead(PROMPT, limit=60))
    bench.close("a", 1, 2)
    bench.settle()
    assert bench.model.used_slots == sum(kept.span.size for kept in bench.service.sessions.cache._kept.values())


def test_kept_texts_give_way_to_forks_down_to_a_quarter() -> None:
    """A drafter whose memory is full of texts that ended drafts ahead as on its first day."""
    bench = opened(limits=Limits(max_sessions=8), kv_slots=8 * 64, max_context=64)
    made = []
    for number in range(1, 17):
        before = len(bench.sent)
        bench.ask("a", ahead([number, number, *range(20)], session=number))
        made.append(len(sent_ahead(bench, before)))
        bench.close("a", number)
        bench.settle()
    assert made == [K + 1] * 16
    assert len(bench.service.sessions.cache) >= 2


def test_a_session_at_the_end_of_its_context_has_no_room_for_branches() -> None:
    """Proposals and branches end where the context window does."""
    bench = opened(max_context=len(PROMPT) + K + 2, kv_slots=1000)
    bench.ask("a", ahead(PROMPT))
    assert all(
        len(PROMPT) + count + 1 + len(draft) <= len(PROMPT) + K + 2 for (count, _), draft in sent_ahead(bench).items()
    )


def test_penalties_get_no_branches_for_rejections() -> None:
    """Their second choices would need the adjusted logits: only full acceptance is prepared."""
    bench = opened()
    bench.ask("a", ahead(PROMPT, sampling=Sampling(temperature=0.0, presence_penalty=0.5), prompt_length=6))
    assert [count for count, _ in sent_ahead(bench)] == [K]


def walk(
    bench: Bench, greedy: Callable[[Sequence[int], int], list[int]], vocabulary: int, rounds: int, seed: int
) -> int:
    """A target at random: takes branches, is late, surprises, rewrites; every draft is checked. Returns hits."""
    draw = random.Random(seed)
    text, base, proposal, hits, taken = PROMPT[:], 0, list[int](), 0, 0
    for _ in range(rounds):
        k = draw.randint(1, 4)
        before = len(bench.sent)
        answers = bench.ask("a", ahead(text, base, k=k, taken=taken, branches=draw.choice([1, 3, 8])))
        drafts = [proposals(one) for one in answers if one.tokens]
        if taken:
            assert drafts == []
        else:
            proposal = greedy(text, k)
            assert drafts == [proposal]
        branches = sent_ahead(bench, before)
        for (count, token), draft in branches.items():
            assert draft == greedy([*text, *proposal[:count], token], len(draft))
        base, taken = len(text), 0
        if draw.random() < 0.7 and branches:
            count, token = draw.choice(list(branches))
            text = [*text, *proposal[:count], token]
            if draw.random() < 0.8:
                proposal = branches[count, token]
                taken, hits = len(proposal), hits + 1
        elif draw.random() < 0.9:
            text = [*text, *proposal[: draw.randint(0, len(proposal))], draw.randrange(vocabulary)]
        else:  # what was committed was something else
            base = max(0, base - draw.randint(1, 3))
            text = [*text[:base], *(draw.randrange(vocabulary) for _ in range(draw.randint(2, 5)))]
    return hits


@pytest.mark.parametrize("seed", range(6))
def test_branches_are_right_whatever_the_target_does(seed: int) -> None:
    """A random walk over outcomes, rewrites and lost branches, over the toy language."""
    bench = opened(limits=Limits(max_ahead=random.Random(seed).choice([1, 2, 8])))
    assert walk(bench, toy_greedy, LANGUAGE.vocabulary_size, 60, seed) > 10


def test_branches_of_a_real_model_are_its_own_greedy_continuations() -> None:
    """Forked KV of a torch model: the same walk, against the whole sequence without any KV."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from paceline.core.lm.loading import wrap
    from paceline.edge.runtimes.torch import TorchRuntime

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.5,
    )
    module = transformers.LlamaForCausalLM(config).to(torch.float64).eval()
    runtime = TorchRuntime(wrap(module, kv_slots=1 << 14, max_context=500), 61)

    def greedy(tokens: Sequence[int], k: int) -> list[int]:
        drafted: list[int] = []
        span = runtime.allocate(500)
        for _ in range(k):
            from paceline.core.model import Segment

            top = runtime.forward([Segment(span, 0, [*tokens, *drafted], 1)], 1)
            drafted.append(int(top.ids[0, 0]))
        runtime.free(span)
        return drafted

    bench = Bench(strategy=DraftModel(runtime))
    bench.up("a")
    assert walk(bench, greedy, 61, 40, 1) > 8


def test_sampled_sessions_branch_by_the_same_noise() -> None:
    """At temperature 0.8 each branch is what a session that had come there would draft."""
    sampling = Sampling(seed=5, temperature=0.8)
    bench = opened()
    (answer,) = [one for one in bench.ask("a", ahead(PROMPT, sampling=sampling)) if one.tokens]
    drafted, branches = proposals(answer), sent_ahead(bench)
    assert len(branches) == K + 1
    for number, ((count, token), draft) in enumerate(branches.items()):
        text = [*PROMPT, *drafted[:count], token]
        (other,) = bench.ask("a", item(10 + number, text, k=K, sampling=sampling))
        assert proposals(other) == draft
