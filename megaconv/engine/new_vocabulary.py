"""--vocab-size and --tokenizer: a model with more or fewer tokens, or with another tokenizer beside it."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from formats.tensor import LazyTensor
from formats.wording import counted
from megaconv.engine.derived import require_known
from megaconv.engine.new_tokenizer import NewTokenizer, tokenizer_files
from megaconv.engine.special_tokens import SPECIAL_IDS, Ids, listed, with_special_tokens
from megaconv.engine.token_lists import kinds_of, token_list
from megaconv.errors import NotExpressible, UsageError
from megaconv.families import family
from megaconv.families.parts.language_model import inner_config
from megaconv.families.parts.whole_model import with_values
from megaconv.model.config import ModelConfig
from megaconv.model.ir import Header, Key, Source, TensorInfo
from megaconv.model.table import canonical_shapes
from megaconv.options.vocabulary import MEAN, PIECES, ZERO, VocabularyChoice
from megaconv.values.cast import FLOATS
from megaconv.values.resized import ResizedTensor

_ASKED = "--vocab-size, --tokenizer"
"""The options, for messages."""


@dataclass(frozen=True)
class NewVocabulary:
    """A model's weights, with other rows at the end of its embedding and head."""

    whole: Source
    """The model as it was."""
    header: Header
    new: "_NewTokens"
    notices: Sequence[str]
    """For people: new rows, and new special tokens."""
    origins: Mapping[Key, Key] = field(default_factory=dict)
    """Empty: all tensors keep their names."""

    def tensors(self) -> Iterator[tuple[Key, LazyTensor]]:
        """Yield the tensors in the order of the manifest."""
        for key, tensor in self.whole.tensors():
            shape = self.header.manifest[key].shape
            resized = tuple(tensor.shape) != shape
            yield key, self.new.resized(tensor, shape[0]) if resized else tensor


@dataclass(frozen=True)
class _NewTokens:
    """The values of new rows."""

    zero: bool
    pieces: Mapping[int, Sequence[int]]

    def resized(self, tensor: LazyTensor, rows: int) -> ResizedTensor:
        return ResizedTensor(tensor, rows, self.pieces, self.zero)


def with_vocabulary(source: Source, chosen: VocabularyChoice, place: str) -> NewVocabulary:
    """The model with the chosen vocabulary and tokenizer.

    place: the source, for messages. Raises UsageError for a tokenizer that isn't one of this model, UnsupportedInput for
    adapters and models that megaconv doesn't know, NotExpressible for models with other tables by token.
    """
    header = source.header
    require_known(header, place, _ASKED)
    tokenizer = (
        None if chosen.tokenizer is None else NewTokenizer.of(chosen.tokenizer, header, place)
    )
    before, after = header.config.vocab, _size(header, chosen, tokenizer)
    pieces = {}
    if chosen.new_rows == PIECES and tokenizer is not None:
        pieces = tokenizer.pieces(range(before, after))
    manifest = _manifest(header, after)
    changed = [key for key, info in manifest.items() if info != header.manifest[key]]
    made = replace(
        header,
        config=_config(header.config, after, {} if tokenizer is None else tokenizer.special),
        manifest=manifest,
        padded_vocab=header.padded_vocab if before == after else None,
        read_otherwise=header.read_otherwise | frozenset(changed),
        has_optimizer=False,
    )
    notices = [*_notice_of_rows(before, after, chosen.new_rows, len(pieces))]
    if tokenizer is not None:
        copied, written = tokenizer.files_beside(header)
        made = replace(made, files=copied, made=written, named_tokenizer="")
        notices += tokenizer.notices(header.config)
    new = _NewTokens(chosen.new_rows == ZERO, pieces)
    return NewVocabulary(source, made, new, notices)


