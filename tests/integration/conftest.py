"""Real processes of an emulated star: no model is loaded, so they start in a second."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

DEADLINE = 60.0


def free_ports(count: int) -> list[int]:
    """Ports that were free a moment ago."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()


def wait_for(condition: Callable[[], Any], what: str, seconds: float = DEADLINE) -> Any:
    """The first truthy value of `condition`; fails with `what` after a while."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        value = condition()
        if value:
            return value
        time.sleep(0.02)
    pytest.fail(f"waited {seconds:.0f} s for {what}")


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie that nobody reaped does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


class EmulatedStar:
    """A topology file of one drafter and `targets` targets, and the command line on it."""

    def __init__(
        self, folder: Path, targets: int, verify_ms: float, transport: str = "tcp", api: dict[str, str] | None = None
    ) -> None:
        self.folder = folder
        self.run_dir = folder / "run"
        self.run_dir.mkdir()
        ports = free_ports(targets + 1)
        language = {"vocabulary_size": 300, "seed": 3}
        topology = {
            "version": 1,
            "name": "emulated",
            "link": {"transport": transport},
            "drafters": [
                {
                    "name": "drafter",
                    "model": "toy",
                    "runtime": "emulated",
                    "listen": f"127.0.0.1:{ports[0]}",
                    "profile": {**language, "step_ms": 0.2, "agreement": 0.8},
                }
            ],
            "targets": [
                {
                    "name": f"target-{index}",
                    "model": "toy",
                    "engine": "emulated",
                    "drafters": {"names": ["drafter"]},
                    "api": {"listen": f"127.0.0.1:{port}", **(api or {})},
                    "profile": {**language, "verify_ms": verify_ms},
                }
                for index, port in enumerate(ports[1:])
            ],
        }
        self.path = folder / "emulated.yaml"
        self.path.write_text(yaml.safe_dump(topology))
        self.api = [f"http://127.0.0.1:{port}" for port in ports[1:]]
        self._started: list[subprocess.Popen[str]] = []

    def edit(self, change: Callable[[dict[str, Any]], None]) -> None:
        """Changes the topology file."""
        topology = yaml.safe_load(self.path.read_text())
        change(topology)
        self.path.write_text(yaml.safe_dump(topology))

    def node(self, role: str, name: str) -> subprocess.Popen[str]:
        """`paceline drafter|target` in the background."""
        return self.start(role, str(self.path), name, "--run-dir", str(self.run_dir))

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """`paceline` in the background; its output is piped."""
        command = [sys.executable, "-m", "paceline", *arguments]
        pipe = subprocess.PIPE
        process = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, start_new_session=True)
        self._started.append(process)
        return process

    def run(self, *options: str) -> dict[str, Any]:
        """`paceline run … --json`, its exit code checked."""
        process = self.start("run", str(self.path), "--json", "--run-dir", str(self.run_dir), *options)
        out, err = process.communicate(timeout=DEADLINE)
        assert process.returncode == 0, err
        report: dict[str, Any] = json.loads(out)
        return report

    def status(self, name: str) -> dict[str, Any]:
        try:
            found: dict[str, Any] = json.loads((self.run_dir / f"{name}.json").read_text())
        except (OSError, ValueError):
            return {}
        return found

    def pids(self) -> list[int]:
        """Of every node that has written a status file."""
        return [json.loads(path.read_text())["pid"] for path in self.run_dir.glob("*.json")]

    def close(self) -> None:
        for process in self._started:
            if process.poll() is None:
                process.kill()
            process.communicate()
        for pid in self.pids():
            if alive(pid):
                os.kill(pid, 9)


@pytest.fixture
def emulated(tmp_path: Path) -> Iterator[Callable[..., EmulatedStar]]:
    made: list[EmulatedStar] = []

    def make(targets: int = 2, verify_ms: float = 1.0, **options: Any) -> EmulatedStar:
        folder = tmp_path / f"star-{len(made)}"
        folder.mkdir()
        made.append(EmulatedStar(folder, targets, verify_ms, **options))
        return made[-1]

    yield make
    for star in made:
        star.close()
