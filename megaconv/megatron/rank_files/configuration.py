"""The configuration of a Megatron checkpoint, from its args, its tensors and a config.json."""

import logging
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megaconv.errors import TensorMismatch, UsageError
from megaconv.families import is_multimodal, read_config
from megaconv.families.parts.keys import CONFIG_NAME
from megaconv.megatron.arguments.read import from_arguments, read_fields, true_vocab
from megaconv.megatron.arguments.write import LEFT_OUT
from megaconv.model.check import well_formed
from megaconv.model.config import ModelConfig
from megaconv.model.described import value_of
from megaconv.model.fields import NOT_COMPUTED, STRUCTURE, changed
from megaconv.model.meaning import config_differences
from megaconv.options import LoadOptions

_log = logging.getLogger("megaconv")


def configure(
    found: Mapping[str, Any],
    args: Namespace,
    directory: Path,
    *,
    required: bool,
    legacy: bool,
    text_only: bool,
) -> ModelConfig:
    """The configuration from config.json, otherwise from args. It has to agree with the tensors."""
    if not required and not (directory / CONFIG_NAME).is_file():
        with well_formed("the checkpoint's args"):
            return from_arguments(args, found, legacy=legacy)
    larger = is_multimodal(directory)
    _, config = read_config(directory / CONFIG_NAME, text_only=larger and text_only, whole=True)
    if larger:  # the files show whether there is a head, whatever config.json says
        config = changed(config, {"tie_embeddings": found["tie_embeddings"]})
    config = _with_scores(config, found)
    found = _with_used_positions(found, config)
    described = dict(found)
    if hasattr(args, "num_attention_heads"):
        described["attention.heads"] = args.num_attention_heads
    where = str(directory / CONFIG_NAME)
    for name in STRUCTURE:
        if name not in described:
            continue
        stated = _first_width(config) if name == "mlp.ffn" else value_of(config, name)
        if stated != described[name]:
            raise TensorMismatch(
                f"{where}: says {name} = {stated}, the checkpoint has {described[name]}; "
                "it describes another model"
            )
    # config.json may list layers that weren't saved.
    config = changed(config, {"mtp_layers": found["mtp_layers"]})
    with well_formed("the checkpoint's args"):
        given = read_fields(args, found, legacy=legacy)
        compared = _compared(given, found, args)
    return _with_run_arguments(config, compared, where, config_wins=required)


def _with_scores(config: ModelConfig, found: Mapping[str, Any]) -> ModelConfig:
    """The configuration of a head of scores, which the tensors show.

    Trainers start critics and reward models from a language model, and keep its config.json.
    """
    if not found.get("head.labels"):
        return config
    fields = ("head.labels_bias",) if config.head.labels else (*OF_SCORES, "tie_embeddings")
    return changed(config, {name: found[name] for name in fields})


def _with_used_positions(found: Mapping[str, Any], config: ModelConfig) -> Mapping[str, Any]:
    """The fields that the tensors show, without the unused rows at the start of a table of positions (OPT)."""
    rows = found.get("max_positions")
    return found if rows is None else {**found, "max_positions": rows - config.positions.offset}


def _first_width(config: ModelConfig) -> int:
    """The width of the first MLP, which tensors show. Other layers may have other widths."""
    dense = config.layers_with("dense")
    own = config.layers[dense[0]].ffn if dense else None
    return config.mlp.ffn if own is None else own


OF_SCORES = ("head.labels", "head.labels_bias", "head.of_tokens")
"""The fields of a head of scores."""
_STATED_BY = {
    "attention.heads": "num_attention_heads",
    "attention.head_dim": "kv_channels",
    "attention.kv_heads": "group_query_attention",
}
"""Sizes that follow from others if this argument is missing."""


