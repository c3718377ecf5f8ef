"""The rules of the wire's state machine, one by one, on the toy model."""

from __future__ import annotations

import random

from paceline.core.emulated import ToyLanguage
from paceline.core.sampling import Sampling
from paceline.topology.wire import Status, check_hash, pack_tokens

from .helpers import EPOCH, LANGUAGE, PROMPT, Bench, item, opened, proposals, toy_greedy


def test_proposals_are_the_models_own_continuation_from_the_committed_count_on() -> None:
    bench = opened()
    (answer,) = bench.ask("a", item(1, PROMPT))
    assert (answer.status, answer.held, answer.position) == (Status.OK, 6, 6)
    assert proposals(answer) == toy_greedy(PROMPT, 4)


def test_a_round_after_full_acceptance_catches_up_two_tokens_in_one_forward() -> None:
    bench = opened()
    bench.ask("a", item(1, PROMPT))
    tokens = PROMPT + toy_greedy(PROMPT, 5)
    bench.model.forwards.clear()
    (answer,) = bench.ask("a", item(1, tokens, base=6))
    assert proposals(answer) == toy_greedy(tokens, 4)
    assert bench.model.forwards == [(2,), (1,), (1,), (1,)]


def test_after_a_rejection_the_kv_of_the_common_prefix_stays() -> None:
    bench = opened()
    bench.ask("a", item(1, PROMPT))
    tokens = [*PROMPT, *toy_greedy(PROMPT, 2), 60]
    bench.model.forwards.clear()
    (answer,) = bench.ask("a", item(1, tokens, base=6))
    assert proposals(answer) == toy_greedy(tokens, 4)
    assert bench.model.forwards == [(1,)] * 4


def test_an_older_version_is_ignored() -> None:
    bench = opened()
    tokens = PROMPT + toy_greedy(PROMPT, 3)
    bench.ask("a", item(1, tokens))
    assert bench.ask("a", item(1, PROMPT)) == []
    assert bench.ask("a", item(1, tokens[:-1], base=6)) == []


def test_an_equal_version_is_answered_again_without_computing_anything() -> None:
    bench = opened()
    (first,) = bench.ask("a", item(1, PROMPT))
    computed = bench.model.tokens_computed
    (again,) = bench.ask("a", item(1, PROMPT))
    assert again == first
    assert bench.model.tokens_computed == computed


def test_an_equal_version_that_asks_for_more_goes_on_from_what_was_drafted() -> None:
    bench = opened()
    bench.ask("a", item(1, PROMPT, k=2))
    bench.model.forwards.clear()
    (answer,) = bench.ask("a", item(1, PROMPT, k=4))
    assert proposals(answer) == toy_greedy(PROMPT, 4)
    assert bench.model.forwards == [(1,), (1,)]


def test_proposals_left_over_by_a_shorter_commit_are_used() -> None:
    bench = opened()
    bench.ask("a", item(1, PROMPT))
    tokens = PROMPT + toy_greedy(PROMPT, 2)
    bench.model.forwards.clear()
    (answer,) = bench.ask("a", item(1, tokens, base=6, k=2))
    assert proposals(answer) == toy_greedy(tokens, 2)
    assert bench.model.forwards == []


def test_a_base_beyond_what_is_held_is_unknown_and_names_what_is_held() -> None:
    bench = opened()
    bench.ask("a", item(1, PROMPT))
    tokens = PROMPT + toy_greedy(PROMPT, 4)
    (answer,) = bench.ask("a", item(1, tokens, base=8))
    assert (answer.status, answer.held, answer.tokens) == (Status.UNKNOWN, 6, b"")
    (answer,) = bench.ask("a", item(1, tokens, base=answer.held))
    assert proposals(answer) == toy_greedy(tokens, 4)


def test_a_lost_acknowledgement_is_no_loss() -> None:
    """The target goes on sending from the base it knows of; what overlaps is the same."""
    bench = opened()
    bench.ask("a", item(1, PROMPT))
    tokens = PROMPT + toy_greedy(PROMPT, 3)
    bench.ask("a", item(1, tokens, base=6))
    longer = [*tokens, *toy_greedy(tokens, 2), 1]
    (answer,) = bench.ask("a", item(1, longer, base=6))
    assert answer.held == len(longer)
    assert proposals(answer) == toy_greedy(longer, 4)


def test_a_differing_check_is_unknown_from_zero_and_then_starts_over() -> None:
    bench = opened()
    bench.ask("a", item(1, PROMPT))
    other = [6, *PROMPT[1:], 8]
    (answer,) = bench.ask("a", item(1, other, base=6))
    assert (answer.status, answer.held) == (Status.UNKNOWN, 0)
    (answer,) = bench.ask("a", item(1, other))
    assert proposals(answer) == toy_greedy(other, 4)


