"""What a user can ask of a loader or a saver, the same from the command line and from Python."""

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

from megaconv.errors import UsageError
from megaconv.model.layout import LayerSplit


@dataclass(frozen=True)
class LoadOptions:
    """How to read an input. None: what the checkpoint itself says."""

    config: Path | None = None
    """A Hugging Face directory whose configuration and tokenizer files complete a source that has none."""
    true_vocab_size: int | None = None
    checkpoint_type: str | None = None
    """What the `llama_mistral` loader reads: `hf`, `meta` or `mistral`; None: found out from the files."""
    optimizer: bool = True
    """Whether the optimizer's tensors are wanted, where the checkpoint has any."""
    dtype: str | None = None
    """What quantized weights become (`float32`); None: bfloat16."""
    metadata_only: bool = False
    """Only the header is wanted: files that can only repeat what others say about names and shapes need not be read."""
    needs_weights: bool = True
    """Whether there have to be any: who asks for names and shapes alone takes those that a config.json describes."""
    text_only: bool = False
    """Of a model that sees or hears, only the language model in it; from Hugging Face directories."""
    extra: Mapping[str, str] = field(default_factory=dict)
    """What the loader alone knows, by the keys that its OPTIONS lists."""


@dataclass(frozen=True)
class SaveOptions:
    """How to write an output. None: as the source has it, or 1."""

    tp: int | None = None
    pp: int | None = None
    vpp: int | None = None
    ep: int | None = None
    etp: int | None = None
    split: LayerSplit = field(default_factory=LayerSplit)
    transformer_impl: str = "transformer_engine"
    """Whose names a Megatron core output has: `transformer_engine` or `local`."""
    grouped_experts: bool = False
    """Store experts as Transformer Engine's grouped layer does, rather than each as a module of its own."""
    vocab_divisor: int | None = None
    vocab_padding: str = "repeat"
    """What fills padding rows: `repeat` (the last row again) or `zero`."""
    distributed_optimizer: bool | None = None
    """Write optimizer state for runs with Megatron's distributed optimizer; None: in torch_dist checkpoints alone."""
    release: bool = False
    """Write a release checkpoint instead of an iteration."""
    max_shard_bytes: int = 5_000_000_000
    """Largest safetensors file."""
    ckpt_format: str = "torch"
    """Of a Megatron core output: `torch`, `torch_dist` or `zarr`."""
    files: int | None = None
    """Files that the tensors of a distributed checkpoint are shared out over; None: as many as threads move them."""
    allow_lossy: tuple[str, ...] = ()
    """What may be left out, or made like something else, where the target can't express it: any of LOSSES."""
    base: Path | None = None
    """The original's Hugging Face directory, from which an `hf` output gets what the source doesn't hold."""
    quantize: str | None = None
    """How an `hf` output stores the weights of linear layers (`fp8-block`, `nvfp4`); None: as they are."""
    checkpoint_type: str | None = None
    """What the `llama_mistral` saver writes: `meta` or `mistral`; None: what the model's family comes in."""
    extra: Mapping[str, str] = field(default_factory=dict)
    """What the saver alone knows, by the keys that its OPTIONS lists."""
    given: tuple[str, ...] = ()
    """Of the fields above that have a default, those that somebody gave, though it may be the default's own value."""


LAYOUT_OPTIONS = ("tp", "pp", "vpp", "split", "vocab_divisor", "vocab_padding", "distributed_optimizer", "release")
"""Fields of SaveOptions that decide how an output of Megatron's is sharded and saved."""

_WITH_DEFAULT = ("transformer_impl", "vocab_padding", "max_shard_bytes", "ckpt_format")


def save_options(**choices: Any) -> SaveOptions:
    """Of what somebody chose, by field; None for a field that has a default: nobody did."""
    given = tuple(name for name in _WITH_DEFAULT if choices.get(name) is not None)
    kept = {name: value for name, value in choices.items() if name not in _WITH_DEFAULT or name in given}
    return SaveOptions(**kept, given=given)


_SPELLED = {
    "split": "a layer split", "grouped_experts": "--moe-grouped-gemm", "vocab_divisor": "--make-vocab-size-divisible-by",
    "distributed_optimizer": "--use-distributed-optimizer", "max_shard_bytes": "--max-shard-size", "files": "--dist-files",
}  # fmt: skip
"""Fields whose option is called otherwise."""
_FOR_ALL = ("allow_lossy", "extra", "given")


