"""A star beyond loopback with real processes: what strangers, recordings and stolen ids get, and where keys show."""

from __future__ import annotations

import json
import logging
import os
import socket
import ssl
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest

from paceline.core.emulated import toy_vocabulary
from paceline.topology.credentials import node_files
from paceline.topology.handshake import Identity, TargetHandshake
from paceline.topology.spec import load_topology
from paceline.topology.tls import tcp_transport
from paceline.topology.wire import Close, Draft, Drafted, DraftItem, Message, Ping, Pong, Status, decode, encode

from .conftest import EmulatedStar, wait_for

pytestmark = pytest.mark.integration

Star = Callable[..., EmulatedStar]


def beyond_loopback(star: EmulatedStar, encrypt: bool = True) -> EmulatedStar:
    """The star, listening everywhere, with all the keys that this needs."""

    def change(topology: dict[str, Any]) -> None:
        topology["security"] = {"key_file": "secrets/deployment.key", "encrypt": encrypt}
        topology["drafters"][0]["listen"] = topology["drafters"][0]["listen"].replace("127.0.0.1", "0.0.0.0")
        for target in topology["targets"]:
            target["api"] |= {
                "listen": target["api"]["listen"].replace("127.0.0.1", "0.0.0.0"),
                "key_file": "secrets/api.key",
            }

    star.edit(change)
    process = star.start("keys", "init", str(star.path))
    _, err = process.communicate(timeout=30)
    assert process.returncode == 0, err
    if encrypt:
        star.api = [url.replace("http:", "https:") for url in star.api]
    return star


def secrets_of(star: EmulatedStar) -> dict[str, str]:
    """By file: the line of a secret that nobody must ever see."""
    lines = {}
    for file in (star.folder / "secrets").glob("*.key"):
        text = file.read_text().strip().splitlines()
        lines[file.name] = text[1] if len(text) > 1 else text[0]
    assert set(lines) == {"deployment.key", "api.key", "ca.key", "drafter.key", "target-0.key"}
    return lines


def client(star: EmulatedStar) -> httpx.Client:
    """A user who has the authority's certificate and the API key."""
    context = ssl.create_default_context(cafile=str(star.folder / "secrets" / "ca.pem"))
    key = (star.folder / "secrets" / "api.key").read_text().strip()
    return httpx.Client(verify=context, trust_env=False, headers={"Authorization": f"Bearer {key}"}, timeout=30)


def up(star: EmulatedStar) -> None:
    """Drafter and target, linked."""
    star.node("drafter", "drafter")
    star.node("target", "target-0")
    wait_for(lambda: star.status("target-0").get("drafters") == {"drafter": True}, "the link")


def test_keys_never_show(emulated: Star) -> None:
    """Of a running TLS star: not in command lines, environments, logs, status files or what commands print."""
    star = beyond_loopback(emulated(targets=1))
    process = star.start("up", str(star.path), "--run-dir", str(star.run_dir))
    wait_for(lambda: star.status("target-0").get("drafters") == {"drafter": True}, "the link")
    with client(star) as user:
        body = {"prompt": "abc", "max_tokens": 30}
        assert user.post(f"{star.api[0]}/v1/completions", json=body).status_code == 200
        wrong = {"Authorization": "Bearer wrong-key-of-a-user"}
        assert user.post(f"{star.api[0]}/v1/completions", json=body, headers=wrong).status_code == 401
    seen = {}
    for pid in [process.pid, *star.pids()]:
        for what in ("cmdline", "environ"):
            seen[f"{what} of {pid}"] = Path(f"/proc/{pid}/{what}").read_bytes()
    report = json.dumps(star.start("check", str(star.path), "--json").communicate(timeout=30))
    process.terminate()
    out, err = process.communicate(timeout=30)
    seen |= {"check": report.encode(), "output": (out + err).encode()}
    seen |= {file.name: file.read_bytes() for file in star.run_dir.rglob("*") if file.is_file()}
    assert {"drafter.log", "target-0.log", "drafter.json", "target-0.json"} <= set(seen)
    for name, secret in (secrets_of(star) | {"a user's": "wrong-key-of-a-user"}).items():
        assert [place for place, text in seen.items() if secret.encode() in text] == [], name
    port = star.api[0].rpartition(":")[2]
    assert "target-0 serves https://" in out and f":{port}/v1" in out


