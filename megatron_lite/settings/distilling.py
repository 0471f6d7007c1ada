"""Settings of distillation. They have the form of the settings in config.py."""

from dataclasses import dataclass

from megatron_lite.settings.flag import flag


@dataclass(frozen=True)
class Distilling:
    """Distillation: learning the predictions of a teacher"""

    teacher_load: str | None = flag(
        None,
        "model whose predictions are learned: any checkpoint that megaconv reads, or a Hub id; it has the tokens of the trained model",
        remote=True,
        samples=True,
    )
    teacher_image_encoder: str | None = flag(
        None,
        "multimodal model whose encoder reads the teacher's images: a directory of Hugging Face's files (default: --teacher-load, if it "
        "is one)",
        samples=True,
    )
    distill_alpha: float = flag(
        1.0,
        "share of the divergence from the teacher in the loss; the rest is the cross entropy of the labels",
        samples=True,
    )
    distill_temperature: float = flag(
        1.0, "divisor of both models' logits in the divergence", samples=True
    )
    distill_beta: float = flag(
        0.0,
        "divergence: KL from the student to the teacher (0), from the teacher to the student (1), or from both to their mixture (between)",
        samples=True,
    )
    distill_on_policy: bool = flag(
        False,
        "--finetune-data holds prompts; the trained model completes them, and the teacher's predictions of these tokens are learned",
        samples=True,
    )
