"""`keys init` makes what is missing, touches nothing else, and lets nobody else read it."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.core.errors import UserError
from paceline.topology.certificate_checks import certificate_problem
from paceline.topology.credentials import node_files
from paceline.topology.keyring import Keyring, write_whole


def fill(folder: Path, *nodes: str, force: bool = False, renew: tuple[str, ...] = ()) -> set[str]:
    """The names of the files that were made."""
    keyring = Keyring(folder, folder / "deployment.key", force=force)
    keyring.fill("star", {name: [] for name in nodes}, renew=renew)
    return {file.name for file in keyring.made}


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.fixture(params=[0o000, 0o022, 0o077], ids=oct)
def umask(request: pytest.FixtureRequest) -> Iterator[None]:
    """Whatever the user's own."""
    before = os.umask(request.param)
    yield
    os.umask(before)


def test_all_files_have_their_modes_whatever_the_umask(tmp_path: Path, umask: None) -> None:
    """Secrets 600, certificates 644, a new folder 700; nothing half-written stays."""
    folder = tmp_path / "secrets"
    fill(folder, "d", "t")
    assert folder.stat().st_mode & 0o777 == 0o700
    modes = {file.name: file.stat().st_mode & 0o777 for file in folder.iterdir()}
    private, public = {"deployment.key", "ca.key", "d.key", "t.key"}, {"ca.pem", "d.pem", "t.pem"}
    assert modes == {**dict.fromkeys(private, 0o600), **dict.fromkeys(public, 0o644)}


def test_a_secret_is_private_before_its_first_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is created with its mode; it is not opened wide and closed afterwards."""
    before = os.umask(0)
    seen: list[int] = []
    real = os.fchmod

    def look(descriptor: int, mode: int) -> None:
        seen.append(os.fstat(descriptor).st_mode & 0o777)
        real(descriptor, mode)

    monkeypatch.setattr(os, "fchmod", look)
    try:
        write_whole(tmp_path / "key", b"secret", 0o600)
    finally:
        os.umask(before)
    assert seen == [0o600]


def test_a_second_run_makes_what_is_missing_only(tmp_path: Path) -> None:
    """A node added later is signed by the same authority; no other byte changes."""
    assert fill(tmp_path, "d", "t") == {"deployment.key", "ca.key", "ca.pem", "d.key", "d.pem", "t.key", "t.pem"}
    before = contents(tmp_path)
    assert fill(tmp_path, "d", "t") == set()
    assert fill(tmp_path, "d", "t", "later") == {"later.key", "later.pem"}
    assert before.items() <= contents(tmp_path).items()
    assert certificate_problem(node_files(tmp_path, "later"), "later") is None


def test_renewing_changes_one_node(tmp_path: Path) -> None:
    """New key, new certificate, same authority."""
    fill(tmp_path, "d", "t")
    before = contents(tmp_path)
    assert fill(tmp_path, "d", "t", renew=("d",)) == {"d.key", "d.pem"}
    after = contents(tmp_path)
    assert {name for name in after if after[name] != before[name]} == {"d.key", "d.pem"}
    assert certificate_problem(node_files(tmp_path, "d"), "d") is None


def test_force_makes_everything_anew(tmp_path: Path) -> None:
    """No secret survives."""
    fill(tmp_path, "d")
    before = contents(tmp_path)
    fill(tmp_path, "d", force=True)
    after = contents(tmp_path)
    assert {name for name in after if after[name] != before[name]} == set(before)


def test_two_deployments_share_no_secret(tmp_path: Path) -> None:
    """Keys are random, 32 bytes as 64 hexadecimal digits."""
    fill(tmp_path / "a", "d")
    fill(tmp_path / "b", "d")
    one, other = contents(tmp_path / "a"), contents(tmp_path / "b")
    assert all(one[name] != other[name] for name in one)
    assert len(bytes.fromhex(one["deployment.key"].decode())) == 32


def test_without_the_authoritys_key_no_node_is_added(tmp_path: Path) -> None:
    """It may be kept elsewhere: then that is where nodes are made. What needs none still works."""
    fill(tmp_path, "d")
    (tmp_path / "ca.key").unlink()
    assert fill(tmp_path, "d") == set()
    with pytest.raises(UserError, match=r"^later needs a certificate; run this where .*ca\.key is, which signs it$"):
        fill(tmp_path, "d", "later")


@pytest.mark.parametrize("name", ["ca", "d"])
def test_a_key_without_its_certificate_is_not_overwritten(tmp_path: Path, name: str) -> None:
    """Somebody's key may be gone for ever; --force is for that."""
    fill(tmp_path, "d")
    (tmp_path / f"{name}.pem").unlink()
    before = contents(tmp_path)
    way = r"--renew d, which makes both" if name == "d" else "--force, which makes everything anew"
    with pytest.raises(UserError, match=rf"{name}\.key is there and .*{name}\.pem is not; put it back, or give {way}$"):
        fill(tmp_path, "d")
    assert contents(tmp_path) == before


