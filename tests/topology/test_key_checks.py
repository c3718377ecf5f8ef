"""What `check` says of keys and certificates, and which links are encrypted."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.topology.credentials import api_url, link_is_encrypted
from paceline.topology.keyring import Keyring
from paceline.topology.spec import parse_topology

from .spec_helpers import STAR, problems, read, with_drafter

OPEN = with_drafter("listen: 0.0.0.0:7070")
SECURITY = "security: {key_file: secrets/deployment.key}\n"
KEYED = OPEN + SECURITY
API = "    api: {listen: '0.0.0.0:8001', key_file: secrets/api.key}\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With everything that the star needs."""
    secrets = tmp_path / "secrets"
    Keyring(secrets, secrets / "deployment.key").fill("star", {"d": [], "t": []}, api_keys=[secrets / "api.key"])
    return tmp_path


def ends(lines: list[str]) -> list[str]:
    """What is said, without the place."""
    return [line.split(": ", 2)[2] for line in lines]


def test_a_complete_folder_is_enough(folder: Path) -> None:
    """Key and certificates out of one place."""
    assert read(KEYED, folder).security.key_file == folder / "secrets" / "deployment.key"


def test_beyond_loopback_without_a_key_is_refused(folder: Path) -> None:
    """Whether encrypted or not."""
    message = (
        "0.0.0.0:7070 is reachable from other machines: that needs security.key_file; "
        "write security: {key_file: secrets/deployment.key} and run: paceline keys init star.yaml"
    )
    assert ends(problems(OPEN, folder)) == [message]
    assert ends(problems(OPEN + "security: {encrypt: false}\n", folder)) == [message]
    assert message in ends(problems(OPEN + "security: {certificates: secrets}\n", folder))


@pytest.mark.parametrize("name", ["d.pem", "d.key", "ca.pem", "t.pem", "t.key"])
def test_a_missing_certificate_says_what_to_run(folder: Path, name: str) -> None:
    """Of every node of this machine, on both sides of the link."""
    missing = folder / "secrets" / name
    missing.unlink()
    renew = "" if name == "ca.pem" else f" --renew {missing.stem}"
    message = f"{missing} does not exist; run: paceline keys init star.yaml{renew}"
    assert set(ends(problems(KEYED, folder))) == {message}


COPY = (
    "copy it from the machine that holds ca.key (where keys init was run), or, if that is to be this machine, "
    "run: paceline keys init star.yaml"
)


@pytest.mark.parametrize("name", ["deployment.key", "d.pem", "d.key", "ca.pem", "api.key"])
def test_without_the_authoritys_key_a_missing_file_is_to_be_copied(folder: Path, name: str) -> None:
    """Making it here would be a second authority, or a second key."""
    (folder / "secrets" / "ca.key").unlink()
    missing = folder / "secrets" / name
    missing.unlink()
    assert f"{missing} does not exist; {COPY}" in ends(problems(OPEN + API + SECURITY, folder))


def test_a_certificate_that_cannot_be_used_is_renewed_where_the_authority_is(folder: Path) -> None:
    """And both files are copied."""
    (folder / "secrets" / "ca.key").unlink()
    (folder / "secrets" / "d.pem").write_text("none")
    (line,) = ends(problems(KEYED, folder))
    assert line.endswith(
        "run: paceline keys init star.yaml --renew d on the machine that holds ca.key, "
        "and copy d.pem and d.key from there"
    )


@pytest.mark.parametrize("name", ["deployment.key", "d.key", "t.key", "ca.key"])
def test_secrets_that_others_can_read_are_refused(folder: Path, name: str) -> None:
    """The message is the command that mends it."""
    secret = folder / "secrets" / name
    secret.chmod(0o604)
    message = f"{secret} can be read by other users (mode 604); run: chmod 600 {secret}"
    assert set(ends(problems(KEYED, folder))) == {message}


def test_a_short_deployment_key_is_refused(folder: Path) -> None:
    """At `check`, not only once a node starts."""
    key = folder / "secrets" / "deployment.key"
    key.write_text("fifteen bytes..\n")
    (line,) = ends(problems(KEYED, folder))
    assert line == f"{key} is no key: it has less than 16 bytes; remove it and run: paceline keys init star.yaml"


@pytest.mark.parametrize(
    ("held", "why"),
    [
        ("short", "is no key: it has less than 16 bytes"),
        ("\n", "is no key: it has less than 16 bytes"),
        ("", "is empty"),
    ],
    ids=["short", "blank", "empty"],
)
def test_a_bad_api_key_is_refused(folder: Path, held: str, why: str) -> None:
    """By the bound of the deployment key, with what to do."""
    key = folder / "secrets" / "api.key"
    key.write_text(held)
    text = STAR + API + "security: {certificates: secrets}\n"
    assert ends(problems(text, folder)) == [f"{key} {why}; remove it and run: paceline keys init star.yaml"]


@pytest.mark.parametrize("held", [b"\xff\xfe" * 20, b"two lines of text\nin one key", "schlüssel für alle".encode()])
def test_an_api_key_that_no_header_can_hold_is_refused(folder: Path, held: bytes) -> None:
    """It is shown in an HTTP header; the deployment key may be any bytes."""
    key = folder / "secrets" / "api.key"
    key.write_bytes(held)
    text = STAR + API + "security: {certificates: secrets}\n"
    assert ends(problems(text, folder)) == [f"{key} is no API key: an HTTP header holds one line of ASCII text"]


