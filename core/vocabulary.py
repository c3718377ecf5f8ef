"""A tokenizer as the loops see it: bytes of each id, special ids, and a fingerprint to compare two of them.

Reads what Hugging Face folders hold (tokenizer.json and the small config files) with the `tokenizers`
package alone: a drafter has neither torch nor transformers.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.core.errors import UserError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

BLOCK_IDS = 256
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE_MARK = "▁"  # sentencepiece's way to write a space


@dataclass(frozen=True)
class VocabularyIdentity:
    """What two sides compare at the handshake. `size` counts the tokenizer's ids, no padded tail."""

    fingerprint: str  # hex; empty: there is no tokenizer, only ids
    size: int
    block_hashes: bytes  # 4 bytes per block of 256 ids


class Vocabulary:
    """A tokenizer and the names of its ids."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        eos_ids: Iterable[int] = (),
        bos: int | None = None,
        chat_template: str | None = None,
    ) -> None:
        """Raises UserError for a tokenizer whose ids have no fixed bytes."""
        tokenizer.no_padding()
        tokenizer.no_truncation()
        self._tokenizer = tokenizer
        description = json.loads(tokenizer.to_str())
        added = {entry["id"]: entry for entry in description["added_tokens"]}
        self.special_ids = frozenset(id for id, entry in added.items() if entry["special"])
        self.token_bytes: list[bytes] = _token_bytes(tokenizer, description, added)
        self.size = len(self.token_bytes)
        self.eos_ids = frozenset(eos_ids)
        self.bos = bos
        self.chat_template = chat_template
        self.adds_leading_space = _adds_leading_space(description)

    @classmethod
    def load(cls, folder: str | Path) -> Vocabulary:
        """The vocabulary of a model folder; UserError says which file is missing or wrong."""
        from tokenizers import Tokenizer

        folder = Path(folder)
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise UserError(f"{path} does not exist: a model folder needs its tokenizer.json")
        try:
            tokenizer = Tokenizer.from_str(path.read_text(encoding="utf-8"))
        except Exception as error:  # the package raises bare Exception for whatever it cannot read
            raise UserError(f"{path} is no tokenizer: {error}") from None
        settings = _read_json(folder / "tokenizer_config.json")
        config = _read_json(folder / "config.json")
        generation = _read_json(folder / "generation_config.json")
        return cls(
            tokenizer,
            eos_ids=_eos_ids(tokenizer, settings, config, generation),
            bos=_bos(tokenizer, settings, config),
            chat_template=_chat_template(folder, settings),
        )

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text."""
        return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """The text of ids; ids past the vocabulary (a padded tail) say nothing."""
        data = b"".join(
            self.token_bytes[id]
            for id in ids
            if 0 <= id < self.size and not (skip_special_tokens and id in self.special_ids)
        )
        if self.adds_leading_space:
            data = data.removeprefix(b" ")
        return data.decode("utf-8", errors="replace")

    @cached_property
    def fingerprint(self) -> str:
        """128 bits, hex, over every id's bytes and which ids are special."""
        digest = hashlib.sha256()
        for framed in self._framed():
            digest.update(framed)
        return digest.hexdigest()[:32]

    @cached_property
    def block_hashes(self) -> bytes:
        """4 bytes per block of 256 ids, to find the first block in which two tokenizers differ."""
        framed = list(self._framed())
        blocks = (framed[first : first + BLOCK_IDS] for first in range(0, len(framed), BLOCK_IDS))
        return b"".join(hashlib.sha256(b"".join(block)).digest()[:4] for block in blocks)

    @property
    def identity(self) -> VocabularyIdentity:
        """What the other side of a link is told."""
        return VocabularyIdentity(self.fingerprint, self.size, self.block_hashes)

    def _framed(self) -> Iterator[bytes]:
        for id, data in enumerate(self.token_bytes):
            kind = b"s" if id in self.special_ids else b"t"
            yield len(data).to_bytes(4, "little") + kind + data