def test_start_over_works_in_several_drafts_too() -> None:
    """After a mismatch a shorter first part must be taken, although more tokens were held before."""
    bench = opened()
    bench.ask("a", item(1, PROMPT))
    other = [6, *PROMPT[1:], 8]
    bench.ask("a", item(1, other, base=6))
    (answer,) = bench.ask("a", item(1, other[:3], k=0))
    assert (answer.status, answer.held) == (Status.OK, 3)
    (answer,) = bench.ask("a", item(1, other, base=3))
    assert proposals(answer) == toy_greedy(other, 4)


def test_overlapping_tokens_that_differ_are_replaced() -> None:
    bench = opened()
    bench.ask("a", item(1, PROMPT))
    other = [*PROMPT[:4], 50, 51, 52]
    (answer,) = bench.ask("a", item(1, other, base=2))
    assert proposals(answer) == toy_greedy(other, 4)


def test_check_follows_random_bases_forward_and_back() -> None:
    bench = opened(max_context=512)
    draw = random.Random(1)
    tokens = [draw.randrange(61) for _ in range(40)]
    bench.ask("a", item(1, tokens, k=1))
    for _ in range(60):
        tokens += [draw.randrange(61) for _ in range(draw.randrange(1, 5))]
        held = len(bench.service.sessions.get("a", 1).committed)  # type: ignore[union-attr]
        (answer,) = bench.ask("a", item(1, tokens, base=draw.randrange(1, held + 1), k=1))
        assert (answer.status, answer.held) == (Status.OK, len(tokens))


def test_another_epoch_is_unknown() -> None:
    bench = opened()
    bench.draft("a", item(1, PROMPT), epoch=EPOCH + 1)
    ((_, answer),) = bench.settle()
    assert (answer.status, answer.held) == (Status.UNKNOWN, 0)
    assert len(bench.service.sessions) == 0


def test_an_unknown_session_with_a_base_is_unknown() -> None:
    (answer,) = opened().ask("a", item(9, PROMPT, base=4))
    assert (answer.status, answer.held) == (Status.UNKNOWN, 0)


def test_closed_sessions_stay_closed() -> None:
    bench = opened()
    bench.ask("a", item(1, PROMPT))
    bench.close("a", 1, 2)
    assert bench.ask("a", item(1, PROMPT), item(2, PROMPT)) == []
    assert len(bench.service.sessions) == 0


def test_closed_ids_take_bounded_memory() -> None:
    bench = opened()
    for first in range(0, 40_000, 1000):
        bench.close("a", *range(first, first + 1000))
    bench.settle()
    assert len(bench.service.sessions._closed["a"]) == 8192


def test_sessions_freed_by_a_ping_are_merely_unknown() -> None:
    bench = opened()
    bench.ask("a", item(1, PROMPT), item(2, PROMPT))
    bench.ping("a", 2)
    bench.settle()
    assert [s.id for s in bench.service.sessions] == [2]
    (answer,) = bench.ask("a", item(1, PROMPT, base=6))
    assert (answer.status, answer.held) == (Status.UNKNOWN, 0)
    (answer,) = bench.ask("a", item(1, PROMPT))
    assert proposals(answer) == toy_greedy(PROMPT, 4)


def test_a_new_hello_frees_the_targets_older_sessions_and_no_others() -> None:
    bench = opened()
    bench.up("b")
    bench.ask("a", item(1, PROMPT))
    bench.ask("b", item(1, PROMPT))
    bench.up("a")
    bench.settle()
    assert [(s.target, s.id) for s in bench.service.sessions] == [("b", 1)]


def test_a_lost_link_frees_the_targets_sessions() -> None:
    bench = opened()
    bench.ask("a", item(1, PROMPT))
    bench.draft("a", item(2, PROMPT))
    bench.down("a")
    assert bench.settle() == []
    assert len(bench.service.sessions) == 0
    assert not bench.service.busy


def test_targets_cannot_name_each_others_sessions() -> None:
    bench = opened()
    bench.up("b")
    bench.ask("a", item(1, PROMPT))
    (answer,) = bench.ask("b", item(1, PROMPT, base=6))
    assert answer.status == Status.UNKNOWN
    bench.close("b", 1)
    bench.ping("b")
    bench.settle()
    assert bench.service.sessions.get("a", 1) is not None


def test_an_opening_draft_without_proposals_acknowledges_what_is_held() -> None:
    bench = opened()
    (answer,) = bench.ask("a", item(1, PROMPT, k=0))
    assert (answer.status, answer.held, answer.position, answer.tokens) == (Status.OK, 6, 6, b"")
    assert bench.model.tokens_computed == 6
    (answer,) = bench.ask("a", item(1, [*PROMPT, 4], base=6))
    assert proposals(answer) == toy_greedy([*PROMPT, 4], 4)


def test_an_opening_draft_without_any_token_is_acknowledged() -> None:
    (answer,) = opened().ask("a", item(1, []))
    assert (answer.status, answer.held, answer.tokens) == (Status.OK, 0, b"")


