"""The teacher of a distillation on the ranks of its student. `plan` uses it without torch."""

from dataclasses import replace

from megaconv.errors import UsageError
from megaconv.model.config import ModelConfig
from megaconv.model.layout import Layout
from megaconv.planning.recomputation import KEEP_ALL
from megatron_lite.settings.options import Balancing, ModelOptions


def teacher_options(of_student: ModelOptions) -> ModelOptions:
    """Return the options of a model that is computed without gradients. Its experts drop no tokens."""
    return replace(
        of_student,
        balance=Balancing(router_dtype=of_student.balance.router_dtype),
        lora=None,
        fp8=None,
        trains=False,
        recompute=KEEP_ALL,
        offloaded_layers=0,
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )


def teacher_layout(of_student: Layout, config: ModelConfig) -> Layout:
    """Return the teacher's layout: layers shared evenly among the stages, without virtual stages."""
    each, further = divmod(config.layer_count, of_student.pp)
    stages = tuple(each + (stage < further) for stage in range(of_student.pp))
    ep, etp = (of_student.ep, of_student.etp) if config.experts.count else (1, 1)
    return replace(of_student, vpp=1, ep=ep, etp=etp, stage_layers=stages)


def require_tokens(teacher: ModelConfig, student: ModelConfig, given: str) -> None:
    """Raise UsageError if the teacher has fewer tokens than its student. given: --teacher-load."""
    if teacher.vocab < student.vocab:
        raise UsageError(
            f"--teacher-load {given}: has {teacher.vocab:,} tokens, and the trained model {student.vocab:,}; choose a teacher with the "
            "same tokenizer"
        )
