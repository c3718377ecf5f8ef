"""`paceline doctor` about links, brokers and certificates: what it measures, and what it says when it cannot."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline import cli
from paceline.commands import certificate_probes, link_probes, topology_probes
from paceline.commands.broker_probes import Greeting, limits
from paceline.commands.link_probes import Link, measure_links, nagle_step, probes
from paceline.commands.topology_probes import ports
from paceline.core.errors import HandshakeRefused, LinkClosed
from paceline.deployment import hosts_here
from paceline.topology.broker import mosquitto
from paceline.topology.link_meter import Measured
from paceline.topology.spec import Topology, parse_topology
from paceline.topology.wire import Welcome

WELCOME = Welcome(1, "m", "ngram", 1, 1, 1)


def topology(text: str, base: Path) -> Topology:
    return parse_topology("version: 1\nname: toy\n" + text, "toy.yaml", base)


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [each.getsockname()[1] for each in sockets]


def star(drafters: list[int], more: str = "") -> str:
    """One target and its drafters, all emulated, at these ports."""
    lines = [
        f'  - {{name: d{i}, model: toy, runtime: emulated, listen: "127.0.0.1:{p}"}}' for i, p in enumerate(drafters)
    ]
    names = ", ".join(f"d{i}" for i in range(len(drafters)))
    serves = f'drafters: {{names: [{names}]}}, api: {{listen: "127.0.0.1:{free_ports(1)[0]}"}}'
    target = f"  - {{name: t, model: toy, engine: emulated, {serves}}}"
    return "\n".join(["drafters:", *lines, "targets:", target, more, ""])


@contextlib.contextmanager
def running(file: Path, *nodes: tuple[str, str, int]) -> Iterator[None]:
    """Real processes, (role, name, port) each, until they accept."""
    processes = []
    for role, name, _ in nodes:
        command = [sys.executable, "-m", "paceline", role, str(file), name]
        processes.append(subprocess.Popen(command, stderr=subprocess.DEVNULL))
    try:
        for _, name, port in nodes:
            deadline = time.monotonic() + 30
            while True:
                with contextlib.suppress(OSError):
                    socket.create_connection(("127.0.0.1", port), timeout=1).close()
                    break
                assert time.monotonic() < deadline, f"{name} did not start"
                time.sleep(0.02)
        yield
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait(timeout=10)


def report(capsys: pytest.CaptureFixture[str], file: Path) -> tuple[int, list[dict[str, Any]]]:
    """Exit code and lines of `doctor FILE --json`."""
    code = cli.main(["doctor", str(file), "--json"])
    return code, json.loads(capsys.readouterr().out)["checks"]


@pytest.mark.integration
@pytest.mark.parametrize(
    "security", ["", "security: {key_file: secrets/key, certificates: secrets}"], ids=["tcp", "tls"]
)
def test_links_of_a_running_star_are_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], security: str
) -> None:
    """Nodes that run are no ports in use; each link has numbers, and the way to a drafter that is down says so."""
    pytest.importorskip("fastapi")
    file = tmp_path / "toy.yaml"
    up, down = free_ports(2)
    file.write_text("version: 1\nname: toy\n" + star([up, down], security))
    if security:
        pytest.importorskip("cryptography")
        assert cli.main(["keys", "init", str(file)]) == 0
        capsys.readouterr()
    api = parse_topology(file.read_text(), str(file), tmp_path).targets[0].api.listen.port
    with running(file, ("drafter", "d0", up), ("target", "t", api)):
        code, checks = report(capsys, file)
    found = {check["name"]: check for check in checks}
    assert code == 0, checks
    assert found["d0"]["detail"] == f"127.0.0.1:{up}: it is running"
    assert found["t"]["detail"] == f"127.0.0.1:{api}: it is running"
    link = found["link to d0"]
    assert link["status"] == "ok" and (link["target"], link["drafter"]) == ("t", "d0")
    assert 0 < link["rtt_ms"]["p50"] <= link["rtt_ms"]["p99"] < 1000
    assert abs(link["clock_offset_ms"]) < 100
    assert f"from t over tcp 127.0.0.1:{up}: round trip" in link["detail"]
    assert (found["link to d1"]["status"], found["link to d1"]["advice"]) == (
        "warn",
        "start it (paceline up), then ask again",
    )
    down_there = found["link to d1"]["detail"]
    assert down_there.startswith(f"from t: cannot reach 127.0.0.1:{down}") and down_there.endswith("connection refused")


@pytest.mark.integration
def test_a_wrong_key_is_said_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The drafter has another key: exit 1, the sentence, what to do; and its port is somebody else's."""
    port = free_ports(1)[0]
    for name, key in (("ours", b"k" * 40), ("theirs", b"x" * 40)):
        (tmp_path / f"{name}.key").write_bytes(key)
        (tmp_path / f"{name}.key").chmod(0o600)
        text = star([port], f"security: {{key_file: {name}.key}}")
        (tmp_path / f"{name}.yaml").write_text("version: 1\nname: toy\n" + text)
    with running(tmp_path / "theirs.yaml", ("drafter", "d0", port)):
        code, checks = report(capsys, tmp_path / "ours.yaml")
    found = {check["name"]: check for check in checks}
    assert code == 1
    assert found["link to d0"]["status"] == "fail"
    assert found["link to d0"]["detail"] == "from t: unauthenticated: refused by the drafter"
    assert found["link to d0"]["advice"] == "both machines need the same key file"
    assert found["d0"]["status"] == "fail" and "in use" in found["d0"]["detail"]