def test_the_run_directory_is_the_owners(emulated: Star) -> None:
    """Logs and status files name prompts' lengths, peers and addresses: nobody else's business."""
    star = emulated(targets=1)
    run_dir = star.folder / "new" / "run"
    process = star.start("run", str(star.path), "--run-dir", str(run_dir), "--max-tokens", "5", "--prompt", "x")
    _, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert run_dir.stat().st_mode & 0o777 == 0o700


def test_run_speaks_https_and_the_text_is_the_same(emulated: Star) -> None:
    """Everything beyond loopback, encrypted: same tokens as the plain star, and speculation."""
    plain = emulated().run("--no-drafter", "--max-tokens", "40", "--prompt", "abc")
    star = beyond_loopback(emulated())
    drafted = star.run("--max-tokens", "40", "--prompt", "abc")
    assert [o["token_ids"] for o in drafted["outputs"]] == [o["token_ids"] for o in plain["outputs"]]
    assert drafted["targets"][0]["acceptance_length"] > 1.2


def test_a_stranger_at_the_api_needs_certificate_and_key(emulated: Star) -> None:
    """Who does not know the authority does not connect, plain HTTP gets nothing, a wrong key gets 401."""
    star = beyond_loopback(emulated(targets=1))
    up(star)
    with pytest.raises(httpx.ConnectError, match=r"(?i)certificate.verify.failed"):
        httpx.get(f"{star.api[0]}/health", trust_env=False)
    with pytest.raises(httpx.HTTPError):
        httpx.get(f"{star.api[0].replace('https', 'http')}/health", trust_env=False)
    with client(star) as user:
        assert user.get(f"{star.api[0]}/v1/models").status_code == 200
        assert user.get(f"{star.api[0]}/v1/models", headers={"Authorization": "Bearer x"}).status_code == 401


class Tap:
    """A pipe between a target and its drafter that keeps what went towards the drafter."""

    def __init__(self, drafter: tuple[str, int]) -> None:
        self.recorded = b""
        self._drafter = drafter
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._server.getsockname()[1]
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                near, _ = self._server.accept()
                far = socket.create_connection(self._drafter)
            except OSError:
                return
            threading.Thread(target=self._pump, args=(near, far, True), daemon=True).start()
            threading.Thread(target=self._pump, args=(far, near, False), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, record: bool) -> None:
        with source, sink:
            try:
                while data := source.recv(65536):
                    self.recorded += data if record else b""
                    sink.sendall(data)
            except OSError:
                pass

    def openings(self) -> list[int]:
        """Ids of the sessions that were opened in what was recorded, each time; for a link without TLS."""
        found: list[int] = []
        rest = self.recorded
        while len(rest) >= 4 + (length := int.from_bytes(rest[:4], "little")):
            message = decode(rest[4 : 4 + length])
            found += [item.session for item in message.items if item.base == 0] if isinstance(message, Draft) else []
            rest = rest[4 + length :]
        return found

    def close(self) -> None:
        self._server.close()


