"""Certificates say who a node is and nothing more; what is wrong with one is one sentence."""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from paceline.core.errors import UserError
from paceline.topology.certificate_checks import certificate_problem, pair_problem, private_file_problem
from paceline.topology.certificates import Pair, new_authority, new_node, utc_now
from paceline.topology.credentials import NodeFiles, name_problem, node_files
from paceline.topology.keyring import write_whole

NODE = "orin-1"


def parsed(pair: Pair) -> x509.Certificate:
    return x509.load_pem_x509_certificate(pair.certificate)


def place(folder: Path, authority: Pair, node: Pair) -> NodeFiles:
    """The three files of a node, as they lie on its machine."""
    files = node_files(folder, NODE)
    write_whole(files.authority, authority.certificate, 0o644)
    write_whole(files.certificate, node.certificate, 0o644)
    write_whole(files.key, node.key, 0o600)
    return files


@pytest.fixture(scope="module")
def authority() -> Pair:
    return new_authority("star")


def test_a_node_certificate_names_the_node_and_its_addresses(authority: Pair) -> None:
    """Name first, then addresses, then this machine's own names; for both ends of TLS; P-256; for two years or so."""
    certificate = parsed(new_node(authority, NODE, ["192.168.1.20", "orin.lan", "::7"]))
    assert [one.value for one in certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)] == [NODE]
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == [NODE, "orin.lan", "localhost"]
    assert list(map(str, names.get_values_for_type(x509.IPAddress))) == ["192.168.1.20", "::7", "127.0.0.1", "::1"]
    usage = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert set(usage) == {ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH}
    key = certificate.public_key()
    assert isinstance(key, ec.EllipticCurvePublicKey) and key.curve.name == "secp256r1"
    assert not certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    lasts = certificate.not_valid_after_utc - certificate.not_valid_before_utc
    assert lasts == datetime.timedelta(days=826)


def test_an_authority_signs_nodes_and_no_other_authority(authority: Pair) -> None:
    """Its path length is nought; a node's certificate does not outlive it."""
    constraints = parsed(authority).extensions.get_extension_for_class(x509.BasicConstraints).value
    assert (constraints.ca, constraints.path_length) == (True, 0)
    node = parsed(new_node(authority, NODE, days=36500))
    node.verify_directly_issued_by(parsed(authority))
    assert node.not_valid_after_utc == parsed(authority).not_valid_after_utc


def test_two_nodes_share_no_key_and_no_serial_number(authority: Pair) -> None:
    """Each is made anew."""
    one, other = new_node(authority, NODE), new_node(authority, NODE)
    assert one.key != other.key and parsed(one).serial_number != parsed(other).serial_number


def test_an_authority_whose_files_do_not_fit_signs_nothing(authority: Pair) -> None:
    """One sentence each."""
    with pytest.raises(UserError, match=r"^ca\.key does not belong to ca\.pem$"):
        new_node(Pair(authority.certificate, new_authority("x").key), NODE)
    with pytest.raises(UserError, match=r"^ca\.pem or ca\.key cannot be read: "):
        new_node(Pair(authority.certificate, b"nothing"), NODE)


def test_files_that_fit_are_no_problem(tmp_path: Path, authority: Pair) -> None:
    """An authority's file may hold several: the old one and the new one, while nodes change over."""
    files = place(tmp_path, authority, new_node(authority, NODE))
    assert certificate_problem(files, NODE) is None
    files.authority.write_bytes(new_authority("new").certificate + authority.certificate)
    assert certificate_problem(files, NODE) is None


@pytest.mark.parametrize(
    ("days", "words"),
    [(-900, f"{NODE}.pem expired on 20"), (20, "is this machine's clock right")],
)
def test_a_certificate_of_another_time_is_named(tmp_path: Path, days: int, words: str) -> None:
    """Expired, or not yet valid: the sentence has the date, and what to do."""
    then = utc_now() + datetime.timedelta(days=days)
    authority = new_authority("star", now=then)
    files = place(tmp_path, authority, new_node(authority, NODE, now=then))
    problem = certificate_problem(files, NODE, "star.yaml")
    assert problem is not None and words in problem
    if days < 0:
        assert f"; run: paceline keys init star.yaml --renew {NODE} on the machine that holds ca.key" in problem


def test_an_authority_that_has_expired_signs_nothing() -> None:
    """Then everything has to be made anew."""
    old = new_authority("star", days=1, now=utc_now() - datetime.timedelta(days=3))
    with pytest.raises(UserError, match=r"^ca\.pem expired on 20.*; --force makes everything anew$"):
        new_node(old, NODE)


