"""Which links and APIs of a topology are encrypted, and which files a node needs for it.

Both ends of a link decide from the same topology, so they agree: a drafter's link is inside TLS as soon as it
listens beyond loopback, or wherever `security.certificates` is written; `encrypt: false` turns it off. Nothing here
opens a file.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from paceline.topology.spec_models import DrafterSpec, Security, TargetSpec

AUTHORITY = "ca"  # NAME.pem and NAME.key are a node's files, so no node may have this name
KEYS_COMMAND = "paceline keys init"
_LABELS = re.compile(r"(?=.{1,63}\Z)[A-Za-z0-9][A-Za-z0-9_-]*(\.[A-Za-z0-9_-]+)*")


def name_problem(name: str) -> str | None:
    """Why a node of this name can have no certificate, or None."""
    if name == AUTHORITY:
        return f"{name}: this is what the authority's files are called; choose another name"
    if not _LABELS.fullmatch(name):
        return f"{name}: a certificate holds names of letters, digits, dashes and single dots (at most 63)"
    return None


class NodeFiles(NamedTuple):
    """What a node shows and whom it believes."""

    authority: Path  # ca.pem: certificates of everyone who may sign
    certificate: Path
    key: Path


def certificates_folder(security: Security) -> Path | None:
    """Where certificates lie; None when the topology names no place."""
    if security.certificates is not None:
        return security.certificates
    return security.key_file.parent if security.key_file is not None else None


def node_files(folder: Path, node: str) -> NodeFiles:
    """The files of one node."""
    return NodeFiles(folder / f"{AUTHORITY}.pem", folder / f"{node}.pem", folder / f"{node}.key")


class Clash(NamedTuple):
    """Two secrets in one file. subject: whose file is to be elsewhere: a node, an API key; None: the deployment key."""

    subject: str | Path | None
    problem: str


def clashes(folder: Path, key_file: Path | None, nodes: Iterable[str], api_keys: Iterable[Path]) -> Iterator[Clash]:
    """Files that `keys init` would write twice. API keys may be the same one."""
    authority = node_files(folder, AUTHORITY)
    taken = {os.path.realpath(authority.key): "the authority's key"}
    taken[os.path.realpath(authority.authority)] = "the authority's certificate"

    def take(file: Path, what: str, subject: str | Path | None, advice: str) -> Iterator[Clash]:
        other = taken.setdefault(os.path.realpath(file), what)
        if other != what:
            yield Clash(subject, f"{file} would be both {what} and {other}; {advice}")

    if key_file is not None:
        yield from take(key_file, "the deployment key", None, "give security.key_file another name")
    for name in nodes:
        files = node_files(folder, name)
        yield from take(files.key, f"{name}'s key", name, f"rename {name}")
        yield from take(files.certificate, f"{name}'s certificate", name, f"rename {name}")
    for file in api_keys:
        yield from take(file, "an API key", file, "give api.key_file another name")


def link_is_encrypted(security: Security, transport: str, drafter: DrafterSpec) -> bool:
    """Whether targets reach that drafter inside TLS. Links over MQTT are the broker's to encrypt."""
    if transport != "tcp" or not security.encrypt:
        return False
    return security.certificates is not None or not drafter.listen.is_loopback


def api_is_encrypted(security: Security, target: TargetSpec) -> bool:
    """Whether users reach that target over HTTPS: with its own certificate anywhere, else beyond loopback."""
    return target.api.cert is not None or (security.encrypt and not target.api.listen.is_loopback)


def api_url(security: Security, target: TargetSpec) -> str:
    """Where this machine finds a target's API."""
    scheme = "https" if api_is_encrypted(security, target) else "http"
    return f"{scheme}://{target.api.listen.from_here}/v1"


def api_certificate(security: Security, target: TargetSpec) -> tuple[Path, Path] | None:
    """(certificate, key) of a target's API; None where it speaks plain HTTP, or where no files are named for it."""
    if target.api.cert is not None and target.api.key is not None:
        return target.api.cert, target.api.key
    folder = certificates_folder(security)
    if folder is None or not api_is_encrypted(security, target):
        return None
    return node_files(folder, target.name)[1:]


def needs_certificate(
    security: Security, transport: str, node: DrafterSpec | TargetSpec, drafters: Mapping[str, DrafterSpec]
) -> bool:
    """Whether a node needs a certificate of the deployment. drafters: all of the topology, by name."""
    if isinstance(node, DrafterSpec):
        return link_is_encrypted(security, transport, node)
    if node.api.cert is None and api_is_encrypted(security, node):
        return True
    linked = [drafters[name] for name in node.drafters.names if name in drafters]
    return any(link_is_encrypted(security, transport, drafter) for drafter in linked)
