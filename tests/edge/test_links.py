"""The drafter's side of its links: what a target may send ahead of the service."""

from __future__ import annotations

from typing import Any

from paceline.edge.links import DrafterLinks
from paceline.topology.limits import PEER_LIMITS
from paceline.topology.peer import Peer
from paceline.topology.wire import Draft, Error, Ping, encode

from .helpers import Bench, hello


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
    assert bench.service.handled == {"greedy": PEER_LIMITS.unread_messages, "modest": 1}
    assert not modest.closed and bench.service.sessions.shares == {"modest": 1.0}


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
