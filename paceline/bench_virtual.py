"""A bench mode of emulated nodes on virtual time: minutes of serving in seconds, the same figures every time."""

from __future__ import annotations

from paceline.bench import Job, Measured, Mode, Timed, check_room, in_use
from paceline.cloud.requests import Request
from paceline.core.errors import PacelineError
from paceline.core.sampling import Sampling, choice_seed
from paceline.virtual import Answer, VirtualTarget, VirtualWorld

NEVER_ENDED = "it never ended"


def measure(mode: Mode, job: Job, rtt: float = 0.0) -> Measured:
    """Runs the load of every target to its end. rtt: seconds, on every link. PacelineError when a warm-up fails."""
    check_room(mode.topology, job)
    world = VirtualWorld(mode.topology, rtt)
    users = [_Users(world.targets[name], job, number) for number, name in enumerate(mode.targets)]
    world.run(lambda: all(user.warm for user in users))
    for user in users:
        user.begin()
    world.run(lambda: all(user.done for user in users))
    plans = [user.target.engine.controller.plan for user in users]
    lanes, length = in_use(mode, job, [(plan.lanes, plan.draft_length) for plan in plans])
    busy = [drafter.service.statistics.utilization for drafter in world.drafters.values()]
    accepted = [user.target.engine.statistics.acceptance_length for user in users]
    return Measured(
        answers={user.target.name: user.answers for user in users},
        acceptance_length=sum(accepted) / len(accepted),
        drafter_utilization=sum(busy) / len(busy) if busy else None,
        lanes=lanes,
        draft_length=length,
    )


class _Users:
    """Keeps a target's places taken: first to warm up, then for the requests that count."""

    def __init__(self, target: VirtualTarget, job: Job, number: int) -> None:
        self.target = target
        self._job = job
        self._number = number
        self._next = self._warm = 0
        self._answers: list[Answer] = []
        self._trouble: str | None = None
        target.on_end = self._ended
        for index in range(job.in_flight):
            self._submit(f"warm-{index}", -1 - index, job.max_tokens)

    @property
    def warm(self) -> bool:
        return self._warm >= self._job.in_flight

    @property
    def done(self) -> bool:
        return len(self._answers) == self._job.requests and all(one.ended is not None for one in self._answers)

    @property
    def answers(self) -> list[Timed]:
        return [_timed(one) for one in self._answers]

    def begin(self) -> None:
        """The requests that are measured."""
        if self._warm < self._job.in_flight or self._trouble:
            raise PacelineError(f"{self.target.name}: warming up failed: {self._trouble or NEVER_ENDED}")
        for _ in range(self._job.in_flight):
            self._follow()

    def _follow(self) -> None:
        if self._next < self._job.requests:
            self._answers.append(self._submit(f"request-{self._next}", self._next, self._job.max_tokens))
            self._next += 1

    def _submit(self, name: str, index: int, max_tokens: int) -> Answer:
        prompt = self._job.prompt(index)
        seed = choice_seed(self._number, index % (1 << 32))
        sampling = Sampling(seed=seed, temperature=self._job.temperature)
        self.target.submit(Request(f"{self.target.name}-{name}", tuple(map(int, prompt)), sampling, max_tokens))
        return self.target.answers[f"{self.target.name}-{name}"]

    def _ended(self, answer: Answer) -> None:
        if "-warm-" in answer.request.id:
            self._warm += 1
            self._trouble = self._trouble or answer.error
        else:
            self._follow()


def _timed(answer: Answer) -> Timed:
    """One that nothing more would come of has ended with what came last."""
    prompt = len(answer.request.prompt)
    if answer.ended is not None:
        return Timed(answer.sent, answer.token_ids, answer.arrivals, answer.ended, prompt, answer.error)
    last = answer.arrivals[-1][0] if answer.arrivals else answer.sent
    return Timed(answer.sent, answer.token_ids, answer.arrivals, last, prompt, NEVER_ENDED)
