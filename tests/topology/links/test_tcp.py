"""What only TCP and TLS have: a byte stream that others can write, addresses, certificates."""

from __future__ import annotations

import gc
import socket
import weakref

import anyio
import pytest

from paceline.core.errors import LinkClosed, UserError
from paceline.topology.links.tcp import TcpTransport
from paceline.topology.links.tcp_channel import join_address, split_address
from paceline.topology.wire import MAX_FRAME_BYTES

from .helpers import End, Network, raw_peer, tls_transport

pytestmark = pytest.mark.anyio


async def test_a_length_over_the_limit_closes_without_buffering() -> None:
    """The prefix alone ends the channel; nothing of that size is allocated."""
    async with raw_peer() as (raw, end):
        raw.sendall((5).to_bytes(4, "little") + b"hello" + (MAX_FRAME_BYTES + 1).to_bytes(4, "little"))
        assert f"over the limit of {MAX_FRAME_BYTES}" in await end.closed()
        assert end.frames == [b"hello"]
        assert len(end.channel._buffer) < 1 << 17  # type: ignore[attr-defined]


async def test_a_permitted_length_allocates_only_as_bytes_arrive() -> None:
    """A peer that announces the largest frame and sends nothing costs nothing."""
    async with raw_peer() as (raw, end):
        raw.sendall(MAX_FRAME_BYTES.to_bytes(4, "little") + bytes(10))
        await anyio.wait_all_tasks_blocked()
        assert len(end.channel._buffer) < 1 << 17  # type: ignore[attr-defined]


async def test_frames_may_come_in_single_bytes() -> None:
    """However the stream is cut, frames come out whole."""
    async with raw_peer() as (raw, end):
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for byte in (3).to_bytes(4, "little") + b"abc" + (0).to_bytes(4, "little") + (1).to_bytes(4, "little") + b"z":
            raw.sendall(bytes([byte]))
            await anyio.sleep(0)
        await end.until(lambda end: len(end.frames) == 3)
        assert end.frames == [b"abc", b"", b"z"]


async def test_a_half_frame_at_the_end_is_named() -> None:
    """A connection that ends within a frame says so, and the half is not delivered."""
    async with raw_peer() as (raw, end):
        raw.sendall((100).to_bytes(4, "little") + b"only this")
        raw.shutdown(socket.SHUT_WR)
        assert await end.closed() == "closed by the peer in the middle of a frame"
        assert end.frames == []


async def test_a_reset_connection_has_a_reason() -> None:
    """A peer that dies hard ends the channel with the system's words."""
    async with raw_peer() as (raw, end):
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        raw.close()
        assert "reset" in await end.closed()


async def test_writing_to_a_connection_that_is_gone_ends_it() -> None:
    """The loop has not noticed yet: a direct write finds out, raises nothing, and the end is told once."""
    async with raw_peer() as (raw, end):
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        raw.close()
        for _ in range(3):
            end.channel.send(b"anyone there?")
        assert "reset" in await end.closed() or "pipe" in end.reasons[0]
        assert len(end.reasons) == 1 and end.frames == []


async def test_a_slow_reader_gets_everything_in_order() -> None:
    """Direct writes, the queue and direct writes again keep their order when the socket fills up."""
    async with raw_peer() as (raw, end):
        payloads = [bytes([index]) * 100_000 for index in range(70)]
        for payload in payloads:
            end.channel.send(payload)

        def read() -> bytes:
            wanted, got = sum(4 + len(payload) for payload in payloads), b""
            while len(got) < wanted:
                got += raw.recv(1 << 20)
            return got

        got = await anyio.to_thread.run_sync(read)
        assert got == b"".join(len(payload).to_bytes(4, "little") + payload for payload in payloads)
        await anyio.wait_all_tasks_blocked()
        end.channel.send(b"direct again")
        assert raw.recv(100) == (12).to_bytes(4, "little") + b"direct again"


@pytest.mark.parametrize("address", ["localhost", ":70", "host:", "host:seven", "host:70000"])
async def test_a_wrong_address_is_explained(address: str) -> None:
    """What is no host:port gets one sentence."""
    with pytest.raises(UserError, match="write host:port"):
        await TcpTransport().dial(address)


async def test_addresses_may_be_version_6() -> None:
    """[::1]:port is taken apart and put together again."""
    assert split_address("[::1]:7070") == ("::1", 7070)
    assert join_address("::1", 7070) == "[::1]:7070"


async def test_an_unknown_certificate_is_refused() -> None:
    """The dialer says that TLS failed and why; no channel comes to be."""
    async with Network("tls").listening() as (listener, _):
        with pytest.raises(LinkClosed, match=r"(?i)TLS failed.*verify.failed"):
            await tls_transport().dial(listener.address)


async def test_plain_bytes_on_a_tls_port_end_without_a_channel() -> None:
    """Someone who does not speak TLS is closed before a channel exists."""
    async with Network("tls").listening() as (listener, _):
        end = End(await TcpTransport().dial(listener.address))
        end.channel.send(b"not a client hello")
        await end.closed()


async def test_channels_that_have_ended_are_freed_without_the_garbage_collector() -> None:
    """A drafter's process collects garbage rarely: what a stranger cost must go as it leaves."""
    ends: list[weakref.ref[End]] = []
    listener = await TcpTransport().listen("127.0.0.1:0", lambda channel: ends.append(weakref.ref(End(channel))))
    gc.disable()
    try:
        for _ in range(5):
            socket.create_connection(split_address(listener.address)).close()
        with anyio.fail_after(5):
            while len(ends) < 5 or sum(end() is not None for end in ends) > 0:
                await anyio.sleep(0.01)
    finally:
        gc.enable()
        await listener.close()


@pytest.mark.parametrize("host", ["orin..lan", "a" * 64])
async def test_a_name_that_no_host_can_have_is_only_not_reached(host: str) -> None:
    """Python's look-up breaks on it; a target goes on trying all the same."""
    transport = TcpTransport()
    with pytest.raises(LinkClosed, match=f"cannot reach {host}:7070: "):
        await transport.dial(f"{host}:7070")
    with pytest.raises(UserError, match=f"cannot listen at {host}:7070: "):
        await transport.listen(f"{host}:7070", lambda channel: None)