def test_a_long_prompt_is_answered_warming_at_once_and_read_in_chunks() -> None:
    bench = opened(max_context=2048)
    prompt = [(7 * i) % 61 for i in range(1000)]
    bench.draft("a", item(1, prompt))
    bench.service.step()
    assert [(i.status, i.held) for _, i in bench.settle()] == []
    assert [message.items[0].status for _, message in bench.sent] == [Status.WARMING]  # type: ignore[union-attr]
    assert bench.model.forwards == [(256,), (256,), (256,), (232,)]
    (answer,) = bench.ask("a", item(1, [*prompt, 3], base=1000))
    assert proposals(answer) == toy_greedy([*prompt, 3], 4)


def test_long_prompts_come_in_several_drafts() -> None:
    bench = opened(max_context=2048)
    prompt = [(11 * i) % 61 for i in range(900)]
    for base in (0, 300, 600):
        (answer,) = bench.ask("a", item(1, prompt[: base + 300], base=base, k=0))
        assert answer.held == base + 300
    assert bench.model.tokens_computed == 900
    (answer,) = bench.ask("a", item(1, [*prompt, 3], base=900))
    assert proposals(answer) == toy_greedy([*prompt, 3], 4)


def test_a_prompt_of_one_chunk_is_answered_when_it_is_read() -> None:
    bench = opened()
    prompt = [(7 * i) % 61 for i in range(200)]
    (answer,) = bench.ask("a", item(1, prompt))
    assert answer.status == Status.OK
    assert proposals(answer) == toy_greedy(prompt, 4)
    assert bench.model.forwards == [(199,), (1,), (1,), (1,), (1,)]


def test_a_newer_draft_replaces_the_one_that_waits() -> None:
    bench = opened()
    tokens = PROMPT + toy_greedy(PROMPT, 2)
    bench.draft("a", item(1, PROMPT))
    bench.draft("a", item(1, tokens, k=2))
    answers = bench.settle()
    assert [(a.position, proposals(a)) for _, a in answers] == [(8, toy_greedy(tokens, 2))]


def test_a_newer_draft_replaces_the_one_that_is_drafted() -> None:
    bench = opened()
    bench.draft("a", item(1, PROMPT))
    bench.service.step()
    bench.service.step()
    tokens = [*PROMPT, 60]
    bench.draft("a", item(1, tokens, k=2))
    answers = bench.settle()
    assert [(a.position, proposals(a)) for _, a in answers] == [(7, toy_greedy(tokens, 2))]


def test_a_session_joins_the_batch_at_the_next_token() -> None:
    bench = opened()
    bench.draft("a", item(1, PROMPT))
    bench.service.step()
    bench.service.step()
    bench.draft("a", item(2, PROMPT[:2]))
    bench.settle()
    assert bench.model.forwards == [(6,), (1,), (1, 2), (1, 1), (1,), (1,)]


def test_close_while_drafting_frees_the_session_and_leaves_the_others() -> None:
    bench = opened()
    bench.draft("a", item(1, PROMPT), item(2, PROMPT[:3]))
    bench.service.step()
    bench.close("a", 1)
    answers = bench.settle()
    assert [(a.session, proposals(a)) for _, a in answers] == [(2, toy_greedy(PROMPT[:3], 4))]


def test_a_ping_that_arrives_while_nothing_is_open_does_nothing() -> None:
    bench = opened()
    bench.ping("a", 1, 2, 3)
    assert bench.settle() == []


def test_messages_of_a_target_that_is_not_up_are_dropped() -> None:
    bench = Bench()
    bench.draft("stranger", item(1, PROMPT))
    assert bench.settle() == []


def test_a_wrong_draft_of_the_past_never_shows() -> None:
    """Long random play with rejections, duplicates and lost replies: proposals are always the model's own."""
    draw = random.Random(4)
    bench = opened(max_context=4096)
    truth = ToyLanguage(vocabulary_size=61, seed=8)
    tokens, base = list(PROMPT), 0
    for _ in range(300):
        message = item(1, tokens, base=base, k=draw.randrange(1, 6))
        answers = [bench.ask("a", message) for _ in range(draw.choice((1, 1, 2)))][-1]
        assert proposals(answers[0]) == toy_greedy(tokens, message.k)
        if draw.random() < 0.8:
            base = answers[0].held
        drafted = proposals(answers[0])
        tokens += drafted[: draw.randrange(len(drafted) + 1)] + toy_greedy(tokens, 1, truth)
    assert len(tokens) > 600


def test_the_service_hashes_as_the_wire_does() -> None:
    tokens = list(range(50))
    assert check_hash(tokens[20:], check_hash(tokens[:20])) == check_hash(tokens)
    assert pack_tokens([1]) == b"\x01\x00\x00\x00"


def test_sampled_sessions_and_greedy_ones_share_a_batch() -> None:
    bench = opened()
    sampling = Sampling(seed=99, temperature=0.9)
    answers = {a.session: a for a in bench.ask("a", item(1, PROMPT), item(2, PROMPT, sampling=sampling))}
    assert proposals(answers[1]) == toy_greedy(PROMPT, 4)
    alone = opened().ask("a", item(2, PROMPT, sampling=sampling))
    assert answers[2] == alone[0]
    assert LANGUAGE.vocabulary_size == 61
