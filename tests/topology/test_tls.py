"""TLS links: both ends show a certificate of the deployment, and are who it says; all others get nothing."""

from __future__ import annotations

import contextlib
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import anyio
import pytest

from paceline.core.errors import LinkClosed, UserError
from paceline.topology.certificate_checks import fingerprint
from paceline.topology.connection import DrafterConnection
from paceline.topology.credentials import NodeFiles, node_files
from paceline.topology.keyring import Keyring
from paceline.topology.links.base import Channel
from paceline.topology.links.tcp import ServerTls, TcpTransport
from paceline.topology.links.tcp_channel import split_address
from paceline.topology.links.tls_listener import MAX_UNFINISHED
from paceline.topology.spec import Api, DraftersOf, Topology, parse_topology
from paceline.topology.tls import api_files, client_context, server_context, tcp_transport

from .helpers import DRAFTER, TARGET, Recorder, drafter, target
from .links.conftest import LOOPS
from .links.helpers import End

pytestmark = pytest.mark.anyio
D, T = DRAFTER.name, TARGET.name  # orin-1, chat-a


@pytest.fixture(params=LOOPS)
def anyio_backend(request: pytest.FixtureRequest) -> object:
    """asyncio's loop and uvloop each have a TLS of their own."""
    return request.param


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Certificates of a deployment. orin-2's holds orin-1 as an alternative name."""
    return _deployment(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same names, certified by somebody else."""
    return _deployment(tmp_path_factory.mktemp("foreign"))


def _deployment(folder: Path) -> Path:
    nodes = {D: (), "orin-2": (D,), T: (), "chat-b": ()}
    Keyring(folder, folder / "deployment.key").fill("star", nodes)
    return folder


def transport(folder: Path, node: str) -> TcpTransport:
    """Of a node that listens and dials."""
    return with_files(node_files(folder, node))


def with_files(files: NodeFiles) -> TcpTransport:
    tls = ServerTls(server_context(files), fingerprint(files.certificate))
    return TcpTransport(server_tls=tls, client_tls=client_context(files))


@asynccontextmanager
async def listening(where: TcpTransport) -> AsyncIterator[tuple[str, list[Channel], anyio.Event]]:
    """(address, the channels that were let in, set at the first)."""
    channels: list[Channel] = []
    first = anyio.Event()

    def accept(channel: Channel) -> None:
        channels.append(channel)
        first.set()

    listener = await where.listen("127.0.0.1:0", accept)
    try:
        yield listener.address, channels, first
    finally:
        await listener.close()


@pytest.fixture
def refusals(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], list[str]]]:
    """What was logged of strangers; nothing else may have been logged by the loop."""
    yield lambda: [r.getMessage() for r in caplog.records if getattr(r, "event", "") == "refused"]
    assert not [record.getMessage() for record in caplog.records if record.name.startswith("asyncio")]


async def test_both_ends_know_each_other_by_name(folder: Path) -> None:
    """The dialer expects a name, not an address; both ends agree on what binds them; it is TLS 1.3."""
    async with listening(transport(folder, D)) as (address, channels, first):
        near = await transport(folder, T).dial(address, D)
        await first.wait()
        assert (near.certified, channels[0].certified) == (D, T)
        assert near.binding == channels[0].binding == fingerprint(node_files(folder, D).certificate)
        assert near._transport.get_extra_info("ssl_object").version() == "TLSv1.3"  # type: ignore[attr-defined]
        end = End(near)
        channels[0].send(b"hello")
        await end.until(lambda end: end.frames == [b"hello"])
        near.close()


async def test_strict_clients_accept_the_certificates(folder: Path) -> None:
    """Python 3.13 and curl's newer back ends hold every certificate to the letter of RFC 5280."""
    files = node_files(folder, T)
    context = client_context(files)
    context.verify_flags |= ssl.VerifyFlags.VERIFY_X509_STRICT
    async with listening(transport(folder, D)) as (address, _, first):
        near = await TcpTransport(client_tls=context).dial(address, D)
        await first.wait()
        near.close()


async def test_a_drafter_of_another_name_is_refused(folder: Path) -> None:
    """Its certificate is good, but for somebody else; being an alternative name is not enough."""
    async with listening(transport(folder, D)) as (address, _, _):
        with pytest.raises(LinkClosed, match=r"TLS failed .*Hostname mismatch.*orin-2"):
            await transport(folder, T).dial(address, "orin-2")
    async with listening(transport(folder, "orin-2")) as (address, _, _):
        with pytest.raises(LinkClosed, match="it shows the certificate of 'orin-2', not 'orin-1'"):
            await transport(folder, T).dial(address, D)


async def test_a_drafter_of_another_authority_is_refused(
    folder: Path, foreign: Path, refusals: Callable[[], list[str]]
) -> None:
    """Whatever name it shows; both ends say what it means."""
    async with listening(transport(foreign, D)) as (address, channels, _):
        meaning = ": the two machines have certificates of different authorities"
        with pytest.raises(LinkClosed, match=r"TLS failed \(certificate verify failed: .*" + meaning):
            await transport(folder, T).dial(address, D)
        assert channels == []
        with anyio.fail_after(5):
            while not refusals():
                await anyio.sleep(0)
        assert "the two machines have certificates of different authorities" in refusals()[0]


def without_certificate(folder: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(node_files(folder, T).authority)
    return context


def of_another_authority(folder: Path, foreign: Path) -> ssl.SSLContext:
    context = without_certificate(folder)
    files = node_files(foreign, T)
    context.load_cert_chain(files.certificate, files.key)
    return context


def of_an_old_version(folder: Path) -> ssl.SSLContext:
    context = client_context(node_files(folder, T))
    context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_2
    return context


@pytest.mark.parametrize("kind", ["no certificate", "another authority", "TLS 1.2", "no TLS"])
async def test_a_stranger_gets_no_channel(
    folder: Path, foreign: Path, kind: str, refusals: Callable[[], list[str]]
) -> None:
    """It is closed before a channel exists, and told of once, however often it comes."""
    contexts = {
        "no certificate": without_certificate(folder),
        "another authority": of_another_authority(folder, foreign),
        "TLS 1.2": of_an_old_version(folder),
        "no TLS": None,
    }
    stranger = TcpTransport(client_tls=contexts[kind])
    async with listening(transport(folder, D)) as (address, channels, _):
        for _ in range(5):
            try:
                end = End(await stranger.dial(address, D))
            except LinkClosed:
                continue
            end.channel.send(b"let me in, please")
            hint = "; its log may say what it holds against this end's certificate"
            assert (await end.closed()).endswith(hint) or kind == "no TLS"
        assert channels == []
        assert len(refusals()) == 1 and refusals()[0].startswith("refused 127.0.0.1:") and ": tls: " in refusals()[0]


async def test_a_stranger_that_never_speaks_is_closed(folder: Path, refusals: Callable[[], list[str]]) -> None:
    """After the time that a handshake may take."""
    files = node_files(folder, D)
    tls = ServerTls(server_context(files), b"", handshake_limit=0.2)
    async with listening(TcpTransport(server_tls=tls)) as (address, channels, _):
        end = End(await TcpTransport().dial(address))
        await end.closed()
        assert channels == [] and len(refusals()) == 1


async def test_a_crowd_of_strangers_shuts_itself_out(folder: Path, refusals: Callable[[], list[str]]) -> None:
    """No more than so many unfinished handshakes at a time: the oldest go, and a target still gets in."""
    async with listening(transport(folder, D)) as (address, channels, first):
        crowd = [End(await TcpTransport().dial(address)) for _ in range(MAX_UNFINISHED + 20)]
        near = await transport(folder, T).dial(address, D)
        await first.wait()
        for end in crowd[:20]:
            await end.closed()
        assert not any(end.reasons for end in crowd[30:])
        assert [channel.certified for channel in channels] == [T]
        assert refusals() == [f"refused 127.0.0.1:0: busy: more than {MAX_UNFINISHED} unfinished TLS handshakes"]
        for channel in [near, *(end.channel for end in crowd)]:
            channel.close()


async def test_closing_the_listener_leaves_no_socket(folder: Path) -> None:
    """Also those that were accepted a moment ago and have not begun."""
    async with listening(transport(folder, D)) as (address, _, _):
        sockets = [socket.create_connection(split_address(address)) for _ in range(10)]
        await anyio.sleep(0)
    for one in sockets:
        one.settimeout(5)
        with one, contextlib.suppress(ConnectionResetError):
            assert one.recv(1) == b""


async def test_an_address_in_use_is_one_sentence(folder: Path) -> None:
    """As without TLS."""
    async with listening(transport(folder, D)) as (address, _, _):
        with pytest.raises(UserError, match=f"^cannot listen at {address}: address already in use$"):
            await transport(folder, D).listen(address, lambda channel: None)


async def test_a_target_is_who_its_certificate_says(folder: Path, refusals: Callable[[], list[str]]) -> None:
    """chat-b's files and the deployment key do not make it chat-a, whose sessions it could free."""
    above = Recorder()
    async with (
        drafter(transport(folder, D), above) as server,
        target(transport(folder, T), server.address, told := Recorder(), drafter=D),
    ):
        await above.until(lambda: len(above.ups) == 1)
        async with target(transport(folder, "chat-b"), server.address, Recorder(), TARGET, drafter=D) as liar:
            await refused(liar)
        assert told.downs == [] and [peer.name for peer in server.peers] == [T]
    (line,) = refusals()
    assert "unauthenticated: target 'chat-a' shows the certificate of 'chat-b'" in line


async def test_a_certificate_without_the_deployment_key_gets_nothing(
    folder: Path, refusals: Callable[[], list[str]]
) -> None:
    """TLS lets its owner in, and the handshake keeps it out."""
    thief = replace(TARGET, key=b"guessed, but wrong")
    async with (
        drafter(transport(folder, D), above := Recorder()) as server,
        target(transport(folder, T), server.address, Recorder(), thief, drafter=D) as connection,
    ):
        assert "refused by the drafter: is deployment.key the same on both machines?" in await refused(connection)
        assert above.ups == []
    assert len(refusals()) == 1


async def test_a_relay_with_two_stolen_certificates_is_refused(
    folder: Path, tmp_path: Path, refusals: Callable[[], list[str]]
) -> None:
    """In the middle, with a good certificate of each end and without the deployment key: the proofs do not fit,
    because the two ends do not see the same certificate of the drafter."""
    for name in ("ca.pem", "ca.key"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
        (tmp_path / name).chmod(0o600)
    Keyring(tmp_path, tmp_path / "deployment.key").fill("star", {D: ()})  # an older certificate of the same drafter
    async with anyio.create_task_group() as tasks, drafter(transport(folder, D), above := Recorder()) as server:

        async def relay(near: Channel) -> None:
            far = await transport(folder, T).dial(server.address, D)
            near.receive(far.send, lambda reason: far.close())
            far.receive(near.send, lambda reason: near.close())

        async with (
            listening_to(transport(tmp_path, D), lambda channel: tasks.start_soon(relay, channel)) as address,
            target(transport(folder, T), address, Recorder(), drafter=D) as connection,
        ):
            assert "refused by the drafter: is deployment.key the same on both machines?" in await refused(connection)
        assert above.ups == []
    assert "does not know the deployment key" in refusals()[0]


async def refused(connection: DrafterConnection) -> str:
    """Why there is no link, as soon as that is known."""
    with anyio.fail_after(5):
        while connection.trouble is None:
            await anyio.sleep(0.01)
    return connection.trouble


@asynccontextmanager
async def listening_to(where: TcpTransport, accept: Callable[[Channel], None]) -> AsyncIterator[str]:
    listener = await where.listen("127.0.0.1:0", accept)
    yield listener.address
    await listener.close()


def topology(folder: Path, security: str) -> Topology:
    """One drafter beyond loopback, one on it, one target that uses both."""
    text = f"""\
version: 1
name: star
security: {{{security}}}
drafters:
  - {{name: {D}, model: org/small, listen: "0.0.0.0:7070"}}
  - {{name: orin-2, model: org/small, listen: "127.0.0.1:7071"}}
targets:
  - {{name: {T}, model: org/large, drafters: {{names: [{D}, orin-2]}}}}
"""
    return parse_topology(text, "star.yaml", folder)


@pytest.mark.parametrize(
    ("security", "encrypted"),
    [
        ("key_file: deployment.key", {D}),
        ("key_file: deployment.key, certificates: .", {D, "orin-2"}),
        ("key_file: deployment.key, encrypt: false", set()),
    ],
)
async def test_both_ends_agree_which_links_are_encrypted(folder: Path, security: str, encrypted: set[str]) -> None:
    """A target with a drafter on loopback and one beyond speaks to each as it listens."""
    star = topology(folder, security)
    for name in (D, "orin-2"):
        async with listening(tcp_transport(star, name)) as (address, channels, first):
            near = await tcp_transport(star, T).dial(address, name)
            await first.wait()
            expected = (name, T) if name in encrypted else (None, None)
            assert (near.certified, channels[0].certified) == expected
            near.close()


async def test_a_certificate_that_soon_expires_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A month before, once at each start, though links and the API show the same one: time enough to renew it."""
    Keyring(tmp_path, tmp_path / "deployment.key").fill("star", {D: (), "orin-2": (), T: ()}, days=20)
    star = topology(tmp_path, "key_file: deployment.key")
    exposed = star.target(T).model_copy(update={"api": Api.model_validate({"listen": "0.0.0.0:8001"})})
    assert tcp_transport(star, T) and api_files(star, exposed)
    (line,) = [record.getMessage() for record in caplog.records]
    assert line == f"{tmp_path}/{T}.pem expires in 19 days; run: paceline keys init star.yaml --renew {T}"
    alone = exposed.model_copy(update={"drafters": DraftersOf(names=())})
    assert api_files(star.model_copy(update={"targets": (alone,)}), alone)
    assert [record.getMessage() for record in caplog.records] == [line, line]


async def test_a_node_does_not_start_with_a_bad_certificate(folder: Path, tmp_path: Path) -> None:
    """One sentence, whatever happened since the topology was checked."""
    star = topology(_deployment(tmp_path), "key_file: deployment.key")
    (tmp_path / f"{D}.key").unlink()
    with pytest.raises(UserError, match=r"orin-1\.key does not exist; run: paceline keys init"):
        tcp_transport(star, D)
    assert tcp_transport(star, T)
