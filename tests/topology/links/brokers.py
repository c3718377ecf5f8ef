"""Brokers for tests: a real mosquitto with its configuration, and amqtt, each in a process of its own."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from paceline.topology.broker import mosquitto, mosquitto_config
from paceline.topology.links.mqtt import MqttTransport
from paceline.topology.links.mqtt_life import Place
from paceline.topology.links.mqtt_paho import MQTT_3, Broker
from paceline.topology.spec_values import Address

AMQTT = """
import asyncio, sys
from paceline.topology.broker import run_amqtt
from paceline.topology.spec_values import Address
asyncio.run(run_amqtt(Address("127.0.0.1", int(sys.argv[1])), lambda: None))
"""
BROKERS = ("mosquitto", "amqtt")


@dataclass
class BrokerProcess:
    """A broker that can be stopped, killed and started again at the same port."""

    kind: str
    folder: Path
    config: str = ""  # more of mosquitto's configuration
    whole_config: str = ""  # instead; its listener becomes this one
    port: int = field(default_factory=lambda: free_port())
    process: subprocess.Popen[bytes] | None = None

    @property
    def broker(self) -> Broker:
        return Broker("127.0.0.1", self.port)

    def start(self) -> None:
        """Returns when it accepts."""
        with (self.folder / f"{self.kind}-{self.port}.log").open("ab") as log:
            self.process = subprocess.Popen(self._command(), stdout=log, stderr=log, cwd=self.folder)
        deadline = time.monotonic() + 20
        while self.process.poll() is None and time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
                return
            time.sleep(0.01)
        raise AssertionError(f"{self.kind} did not start:\n{Path(log.name).read_text()}")

    def _command(self) -> list[str]:
        if self.kind == "amqtt":
            return [sys.executable, "-c", AMQTT, str(self.port)]
        program = mosquitto()
        assert program is not None
        path = self.folder / f"mosquitto-{self.port}.conf"
        whole = re.sub("(?m)^listener .*$", f"listener {self.port} 127.0.0.1", self.whole_config)
        path.write_text(whole or mosquitto_config(Address("127.0.0.1", self.port)) + self.config)
        return [program, "-c", str(path)]

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        assert self.process is not None
        self.process.send_signal(number)
        if number in (signal.SIGKILL, signal.SIGTERM):
            self.process.wait(timeout=10)

    def transport(self, node: str = "drafter", **place: object) -> MqttTransport:
        """A node at this broker, in a deployment of its own unless `deployment` is given."""
        about = Place(self.broker, f"test-{secrets.token_hex(4)}", node, key=b"k" * 32)
        transport = MqttTransport(replace(about, **place))  # type: ignore[arg-type]
        if self.kind == "amqtt":
            transport._version = MQTT_3  # what it would find out within a second
        return transport


@contextlib.contextmanager
def running_broker(kind: str, folder: Path, config: str = "", whole_config: str = "") -> Iterator[BrokerProcess]:
    """A broker on a free port for the length of the block. Skips the test where mosquitto is missing."""
    if kind == "mosquitto" and mosquitto() is None:
        pytest.skip("mosquitto is not installed")
    broker = BrokerProcess(kind, folder, config, whole_config)
    broker.start()
    try:
        yield broker
    finally:
        broker.kill(signal.SIGCONT)
        broker.kill()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))
