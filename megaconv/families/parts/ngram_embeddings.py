"""Embeddings of n-grams in some layers, whose rows hashes of the last tokens choose (Qwen4-Exp): their rows and their keys.

    hf     model.layers.{l}.ple.{ple_embedding, key_proj, value_proj, norm_key, norm_query, norm_conv, conv1d}

The table of a layer is ple_embedding.ngram_embedding.weight in transformers' class, and split_ngram_parts tensors
(ngram_embedding.shard_{p}.weight) in files. Each hash has a prime number of rows, so that the rows of a table follow from
the keys and from the number of tables before it. Files may hold the numbers of the hashes, which follow from the keys too.
Source: Qwen4ExpTextPLELayer and Qwen4ExpTextNGramEmbedding of transformers 5.23, and its conversion_mapping.py.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

from formats.tensor import LazyTensor
from megaconv.errors import CorruptCheckpoint
from megaconv.families.parts.keys import CONFIG_NAME, Fields, Keys, Raw, need_size
from megaconv.model.ceilings import EXPERTS, VOCABULARY
from megaconv.model.config import ModelConfig
from megaconv.model.fields import changed, one_or_each
from megaconv.model.table import Row, RowParts

_HF = "model.layers.{l}.ple."
_TABLE = _HF + "ple_embedding.ngram_embedding."
_STREAMS = "hyper_streams*hidden"
NGRAM_EMBEDDINGS = (
    Row("layers.{l}.ngrams.embed.weight", ("ngram_rows ngram_row_width",), when="ngrams",
        hf=RowParts(_TABLE + "shard_{p}.weight", parts="ngram_parts", whole=_TABLE + "weight")),
    Row("layers.{l}.ngrams.hash.{multipliers|sizes|offsets}", ("ngram_size", "ngram_hashes", "ngram_hashes"),
        when="ngrams ngram_hashes",
        hf=_HF + "ple_embedding.{layer_multipliers|ngram_heads_vocab_sizes|ngram_heads_offsets}"),
    Row("layers.{l}.ngrams.{key|value}.weight", (f"{_STREAMS} ngram_width", "hidden ngram_width"), when="ngrams",
        hf=_HF + "{key_proj|value_proj}.weight"),
    Row("layers.{l}.ngrams.{key|query|conv}_norm.weight", (_STREAMS, _STREAMS, _STREAMS), when="ngrams",
        hf=_HF + "{norm_key|norm_query|norm_conv}.weight"),
    Row("layers.{l}.ngrams.conv.weight", (f"{_STREAMS} 1 ngram_conv",), when="ngrams",
        hf=_HF + "conv1d.weight"),
)  # fmt: skip

_PART = re.compile(r".*\.ple_embedding\.ngram_embedding\.shard_(\d+)\.weight")
_WHOLE, _HASHES = ".ple_embedding.ngram_embedding.weight", ".ple_embedding.layer_multipliers"


def with_stored_form(config: ModelConfig, tensors: Mapping[str, LazyTensor]) -> ModelConfig:
    """The model with the form that its files have: the parts of the tables, and the numbers of the hashes if they are
    there."""
    found = [match for match in map(_PART.fullmatch, tensors) if match]
    parts = max((int(match[1]) + 1 for match in found), default=0)
    is_whole = any(name.endswith(_WHOLE) for name in tensors)
    stored = min(parts, len(tensors)) if parts else 0 if is_whole else None
    hashes = any(name.endswith(_HASHES) for name in tensors)
    return changed(config, {"ngrams.stored_parts": stored, "ngrams.stored_hashes": hashes})


_LAYERS, _WIDTH = "ple_layer_ids", "ple_embed_dim"
_SIZES = {
    "ngrams.size": ("ngram_size", 3),
    "ngrams.heads": ("heads_per_ngram", 8),
    "ngrams.conv": ("ple_conv_kernel_size", 4),
    "ngrams.vocab": ("ngram_vocab_size_base", 20_000_000),
    "ngrams.multiple": ("make_ngram_vocab_size_divisible_by", 128),
    "ngrams.parts": ("split_ngram_parts", 512),
}
"""Field -> its key and its default."""
_SEED, _USUAL_SEED = "seed", 1234
_ALL_HASHES = 4096
"""Limit of hashes of all layers. Each needs a prime number of its own. Qwen4-Exp has 16 in a layer."""
_ALL_PARTS = 250_000
"""Limit of the parts of all layers."""


def ngram_keys(mixers: Callable[[Raw], Sequence[str]]) -> Keys:
    """The keys of embeddings of n-grams. mixers: a function that returns the mixer of each layer."""

    def read(raw: Raw) -> Fields:
        chosen = _layers(raw, mixers(raw))
        if not chosen:
            return {}
        found = {field: need_size(raw, key, usual) for field, (key, usual) in _SIZES.items()}
        found["ngrams.width"] = need_size(raw, _WIDTH, need_size(raw, "hidden_size"))
        found["ngrams.seed"] = _seed(raw)
        _require_possible(found, len(chosen))
        tables = _rows_of_tables(
            found["ngrams.vocab"],
            found["ngrams.multiple"],
            (found["ngrams.size"] - 1) * found["ngrams.heads"],
            len(chosen),
        )
        rows = [0] * need_size(raw, "num_hidden_layers")
        for layer, table in zip(chosen, tables, strict=True):
            rows[layer] = table
        return {**found, "layers.ngram_rows": one_or_each(tuple(rows))}

    names = (_LAYERS, _WIDTH, _SEED, *(key for key, _ in _SIZES.values()))
    return Keys(names, read, _write)


def _layers(raw: Raw, mixers: Sequence[str]) -> list[int]:
    """The layers with a table, counted from 0."""
    listed: Any = raw.get(_LAYERS) or []
    in_range = isinstance(listed, list) and all(
        type(layer) is int and 1 <= layer <= len(mixers) for layer in listed
    )
    if not in_range:
        raise CorruptCheckpoint(
            f"{CONFIG_NAME}: {_LAYERS} should list layers from 1 to {len(mixers)}, found {listed!r:.60}"
        )
    chosen = sorted({layer - 1 for layer in listed})
    for layer in chosen:
        if mixers[layer] != "linear":
            raise CorruptCheckpoint(
                f"{CONFIG_NAME}: {_LAYERS} has layer {layer + 1}, which is no layer of linear_attention; only these are supported"
            )
    if chosen and raw.get("eos_token_id") in (None, []):
        raise CorruptCheckpoint(
            f"{CONFIG_NAME}: eos_token_id should be the token at which n-grams end, found {raw.get('eos_token_id')!r}"
        )
    return chosen


def _seed(raw: Raw) -> int:
    seed = raw.get(_SEED, _USUAL_SEED)
    if type(seed) is not int:
        raise CorruptCheckpoint(f"{CONFIG_NAME}: {_SEED} should be a number, found {seed!r:.60}")
    return seed


def _require_possible(found: Mapping[str, int], layers: int) -> None:
    """Raise CorruptCheckpoint for sizes that no model has, before anything of that size is computed."""
    for field, ceiling in (("vocab", VOCABULARY), ("multiple", VOCABULARY), ("size", EXPERTS)):
        if found[f"ngrams.{field}"] > ceiling:
            raise CorruptCheckpoint(
                f"{CONFIG_NAME}: {_SIZES[f'ngrams.{field}'][0]} should be at most {ceiling:,}"
            )
    hashes, width = (found["ngrams.size"] - 1) * found["ngrams.heads"], found["ngrams.width"]
    if not hashes or width % hashes:
        raise CorruptCheckpoint(
            f"{CONFIG_NAME}: {_WIDTH} {width} can't be divided among {hashes} hashes (ngram_size - 1 times heads_per_ngram)"
        )
    if hashes * layers > _ALL_HASHES:
        raise CorruptCheckpoint(
            f"{CONFIG_NAME}: the model can't have {hashes:,} hashes in {layers} layers; there may be {_ALL_HASHES:,} in all"
        )
    if found["ngrams.parts"] * layers > _ALL_PARTS:
        raise CorruptCheckpoint(
            f"{CONFIG_NAME}: the model can't have tables of {found['ngrams.parts']:,} parts in {layers} layers; "
            f"there may be {_ALL_PARTS:,} in all"
        )


@cache
def _rows_of_tables(vocab: int, multiple: int, hashes: int, layers: int) -> tuple[int, ...]:
    """The rows of each layer's table: the sum of its primes, rounded up."""
    primes = _primes(vocab, hashes * layers)
    sums = (sum(primes[first : first + hashes]) for first in range(0, len(primes), hashes))
    return tuple(multiple * -(-rows // multiple) for rows in sums)


def _primes(least: int, count: int) -> list[int]:
    """The first prime numbers that are not below `least`."""
    found: list[int] = []
    number = least
    while len(found) < count:
        if _is_prime(number):
            found.append(number)
        number += 1
    return found


_WITNESSES = (2, 3, 5, 7, 11, 13)
"""Bases of the test of Miller and Rabin that is right for all numbers below 3 * 10^12."""


def _is_prime(number: int) -> bool:
    if number < 2:
        return False
    if any(number % small == 0 for small in _WITNESSES):
        return number in _WITNESSES
    odd, twos = number - 1, 0
    while odd % 2 == 0:
        odd, twos = odd // 2, twos + 1
    return all(_passes(base, number, odd, twos) for base in _WITNESSES)


def _passes(base: int, number: int, odd: int, twos: int) -> bool:
    """True if a base doesn't show that the number, which is odd * 2^twos + 1, has factors."""
    power = pow(base, odd, number)
    if power in (1, number - 1):
        return True
    for _ in range(twos - 1):
        power = power * power % number
        if power == number - 1:
            return True
    return False


def _write(config: ModelConfig) -> Raw:
    ngrams = config.ngrams
    chosen = [layer + 1 for layer, kind in enumerate(config.layers) if kind.ngram_rows]
    if not chosen:
        return {_LAYERS: []}
    values = (ngrams.size, ngrams.heads, ngrams.conv, ngrams.vocab, ngrams.multiple, ngrams.parts)
    sizes = {key: value for (key, _), value in zip(_SIZES.values(), values, strict=True)}
    return {_LAYERS: chosen, _WIDTH: ngrams.width, _SEED: ngrams.seed, **sizes}