@pytest.mark.integration
def test_links_over_a_broker_are_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A running target of that name is not disturbed, the broker tells its limits, and both round trips are there."""
    if mosquitto() is None:
        pytest.skip("mosquitto is not installed")
    pytest.importorskip("fastapi")
    port = free_ports(1)[0]
    file = tmp_path / "toy.yaml"
    link = f"link: {{transport: mqtt, broker: 'mqtt://127.0.0.1:{port}', local_broker: true}}"
    file.write_text("version: 1\nname: toy\n" + star([7070], link))
    code, checks = report(capsys, file)
    before = {check["name"]: check for check in checks}
    assert code == 0 and before["broker"]["status"] == "warn" and "link to d0" not in before
    command = [sys.executable, "-m", "paceline", "up", str(file), "--run-dir", str(tmp_path / "run")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as star_runs:
        assert star_runs.stdout is not None
        assert any("ready" in line for line in star_runs.stdout)
        code, checks = report(capsys, file)
        star_runs.terminate()
        star_runs.wait(timeout=20)
    found = {check["name"]: check for check in checks}
    assert code == 0, checks
    assert found["broker"]["detail"].startswith(f"mqtt://127.0.0.1:{port}: MQTT 5, no user name asked for, answers in ")
    assert found["broker limits"]["detail"] == "packets of any size, 20 unacknowledged messages, QoS 2"
    assert found["link to d0"]["status"] == "ok" and found["link to d0"]["rtt_ms"]["p50"] > 0
    log = (tmp_path / "run" / "t.log").read_text()
    assert "another process" not in log and log.count("link to drafter") == 1


def two_machines(folder: Path, here: str, drafter_port: int, more: str = "") -> Path:
    """A topology whose host `here` is this machine and whose other one is nowhere near."""
    addresses = {name: "127.0.0.1" if name == here else "192.0.2.7" for name in ("orin", "server")}
    file = folder / "edge.yaml"
    file.write_text(
        "version: 1\nname: edge\n"
        "security: {key_file: secrets/deployment.key}\n"
        f"hosts: {{orin: {{address: {addresses['orin']}}}, server: {{address: {addresses['server']}}}}}\n"
        f"drafters: [{{name: d, host: orin, model: toy, runtime: emulated, listen: '0.0.0.0:{drafter_port}'}}]\n"
        "targets:\n"
        "  - {name: t, host: server, model: toy, engine: emulated, drafters: {names: [d]},\n"
        f"     api: {{listen: '0.0.0.0:{free_ports(1)[0]}', key_file: secrets/api.key}}}}\n{more}"
    )
    return file


@pytest.mark.integration
def test_a_drafters_machine_is_looked_at_as_its_host(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its name, its key and certificates, and its drafter, which it asks with the drafter's own certificate."""
    pytest.importorskip("cryptography")
    (port,) = free_ports(1)
    file = two_machines(tmp_path, "orin", port)
    assert cli.main(["keys", "init", str(file)]) == 0
    capsys.readouterr()
    with running(file, ("drafter", "d", port)):
        code, checks = report(capsys, file)
    found = {check["name"]: check for check in checks}
    assert code == 0, checks
    assert found["host"]["detail"] == "orin (127.0.0.1)" and found["host"]["status"] == "ok"
    assert found["d"]["detail"] == f"0.0.0.0:{port}: it is running"
    keys = [check["detail"] for check in checks if check["name"] == "key file"]
    assert keys == [f"deployment key: {tmp_path}/secrets/deployment.key, readable by its owner only"]
    certificates = {Path(check["file"]).name for check in checks if check["name"] == "certificate"}
    assert certificates == {"ca.pem", "d.pem"}
    assert "t" not in found and not any(name.startswith("link") for name in found)


