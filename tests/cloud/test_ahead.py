"""Drafts that came ahead of their round: used where they are right, harmless where they are not."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from paceline.cloud.ahead import FIRST_REST, AheadControl, Branches, Phase
from paceline.cloud.drafters import DrafterState
from paceline.cloud.events import Arrived, Reconfigure
from paceline.topology.handshake import DRAFT_AHEAD
from paceline.topology.wire import MAX_BRANCHES, Branch, Drafted, DraftedItem, DraftItem, Status, Welcome, pack_tokens

from .helpers import EPOCH, VOCABULARY, Bench, FakeDrafter, ask, plain

K = 4


class AheadBench(Bench):
    """A target that asks for branches, and a fake drafter that says it can make them."""

    def __init__(self, branches: int = 5, **options: object) -> None:
        super().__init__(**options)  # type: ignore[arg-type]
        drafting = replace(self.engine.config.drafting, draft_ahead=branches)
        self.put(Reconfigure(replace(self.engine.config, drafting=drafting)))
        self.engine.drafting.ahead.phase = Phase.HOLD

    def send_ahead(self, drafter: FakeDrafter, item: DraftItem, *branches: Branch) -> None:
        """Branches for the round whose proposals follow the item's tokens."""
        version = item.base + len(item.tokens) // 4
        answer = DraftedItem(item.session, int(Status.OK), version, version)
        self.put(Arrived(drafter.name, Drafted(EPOCH, [answer], branches=[list(branches)])))


