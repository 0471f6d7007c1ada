"""The options for writing an output."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megaconv.local_paths import local_path
from megaconv.model.ceilings import VOCABULARY
from megaconv.model.layout import LayerSplit
from megaconv.options.commands import CONVERSIONS
from megaconv.options.layer_split import SPLIT
from megaconv.options.option import (
    FORM,
    INPUT_AND_OUTPUT,
    LAYOUT,
    VALUES,
    Range,
    inner,
    normalize,
    option,
)
from megaconv.options.shared import local_checkpoint
from megaconv.options.values import byte_size

DIST_FILES = 8
"""The default of `files`. It doesn't depend on the machine, so a resumed run elsewhere writes the same files."""

LAYOUT_OPTIONS = (
    "tp", "pp", "vpp", "split", "vocab_divisor", "vocab_padding", "distributed_optimizer", "release", "iteration",
)  # fmt: skip
"""Fields of SaveOptions that decide how a Megatron output is sharded and saved."""

LOSSES = ("rope_scaling", "activation", "overflow", "out_norm")
"""Names of accepted losses.

`activation`: in transformers, BERT's layers and the transform before its head have the same activation; in Megatron
core the head always has gelu.
`overflow`: values beyond the range of the requested dtype become infinite.
`out_norm`: Transformer Engine's layers store some norm weights minus 1. A weight is rounded if its dtype has no exact
value for it.
"""

QUANTIZATIONS = (
    "fp8-block", "fp8-per-channel", "nvfp4", "mxfp4", "w4a16", "w8a16", "fp8", "int8-sq", "int4-awq", "w4a8-awq",
)  # fmt: skip
"""The accepted values of `quantize`."""
(
    FP8_BLOCK, FP8_PER_CHANNEL, NVFP4, MXFP4, W4A16, W8A16, FP8, INT8_SQ, INT4_AWQ, W4A8_AWQ,
) = QUANTIZATIONS  # fmt: skip
PACKED = (W4A16, W8A16)
"""Quantizations to integers in compressed-tensors' words."""
CALIBRATED = (FP8, INT8_SQ, INT4_AWQ, W4A8_AWQ)
"""Quantizations that need the statistics of a calibration."""
KV_CACHES = ("fp8",)
"""The accepted values of `kv_cache`."""


def _size(name: str, target: str, text: str) -> Any:
    """A parallel size. target: the spelling of Megatron-LM's converter."""
    return option(None, name, target, heading=LAYOUT, range=Range(1), help=text)


