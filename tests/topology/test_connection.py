"""Targets and drafters find each other, speak, and find each other again."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest

from paceline.topology.links.base import Transport
from paceline.topology.peer import Backoff, Peer
from paceline.topology.wire import (
    Close,
    Draft,
    Drafted,
    Hello,
    Ping,
    Pong,
    Welcome,
)

from .helpers import DRAFTER, TARGET, Recorder, drafter, target

pytestmark = pytest.mark.anyio


async def test_messages_cross_both_ways_from_any_thread(transport: Transport) -> None:
    """Engine threads at both ends send; both handlers are told, in order, and bytes are counted."""
    above, below = Recorder(), Recorder()
    async with drafter(transport, below) as server, target(transport, server.address, above) as connection:
        await above.until(lambda: bool(above.ups))
        down_peer, welcome = above.ups[0]
        up_peer, hello = below.ups[0]
        assert isinstance(welcome, Welcome) and (welcome.model, welcome.epoch) == ("tiny", DRAFTER.epoch)
        assert isinstance(hello, Hello) and hello.target == up_peer.name == "chat-a"
        assert down_peer.name == "orin-1"

        def engine() -> None:
            for number in range(100):
                assert connection.send(Draft(number, []))
                assert up_peer.send(Drafted(number, []))

        thread = threading.Thread(target=engine)
        thread.start()
        await below.until(lambda: len(below.of(Draft)) == 100)
        await above.until(lambda: len(above.of(Drafted)) == 100)
        thread.join()
        assert [message.epoch for message in below.of(Draft)] == list(range(100))  # type: ignore[union-attr]
        assert connection.send(Close(1, [5]))
        await below.until(lambda: bool(below.of(Close)))
        assert up_peer.bytes_in > 0 and up_peer.bytes_out > 0 and down_peer.bytes_in >= up_peer.bytes_out > 0


async def test_the_handler_may_send_as_soon_as_it_is_told(transport: Transport) -> None:
    """on_up is not too early to send, through the peer or through the connection."""
    below = Recorder()

    class Eager(Recorder):
        sent = False

        def on_up(self, peer: Peer, greeting: Hello | Welcome) -> None:
            self.sent = connection.send(Draft(1, [])) and peer.send(Draft(2, []))
            super().on_up(peer, greeting)

    above = Eager()
    async with drafter(transport, below) as server, target(transport, server.address, above) as connection:
        await below.until(lambda: len(below.of(Draft)) == 2)
        assert above.sent


async def test_beats_list_the_live_sessions_and_measure_the_round_trip(transport: Transport) -> None:
    """Each Ping tells the sessions of that moment; each Pong gives a round trip."""
    above, below = Recorder(), Recorder()
    live = [1, 2**63]
    async with (
        drafter(transport, below) as server,
        target(transport, server.address, above, live=lambda: list(live), beat=0.02) as connection,
    ):
        await below.until(lambda: bool(below.of(Ping)))
        assert below.of(Ping)[0].sessions == [1, 2**63]  # type: ignore[union-attr]
        live.append(7)
        await below.until(lambda: below.of(Ping)[-1].sessions == [1, 2**63, 7])  # type: ignore[union-attr]
        await above.until(lambda: len(above.of(Pong)) > 2)
        assert connection.rtt is not None and 0 < connection.rtt < 1
        assert above.downs == [] and below.downs == []


async def test_a_lost_link_is_back_within_two_seconds(transport: Transport) -> None:
    """The connection breaks while the drafter lives: sends say False until the link is up again."""
    above = Recorder()
    async with drafter(transport, Recorder()) as server, target(transport, server.address, above) as connection:
        await above.until(lambda: len(above.ups) == 1)
        for peer in server.peers:
            peer.close()
        await above.until(lambda: len(above.downs) == 1)
        assert connection.peer is None and not connection.send(Draft(1, []))
        await above.until(lambda: len(above.ups) == 2, seconds=2)
        assert connection.send(Draft(1, []))


async def test_a_restarted_drafter_is_found_again(transport: Transport) -> None:
    """Down with its goodbye, then up again with the new epoch in under two seconds."""
    above = Recorder()
    async with drafter(transport, Recorder()) as first:
        address = first.address
    async with target(transport, address, above) as connection:
        assert not connection.send(Draft(1, []))
        for number in (1, 2):
            async with drafter(transport, Recorder(), replace(DRAFTER, epoch=number), address):
                await above.until(lambda number=number: len(above.ups) == number, seconds=2)  # type: ignore[misc]
            await above.until(lambda number=number: len(above.downs) == number)  # type: ignore[misc]
            assert not connection.send(Draft(1, []))
    assert [welcome.epoch for _, welcome in above.ups] == [1, 2]  # type: ignore[union-attr]
    assert "goodbye" in above.downs[0][1] and "orin-1" in above.downs[0][1]
    assert above.story == ["up orin-1 1", "down orin-1 1", "up orin-1 2", "down orin-1 2"]


async def test_a_newer_target_of_the_same_name_replaces_the_older(transport: Transport) -> None:
    """The older goes down before the newer comes up; its process is told why and does not fight back at once."""
    below, old, new = Recorder(), Recorder(), Recorder()
    async with drafter(transport, below) as server, target(transport, server.address, old, refused_retry=60):
        await old.until(lambda: bool(old.ups))
        async with target(transport, server.address, new) as newer:
            await new.until(lambda: bool(new.ups))
            await old.until(lambda: bool(old.downs))
            assert below.story == ["up chat-a 1", "down chat-a 1", "up chat-a 2"]
            assert "newer" in old.downs[0][1]
            assert [peer for peer in server.peers] == [below.ups[1][0]]
            assert newer.send(Draft(1, []))
            await below.until(lambda: bool(below.of(Draft)))


async def test_other_names_do_not_disturb_each_other(transport: Transport) -> None:
    """Two targets of different names are both up."""
    below = Recorder()
    async with (
        drafter(transport, below) as server,
        target(transport, server.address, Recorder()),
        target(transport, server.address, Recorder(), replace(TARGET, name="chat-b")),
    ):
        await below.until(lambda: len(below.ups) == 2)
        assert {peer.name for peer in server.peers} == {"chat-a", "chat-b"} and below.downs == []


async def test_a_drafter_may_ping_too(transport: Transport) -> None:
    """A target answers a Ping as a drafter does."""
    above, below = Recorder(), Recorder()
    async with drafter(transport, below) as server, target(transport, server.address, above):
        await below.until(lambda: bool(below.ups))
        below.ups[0][0].send(Ping(77))
        await below.until(lambda: bool(below.of(Pong)))
        assert Ping(77) in above.messages


async def test_a_stopping_target_says_goodbye(transport: Transport) -> None:
    """Its drafter frees it at once, not after five seconds."""
    above, below = Recorder(), Recorder()
    async with drafter(transport, below) as server:
        async with target(transport, server.address, above):
            await above.until(lambda: bool(above.ups))
        await below.until(lambda: bool(below.downs), seconds=1)
        assert below.downs[0][1] == "the target says goodbye: target 'chat-a' stops"


async def test_pauses_double_with_jitter_up_to_the_cap() -> None:
    """50 ms at first, never over a second, and the first again after success."""
    backoff = Backoff()
    pauses = [backoff.pause() for _ in range(8)]
    for pause, step in zip(pauses, [0.05, 0.1, 0.2, 0.4, 0.8, 1, 1, 1], strict=True):
        assert step / 2 <= pause <= step
    backoff.reset()
    assert backoff.pause() <= 0.05
