"""What a topology says of files and machines: keys, models, profiles, addresses."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from paceline.core.errors import UserError
from paceline.topology.overview import connections, who_talks_to_whom
from paceline.topology.spec import Address, load_topology, missing_models, require_models

from .spec_helpers import STAR, problems, read, with_drafter, with_target

ROOT = Path(__file__).parents[2]


def test_targets_on_another_machine_need_an_address_they_can_reach(tmp_path: Path) -> None:
    """A drafter on loopback serves its own machine only."""
    key = tmp_path / "deployment.key"
    key.write_text("sixteen bytes or more")
    key.chmod(0o600)
    text = with_drafter("host: orin") + "hosts: {orin: {address: 10.0.0.9}}\n"
    assert problems(text, tmp_path) == [
        "star.yaml:4:5: drafters[0].listen: target t runs on this machine and cannot reach 127.0.0.1:7070; "
        "listen on 0.0.0.0:7070"
    ]
    text = (
        text.replace("host: orin", "host: orin\n    listen: 0.0.0.0:7070")
        + "security: {key_file: deployment.key, encrypt: false}\n"
    )
    topology = read(text, tmp_path)
    assert topology.connect_address(topology.drafters[0], topology.targets[0]) == Address("10.0.0.9", 7070)
    assert topology.security.key_file == key


def test_an_address_for_all_is_reached_over_loopback_on_one_machine(tmp_path: Path) -> None:
    """0.0.0.0 is no address to connect to."""
    key = tmp_path / "k"
    key.write_text("sixteen bytes or more")
    key.chmod(0o600)
    topology = read(with_drafter("listen: 0.0.0.0:7070") + "security: {key_file: k, encrypt: false}\n", tmp_path)
    assert topology.connect_address(topology.drafters[0], topology.targets[0]) == Address("127.0.0.1", 7070)


def test_a_key_file_that_others_can_read_is_refused(tmp_path: Path) -> None:
    """The message says how to mend it."""
    key = tmp_path / "k"
    key.write_text("sixteen bytes or more")
    key.chmod(0o640)
    (line,) = problems(STAR + "security: {key_file: k}\n", tmp_path)
    assert line.endswith(f"{key} can be read by other users (mode 640); run: chmod 600 {key}")
    key.chmod(0o600)
    assert read(STAR + "security: {key_file: k}\n", tmp_path).security.key_file == key


def test_models_are_paths_when_they_are_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Paths are relative to the file, `~` and variables are replaced, everything else is a hub id."""
    (tmp_path / "models" / "tiny").mkdir(parents=True)
    monkeypatch.setenv("STORE", str(tmp_path / "models"))
    monkeypatch.setenv("HOME", str(tmp_path))
    for written in ("models/tiny", "./models/tiny", "~/models/tiny", "${STORE}/tiny", "x/../models/tiny"):
        topology = read(STAR.replace("org/large", written), tmp_path)
        assert topology.targets[0].model == str(tmp_path / "models" / "tiny")
    assert read(STAR, tmp_path).targets[0].model == "org/large"
    (line,) = problems(STAR.replace("org/large", "${UNSET_FOR_SURE}/x"), tmp_path)
    assert "environment variable UNSET_FOR_SURE is not set" in line


def test_a_missing_local_model_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only models of this machine are looked for."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("PACELINE_CACHE", raising=False)
    topology = read(STAR.replace("org/large", "${PACELINE_CACHE}/models/m"), tmp_path)
    (finding,) = missing_models(topology)
    assert finding.message == f"{tmp_path}/.cache/paceline/models/m does not exist; run scripts/fetch_models"
    with pytest.raises(UserError, match=r"star\.yaml: targets\[0\]\.model: .* run scripts/fetch_models"):
        require_models(topology, "star.yaml")


def test_emulated_nodes_take_a_profile_in_place_or_from_a_file(tmp_path: Path) -> None:
    """A profile file is read at once, and its mistakes are reported in it."""
    text = """\
        version: 1
        name: toy
        drafters:
          - {name: d, model: toy, runtime: emulated, profile: {step_ms: 2, agreement: 0.7}}
        targets:
          - {name: t, model: toy, engine: emulated, profile: slow.yaml, drafters: {names: [d]}}
        """
    profile = tmp_path / "slow.yaml"
    profile.write_text("verify_ms: 40\n")
    topology = read(text, tmp_path)
    assert topology.targets[0].profile is not None
    assert topology.drafters[0].profile is not None
    assert (topology.targets[0].profile.verify_ms.ms(9), topology.drafters[0].profile.agreement) == (40.0, 0.7)
    profile.write_text("verify_ms: 40\nagreement: 2\n")
    assert problems(text, tmp_path) == [f"{profile}:2:12: agreement: must be a number from 0 to 1, not 2"]
    profile.write_text("seed: 7\n")
    (line,) = problems(text, tmp_path)
    assert line.endswith("the profiles of d and t must have the same vocabulary_size and seed")
    profile.unlink()
    (line,) = problems(text, tmp_path)
    assert line == f"star.yaml:6:54: targets[0].profile: {profile}: there is no such file"


@pytest.mark.parametrize("example", sorted((ROOT / "examples").glob("*.yaml")), ids=lambda path: path.name)
def test_every_example_is_valid(example: Path) -> None:
    """Each works as it stands."""
    topology = load_topology(example)
    assert connections(topology)


def test_the_star_example_is_one_drafter_and_three_targets() -> None:
    """What the demo shows."""
    rows = connections(load_topology(ROOT / "examples" / "star.yaml"))
    assert [(row.target, row.drafter, row.over) for row in rows] == [
        (name, "drafter", "tcp 127.0.0.1:7070") for name in ("chat-a", "chat-b", "chat-c")
    ]


def test_the_picture_says_what_a_target_is_set_to_beyond_its_columns() -> None:
    """Below the table, for each target where it is set."""
    two = "  - {name: u, model: org/large, draft_ahead: 5, drafters: {names: [d]}}\n"
    topology = read(with_target("draft_ahead: 5\nverify_budget: 12") + two)
    assert who_talks_to_whom(topology).caption == "t, u: draft_ahead 5\nt: verify_budget 12"
    assert who_talks_to_whom(read(STAR)).caption is None


def test_key_files_of_other_machines_are_not_looked_for(tmp_path: Path) -> None:
    """An api key lies where its target runs."""
    text = STAR.replace("[d]", "[]") + "    host: far\n    api: {listen: '0.0.0.0:8001', key_file: api.key}\n"
    topology = read(text + "hosts: {far: {address: far.lan}}\nsecurity: {encrypt: false}\n", tmp_path)
    assert topology.targets[0].api.key_file == tmp_path / "api.key"
    assert not os.path.exists(topology.targets[0].api.key_file)


def test_a_file_without_an_end_is_refused() -> None:
    """Of a device no more is read than a topology may hold."""
    with pytest.raises(UserError, match="/dev/zero: is larger than 256 KiB"):
        load_topology("/dev/zero")
