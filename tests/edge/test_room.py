"""What is bounded: sessions, context, vocabulary, queue, KV memory; and KV that is kept for a later session."""

from __future__ import annotations

from paceline.edge.events import Limits
from paceline.topology.wire import Status

from .helpers import PROMPT, Bench, item, opened, proposals, toy_greedy


def test_near_the_context_window_k_is_cut_and_at_it_the_session_is_beyond() -> None:
    bench = opened(max_context=10)
    (answer,) = bench.ask("a", item(1, PROMPT, k=8))
    assert proposals(answer) == toy_greedy(PROMPT, 4)
    tokens = PROMPT + toy_greedy(PROMPT, 4)
    (answer,) = bench.ask("a", item(2, PROMPT), item(1, tokens, base=6))[::-1][:1]
    answers = {i.session: i for _, m in bench.sent[1:] for i in m.items}  # type: ignore[union-attr]
    assert (answers[1].status, answers[1].tokens) == (Status.BEYOND, b"")
    assert proposals(answers[2]) == toy_greedy(PROMPT, 4)
    assert len(bench.service.sessions) == 1


def test_ids_past_the_drafters_vocabulary_refuse_that_session_alone() -> None:
    bench = opened()
    answers = {a.session: a for a in bench.ask("a", item(1, [1, 2, 61]), item(2, PROMPT))}
    assert (answers[1].status, answers[1].tokens) == (Status.BEYOND, b"")
    assert proposals(answers[2]) == toy_greedy(PROMPT, 4)
    (answer,) = bench.ask("a", item(2, [*PROMPT, 4_000_000_000], base=6))
    assert answer.status == Status.BEYOND
    assert len(bench.service.sessions) == 0


def test_proposals_past_the_targets_vocabulary_are_dropped() -> None:
    bench = Bench()
    bench.up("small", vocabulary_size=30)
    prompt = next([i, j] for i in range(30) for j in range(30) if _first_large(toy_greedy([i, j], 4), 30) == 2)
    (answer,) = bench.ask("small", item(1, prompt))
    assert proposals(answer) == toy_greedy(prompt, 2)


def _first_large(tokens: list[int], limit: int) -> int:
    return next((place for place, token in enumerate(tokens) if token >= limit), len(tokens))


def test_sessions_over_the_limit_are_full_until_one_was_idle_long_enough() -> None:
    bench = opened(limits=Limits(max_sessions=2))
    bench.ask("a", item(1, PROMPT), item(2, PROMPT))
    (answer,) = bench.ask("a", item(3, PROMPT))
    assert (answer.status, answer.held) == (Status.FULL, 0)
    assert 9_900 <= answer.retry_after_ms <= 10_000
    bench.clock.sleep(6)
    bench.ask("a", item(2, [*PROMPT, 1], base=6))
    bench.clock.sleep(4.5)
    (answer,) = bench.ask("a", item(3, PROMPT))
    assert proposals(answer) == toy_greedy(PROMPT, 4)
    assert [s.id for s in bench.service.sessions] == [2, 3]


def test_kv_memory_that_is_full_is_answered_full_and_nothing_leaks() -> None:
    bench = opened(max_context=100, kv_slots=250)
    bench.ask("a", item(1, PROMPT), item(2, PROMPT))
    (answer,) = bench.ask("a", item(3, PROMPT))
    assert answer.status == Status.FULL
    bench.clock.sleep(11)
    (answer,) = bench.ask("a", item(3, PROMPT))
    assert answer.status == Status.OK
    bench.close("a", 1, 2, 3)
    bench.settle()
    assert bench.model.used_slots == 0  # these prompts are too short to be kept


def test_a_session_with_a_limit_takes_that_much_room() -> None:
    bench = opened(max_context=100, kv_slots=250)
    bench.ask("a", *[item(session, PROMPT, limit=25) for session in range(8)])
    assert len(bench.service.sessions) == 8
    assert bench.model.used_slots == 200


