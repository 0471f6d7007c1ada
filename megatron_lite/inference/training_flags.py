"""Flags of a training script, which Megatron's scripts also give to evaluation and to the server.

Flags of the model have to agree with the checkpoint. The precision and the micro-batch size have counterparts. The
other flags have no effect on inference.
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megaconv.errors import UsageError
from megatron_lite.settings.arguments import parse
from megatron_lite.settings.config import Settings, flags
from megatron_lite.settings.flag_parser import FlagParser
from megatron_lite.settings.optimization import PRECISION_FLAGS

_OF_THE_STEP = (
    "sequence_parallel", "use_distributed_optimizer", "overlap_grad_reduce", "overlap_param_gather", "grad_reduce_in_bf16",
    "ddp_bucket_size",
)  # fmt: skip
"""Flags of parallelism that only a training step has."""
_MODEL_CHANGES = ("lora_rank", "lora_load", "fp8_format", "objective")
"""Flags outside the model and its layout that would change the model's results."""


@dataclass(frozen=True)
class TrainingFlags:
    """The flags of a training script on the command line of another command."""

    settings: Settings
    without_effect: tuple[str, ...]
    """Flags without effect on inference, as the user wrote them."""


def take_training_flags(
    given: argparse.Namespace, rest: Sequence[str], parser: FlagParser
) -> TrainingFlags:
    """Read the words that the command's own parser doesn't know, and set `dtype` and `slots` from them.

    Raises UsageError for an unknown flag, for one that would change the results, and for a contradiction.
    """
    settings, ignored = parse("pretrain", list(rest), beside=parser)
    for name in sorted(settings.given):
        _refuse_without_counterpart(name, settings)
    _take_precision(given, settings)
    if "micro_batch_size" in settings.given:
        given.slots = settings.training.micro_batch_size
    return TrainingFlags(settings, (*ignored, *_without_effect(settings)))


def _refuse_without_counterpart(name: str, settings: Settings) -> None:
    subject, item = flags()[name]
    changes_layout = subject == "parallel" and name not in _OF_THE_STEP
    if not (changes_layout or name in _MODEL_CHANGES):
        return
    if getattr(getattr(settings, subject), name) != item.default:
        raise UsageError(f"--{name.replace('_', '-')} is a flag of training alone; leave it out")


def _take_precision(given: argparse.Namespace, settings: Settings) -> None:
    if not settings.precision.chosen:
        return
    asked = PRECISION_FLAGS[settings.precision.dtype]
    if given.dtype not in (None, asked):
        raise UsageError(f"--dtype {given.dtype} and --{asked} contradict each other; give one")
    given.dtype = asked


def _without_effect(settings: Settings) -> Iterator[str]:
    used = (*PRECISION_FLAGS.values(), "micro_batch_size")
    for name in sorted(settings.given):
        subject, _ = flags()[name]
        if subject != "model" and name not in used:
            yield f"--{name.replace('_', '-')}"
