"""What a finetuning run has besides: its examples, defaults that follow from them and from the checkpoint, epochs; all said aloud."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megaconv.errors import UsageError
from megaconv.model.config import ModelConfig
from megatron_lite.data.datasets import check_sources
from megatron_lite.data.finetuning.dataset import FinetuneDataset, PairDataset, samples_of, split_datasets
from megatron_lite.data.finetuning.examples import (
    Examples,
    Pieces,
    ReadingOptions,
    pairs_for,
    pieces_for,
    read_examples,
)
from megatron_lite.data.finetuning.preview import preview
from megatron_lite.data.samples import Dataset
from megatron_lite.data.tokenizer import Tokenizer
from megatron_lite.settings.config import Settings
from megatron_lite.settings.sizes import LONGEST_UNASKED, Sizes
from megatron_lite.settings.wording import counted

LEARNING_RATE = 1e-5
LORA_LEARNING_RATE = 2e-4
PAIRS_LEARNING_RATE = 1e-6
LORA_PAIRS_LEARNING_RATE = 1e-5
LOG_INTERVAL = 10
SEQUENCE_MULTIPLE = 64
"""Of lengths that are chosen here, so that tensor ranks can share a sequence."""
MOST_EVALUATION_STEPS = 100

Say = Callable[[str], None]


@dataclass(frozen=True)
class FinetuneData:
    train: Examples
    valid: Examples | None


def read_data(settings: Settings, tokenizer: Tokenizer) -> FinetuneData | None:
    """None for a run on other data. Raises UsageError, CorruptCheckpoint."""
    data = settings.data
    check_sources(data)
    if not data.finetune_data:
        given = [name for name in ("valid_finetune_data", "finetune_form", "show_sample") if name in settings.given]
        if given:
            raise UsageError(f"--{given[0].replace('_', '-')} goes with --finetune-data")
        return None
    options = ReadingOptions(
        data.finetune_form, data.finetune_turns, _template(data.chat_template), pairs=settings.dpo.dpo
    )
    valid = None
    if data.valid_finetune_data:
        valid = read_examples(data.valid_finetune_data, tokenizer, options, "--valid-finetune-data")
    return FinetuneData(read_examples(data.finetune_data, tokenizer, options), valid)


def _template(path: str | None) -> str | None:
    if path is None:
        return None
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--chat-template {path}: can't be read: {error}") from error


def with_defaults(
    settings: Settings, config: ModelConfig, data: FinetuneData | None, say: Say, *, finetune: bool
) -> Settings:
    """What no flag says: for the command finetune precision, learning rate and log interval, for examples the sequence length.

    config: the checkpoint's. say: gets a line for each of them.
    """
    changes: dict[str, dict[str, Any]] = {}

    def choose(subject: str, name: str, value: Any, why: str) -> None:
        changes.setdefault(subject, {})[name] = value
        shown = f"{value:g}" if isinstance(value, float) else value
        say(f"--{name.replace('_', '-')}{'' if value is True else f' {shown}'}: {why}")

    precision = settings.precision
    if (
        finetune
        and not (precision.bf16 or precision.fp16 or precision.fp32)
        and config.dtype in ("bfloat16", "float16")
    ):
        choose(
            "precision",
            {"bfloat16": "bf16", "float16": "fp16"}[config.dtype],
            True,
            "the checkpoint's precision (--fp32 takes more)",
        )
    if finetune and settings.optimizer.lr is None:
        of_pairs, what = settings.dpo.dpo, " on pairs" if settings.dpo.dpo else ""
        if settings.lora.wanted:
            rate = LORA_PAIRS_LEARNING_RATE if of_pairs else LORA_LEARNING_RATE
            choose("optimizer", "lr", rate, f"a usual learning rate for adapters{what}")
        else:
            rate = PAIRS_LEARNING_RATE if of_pairs else LEARNING_RATE
            choose("optimizer", "lr", rate, f"a usual learning rate to train all weights with{what}")
    if finetune and "log_interval" not in settings.given:
        choose("logging", "log_interval", LOG_INTERVAL, "steps between log lines")
    if data is not None and settings.training.seq_length is None and data.train.longest:
        most = min(config.max_positions, LONGEST_UNASKED)
        longest = max(data.train.longest, data.valid.longest if data.valid else 0)
        needed = -(-longest // SEQUENCE_MULTIPLE) * SEQUENCE_MULTIPLE
        choose("training", "seq_length", min(needed, most), f"the longest example has {longest:,} tokens")
    return replace(settings, **{name: replace(getattr(settings, name), **values) for name, values in changes.items()})


def with_epochs(
    settings: Settings, sizes: Sizes, data: FinetuneData | None, say: Say
) -> tuple[Settings, "Packed | None"]:
    """--epochs as steps, and an evaluation of all there is for it. Every example is seen in each epoch; the last step is filled up."""
    if data is None:
        return settings, None
    training, split, batch = settings.training, settings.data.split, sizes.batch.full
    if split is not None and data.valid is not None:
        raise UsageError("--split divides --finetune-data; with --valid-finetune-data there is nothing to divide")
    cut = pairs_for if settings.dpo.dpo else pieces_for
    packed = Packed(cut(data.train, sizes.seq), cut(data.valid, sizes.seq) if data.valid else None)
    epoch = samples_of(packed.train, sizes.seq, training.seed, split, 1)
    changes: dict[str, Any] = {}
    if training.epochs is not None:
        if sizes.batch.increment:
            raise UsageError("--epochs with --rampup-batch-size: give the length of the run with --train-samples")
        drawn = samples_of(packed.train, sizes.seq, training.seed, split, training.epochs)
        changes["train_iters"] = -(-drawn // batch)
    if packed.valid is not None and "eval_iters" not in settings.given:
        drawn = samples_of(packed.valid, sizes.seq, training.seed, None, 1)
        changes["eval_iters"] = min(-(-drawn // batch), MOST_EVALUATION_STEPS)
        say(f"--eval-iters {changes['eval_iters']}: of {drawn:,} samples for evaluation")
    if packed.valid is not None and "eval_interval" not in settings.given:
        changes["eval_interval"] = max(1, min(-(-epoch // batch), training.eval_interval))
        say(f"--eval-interval {changes['eval_interval']}: an evaluation each epoch, or more often")
    return replace(settings, training=replace(training, **changes)), packed


@dataclass(frozen=True)
class Packed:
    """Examples cut to the length of a sample."""

    train: Pieces
    valid: Pieces | None

    def datasets(self, settings: Settings, sizes: Sizes, samples: list[int]) -> list[Dataset | None]:
        """For training, evaluation, test. Raises CorruptCheckpoint."""
        return split_datasets(
            self.train, self.valid, settings.data.split, sizes.seq, settings.training.seed, samples
        )  # fmt: skip


def introduce(
    settings: Settings, sizes: Sizes, packed: Packed, dataset: Dataset | None, tokenizer: Tokenizer, say: Say
) -> None:
    """The summary, and whatever was left out."""
    assert isinstance(dataset, FinetuneDataset | PairDataset)
    examples, pieces, epoch = packed.train.examples, packed.train, dataset.epoch_samples
    steps, of_pairs = epoch / sizes.batch.full, isinstance(dataset, PairDataset)
    noun = "pair" if of_pairs else "example"
    number = counted(len(examples) // (2 if of_pairs else 1), noun)
    samples = f"2 rows of {sizes.seq} tokens each" if of_pairs else f"{counted(epoch, 'sample')} of {sizes.seq} tokens"
    say(
        f"{number}, {len(examples.tokens):,} tokens ({int(examples.learned.sum()):,} learned), {samples}, "
        f"{steps:,.4g} step{'' if steps == 1 else 's'} an epoch"
    )
    if settings.training.epochs is not None and settings.training.train_iters is not None:
        verb = "is" if settings.training.epochs == 1 else "are"
        say(f"{counted(settings.training.epochs, 'epoch')} {verb} {counted(settings.training.train_iters, 'step')}")
    for what, found in (("", pieces), (" for evaluation", packed.valid)):
        if found is None:
            continue
        if found.examples.equal:
            say(f"warning: left out, as both answers are the same: {counted(found.examples.equal, 'pair')}{what}")
        if found.cut:
            were = (
                "is longer than --seq-length {} and was"
                if found.cut == 1
                else "are longer than --seq-length {} and were"
            )
            say(f"warning: {counted(found.cut, noun)}{what} {were.format(sizes.seq)} cut")
        if found.dropped:
            were = (
                "was dropped: nothing to learn is left of it"
                if found.dropped == 1
                else "were dropped: nothing to learn is left of them"
            )
            say(f"warning: {counted(found.dropped, noun)}{what} {were}")
        if found.examples.unread:
            names = ", ".join(f'"{name}"' for name in sorted(found.examples.unread))
            say(f"fields that are not read{what}: {names}")
        if found.examples.plain_chats:
            say(
                f"{found.examples.plain_chats:,} instructions{what} are written out: the tokenizer has no chat template"
            )
    if settings.data.show_sample:
        for line in preview(dataset[0], tokenizer):
            say(line)
