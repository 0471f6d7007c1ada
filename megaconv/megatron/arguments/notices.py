"""Notices on models that Megatron core computes differently from their original software.

The converter's saver and the trainer's runs use the same notices. `to_arguments` refuses models that Megatron can't
compute.
"""

from megaconv.families import family
from megaconv.families.parts.dropouts import dropout_notices
from megaconv.families.parts.whole_model import whole_notices
from megaconv.megatron.arguments.beyond_core import is_of_the_trainer
from megaconv.megatron.arguments.expressible import is_representable
from megaconv.megatron.arguments.mamba import EPSILON, has_own_epsilon, mixer_epsilon
from megaconv.megatron.arguments.provider_fields import NOT_IN_CORE
from megaconv.megatron.arguments.rope import has_yarn
from megaconv.megatron.arguments.write import left_out_of_arguments
from megaconv.model.config import ModelConfig

_FOR_WHOM = (
    "its checkpoints are for megatron-lite, and for `megaconv convert` to Hugging Face's files"
)


def run_notices(config: ModelConfig) -> tuple[str, ...]:
    """Notices for the user on the checkpoints of a run that trains this model."""
    if is_of_the_trainer(config) or not is_representable(config):
        return (f"Megatron core has no modules for this model: {_FOR_WHOM}",)
    if has_own_epsilon(config):
        reason = f"Megatron core's Mamba 2 has the epsilon {EPSILON} inside, this model's has {mixer_epsilon(config)}"
        return (f"{reason}: {_FOR_WHOM}",)
    left_out = left_out_of_arguments(config)
    if left_out:
        fields = ", ".join(left_out)
        return (f"Megatron's arguments can't describe this model's {fields}: {_FOR_WHOM}",)
    return (*core_notices(config), *embedding_notices(config), *script_notices(config))


def core_notices(config: ModelConfig) -> tuple[str, ...]:
    """Notices for the user on this model in Megatron core."""
    own = family(config.family).notices(config)
    return (
        *_modules_of_others(config),
        *_head_of_legacy(config),
        *own,
        *whole_notices(config.whole),
        *dropout_notices(config),
    )


def script_notices(config: ModelConfig) -> tuple[str, ...]:
    """Notices on features that core's modules compute, but Megatron-LM's training script or its GPTModel leaves out."""
    found = []
    scaling = config.positions.scaling or {}
    if scaling.get("rope_type") == "llama3" and scaling["factor"] != 8:
        found.append(
            f"rope is scaled by {scaling['factor']}: Megatron-LM's scripts up to core 0.18 always use 8"
        )
    if scaling.get("rope_type") == "linear":
        found.append(
            "positions are scaled linearly: Megatron-LM's scripts up to core 0.18 ignore that for core models"
        )
    if has_yarn(config):
        found.append(
            "positions are scaled by yarn: GPTModel of core 0.16 looks for yarn_* in its configuration, where Megatron-LM's training "
            "script puts none; set them there from the checkpoint's args of these names"
        )
    return tuple(found)


def embedding_notices(config: ModelConfig) -> tuple[str, ...]:
    """The notice for a model with a scaled embedding."""
    if config.embedding_scale is None:
        return ()
    return (
        f"the embedding is scaled by {config.embedding_scale:.6g}: Megatron core's GPTModel doesn't do that; build the model as "
        "Megatron-Bridge and NeMo do",
    )


def _modules_of_others(config: ModelConfig) -> tuple[str, ...]:
    lacking = [what for feature, what in NOT_IN_CORE.items() if config.has(feature)]
    if not lacking:
        return ()
    built = "the model has to be built with Megatron-Bridge's or others; names in the checkpoint are Megatron-Bridge's"
    return (f"Megatron core has no modules for {', '.join(lacking)}: {built}",)


def _head_of_legacy(config: ModelConfig) -> tuple[str, ...]:
    if not config.has("pooler !binary_head"):
        return ()
    what = "classification" if config.has("classification_head") else "multiple-choice"
    return (
        f"Megatron core's BERT has no {what} head: these files are for megatron-lite, and to be converted; "
        "--saver legacy writes those of Megatron-LM's tasks",
    )
