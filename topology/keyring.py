"""The folder of a deployment's secrets: its key, its authority, and a certificate for each node.

What is there stays, unless it is to be renewed. Every file appears whole and with its final mode, whatever the umask.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from paceline.core.errors import UserError
from paceline.topology.credentials import AUTHORITY, clashes, node_files

PRIVATE = 0o600
PUBLIC = 0o644
FOLDER = 0o700


class Keyring:
    """Makes what is missing in a folder; `made` lists the files that are new."""

    def __init__(self, folder: Path, key_file: Path, *, force: bool = False) -> None:
        """force: everything is made anew."""
        self.folder = folder
        self.key_file = key_file
        self.made: list[Path] = []
        self._force = force

    def fill(
        self,
        deployment: str,
        nodes: Mapping[str, Sequence[str]],
        *,
        api_keys: Sequence[Path] = (),
        renew: Sequence[str] = (),
        days: int | None = None,
    ) -> None:
        """nodes: name → addresses of its API. days: how long a node's new certificate lasts.

        Raises UserError, before anything is written when the fault can be known before. One at a time fills a folder.
        """
        for clash in clashes(self.folder, self.key_file, nodes, api_keys):
            raise UserError(clash.problem)
        if not self.folder.exists():
            self._check(nodes, renew)
        for folder in {self.folder, self.key_file.parent, *(file.parent for file in api_keys)}:
            make_folder(folder)
        with _locked(self.folder):
            self._check(nodes, renew)
            self._fill(deployment, nodes, api_keys, renew, days)

    def _fill(
        self,
        deployment: str,
        nodes: Mapping[str, Sequence[str]],
        api_keys: Sequence[Path],
        renew: Sequence[str],
        days: int | None,
    ) -> None:
        for file in (self.key_file, *api_keys):
            if self._force or not file.exists():
                self._write(file, (secrets.token_hex(32) + "\n").encode(), PRIVATE)
        wanted = [name for name in nodes if self._force or name in renew or not self._has(name)]
        if wanted or not self._authority.certificate.exists():
            self._sign(deployment, {name: nodes[name] for name in wanted}, days)

    @property
    def _authority(self) -> _Paths:
        return _Paths(self.folder, AUTHORITY)

    def _has(self, node: str) -> bool:
        return _Paths(self.folder, node).certificate.exists()

    def _check(self, nodes: Mapping[str, Sequence[str]], renew: Sequence[str]) -> None:
        if self._force:
            return
        for name in (AUTHORITY, *nodes):
            paths = _Paths(self.folder, name)
            half = paths.key.exists() and not paths.certificate.exists()
            if half and name not in renew and self._authority.key.exists():
                anew = f"--renew {name}, which makes both" if name in nodes else "--force, which makes everything anew"
                raise UserError(f"{paths.key} is there and {paths.certificate} is not; put it back, or give {anew}")
        self._check_place(nodes)

    def _check_place(self, nodes: Mapping[str, Sequence[str]]) -> None:
        """A second authority, or a second deployment key, would cut this machine off from the others."""
        authority = self._authority
        if authority.key.exists() or (authority.certificate.exists() and self.key_file.exists()):
            return
        of_nodes = [file for name in nodes for file in node_files(self.folder, name)]
        there = next((file for file in (self.key_file, *of_nodes) if file.exists()), None)
        if there is not None:
            raise UserError(
                f"{there} is there and {authority.key} is not: run this on the machine that holds it and copy the"
                " files from there, or give --force, which makes everything anew"
            )

    def _sign(self, deployment: str, nodes: Mapping[str, Sequence[str]], days: int | None) -> None:
        from paceline.topology.certificates import AUTHORITY_DAYS, NODE_DAYS, Pair, new_authority, new_node

        paths = self._authority
        if self._force or not paths.certificate.exists():
            authority = new_authority(deployment, max(AUTHORITY_DAYS, days or 0))
            self._write_pair(paths, authority.certificate, authority.key)
        elif not paths.key.exists():
            needing = ", ".join(nodes)
            raise UserError(f"{needing} needs a certificate; run this where {paths.key} is, which signs it")
        else:
            authority = Pair(paths.certificate.read_bytes(), paths.key.read_bytes())
        for name, addresses in nodes.items():
            pair = new_node(authority, name, addresses, days or NODE_DAYS)
            self._write_pair(_Paths(self.folder, name), pair.certificate, pair.key)

    def _write_pair(self, paths: _Paths, certificate: bytes, key: bytes) -> None:
        self._write(paths.key, key, PRIVATE)
        self._write(paths.certificate, certificate, PUBLIC)

    def _write(self, path: Path, data: bytes, mode: int) -> None:
        write_whole(path, data, mode)
        self.made.append(path)


class _Paths:
    """Certificate and key of one name."""

    def __init__(self, folder: Path, name: str) -> None:
        self.certificate = folder / f"{name}.pem"
        self.key = folder / f"{name}.key"


def make_folder(folder: Path) -> None:
    """A folder that only its owner enters; one that is there is left as it is. Raises UserError."""
    try:
        folder.mkdir(mode=FOLDER, parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{folder}: {error.strerror}") from None


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Waits until nobody else has it. Raises UserError when the folder cannot be opened."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise UserError(f"{folder}: {error.strerror}") from None
    try:
        with contextlib.suppress(OSError):  # some network file systems have no locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def write_whole(path: Path, data: bytes, mode: int) -> None:
    """Replaces a file in one step; the new one has `mode` from its first byte on. Raises UserError."""
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode & PRIVATE)
        try:
            with os.fdopen(descriptor, "wb") as file:
                os.fchmod(file.fileno(), mode)
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(path)
        except OSError:
            with contextlib.suppress(OSError):
                partial.unlink()
            raise
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None
