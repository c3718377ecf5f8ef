"""`paceline keys init` as people meet it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from cryptography import x509

from paceline import cli
from paceline.topology.spec import load_topology

STAR = """\
version: 1
name: edge
security: {key_file: secrets/deployment.key}
hosts:
  orin: {address: 192.0.2.20}
  server: {address: server.lan}
drafters:
  - {name: d, host: orin, model: toy, runtime: emulated, listen: "0.0.0.0:7070"}
targets:
  - name: t
    host: server
    model: toy
    engine: emulated
    drafters: {names: [d]}
    api: {listen: "0.0.0.0:8001", key_file: secrets/api.key}
"""


class Result(NamedTuple):
    code: int
    out: str
    err: str


Run = Callable[..., Result]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs `paceline keys init …` in this process."""

    def run(*arguments: object) -> Result:
        code = cli.main(["keys", "init", *map(str, arguments)])
        captured = capsys.readouterr()
        return Result(code, captured.out, captured.err)

    return run


@pytest.fixture
def star(tmp_path: Path) -> Path:
    file = tmp_path / "star.yaml"
    file.write_text(STAR)
    return file


def test_one_command_makes_a_topology_valid(run: Run, star: Path) -> None:
    """What it names is made where it names it; each machine's files are listed, ca.key for none."""
    result = run(star)
    folder = star.parent / "secrets"
    common = f"{folder}/deployment.key {folder}/ca.pem"
    assert result == Result(
        0,
        f"made in {folder}: deployment.key, api.key, ca.key, ca.pem, d.key, d.pem, t.key, t.pem\n"
        f"orin (192.0.2.20): {common} {folder}/d.pem {folder}/d.key\n"
        f"server (server.lan): {common} {folder}/t.pem {folder}/t.key {folder}/api.key\n"
        f"{folder}/ca.key stays here, or better offline: whoever has it can make nodes.\n",
        "",
    )
    assert load_topology(star).name == "edge"


def test_what_a_machine_is_sent_is_enough_for_it(run: Run, star: Path, tmp_path: Path) -> None:
    """Only its own files, and the topology, make a machine ready: no ca.key, no other node's key."""
    made = json.loads(run(star, "--json").out)
    assert {Path(file).name for file in made["made"]} >= {"deployment.key", "ca.key", "d.key"}
    machine = tmp_path / "orin"
    (machine / "secrets").mkdir(parents=True)
    (machine / "star.yaml").write_text(STAR.replace("192.0.2.20", "127.0.0.1"))
    for file in made["machines"]["orin (192.0.2.20)"]:
        os.link(file, machine / "secrets" / Path(file).name)
    assert load_topology(machine / "star.yaml").name == "edge"


def test_certificates_hold_the_addresses_of_their_hosts(run: Run, star: Path) -> None:
    """Users check an API's address against them."""
    run(star)
    certificate = x509.load_pem_x509_certificate((star.parent / "secrets" / "t.pem").read_bytes())
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["t", "server.lan", "localhost"]


def test_again_and_with_one_more_node(run: Run, star: Path) -> None:
    """Nothing is made twice; what is new is."""
    run(star)
    assert run(star).out.startswith(f"everything is there already in {star.parent}/secrets\n")
    star.write_text(STAR + "  - {name: later, host: server, model: toy, engine: emulated}\n")
    assert run(star).out.startswith(f"made in {star.parent}/secrets: later.key, later.pem\n")
    assert run(star, "--renew", "d").out.startswith(f"made in {star.parent}/secrets: d.key, d.pem\n")


def test_without_a_topology(run: Run, tmp_path: Path) -> None:
    """Names on the command line; how long they last, too."""
    folder = tmp_path / "new" / "keys"
    result = run("--out", folder, "--node", "a", "--node", "b", "--days", "30")
    assert result.out.startswith(f"made in {folder}: deployment.key, ca.key, ca.pem, a.key, a.pem, b.key, b.pem\n")
    certificate = x509.load_pem_x509_certificate((folder / "a.pem").read_bytes())
    assert (certificate.not_valid_after_utc - certificate.not_valid_before_utc).days == 31


def test_elsewhere_than_the_topology_says(run: Run, star: Path, tmp_path: Path) -> None:
    """--out takes everything but the APIs' keys, which each have a path of their own."""
    result = run(star, "--out", tmp_path / "stick")
    assert result.code == 0
    assert sorted(file.name for file in (tmp_path / "stick").iterdir()) == [
        "ca.key", "ca.pem", "d.key", "d.pem", "deployment.key", "t.key", "t.pem",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "give a topology file, or --out DIR and a --node NAME for each node"),
        (("--node", "a"), "--node needs --out DIR, where the files are to go"),
        (("--node", "ca", "--out", "x"), "--node ca: this is what the authority's files are called"),
        (("--node", "../x", "--out", "x"), "--node ../x: a certificate holds names of letters"),
        (("--node", "a", "--out", "x", "--renew", "b"), "--renew b: there is no such node; there are a"),
        (("missing.yaml",), "missing.yaml: there is no such file"),
    ],
)
def test_wrong_input_is_one_sentence(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], message: str
) -> None:
    """Exit 2, and nothing is written."""
    monkeypatch.chdir(tmp_path)
    code, out, err = run(*arguments)
    assert (code, out) == (2, "") and err.startswith(message) and err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_topology_that_names_no_place(run: Run, tmp_path: Path) -> None:
    """It says what to write."""
    file = tmp_path / "star.yaml"
    file.write_text("version: 1\nname: x\ntargets: [{name: t, model: m/m}]\n")
    result = run(file)
    assert result.code == 2
    assert result.err == (
        f"{file} names no place for keys: write security: {{key_file: secrets/deployment.key}}, or give --out\n"
    )


def test_no_command_takes_a_secret_as_an_argument() -> None:
    """Command lines are everybody's to read: options name files, never what is in them."""
    words = ("key", "secret", "password")
    for name in cli.COMMANDS:
        command = cli.load_command(name)
        for one in [command, *getattr(command, "commands", {}).values()]:
            options = [option for parameter in one.params for option in parameter.opts]
            assert [option for option in options if any(word in option for word in words)] == []