def _token_bytes(tokenizer: Tokenizer, description: dict[str, Any], added: dict[int, Any]) -> list[bytes]:
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    kinds = set(_step_types(description))
    byte_level = "ByteLevel" in kinds
    marked = "Metaspace" in kinds or _SPACE_MARK in json.dumps(
        [description["normalizer"], description["decoder"]], ensure_ascii=False
    )
    if not byte_level and not marked and not description["model"].get("byte_fallback"):
        kind = description["model"].get("type", "?")
        raise UserError(f"a {kind} tokenizer without byte-level or sentencepiece pieces is not supported")
    letters = _byte_letters()
    alphabet = frozenset(letters.values())
    to_latin = {ord(letter): byte for byte, letter in letters.items()}
    result = [b""] * (max(vocabulary.values(), default=-1) + 1)
    for token, id in vocabulary.items():
        if id in added and (byte_level or added[id]["special"]):
            result[id] = token.encode()
        elif byte_level:
            known = alphabet.issuperset(token)
            result[id] = token.translate(to_latin).encode("latin-1") if known else token.encode()
        elif match := _BYTE_TOKEN.fullmatch(token):
            result[id] = bytes([int(match[1], 16)])
        else:
            result[id] = token.replace(_SPACE_MARK, " ").encode()
    return result


def _step_types(description: dict[str, Any]) -> Iterator[str]:
    """The kinds of all steps of the normalizer, the pre-tokenizer and the decoder."""
    waiting = [description["normalizer"], description["pre_tokenizer"], description["decoder"]]
    while waiting:
        step = waiting.pop()
        if isinstance(step, dict):
            yield step.get("type", "")
            for name in ("normalizers", "pretokenizers", "decoders"):
                waiting.extend(step.get(name, ()))


def _adds_leading_space(description: dict[str, Any]) -> bool:
    """Whether encoding puts a space before the text, as Llama 2 does."""
    waiting = [description["normalizer"], description["pre_tokenizer"]]
    while waiting:
        step = waiting.pop()
        if not isinstance(step, dict):
            continue
        kind = step.get("type")
        if kind == "Prepend" or (kind == "Metaspace" and step.get("prepend_scheme", "always") != "never"):
            return True
        if kind == "ByteLevel" and step.get("add_prefix_space"):
            return True
        waiting += step.get("normalizers", []) + step.get("pretokenizers", [])
    return False


def _byte_letters() -> dict[int, str]:
    """GPT-2's letters for bytes: printable ones stand for themselves, the others for U+0100 and up."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    letters = {byte: chr(byte) for byte in printable}
    rest = [byte for byte in range(256) if byte not in letters]
    return letters | {byte: chr(256 + index) for index, byte in enumerate(rest)}


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path} is no JSON: {error}") from None
    if not isinstance(content, dict):
        raise UserError(f"{path} holds no JSON object")
    return content


def _eos_ids(
    tokenizer: Tokenizer, settings: dict[str, Any], config: dict[str, Any], generation: dict[str, Any]
) -> set[int]:
    """generation_config's ids, else config's, and the tokenizer's own end token."""
    value = generation.get("eos_token_id", config.get("eos_token_id"))
    if value is None:
        value = (config.get("text_config") or {}).get("eos_token_id")
    found = set(value) if isinstance(value, list) else {value}
    found.add(_named_token(tokenizer, settings.get("eos_token")))
    return {id for id in found if isinstance(id, int)}


def _bos(tokenizer: Tokenizer, settings: dict[str, Any], config: dict[str, Any]) -> int | None:
    named = _named_token(tokenizer, settings.get("bos_token"))
    fallback = config.get("bos_token_id") if "bos_token" not in settings else None
    return named if named is not None else fallback


def _named_token(tokenizer: Tokenizer, token: Any) -> int | None:
    """The id of a token given as text or as an object with `content`."""
    content = token.get("content") if isinstance(token, dict) else token
    return tokenizer.token_to_id(content) if isinstance(content, str) else None


def _chat_template(folder: Path, settings: dict[str, Any]) -> str | None:
    """chat_template.jinja, else tokenizer_config's; of several named ones the default."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):
        template = next((one.get("template") for one in template if one.get("name") == "default"), None)
    return template if isinstance(template, str) else None