def test_a_session_that_outgrows_its_limit_gets_a_wider_span() -> None:
    bench = opened(max_context=100, kv_slots=250)
    bench.ask("a", item(1, PROMPT, limit=10))
    tokens = PROMPT + toy_greedy(PROMPT, 6)
    (answer,) = bench.ask("a", item(1, tokens, base=6))
    assert proposals(answer) == toy_greedy(tokens, 4)
    assert bench.model.used_slots == 100


def test_the_queue_of_one_target_is_bounded() -> None:
    bench = opened(limits=Limits(max_batch=1, max_queue=3))
    answers = bench.ask("a", *[item(session, PROMPT) for session in range(5)])
    assert [a.session for a in answers if a.status == Status.FULL] == [3, 4]
    assert sorted(a.session for a in answers if a.status == Status.OK) == [0, 1, 2]


def test_a_later_session_of_the_same_target_starts_from_a_closed_ones_kv() -> None:
    bench = opened()
    prompt = [(7 * i) % 61 for i in range(120)]
    bench.ask("a", item(1, prompt))
    bench.close("a", 1)
    bench.settle()
    computed = bench.model.tokens_computed
    longer = [*prompt[:100], 3, 4, 5]
    (answer,) = bench.ask("a", item(2, longer))
    assert proposals(answer) == toy_greedy(longer, 4)
    assert bench.model.tokens_computed - computed == 3 + 3


def test_the_next_turn_of_a_chat_starts_from_the_last_one_though_it_may_become_longer() -> None:
    bench = opened(limits=Limits(max_sessions=4), max_context=400, kv_slots=1600)
    prompt = [(7 * i) % 61 for i in range(120)]
    bench.ask("a", item(1, prompt, limit=150))
    bench.close("a", 1)
    bench.settle()
    computed = bench.model.tokens_computed
    longer = [*prompt, *toy_greedy(prompt, 3), 9, 9]
    (answer,) = bench.ask("a", item(2, longer, limit=300))
    assert proposals(answer) == toy_greedy(longer, 4)
    assert bench.model.tokens_computed - computed == 2 + 3


def test_another_target_never_starts_from_it() -> None:
    bench = opened()
    bench.up("b")
    prompt = [(7 * i) % 61 for i in range(120)]
    bench.ask("a", item(1, prompt))
    bench.close("a", 1)
    bench.settle()
    computed = bench.model.tokens_computed
    bench.ask("b", item(2, prompt))
    assert bench.model.tokens_computed - computed == 120 + 3


def test_a_prompt_in_several_drafts_uses_all_of_a_kept_prefix() -> None:
    bench = opened()
    prompt = [(7 * i) % 61 for i in range(400)]
    bench.ask("a", item(1, prompt, k=0))
    bench.close("a", 1)
    bench.settle()
    computed = bench.model.tokens_computed
    bench.ask("a", item(2, prompt[:150], k=0))
    bench.ask("a", item(2, prompt[:300], base=150, k=0))
    (answer,) = bench.ask("a", item(2, [*prompt, 3], base=300))
    assert proposals(answer) == toy_greedy([*prompt, 3], 4)
    assert bench.model.tokens_computed - computed == 1 + 3


def test_caches_go_before_sessions_the_oldest_first() -> None:
    bench = opened(max_context=100, kv_slots=300)
    prompts = [[(n * i) % 61 for i in range(40)] for n in (3, 5, 7)]
    for session, prompt in enumerate(prompts):
        bench.ask("a", item(session, prompt))
    bench.close("a", 1)
    bench.close("a", 0)
    bench.settle()
    bench.ask("a", item(3, PROMPT))  # needs room: session 1 was kept first
    computed = bench.model.tokens_computed
    bench.ask("a", item(4, prompts[0]))
    assert bench.model.tokens_computed - computed == 1 + 3
    assert [s.id for s in bench.service.sessions] == [2, 3, 4]
