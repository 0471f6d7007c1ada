"""Text and conversations as tokens that a model expects, and the tokens at which it means to end."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from formats.errors import CorruptCheckpoint
from megaconv.errors import UsageError
from megaconv.model.config import ModelConfig
from megatron_lite.data.tokenizer import HuggingFaceTokenizer, Tokenizer

GENERATION = "generation_config.json"


def encode(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    """With the token that begins a text, where the model expects one. Raises UsageError for what has no tokens."""
    try:
        return (*tokenizer.begin, *tokenizer.tokenize(text))
    except ValueError as error:  # of the NullTokenizer
        raise UsageError(f"the prompt {text[:60]!r} is no row of token ids, and the model has no tokenizer") from error


def encode_chat(tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
    """As the tokenizer's own template says, up to where the assistant begins. Raises UsageError where there is none, or it refuses."""
    if not isinstance(tokenizer, HuggingFaceTokenizer) or not tokenizer.inner.chat_template:
        raise UsageError("the tokenizer has no chat template: the model was not made to chat; take `generate`")
    try:
        ids = tokenizer.inner.apply_chat_template([dict(message) for message in messages], add_generation_prompt=True)
    except Exception as error:  # templates raise what they like
        raise UsageError(f"the chat template refuses this conversation: {error}") from error
    return tuple(ids["input_ids"] if isinstance(ids, Mapping) else ids)


def stop_ids(config: ModelConfig, tokenizer: Tokenizer, files: Mapping[str, Path]) -> frozenset[int]:
    """Of the model's configuration, of the one for generation beside it, and of the tokenizer."""
    given = [config.eos_token_id, tokenizer.eod, _of_generation(files)]
    found: set[int] = set()
    for ids in given:
        if ids is not None:
            found |= {ids} if isinstance(ids, int) else set(ids)
    return frozenset(found)


def _of_generation(files: Mapping[str, Path]) -> Any:
    path = files.get(GENERATION)
    if path is None:
        return None
    try:
        return json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
    except (OSError, ValueError, AttributeError) as error:
        raise CorruptCheckpoint(f"{path}: is not a JSON object: {error}") from error
