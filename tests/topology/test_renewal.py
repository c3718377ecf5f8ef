"""Certificates that are made anew while a node runs: the next connection shows them, open ones live on."""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest

from paceline.core.errors import LinkClosed, UserError
from paceline.topology.certificate_checks import fingerprint
from paceline.topology.credentials import node_files
from paceline.topology.keyring import Keyring
from paceline.topology.links.base import Channel
from paceline.topology.spec import Topology, parse_topology
from paceline.topology.transports import make_transport, renew_transport

pytestmark = pytest.mark.anyio

TEXT = """
version: 1
name: star
security: {certificates: FOLDER}
drafters: [{name: d, model: toy, runtime: emulated, listen: "127.0.0.1:7070"}]
targets: [{name: a, model: toy, engine: emulated, drafters: {names: [d]}}]
"""


def deployment(folder: Path) -> Topology:
    """A topology whose certificates are made anew in the folder."""
    for file in folder.glob("*.*"):
        file.unlink()
    Keyring(folder, folder / "deployment.key").fill("star", {"d": (), "a": ()})
    return parse_topology(TEXT.replace("FOLDER", str(folder)), "star.yaml", folder)


async def test_a_renewed_certificate_is_shown_from_the_next_connection_on(tmp_path: Path) -> None:
    """Authority and all: a target that has not read the new one is refused, one that has is welcome, old links stay."""
    topology = deployment(tmp_path)
    drafter, target = make_transport(topology, "d"), make_transport(topology, "a")
    accepted: list[Channel] = []
    came = anyio.Event()

    def accept(channel: Channel) -> None:
        accepted.append(channel)
        came.set()

    listener = await drafter.listen("127.0.0.1:0", accept)
    old = await target.dial(listener.address, "d")
    deployment(tmp_path)
    renew_transport(drafter, topology, "d")
    with pytest.raises(LinkClosed, match="certificate verify failed"):
        await target.dial(listener.address, "d")
    renew_transport(target, topology, "a")
    new = await target.dial(listener.address, "d")
    assert new.binding == fingerprint(node_files(tmp_path, "d").certificate) != old.binding
    with anyio.fail_after(5):
        while len(accepted) < 2:
            await anyio.sleep(0.005)
    assert [channel.binding for channel in accepted] == [old.binding, new.binding]
    heard: list[bytes] = []
    old.receive(heard.append, lambda reason: None)
    accepted[0].send(b"still here")
    with anyio.fail_after(5):
        while not heard:
            await anyio.sleep(0.005)
    await listener.close()


async def test_a_certificate_that_is_amiss_changes_nothing(tmp_path: Path) -> None:
    """One sentence, and connections are made as before."""
    topology = deployment(tmp_path)
    drafter, target = make_transport(topology, "d"), make_transport(topology, "a")
    listener = await drafter.listen("127.0.0.1:0", lambda channel: None)
    node_files(tmp_path, "d").certificate.write_text("nonsense")
    with pytest.raises(UserError, match=r"d\.pem"):
        renew_transport(drafter, topology, "d")
    assert (await target.dial(listener.address, "d")).certified == "d"  # type: ignore[attr-defined]
    await listener.close()
