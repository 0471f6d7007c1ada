"""Small students of a small teacher, whose logits are limited."""

from functools import cache

import torch

from megatron_lite.checkpoint.adapters import init_adapters
from megatron_lite.checkpoint.initial_weights import initial_weights
from megatron_lite.engine import Engine
from megatron_lite.models.batch import Microbatch
from megatron_lite.objectives.taught import TeacherLoss
from megatron_lite.objectives.teacher import teacher_engine, with_teaching
from megatron_lite.settings.options import Distillation
from tests.trainer.parallel import small
from tests.trainer.parallel.small import MODELS, Case

TEACHER = MODELS["gemma2"]
LOSS = TeacherLoss(Distillation(0.7, 2.0, 0.3))


def make_engine(case: Case, *, device: torch.device) -> Engine:
    """Make a rank's student, with fresh adapters if the case has some."""
    engine = small.make_engine(case, device=device, criterion=LOSS)
    if engine.options.lora is not None:
        init_adapters(engine, seed=7)
    return engine


@cache
def _teacher_of(student: Engine) -> Engine:
    return teacher_engine(student, TEACHER, initial_weights(TEACHER, 0.1, 9))


def own_batches(case: Case, step: int, engine: Engine) -> list[Microbatch]:
    """The microbatches of this data-parallel rank, with the teacher's predictions."""
    own = small.own_batches(case, step, engine)
    on_device = [batch.to(engine.grid.device) for batch in own]
    return with_teaching(_teacher_of(engine), on_device)
