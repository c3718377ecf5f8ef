"""What a star under chaos is made of: its kinds, and the topology files that its nodes read.

Targets dial their drafters, or everyone dials the broker, through a network emulator. So each role reads a file of
its own: the addresses differ, nothing else.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import random
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from paceline.topology.broker import mosquitto
from paceline.topology.netem_tun import why_not as why_no_tun

DEPLOYMENT = "chaos"
REFERENCE = "reference"
SMALL_DISK_BYTES = 512 << 10
LANGUAGE = {"vocabulary_size": 300, "seed": 3}
JUMPING_CLOCK = """
import time
_real, _real_ns, _start = time.time, time.time_ns, time.monotonic()

def _offset():  # half a second right, an hour late, a day early, a year late
    return (0, 3600, -86400, 31536000)[int((time.monotonic() - _start) / 0.5) % 4]

time.time = lambda: _real() + _offset()
time.time_ns = lambda: _real_ns() + _offset() * 10**9
"""


@dataclass(frozen=True)
class Setup:
    """A kind of star. Scenarios with equal setups are played on one star, one after the other."""

    transport: str = "tcp"  # or over a broker: mosquitto, amqtt
    drafters: int = 1
    targets: int = 2
    policy: str = "failover"
    verify_ms: float = 5.0
    clock_jumps: bool = False  # every node's wall clock jumps
    small_disk: bool = False  # status files and logs lie on a disk of half a megabyte
    nonsense: bool = False  # the drafter is a fake that answers nonsense
    namespace: bool = False  # the drafter lives behind a pipe of packets

    @property
    def over_broker(self) -> bool:
        return self.transport != "tcp"

    def why_not(self) -> str | None:
        """What this machine lacks for it, in a few words."""
        if self.transport == "mosquitto" and mosquitto() is None:
            return "mosquitto is not installed"
        if self.transport == "amqtt" and importlib.util.find_spec("amqtt") is None:
            return "amqtt is not installed"
        if self.namespace:
            return why_no_tun()
        if self.small_disk and os.geteuid() != 0:
            return "mounting a small disk needs root"
        return None


@dataclass
class Places:
    """Who listens where, by name, and what the others dial instead. broker: as everyone, a role sees it."""

    listen: dict[str, str]
    api: dict[str, str]
    dial: dict[str, str] = field(default_factory=dict)
    broker: str = ""
    broker_dial: dict[str, str] = field(default_factory=dict)
    security: dict[str, Any] = field(default_factory=dict)


def write_topology(folder: Path, role: str, setup: Setup, places: Places) -> Path:
    """The file that nodes of this role read: broker, drafter or target."""
    dial = places.dial if role == "target" else {}
    path = folder / f"{role}.yaml"
    path.write_text(
        yaml.safe_dump(
            {
                "version": 1,
                "name": DEPLOYMENT,
                "security": places.security,
                "link": _link(role, setup, places),
                "drafters": [_drafter(name, dial.get(name, listen)) for name, listen in places.listen.items()],
                "targets": [_target(name, api, setup, places) for name, api in places.api.items()],
            }
        )
    )
    return path


def _link(role: str, setup: Setup, places: Places) -> dict[str, Any]:
    if not setup.over_broker:
        return {"transport": "tcp"}
    broker = f"mqtt://{places.broker_dial.get(role, places.broker)}"
    return {"transport": "mqtt", "broker": broker, "local_broker": role == "broker"}


def _drafter(name: str, listen: str) -> dict[str, Any]:
    profile = {**LANGUAGE, "step_ms": 0.2, "agreement": 0.8}
    return {"name": name, "listen": listen, "model": "toy", "runtime": "emulated", "profile": profile}


def _target(name: str, api: str, setup: Setup, places: Places) -> dict[str, Any]:
    drafters = {} if name == REFERENCE else {"drafters": {"names": list(places.listen), "policy": setup.policy}}
    profile = {**LANGUAGE, "verify_ms": setup.verify_ms}
    return {"name": name, "model": "toy", "engine": "emulated", "profile": profile, "api": {"listen": api}, **drafters}


def jumping_clock(folder: Path) -> str:
    """The PYTHONPATH under which a Python process finds its wall clock jumping."""
    (folder / "sitecustomize.py").write_text(JUMPING_CLOCK)
    return os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))


def deployment_key(folder: Path) -> dict[str, Any]:
    """The security section of nodes that are not all on loopback."""
    key = folder / "deployment.key"
    key.write_text("a key for an hour of chaos\n")
    key.chmod(0o600)
    return {"key_file": str(key), "encrypt": False}


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    """Half a megabyte mounted at `folder`."""
    options = f"size={SMALL_DISK_BYTES}"
    subprocess.run(("mount", "-t", "tmpfs", "-o", options, "paceline-chaos", str(folder)), check=True)
    try:
        yield
    finally:
        subprocess.run(("umount", str(folder)), check=True)


def free_ports(count: int) -> list[int]:
    """Free ones below those that the system hands out by itself, which anybody may be given a moment later."""
    found: list[int] = []
    while len(found) < count:
        port = random.randrange(10_000, 30_000)
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            found.append(port)
    return found
