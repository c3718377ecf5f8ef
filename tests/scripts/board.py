"""A Debian root with sshd on loopback that passes for a Jetson.

Files, users, ssh, sudo, venv and pip are real. Hardware, systemd and what apt would install are fakes.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

HERE = Path(__file__).parent
FAKED = [
    "nvpmodel",
    "jetson_clocks",
    "systemctl",
    "timedatectl",
    "dpkg-query",
    "apt-get",
    "swapon",
    "swapoff",
    "mkswap",
]
NVPMODEL = """\
# comment
< POWER_MODEL ID=0 NAME=15W >
CPU_ONLINE CORE_0 1
< POWER_MODEL ID=1 NAME=25W >
< POWER_MODEL ID=2 NAME=MAXN_SUPER >
< PM_CONFIG DEFAULT=1 >
"""
# Written by others while the board runs, not by provisioning.
UNSTEADY = ("dev", "proc", "sys", "run", "tmp", "var/log", "var/lib/fake", "home", "root", "var/cache")
PACKAGES = "openssh-server,sudo,python3,python3-venv,ca-certificates"


@dataclass(frozen=True)
class Board:
    """A root folder, and how to reach the sshd in it."""

    root: Path
    key: Path
    port: int

    def calls(self) -> list[str]:
        """What the fake commands were called with, questions left out."""
        path = self.root / "var/lib/fake/calls"
        return path.read_text().splitlines() if path.exists() else []

    def listing(self) -> dict[str, str]:
        """Path → kind, mode, owner, size, time of change and checksum, of every file but those in UNSTEADY."""
        found = {}
        for folder, names, files in os.walk(self.root):
            inside = Path(folder).relative_to(self.root).as_posix()
            names[:] = [name for name in names if f"{inside}/{name}".removeprefix("./") not in UNSTEADY]
            for path in (Path(folder) / name for name in [*names, *files]):
                found[path.relative_to(self.root).as_posix()] = describe(path)
        return found


def describe(path: Path) -> str:
    stat = path.lstat()
    if path.is_symlink():
        content = str(path.readlink())
    elif path.is_file() and stat.st_size < 100 << 20:
        content = hashlib.sha256(path.read_bytes()).hexdigest()
    else:
        content = ""
    when = 0 if path.is_dir() else stat.st_mtime_ns
    return f"{stat.st_mode:o} {stat.st_uid}:{stat.st_gid} {0 if path.is_dir() else stat.st_size} {when} {content}"


def debootstrap(root: Path) -> None:
    """A small Debian. $PACELINE_DEBOOTSTRAP names one made before, which is copied."""
    made = os.environ.get("PACELINE_DEBOOTSTRAP")
    if made:
        subprocess.run(["cp", "-a", made, root], check=True)
        return
    command = ["debootstrap", "--variant=minbase", f"--include={PACKAGES}", "bookworm", str(root)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    if done.returncode:
        pytest.skip(f"debootstrap could not make a root: {done.stdout.splitlines()[-1:]}")


def write(path: Path, text: str, mode: int = 0o644) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(mode)


def make_jetson(root: Path, key: Path) -> None:
    """What provisioning finds on an Orin Nano with JetPack 6.2 after its first boot."""
    write(root / "etc/nv_tegra_release", "# R36 (release), REVISION: 4.3, GCID: 1, BOARD: generic, EABI: aarch64\n")
    write(root / "etc/nvpmodel.conf", NVPMODEL)
    write(root / "etc/fstab", "# empty\n")
    write(root / "sys/firmware/devicetree/base/model", "NVIDIA Jetson Orin Nano Developer Kit Super\0")
    write(root / "sys/class/thermal/thermal_zone0/temp", "47125\n")
    write(root / "usr/lib/python3/dist-packages/tensorrt.py", '__version__ = "10.3.0"\n')  # stands in for JetPack's
    for name, value in {"mode": "25W", "ntp": "no", "swap": "", "installed-python3-venv": ""}.items():
        write(root / "var/lib/fake" / name, f"{value}\n" if value else "")
    for name in FAKED:
        write(root / "usr/local/sbin" / name, (HERE / "fake_command").read_text(), 0o755)
    run_in(root, "useradd", "--create-home", "--shell", "/bin/bash", "--password", "*", "nvidia")
    write(root / "etc/sudoers.d/nvidia", "nvidia ALL=(ALL) NOPASSWD: ALL\n", 0o440)
    write(root / "home/nvidia/.ssh/authorized_keys", key.with_suffix(".pub").read_text(), 0o600)
    run_in(root, "chown", "-R", "nvidia:nvidia", "/home/nvidia")


def share_network(root: Path) -> None:
    """pip in there finds the package index as it does here."""
    for name in ("etc/resolv.conf", "etc/hosts", "etc/ssl/certs/ca-certificates.crt", "etc/pip.conf"):
        if Path("/", name).exists():
            shutil.copy(Path("/", name), root / name)


def run_in(root: Path, *command: str) -> None:
    subprocess.run(["chroot", str(root), *command], check=True, capture_output=True)


@contextlib.contextmanager
def running_board(folder: Path) -> Iterator[Board]:
    """The board with its sshd, until the block ends."""
    root, key = folder / "root", folder / "key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
    debootstrap(root)
    make_jetson(root, key)
    share_network(root)
    port = free_port()
    (root / "run/sshd").mkdir(parents=True, exist_ok=True)
    options = ["-o", "ListenAddress=127.0.0.1", "-o", "UsePAM=no", "-o", "PidFile=none", "-p", str(port)]
    if subprocess.run(["mount", "-t", "proc", "proc", root / "proc"], capture_output=True).returncode:
        pytest.skip("root may not mount here")
    server = subprocess.Popen(["chroot", root, "/usr/sbin/sshd", "-D", "-e", *options], stderr=subprocess.DEVNULL)
    try:
        wait_for_port(port)
        yield Board(root, key, port)
    finally:
        server.terminate()
        server.wait(timeout=10)
        subprocess.run(["umount", "--lazy", root / "proc"], check=True)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_for_port(port: int) -> None:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(0.05)
    raise TimeoutError(f"nothing listens on {port}")