@pytest.mark.parametrize(
    ("name", "other"),
    [("ca.key", "the authority's key"), ("deployment.key", "the deployment key"), ("t.key", "t's key")],
)
def test_an_api_key_in_somebody_elses_file_is_refused(folder: Path, name: str, other: str) -> None:
    """At `check`, so that `keys init` never writes one over the other."""
    text = STAR + API.replace("api.key", name) + "security: {key_file: secrets/deployment.key}\n"
    file = folder / "secrets" / name
    expected = f"{file} would be both an API key and {other}; give api.key_file another name"
    assert expected in ends(problems(text, folder))


def test_without_encryption_no_certificate_is_wanted(folder: Path) -> None:
    """`encrypt: false` leaves the key and drops TLS, of links and of the API."""
    for certificate in (folder / "secrets").glob("*.pem"):
        certificate.unlink()
    topology = read(OPEN + API + "security: {key_file: secrets/deployment.key, encrypt: false}\n", folder)
    assert not link_is_encrypted(topology.security, "tcp", topology.drafters[0])
    assert api_url(topology.security, topology.targets[0]) == "http://127.0.0.1:8001/v1"


def test_loopback_is_plain_unless_certificates_are_named(folder: Path) -> None:
    """A key file alone changes nothing there; its API stays plain in any case."""
    for security, encrypted in (("key_file: secrets/deployment.key", False), ("certificates: secrets", True)):
        topology = read(STAR + f"security: {{{security}}}\n", folder)
        assert link_is_encrypted(topology.security, "tcp", topology.drafters[0]) is encrypted
        assert api_url(topology.security, topology.targets[0]) == "http://127.0.0.1:8001/v1"


def test_an_api_beyond_loopback_is_https(folder: Path) -> None:
    """With the target's certificate; the URL says so."""
    topology = read(STAR + API + "security: {certificates: secrets}\n", folder)
    assert api_url(topology.security, topology.targets[0]) == "https://127.0.0.1:8001/v1"
    (folder / "secrets" / "t.pem").unlink()
    text = STAR.replace("[d]", "[]") + API + "security: {certificates: secrets, encrypt: true}\n"
    assert any("t.pem does not exist; run: paceline keys init" in line for line in problems(text, folder))


def test_an_api_beyond_loopback_needs_a_certificate_from_somewhere(folder: Path) -> None:
    """Without a place for certificates the message names the ways out."""
    (line,) = ends(problems(STAR + API, folder))
    assert line == (
        "0.0.0.0:8001 is reachable from other machines: that needs security.key_file or security.certificates for "
        "HTTPS, or encrypt: false; "
        "write security: {key_file: secrets/deployment.key} and run: paceline keys init star.yaml"
    )


@pytest.mark.parametrize(("given", "other"), [("cert", "key"), ("key", "cert")])
def test_an_own_certificate_comes_with_its_key(folder: Path, given: str, other: str) -> None:
    """One of the two alone is a mistake, on loopback, too."""
    text = STAR + f"    api: {{{given}: secrets/t.pem}}\n"
    assert ends(problems(text, folder)) == [f"needs {other} beside it"]


def test_an_own_certificate_of_an_api_is_looked_at(folder: Path) -> None:
    """Missing, open to others, or of another key."""
    secrets = folder / "secrets"
    text = STAR + "    api: {cert: secrets/t.pem, key: secrets/t.key}\n"
    assert api_url(read(text, folder).security, read(text, folder).targets[0]) == "https://127.0.0.1:8001/v1"
    (secrets / "t.key").chmod(0o644)
    assert ends(problems(text, folder)) == [
        f"{secrets}/t.key can be read by other users (mode 644); run: chmod 600 {secrets}/t.key"
    ]
    (secrets / "d.key").replace(secrets / "t.key")
    assert ends(problems(text, folder)) == [f"{secrets}/t.key does not belong to {secrets}/t.pem; get a new one"]
    (secrets / "t.pem").unlink()
    assert ends(problems(text, folder)) == [f"{secrets}/t.pem does not exist"]


def test_certificates_of_other_machines_are_not_looked_for(folder: Path) -> None:
    """They lie where their nodes run; a host with an address of this machine is this machine."""
    text = KEYED.replace("listen:", "host: orin\n    listen:") + "hosts: {orin: {address: ADDRESS}}\n"
    (folder / "secrets" / "d.pem").unlink()
    assert read(text.replace("ADDRESS", "192.0.2.7"), folder)
    assert read(text.replace("ADDRESS", "orin.invalid"), folder)
    assert "d.pem does not exist" in problems(text.replace("ADDRESS", "127.0.0.1"), folder)[0]


def test_names_that_no_certificate_can_hold_are_refused(folder: Path) -> None:
    """Only where a certificate is needed."""
    text = KEYED.replace("name: d", "name: a..b").replace("[d]", "[a..b]")
    assert any("a certificate holds names of letters" in line for line in problems(text, folder))
    assert read(STAR.replace("name: d", "name: a..b").replace("[d]", "[a..b]"), folder)


def test_keys_can_be_left_unlooked_at(tmp_path: Path) -> None:
    """For the command that makes them."""
    topology = parse_topology(KEYED, "star.yaml", tmp_path, look_at_keys=False)
    assert topology.security.key_file == tmp_path / "secrets" / "deployment.key"
