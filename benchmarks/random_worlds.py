"""Worlds at random: what goes wrong in them, how target and drafter are set up, what is asked of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

from paceline.cloud.drafters import Policy
from paceline.cloud.requests import Request
from paceline.core.sampling import Sampling
from paceline.edge.events import Limits

VOCABULARY = 64


@dataclass(frozen=True)
class Faults:
    """Probabilities a message, or a millisecond where said so."""

    loss: float = 0.0
    doubling: float = 0.0
    nonsense: float = 0.0  # a proposal is replaced by random ids, some outside every vocabulary
    slow: float = 0.0  # a message takes up to 0.3 s, so later ones overtake it
    latency: float = 0.0  # seconds, one way, jittered
    restart: float = 0.0  # a ms: a new epoch
    outage: float = 0.0  # a ms: the link is gone for up to 0.3 s
    room: float = 0.0  # a ms: a drafter says how much room it has, truly or not
    reconfiguration: float = 0.0  # a ms: another order of drafters, another policy
    cancellation: float = 0.0  # a request


@dataclass(frozen=True)
class Plan:
    """One world."""

    seed: int
    faults: Faults
    lanes: int = 1
    drafters: int = 1
    policy: Policy = "failover"
    deadline: float | None = None
    agreement: float = 0.7
    draft_ahead: int = 0
    target_sessions: int = 32
    target_slots: int = 1 << 15
    prefill_chunk: int = 256
    max_tokens_in_draft: int = 16_384
    drafter_context: int = 4096
    limits: Limits = field(default_factory=Limits)


def random_plan(seed: int) -> Plan:
    """Every kind of fault in some world, and some worlds without any."""
    random = Random(seed)

    def sometimes(highest: float) -> float:
        return random.choice([0.0, highest / 10, highest])

    faults = Faults(
        loss=sometimes(0.1),
        doubling=sometimes(0.2),
        nonsense=sometimes(0.1),
        slow=sometimes(0.1),
        latency=random.choice([0.0, 0.001, 0.01]),
        restart=sometimes(0.005),
        outage=sometimes(0.004),
        room=sometimes(0.01),
        reconfiguration=sometimes(0.003),
        cancellation=sometimes(0.2),
    )
    return Plan(
        seed=seed,
        faults=faults,
        lanes=random.randint(1, 4),
        drafters=random.choice([1, 1, 2, 3]),
        policy=random.choice(["failover", "spread"]),
        deadline=random.choice([None, None, None, 0.02, 0.1, 0.004]),
        agreement=random.choice([0.0, 0.5, 0.8, 0.95, 1.0]),
        target_sessions=random.choice([3, 16, 32]),
        target_slots=random.choice([1200, 8192]),
        prefill_chunk=random.choice([5, 64]),
        max_tokens_in_draft=random.choice([24, 16_384]),
        drafter_context=random.choice([120, 4096, 4096, 4096]),
        limits=Limits(
            max_sessions=random.choice([4, 64, 64, 64]),
            max_batch=random.choice([1, 8, 32]),
            max_messages=random.choice([0, 1]),
            max_queue=random.choice([4, 256, 256, 256]),
            chunk=random.choice([32, 256]),
            idle_seconds=random.choice([0.02, 10.0]),
        ),
        draft_ahead=random.choice([0, 1, 5, 16]),
    )


def random_request(random: Random, name: str) -> Request:
    """Any sampling parameters; prompts share beginnings, so that kept KV is used again."""
    prompt = [1, 2, 3, 4, 5, 6, 7, 8] * random.randint(0, 6) + [
        random.randrange(VOCABULARY) for _ in range(random.randint(1, 40))
    ]
    penalties = random.random() < 0.2
    sampling = Sampling(
        seed=random.getrandbits(64),
        temperature=random.choice([0.0, 0.3, 0.8, 1.0, 1.5]),
        top_p=random.choice([1.0, 1.0, 0.9, 0.5]),
        top_k=random.choice([0, 0, 5, 40]),
        min_p=random.choice([0.0, 0.0, 0.05]),
        presence_penalty=random.choice([0.0, 0.6]) if penalties else 0.0,
        frequency_penalty=random.choice([0.0, 0.3]) if penalties else 0.0,
        repetition_penalty=random.choice([1.0, 1.2]) if penalties else 1.0,
        logit_bias={random.randrange(VOCABULARY): random.uniform(-4, 4)} if random.random() < 0.1 else {},
    )
    return Request(
        name,
        tuple(prompt),
        sampling,
        max_tokens=random.randint(1, 400),
        stop=random.choice([(), (), ("ab",), ("xyz", "q€")]),
        stop_token_ids=random.choice([frozenset(), frozenset(), frozenset({0})]),
        log_probs=random.choice([None, None, None, 2]),
    )
