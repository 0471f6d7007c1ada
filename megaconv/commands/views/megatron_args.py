"""`inspect --megatron-args`: the command line with which Megatron-LM starts from a checkpoint, one flag a line."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from formats import rank_files
from formats.torch_dist import is_dcp, read_backend
from megaconv.errors import NotExpressible
from megaconv.families.parts.whole_model import named
from megaconv.megatron.arguments.command_line import CommandLine, command_line
from megaconv.megatron.arguments.write import to_arguments
from megaconv.megatron.distributed.run_config import nemo_weights
from megaconv.model.ir import Header
from megaconv.model.layout import Layout, padded_vocab

_DIVISOR = 128
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt")


def megatron_args(header: Header, place: Path | None) -> tuple[CommandLine, list[str]]:
    """(flags, what a user has to know besides). place: where the checkpoint is, for --load.

    Raises NotExpressible for a model that Megatron doesn't support.
    """
    config, notes = header.config, list[str]()
    if config.whole is not None:
        raise NotExpressible(
            f"--megatron-args: Megatron-LM's script for GPT doesn't build {named(config.whole.config)}, which sees or hears; with "
            "--text-only it's about the language model in it"
        )
    layout = header.layout or Layout(stage_layers=(config.layer_count,))
    divisor = header.vocab_divisor or _DIVISOR
    padded = header.padded_vocab or padded_vocab(config.vocab, divisor, layout.tp)
    if padded != padded_vocab(config.vocab, divisor, layout.tp):
        divisor = padded // layout.tp  # of a vocabulary that was padded otherwise: this leads to as many rows
    arguments = to_arguments(
        config,
        layout,
        header.training,
        transformer_impl="local" if "local" in header.source else "transformer_engine",
        grouped_experts="grouped" in header.source,
        vocab_divisor=divisor,
        padded_vocab=padded,
        legacy=header.source.startswith("legacy"),
    )
    arguments |= {"is_bert": config.has("both_ways")}
    arguments |= _tokenizer(header, notes) | _checkpoint(header, place, notes) | _training(header, notes)
    found = command_line(arguments)
    if found.unsettable:
        told = ", ".join(f"{name}={value}" for name, value in found.unsettable.items())
        notes.append(f"no flag of Megatron-LM sets {told}; set it in the model's configuration where it is built")
    return found, notes


def _tokenizer(header: Header, notes: list[str]) -> dict[str, Any]:
    beside = next((header.files[name] for name in _TOKENIZER_FILES if name in header.files), None)
    if beside is not None:
        return {
            "tokenizer_type": "HuggingFaceTokenizer",
            "tokenizer_model": str(beside.parent.absolute()),
            "vocab_size": None,
        }
    notes.append("there is no tokenizer beside the checkpoint: these flags are for token ids alone (NullTokenizer)")
    # It counts one token more than it is told.
    return {"tokenizer_type": "NullTokenizer", "tokenizer_model": None, "vocab_size": header.config.vocab - 1}


def _checkpoint(header: Header, place: Path | None, notes: list[str]) -> dict[str, Any]:
    if header.layout is None or place is None or nemo_weights(place):
        notes.append(
            "the checkpoint isn't Megatron's: convert it first (megaconv convert --saver core), and give --load"
        )
        return {"load": None, "ckpt_format": None}
    version = rank_files.find_version(place) or place
    backend = read_backend(version) or ("torch_dist" if is_dcp(version) else "torch")
    root = version.parent if rank_files.is_version(version.name) else version
    found: dict[str, Any] = {"load": str(root.resolve()), "ckpt_format": backend}
    return found | {"no_load_optim": header.training.optimizer is None, "no_load_rng": not header.training.rng}


def _training(header: Header, notes: list[str]) -> dict[str, Any]:
    """What the run that saved it was told about optimization; Megatron-LM doesn't start without a micro-batch size."""
    found = dict(header.training.arguments)
    if not found.get("micro_batch_size"):
        notes.append("--micro-batch-size, --lr, --train-iters and data are for you to choose")
        found["micro_batch_size"] = 1
    return found


def to_json(found: CommandLine, notes: list[str]) -> Mapping[str, Any]:
    return {"flags": [list(flag) for flag in found.flags], "unsettable": dict(found.unsettable), "notes": notes}


def lines(found: CommandLine) -> Iterator[str]:
    return found.lines()