@pytest.mark.parametrize("encrypt", [True, False], ids=["tls", "plain"])
def test_a_recorded_handshake_replayed_is_refused(emulated: Star, encrypt: bool) -> None:
    """All that a real target sent, byte for byte, sent again: no link, no session, and the first target lives on."""
    star = beyond_loopback(emulated(targets=1, verify_ms=20.0), encrypt)
    port = load_topology(star.path).drafters[0].listen.port
    tap = Tap(("127.0.0.1", port))
    try:
        star.node("drafter", "drafter")
        wait_for(lambda: star.status("drafter"), "the drafter")
        star.edit(lambda topology: topology["drafters"][0].update(listen=f"0.0.0.0:{tap.port}"))
        star.node("target", "target-0")  # through the tap
        wait_for(lambda: star.status("target-0").get("drafters") == {"drafter": True}, "the link")
        assert len(tap.recorded) > 100
        with socket.create_connection(("127.0.0.1", port)) as replay:
            replay.settimeout(10)
            answers = b""
            try:
                replay.sendall(tap.recorded)
                while data := replay.recv(65536):
                    answers += data
            except ConnectionError:
                pass
        if not encrypt:
            assert b"unauthenticated" in answers
        for secret in (b"drafter", b"emulated", b"toy"):
            assert secret not in answers
        before = star.status("target-0")["time"]
        wait_for(lambda: star.status("target-0")["time"] > before + 1, "the next status")
        assert star.status("target-0")["drafters"] == {"drafter": True}
        assert star.status("drafter")["live_sessions"] == 0
    finally:
        tap.close()


class OtherTarget:
    """A second target of the same deployment, speaking for itself."""

    def __init__(self, channel: Any, identity: Identity) -> None:
        self.channel = channel
        self.handshake = TargetHandshake(identity, "drafter", channel.binding)
        self.messages: list[Message] = []
        self.up = anyio.Event()
        channel.receive(self._on_frame, lambda reason: None)
        channel.send(self.handshake.start())

    def _on_frame(self, frame: bytes) -> None:
        if self.handshake.welcome is not None:
            self.messages.append(decode(frame))
            return
        answer = self.handshake.receive(frame)
        if answer is not None:
            self.channel.send(answer)
        else:
            self.up.set()

    async def told(self, kind: type[Message], count: int = 1) -> list[Any]:
        with anyio.fail_after(10):
            while len(found := [one for one in self.messages if isinstance(one, kind)]) < count:
                await anyio.sleep(0.01)
        return found


@asynccontextmanager
async def other_target(star: EmulatedStar, name: str) -> AsyncIterator[OtherTarget]:
    """Dials with that name's own certificate and the deployment key."""
    topology = load_topology(star.path)
    assert topology.security.key_file is not None
    key = topology.security.key_file.read_bytes().strip()
    address = str(topology.drafters[0].listen.from_here)
    channel = await tcp_transport(topology, name).dial(address, "drafter")
    other = OtherTarget(channel, Identity(topology.name, name, key, toy_vocabulary(300).identity))
    with anyio.fail_after(10):
        await other.up.wait()
    try:
        yield other
    finally:
        channel.close()
        await anyio.sleep(0)


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_stolen_session_id_is_useless(emulated: Star) -> None:
    """A second target that has read the first one's session ids off an open link names them: it is told that they
    are unknown, and frees, reads and changes nothing."""
    ask = {"prompt": "abc", "max_tokens": 120, "temperature": 0, "return_token_ids": True}
    plain = emulated(targets=1).run("--no-drafter", "--max-tokens", "120", "--prompt", "abc")["outputs"][0]["token_ids"]
    star = beyond_loopback(emulated(verify_ms=30.0), encrypt=False)
    port = load_topology(star.path).drafters[0].listen.port
    tap = Tap(("127.0.0.1", port))
    star.node("drafter", "drafter")
    wait_for(lambda: star.status("drafter"), "the drafter")
    star.edit(lambda topology: topology["drafters"][0].update(listen=f"0.0.0.0:{tap.port}"))
    star.node("target", "target-0")
    wait_for(lambda: star.status("target-0").get("drafters") == {"drafter": True}, "the link")
    answers: list[list[int]] = []

    def user() -> None:
        with client(star) as user:
            answers.append(user.post(f"{star.api[0]}/v1/completions", json=ask).json()["choices"][0]["token_ids"])

    asking = threading.Thread(target=user)
    asking.start()
    try:
        (stolen,) = wait_for(tap.openings, "the session on the wire")
        async with other_target(star, "target-1") as thief:
            assert thief.handshake.welcome is not None
            epoch = thief.handshake.welcome.epoch
            thief.channel.send(encode(Draft(epoch, [DraftItem(stolen, 8, b"", 0, 4)])))
            (item,) = [item for reply in await thief.told(Drafted) for item in reply.items]
            assert (item.session, item.status, item.held, item.tokens) == (stolen, Status.UNKNOWN, 0, b"")
            thief.channel.send(encode(Close(epoch, [stolen])))
            thief.channel.send(encode(Ping(1, [])))  # "I have no sessions": frees all of its own
            await thief.told(Pong)
        assert asking.is_alive(), "the attack came after the end"
    finally:
        asking.join()
        tap.close()
    assert answers == [plain]
    assert star.status("target-0")["acceptance_length"] > 1.2
    assert tap.openings() == [stolen], "the drafter had lost it"