@pytest.fixture(autouse=True)
def able(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every fake drafter welcomes with the capability."""
    start = FakeDrafter.__init__

    def able_start(self: FakeDrafter, bench: Bench, name: str = "d", **welcome: int) -> None:
        start(self, bench, name, **welcome)
        self.welcome = msgspec.structs.replace(self.welcome, capabilities=[DRAFT_AHEAD])

    monkeypatch.setattr(FakeDrafter, "__init__", able_start)


def verified(bench: Bench) -> list[int]:
    """Tokens of the last pass's first session."""
    return list(bench.model.passes[-1][0].tokens)


def in_a_pass(bench: Bench, drafter: FakeDrafter, *branches: Branch) -> None:
    """A pass runs, and these branches come during it."""
    item = drafter.last()
    assert bench.engine.begin()
    bench.send_ahead(drafter, item, *branches)
    bench.engine.finish()


def test_a_branch_that_came_during_the_pass_is_verified_without_waiting() -> None:
    """The next Draft says that it was taken and wants branches alone; the session never waits for it."""
    bench = AheadBench()
    drafter, request, text = bench.opened()
    rest = text[1:]  # its first token is committed
    assert drafter.last().branches == 5 and drafter.last().taken == 0
    drafter.answer(drafter.last(), [*rest[1:3], 63 - rest[3], 0])  # two are right
    in_a_pass(bench, drafter, (2, rest[3], pack_tokens(rest[4:8])), (4, 9, pack_tokens([1, 2, 3, 4])))
    assert drafter.last().taken == 4 and drafter.last().k == K
    assert bench.engine.begin()
    assert verified(bench) == [rest[3], *rest[4:8]]
    bench.engine.finish()
    assert bench.engine.drafting.ahead.hits == 1 and bench.engine.drafting.ahead.rounds == 1
    bench.finish()
    assert bench.ids["r"] == text == plain(request)


def test_a_branch_that_comes_late_ends_the_wait() -> None:
    """The session asked for a draft meanwhile; the branch is as good, and the answer that follows is no news."""
    bench = AheadBench()
    drafter, _, text = bench.opened()
    rest = text[1:]
    first = drafter.last()
    drafter.answer(first, [63 - rest[1]] * 4)
    assert bench.engine.step() and not bench.engine.step()
    asked = drafter.last()
    assert asked.taken == 0
    bench.send_ahead(drafter, first, (0, rest[1], pack_tokens(rest[2:6])))
    assert bench.engine.step()
    assert verified(bench) == [rest[1], *rest[2:6]]
    agreement = bench.engine.controller.agreement.tried
    drafter.answer(asked, rest[2:6])
    bench.engine.step()
    assert bench.engine.controller.agreement.tried == agreement
    bench.finish()
    assert bench.ids["r"] == text


def test_branches_of_another_round_and_of_unknown_ids_are_worth_nothing() -> None:
    """Wrong positions, impossible counts, ids outside the vocabulary: the text is the same."""
    bench = AheadBench()
    drafter, _, text = bench.opened()
    rest = text[1:]
    drafter.answer(drafter.last(), rest[1:3])
    unknown = pack_tokens([VOCABULARY, 2**32 - 1])
    in_a_pass(bench, drafter, (16, 3, pack_tokens([1])), (2, rest[3], unknown), (1, 2**32 - 1, unknown))
    assert drafter.last().taken == 0
    early = msgspec.structs.replace(drafter.last(), base=0, tokens=pack_tokens([1]))
    bench.send_ahead(drafter, early, (0, rest[4], pack_tokens([9])))
    drafter.answer(drafter.last(), rest[4:6])
    bench.finish()
    assert bench.ids["r"] == text


def test_no_more_branches_are_kept_than_a_session_can_use_and_none_that_nobody_asked_for() -> None:
    """A drafter that floods costs the memory of sixteen drafts a session."""
    bench = AheadBench()
    drafter, _, text = bench.opened()
    drafter.answer(drafter.last(), text[2:4])
    bench.engine._receive(False)
    (session,) = bench.engine.drafting.sessions.values()
    for first in range(0, 4000, 16):
        bench.send_ahead(drafter, drafter.last(), *[(1, token, pack_tokens([1])) for token in range(first, first + 16)])
        bench.engine._receive(False)
    assert len(session.drafts.branches._drafts) == MAX_BRANCHES
    bench.finish()
    assert bench.ids["r"] == text
    quiet = AheadBench(branches=0)
    drafter, _, text = quiet.opened()
    drafter.answer(drafter.last(), text[2:4])
    quiet.engine._receive(False)
    quiet.send_ahead(drafter, drafter.last(), (0, 1, pack_tokens([1])))
    quiet.engine._receive(False)
    (session,) = quiet.engine.drafting.sessions.values()
    assert not session.drafts.branches._drafts


def test_a_branch_longer_than_what_is_asked_for_now_is_cut() -> None:
    """The draft length may have changed since."""
    bench = AheadBench()
    drafter, _, text = bench.opened()
    rest = text[1:]
    drafter.answer(drafter.last(), rest[1:5])
    drafting = replace(bench.engine.config.drafting, draft_length=2)
    bench.put(Reconfigure(replace(bench.engine.config, drafting=drafting)))
    in_a_pass(bench, drafter, (4, rest[5], pack_tokens(rest[6:10])))
    assert drafter.last().taken == 2
    assert bench.engine.begin()
    assert verified(bench) == [rest[5], *rest[6:8]]
    bench.engine.finish()
    bench.finish()
    assert bench.ids["r"] == text


def test_a_cancellation_that_came_during_the_pass_is_looked_at_after_it() -> None:
    """What is no draft waits for the next turn, and nothing after it overtakes it."""
    from paceline.cloud.events import Cancel

    bench = AheadBench()
    drafter, _, text = bench.opened()
    rest = text[1:]
    drafter.answer(drafter.last(), rest[1:5])
    assert bench.engine.begin()
    bench.put(Cancel("r"))
    bench.send_ahead(drafter, drafter.last(), (4, rest[5], pack_tokens(rest[6:10])))
    bench.engine.finish()
    assert bench.engine.wake_at() is not None
    bench.engine.step()
    assert bench.ends["r"].finish_reason == "cancelled"
    assert bench.engine.live_sessions == 0


@pytest.mark.parametrize("capabilities", [[], ["coupled", "rejection"]])
def test_a_drafter_that_cannot_is_not_asked(capabilities: list[str]) -> None:
    """Nor is one asked where nobody wants branches."""
    bench = AheadBench()
    drafter = FakeDrafter(bench)
    drafter.welcome = msgspec.structs.replace(drafter.welcome, capabilities=capabilities)
    drafter.up()
    bench.submit(ask())
    bench.finish()
    assert {item.branches for item in drafter.drafts} == {0}
    bench = AheadBench(branches=0)
    drafter, _, _ = bench.opened()
    assert drafter.last().branches == 0


def served(control: AheadControl, rounds: int, without: float, ahead: float, now: float = 1.0) -> list[Phase]:
    """So many rounds that take so long without and with branches; the phases in the order they came in."""
    seen = [control.phase]
    for _ in range(rounds):
        control.round(ahead if control.on else without, now)
        if control.phase is not seen[-1]:
            seen.append(control.phase)
    return seen


def test_branches_are_asked_for_as_long_as_rounds_are_shorter_with_them() -> None:
    """Some rounds without, some with; then with them, and now and then a look at how it is without."""
    control = AheadControl()
    assert served(control, 16 + 32, 0.030, 0.024) == [Phase.BASE, Phase.TRIAL, Phase.HOLD]
    assert control.on and control.branching(5).outcomes == 5
    assert served(control, 512 + 16, 0.030, 0.024) == [Phase.HOLD, Phase.CHECK, Phase.HOLD]


def test_what_makes_rounds_longer_is_left_off_and_tried_again_later() -> None:
    """A drafter on the target's own processors: rests of five seconds, then ten, and a trial after each."""
    control = AheadControl()
    assert served(control, 16 + 32 + 100, 0.030, 0.036) == [Phase.BASE, Phase.TRIAL, Phase.REST]
    assert not control.on and control.branching(5).outcomes == 0
    assert served(control, 40, 0.030, 0.036, now=1.0 + FIRST_REST) == [Phase.REST, Phase.TRIAL, Phase.REST]
    assert served(control, 40, 0.030, 0.020, now=2.0 + 2 * FIRST_REST) == [Phase.REST]
    assert served(control, 40, 0.030, 0.020, now=1.0 + 3 * FIRST_REST) == [Phase.REST, Phase.TRIAL, Phase.HOLD]


def test_what_stops_to_pay_is_noticed() -> None:
    """Others keep the drafter busy by now."""
    control = AheadControl()
    served(control, 16 + 32, 0.030, 0.024)
    assert served(control, 512 + 16, 0.030, 0.030) == [Phase.HOLD, Phase.CHECK, Phase.REST]


def test_how_often_branches_were_there_is_counted() -> None:
    """At once, late, not at all."""
    control = AheadControl()
    control.looked([1.0, 0.4, 0.0, 1.0])
    assert (control.rounds, control.hits, control.late, control.hit_rate) == (4, 2, 1, 0.5)


def test_a_new_round_forgets_the_branches_of_the_last() -> None:
    """Only what follows the proposal under way counts."""
    from array import array

    branches = Branches()
    branches.begin(3, [7, 8])
    assert branches.arrived(3, [(1, 5, pack_tokens([6])), (3, 5, pack_tokens([6]))])
    assert branches.draft(array("I", [0, 0, 0, 7, 5])) == array("I", [6])
    assert branches.draft(array("I", [0, 0, 0, 7, 6])) is None
    branches.begin(5, [6])
    assert not branches.arrived(3, [(0, 1, b"")])
    assert branches.draft(array("I", [0, 0, 0, 7, 5])) is None


def test_second_choices_are_judged_where_there_was_one() -> None:
    """Right, wrong, and nobody knows: all proposals right, no branch for that place, nothing proposed."""
    from array import array

    def judged(emitted: list[int]) -> bool | None:
        branches = Branches()
        branches.begin(1, [7, 8])
        branches.arrived(1, [(0, 5, b""), (2, 9, b"")])
        return branches.second_was_right(array("I", [3, *emitted]))

    assert judged([5]) is True
    assert judged([6]) is False
    assert judged([7, 5]) is None
    assert judged([7, 8, 9]) is None
    assert Branches().second_was_right(array("I", [3])) is None


def test_a_drafter_says_what_it_can() -> None:
    """By a capability in its Welcome."""
    drafter = DrafterState("d", None)
    welcome = Welcome(1, "m", "draft_model", 1, 1, 1, [DRAFT_AHEAD])
    drafter.link_up(welcome, lambda message: True, 0.0)
    assert drafter.forks and not drafter.draws
