"""Certificates of a deployment: an authority of its own, and one certificate a node, all ECDSA P-256.

A certificate's common name is the node's name, exactly; its alternative names are that name and the addresses
under which users reach the node's API. Links go by names, so that an address may change.
"""

from __future__ import annotations

import datetime
import ipaddress
from collections.abc import Sequence
from typing import NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from paceline.core.errors import UserError

AUTHORITY_DAYS = 3650
NODE_DAYS = 825
CLOCKS_MAY_DIFFER = datetime.timedelta(days=1)
LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")


class Pair(NamedTuple):
    """A certificate and its private key, as PEM."""

    certificate: bytes
    key: bytes


def new_authority(deployment: str, days: int = AUTHORITY_DAYS, now: datetime.datetime | None = None) -> Pair:
    """A self-signed authority that can sign nodes and nothing below them. now: in UTC."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"{deployment} authority"[:64])])
    builder = _builder(name, name, key.public_key(), now or utc_now(), days)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    builder = builder.add_extension(_key_usage(authority=True), critical=True)
    return _pair(builder.sign(key, hashes.SHA256()), key)


def new_node(
    authority: Pair,
    name: str,
    addresses: Sequence[str] = (),
    days: int = NODE_DAYS,
    now: datetime.datetime | None = None,
) -> Pair:
    """A node's certificate, good for both ends of a link and for HTTPS at `addresses` (host names or IPs).

    It does not outlive the authority. Raises UserError when the authority's files cannot sign.
    """
    issuer, signer = _load(authority)
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    builder = _builder(subject, issuer.subject, key.public_key(), now or utc_now(), days, issuer.not_valid_after_utc)
    names = dict.fromkeys(_general_name(text) for text in (name, *addresses, *LOCAL_NAMES))
    usages = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    builder = builder.add_extension(x509.SubjectAlternativeName(list(names)), critical=False)
    builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    builder = builder.add_extension(_key_usage(authority=False), critical=True)
    builder = builder.add_extension(x509.ExtendedKeyUsage(usages), critical=False)
    key_id = x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key())
    builder = builder.add_extension(key_id, critical=False)
    return _pair(builder.sign(signer, hashes.SHA256()), key)


def utc_now() -> datetime.datetime:
    return datetime.datetime.now(datetime.timezone.utc)


def _load(authority: Pair) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    try:
        certificate = x509.load_pem_x509_certificate(authority.certificate)
        key = load_pem_private_key(authority.key, None)
    except (ValueError, TypeError) as error:
        raise UserError(f"ca.pem or ca.key cannot be read: {error}") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != certificate.public_key():
        raise UserError("ca.key does not belong to ca.pem")
    if certificate.not_valid_after_utc < utc_now():
        raise UserError(f"ca.pem expired on {certificate.not_valid_after_utc:%Y-%m-%d}; --force makes everything anew")
    return certificate, key


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePublicKey,
    now: datetime.datetime,
    days: int,
    latest: datetime.datetime | None = None,
) -> x509.CertificateBuilder:
    end = now + datetime.timedelta(days=days)
    builder = x509.CertificateBuilder(issuer, subject, key, x509.random_serial_number())
    builder = builder.not_valid_before(now - CLOCKS_MAY_DIFFER).not_valid_after(min(end, latest or end))
    return builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)


def _key_usage(authority: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not authority,
        key_cert_sign=authority,
        crl_sign=authority,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _general_name(text: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(text))
    except ValueError:
        return x509.DNSName(text)


def _pair(certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> Pair:
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return Pair(certificate.public_bytes(Encoding.PEM), private)
