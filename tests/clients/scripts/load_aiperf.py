"""AIPerf, a load client. Its tokenizer is made here: by itself it would download one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.clients.scripts.report import MODEL, report, target

URL, KEY = target()
COMMAND = str(Path(sys.executable).with_name("aiperf"))
REQUESTS, AT_ONCE, TOKENS = 60, 8, 20


def make_tokenizer(folder: Path) -> None:
    """A tokenizer of bytes: one token each."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={x: i for i, x in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)


def profile(kind: str, *more: str) -> dict[str, Any]:
    """One run: how many requests were answered, how many were not, and how many tokens came."""
    with tempfile.TemporaryDirectory() as scratch:
        make_tokenizer(Path(scratch, "bytes"))
        ran = subprocess.run(
            [COMMAND, "profile", "--model", MODEL, "--url", URL, "--endpoint-type", kind,
             "--api-key", KEY, "--tokenizer", "./bytes", "--concurrency", str(AT_ONCE),
             "--request-count", str(REQUESTS), "--isl", "50", "--random-seed", "1",
             "--ui", "none", "--artifact-dir", "artifacts", "--use-server-token-count", *more],
            cwd=scratch,
            env={**os.environ, "HOME": scratch},
            capture_output=True,
            check=False,
        )  # fmt: skip
        exported = Path(scratch, "artifacts", "profile_export_aiperf.json")
        if ran.returncode or not exported.exists():
            raise RuntimeError(f"aiperf ended with {ran.returncode}: {ran.stdout.decode()[-2000:]}")
        page = json.loads(exported.read_text())
    return {name: measured(page, name) for name in
            ("request_count", "error_request_count", "total_output_tokens")}  # fmt: skip


def measured(page: dict[str, Any], name: str) -> int:
    """A count of AIPerf's report; it leaves out what is 0."""
    return int((page.get(name) or {"avg": 0})["avg"])


def chat_streamed() -> Any:
    return profile("chat", "--streaming", "--extra-inputs", f"max_tokens:{TOKENS}")


def embeddings() -> Any:
    return profile("embeddings")


if __name__ == "__main__":
    report(
        "AIPerf",
        "aiperf",
        {
            f"chat, stream, {REQUESTS} requests, {AT_ONCE} at once": chat_streamed,
            f"embeddings, {REQUESTS} requests, {AT_ONCE} at once": embeddings,
        },
    )