def test_a_targets_machine_is_looked_at_as_its_host(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its link is dialled to the other machine, and both of its keys are named."""
    pytest.importorskip("cryptography")
    file = two_machines(tmp_path, "server", 7070)
    assert cli.main(["keys", "init", str(file)]) == 0
    toy = parse_topology(file.read_text(), str(file), tmp_path)
    assert hosts_here(toy) == {"server"}
    details = [probe.detail for probe in topology_probes.keys(toy, {"server"})]
    assert [detail.partition(":")[0] for detail in details] == ["deployment key", "API key of t"]
    (link,) = measure_links(toy, {"server"})
    (line,) = probes(toy, {link: LinkClosed("192.0.2.7:7070 did not answer within 1.5 s")}, {"server"})
    assert (line.name, line.status, line.advice) == ("link to d", "warn", "start it there, or check the firewall")


def test_a_machine_that_is_none_of_the_hosts_is_told_so(tmp_path: Path) -> None:
    """A file from elsewhere, or an address that has changed; nodes without a host run anywhere."""
    hosts = "hosts: {orin: {address: 192.0.2.7}}\n"
    (line,) = topology_probes.host(topology(star([7070], hosts), tmp_path), ())
    assert line.status == "ok" and line.detail == "none of orin (192.0.2.7); without a host, so here: d0, t"
    toy = topology(star([7070], hosts).replace("{name: ", "{host: orin, name: "), tmp_path)
    (line,) = topology_probes.host(toy, hosts_here(toy))
    assert line.status == "warn" and "none of orin (192.0.2.7) has an address of this machine" in line.detail
    assert list(topology_probes.host(topology(star([7070]), tmp_path), ())) == []


@pytest.mark.parametrize(
    ("link", "says"),
    [
        ("", "every drafter listens on loopback only"),
        ("link: {transport: mqtt, broker: 'mqtt://127.0.0.1:1883'}", "the broker is on loopback"),
        ("link: {transport: memory}", "all nodes are one process"),
    ],
)
def test_why_no_key_is_needed_is_said(tmp_path: Path, link: str, says: str) -> None:
    """Each transport has its own reason."""
    (line,) = topology_probes.keys(topology(star([7070], link), tmp_path))
    assert line.detail == f"no deployment key: {says}"


def test_who_listens_and_says_nothing_is_not_to_be_started(tmp_path: Path) -> None:
    """A drafter that hangs has its port: starting another is no help."""
    with socket.create_server(("127.0.0.1", 0)) as hung:
        toy = topology(star([hung.getsockname()[1]]), tmp_path)
        (line,) = probes(toy, measure_links(toy))
        port, _ = ports(toy, set())
    assert line.advice == "something listens there and does not answer: is the drafter hung, or of another deployment?"
    assert port.detail.endswith("in use, and what listens there does not answer as d0")
    assert port.advice.startswith("is that drafter hung, or of another deployment?")


def test_who_is_not_there_over_a_broker_may_be_kept_out_by_it(tmp_path: Path) -> None:
    """The access list silences a node without a word to it."""
    toy = topology(star([7070], "link: {transport: mqtt, broker: 'mqtt://127.0.0.1:1883'}"), tmp_path)
    link = Link(toy.targets[0], toy.drafters[0])
    (line,) = probes(toy, {link: LinkClosed("drafter d0 is not there, says the broker mqtt://127.0.0.1:1883")})
    assert "start it" in line.advice and "access list" in line.advice


def test_ten_drafters_that_do_not_answer_take_less_than_five_seconds(tmp_path: Path) -> None:
    """All are asked at once; a socket that accepts and says nothing is the slowest way to be down."""
    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(10)]
        toy = topology(star([each.getsockname()[1] for each in silent]), tmp_path)
        started = time.monotonic()
        lines = list(probes(toy, measure_links(toy)))
        assert time.monotonic() - started < 5
    assert [line.status for line in lines] == ["warn"] * 10
    assert all("the handshake was not answered within 2 s" in line.detail for line in lines)


@pytest.mark.parametrize(
    ("rtts", "bursts", "step"),
    [
        ([0.0001] * 200, [0.0004] * 20, None),
        ([0.0001] * 200, [0.0004] * 15 + [0.0412] * 5, 0.040),
        ([0.0001] * 200, [0.0004] * 17 + [0.0412] * 3, None),
        ([0.0004] * 200, [0.0412] * 5 + [0.0883] * 15, 0.080),
        ([0.0005] + [0.0443] * 199, [0.0443] * 20, 0.040),
        ([0.150 + 0.001 * i for i in range(60)], [0.150 + 0.003 * i for i in range(20)], None),
        ([0.02] * 20, [0.0604] * 20, 0.040),
    ],
)
def test_the_steps_of_delayed_acks_are_told_from_jitter(
    rtts: list[float], bursts: list[float], step: float | None
) -> None:
    """A cluster 40 or 80 ms above the shortest round trip, not a wide spread and not a few late ones."""
    assert nagle_step(rtts, bursts) == step


def test_what_is_wrong_with_a_link_is_said_in_words(tmp_path: Path) -> None:
    """Nagle, clocks, refusals and certificates each have a sentence, and what to do where there is something."""
    toy = topology(star([7070, 7071, 7072, 7073]), tmp_path)
    links = [Link(toy.targets[0], drafter) for drafter in toy.drafters]
    slow = Measured(WELCOME, [0.001] * 200, [0.0415] * 20, clock_offset=-12.25)
    outcomes = [
        slow,
        HandshakeRefused("protocol", "drafter 'd1' speaks protocol 2 and target 't' speaks 1: run the same release"),
        LinkClosed("cannot reach 127.0.0.1:7072: TLS failed (certificate verify failed: expired)"),
        LinkClosed("cannot reach 127.0.0.1:7073: connection refused"),
    ]
    speed, refused, tls, absent, clock = probes(toy, dict(zip(links, outcomes, strict=True)))
    assert speed.status == "warn" and "wait 40 ms longer: Nagle's algorithm and delayed ACKs" in speed.detail
    assert "TCP_NODELAY" in speed.advice
    assert speed.numbers["clock_offset_ms"] == -12250 and speed.numbers["burst_rtt_ms"]["p50"] == 41.5
    assert (refused.status, refused.advice) == ("fail", "install the same release on both machines")
    assert tls.status == "fail" and "expired" in tls.detail and "keys init" in tls.advice
    assert absent.status == "warn"
    assert clock.name == "clock of d0" and "12.2 s behind this machine's" in clock.detail and "chrony" in clock.advice


def test_a_small_clock_offset_and_one_within_the_round_trip_are_no_trouble(tmp_path: Path) -> None:
    """What a slow link cannot tell from zero is not warned of."""
    toy = topology(star([7070]), tmp_path)
    link = Link(toy.targets[0], toy.drafters[0])
    for rtt, offset in ((0.001, 0.4), (2.0, 1.4)):
        assert [p.status for p in probes(toy, {link: Measured(WELCOME, [rtt] * 9, [rtt] * 9, offset)})] == ["ok"]


@pytest.mark.parametrize(
    ("terms", "status", "says"),
    [
        ({}, "ok", "packets of any size, 65535 unacknowledged messages, QoS 2"),
        ({"MaximumPacketSize": 2_000_000, "ReceiveMaximum": 20}, "ok", "packets of 2000000 bytes"),
        ({"MaximumPacketSize": 4096}, "warn", "packets of 4096 bytes"),
        ({"ReceiveMaximum": 1}, "warn", "1 unacknowledged"),
        ({"MaximumQoS": 0}, "fail", "QoS 1"),
        ({"RetainAvailable": 0}, "fail", "retains no messages"),
        ({"WildcardSubscriptionAvailable": 0}, "fail", "no wildcards"),
    ],
)
def test_limits_of_a_broker_that_hurt_are_named(terms: dict[str, int], status: str, says: str) -> None:
    """Each with what to change."""
    (line,) = limits(Greeting("MQTT 5", terms, [0.001]))
    assert line.status == status and says in line.detail
    assert bool(line.advice) == (status != "ok")


def test_a_broker_of_an_older_protocol_tells_no_limits() -> None:
    """MQTT 3.1.1 has no words for them, which is no fault."""
    (line,) = limits(Greeting("MQTT 3.1.1", {}, [0.001]))
    assert line.status == "ok" and "MQTT 3.1.1" in line.detail


def test_a_certificate_that_ends_soon_is_warned_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Under 30 days: warn, with the command that renews it; the authority's lasts."""
    pytest.importorskip("cryptography")
    file = tmp_path / "toy.yaml"
    text = star([free_ports(1)[0]], "security: {key_file: secrets/deployment.key, certificates: secrets}")
    file.write_text("version: 1\nname: toy\n" + text)
    assert cli.main(["keys", "init", str(file), "--days", "12"]) == 0
    capsys.readouterr()
    toy = parse_topology(file.read_text(), str(file), tmp_path)
    lines = {Path(line.numbers["file"]).name: line for line in certificate_probes.certificates(toy, file)}
    assert set(lines) == {"ca.pem", "d0.pem", "t.pem"}
    assert lines["d0.pem"].status == "warn" and "expires in 11 days" in lines["d0.pem"].detail
    assert lines["d0.pem"].advice == f"run: paceline keys init {file} --renew d0"


def test_ports_that_belong_to_running_nodes_are_no_trouble(tmp_path: Path) -> None:
    """A drafter that answered may have its port; one that did not has a stranger on it."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        toy = topology(star([server.getsockname()[1]]), tmp_path)
        assert [line.status for line in ports(toy, {"d0"})] == ["ok", "ok"]
        assert [line.status for line in ports(toy, set())] == ["fail", "ok"]


def test_the_memory_link_has_nothing_to_measure(tmp_path: Path) -> None:
    """All nodes are threads of one process."""
    toy = topology(star([7070], "link: {transport: memory}"), tmp_path)
    assert link_probes.measure_links(toy) == {}
