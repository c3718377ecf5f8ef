"""What a round costs and brings: the model that the planner predicts with and the controller steers by.

Pure functions of seconds and counts, cheap enough for every round. The letters of the formulas, once:

    k  draft length           a  agreement: probability that a draft token is the target's own
    b  sessions a lane        A  tokens that a session gains in a round
    L  lanes of a target      S  drafting for one lane         V  verifying one lane
    N  targets of a drafter   R  from a Draft's last proposal to the next Draft: up + V + down
    m  lanes in a draft step  T  from one round of a lane to its next
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from paceline.core.profile import StepTimes

MAX_DRAFT_LENGTH = 16
MAX_LANES = 8


def expected_tokens(agreement: float, k: float) -> float:
    """A = (1 − a^(k+1))/(1 − a): what is accepted of k draft tokens, and the target's own one after it.

    Leviathan et al., arXiv 2211.17192, equation 1; k = 0 gives 1.
    """
    if agreement >= 1.0:
        return k + 1.0
    return float((1.0 - agreement ** (k + 1)) / (1.0 - agreement))


def agreement_of(length: float, k: int) -> float:
    """The a with expected_tokens(a, k) = length: what an acceptance length at a fixed draft length says of agreement.

    length: 1..k + 1 tokens; outside, the nearest a.
    """
    low, high = 0.0, 1.0
    while high - low > 1e-6:
        middle = (low + high) / 2
        low, high = (middle, high) if expected_tokens(middle, k) < length else (low, middle)
    return (low + high) / 2


def expected_rounds(tokens: int, agreement: float, k: int) -> float:
    """Rounds until a session has gained `tokens` tokens, the last round cut to what is still wanted.

    Exact: r(n) = 1 + Σ P(round gains j) · r(n − j). For long outputs it is tokens/A and part of a round.
    """
    gains = [(1.0 - agreement) * agreement**accepted for accepted in range(k)] + [agreement**k]
    rounds = [0.0]
    for left in range(1, tokens + 1):
        rest = math.fsum(share * rounds[left - gain] for gain, share in enumerate(gains, 1) if gain < left)
        rounds.append(1.0 + rest)
    return rounds[tokens] if tokens > 0 else 0.0


def draft_seconds(
    step: StepTimes, sequences: float, k: int, token_ms: float = 0.0, *, full_acceptance: float = 0.0
) -> float:
    """S = t_catchup + (k − 1)·t_draft: k passes over `sequences`, since catching up yields the first draft token.

    token_ms: more for each token of a pass. Catching up is one token, or two after a round whose draft was accepted
    to its end; full_acceptance is how often that is (a^k).
    """
    return (k * step.ms(sequences) + (k + full_acceptance) * token_ms * sequences) / 1000.0


def lane_draft_seconds(
    step: StepTimes,
    sequences: float,
    k: int,
    token_ms: float = 0.0,
    *,
    batch: float = 1.0,
    most: float = math.inf,
    full_acceptance: float = 0.0,
) -> float:
    """S of a lane of `sequences` in steps that hold `batch` such lanes, but `most` sequences at a time: a lane that is
    larger than that goes in several batches."""
    size = min(batch * sequences, most)
    return draft_seconds(step, size, k, token_ms, full_acceptance=full_acceptance) * max(1.0, sequences / most)


def verify_seconds(verify: StepTimes, sessions: float, k: float) -> float:
    """V: one pass of the target over b·(k + 1) tokens."""
    return verify.ms(sessions * (k + 1)) / 1000.0


def plain_seconds(verify: StepTimes, sessions: float) -> float:
    """t_plain = V(L·b tokens): one pass of plain decoding over all sessions of the target."""
    return verify.ms(sessions) / 1000.0


def round_seconds(
    draft: float,
    verify: float,
    rtt: float,
    *,
    targets: float = 1,
    lanes: int = 1,
    batch: float = 1,
    step: float = 0.0,
    hits: float = 0.0,
) -> float:
    """T = max(N·L·S/m, S + R, L·V): the drafter's turn, the lane's own way round, or the target's turn.

    draft: S of a step that holds `batch` lanes; rtt: up + down. For batch = 1 this is StarSD's cycle (arXiv
    2601.21622) and, for two lanes and one target, MineDraft's (arXiv 2603.18016). N·L/m is not rounded up: a
    waiting lane joins at the next draft token, so batches have no common end. step, hits: of `way_round_seconds`.
    """
    if draft <= 0.0:
        return lanes * verify
    way = way_round_seconds(draft, verify, rtt, step=step, hits=hits)
    return max(targets * lanes * draft / batch, way, lanes * verify)


def ahead_hit_rate(agreement: float, second_choice: float, k: int, branches: int) -> float:
    """How often one of the `branches` likeliest outcomes of a round of k draft tokens comes true (edge/ahead.py).

    All k right and the token after them guessed, or one wrong and the second choice there right.
    """
    chances = [agreement**j * (1.0 - agreement) * second_choice for j in range(k)] + [agreement ** (k + 1)]
    return math.fsum(sorted(chances, reverse=True)[:branches]) if k else 0.0


def way_round_seconds(draft: float, verify: float, rtt: float, *, step: float = 0.0, hits: float = 0.0) -> float:
    """S + R, a lane's own way round, on average where `hits` of its rounds find their draft made ahead.

    Those last V, or until the branch is there: it is begun when the last proposals have left, or, after another hit,
    when the Draft that says so has come. The others meet half a step under way, on average.
    """
    whole = draft + rtt + verify
    return hits * min(whole, max(verify, draft + hits * rtt)) + (1.0 - hits) * (whole + (step / 2 if hits else 0.0))


def full_targets(draft: float, verify: float, rtt: float, *, lanes: int = 1) -> int:
    """N_full = ⌈(1 + R/S)/L⌉: the fewest targets that leave a drafter without idle time (StarSD)."""
    return math.ceil((1.0 + (rtt + verify) / draft) / lanes - 1e-9)


def two_lane_gain(draft: float, verify: float, rtt: float = 0.0) -> float:
    """2(S + R)/max(2S, S + R, 2V): two lanes against one, at equal lane size (MineDraft); 2 where S = V, rtt = 0."""
    return 2 * round_seconds(draft, verify, rtt) / round_seconds(draft, verify, rtt, lanes=2)


@dataclass(frozen=True)
class Situation:
    """What a round depends on, but for its draft length.

    step: drafter's pass over sequences. verify: target's pass over tokens. rtt: seconds. sessions: of one target,
    in all its lanes. targets: alike, on one drafter. messages: lanes that a draft step may hold; sequences: sessions
    that it may hold. token_ms: of the drafter, for each token of a pass.
    """

    step: StepTimes
    verify: StepTimes
    agreement: float
    rtt: float = 0.0
    sessions: float = 1
    targets: int = 1
    lanes: int = 1
    messages: float = 1
    sequences: float = math.inf
    token_ms: float = 0.0

    @property
    def filled(self) -> int:
        """Lanes that have a session."""
        return max(1, min(self.lanes, math.ceil(self.sessions)))

    @property
    def most_lanes(self) -> float:
        """Lanes that a draft step can hold, of those that there are."""
        room = self.sequences / (self.sessions / self.filled)
        return max(1.0, min(self.messages, room, float(self.targets * self.filled)))

    def draft(self, k: int, batch: float) -> float:
        """S, in steps that hold `batch` lanes."""
        return lane_draft_seconds(
            self.step,
            self.sessions / self.filled,
            k,
            self.token_ms,
            batch=batch,
            most=self.sequences,
            full_acceptance=self.agreement**k,
        )


def batch_lanes(situation: Situation, k: int) -> float:
    """How many lanes a lane's draft step holds on average, itself included: from 1 to `most_lanes`.

    Drafting is work-conserving: what is there is drafted together. Others are there for S of each T, and S itself
    grows with them; the smallest fixed point.
    """
    s = situation
    others, most = s.targets * s.filled - 1, s.most_lanes
    if most <= 1.0 or k == 0:
        return 1.0
    batch = 1.0
    verify = verify_seconds(s.verify, s.sessions / s.filled, k)
    for _ in range(8):
        draft = s.draft(k, batch)
        cycle = round_seconds(draft, verify, s.rtt, targets=s.targets, lanes=s.filled, batch=most)
        wanted = min(most, 1.0 + others * draft / cycle)
        if wanted <= batch * 1.001:
            break
        batch = wanted
    return batch


def join_wait_seconds(step: float, share: float, others: int, *, one_target: bool) -> float:
    """What a lane loses because a step that others are in is not interrupted: half a `step` where they are drafting.

    share: S/T, of the time that a lane is drafted for. The lanes of one target come one after the other, at even
    distances; other targets come whenever they do.
    """
    if others < 1:
        return 0.0
    share = min(1.0, share)
    busy = float(share * (others + 1) > 1.0 + 1e-9) if one_target else 1.0 - (1.0 - share) ** others
    return busy * step / 2.0


def cycle_seconds(situation: Situation, k: int) -> float:
    """T of one lane at draft length k; lanes · V at k = 0, where nobody is waited for."""
    s = situation
    verify = verify_seconds(s.verify, s.sessions / s.filled, k)
    if k == 0:
        return s.filled * verify
    most = s.most_lanes
    draft = s.draft(k, batch_lanes(s, k))
    cycle = round_seconds(draft, verify, s.rtt, targets=s.targets, lanes=s.filled, batch=most)
    if most <= 1.0:
        return cycle
    others = s.targets * s.filled - 1
    wait = join_wait_seconds(draft / k, draft / cycle, others, one_target=s.targets == 1)
    return max(cycle, draft + s.rtt + verify + wait)


def throughput(situation: Situation, k: int) -> float:
    """Tokens a second of one target: L·b·A/T."""
    return situation.sessions * expected_tokens(situation.agreement, k) / cycle_seconds(situation, k)


def plain_throughput(situation: Situation) -> float:
    """Tokens a second of one target that decodes plainly, all sessions in one pass."""
    return situation.sessions / plain_seconds(situation.verify, situation.sessions)


def best_draft_length(situation: Situation, longest: int = MAX_DRAFT_LENGTH) -> int:
    """The k in 0..longest with most tokens a second, the shorter one where two are equal. 0: do not speculate."""
    best, most = 0, throughput(situation, 0)
    for k in range(1, longest + 1):
        rate = throughput(situation, k)
        if rate > most * (1 + 1e-9):
            best, most = k, rate
    return best


def best_setting(
    situation: Situation, lanes: Iterable[int] = range(1, MAX_LANES + 1), lengths: Sequence[int] | None = None
) -> tuple[int, int]:
    """(lanes, k) with most tokens a second for the same sessions in all; (1, 0) where plain decoding is best.

    lengths: the draft lengths to choose from, all by default. Of equal settings, fewer lanes and a shorter draft.
    """
    best, most = (1, 0), plain_throughput(situation)
    for count in lanes:
        if count > max(1.0, situation.sessions):
            break
        case = replace(situation, lanes=count)
        for k in range(1, MAX_DRAFT_LENGTH + 1) if lengths is None else lengths:
            rate = throughput(case, k)
            if rate > most * (1 + 1e-9):
                best, most = (count, k), rate
    return best


def break_even_targets(situation: Situation, k: int, most: int = 100_000) -> int:
    """N_break-even: the largest N at which speculation is not slower than plain decoding; 0 when it never pays.

    T only grows with N, so the last N that pays is found by halving; `most` stands for "no limit".
    """

    def pays(targets: int) -> bool:
        return throughput(replace(situation, targets=targets), k) > plain

    plain = plain_throughput(situation)
    if not pays(1):
        return 0
    if pays(most):
        return most
    low, high = 1, most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if pays(middle) else (low, middle)
    return low
