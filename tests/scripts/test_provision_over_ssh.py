"""Provisioning over ssh, for real in a Debian root, twice."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from .board import Board, free_port, running_board, wait_for_port

ROOT = Path(__file__).resolve().parents[2]

STAR = """\
version: 1
name: star
security: {{key_file: secrets/deployment.key}}
hosts:
  orin: {{address: 127.0.0.1}}
  server: {{address: 192.0.2.10}}
drafters:
  - {{name: drafter, host: orin, model: toy, runtime: emulated, listen: "0.0.0.0:{port}"}}
targets:
  - {{name: chat, host: server, model: toy, engine: emulated, drafters: {{names: [drafter]}}}}
"""

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def board(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Board]:
    if os.geteuid() != 0:
        pytest.skip("needs root for debootstrap and chroot")
    for program in ("debootstrap", "ssh", "ssh-keygen"):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed")
    with running_board(tmp_path_factory.mktemp("board")) as found:
        yield found


@pytest.fixture(scope="module")
def port() -> int:
    return free_port()


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory, port: int) -> Path:
    """What goes to the board: a topology whose drafter is there, and its keys."""
    folder = tmp_path_factory.mktemp("config")
    (folder / "star.yaml").write_text(STAR.format(port=port))
    subprocess.run([sys.executable, "-m", "paceline", "keys", "init", folder / "star.yaml"], check=True)
    for name in ("ca.key", "chat.key", "chat.pem"):  # belong elsewhere
        (folder / "secrets" / name).unlink()
    return folder


def provision(board: Board, config: Path, folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    ssh = folder / "bin/ssh"  # the board's host key is new each time
    ssh.parent.mkdir(exist_ok=True)
    anyone = "-o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null"
    ssh.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} {anyone} "$@"\n')
    ssh.chmod(0o755)
    where = ["nvidia@127.0.0.1", "--port", str(board.port), "--identity", str(board.key)]
    # The extra `jetson` is for a board with a GPU and is left out.
    what = ["--config", str(config), "--swap", "1", "--extras", "", "--state-dir", str(folder)]
    return subprocess.run(
        [ROOT / "scripts/provision_jetson.sh", *where, *what, *options],
        capture_output=True,
        text=True,
        timeout=500,
        stdin=subprocess.DEVNULL,
        env={**os.environ, "PATH": f"{ssh.parent}:{os.environ['PATH']}"},
    )


def test_two_runs_the_second_changes_nothing(board: Board, config: Path, tmp_path: Path) -> None:
    """The first run brings the board into shape, the second leaves every file, mode, owner and time as it is."""
    first = provision(board, config, tmp_path)
    assert first.returncode == 0, first.stdout + first.stderr
    assert "ok    TensorRT     10.3.0, seen from /opt/paceline" in first.stdout
    before, calls = board.listing(), board.calls()
    assert before["etc/paceline/secrets/deployment.key"].startswith("100600 ")
    assert before["etc/paceline/star.yaml"].startswith("100640 ")
    assert (board.root / "etc/fstab").read_text() == "# empty\n/paceline.swap none swap sw 0 0\n"
    assert calls == [
        "timedatectl set-ntp true",
        "apt-get -o DPkg::Lock::Timeout=600 update",
        "apt-get -o DPkg::Lock::Timeout=600 install -y nvidia-jetpack",
        "nvpmodel -m 2",
        "systemctl daemon-reload",
        "systemctl enable paceline-clocks.service",
        "systemctl restart paceline-clocks.service",
        "mkswap /paceline.swap.new",
        "swapon /paceline.swap",
        "systemctl daemon-reload",
        "systemctl enable paceline.service",
        "systemctl restart paceline.service",
    ]

    second = provision(board, config, tmp_path)
    assert second.returncode == 0, second.stdout + second.stderr
    assert "0 changes: nothing to do." in second.stdout
    after = board.listing()
    assert {name for name in {*before, *after} if before.get(name) != after.get(name)} == set()
    assert board.calls() == calls


def test_a_new_topology_restarts_the_service(board: Board, config: Path, tmp_path: Path) -> None:
    """What the service reads has changed: one file is replaced and the service starts again, nothing else."""
    provision(board, config, tmp_path)
    calls = board.calls()
    with (config / "star.yaml").open("a") as file:
        file.write("# changed\n")
    done = provision(board, config, tmp_path, "--from", "config")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 changes." in done.stdout
    assert board.calls() == [*calls, "systemctl restart paceline.service"]
    assert (board.root / "etc/paceline/star.yaml").read_text() == (config / "star.yaml").read_text()


def test_what_the_unit_starts_serves(board: Board, config: Path, tmp_path: Path, port: int) -> None:
    """The installed unit's own command, as its own user, finds topology, keys and packages, and listens."""
    if not (board.root / "etc/systemd/system/paceline.service").exists():
        provision(board, config, tmp_path)
    unit = (board.root / "etc/systemd/system/paceline.service").read_text()
    command = next(line.removeprefix("ExecStart=") for line in unit.splitlines() if line.startswith("ExecStart="))
    words = command.replace("/var/log/paceline", "/tmp/paceline-run").split()
    service = subprocess.Popen(["chroot", board.root, "runuser", "-u", "paceline", "--", *words])
    try:
        wait_for_port(port)
    finally:
        service.terminate()
        service.wait(timeout=30)
