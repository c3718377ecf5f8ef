"""The GGUF conversion, against plain references and against transformers on a small hand-made file."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("gguf")
torch = pytest.importorskip("torch")

import gguf  # noqa: E402
from tokenizers import Tokenizer, pre_tokenizers  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM  # noqa: E402

from paceline.core.errors import UnsupportedModel  # noqa: E402
from paceline.export.gguf import convert, hugging_face_name, unpermute  # noqa: E402

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ w"]
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
TOKENS = [*SPECIAL, *ALPHABET, "he", "ll", "hell", "hello", "Ġw"]
TEMPLATE = "{% for message in messages %}<|im_start|>{{ message['content'] }}<|im_end|>{% endfor %}"
QUANTISED = gguf.GGMLQuantizationType.Q4_1


def reference_q4_1(blocks: np.ndarray) -> np.ndarray:
    """One Q4_1 block at a time: fp16 scale and minimum, then values 0..15 in low nibbles, 16..31 in high ones."""
    values = []
    for block in blocks.reshape(-1, 20):
        scale, minimum = block[:4].view(np.float16).astype(np.float32)
        nibbles = [byte & 15 for byte in block[4:]] + [byte >> 4 for byte in block[4:]]
        values.extend(scale * nibble + minimum for nibble in nibbles)
    return np.asarray(values, dtype=np.float32)


def reference_q8_0(blocks: np.ndarray) -> np.ndarray:
    """One Q8_0 block at a time: fp16 scale, 32 signed bytes."""
    values = []
    for block in blocks.reshape(-1, 34):
        scale = block[:2].view(np.float16).astype(np.float32)[0]
        values.extend(scale * value for value in block[2:].view(np.int8).astype(np.float32))
    return np.asarray(values, dtype=np.float32)


def permute(weight: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's converter does to query and key projections."""
    rows, columns = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def small_model() -> LlamaForCausalLM:
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=len(TOKENS), hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, tie_word_embeddings=True, rms_norm_eps=1e-5,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def write_gguf(path: Path, model: LlamaForCausalLM, split: str = "smollm") -> None:
    """The model as llama.cpp would store it, projections in Q4_1; what they became is written back into the model."""
    writer = gguf.GGUFWriter(path, "llama")
    config = model.config
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(split)
    writer.add_token_list(TOKENS)
    writer.add_token_types([gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * (len(TOKENS) - 3))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
    names = {hugging_face_name(f"blk.{layer}.{part}.weight"): f"blk.{layer}.{part}.weight"
             for layer in range(2) for part in ("attn_norm", "ffn_norm", "attn_q", "attn_k", "attn_v", "attn_output",
                                                "ffn_gate", "ffn_up", "ffn_down")}  # fmt: skip
    names |= {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, parameter in model.named_parameters():
        values = parameter.detach().numpy()
        if "proj" in name:
            turned = next((permute(values, count) for part, count in heads.items() if part in name), values)
            blocks = gguf.quants.quantize(turned, QUANTISED)
            writer.add_tensor(names[name], blocks, raw_dtype=QUANTISED)
            exact = reference_q4_1(blocks).reshape(values.shape)
            restored = next((unpermute(exact, count) for part, count in heads.items() if part in name), exact)
            parameter.data = torch.from_numpy(np.ascontiguousarray(restored))
        else:
            writer.add_tensor(names[name], values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("kind, block, reference", [("Q4_1", 20, reference_q4_1), ("Q8_0", 34, reference_q8_0)])
def test_blocks_dequantise_as_the_format_says(kind, block, reference):
    generator = np.random.default_rng(5)
    blocks = generator.integers(0, 256, (7, 3 * block), dtype=np.uint8)
    scales = blocks.reshape(-1, block)[:, : 4 if kind == "Q4_1" else 2]
    scales[:] = generator.normal(size=(21, scales.shape[1] // 2)).astype(np.float16).view(np.uint8)
    values = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[kind])
    np.testing.assert_allclose(values.ravel(), reference(blocks), rtol=1e-6, atol=1e-6)


def test_unpermute_undoes_the_interleaving_of_llama_cpp():
    weight = np.arange(8 * 3, dtype=np.float32).reshape(8, 3)
    turned = permute(weight, heads=2)
    assert turned[:, 0].tolist() == [0, 6, 3, 9, 12, 18, 15, 21]
    np.testing.assert_array_equal(unpermute(turned, heads=2), weight)


def test_a_converted_file_gives_the_logits_of_the_model_it_was_made_from(tmp_path):
    model = small_model()
    write_gguf(tmp_path / "small.gguf", model)
    convert(tmp_path / "small.gguf", tmp_path / "out", np.float32)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    ids = torch.arange(24)[None]
    with torch.no_grad():
        torch.testing.assert_close(again(ids).logits, model(ids).logits, rtol=1e-5, atol=1e-5)


def test_the_tokenizer_merges_splits_digits_and_keeps_special_tokens_whole(tmp_path):
    write_gguf(tmp_path / "small.gguf", small_model())
    convert(tmp_path / "small.gguf", tmp_path / "out")
    tokenizer = Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    assert tokenizer.encode("<|im_start|>hello w12").tokens == ["<|im_start|>", "hello", "Ġw", "1", "2"]
    text = "hello wörld 2026 ✓"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_chat_template_and_special_tokens_survive(tmp_path):
    write_gguf(tmp_path / "small.gguf", small_model())
    convert(tmp_path / "small.gguf", tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "hello"}], tokenize=False)
    assert (chat, tokenizer.eos_token_id) == ("<|im_start|>hello<|im_end|>", 2)
    generation = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert generation == {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}


def test_an_unknown_pre_tokenizer_is_refused_by_name(tmp_path):
    write_gguf(tmp_path / "small.gguf", small_model(), split="tekken")
    with pytest.raises(UnsupportedModel, match="tekken"):
        convert(tmp_path / "small.gguf", tmp_path / "out")


def test_an_unknown_tensor_is_refused_by_name():
    with pytest.raises(UnsupportedModel, match="rope_freqs"):
        hugging_face_name("rope_freqs.weight")
