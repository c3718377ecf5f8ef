"""The bytes of every id are right for both families of tokenizers, and two tokenizers can be compared."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from paceline.core.errors import UserError
from paceline.core.vocabulary import BLOCK_IDS, Vocabulary

LINES = [
    "Drafters propose, targets dispose: one forward pass verifies them all.",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich.",
    "速い茶色の狐は怠け者の犬を飛び越える。",
    "def accept(draft, target):\n    return [a for a, b in zip(draft, target) if a == b]\n",
    "🚴🚴🚴 ride in a paceline — one in front, the others behind.",
] * 3


def byte_level(vocabulary_size: int = 400, special: tuple[str, ...] = ("<|end|>", "<|user|>")) -> Tokenizer:
    """GPT-2, Llama 3 and Qwen's kind."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_size,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=list(special),
        show_progress=False,
    )
    tokenizer.train_from_iterator(LINES, trainer)
    tokenizer.add_tokens([AddedToken("<think>"), AddedToken("naïve", normalized=False)])
    return tokenizer


BYTE_TOKENS = [f"<0x{byte:02X}>" for byte in range(256)]


def llama_like() -> Tokenizer:
    """Llama 2's kind: BPE over ▁ pieces with <0xNN> for what has no piece."""
    learner = Tokenizer(models.BPE())
    learner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    learner.train_from_iterator(LINES[:2], trainers.BpeTrainer(vocab_size=150, show_progress=False))
    learned = json.loads(learner.to_str())["model"]
    pieces = ["<unk>", "<s>", "</s>", *BYTE_TOKENS, *learned["vocab"]]
    tokenizer = Tokenizer(
        models.BPE(
            {piece: id for id, piece in enumerate(pieces)},
            [tuple(pair) for pair in learned["merges"]],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


def unigram() -> Tokenizer:
    """T5 and Gemma's kind: a unigram model with byte fallback and Metaspace."""
    letters = sorted({letter for line in LINES[:2] for letter in line if letter != " "} | {"▁"})
    pieces = [("<unk>", 0.0), *[(token, -20.0) for token in BYTE_TOKENS]]
    pieces += [(letter, -5.0) for letter in letters] + [("▁one", -2.0), ("▁forward", -2.0), ("ers", -3.0)]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>"])
    return tokenizer


VOCABULARIES = {kind.__name__: Vocabulary(kind()) for kind in (byte_level, llama_like, unigram)}


@pytest.fixture(params=VOCABULARIES)
def vocabulary(request: pytest.FixtureRequest) -> Vocabulary:
    return VOCABULARIES[request.param]


def joined(vocabulary: Vocabulary, text: str) -> bytes:
    """The bytes of a text's tokens, without the leading space that some tokenizers add."""
    ids = vocabulary.encode(text, add_special_tokens=False)
    data = b"".join(vocabulary.token_bytes[id] for id in ids)
    return data[1:] if vocabulary.adds_leading_space and text and data[:1] == b" " else data


@pytest.mark.parametrize("text", [*LINES[:5], "", "two  spaces", "tab\tand\nline", "a<think>b", "café", "a naïve one"])
def test_tokens_join_to_the_text(vocabulary: Vocabulary, text: str) -> None:
    """The bytes of an encoding are the text's UTF-8, and decoding gives the text back."""
    assert joined(vocabulary, text) == text.encode()
    assert vocabulary.decode(vocabulary.encode(text, add_special_tokens=False)) == text


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(sorted(VOCABULARIES)), st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=30))
def test_any_text_survives(name: str, text: str) -> None:
    """Every text, of whatever script, is the join of its tokens; ▁ itself is a space to sentencepiece."""
    vocabulary = VOCABULARIES[name]
    if vocabulary.adds_leading_space and (text[:1] in (" ", "▁") or not text):
        return  # one leading space is the convention's own
    expected = text.replace("▁", " ") if name != "byte_level" else text
    assert joined(vocabulary, expected) == expected.encode()


def test_special_ids_and_added_tokens() -> None:
    """Special tokens are known and skipped in text; added ones are ordinary text of one id."""
    vocabulary = VOCABULARIES["byte_level"]
    assert vocabulary.special_ids == {0, 1}
    assert vocabulary.token_bytes[0] == b"<|end|>"
    ids = vocabulary.encode("<|user|>hi<think><|end|>")
    assert ids[0] == 1 and ids[-1] == 0 and vocabulary.token_bytes[ids[-2]] == b"<think>"
    assert vocabulary.decode(ids) == "hi<think>"
    assert vocabulary.decode(ids, skip_special_tokens=False) == "<|user|>hi<think><|end|>"


def test_ids_past_the_vocabulary_say_nothing() -> None:
    """A padded tail, a negative id: no text, no error; a cut character is marked."""
    vocabulary = VOCABULARIES["byte_level"]
    assert vocabulary.decode([vocabulary.size, 10**6, -1]) == ""
    cut = [id for id, data in enumerate(vocabulary.token_bytes) if data == "é".encode()[:1]]
    assert vocabulary.decode(cut) == "\N{REPLACEMENT CHARACTER}"


