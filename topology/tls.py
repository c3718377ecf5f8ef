"""TLS contexts of a node: version 1.3 only, and both ends of a link show a certificate of the deployment."""

from __future__ import annotations

import datetime
import logging
import ssl
from pathlib import Path

from paceline.core.errors import UserError
from paceline.topology.certificate_checks import certificate_problem, expires, fingerprint, way_to_renew
from paceline.topology.credentials import (
    KEYS_COMMAND,
    NodeFiles,
    api_certificate,
    certificates_folder,
    link_is_encrypted,
    node_files,
)
from paceline.topology.links.tcp import ServerTls, TcpTransport
from paceline.topology.links.words import words
from paceline.topology.spec_models import DrafterSpec, Security, TargetSpec, Topology

log = logging.getLogger(__name__)

SOON_DAYS = 30


def tcp_transport(topology: Topology, node: str) -> TcpTransport:
    """TCP as one node speaks it: inside TLS where the topology says so. UserError when a certificate is amiss."""
    encrypted = _encrypted(topology)
    listens = node in encrypted
    dials = _dials(topology, node)
    if not listens and not dials & encrypted:
        return TcpTransport()
    files = usable_files(topology, node)
    return TcpTransport(
        server_tls=ServerTls(server_context(files), fingerprint(files.certificate)) if listens else None,
        client_tls=client_context(files) if dials & encrypted else None,
        in_clear=dials - encrypted,
    )


def own_transport(topology: Topology, drafter: DrafterSpec) -> TcpTransport:
    """With which a drafter's machine dials its own drafter. UserError when a certificate is amiss."""
    if not link_is_encrypted(topology.security, topology.link.transport, drafter):
        return TcpTransport()
    return TcpTransport(client_tls=client_context(usable_files(topology, drafter.name)))


def _encrypted(topology: Topology) -> set[str]:
    """Drafters whose links are inside TLS."""
    security, kind = topology.security, topology.link.transport
    return {drafter.name for drafter in topology.drafters if link_is_encrypted(security, kind, drafter)}


def _dials(topology: Topology, node: str) -> set[str]:
    return {name for target in topology.targets if target.name == node for name in target.drafters.names}


def usable_files(topology: Topology, node: str, *, warn: bool = True) -> NodeFiles:
    """A node's files, found to be in order. warn: when they expire soon. Raises UserError."""
    folder = certificates_folder(topology.security)
    if folder is None:
        raise UserError(f"{node} needs a certificate: write security.key_file and run {KEYS_COMMAND}")
    files = node_files(folder, node)
    problem = certificate_problem(files, node, topology.file)
    if problem is not None:
        raise UserError(problem)
    days = (expires(files.certificate) - datetime.datetime.now(datetime.timezone.utc)).days
    if warn and days < SOON_DAYS:
        advice = way_to_renew(folder, topology.file, node)
        log.warning("%s expires in %d days; %s", files.certificate, days, advice)
    return files


def server_context(files: NodeFiles) -> ssl.SSLContext:
    """For a drafter: who connects must show a certificate of the deployment."""
    context = _context(ssl.PROTOCOL_TLS_SERVER, files)
    context.verify_mode = ssl.CERT_REQUIRED
    context.num_tickets = 0  # a link lives long and starts afresh: nothing to resume
    return context


def client_context(files: NodeFiles) -> ssl.SSLContext:
    """For a target: the drafter is known by its name, whatever its address."""
    return _context(ssl.PROTOCOL_TLS_CLIENT, files)


def _context(protocol: int, files: NodeFiles) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_verify_locations(files.authority)
    context.load_cert_chain(files.certificate, files.key)
    return context


def api_files(topology: Topology, target: TargetSpec) -> tuple[Path, Path] | None:
    """(certificate, key) with which a target serves HTTPS; None for plain HTTP. Raises UserError."""
    files = api_certificate(topology.security, target)
    if target.api.cert is None and files is not None:
        with_links = bool(_dials(topology, target.name) & _encrypted(topology))  # whose transport has warned
        usable_files(topology, target.name, warn=not with_links)
    return files


def api_context(files: tuple[Path, Path] | None) -> ssl.SSLContext | None:
    """How a target serves HTTPS with (certificate, key); None for plain HTTP. Raises UserError."""
    if files is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(*files)
    except OSError as error:  # TLS's errors are among them
        raise UserError(f"{files[0]}, {files[1]}: not a certificate and its key ({words(error)})") from None
    return context


def api_client_context(security: Security, target: TargetSpec) -> ssl.SSLContext:
    """How a client on this machine knows a target that runs here; it believes nobody else.

    The deployment's authority vouches for its nodes. A certificate that the user brought is known by its file.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if api_certificate(security, target) is None:
        return context  # plain HTTP
    if target.api.cert is not None:
        context.check_hostname = False  # it is this very certificate, whatever names it holds
        context.verify_flags |= ssl.VerifyFlags.VERIFY_X509_PARTIAL_CHAIN
        context.load_verify_locations(target.api.cert)
    else:
        folder = certificates_folder(security)
        assert folder is not None
        context.load_verify_locations(node_files(folder, target.name).authority)
    return context
