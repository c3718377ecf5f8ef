"""The drafter's side of its links: what a target may send ahead of the service."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.core.sampling import Sampling
from paceline.edge.links import DrafterLinks
from paceline.topology.limits import PEER_LIMITS
from paceline.topology.peer import Peer
from paceline.topology.wire import (
    MAX_ITEMS,
    MAX_LOGIT_BIAS,
    MAX_SESSIONS_LISTED,
    Close,
    Draft,
    Error,
    Message,
    Ping,
    encode,
)

from .helpers import Bench, hello, item


class Pipe:
    """A channel of which only the counts and the end matter."""

    peer_address = "192.0.2.7:4711"
    binding = b""
    certified = None
    max_frame = 1 << 22
    bytes_in = bytes_out = 0

    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.closed = False

    def send(self, frame: bytes, control: bool = False) -> None:
        self.sent.append(frame)

    def secure(self, key: bytes) -> None: ...

    def receive(self, on_frame: Any, on_close: Any) -> None: ...

    def close(self) -> None:
        self.closed = True


def test_a_target_that_runs_ahead_of_the_service_loses_its_link() -> None:
    """While the service is busy with a forward, one target's messages pile up to a limit; the other is served."""
    bench, links = Bench(), DrafterLinks()
    links.service = bench.service
    greedy, modest = Pipe(), Pipe()
    peers = [Peer("greedy", greedy), Peer("modest", modest)]
    for peer in peers:
        links.on_up(peer, hello(peer.name))
    for _ in range(2 * PEER_LIMITS.unread_messages):
        links.on_message(peers[0], Ping(0, []))
    links.on_message(peers[1], Draft(7, []))
    assert greedy.closed and greedy.sent == [encode(Error("flood", "greedy sends more than can be read"))]
    links.on_down(peers[0], "closed here")
    assert bench.service.inbox.qsize() == 2 + PEER_LIMITS.unread_messages + 1 + 1
    bench.settle()
    assert not modest.closed and bench.service.sessions.shares == {"modest": 1.0}


@pytest.mark.parametrize(
    "message",
    [
        Close(7, list(range(MAX_SESSIONS_LISTED))),
        Ping(0, list(range(MAX_SESSIONS_LISTED))),
        Draft(7, [item(1, [1])] * MAX_ITEMS),
        Draft(7, [item(1, [1], sampling=Sampling(logit_bias=dict.fromkeys(range(MAX_LOGIT_BIAS), 1.0)))] * 4),
    ],
    ids=["close", "ping", "items", "biases"],
)
def test_long_messages_count_as_many(message: Message) -> None:
    """Of the longest that the wire allows only a few may wait, for each takes as much as hundreds of others."""
    bench, links = Bench(), DrafterLinks()
    links.service = bench.service
    pipe = Pipe()
    peer = Peer("greedy", pipe)
    links.on_up(peer, hello("greedy"))
    count = 0
    while not pipe.closed:
        links.on_message(peer, message)
        count += 1
    assert 7 < count < 40


def test_nothing_is_kept_of_a_target_that_left() -> None:
    """However many names come and go, and whatever they leave unread."""
    bench, links = Bench(), DrafterLinks()
    links.service = bench.service
    for number in range(100):
        peer = Peer(f"n{number}", Pipe())
        links.on_up(peer, hello(peer.name))
        links.on_message(peer, Draft(7, [item(1, [1])]))
        links.on_message(peer, Close(7, [2]))
        if number % 2:
            bench.settle()
        links.on_down(peer, "it goes")
    bench.settle()
    service = bench.service
    kept = (links._tallies, links._peers, links._unread._waiting, service._mail._boxes, service._queues.peers)
    assert not any(kept)
    assert not any((service.sessions._closed, service.sessions._held, service.sessions.shares, len(service.sessions)))


def test_a_target_that_is_read_may_go_on_for_ever() -> None:
    """The limit is on what waits, not on what was sent."""
    bench, links = Bench(), DrafterLinks()
    links.service = bench.service
    pipe = Pipe()
    peer = Peer("a", pipe)
    links.on_up(peer, hello("a"))
    for _ in range(5):
        for _ in range(PEER_LIMITS.unread_messages):
            links.on_message(peer, Ping(0, []))
        bench.settle()
    assert not pipe.closed
