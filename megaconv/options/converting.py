"""The options of a conversion: those for reading and writing, and those of the run."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from megaconv.errors import UsageError
from megaconv.local_paths import local_path
from megaconv.options.averaging import AverageMethod
from megaconv.options.commands import CONVERSIONS, CONVERT, READERS, SERVE, WRITERS
from megaconv.options.kept_channels import KeptChannels, kept_channels
from megaconv.options.kept_experts import kept_experts
from megaconv.options.kept_file import Kept
from megaconv.options.model_shares import ModelShare, model_shares
from megaconv.options.option import INPUT_AND_OUTPUT, VALUES, Range, inner, normalize, option
from megaconv.options.reading import LoadOptions
from megaconv.options.shared import OWN_OPTIONS
from megaconv.options.upcycling import Upcycling
from megaconv.options.values import AdapterChoice, adapter_choices, byte_size, layer_numbers
from megaconv.options.vocabulary import VocabularyChoice
from megaconv.options.writing import SaveOptions


@dataclass(frozen=True)
class ConvertOptions:
    """Options of a conversion."""

    loader: str | None = option(
        None,
        "--loader",
        heading=INPUT_AND_OUTPUT,
        commands=(*CONVERSIONS, *SERVE, *READERS),
        help="Input format; detected from the files by default.",
    )
    """The loader's name; None: detected from the files."""
    load: LoadOptions = inner(LoadOptions)
    dtype: str | None = option(
        None,
        "--dtype",
        heading=VALUES,
        commands=(*CONVERSIONS, *SERVE),
        help="Cast weights to bf16, fp16 or fp32; by default every bit stays.",
    )
    optimizer: bool | None = option(
        None,
        "--optimizer/--no-optimizer",
        heading=VALUES,
        help="Convert optimizer state too; by default wherever source and output can both hold it.",
    )
    """True to convert the optimizer state, False to leave it out; None: convert it if both sides can hold it."""
    save: SaveOptions = inner(SaveOptions)
    adapters: tuple[AdapterChoice, ...] = option(
        (),
        "--adapter",
        heading=INPUT_AND_OUTPUT,
        python="adapters",
        words=list[str] | None,
        read=adapter_choices,
        metavar="DIR[:WEIGHT]",
        help="A LoRA adapter (a directory of peft's, or a Hub id) to merge into the weights; may be repeated.",
    )
    """Adapters to merge into the weights, in this order."""
    averaged: tuple[ModelShare, ...] = option(
        (),
        "--average",
        heading=INPUT_AND_OUTPUT,
        commands=("convert",),
        words=list[str] | None,
        read=model_shares,
        metavar="MODEL[:SHARE]",
        help="Another model, of any format, to average with the input; may be repeated. Without SHARE, all have the same share.",
    )
    """Models to average with the input. Those that have shares leave the rest of 1 to the input."""
    average_method: AverageMethod = inner(AverageMethod)
    layers: tuple[int, ...] | None = option(
        None,
        "--layers",
        heading=VALUES,
        commands=("convert",),
        words=str | None,
        read=layer_numbers,
        metavar="N-N,N,...",
        help="The layers of the output, by their numbers in the input, such as 0-15,24-31: leaves out, repeats or reorders layers.",
    )
    """Numbers of the input's layers that the output has, in its order; None: all."""
    keep_experts: Kept | None = option(
        None,
        "--keep-experts",
        heading=VALUES,
        commands=("convert",),
        words=str | None,
        read=kept_experts,
        metavar="N-N,N,...|FILE",
        help="The experts of each layer that the output keeps: numbers such as 0-47,60, or the file of `megatron-lite rank-experts`.",
    )
    """The experts that stay, by layer; None: all."""
    keep_channels: KeptChannels | None = option(
        None,
        "--keep-channels",
        heading=VALUES,
        commands=("convert",),
        words=str | None,
        read=kept_channels,
        metavar="FILE",
        help="The channels of hidden states and MLPs, and the heads, that the output keeps: the file of `megatron-lite rank-channels`.",
    )
    """The channels that stay; None: all."""
    upcycling: Upcycling = inner(Upcycling)
    vocabulary: VocabularyChoice = inner(VocabularyChoice)
    extra: Mapping[str, str] = option((), "--option", **OWN_OPTIONS)
    """The loader's and the saver's own options (`--option`). Each gets the options that it knows."""
    verify: bool = option(
        False,
        "--verify",
        commands=CONVERSIONS,
        help="Read the output back and compare fingerprints before it appears.",
    )
    resume: bool = option(
        False,
        "--resume",
        commands=WRITERS,
        help="Continue a killed run of the same command; keep finished work on Ctrl-C.",
    )
    overwrite: bool = option(
        False,
        "--overwrite",
        commands=WRITERS,
        help="Replace the files at --save-dir, in one step, once the output is complete.",
    )
    take_over: bool = option(
        False,
        "--take-over",
        commands=WRITERS,
        help="Replace the claim of a run on another host, which has ended, on an output in an object store.",
    )
    """Take over the claim of a run on another host."""
    replace_objects: bool = option(
        False,
        "--yes-replace-objects",
        commands=WRITERS,
        help="With --overwrite in an object store: accept that a kill at the end leaves neither the old output nor the new one.",
    )
    """Accept that objects of a store are replaced one by one."""
    spool: Path | None = option(
        None,
        "--spool",
        commands=CONVERSIONS,
        read=local_path,
        metavar="DIR",
        help="Directory for parts that wait to be sent to an object store; TMPDIR by default.",
    )
    """The directory for parts that don't fit into memory; None: the system's temporary directory."""
    max_spool: int = option(
        "16GiB",
        "--max-spool",
        metavar="SIZE",
        commands=CONVERSIONS,
        words=str,
        read=byte_size,
        help="Most bytes that these parts may take on the disk.",
    )
    """Most bytes of the spool."""
    check_source: bool = option(
        True,
        "--check-source/--no-check-source",
        commands=(*CONVERT, "inspect", "diff", "delta"),
        help="The input must match its megaconv.json, if it has one (exit status 3 otherwise).",
    )
    """True if a source with a megaconv.json must match it."""
    max_memory: int = option(
        "256MiB",
        "--max-memory",
        metavar="SIZE",
        commands=(*CONVERSIONS, *SERVE),
        words=str,
        read=byte_size,
        help="Most memory that buffers may take.",
    )
    """Memory for buffers in bytes."""
    workers: int = option(
        0,
        "--workers",
        commands=WRITERS,
        range=Range(0, 1024),
        help="Threads that move tensors; 0: as many as processors and one more, up to 8.",
    )
    """Number of threads; 0: one more than there are processors, up to 8."""

    def __post_init__(self) -> None:
        normalize(self)

    @property
    def computes_weights(self) -> bool:
        """True if the output has other weights than the input, which no optimizer state goes with."""
        return bool(self.adapters or self.averaged) or self.derives_model

    @property
    def derives_model(self) -> bool:
        """True if the output's model has other sizes than the input's, or may have."""
        return (
            self.layers is not None
            or self.keep_experts is not None
            or self.keep_channels is not None
            or self.upcycling.experts is not None
            or self.vocabulary.is_given
        )

    def all_extra(self) -> dict[str, str]:
        """All options of `--option`, in whichever field they were given."""
        return {**self.load.extra, **self.save.extra, **self.extra}

    def for_saver(self, saver: str) -> "ConvertOptions":
        """The options with --checkpoint-type on the side that it is about. Raises UsageError for an unknown type."""
        read, written = checkpoint_types(self.load.checkpoint_type, saver)
        return replace(
            self,
            loader=self.loader or ("llama_mistral" if read else None),
            load=replace(self.load, checkpoint_type=read),
            save=replace(self.save, checkpoint_type=written),
        )


def require_workers(workers: int) -> None:
    """Raises UsageError for a number of threads that is out of the option's range."""
    ConvertOptions(workers=workers)


CHECKPOINT_TYPES = ("hf", "meta", "mistral")


def checkpoint_types(word: str | None, saver: str) -> tuple[str | None, str | None]:
    """The checkpoint types (of the input, of the output) that `--checkpoint-type` gives.

    The word is about the output if the saver is llama_mistral (and the word isn't `hf`), otherwise about the input.
    Raises UsageError for an unknown word.
    """
    if word not in (None, *CHECKPOINT_TYPES):
        raise UsageError(
            f"--checkpoint-type {word}: is not known; choose one of {', '.join(CHECKPOINT_TYPES)}"
        )
    return (None, word) if saver == "llama_mistral" and word != "hf" else (word, None)