@dataclass(frozen=True)
class SaveOptions:
    """Options for writing an output.

    None means: as in the source, or 1 for a parallel size that the source doesn't have.
    """

    tp: int | None = _size("--tp", "--target-tensor-parallel-size", "Tensor parallel size.")
    pp: int | None = _size("--pp", "--target-pipeline-parallel-size", "Pipeline parallel size.")
    vpp: int | None = _size(
        "--vpp", "--target-virtual-pipeline-parallel-size", "Virtual stages per pipeline rank."
    )
    ep: int | None = _size("--ep", "--target-expert-parallel-size", "Expert parallel size.")
    etp: int | None = _size(
        "--etp", "--target-expert-tensor-parallel-size", "Expert tensor parallel size."
    )
    split: LayerSplit = inner(LayerSplit, SPLIT)
    ckpt_format: str = option(
        "torch",
        "--ckpt-format",
        heading=FORM,
        words=str | None,
        tracked=True,
        help="Format of a Megatron core output: torch (by default), torch_dist or zarr.",
    )
    """The format of a Megatron core output: `torch`, `torch_dist` or `zarr`."""
    transformer_impl: str = option(
        "transformer_engine",
        "--transformer-impl",
        "--saver-transformer-impl",
        heading=FORM,
        words=str | None,
        tracked=True,
        help="Names of a core output: transformer_engine (by default) or local.",
    )
    """The naming scheme of a Megatron core output: `transformer_engine` or `local`."""
    grouped_experts: bool = option(
        False,
        "--moe-grouped-gemm",
        heading=FORM,
        help="Store experts as Transformer Engine's grouped layer does, not each as a module.",
    )
    """Store experts as Transformer Engine's grouped layer does, instead of one module per expert."""
    vocab_divisor: int | None = option(
        None,
        "--make-vocab-size-divisible-by",
        heading=FORM,
        range=Range(1, VOCABULARY),
        help="Pad the vocabulary to a multiple of this number times tp; default: the source's, else 128.",
    )
    vocab_padding: str = option(
        "repeat",
        "--vocab-padding",
        heading=FORM,
        words=str | None,
        tracked=True,
        help="Fill padding rows by `repeat` (the last row again; by default) or `zero`.",
    )
    """The content of padding rows: `repeat` (the last row again) or `zero`."""
    release: bool = option(
        False,
        "--release",
        heading=FORM,
        help="Write a `release` checkpoint, with which a run begins, also of a run's iteration; any other source becomes one anyway.",
    )
    """Write a release checkpoint, the starting point of a run, even if the source has an iteration.

    A source without an iteration becomes a release checkpoint in any case.
    """
    iteration: int | None = option(
        None,
        "--iteration",
        heading=FORM,
        range=Range(1),
        help="Write this iteration instead of a `release`, if the source has no iteration.",
    )
    """The iteration to write for a source that has none, instead of a release checkpoint."""
    max_shard_bytes: int = option(
        "5GB",
        "--max-shard-size",
        metavar="SIZE",
        heading=FORM,
        words=str | None,
        tracked=True,
        read=byte_size,
        help="Largest safetensors file of an hf output; 5GB by default.",
    )
    """Largest size of a safetensors file in bytes."""
    files: int | None = option(
        None,
        "--dist-files",
        heading=FORM,
        range=Range(1, 1 << 16),
        help=f"Files to share a torch_dist or dcp output out over; {DIST_FILES} by default.",
    )
    """The number of files of a distributed checkpoint; None: DIST_FILES, but at least one for each process."""
    base: Path | None = option(
        None,
        "--base",
        heading=INPUT_AND_OUTPUT,
        read=local_checkpoint,
        metavar="PATH",
        help="The original's Hugging Face directory: an hf output gets from it the tensors and files that the source doesn't hold.",
    )
    """The original model's Hugging Face directory, from which an `hf` output takes what the source doesn't hold."""
    distributed_optimizer: bool | None = option(
        None,
        "--use-distributed-optimizer/--no-use-distributed-optimizer",
        heading=VALUES,
        help="Write optimizer state for runs with Megatron's option of this name; by default in torch_dist only.",
    )
    """Write optimizer state for runs with Megatron's distributed optimizer; None: only in torch_dist checkpoints."""
    quantize: str | None = option(
        None,
        "--quantize",
        heading=VALUES,
        commands=CONVERSIONS,
        help="Quantize weights of attention, MLP and experts in an hf output: fp8-block (FP8, a scale for each 128 by 128), "
        "fp8-per-channel (FP8, a scale for each row), nvfp4 (4 bits, a scale for each 16), mxfp4 (experts of GPT-OSS as "
        "OpenAI publishes them), w4a16 and w8a16 (INT4 and INT8 of compressed-tensors, a scale for each 128); with --calibration also fp8 "
        "(FP8, one scale), int8-sq (SmoothQuant), int4-awq and w4a8-awq, as ModelOpt has them. Lossy.",
    )
    """The quantization of linear layers' weights in an `hf` output, one of QUANTIZATIONS; None: no quantization."""
    kv_cache: str | None = option(
        None,
        "--kv-cache",
        heading=VALUES,
        commands=CONVERSIONS,
        help="Add scales for a key/value cache in fp8 to a quantized hf output; needs --calibration.",
    )
    """The dtype of the engine's key/value cache, for which scales are written: `fp8`; None: no scales."""
    calibration: Path | None = option(
        None,
        "--calibration",
        heading=INPUT_AND_OUTPUT,
        commands=CONVERSIONS,
        read=local_path,
        metavar="FILE",
        help="Statistics of activations from `megatron-lite calibrate`: the scales of --quantize and --kv-cache, and the importance "
        "matrix of a gguf output in q4_0, q4_k_m, q5_k_m or q6_k.",
    )
    """The file of activation statistics that `quantize`, `kv_cache` and the saver `gguf` use."""
    allow_lossy: tuple[str, ...] = option(
        (),
        "--allow-lossy",
        commands=CONVERSIONS,
        metavar="NAME",
        heading=VALUES,
        words=list[str] | None,
        read=tuple,
        help="Leave out what the output can't express: rope_scaling, activation, overflow (of values beyond --dtype's range), out_norm.",
    )
    """Losses that the user accepts if the target can't represent something: any of LOSSES."""
    checkpoint_type: str | None = None
    """The format that the `llama_mistral` saver writes: `meta` or `mistral`; None: that of the family's release."""
    extra: Mapping[str, str] = field(default_factory=dict)
    """The saver's own options, by the keys in its OPTIONS."""
    given: tuple[str, ...] = ()
    """The fields with a default that the caller gave explicitly, even if the value equals the default."""

    def __post_init__(self) -> None:
        normalize(self)