def refuse_unused(saver: str, used: Collection[str], options: SaveOptions) -> None:
    """Raises UsageError for an option that chooses nothing for this output: whoever gave it expects something else.

    used: fields of SaveOptions that the saver reads. A default is nobody's choice unless it was given, a parallel size of 1
    is what there is anyway.
    """
    for each in fields(options):
        value, unset = getattr(options, each.name), getattr(SaveOptions(), each.name)
        sizes_of_one = each.name in ("tp", "pp", "vpp", "ep", "etp") and value == 1
        chosen = value != unset or each.name in options.given
        if each.name not in (*used, *_FOR_ALL) and chosen and not sizes_of_one:
            option = _SPELLED.get(each.name, f"--{each.name.replace('_', '-')}")
            what = "" if each.name in ("split", "release") or isinstance(value, bool) else f" {value}"
            raise UsageError(f"{option}{what}: chooses nothing for an output of --saver {saver}; leave it out")


class AdapterChoice(NamedTuple):
    """An adapter that is to be merged into the weights."""

    place: str
    """A directory or a Hub id."""
    weight: float = 1.0
    """What its deltas are multiplied with."""


def adapter_choice(word: str) -> AdapterChoice:
    """`DIR`, or `DIR:0.5`. Raises UsageError for a weight that is no number."""
    place, colon, weight = word.rpartition(":")
    if not colon or Path(word).exists() or "/" in weight:
        return AdapterChoice(word)
    try:
        number = float(weight)
    except ValueError:
        number = float("nan")
    if not place or not abs(number) < float("inf"):
        raise UsageError(f"--adapter {word}: write DIR or DIR:WEIGHT, such as my-adapter:0.5")
    return AdapterChoice(place, number)


LOSSES = ("rope_scaling", "activation", "overflow", "out_norm")
"""`activation`: BERT's layers and the transform before its head have one in transformers; in Megatron core the head has gelu.
`overflow`: values beyond the range of the dtype asked for become infinite. `out_norm`: weights of norms that Transformer
Engine's layers store less 1 are rounded where their dtype has no exact value for the weight itself."""

FP8_BLOCK, NVFP4 = QUANTIZATIONS = ("fp8-block", "nvfp4")
"""What `quantize` knows."""

CHECKPOINT_TYPES = ("hf", "meta", "mistral")


def checkpoint_types(word: str | None, saver: str) -> tuple[str | None, str | None]:
    """(of the input, of the output): one word is about an output of llama_mistral, else about the input.

    Raises UsageError for a word that is not known.
    """
    if word not in (None, *CHECKPOINT_TYPES):
        raise UsageError(f"--checkpoint-type {word}: is not known; choose one of {', '.join(CHECKPOINT_TYPES)}")
    return (None, word) if saver == "llama_mistral" and word != "hf" else (word, None)


_UNITS = {
    "": 1,
    "K": 10**3,
    "M": 10**6,
    "G": 10**9,
    "T": 10**12,
    "KI": 1 << 10,
    "MI": 1 << 20,
    "GI": 1 << 30,
    "TI": 1 << 40,
}


_LEAST_BYTES = 4096
"""Less is a number whose unit was forgotten."""


def byte_size(text: str | int, option: str = "") -> int:
    """256MiB, 5GB, 1000000 -> bytes; a number is one of bytes. option: whose value it is. Raises UsageError."""
    if isinstance(text, int):
        return text
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?I?)B?\s*", text.upper())
    if not match or match[2] not in _UNITS or not float(match[1]):
        raise UsageError(f"{option}{text!r} is not a size; write a number with a unit, such as 256MiB or 5GB")
    size = int(float(match[1]) * _UNITS[match[2]])
    if size < _LEAST_BYTES:
        raise UsageError(
            f"{option}{text!r} is {size} bytes, expected {_LEAST_BYTES} bytes or more; write a number with a unit, such as 256MiB or 5GB"
        )
    return size


def numbers(text: str | Iterable[int] | None) -> tuple[int, ...] | None:
    """3,5,5,3 -> (3, 5, 5, 3), and numbers as they are. Raises UsageError."""
    if not isinstance(text, str):
        return None if text is None else tuple(text)
    if not re.fullmatch(r"\d+(,\d+)*", text.replace(" ", "")):
        raise UsageError(f"--layer-split {text!r}: write the layers of each stage separated by commas, such as 3,5,5,3")
    return tuple(int(word) for word in text.replace(" ", "").split(","))
