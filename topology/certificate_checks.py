"""Whether a node's certificate can be used, in one sentence if not; `cryptography` is imported only to look at one."""

from __future__ import annotations

import datetime
import hashlib
import os
import ssl
import stat
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.topology.credentials import AUTHORITY, KEYS_COMMAND, NodeFiles

if TYPE_CHECKING:
    from cryptography import x509

PEM_BEGIN = "-----BEGIN CERTIFICATE-----"
PEM_END = "-----END CERTIFICATE-----"


def way_to_get(folder: Path, topology_file: str, options: str = "") -> str:
    """What to do about a file of a deployment that is not there: who holds ca.key can make it, the others copy it."""
    run = f"run: {KEYS_COMMAND} {topology_file}"
    if os.path.exists(folder / f"{AUTHORITY}.key"):
        return run + options
    there = f"the machine that holds {AUTHORITY}.key (where keys init was run)"
    return f"copy it from {there}, or, if that is to be this machine, {run}"


def way_to_renew(folder: Path, topology_file: str, node: str) -> str:
    """The same about a node's certificate that cannot be used."""
    run = f"run: {KEYS_COMMAND} {topology_file} --renew {node}"
    if os.path.exists(folder / f"{AUTHORITY}.key"):
        return run
    return f"{run} on the machine that holds {AUTHORITY}.key, and copy {node}.pem and {node}.key from there"


def private_file_problem(file: Path, advice: str = "") -> str | None:
    """Why a file that only its owner may read cannot be used, or None. advice: how to get it."""
    problem = file_problem(file, advice)
    if problem is not None:
        return problem
    status = file.stat()
    if status.st_mode & 0o077:
        return f"{file} can be read by other users (mode {status.st_mode & 0o777:03o}); run: chmod 600 {file}"
    if status.st_size == 0:
        return f"{file} is empty" + (f"; remove it and {advice}" if advice else "")
    return None


def file_problem(file: Path, advice: str = "") -> str | None:
    """Why a file cannot be read, or None."""
    try:
        if not stat.S_ISREG(file.stat().st_mode):
            return f"{file} is no file"
        with file.open("rb"):
            return None
    except FileNotFoundError:
        return f"{file} does not exist" + (f"; {advice}" if advice else "")
    except OSError as error:
        return f"{file} cannot be read: {error.strerror}"


def certificate_problem(files: NodeFiles, node: str, topology_file: str = "FILE.yaml") -> str | None:
    """Why a node cannot use its files, or None."""
    folder = files.authority.parent
    for file in files:
        options = f" --renew {node}" if file != files.authority else ""
        problem = file_problem(file, way_to_get(folder, topology_file, options))
        if problem is not None:
            return problem
    renew = way_to_renew(folder, topology_file, node)
    return (
        private_file_problem(files.key, renew)
        or authority_key_problem(files.authority.with_suffix(".key"))
        or pair_problem(files.certificate, files.key, renew)
        or _signature_problem(files, node, renew)
    )


def authority_key_problem(key: Path) -> str | None:
    """ca.key need not be here; where it is, nobody else may read it."""
    return private_file_problem(key) if os.path.exists(key) else None


def pair_problem(certificate: Path, key: Path, renew: str) -> str | None:
    """Why a certificate cannot be shown now, or None."""
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_private_key

    try:
        chain = _load(certificate)
    except (OSError, ValueError) as error:
        return f"{certificate} holds no certificate ({_first_line(error)}); {renew}"
    try:
        private = load_pem_private_key(key.read_bytes(), None)
    except (OSError, ValueError, TypeError) as error:
        return f"{key} holds no private key without a passphrase ({_first_line(error)}); {renew}"
    own = private.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    if own != chain[0].public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo):
        return f"{key} does not belong to {certificate}; {renew}"
    return _validity_problem(certificate, chain[0], renew)


def _validity_problem(file: Path, certificate: x509.Certificate, renew: str) -> str | None:
    now = datetime.datetime.now(datetime.timezone.utc)
    if now > certificate.not_valid_after_utc:
        return f"{file} expired on {certificate.not_valid_after_utc:%Y-%m-%d}; {renew}"
    if now < certificate.not_valid_before_utc:
        begins = f"{certificate.not_valid_before_utc:%Y-%m-%d}"
        return f"{file} is not valid before {begins}; is this machine's clock right ({now:%Y-%m-%d})?"
    return None


def _signature_problem(files: NodeFiles, node: str, renew: str) -> str | None:
    """The deployment's authority has signed it, for this node."""
    from cryptography.x509.oid import NameOID

    certificate = _load(files.certificate)[0]
    try:
        authorities = _load(files.authority)
    except (OSError, ValueError) as error:
        return f"{files.authority} holds no certificate ({_first_line(error)}); {renew}"
    if not any(_has_signed(authority, certificate) for authority in authorities):
        return f"{files.certificate} is not signed by {files.authority}; {renew}"
    names = [attribute.value for attribute in certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)]
    if names != [node]:
        shown = ", ".join(map(str, names)) or "nobody"
        return f"{files.certificate} is the certificate of {shown}, not of {node}; {renew}"
    return None


def _has_signed(authority: x509.Certificate, certificate: x509.Certificate) -> bool:
    from cryptography.exceptions import InvalidSignature

    try:
        certificate.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def expires(file: Path) -> datetime.datetime:
    """When the first certificate of a file ceases to be valid. Raises OSError or ValueError."""
    return _load(file)[0].not_valid_after_utc


def fingerprint(certificate: Path) -> bytes:
    """SHA-256 of the first certificate of a file, 32 bytes: what binds a handshake to a TLS connection."""
    text = certificate.read_text("latin-1")  # notes beside the PEM may be in any encoding
    first = text[text.index(PEM_BEGIN) : text.index(PEM_END) + len(PEM_END)]
    return hashlib.sha256(ssl.PEM_cert_to_DER_cert(first)).digest()


def _load(file: Path) -> list[x509.Certificate]:
    from cryptography import x509

    return x509.load_pem_x509_certificates(file.read_bytes())


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
