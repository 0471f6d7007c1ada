"""--vocab-size, --pad-to-multiple-of and --tokenizer: a model with more or fewer tokens, or with another tokenizer beside it."""

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from formats.tensor import LazyTensor
from formats.wording import counted
from megaconv.engine.completeness import GENERATION
from megaconv.engine.derived import derived_header, require_known
from megaconv.engine.new_tokenizer import NewTokenizer, generation_file, tokenizer_files
from megaconv.engine.special_tokens import SPECIAL_IDS, SpecialTokens, largest_token
from megaconv.engine.token_lists import kinds_of, token_list
from megaconv.errors import CheckpointError, NotExpressible, UsageError
from megaconv.families import family
from megaconv.families.parts.language_model import inner_config
from megaconv.families.parts.whole_model import with_values
from megaconv.model.config import ModelConfig
from megaconv.model.ir import Header, Key, Source, TensorInfo
from megaconv.model.table import canonical_shapes
from megaconv.options.vocabulary import MEAN, PIECES, ZERO, VocabularyChoice
from megaconv.values.cast import FLOATS
from megaconv.values.resized import ResizedTensor


@dataclass(frozen=True)
class NewVocabulary:
    """A model's weights, with other rows in its embedding and head."""

    whole: Source
    """The model as it was."""
    header: Header
    tables: Collection[Key]
    """The tensors with a row for each token, if any of these rows changes."""
    new: "_NewRows"
    notices: Sequence[str]
    """For people: new rows, and new special tokens."""
    origins: Mapping[Key, Key] = field(default_factory=dict)
    """Empty: all tensors keep their names."""

    def tensors(self) -> Iterator[tuple[Key, LazyTensor]]:
        """Yield the tensors in the order of the manifest."""
        for key, tensor in self.whole.tensors():
            rows = self.header.manifest[key].shape[0] if key in self.tables else 0
            yield key, self.new.resized(tensor, rows) if rows else tensor


@dataclass(frozen=True)
class _NewRows:
    """The values of new rows."""

    zero: bool
    pieces: Mapping[int, Sequence[int]]
    filled: Collection[int]
    """Rows that the model has already and that get new values too."""

    def resized(self, tensor: LazyTensor, rows: int) -> ResizedTensor:
        return ResizedTensor(tensor, rows, self.pieces, self.zero, frozenset(self.filled))


def with_vocabulary(source: Source, chosen: VocabularyChoice, place: str) -> NewVocabulary:
    """The model with the chosen vocabulary and tokenizer.

    place: the source, for messages. Raises UsageError for a tokenizer that isn't one of this model, UnsupportedInput for
    adapters and models that megaconv doesn't know, NotExpressible for models with other tables by token.
    """
    header = source.header
    require_known(header, place, chosen.asked)
    tokenizer = (
        None if chosen.tokenizer is None else NewTokenizer.of(chosen.tokenizer, header, place)
    )
    special = SpecialTokens() if tokenizer is None else tokenizer.special
    before, after = header.config.vocab, _size(header, chosen, tokenizer, place)
    tokens = 0 if tokenizer is None else tokenizer.tokens.count
    present = [] if tokenizer is None else tokenizer.in_present_rows(min(before, after))
    filled = present if chosen.new_rows is not None else []
    changed = [*filled, *range(before, after)]
    pieces: Mapping[int, Sequence[int]] = {}
    if chosen.new_rows == PIECES and tokenizer is not None:
        pieces = tokenizer.pieces(changed, before)
    tables = _tables(header, chosen.asked) if before != after or filled else []
    manifest = _manifest(header, tables, after)
    config = _config(_with_tokens(header.config, after, tokens), header.config, special)
    made = replace(
        derived_header(header, config, manifest, origins={}, altered=tables),
        padded_vocab=header.padded_vocab if before == after else None,
    )
    notices = [*_notice_of_rows(before, after, changed, chosen.new_rows or MEAN, len(pieces))]
    if present and not filled:
        notices.append(_notice_of_present(present))
    if tokenizer is not None:
        copied, written = tokenizer.files_beside(header)
        made = replace(made, files=copied, made=written, named_tokenizer="")
        notices += tokenizer.notices(header)
    new = _NewRows(chosen.new_rows == ZERO, pieces, filled)
    return NewVocabulary(source, made, frozenset(tables), new, notices)


def _size(
    header: Header, chosen: VocabularyChoice, tokenizer: NewTokenizer | None, place: str
) -> int:
    """The tokens of the output. Raises UsageError for fewer than its tokenizer has."""
    needed = 0 if tokenizer is None else tokenizer.tokens.count
    if chosen.size is None:
        return chosen.padded(max(header.config.vocab, needed))
    if chosen.size < needed:
        raise UsageError(
            f"--vocab-size {chosen.size}: the tokenizer in {chosen.tokenizer} needs {needed} rows or more"
        )
    if chosen.size < header.config.vocab:
        _require_unused(header, chosen.size, tokenizer, place)
    return chosen.padded(chosen.size)


