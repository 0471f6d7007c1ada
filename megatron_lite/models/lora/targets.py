"""The selection of adapted modules by the ends of their names."""

from collections.abc import Sequence

from megaconv.errors import UsageError
from megaconv.model.config import ModelConfig
from megatron_lite.models.lora.shares import Module, modules_of

ALL_LINEAR = "all-linear"
_NOT_IN_PEFT = ".mixer.out_proj"
"""The matrix of Mamba 2 for which peft refuses adapters: fused kernels would skip them."""


def is_target(module: Module, core: str, targets: Sequence[str]) -> bool:
    """Return whether a target is the end of the module's path in transformers' model, or of its path in Megatron's (`core`).

    `all-linear` leaves out the matrix that peft refuses, so that peft can load the adapter.
    """
    name = f"{module.path}.{module.parameter}" if module.parameter else module.path
    if ALL_LINEAR in targets and not core.endswith(_NOT_IN_PEFT):
        return True
    return any(
        path == word or path.endswith(f".{word}") for word in targets for path in (name, core)
    )


def check_targets(config: ModelConfig, targets: Sequence[str], *, found: bool) -> None:
    """Raise UsageError for targets that no module of the model's decoder has. found: whether any matrix has an adapter."""
    known = {where.module.key for where in modules_of(config).values()} | {
        "linear_qkv", "linear_proj", "linear_fc1", "linear_fc2", ALL_LINEAR,
    }  # fmt: skip
    for word in targets:
        refuse_commas("--lora-targets", word)
        if word.rpartition(".")[2] not in known:
            raise UsageError(
                f"--lora-targets {word}: is no matrix of this model; there are {', '.join(sorted(known))}"
            )
    if not found:
        raise UsageError(
            f"--lora-targets {' '.join(targets)}: no matrix of this model's layers is among them"
        )


def refuse_commas(flag: str, word: str) -> None:
    """Raise UsageError for a word that joins several by commas, where spaces separate them."""
    if "," in word:
        instead = " ".join(word.replace(",", " ").split())
        raise UsageError(f"{flag} {word}: leave out the commas: {instead}")
