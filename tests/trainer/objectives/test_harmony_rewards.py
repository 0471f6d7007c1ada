"""Reward functions get completions of GPT-OSS as messages: the answer is the content, and the thinking is apart."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_lite.data.finetuning.forms import Message
from megatron_lite.inference.prompts import encode, encode_chat
from megatron_lite.objectives.prompts import Prompt
from megatron_lite.objectives.sampler import Sampler
from megatron_lite.settings.grpo import Grpo
from tests.trainer.harmony_model import tokenizer_of

pytest.importorskip("transformers", reason="transformers is not installed")

ASKED: list[Message] = [{"role": "user", "content": "2 + 2?"}]
THINKING = "<|channel|>analysis<|message|>I add.<|end|><|start|>assistant"


@pytest.mark.parametrize(
    ("written", "message"),
    [
        (
            f"{THINKING}<|channel|>final<|message|>4<|return|>",
            {"content": "4", "reasoning_content": "I add."},
        ),
        (f"{THINKING}<|channel|>final<|message|>4", {"content": "4", "reasoning_content": "I add."}),
        ("<|channel|>final<|message|>4<|return|>", {"content": "4"}),
        ("<|channel|>analysis<|message|>I a", {"content": "", "reasoning_content": "I a"}),
    ],
)  # fmt: skip
def test_thinking_is_apart_from_content(
    written: str, message: dict[str, str], tmp_path: Path
) -> None:
    tokenizer = tokenizer_of(tmp_path)
    engine: Any = None
    stops = frozenset(tokenizer.tokenize("<|return|><|call|>"))
    sampler = Sampler(engine, tokenizer, stops, (), Grpo(), 1)
    chat = Prompt("", ASKED, np.array(encode_chat(tokenizer, ASKED)), {})
    plain = Prompt("", "2 + 2?", np.array(encode(tokenizer, "2 + 2?")), {})
    tokens = tokenizer.tokenize(written)
    offered = sampler._offered([chat, plain], [tokens, tokens])
    as_message, as_text = offered["completions"]
    assert as_message == [{"role": "assistant", **message}]
    assert as_text == tokenizer.detokenize(tokens)