def _require_unused(header: Header, size: int, tokenizer: NewTokenizer | None, place: str) -> None:
    """Raise UsageError if the last rows are of tokens in use. tokenizer: None if the input's own stays."""
    files = tokenizer_files(header) if tokenizer is None else {}
    for kind in kinds_of(files)[:1]:
        needed = token_list(files, kind).count
        if size < needed:
            raise UsageError(
                f"--vocab-size {size}: the model's tokenizer needs {needed} rows or more; give --tokenizer with a smaller one"
            )
    special = SpecialTokens() if tokenizer is None else tokenizer.special
    made = _config(header.config, header.config, special)
    whole = None if made.whole is None else made.whole.config
    generation = generation_file(header)
    fields = {name: getattr(made, name) for name in SPECIAL_IDS}
    named = {
        "config.json": max(map(largest_token, (fields, made.hf, whole))),
        GENERATION: -1 if generation is None else largest_token(special.of_generation(generation)),
    }
    for name, number in named.items():
        if number >= size:
            remedy = (
                f"choose {number + 1} or more"
                if number < header.config.vocab
                else "correct the file"
            )
            raise UsageError(
                f"--vocab-size {size}: {name} of {place} names the token {number}; {remedy}"
            )


def _tables(header: Header, asked: str) -> list[Key]:
    """The tensors with a row for each token. Raises NotExpressible if more depends on the vocabulary.

    asked: the options, for messages.
    """
    config = header.config
    parts = {
        "embeddings in each layer": config.layer_inputs.vocab,
        "embeddings of n-grams": config.ngrams.size,
        "tokens that its head has no rows for": config.head.unpredicted,
    }
    for what, there in parts.items():
        if there:
            raise NotExpressible(
                f"{asked}: a {config.family} with {what} can't have another vocabulary"
            )
    larger = canonical_shapes(family(config.family).rows, replace(config, vocab=config.vocab + 1))
    found = []
    for key, info in header.manifest.items():
        shape = larger.get(key.name, info.shape)  # others are outside of the language model
        if shape == info.shape:
            continue
        if shape != (config.vocab + 1, *info.shape[1:]) or info.dtype not in FLOATS:
            raise NotExpressible(
                f"{asked}: {key} of a {config.family} depends on the vocabulary, and no rows can be made for new tokens"
            )
        found.append(key)
    return found


def _manifest(header: Header, tables: Collection[Key], vocab: int) -> dict[Key, TensorInfo]:
    """The manifest with another number of tokens."""
    resized = {
        key: TensorInfo((vocab, *header.manifest[key].shape[1:]), header.manifest[key].dtype)
        for key in tables
    }
    return {**header.manifest, **resized}


def _with_tokens(config: ModelConfig, vocab: int, tokens: int) -> ModelConfig:
    """The configuration with another number of rows. tokens: those of a new tokenizer; 0: the model's own stays.

    A head that leaves out logits leaves out those of new rows too, as after transformers' resize_token_embeddings, but
    none of a token.
    """
    head = config.head
    if head.left_out:
        predicted = max(config.vocab - head.left_out, tokens)
        head = replace(head, left_out=max(0, vocab - predicted))
    return replace(config, vocab=vocab, head=head)


def _config(resized: ModelConfig, config: ModelConfig, special: SpecialTokens) -> ModelConfig:
    """The configuration of the output. resized: with its number of rows. config: the input's."""
    made = special.of(resized)
    if made == config:
        return made
    if config.whole is not None:
        whole = with_values(config.whole, _changed_keys(config, made, special))
        return replace(made, whole=whole, hf=inner_config(whole.config))
    if config.hf is None:
        return made
    try:
        changed: dict[str, Any] = json.loads(family(config.family).config_json(made))
    except CheckpointError as error:
        if not special.numbers:
            raise
        names = ", ".join(f"{name} {number}" for name, number in special.numbers.items())
        raise NotExpressible(
            f"--tokenizer: the model can't have the special tokens of this tokenizer ({names}): {error}"
        ) from error
    return replace(made, hf=changed)


def _changed_keys(
    config: ModelConfig, made: ModelConfig, special: SpecialTokens
) -> dict[str, tuple[Any, Any]]:
    """Keys of a multimodal model's config.json about tokens -> (value before, value now)."""
    found: dict[str, tuple[Any, Any]] = {"vocab_size": (config.vocab, made.vocab)}
    found |= {name: (getattr(config, name), getattr(made, name)) for name in special.numbers}
    if made.head != config.head:
        before, now = (family(each.family).write_hf(each) for each in (config, made))
        found |= {key: (before.get(key), now[key]) for key in now if now[key] != before.get(key)}
    return found


def _notice_of_rows(
    before: int, after: int, changed: Sequence[int], new_rows: str, with_pieces: int
) -> Iterator[str]:
    """Yield lines for people about rows that go, come and change."""
    gone, added, filled = before - after, after - before, len(changed) - max(0, after - before)
    if gone > 0:
        which = "the last row" if gone == 1 else f"the last {gone:,} rows"
        yield f"embedding and head lose {which}"
    values = {
        MEAN: "the mean of all old rows",
        ZERO: "zeros",
        PIECES: f"the mean of its text's old tokens ({with_pieces:,} of {len(changed):,}), or of all old rows",
    }
    if filled:
        rows = counted(filled, "row of a new token", "rows of new tokens")
        yield f"{rows} ({_span(changed[:filled])}) in embedding and head: {values[new_rows]}"
    if added > 0:
        rows = counted(added, "new row")
        yield f"embedding and head get {rows} ({_span(changed[filled:])}): {values[new_rows]}"


def _notice_of_present(present: Sequence[int]) -> str:
    take = "takes a row" if len(present) == 1 else "take rows"
    return (
        f"{counted(len(present), 'new token')} {take} that the model has already ({_span(present)}), with their values; --new-rows gives "
        "them other values"
    )


def _span(rows: Sequence[int]) -> str:
    return str(rows[0]) if len(rows) == 1 else f"{rows[0]} to {rows[-1]}"
