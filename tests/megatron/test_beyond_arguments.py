"""Models that Megatron's arguments can't describe: the trainer's own arguments for their routers, and what its runs say."""

from argparse import Namespace
from typing import Any

import pytest

from megaconv.errors import CorruptCheckpoint, NotExpressible
from megaconv.megatron.arguments.notices import run_notices
from megaconv.megatron.arguments.read import from_arguments
from megaconv.megatron.arguments.router import BIAS_ON_LOGITS, RENORMALIZED
from megaconv.megatron.arguments.write import LEFT_OUT
from megaconv.model.config import ModelConfig
from megaconv.model.fields import changed
from tests.config_models import found_in_tensors, raw_config, read
from tests.megatron.test_megatron_args import arguments

KOLIBRI = read(raw_config("kolibri1"))
COMMAND = changed(
    read(raw_config("cohere2_moe")), {"experts.score": "sigmoid", "experts.renormalize": False}
)
LLAMA_4 = changed(read(raw_config("llama4")), {"experts.renormalize": True})
OWN: tuple[tuple[ModelConfig, dict[str, Any]], ...] = (
    (KOLIBRI, {RENORMALIZED: False, BIAS_ON_LOGITS: True}),
    (COMMAND, {RENORMALIZED: False}),
    (LLAMA_4, {RENORMALIZED: True}),
)
"""Models with the arguments that a run of the trainer saves for them."""
EACH = pytest.mark.parametrize(("config", "own"), OWN, ids=["kolibri1", "cohere2_moe", "llama4"])


@EACH
def test_a_run_saves_its_router_in_arguments_of_its_own(
    config: ModelConfig, own: dict[str, Any]
) -> None:
    written = arguments(config, beside_config=True)
    assert {
        name: written[name] for name in (RENORMALIZED, BIAS_ON_LOGITS) if name in written
    } == own
    assert not [name for name in written.get(LEFT_OUT, ()) if name.startswith("experts.")]
    back = from_arguments(Namespace(**written), found_in_tensors(config), family=config.family)
    assert back.experts == config.experts


@EACH
def test_a_checkpoint_for_megatron_is_refused_and_a_run_says_whom_its_checkpoints_are_for(
    config: ModelConfig, own: dict[str, Any]
) -> None:
    with pytest.raises(NotExpressible, match="Megatron's sigmoid router"):
        arguments(config)
    (notice,) = run_notices(config)
    assert "its checkpoints are for megatron-lite" in notice


def test_a_bias_on_logits_is_refused_by_megatron_even_if_the_weights_sum_up_to_1() -> None:
    with pytest.raises(NotExpressible, match="adds its bias to the sigmoids of logits"):
        arguments(changed(KOLIBRI, {"experts.renormalize": True}))


def test_models_of_megatrons_routers_have_none_of_these_arguments() -> None:
    written = arguments(read(raw_config("minimax_m2")), beside_config=True)
    assert written.keys().isdisjoint((RENORMALIZED, BIAS_ON_LOGITS))


@pytest.mark.parametrize("name", [RENORMALIZED, BIAS_ON_LOGITS])
def test_another_value_than_true_or_false_is_refused_by_name(name: str) -> None:
    written = arguments(COMMAND, beside_config=True) | {name: "yes"}
    with pytest.raises(CorruptCheckpoint, match=f"{name} should be true or false, found 'yes'"):
        from_arguments(Namespace(**written), found_in_tensors(COMMAND), family="cohere2_moe")


@pytest.mark.parametrize("name", ["phi", "falcon", "cohere2_moe", "opt"])
def test_a_run_says_that_megatrons_arguments_lack_fields_of_its_model(name: str) -> None:
    """The converter refuses Megatron for these models, and a run saves them with a config.json."""
    config = read(raw_config(name))
    with pytest.raises(NotExpressible, match="which Megatron's arguments can't represent"):
        arguments(config)
    (notice,) = run_notices(config)
    left_out = arguments(config, beside_config=True)[LEFT_OUT]
    assert f"can't describe this model's {', '.join(left_out)}: its checkpoints are for" in notice


@pytest.mark.parametrize("name", ["llama", "mixtral", "deepseek_v3", "nemotron_h"])
def test_a_run_of_a_model_of_megatrons_says_nothing_about_fields(name: str) -> None:
    assert not [line for line in run_notices(read(raw_config(name))) if "can't describe" in line]
