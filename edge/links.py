"""A drafter's links to its targets: what happens on them becomes events of the service, and its replies messages."""

from __future__ import annotations

from collections.abc import Callable

from paceline.core.clock import RealClock
from paceline.edge.events import PeerDown, PeerUp, Received, Tally
from paceline.edge.service import DrafterService
from paceline.topology.limits import Unread, work
from paceline.topology.peer import Peer
from paceline.topology.wire import Hello, Message, Welcome


class DrafterLinks:
    """Between the loop that holds the links and the service's thread."""

    def __init__(self) -> None:
        self.service: DrafterService | None = None
        self.encoded: Callable[[], None] | None = None  # the recorder's, between encoding and sending
        self._unread = Unread(self._handled)
        self._clock = RealClock()  # the service's own
        self._peers: dict[str, Peer] = {}
        self._tallies: dict[str, Tally] = {}
        self._gone_in = 0
        self._gone_out = 0

    def on_up(self, peer: Peer, greeting: Hello | Welcome) -> None:
        assert isinstance(greeting, Hello) and self.service is not None
        self._peers[peer.name] = peer
        tally = self._tallies[peer.name] = Tally()
        self._unread.up(peer)
        self.service.inbox.put(PeerUp(peer.name, greeting, tally))

    def on_message(self, peer: Peer, message: Message) -> None:
        assert self.service is not None
        if peer.up and self._unread.takes(peer, work(message)):
            self.service.inbox.put(Received(peer.name, message, self._clock.now()))

    def on_down(self, peer: Peer, reason: str) -> None:
        assert self.service is not None
        self._gone_in += peer.bytes_in
        self._gone_out += peer.bytes_out
        self._unread.down(peer)
        if self._peers.get(peer.name) is peer:
            del self._peers[peer.name], self._tallies[peer.name]
        self.service.inbox.put(PeerDown(peer.name))

    def reply(self, target: str, message: Message) -> None:
        """On the service's thread; a target that left a moment ago misses nothing."""
        peer = self._peers.get(target)
        if peer is not None:
            peer.send(message, self.encoded)

    def bytes(self) -> dict[str, int]:
        """Since start, over all targets."""
        peers = list(self._peers.values())
        return {
            "bytes_in": self._gone_in + sum(peer.bytes_in for peer in peers),
            "bytes_out": self._gone_out + sum(peer.bytes_out for peer in peers),
        }

    def _handled(self, target: str) -> int:
        return self._tallies[target].messages
