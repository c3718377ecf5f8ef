"""One topology in several modes under the same load, in one run: what `paceline bench` and the benchmarks measure.

plain decodes without drafters; standard is one target alone at its drafter, in one lane; star is all targets at once,
in one lane; lanes is all targets with several lanes; auto leaves lanes and draft length to the controller. Each target
always has the same number of requests in flight, and every mode gets the same requests: their texts are compared
(bench_texts.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from paceline.core.errors import UserError
from paceline.core.percentiles import summary
from paceline.topology.spec import DraftersOf, TargetSpec, Topology

MODES = ("plain", "standard", "star", "lanes", "auto")


@dataclass(frozen=True)
class Mode:
    """A topology to measure. targets: those under load."""

    name: str
    topology: Topology
    targets: tuple[str, ...]

    @property
    def first(self) -> TargetSpec:
        return self.topology.target(self.targets[0])


@dataclass(frozen=True)
class Job:
    """The load of one target. prompts: token ids or texts, used in turn, each with a seed of its own.

    requests: that are measured, after as many as are in flight have run to warm up.
    """

    prompts: Sequence[str | list[int]]
    requests: int
    in_flight: int
    max_tokens: int
    temperature: float = 0.0

    def prompt(self, index: int) -> str | list[int]:
        return self.prompts[index % len(self.prompts)]


@dataclass
class Timed:
    """One request and its answer; times in seconds on any one clock. error: why it has no whole answer."""

    sent: float
    token_ids: list[int] = field(default_factory=list)
    arrivals: list[tuple[float, int]] = field(default_factory=list)  # when, and how many tokens
    ended: float = 0.0
    prompt_tokens: int | None = None
    error: str | None = None


@dataclass
class Measured:
    """A mode's answers by target, in the order of the requests, and what its nodes counted."""

    answers: dict[str, list[Timed]]
    acceptance_length: float | None
    drafter_utilization: float | None
    lanes: int
    draft_length: int

    @property
    def all(self) -> list[Timed]:
        return [one for answers in self.answers.values() for one in answers]

    @property
    def tokens_per_s(self) -> float:
        """Of all targets."""
        return sum(map(tokens_per_second, self.answers.values()))


def modes(topology: Topology, names: Sequence[str] = MODES) -> list[Mode]:
    """The modes that make sense for a topology. UserError for a name that is none."""
    unknown = [name for name in names if name not in MODES]
    if unknown:
        raise UserError(f"--modes {unknown[0]}: there is no such mode; there are {', '.join(MODES)}")
    everyone = tuple(target.name for target in topology.targets)
    found = []
    for name in dict.fromkeys(names):
        targets = everyone[:1] if name == "standard" else everyone
        if name == "star" and len(everyone) == 1 and "standard" in names:
            continue  # the same thing
        found.append(Mode(name, _changed(topology, name, targets), targets))
    return found


def _changed(topology: Topology, mode: str, loaded: Sequence[str]) -> Topology:
    used = [spec.model_copy(update=_changes(spec, mode)) for spec in topology.targets if spec.name in loaded]
    drafters = topology.drafters if mode != "plain" else ()
    return topology.model_copy(update={"targets": tuple(used), "drafters": drafters})


def _changes(spec: TargetSpec, mode: str) -> dict[str, Any]:
    if mode == "plain":
        return {"drafters": DraftersOf(names=()), "lanes": 1}
    if mode == "auto":
        return {"lanes": "auto", "draft_length": "auto"}
    lanes = 1 if mode != "lanes" else 2 if spec.lanes in (1, "auto") else spec.lanes
    return {"lanes": lanes, "draft_length": 4 if spec.draft_length in (0, "auto") else spec.draft_length}


def check_room(topology: Topology, job: Job) -> None:
    """UserError where a target's context has no room for a request; a text's tokens are for its server to count."""
    longest = max(1 if isinstance(prompt, str) else len(prompt) for prompt in job.prompts)
    for target in topology.targets:
        if longest + job.max_tokens > target.max_context:
            raise UserError(
                f"--max-tokens {job.max_tokens} leaves no room for the prompts in {target.name}'s context of "
                f"{target.max_context} tokens"
            )


def in_use(mode: Mode, job: Job, plans: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """(lanes, draft length) on average over the targets. plans: each one's, of which lanes without a session are none,
    and nothing is drafted without drafters."""
    lanes, lengths = [], []
    for name, (most, length) in zip(mode.targets, plans, strict=True):
        spec = mode.topology.target(name)
        drafted = bool(spec.drafters.names)
        lanes.append(min(most, job.in_flight, spec.max_sessions) if drafted else 1)
        lengths.append(length if drafted else 0)
    return round(sum(lanes) / len(lanes)), round(sum(lengths) / len(lengths))


def row(mode: Mode, job: Job, measured: Measured, predicted: float | None) -> dict[str, Any]:
    """What `bench --json` says of one mode, but for its texts. None: there is no such figure."""
    timed = [one for one in measured.all if one.error is None]
    first_tokens = [1000.0 * (one.arrivals[0][0] - one.sent) for one in timed if one.arrivals]
    gaps = [
        1000.0 * (later[0] - sooner[0])
        for one in timed
        for sooner, later in zip(one.arrivals, one.arrivals[1:], strict=False)
    ]
    whole = [1000.0 * (one.ended - one.sent) for one in timed]
    return {
        "mode": mode.name,
        "targets": len(mode.targets),
        "in_flight": job.in_flight,
        "lanes": measured.lanes,
        "draft_length": measured.draft_length,
        "tokens_per_s": measured.tokens_per_s,
        "predicted_tokens_per_s": predicted,
        "ttft_ms": _only(first_tokens, "p50", "p99"),
        "itl_ms": _only(gaps, "p50", "p99", "std"),
        "e2e_ms": _only(whole, "p50", "p99"),
        "acceptance_length": measured.acceptance_length,
        "drafter_utilization": measured.drafter_utilization,
    }


def tokens_per_second(answers: Sequence[Timed]) -> float:
    """Of one target, while all its places were taken: until the first request ends that nobody follows."""
    if not answers:
        return 0.0
    start = min(one.sent for one in answers)
    end = min(one.ended for one in answers if one.ended >= max(other.sent for other in answers))
    tokens = sum(count for one in answers for at, count in one.arrivals if at <= end)
    return tokens / (end - start) if end > start else 0.0


def _only(values: list[float], *names: str) -> dict[str, float | None]:
    found = summary(values)
    return {name: found[name] if values else None for name in names}


def toy_prompts(count: int, length: int, vocabulary_size: int, first: int = 0) -> list[list[int]]:
    """Random prompts of a toy language, none like another; the same ones each time."""
    return [Random(first + index).choices(range(vocabulary_size), k=length) for index in range(count)]
