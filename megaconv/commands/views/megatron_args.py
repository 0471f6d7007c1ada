"""`inspect --megatron-args`: the command line that starts Megatron-LM from a checkpoint, one flag per line."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from formats import rank_files
from formats.torch_dist import is_dcp, read_backend
from megaconv.errors import NotExpressible
from megaconv.families.parts.whole_model import named
from megaconv.megatron.arguments.command_line import CommandLine, command_line
from megaconv.megatron.arguments.null_tokenizer import NULL_TOKENIZER, size_for_all_releases
from megaconv.megatron.arguments.run_arguments import OPTIMIZATION
from megaconv.megatron.arguments.write import to_arguments
from megaconv.megatron.distributed.run_config import nemo_weights
from megaconv.megatron.states.hybrid_form import hybrid_arguments, writes_hybrid
from megaconv.model.ir import Header
from megaconv.model.layout import Layout, padded_vocab

_DIVISOR = 128
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
)


def megatron_args(header: Header, place: Path | None) -> tuple[CommandLine, list[str]]:
    """(flags, notes for the user). place: the checkpoint's path, for --load.

    Raises NotExpressible for a model that Megatron doesn't support.
    """
    config, notes = header.config, list[str]()
    if config.whole is not None:
        raise NotExpressible(
            f"--megatron-args: Megatron-LM's GPT script doesn't build the multimodal model {named(config.whole.config)}; "
            "--text-only prints the arguments of its language model"
        )
    layout = header.layout or Layout(stage_layers=(config.layer_count,))
    divisor = header.vocab_divisor or _DIVISOR
    padded = header.padded_vocab or padded_vocab(config.vocab, divisor, layout.tp)
    if padded != padded_vocab(config.vocab, divisor, layout.tp):
        # The vocabulary was padded in another way: this divisor gives the same number of rows.
        divisor = padded // layout.tp
    describe = partial(
        to_arguments,
        config,
        layout,
        transformer_impl="local" if "local" in header.source else "transformer_engine",
        grouped_experts="grouped" in header.source,
        vocab_divisor=divisor,
        padded_vocab=padded,
        legacy=header.source.startswith("legacy"),
    )
    # A run's arguments cover everything that Megatron can be asked for. Print only flags about this model and its
    # training.
    about_model = describe(replace(header.training, arguments={})).keys()
    given = describe(header.training)
    arguments = {
        name: value for name, value in given.items() if name in about_model or name in OPTIMIZATION
    }
    arguments |= {"is_bert": config.has("both_ways")}
    if writes_hybrid({}, header.training.arguments):
        # Core 0.19 derives both from the pattern, and has no flag for the second.
        derived = {"num_layers": None, "is_hybrid_model": None}
        arguments |= hybrid_arguments(config, layout) | derived
        notes.append(
            "the checkpoint is of a HybridModel: give these flags to pretrain_hybrid.py of Megatron core 0.19"
        )
    arguments |= _tokenizer(header, divisor * layout.tp, notes)
    arguments |= _checkpoint(header, place, notes) | _batch(arguments, notes)
    found = command_line(arguments)
    if found.unsettable:
        unsettable = ", ".join(f"{name}={value}" for name, value in found.unsettable.items())
        notes.append(
            f"no flag of Megatron-LM sets {unsettable}; set it in the model's configuration where it is built"
        )
    return found, notes


def _tokenizer(header: Header, multiple: int, notes: list[str]) -> dict[str, Any]:
    beside = next((header.files[name] for name in _TOKENIZER_FILES if name in header.files), None)
    if beside is not None:
        return {
            "tokenizer_type": "HuggingFaceTokenizer",
            "tokenizer_model": str(beside.parent.absolute()),
            "vocab_size": None,
        }
    notes.append("the checkpoint has no tokenizer: these flags are for token ids (NullTokenizer)")
    return {
        "tokenizer_type": NULL_TOKENIZER,
        "tokenizer_model": None,
        "vocab_size": size_for_all_releases(header.config.vocab, multiple),
    }


def _checkpoint(header: Header, place: Path | None, notes: list[str]) -> dict[str, Any]:
    if header.layout is None or place is None or nemo_weights(place):
        notes.append(
            "the checkpoint isn't Megatron's: convert it first (megaconv convert --saver core), and give --load"
        )
        return {"load": None, "ckpt_format": None}
    version = rank_files.find_version(place) or place
    backend = read_backend(version) or ("torch_dist" if is_dcp(version) else "torch")
    root = rank_files.run_of(version)
    return {
        "load": str(root.resolve()),
        "ckpt_format": backend,
        "no_load_optim": header.training.optimizer is None,
        "no_load_rng": not header.training.rng,
    }


def _batch(arguments: Mapping[str, Any], notes: list[str]) -> dict[str, Any]:
    """The micro-batch size: Megatron-LM doesn't start without one."""
    if arguments.get("micro_batch_size"):
        return {}
    notes.append("--micro-batch-size, --lr, --train-iters and data are for you to choose")
    return {"micro_batch_size": 1}


def to_json(found: CommandLine, notes: list[str]) -> Mapping[str, Any]:
    return {
        "flags": [list(flag) for flag in found.flags],
        "unsettable": dict(found.unsettable),
        "notes": notes,
    }


def lines(found: CommandLine) -> Iterator[str]:
    return found.lines()