def memory_kb(pid: int) -> int:
    """Resident memory of a process."""
    text = Path(f"/proc/{pid}/status").read_text()
    return int(next(line.split()[1] for line in text.splitlines() if line.startswith("VmRSS")))


def cpu_seconds(pid: int) -> float:
    """Processor time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def knock(port: int, context: ssl.SSLContext | None, data: bytes) -> None:
    """One stranger: connects, says something wrong, waits to be closed."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=10) as raw:
            if context is None:
                raw.sendall(data)
                raw.recv(65536)
                while raw.recv(65536):
                    pass
            else:
                with context.wrap_socket(raw, server_hostname="drafter") as tls:
                    tls.recv(1)
    except OSError:
        pass


@pytest.mark.parametrize("encrypt", [True, False], ids=["tls", "plain"])
def test_a_thousand_strangers_cost_nothing(emulated: Star, encrypt: bool, record_property: Any) -> None:
    """Memory stays flat, the log gets a line, and the text of the real target comes as before, with its drafts."""
    star = beyond_loopback(emulated(targets=1, verify_ms=5.0), encrypt)
    drafter = star.node("drafter", "drafter")
    star.node("target", "target-0")
    wait_for(lambda: star.status("target-0").get("drafters") == {"drafter": True}, "the link")
    port = load_topology(star.path).drafters[0].listen.port
    context = None
    if encrypt:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.load_verify_locations(node_files(star.folder / "secrets", "drafter").authority)
    wrong = TargetHandshake(Identity("emulated", "target-0", b"not the deployment key"))
    hello = wrong.start()
    data = b"".join(len(frame).to_bytes(4, "little") + frame for frame in (hello, hello))

    texts: list[str] = []

    def ask() -> float:
        with client(star) as user:
            started = time.monotonic()
            body = {"prompt": "abc", "max_tokens": 200, "temperature": 0}
            texts.append(user.post(f"{star.api[0]}/v1/completions", json=body).json()["choices"][0]["text"])
            return time.monotonic() - started

    ask()
    quiet = ask()
    for _ in range(200):
        knock(port, context, data)
    cpu = cpu_seconds(drafter.pid)
    before, rounds = memory_kb(drafter.pid), star.status("target-0")["fallback_rounds"]
    busy: list[float] = []
    asking = threading.Thread(target=lambda: busy.extend(ask() for _ in range(3)))
    asking.start()
    for _ in range(1000):
        knock(port, context, data)
    asking.join()
    grown = memory_kb(drafter.pid) - before
    cpu = cpu_seconds(drafter.pid) - cpu
    wait_for(lambda: star.status("target-0")["drafters"] == {"drafter": True}, "the link still there")
    drafter.terminate()
    _, log = drafter.communicate(timeout=30)
    times = {"cpu_ms_each": cpu, "quiet_s": quiet, "busy_s": min(busy)}
    figures = {"grown_kb": grown, **times, "fallback_rounds_before": rounds}
    logging.getLogger(__name__).info("%s", figures)
    for name, value in figures.items():
        record_property(name, value)
    assert grown < 8192, figures  # a read buffer each would be 64 MB
    assert log.count("refused 127.0.0.1") == 1, log
    assert "Traceback" not in log
    assert log.count("target target-0 is down") <= 1  # at its own end
    assert len(texts) == 5 and len(set(texts)) == 1
