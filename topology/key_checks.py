"""Whether the keys and certificates that a topology names can be used on this machine."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterator
from pathlib import Path as FilePath

from paceline.topology.certificate_checks import certificate_problem, file_problem, pair_problem, private_file_problem
from paceline.topology.credentials import KEYS_COMMAND, certificates_folder, needs_certificate, node_files
from paceline.topology.spec_checks import Parts
from paceline.topology.spec_errors import Finding
from paceline.topology.spec_models import DrafterSpec, Security, TargetSpec
from paceline.topology.yaml_lines import Path

DEPLOYMENT_KEY_BYTES = 16


def key_files(parts: Parts, file: str) -> Iterator[Finding]:
    """Keys and certificates that this machine needs are there and in order, and nobody else can read the secret ones.

    file: the topology's, for what to run.
    """
    security = parts.security
    if security and security.key_file and (why := deployment_key_problem(security.key_file, file)):
        yield Finding(("security", "key_file"), why)
    for index, target in parts.targets.items():
        path = ("targets", index, "api")
        if runs_here(parts, target):
            yield from _api_files(path, target, file)
    for key in ("key", "password_file"):
        secret = getattr(parts.link, key)
        if secret is not None and (why := private_file_problem(secret)):
            yield Finding(("link", key), why)
    if security is not None:
        yield from _certificates(parts, security, file)


def _api_files(path: Path, target: TargetSpec, topology_file: str) -> Iterator[Finding]:
    api = target.api
    advice = f"run: {KEYS_COMMAND} {topology_file}"
    if api.key_file is not None and (why := private_file_problem(api.key_file, advice)):
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


def deployment_key_problem(file: FilePath, topology_file: str) -> str | None:
    """Why a deployment key cannot be used, or None."""
    run = f"run: {KEYS_COMMAND} {topology_file}"
    why = private_file_problem(file, run)
    if why is None and len(file.read_bytes().strip()) < DEPLOYMENT_KEY_BYTES:
        return f"{file} is no key: it has less than {DEPLOYMENT_KEY_BYTES} bytes; remove it and {run}"
    return why


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
