"""Stars over MQTT with real processes and a broker of their own: the example, and a broker that is killed."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import anyio
import pytest
import yaml

from paceline.star import Star, running_star
from paceline.topology.broker import BROKER_KIND, mosquitto
from paceline.topology.spec import load_topology
from paceline.topology.spec_checks import BROKER

from .conftest import EmulatedStar, alive, free_ports, wait_for

pytestmark = pytest.mark.integration

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "star-mqtt.yaml"
PROMPTS = [f"prompt {number}" for number in range(8)]


@pytest.fixture(params=["mosquitto", "amqtt"])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The broker that local_broker starts."""
    if request.param == "mosquitto" and mosquitto() is None:
        pytest.skip("mosquitto is not installed")
    monkeypatch.setenv(BROKER_KIND, request.param)
    return str(request.param)


def example_on_free_ports(folder: Path) -> Path:
    """A copy of the example."""
    data = yaml.safe_load(EXAMPLE.read_text())
    ports = iter(free_ports(1 + len(data["targets"])))
    data["link"]["broker"] = f"mqtt://127.0.0.1:{next(ports)}"
    for node in data["drafters"]:
        node.update(model=str(ROOT / "models" / "tiny-drafter"))
    for node in data["targets"]:
        node.update(api={"listen": f"127.0.0.1:{next(ports)}"}, model=str(ROOT / "models" / "tiny-target"))
    path = folder / "star-mqtt.yaml"
    path.write_text(yaml.safe_dump(data))
    return path


@pytest.mark.parametrize("options", [("--temperature", "0"), ("--temperature", "0.8", "--seed", "11")])
def test_the_mqtt_star_changes_no_text(tmp_path: Path, kind: str, options: tuple[str, ...]) -> None:
    """The example through either broker gives the text of plain targets, in fewer rounds, and counts its bytes."""
    path = example_on_free_ports(tmp_path)
    reports = []
    for drafting in (("--no-drafter",), ()):
        command = [sys.executable, "-m", "paceline", "run", str(path), "--json", "--max-tokens", "64"]
        command += [*options, *drafting, "--prompts", str(ROOT / "examples" / "prompts.jsonl")]
        done = subprocess.run(command, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stderr
        reports.append(json.loads(done.stdout))
    plain, drafted = reports
    assert [o["token_ids"] for o in plain["outputs"]] == [o["token_ids"] for o in drafted["outputs"]]
    assert [o["text"] for o in plain["outputs"]] == [o["text"] for o in drafted["outputs"]]
    assert all(target["acceptance_length"] > 1.5 for target in drafted["targets"])
    assert all(node["live_sessions_at_end"] == 0 for node in drafted["targets"] + drafted["drafters"])
    assert all(drafter["bytes_in"] > 0 and drafter["bytes_out"] > 0 for drafter in drafted["drafters"])


@pytest.mark.anyio
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
async def test_a_broker_that_dies_is_started_again(
    emulated: Callable[..., EmulatedStar], kind: str, number: signal.Signals
) -> None:
    """The texts are those without a drafter; links are back soon; then nothing is left of any process."""
    star_file = emulated(targets=2, verify_ms=4.0)
    place = f"mqtt://127.0.0.1:{free_ports(1)[0]}"
    star_file.edit(lambda data: data.update(link={"transport": "mqtt", "broker": place, "local_broker": True}))
    topology = load_topology(star_file.path)
    options = {"max_tokens": 96, "temperature": 0.8, "seed": 5}
    async with running_star(topology, star_file.path, star_file.run_dir, with_drafters=False) as star:
        plain = await star.complete(PROMPTS, options)
    async with running_star(topology, star_file.path, star_file.run_dir) as star:
        pids = {name: child.pid for name, child in star.supervisor.children.items()}
        assert set(pids) == {BROKER, "drafter", "target-0", "target-1"}
        await links(star, up=True)
        texts = []
        async with anyio.create_task_group() as tasks:

            async def generate() -> None:
                texts.extend(await star.complete(PROMPTS, options))

            tasks.start_soon(generate)
            os.kill(pids[BROKER] or 0, number)
            await links(star, up=False)
            await links(star, up=True)
        assert star.supervisor.children[BROKER].restarts == 1
        rounds = sum(star.supervisor.status(name)["rounds"] for name in star.targets)
        texts.extend(await star.complete(PROMPTS, options))
        await star.settle()
        states = [star.supervisor.status(name) for name in (*star.targets, *star.drafters)]
        assert sum(star.supervisor.status(name)["rounds"] for name in star.targets) > rounds
        assert all(state["live_sessions"] == 0 for state in states)
        assert all(state["rtt_ms"]["drafter"] > 0 for state in states[:2])
    assert [one.text for one in texts] == 2 * [one.text for one in plain]
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", topology.link.broker_address.port), timeout=5)


async def links(star: Star, up: bool) -> None:
    """Returns when every target's status says so."""
    deadline = time.monotonic() + 15
    while any(star.supervisor.status(name).get("drafters") != {"drafter": up} for name in star.targets):
        assert time.monotonic() < deadline
        await anyio.sleep(0.05)


def test_the_broker_does_not_outlive_its_supervisor(emulated: Callable[..., EmulatedStar], kind: str) -> None:
    """kill -9 of `paceline up`: everything that it started ends, the broker too."""
    star = emulated(targets=1, verify_ms=1.0)
    port = free_ports(1)[0]
    link = {"transport": "mqtt", "broker": f"mqtt://127.0.0.1:{port}", "local_broker": True}
    star.edit(lambda data: data.update(link=link))
    up = star.start("up", str(star.path), "--run-dir", str(star.run_dir))
    wait_for(lambda: star.status("target-0").get("drafters") == {"drafter": True}, "the link")
    up.kill()
    wait_for(lambda: refuses(port), "the end of the broker")
    wait_for(lambda: not any(alive(pid) for pid in star.pids()), "the end of the nodes")


def refuses(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=5).close()
    except ConnectionRefusedError:
        return True
    return False


@pytest.mark.anyio
async def test_a_broker_of_others_at_the_port_is_one_sentence(emulated: Callable[..., EmulatedStar], kind: str) -> None:
    """The run ends with exit code 2 and says where."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        place = f"127.0.0.1:{other.getsockname()[1]}"
        star = emulated(targets=1, verify_ms=1.0)
        star.edit(
            lambda data: data.update(link={"transport": "mqtt", "broker": f"mqtt://{place}", "local_broker": True})
        )
        process = star.start("run", str(star.path), "--prompt", "x", "--max-tokens", "4")
        _, err = process.communicate(timeout=60)
    assert process.returncode == 2
    assert f"broker: the broker cannot listen at {place}: address already in use; is there one already?" in err