def test_a_certificate_of_another_authority_is_named(tmp_path: Path, authority: Pair) -> None:
    """The same name, signed by somebody else, is worth nothing."""
    files = place(tmp_path, authority, new_node(new_authority("star"), NODE))
    problem = certificate_problem(files, NODE, "s.yaml")
    fix = f"run: paceline keys init s.yaml --renew {NODE}"
    there = f" on the machine that holds ca.key, and copy {NODE}.pem and {NODE}.key from there"
    assert problem == f"{files.certificate} is not signed by {files.authority}; {fix}{there}"


def test_a_key_that_does_not_belong_is_named(tmp_path: Path, authority: Pair) -> None:
    """Also a key that is none, and one behind a passphrase, for which nobody would be there to ask."""
    files = place(tmp_path, authority, new_node(authority, NODE))
    write_whole(files.key, new_node(authority, NODE).key, 0o600)
    assert f"{files.key} does not belong to {files.certificate}; " in str(certificate_problem(files, NODE))
    write_whole(files.key, b"no key", 0o600)
    assert f"{files.key} holds no private key without a passphrase" in str(certificate_problem(files, NODE))
    pair = new_node(authority, NODE)
    secret = load_pem_private_key(pair.key, None).private_bytes(
        Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"open")
    )
    write_whole(files.key, secret, 0o600)
    assert f"{files.key} holds no private key without a passphrase" in str(certificate_problem(files, NODE))


def test_a_certificate_of_another_node_is_named(tmp_path: Path, authority: Pair) -> None:
    """A file that was copied to the wrong machine, or under a wrong name."""
    files = place(tmp_path, authority, new_node(authority, "orin-2", [NODE]))
    problem = certificate_problem(files, NODE)
    assert problem is not None and problem.startswith(
        f"{files.certificate} is the certificate of orin-2, not of {NODE}; "
    )


@pytest.mark.parametrize("which", ["authority", "certificate"])
def test_a_file_that_is_no_certificate_is_named(tmp_path: Path, authority: Pair, which: str) -> None:
    """Half a download, or something else entirely."""
    files = place(tmp_path, authority, new_node(authority, NODE))
    file: Path = getattr(files, which)
    file.write_text("-----BEGIN CERTIFICATE-----\nhalf")
    assert f"{file} holds no certificate (" in str(certificate_problem(files, NODE))


@pytest.mark.parametrize("which", ["authority", "certificate", "key"])
def test_a_missing_file_says_what_to_run(tmp_path: Path, authority: Pair, which: str) -> None:
    """Each of the three is named with its path."""
    files = place(tmp_path, authority, new_node(authority, NODE))
    file: Path = getattr(files, which)
    file.unlink()
    problem = certificate_problem(files, NODE, "s.yaml")
    assert problem is not None and problem.startswith(f"{file} does not exist; copy it from the machine that holds")
    assert problem.endswith("run: paceline keys init s.yaml")


def test_keys_that_others_can_read_are_refused(tmp_path: Path, authority: Pair) -> None:
    """A node's key, and the authority's where it lies beside; the sentence has the command."""
    files = place(tmp_path, authority, new_node(authority, NODE))
    authority_key = tmp_path / "ca.key"
    for key in (authority_key, files.key):
        key.touch()
        key.chmod(0o640)
        assert f"{key} can be read by other users (mode 640); run: chmod 600 {key}" == certificate_problem(files, NODE)
        key.chmod(0o600)
        key.write_text("x") if key == authority_key else None


def test_odd_files_are_one_sentence(tmp_path: Path) -> None:
    """A folder, a device that never ends, an empty file."""
    empty = tmp_path / "empty"
    empty.touch(0o600)
    assert private_file_problem(tmp_path) == f"{tmp_path} is no file"
    assert private_file_problem(Path("/dev/zero")) == "/dev/zero is no file"
    assert private_file_problem(empty) == f"{empty} is empty"


def test_a_certificate_of_the_users_own_is_looked_at_too(tmp_path: Path, authority: Pair) -> None:
    """What an API shows need not come from the deployment's authority, but key and dates must be right."""
    files = place(tmp_path, authority, new_node(authority, NODE))
    assert pair_problem(files.certificate, files.key, "get a new one") is None
    write_whole(files.key, new_node(authority, NODE).key, 0o600)
    assert str(pair_problem(files.certificate, files.key, "get a new one")).endswith("; get a new one")


@pytest.mark.parametrize("name", ["ca", "a..b", "a.", "10.0.0.1."])
def test_names_that_no_certificate_can_hold(name: str) -> None:
    """The authority's own, and what is no host name."""
    assert str(name_problem(name)).startswith(f"{name}: ")


@pytest.mark.parametrize("name", ["orin-1", "Orin_1", "10.0.0.1", "a.b.c", "x" * 63, "a-"])
def test_names_that_a_certificate_can_hold(name: str) -> None:
    """All others of a topology."""
    assert name_problem(name) is None
