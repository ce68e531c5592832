"""Writes a tiny llama with random weights as a GGUF file; runs in .venv-engine.

    python -m tests.engine.make_model FILE

Two layers of 64 dimensions, a vocabulary of letters. Its greedy text is nonsense, but always the
same, and never ends by itself: the rows of the output that would make an end, or a byte that is
no text, are zero, and one of fifty random rows is always above zero.
"""

from __future__ import annotations

import string
import sys

import gguf
import numpy as np

LAYERS, WIDTH, HEADS, FEED_FORWARD, CONTEXT = 2, 64, 4, 128, 32768
LETTERS = [*string.ascii_lowercase, *string.digits, *("\u2581" + c for c in string.ascii_lowercase)]
# What llama.cpp cannot do without: unknown, begin, end, and the 256 bytes.
SPECIAL = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "assistant:"
)


def write_vocabulary(writer: gguf.GGUFWriter) -> int:
    """A SentencePiece vocabulary; its size."""
    tokens = SPECIAL + LETTERS
    kinds = [gguf.TokenType.NORMAL] * len(tokens)
    kinds[:3] = [gguf.TokenType.UNKNOWN, gguf.TokenType.CONTROL, gguf.TokenType.CONTROL]
    kinds[3:259] = [gguf.TokenType.BYTE] * 256
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * len(SPECIAL) + [-1.0 - i for i in range(len(LETTERS))])
    writer.add_token_types(kinds)
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(TEMPLATE)
    return len(tokens)


def write_weights(writer: gguf.GGUFWriter, vocabulary: int) -> None:
    """Every tensor of a llama, drawn at random from a fixed seed."""
    chance = np.random.default_rng(7)

    def draw(*shape: int) -> np.ndarray:
        return chance.normal(0, 0.3, shape).astype(np.float32)

    ones = np.ones(WIDTH, dtype=np.float32)
    output = draw(vocabulary, WIDTH)
    output[: len(SPECIAL)] = 0
    writer.add_tensor("token_embd.weight", draw(vocabulary, WIDTH))
    writer.add_tensor("output_norm.weight", ones)
    writer.add_tensor("output.weight", output)
    for layer in range(LAYERS):
        block = f"blk.{layer}."
        writer.add_tensor(block + "attn_norm.weight", ones)
        writer.add_tensor(block + "ffn_norm.weight", ones)
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            writer.add_tensor(f"{block}{name}.weight", draw(WIDTH, WIDTH))
        writer.add_tensor(block + "ffn_gate.weight", draw(FEED_FORWARD, WIDTH))
        writer.add_tensor(block + "ffn_up.weight", draw(FEED_FORWARD, WIDTH))
        writer.add_tensor(block + "ffn_down.weight", draw(WIDTH, FEED_FORWARD))


def main(path: str) -> None:
    """Write the file."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    write_weights(writer, write_vocabulary(writer))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main(sys.argv[1])
