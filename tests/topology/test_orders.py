"""What signals mean to a node, and that a file that cannot be used changes nothing."""

from __future__ import annotations

import logging
import os
import socket
import time
from pathlib import Path

import anyio
import pytest

from paceline.core.errors import UserError
from paceline.topology import orders as orders_module
from paceline.topology.changes import changed, log_reload, pending
from paceline.topology.orders import Orders, any_of
from paceline.topology.process import StatusFile, notify
from paceline.topology.spec import Topology, parse_topology

pytestmark = pytest.mark.anyio

TEXT = """
version: 1
name: star
drafters: [{name: d, model: toy, runtime: emulated, listen: "127.0.0.1:7070"}]
targets: [{name: a, model: toy, engine: emulated, drafters: {names: [d]}}]
"""


def topology(text: str = TEXT) -> Topology:
    return parse_topology(text, "star.yaml", Path.cwd())


async def test_one_order_told_twice_is_one_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """A service manager signals a node and its parent, which passes it on: only a later one means at once."""
    orders = Orders(topology)
    now = [100.0]
    monkeypatch.setattr(orders_module.time, "monotonic", lambda: now[0])
    orders.leave()
    orders.leave()
    assert orders.stop.is_set() and not orders.end.is_set()
    now[0] += orders_module.ONE_ORDER_SECONDS
    orders.leave()
    assert orders.end.is_set()


async def test_a_reload_reaches_every_follower(caplog: pytest.LogCaptureFixture) -> None:
    """Each is told the new topology; before anybody follows, the order is only noted."""
    seen: list[str] = []
    orders = Orders(topology)
    orders.reload()
    assert "has not started yet" in caplog.text
    for number in range(2):
        orders.follow(lambda new, number=number: seen.append(f"{number} {new.name}"))  # type: ignore[misc]
    orders.reload()
    assert seen == ["0 star", "1 star"]


async def test_a_wrong_file_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    """All its problems with file and line, and no follower hears of it."""
    seen: list[Topology] = []
    orders = Orders(lambda: topology(TEXT.replace("model: toy, engine", "modell: toy, engine") + "extra: 1\n"))
    orders.follow(seen.append)
    orders.reload()
    (record,) = caplog.records
    assert "nothing is changed: star.yaml:5:" in record.getMessage() and "star.yaml:6:" in record.getMessage()
    assert "\n" not in record.getMessage() and seen == []


async def test_a_follower_that_cannot_use_it_says_so(caplog: pytest.LogCaptureFixture) -> None:
    """A key file that is gone is logged like a wrong topology."""
    orders = Orders(topology)

    def refuse(new: Topology) -> None:
        raise UserError("secrets/api.key: no such file")

    orders.follow(refuse)
    orders.reload()
    assert "nothing is changed: secrets/api.key: no such file" in caplog.text


async def test_a_service_manager_is_told_of_a_reload_and_never_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """RELOADING=1 with the time it began, then READY=1, then STOPPING=1; a full socket costs the word only."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as heard:
        heard.bind(str(tmp_path / "notify"))
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        orders = Orders(topology)
        orders.follow(lambda new: None)
        orders.reload()
        orders.leave()
        words = [heard.recv(4096).decode() for _ in range(3)]
        assert words[0].startswith("RELOADING=1\nMONOTONIC_USEC=") and words[1:] == ["READY=1", "STOPPING=1"]
        with anyio.fail_after(5):
            for _ in range(2000):
                notify("STATUS=nobody reads this")


async def test_a_reload_that_breaks_is_over_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """systemd waits for READY=1 after RELOADING=1, and would kill a service that never says it."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as heard:
        heard.bind(str(tmp_path / "notify"))
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        orders = Orders(topology)

        def breaks(new: Topology) -> None:
            raise UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte")

        orders.follow(breaks)
        with pytest.raises(UnicodeDecodeError):
            orders.reload()
        assert [heard.recv(4096).decode()[:9] for _ in range(2)] == ["RELOADING", "READY=1"]


async def test_any_of_ends_with_the_first() -> None:
    """The others are cancelled; without any, after the time given."""
    event = anyio.Event()
    event.set()
    start = time.monotonic()
    await any_of(anyio.sleep_forever, event.wait)
    await any_of(anyio.sleep_forever, seconds=0.05)
    assert 0.05 <= time.monotonic() - start < 2


def test_what_changed_is_named_as_the_file_names_it() -> None:
    """Keys of sections within are dotted; what concerns all nodes waits for a start, like what is not taken over."""
    old = topology()
    new = topology(
        TEXT.replace("drafters: {names: [d]}", "drafters: {names: []}, max_sessions: 3, api: {listen: '127.0.0.1:9'}")
        + "link: {transport: memory}\n"
    )
    names = changed(old.targets[0], new.targets[0])
    assert names == ["drafters.names", "max_sessions", "api.listen"]
    later = pending((old, old.targets[0]), (new, new.targets[0]), {"drafters.names"})
    assert later == ["link.transport", "max_sessions", "api.listen"]


def test_a_status_file_that_cannot_be_written_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """However often it fails for one reason; and again after it had worked."""
    caplog.set_level(logging.WARNING)
    folder = tmp_path / "run"
    status = StatusFile(folder, "target", "a")
    for _ in range(2):
        for _ in range(5):
            status.write("running", {})
        folder.mkdir()
        status.write("running", {"tokens": 1})
        assert (folder / "a.json").exists()
        os.remove(folder / "a.json")
        folder.rmdir()
    assert len(caplog.records) == 2 and "No such file" in caplog.records[0].getMessage()


@pytest.mark.parametrize(
    ("done", "later", "certificates", "words"),
    [
        ([], [], False, "nothing changed"),
        ([], ["name"], False, "nothing that a running node can take over changed; at the next start: name"),
        (["drain"], ["name"], True, "drain changed; certificates were read again; at the next start: name"),
    ],
)
def test_a_reload_says_what_it_did(
    caplog: pytest.LogCaptureFixture, done: list[str], later: list[str], certificates: bool, words: str
) -> None:
    """One sentence that does not contradict itself."""
    caplog.set_level(logging.INFO)
    log_reload("chat", done, later, certificates=certificates)
    assert caplog.messages == [f"chat has read its topology again: {words}"]
