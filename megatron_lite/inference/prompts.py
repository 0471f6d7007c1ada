"""Text and conversations as tokens that a model expects, and the tokens at which it means to end."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from formats.ceilings import CONFIG_BYTES
from formats.errors import CorruptCheckpoint
from formats.regular_files import read_json
from megaconv.errors import UsageError
from megaconv.model.config import ModelConfig
from megatron_lite.data.templates import bounded
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
        said = [dict(message) for message in messages]
        ids = bounded(lambda: tokenizer.inner.apply_chat_template(said, add_generation_prompt=True))
    except Exception as error:  # templates raise what they like
        raise UsageError(f"the chat template refuses this conversation: {error}") from error
    return tuple(ids["input_ids"] if isinstance(ids, Mapping) else ids)


def stop_ids(config: ModelConfig, tokenizer: Tokenizer, files: Mapping[str, Path]) -> frozenset[int]:
    """Of the model's configuration, of the one for generation beside it, and of the tokenizer."""
    found = set(eos_of_generation(files))
    for ids in (config.eos_token_id, tokenizer.eod):
        if ids is not None:
            found |= {ids} if isinstance(ids, int) else set(ids)
    return frozenset(found)


def eos_of_generation(files: Mapping[str, Path]) -> list[int]:
    """Of the generation_config.json among a checkpoint's files. Raises CorruptCheckpoint."""
    path = files.get(GENERATION)
    if path is None:
        return []
    found = read_json(path, CONFIG_BYTES)
    if not isinstance(found, dict):
        raise CorruptCheckpoint(f"{path}: is not a JSON object")
    ids = found.get("eos_token_id")
    if ids is None:
        return []
    several = ids if isinstance(ids, list) else [ids]
    if not all(type(token) is int for token in several):
        raise CorruptCheckpoint(f"{path}: eos_token_id should be a token's id, or a list of them, found {ids!r:.60}")
    return several
