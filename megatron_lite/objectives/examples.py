"""Files of finetuning examples, or of pairs of answers, as training data. It computes epochs and evaluations."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from formats.wording import are, counted
from megaconv.errors import UsageError
from megatron_lite.checkpoint.state import Progress
from megatron_lite.data.finetuning.chat import read_template
from megatron_lite.data.finetuning.dataset import FinetuneDataset
from megatron_lite.data.finetuning.examples import Examples, ReadingOptions, read_examples
from megatron_lite.data.finetuning.forms import listed
from megatron_lite.data.finetuning.image_dataset import ImageDataset
from megatron_lite.data.finetuning.pair_dataset import PairDataset
from megatron_lite.data.finetuning.pieces import (
    PairPieces,
    Pieces,
    pairs_for,
    pieces_for,
    rated_for,
)
from megatron_lite.data.finetuning.preview import preview
from megatron_lite.data.finetuning.splits import SMALLER_IMAGES, samples_of, split_datasets
from megatron_lite.data.images.places import Images
from megatron_lite.data.images.reader import ImageReader
from megatron_lite.data.index_cache import cache_key
from megatron_lite.data.samples import Dataset
from megatron_lite.data.tokenizer import Tokenizer
from megatron_lite.objectives.epochs import epochs_shown, evaluations, training_length
from megatron_lite.objectives.training_data import Say, Setup, TrainingData
from megatron_lite.settings.config import Settings
from megatron_lite.settings.learning import Kto
from megatron_lite.settings.sizes import Sizes


def read_examples_of(
    settings: Settings,
    tokenizer: Tokenizer,
    *,
    pairs: bool = False,
    margins: bool = False,
    rated: bool = False,
    images: ImageReader | None = None,
) -> "ExampleData":
    """Read --finetune-data and --valid-finetune-data. Raises UsageError, CorruptCheckpoint.

    pairs: whether records are pairs of answers. margins: whether pairs may have margins. rated: whether records are rated
    answers. images: reads images in chats.
    """
    data = settings.data
    assert data.finetune_data is not None
    template = read_template(data.chat_template)
    options = ReadingOptions(
        data.finetune_form,
        data.finetune_turns,
        template,
        pairs=pairs,
        margins=margins,
        rated=rated,
        images=images,
    )
    valid = None
    if data.valid_finetune_data:
        valid = read_examples(data.valid_finetune_data, tokenizer, options, "--valid-finetune-data")
    train = read_examples(data.finetune_data, tokenizer, options)
    if rated:
        return ExampleData(train, valid, RATED, rated_for)
    if pairs:
        return ExampleData(train, valid, PAIRS, pairs_for)
    return ExampleData(train, valid, EXAMPLES, pieces_for)


class Records(NamedTuple):
    """The kind of records that a run learns from."""

    noun: str
    stored: int
    """Sequences that are read of each."""
    learned: int
    """Sequences of a sample that are learned; 0: several records are packed into one sequence."""


EXAMPLES, PAIRS, RATED = (
    Records("example", 1, 0),
    Records("pair", 2, 2),
    Records("rated answer", 2, 1),
)


@dataclass(frozen=True)
class Packed:
    """Examples fitted to the length of a sample."""

    train: Pieces
    valid: Pieces | None


@dataclass(frozen=True)
class ExampleData(TrainingData):
    """Examples for training and, optionally, for evaluation."""

    train: Examples
    valid: Examples | None
    records: Records
    fit: Callable[[Examples, int], Pieces]
    """Returns the pieces of examples for samples of a length."""
    packed: Packed | None = None
    """None before `fitted`."""

    @property
    def longest(self) -> int:
        """See TrainingData. 0 if the training examples are empty."""
        longest_valid = self.valid.longest if self.valid else 0
        return max(self.train.longest, longest_valid) if self.train.longest else 0

    @property
    def tokens(self) -> int:
        """See TrainingData."""
        return len(_own_tokens(self.train, self.records))

    @property
    def reader(self) -> ImageReader | None:
        """See TrainingData."""
        for examples in (self.train, self.valid):
            if examples is not None and examples.images is not None and examples.images.placed:
                return examples.images.reader
        return None

    def fitted(
        self, settings: Settings, sizes: Sizes, progress: Progress, say: Say
    ) -> tuple[Settings, "ExampleData"]:
        """See TrainingData.fitted. It converts --epochs to steps, and lets an evaluation cover all evaluation examples.

        Each epoch contains every example. The last step is filled up with further examples. The steps of a continued
        run may have had another batch size, so samples are counted and not steps.
        """
        if settings.data.split is not None and self.valid is not None:
            raise UsageError(
                "--split divides --finetune-data; with --valid-finetune-data there is nothing to divide"
            )
        train = self.fit(self.train, sizes.seq)
        valid = self.fit(self.valid, sizes.seq) if self.valid else None
        packed = Packed(train, valid)
        seed, split = settings.training.seed, settings.data.split

        def samples_for_training(epochs: int) -> int:
            return samples_of(train, sizes.seq, seed, split, epochs)

        def samples_for_evaluation(epochs: int) -> int:
            assert valid is not None
            return samples_of(valid, sizes.seq, seed, None, epochs)

        length = training_length(settings, sizes, samples_for_training, progress)
        measured = None if valid is None else samples_for_evaluation
        chosen = evaluations(settings, sizes, samples_for_training, measured, say)
        training = replace(settings.training, **length, **chosen)
        return replace(settings, training=training), replace(self, packed=packed)

    def datasets(self, setup: Setup, samples: Sequence[int]) -> list[Dataset | None]:
        assert self.packed is not None
        settings = setup.settings
        return split_datasets(
            self.packed.train,
            self.packed.valid,
            settings.data.split,
            setup.sizes.seq,
            settings.training.seed,
            samples,
        )

    def identity(self, setup: Setup) -> str:
        """See TrainingData.identity. It is a hash of all tokens, and of margins or ratings if there are any."""
        examples = self.train
        judged = {"margins": examples.margins, "good": examples.good}
        present = {name: values for name, values in judged.items() if values is not None}
        return cache_key(
            tokens=examples.tokens, learned=examples.learned, bounds=examples.bounds, **present
        )

    def introduction(self, setup: Setup, dataset: Dataset | None) -> Iterator[str]:
        """Yield a summary of the data, and warnings about examples that were left out."""
        assert isinstance(dataset, FinetuneDataset | ImageDataset | PairDataset)
        assert self.packed is not None
        noun = self.records.noun
        yield self._summary(setup, self.packed.train, dataset)
        yield from epochs_shown(setup.settings.training)
        for what, pieces in (("", self.packed.train), (" for evaluation", self.packed.valid)):
            if pieces is not None:
                yield from remarks(pieces, setup.sizes.seq, noun, what)
        if self.train.good is not None:
            yield from balance(self.train.good, setup.settings.kto)
        if setup.settings.data.show_sample:
            yield from preview(dataset[0], setup.tokenizer)

    def _summary(
        self,
        setup: Setup,
        pieces: Pieces,
        dataset: FinetuneDataset | ImageDataset | PairDataset,
    ) -> str:
        examples = pieces.examples
        seq = setup.sizes.seq
        epoch = dataset.epoch_samples
        records = self.records
        number = counted(len(examples) // records.stored, records.noun)
        if examples.good is not None:
            good = int(examples.good.sum())
            number = f"{number} ({good:,} good, {len(examples.good) - good:,} bad)"
        marks = _own_tokens(examples, records)
        tokens = f"{len(marks):,} tokens ({int(marks.sum()):,} learned)"
        samples = f"{counted(epoch, 'sample')} of {seq} tokens"
        if records.learned:
            samples = f"{counted(records.learned, 'row')} of {seq} tokens each"
        steps = epoch / setup.sizes.batch.full
        plural = "" if steps == 1 else "s"
        if examples.images is not None and examples.images.placed:
            number = f"{number}, {_images(examples.images)}"
        return f"{number}, {tokens}, {samples}, {steps:,.4g} step{plural} an epoch"


def _own_tokens(examples: Examples, records: Records) -> NDArray[np.bool_]:
    """Return whether each token is learned, of all tokens of records. The other answer to a rated answer's question is left out."""
    if records is not RATED:
        return examples.learned
    own = np.tile((True, False), len(examples) // 2)
    kept: NDArray[np.bool_] = examples.learned[np.repeat(own, np.diff(examples.bounds))]
    return kept


BALANCED = (1.0, 1.33)
"""The advised weight of all good answers divided by that of all bad ones, in KTO's paper and TRL."""

MIDDLE = 1.15
"""A value between them, which rounding doesn't leave."""


def balance(good: NDArray[np.bool_], kto: Kto) -> Iterator[str]:
    """Yield a line if good answers together count much more or less than bad ones."""
    goods, bads = int(good.sum()), int((~good).sum())
    if not goods or not bads:
        word = "good" if goods else "bad"
        yield f"notice: all answers are {word}; KTO learns from the difference between good and bad ones"
        return
    weight_of_goods, weight_of_bads = (
        kto.kto_desirable_weight * goods,
        kto.kto_undesirable_weight * bads,
    )
    if not weight_of_goods or not weight_of_bads:
        return
    share = weight_of_goods / weight_of_bads
    low, high = BALANCED
    if not low <= share <= high:
        advised = weight_of_goods / bads / MIDDLE
        yield (
            f"notice: good answers together count {share:.3g} times as much as bad ones; the authors of KTO advise {low:g} to {high:g}, "
            f"such as --kto-undesirable-weight {advised:.3g}"
        )


def _images(images: Images) -> str:
    """Return a text such as `4 images of 9 to 35 tokens`."""
    least, most = images.tokens.min(), images.tokens.max()
    sizes = f"{most:,}" if least == most else f"{least:,} to {most:,}"
    return f"{counted(images.count, 'image')} of {sizes} tokens"


def _margins(margins: NDArray[np.float64]) -> str:
    """Return a text such as `margins from 0 to 2.5, 1.25 in the mean`."""
    return f"margins from {margins.min():g} to {margins.max():g}, {margins.mean():.4g} in the mean"


def remarks(pieces: Pieces, seq: int, noun: str, what: str) -> Iterator[str]:
    """Yield a line for each property of the examples that a user may not expect. what: the purpose of the examples."""
    examples = pieces.examples
    margins = pieces.margins if isinstance(pieces, PairPieces) else None
    if margins is not None and margins.size:
        yield f"{_margins(margins)}{what}"
    if examples.equal:
        pairs = counted(examples.equal, "pair")
        yield f"warning: left out, as both answers are the same: {pairs}{what}"
    if pieces.cut:
        number = counted(pieces.cut, noun)
        present, past = ("is", "was") if pieces.cut == 1 else ("are", "were")
        yield f"warning: {number}{what} {present} longer than --seq-length {seq} and {past} cut"
    if pieces.dropped:
        number = counted(pieces.dropped, noun)
        verb, them = ("was", "it") if pieces.dropped == 1 else ("were", "them")
        yield f"warning: {number}{what} {verb} dropped: nothing to learn is left of {them}"
    if examples.images is not None:
        left_out = examples.images.outside(pieces.starts, pieces.read_ends)
        if left_out:
            number = counted(left_out, "image")
            verb = are(left_out)
            yield f"warning: {number}{what} {verb} in no sample, because --seq-length {seq} is too short; {SMALLER_IMAGES}"
    if examples.unread:
        yield f"fields that are not read{what}: {listed(sorted(examples.unread))}"
    if examples.ratings:
        records = counted(examples.ratings, "record")
        yield (
            f'warning: {records}{what} with a "label" of true or false, which is not read: bad answers are learned like good ones; '
            "--kto learns from ratings"
        )
    if examples.plain_chats:
        number = f"{examples.plain_chats:,}"
        yield f"{number} instructions{what} are written out: the tokenizer has no chat template"