def _compared(
    given: Mapping[str, Any], found: Mapping[str, Any], args: Namespace
) -> dict[str, Any]:
    """The fields that the run's arguments give.

    Fields that tensors show, or that the writer left out of the arguments, aren't among them.
    """
    left_out = getattr(args, LEFT_OUT, ())
    skipped = {
        *NOT_COMPUTED,
        *OF_SCORES,
        "vocab",
        *left_out,
        *(name for name in STRUCTURE if name in found),
    }
    if not getattr(args, "multi_latent_attention", False):
        skipped |= {
            name for name, argument in _STATED_BY.items() if getattr(args, argument, None) is None
        }
    return {name: value for name, value in given.items() if name not in skipped}


def _with_run_arguments(
    config: ModelConfig, given: Mapping[str, Any], where: str, *, config_wins: bool
) -> ModelConfig:
    """config.json, with the differing values of the run's arguments. A warning names every difference.

    A run that continues in a directory with other arguments leaves its old config.json there. config_wins: True if
    --config gave the file, so that its values stay. Raises TensorMismatch if both can't describe tensors of the same
    shapes, or if only the arguments say that norms multiply by their weight + 1.
    """
    # The run computed these norms, and limited time steps, as Megatron does, unless its arguments say otherwise:
    # config.json is from transformers.
    of_the_run = ("latent.norm_epsilon", "mamba.least_time_step")
    config = changed(config, {name: given.get(name) for name in of_the_run})
    run = changed(config, given)
    differences = config_differences(config, run)
    for name, ours, theirs in differences:
        if name in STRUCTURE and not config_wins:
            raise TensorMismatch(
                f"{where}: says {name} = {ours}, the arguments of the run that saved the checkpoint say {theirs}; its tensors are of "
                "one of both. Give --config with a directory whose config.json fits them"
            )
        if name == "norm.zero_centered" and theirs and config_wins:
            raise TensorMismatch(
                f"{where}: describes norms that multiply by their weight, the arguments of the run say that they multiply by their weight "
                "+ 1 (apply_layernorm_1p); add --option norms=plain"
            )
        _log.warning(
            "%s says %s = %s, the arguments of the run that saved the checkpoint say %s; %s",
            where, name, ours, theirs,
            "--config wins" if config_wins else "the arguments win (--config with a directory of that file has it otherwise)",
        )  # fmt: skip
    return config if config_wins or not differences else run


def vocabulary_size(
    options: LoadOptions, config: ModelConfig, args: Namespace, padded: int, tp: int
) -> int:
    """The true vocabulary size: the requested one, that of config.json or args, or all rows."""
    given = options.true_vocab_size
    if given is None:
        with well_formed("the checkpoint's args"):
            stated = true_vocab(args, padded, tp)
        given = config.vocab if config.hf is not None else stated
        if options.config is not None and given is not None and stated is not None:
            _compare_vocabularies(options.config, given, stated)
        if options.config is None and stated not in (None, given):
            _log.warning(
                "config.json says a vocabulary of %d, the arguments of the run that saved the checkpoint say %d; config.json wins "
                "(--true-vocab-size %d keeps as many rows as the arguments say)",
                given, stated, stated,
            )  # fmt: skip
    if given is None:
        _log.warning(
            "the true vocabulary size is unknown; all %d rows are kept, padding included (--true-vocab-size N removes it)",
            padded,
        )
        return padded
    if not 0 < given <= padded:
        raise UsageError(
            f"a vocabulary of {given} is larger than the {padded} rows of the embedding"
        )
    return given


def _compare_vocabularies(config: Path, given: int, stated: int) -> None:
    """Raise UsageError if --config has fewer tokens than the run, and warn if it has more."""
    if given < stated:
        raise UsageError(
            f"{config}: has a vocabulary of {given} tokens, and the run that saved the checkpoint has {stated}, whose last rows would be "
            f"lost; give --config with the model's own config.json, or --true-vocab-size {given} to leave them out"
        )
    if given > stated:
        _log.warning(
            "%s says a vocabulary of %d tokens, the arguments of the run that saved the checkpoint say %d; --config wins, and the other "
            "tokens get rows of the padding",
            config,
            given,
            stated,
        )


def are_ids(numbers: int | tuple[int, ...], vocab: int) -> bool:
    return max(numbers if isinstance(numbers, tuple) else (numbers,)) < vocab