@pytest.mark.parametrize("lost", ["d.pem", "d.key"])
def test_renewing_makes_both_files_when_one_is_lost(tmp_path: Path, lost: str) -> None:
    """Signed by the authority that is there; nothing else changes."""
    fill(tmp_path, "d", "t")
    (tmp_path / lost).unlink()
    before = contents(tmp_path)
    assert fill(tmp_path, "d", "t", renew=("d",)) == {"d.key", "d.pem"}
    after = contents(tmp_path)
    assert {name for name in after if after[name] != before.get(name)} == {"d.key", "d.pem"}
    assert certificate_problem(node_files(tmp_path, "d"), "d") is None


@pytest.mark.parametrize("there", [("deployment.key",), ("ca.pem",), ("d.pem",), ("deployment.key", "d.pem", "d.key")])
def test_no_second_authority_beside_files_of_the_first(tmp_path: Path, there: tuple[str, ...]) -> None:
    """Where ca.key is not, files of a deployment were copied to; --force is for who means it."""
    fill(tmp_path / "home", "d")
    machine = tmp_path / "machine"
    machine.mkdir()
    for name in there:
        (machine / name).write_bytes((tmp_path / "home" / name).read_bytes())
    before = contents(machine)
    with pytest.raises(
        UserError, match=r"machine/.* is there and .*ca\.key is not: run this on the machine that holds"
    ):
        fill(machine, "d")
    assert contents(machine) == before
    assert "ca.key" in fill(machine, "d", force=True)


@pytest.mark.parametrize(("name", "other"), [("ca", "the authority's key"), ("deployment", "the deployment key")])
def test_a_node_whose_files_would_be_somebody_elses_is_refused(tmp_path: Path, name: str, other: str) -> None:
    """Before anything is written."""
    with pytest.raises(UserError, match=f"would be both {name}'s key and {other}; rename {name}"):
        fill(tmp_path, name)
    assert contents(tmp_path) == {}


def test_a_folder_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    """A file in its place."""
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"file/secrets: Not a directory"):
        fill(tmp_path / "file" / "secrets", "d")


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("ca.key", "the authority's key"),
        ("ca.pem", "the authority's certificate"),
        ("deployment.key", "the deployment key"),
        ("d.key", "d's key"),
        ("sub/../d.pem", "d's certificate"),
    ],
)
def test_an_api_key_in_somebody_elses_file_is_refused(tmp_path: Path, name: str, other: str) -> None:
    """Whatever way the file is named, before anything is written."""
    with pytest.raises(UserError, match=f"would be both an API key and {other}; give api.key_file another name"):
        Keyring(tmp_path, tmp_path / "deployment.key").fill("star", {"d": []}, api_keys=[tmp_path / name])
    assert contents(tmp_path) == {}


def test_a_deployment_key_in_the_authoritys_file_is_refused(tmp_path: Path) -> None:
    """It would be overwritten."""
    with pytest.raises(UserError, match="both the deployment key and the authority's key; give sec"):
        Keyring(tmp_path, tmp_path / "ca.key").fill("star", {"d": []})
    assert contents(tmp_path) == {}


def test_two_runs_at_once_agree(tmp_path: Path) -> None:
    """The second waits and finds everything there: each file is made once, and all fit together."""
    made: list[Path] = []
    begin = threading.Barrier(4)

    def run() -> None:
        keyring = Keyring(tmp_path / "secrets", tmp_path / "secrets" / "deployment.key")
        begin.wait()
        keyring.fill("star", {"d": [], "t": []})
        made.extend(keyring.made)

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(made) == sorted((tmp_path / "secrets").iterdir()) and len(made) == 7
    for node in ("d", "t"):
        assert certificate_problem(node_files(tmp_path / "secrets", node), node) is None
