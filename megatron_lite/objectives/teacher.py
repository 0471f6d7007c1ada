"""The teacher of a distillation: a second model on the same ranks, which is not trained."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from formats.tensor import LazyTensor
from formats.wording import counted
from megaconv.errors import CheckpointError, LayoutError, NotExpressible, UsageError
from megaconv.model.config import ModelConfig
from megaconv.model.fields import changed
from megaconv.planning.model_size import parameter_count
from megatron_lite.checkpoint.restore import Start
from megatron_lite.checkpoint.weights import load_weights
from megatron_lite.data.batches import Batch
from megatron_lite.data.images.reader import ImageReader
from megatron_lite.engine import Engine
from megatron_lite.models.batch import Microbatch
from megatron_lite.objectives.feeder import Feeder
from megatron_lite.objectives.image_models import TEACHER_FLAG, multimodal_directory
from megatron_lite.objectives.training_data import Setup
from megatron_lite.settings.sizes import check_sizes
from megatron_lite.settings.teacher import teacher_layout, teacher_options


def load_teacher(student: Engine, teacher: Start, setup: Setup) -> Engine:
    """Return the teacher's part of this rank. Collective. Raises CheckpointError."""
    _check(student, teacher, setup)
    engine = teacher_engine(student, teacher.config, teacher.weights)
    size = counted(parameter_count(teacher.config), "parameter")
    setup.say(f"teacher: {teacher.path}, {size}, not trained")
    return engine


def teacher_engine(
    student: Engine, config: ModelConfig, weights: Mapping[str, LazyTensor]
) -> Engine:
    """Return a model on the student's ranks, with the student's dtype. weights: by canonical name. Collective."""
    options = teacher_options(student.options)
    layout = teacher_layout(student.grid.layout, config)
    described = changed(config, {"dtype": options.dtype})
    engine = Engine(described, replace(student.grid, layout=layout), options, None)
    load_weights(engine, weights)
    return engine


def _check(student: Engine, teacher: Start, setup: Setup) -> None:
    """Raise LayoutError if the teacher can't have the layout."""
    sizes, layout = setup.sizes, teacher_layout(student.grid.layout, teacher.config)
    try:
        check_sizes(
            teacher.config,
            layout,
            world=setup.place.world,
            options=teacher_options(student.options),
            sequence=sizes.seq,
            microbatches=layout.pp,
            cp=sizes.cp,
        )
    except CheckpointError as error:
        raise LayoutError(f"--teacher-load {teacher.path}: {error}") from None


def teacher_reader(
    teacher: Start, own: ImageReader | None, asked: str | None
) -> ImageReader | None:
    """Return the teacher's reader of the images that the student reads; None if there are none.

    asked: --teacher-image-encoder. Raises UsageError for a teacher that reads no images, or that reads other tokens in their places.
    """
    directory = multimodal_directory(asked, teacher.path, TEACHER_FLAG)
    if own is None:
        return None
    if directory is None:
        raise UsageError(
            f"--teacher-load {teacher.path}: is no directory of a multimodal model, and --finetune-data has images; {TEACHER_FLAG} DIR "
            "names the one that reads them"
        )
    reader = ImageReader(directory)
    try:
        own.followed_by(reader)
    except (UsageError, NotExpressible) as error:
        named = "--teacher-load" if asked is None else TEACHER_FLAG
        raise UsageError(f"{named} {error}") from None
    return reader


@dataclass(frozen=True, kw_only=True)
class TaughtFeeder(Feeder):
    """Makes microbatches with the teacher's predictions."""

    teacher: Engine
    learned: Feeder
    """Makes microbatches with the images as the student reads them."""
    taught: Feeder
    """Makes the same microbatches with the images as the teacher reads them. Without images, it is the same object."""

    def microbatches(self, batch: Batch) -> list[Microbatch]:
        """See Feeder.microbatches. Collective."""
        learned = self.learned.microbatches(batch)
        taught = None if self.taught is self.learned else self.taught.microbatches(batch)
        return with_teaching(self.teacher, learned, taught)


def with_teaching(
    teacher: Engine, learned: Sequence[Microbatch], taught: Sequence[Microbatch] | None = None
) -> list[Microbatch]:
    """Return the student's microbatches with the teacher's predictions, on the last stage. Collective.

    taught: the same sequences as the teacher reads them; None: as the student does.
    """
    found = teacher.teaching(learned if taught is None else taught)
    if not found:
        return list(learned)
    return [
        replace(batch, teaching=teaching) for batch, teaching in zip(learned, found, strict=True)
    ]