def _size(header: Header, chosen: VocabularyChoice, tokenizer: NewTokenizer | None) -> int:
    """The tokens of the output. Raises UsageError for fewer than its tokenizer has."""
    needed = 0 if tokenizer is None else tokenizer.tokens.count
    if chosen.size is None:
        return max(header.config.vocab, needed)
    if chosen.size < needed:
        raise UsageError(
            f"--vocab-size {chosen.size}: the tokenizer in {chosen.tokenizer} needs {needed} rows or more"
        )
    if chosen.size < header.config.vocab:
        _require_unused(header, chosen.size, own=tokenizer is None)
    return chosen.size


def _require_unused(header: Header, size: int, *, own: bool) -> None:
    """Raise UsageError if the last rows are of tokens in use. own: the input's own tokenizer stays."""
    files = tokenizer_files(header) if own else {}
    for kind in kinds_of(files)[:1]:
        needed = token_list(files, kind).count
        if size < needed:
            raise UsageError(
                f"--vocab-size {size}: the model's tokenizer needs {needed} rows or more; give --tokenizer with a smaller one"
            )
    for name in SPECIAL_IDS:
        ids = listed(getattr(header.config, name))
        if any(number >= size for number in ids):
            raise UsageError(
                f"--vocab-size {size}: the model's {name} is {max(ids)}; choose {max(ids) + 1} or more"
            )


def _manifest(header: Header, vocab: int) -> dict[Key, TensorInfo]:
    """The manifest for another number of tokens. Raises NotExpressible if more depends on it than rows of weights."""
    config = header.config
    if vocab == config.vocab:
        return dict(header.manifest)
    parts = {
        "embeddings in each layer": config.layer_inputs.vocab,
        "embeddings of n-grams": config.ngrams.size,
        "tokens that its head has no rows for": config.head.unpredicted,
    }
    for what, there in parts.items():
        if there:
            raise NotExpressible(
                f"{_ASKED}: a {config.family} with {what} can't have another vocabulary"
            )
    shapes = canonical_shapes(family(config.family).rows, replace(config, vocab=vocab))
    found = {}
    for key, info in header.manifest.items():
        shape = shapes.get(key.name, info.shape)  # others are outside of the language model
        if shape != info.shape:
            _require_rows(key, info, shape, config)
        found[key] = TensorInfo(shape, info.dtype)
    return found


def _require_rows(key: Key, info: TensorInfo, shape: tuple[int, ...], config: ModelConfig) -> None:
    is_by_token = info.shape[0] == config.vocab and info.shape[1:] == shape[1:]
    if not is_by_token or info.dtype not in FLOATS:
        raise NotExpressible(
            f"{_ASKED}: {key} of a {config.family} depends on the vocabulary, and no rows can be made for new tokens"
        )


def _config(config: ModelConfig, vocab: int, special: Ids) -> ModelConfig:
    made = with_special_tokens(replace(config, vocab=vocab), special)
    if made == config:
        return made
    if config.whole is not None:
        values = {name: (getattr(config, name), getattr(made, name)) for name in special}
        whole = with_values(config.whole, {"vocab_size": (config.vocab, vocab), **values})
        return replace(made, whole=whole, hf=inner_config(whole.config))
    if config.hf is None:
        return made
    changed: dict[str, Any] = json.loads(family(config.family).config_json(made))
    return replace(made, hf=changed)


def _notice_of_rows(before: int, after: int, new_rows: str, with_pieces: int) -> Iterator[str]:
    """Yield a line for people about the rows of the output, unless they are the input's."""
    gone, added = before - after, after - before
    if gone > 0:
        which = "the last row" if gone == 1 else f"the last {gone:,} rows"
        yield f"embedding and head lose {which}"
    if added > 0:
        values = {
            MEAN: "the mean of all old rows",
            ZERO: "zeros",
            PIECES: f"the mean of its text's old tokens ({with_pieces:,} of {added:,}), or of all old rows",
        }
        numbers = f"{before}" if added == 1 else f"{before} to {after - 1}"
        yield f"embedding and head get {counted(added, 'new row')} ({numbers}): {values[new_rows]}"