def test_equal_tokenizers_have_equal_fingerprints() -> None:
    """The fingerprint depends on ids and bytes alone."""
    one, same = VOCABULARIES["byte_level"], Vocabulary(byte_level())
    assert one.identity == same.identity
    assert len(one.fingerprint) == 32 and len(one.block_hashes) == 4 * -(-one.size // BLOCK_IDS)


def test_a_different_tokenizer_differs_from_its_first_different_block_on() -> None:
    """One more merge shows in the last block only; another special token shows at the front."""
    one, longer = VOCABULARIES["byte_level"], Vocabulary(byte_level(410))
    assert one.fingerprint != longer.fingerprint
    assert one.block_hashes[:4] == longer.block_hashes[:4] and one.block_hashes[4:] != longer.block_hashes[4:]
    renamed = Vocabulary(byte_level(special=("<|end|>", "<|USER|>")))
    assert one.block_hashes[:4] != renamed.block_hashes[:4] and one.block_hashes[4:] == renamed.block_hashes[4:]


def test_special_or_not_is_part_of_the_fingerprint() -> None:
    """The same text as an ordinary token is another vocabulary."""
    ordinary, special = byte_level(), byte_level()
    ordinary.add_tokens([AddedToken("<x>", special=False)])
    special.add_special_tokens([AddedToken("<x>", special=True)])
    assert Vocabulary(ordinary).size == Vocabulary(special).size
    assert Vocabulary(ordinary).fingerprint != Vocabulary(special).fingerprint


def write(folder: Path, **files: object) -> Path:
    """A model folder with a tokenizer and these JSON files."""
    byte_level().save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def test_a_folder_gives_end_tokens_start_token_and_template(tmp_path: Path) -> None:
    """End ids come from generation_config and the tokenizer's own end token."""
    folder = write(
        tmp_path,
        tokenizer_config={"eos_token": {"content": "<|user|>"}, "bos_token": "<|end|>", "chat_template": "{{x}}"},
        generation_config={"eos_token_id": [0, 5]},
        config={"eos_token_id": 77},
    )
    vocabulary = Vocabulary.load(folder)
    assert vocabulary.eos_ids == {0, 1, 5} and vocabulary.bos == 0 and vocabulary.chat_template == "{{x}}"
    (folder / "chat_template.jinja").write_text("{{newer}}")
    assert Vocabulary.load(folder).chat_template == "{{newer}}"


def test_config_stands_in_for_a_missing_generation_config(tmp_path: Path) -> None:
    """Nested text configs and null tokens are understood."""
    vocabulary = Vocabulary.load(write(tmp_path, config={"text_config": {"eos_token_id": 9}, "bos_token_id": 3}))
    assert vocabulary.eos_ids == {9} and vocabulary.bos == 3 and vocabulary.chat_template is None
    write(tmp_path, config={"eos_token_id": 8, "bos_token_id": 3}, tokenizer_config={"bos_token": None})
    vocabulary = Vocabulary.load(tmp_path)
    assert vocabulary.eos_ids == {8} and vocabulary.bos is None


def test_a_named_template_list_gives_its_default(tmp_path: Path) -> None:
    """Several templates: the one called default."""
    templates = [{"name": "tools", "template": "T"}, {"name": "default", "template": "D"}]
    assert Vocabulary.load(write(tmp_path, tokenizer_config={"chat_template": templates})).chat_template == "D"


def test_padding_and_truncation_in_the_file_are_switched_off(tmp_path: Path) -> None:
    """Some files carry settings of their training; encodings must be whole."""
    tokenizer = byte_level()
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=50)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    vocabulary = Vocabulary.load(tmp_path)
    assert vocabulary.decode(vocabulary.encode(LINES[0])) == LINES[0]


def test_a_missing_or_broken_file_is_one_sentence(tmp_path: Path) -> None:
    """The path is named."""
    with pytest.raises(UserError, match=r"tokenizer\.json does not exist"):
        Vocabulary.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match=r"tokenizer\.json is no tokenizer"):
        Vocabulary.load(tmp_path)
    write(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match=r"config\.json is no JSON"):
        Vocabulary.load(tmp_path)


def test_a_tokenizer_without_fixed_bytes_is_refused() -> None:
    """WordPiece loses spaces: no honest bytes exist."""
    with pytest.raises(UserError, match="WordPiece tokenizer"):
        Vocabulary(Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]")))


def test_neither_torch_nor_transformers_is_imported(tmp_path: Path) -> None:
    """An edge device has neither; tokenizers itself comes late."""
    code = (
        "import sys, paceline.core.vocabulary; assert 'tokenizers' not in sys.modules;"
        "import tokenizers; assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path)
