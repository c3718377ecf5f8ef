"""Models by hub id, from the hub's own cache; nothing is downloaded here."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.core.errors import UserError
from paceline.core.lm.loading import local_folder

REVISION = "0123456789012345678901234567890123456789"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A hub cache that holds org/tiny, and no network."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    repository = tmp_path / "models--org--tiny"
    snapshot = repository / "snapshots" / REVISION
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(REVISION)
    return snapshot


def test_a_cached_hub_id_is_its_folder(hub: Path) -> None:
    """The tokenizer and the weights are then read from one folder."""
    assert local_folder("org/tiny").resolve() == hub.resolve()


def test_a_hub_id_that_cannot_be_had_is_one_sentence(hub: Path) -> None:
    """It says for what the name was taken."""
    with pytest.raises(UserError, match="org/other is no directory here, and as a hub id it cannot be had"):
        local_folder("org/other")


def test_a_directory_is_itself(tmp_path: Path) -> None:
    """And one that is missing is no hub id."""
    assert local_folder(tmp_path) == tmp_path
    with pytest.raises(UserError, match="there is no such directory"):
        local_folder(tmp_path / "none")
