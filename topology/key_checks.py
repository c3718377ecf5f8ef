"""Whether the keys and certificates that a topology names can be used on this machine."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterator
from pathlib import Path as FilePath

from paceline.core.errors import UserError
from paceline.topology.certificate_checks import (
    certificate_problem,
    file_problem,
    pair_problem,
    private_file_problem,
    way_to_get,
)
from paceline.topology.credentials import certificates_folder, needs_certificate, node_files
from paceline.topology.spec_checks import Parts
from paceline.topology.spec_errors import Finding
from paceline.topology.spec_models import DrafterSpec, Security, TargetSpec
from paceline.topology.yaml_lines import Path

KEY_BYTES = 16  # of a deployment key or an API key, at least


def key_files(parts: Parts, file: str) -> Iterator[Finding]:
    """Keys and certificates that this machine needs are there and in order, and nobody else can read the secret ones.

    file: the topology's, for what to run.
    """
    security = parts.security
    folder = certificates_folder(security) if security is not None else None
    if security and security.key_file and (why := key_problem(security.key_file, folder, file)):
        yield Finding(("security", "key_file"), why)
    for index, target in parts.targets.items():
        path = ("targets", index, "api")
        if runs_here(parts, target):
            yield from _api_files(path, target, folder, file)
    if parts.link.key is not None and (why := private_file_problem(parts.link.key)):
        yield Finding(("link", "key"), why)
    here = [node.name for _, _, node in parts.nodes() if runs_here(parts, node)]
    for password in dict.fromkeys(parts.link.password_file_of(name) for name in here):
        if password is not None and (why := private_file_problem(password)):
            yield Finding(("link", "password_file"), why)
    if security is not None:
        yield from _certificates(parts, security, file)


def _api_files(path: Path, target: TargetSpec, folder: FilePath | None, topology_file: str) -> Iterator[Finding]:
    api = target.api
    if api.key_file is not None:
        why = key_problem(api.key_file, folder, topology_file) or _api_key_problem(api.key_file)
        if why is not None:
            yield Finding((*path, "key_file"), why)
    if api.cert is not None and api.key is not None:
        if why := file_problem(api.cert):
            yield Finding((*path, "cert"), why)
        elif why := private_file_problem(api.key):
            yield Finding((*path, "key"), why)
        elif why := pair_problem(api.cert, api.key, "get a new one"):
            yield Finding((*path, "cert"), why)


def _certificates(parts: Parts, security: Security, file: str) -> Iterator[Finding]:
    folder = certificates_folder(security)
    drafters = {drafter.name: drafter for drafter in parts.drafters.values()}
    for section, index, node in parts.nodes():
        if folder is None or not needs_certificate(security, parts.link.transport, node, drafters):
            continue
        if runs_here(parts, node) and (why := certificate_problem(node_files(folder, node.name), node.name, file)):
            yield Finding((section, index, "name"), why)


def key_problem(file: FilePath, folder: FilePath | None, topology_file: str) -> str | None:
    """Why a deployment key or an API key cannot be used, or None. folder: where certificates lie."""
    advice = way_to_get(folder or file.parent, topology_file)
    why = private_file_problem(file, advice)
    if why is None and len(file.read_bytes().strip()) < KEY_BYTES:
        return f"{file} is no key: it has less than {KEY_BYTES} bytes; remove it and {advice}"
    return why


def read_api_key(file: FilePath) -> str:
    """What users are to show. Raises UserError when it is none, for an empty one would let everybody in."""
    try:
        key = file.read_bytes().strip().decode("latin-1")
    except OSError as error:
        raise UserError(f"{file}: {error.strerror}") from None
    if len(key) < KEY_BYTES:
        raise UserError(f"{file} is no key: it has less than {KEY_BYTES} bytes")
    if not (key.isascii() and key.isprintable()):
        raise UserError(f"{file} is no API key: an HTTP header holds one line of ASCII text")
    return key


def _api_key_problem(file: FilePath) -> str | None:
    try:
        read_api_key(file)
    except UserError as error:
        return str(error)
    return None


def runs_here(parts: Parts, node: DrafterSpec | TargetSpec) -> bool:
    """It has no host, or one whose address is an IP of this machine. A name is not looked up: that may take seconds."""
    if node.host is None:
        return True
    host = parts.hosts.get(node.host)
    return host is not None and _is_own_ip(host.address)


def _is_own_ip(address: str) -> bool:
    try:
        family = socket.AF_INET if ipaddress.ip_address(address).version == 4 else socket.AF_INET6
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((address, 0))
    except (ValueError, OSError):
        return False
    return True
