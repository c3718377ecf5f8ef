"""Packets that misbehave below TCP: two TUN devices joined back to back by this process, one in a namespace.

A node that runs in the namespace (`ip netns exec`) reaches the others only through the pipe. Needs root,
/dev/net/tun and `ip netns`; `why_not()` says which of them is missing. The faults are those of netem.py but for
corruption, which the checksums of TCP turn into loss.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import secrets
import struct
import subprocess
from collections import Counter
from ipaddress import IPv4Address
from random import Random

from paceline.topology.netem import CLEAR, Faults

TUN = "/dev/net/tun"
TUNSETIFF = 0x400454CA
IFF_TUN, IFF_NO_PI = 0x0001, 0x1000
MTU = 1500


def why_not() -> str | None:
    """What this machine lacks for a pipe, in a few words; None when it has everything."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if not os.path.exists(TUN):
        return f"{TUN} is missing"
    name = f"pl-probe-{secrets.token_hex(3)}"
    try:
        _ip("netns", "add", name)
        _ip("netns", "delete", name)
        os.close(_open_tun(f"pl{secrets.token_hex(3)}"))
    except (OSError, subprocess.CalledProcessError) as error:
        reason = getattr(error, "stderr", None) or error
        return f"network namespaces do not work here: {str(reason).strip()}"
    return None


class TunPipe:
    """`async with TunPipe() as pipe`: `pipe.outer` is an address of this machine, `pipe.inner` one in the namespace.

    `pipe.command` before a command line runs it there. Faults count for packets each way.
    """

    def __init__(self, seed: int = 0) -> None:
        """The addresses are any two neighbours of the range that is set aside for measurements (RFC 2544)."""
        mark = secrets.token_hex(3)
        self.namespace = f"paceline-{mark}"
        first = f"198.{secrets.choice((18, 19))}.{secrets.randbelow(256)}.{4 * secrets.randbelow(63)}"
        self.outer, self.inner = (str(IPv4Address(first) + host) for host in (1, 2))
        self.command = ("ip", "netns", "exec", self.namespace)
        self.faults = CLEAR
        self.seen: Counter[str] = Counter()
        self._devices = (f"plo{mark}", f"pli{mark}")
        self._random = Random(seed)
        self._files: list[int] = []

    async def __aenter__(self) -> TunPipe:
        _ip("netns", "add", self.namespace)
        try:
            self._files = [_open_tun(device) for device in self._devices]
            outer, inner = self._devices
            _ip("link", "set", inner, "netns", self.namespace)
            _configure(outer, self.outer, self.inner)
            _configure(inner, self.inner, self.outer, self.namespace)
            _ip("-n", self.namespace, "link", "set", "lo", "up")
        except BaseException:
            self._dismantle()
            raise
        loop = asyncio.get_running_loop()
        for source, sink in (self._files, self._files[::-1]):
            loop.add_reader(source, self._carry, source, sink)
        return self

    async def __aexit__(self, *exc: object) -> None:
        for file in self._files:
            asyncio.get_running_loop().remove_reader(file)
        self._dismantle()

    def apply(self, faults: Faults) -> None:
        """From now on, both ways."""
        self.faults = faults

    def _dismantle(self) -> None:
        """Devices go with their files, so only the namespace is left to delete."""
        files, self._files = self._files, []
        for file in files:
            os.close(file)
        _ip("netns", "delete", self.namespace)

    def _carry(self, source: int, sink: int) -> None:
        with contextlib.suppress(BlockingIOError):
            packet = os.read(source, MTU + 64)
            self.seen["packets"] += 1
            if self.faults.partition:
                self.seen["swallowed"] += 1
                return
            for seconds in self.faults.fate(self._random, self.seen):
                if seconds > 0.0:
                    asyncio.get_running_loop().call_later(seconds, self._deliver, sink, packet)
                else:
                    self._deliver(sink, packet)

    def _deliver(self, sink: int, packet: bytes) -> None:
        if sink in self._files:
            with contextlib.suppress(OSError):  # its device is down or full: the packet is lost
                os.write(sink, packet)


def _open_tun(name: str) -> int:
    """A new TUN device's file, non-blocking; the device lives as long as it is open."""
    file = os.open(TUN, os.O_RDWR | os.O_NONBLOCK)
    try:
        fcntl.ioctl(file, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TUN | IFF_NO_PI))
    except OSError:
        os.close(file)
        raise
    return file


def _configure(device: str, address: str, peer: str, namespace: str | None = None) -> None:
    inside = () if namespace is None else ("-n", namespace)
    _ip(*inside, "address", "add", address, "peer", peer, "dev", device)
    _ip(*inside, "link", "set", device, "mtu", str(MTU), "up")


def _ip(*arguments: str) -> None:
    """Raises OSError when there is no `ip`, CalledProcessError when it refuses."""
    subprocess.run(("ip", *arguments), check=True, capture_output=True, text=True)
