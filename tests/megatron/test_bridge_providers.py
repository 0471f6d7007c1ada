"""The settings that Megatron-Bridge 0.6.2 writes for published models describe these models, or are refused by name.

tests/fixtures/bridge_providers.json has the fields that Bridge itself wrote (tests/bridge_providers.py): `common` ones, and the others
of each model. A marked test makes them again, in the environment of test_bridge_loads.py.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from megaconv.errors import UnknownFamily
from megaconv.families import family_of_hf
from megaconv.megatron.arguments.provider import provider_arguments
from megaconv.megatron.arguments.read import from_arguments, tensor_fields
from megaconv.model.fields import NOT_COMPUTED
from megaconv.model.meaning import lost_fields
from tests.bridge_process import NEEDS_BRIDGE, ask
from tests.conftest import FIXTURES

FILE = FIXTURES / "bridge_providers.json"
STORED = json.loads(FILE.read_text())
PUBLISHED = {
    each["model"]: each["config"]
    for each in json.loads((FIXTURES / "published_models.json").read_text())
}
DESCRIBED = (
    *(
        "Qwen/Qwen2.5-0.5B",
        "Qwen/Qwen3-0.6B",
        "Qwen/Qwen3-30B-A3B",
        "Qwen/Qwen3-Next-80B-A3B-Instruct",
    ),
    *("Qwen/Qwen3.5-4B", "meta-llama/Llama-2-7b-hf", "meta-llama/Llama-3.1-8B-Instruct"),
    *("mistralai/Mistral-7B-v0.3", "google/gemma-2b", "google/gemma-2-2b", "google/gemma-3-1b-it"),
    *("zai-org/GLM-4.5-Air", "zai-org/GLM-4.7-Flash", "deepseek-ai/DeepSeek-V3"),
    *("moonshotai/Moonlight-16B-A3B", "MiniMaxAI/MiniMax-M2.5", "allenai/OLMoE-1B-7B-0924"),
    *("openai/gpt-oss-20b", "nvidia/NVIDIA-Nemotron-Nano-9B-v2"),
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
)
"""Published models that the settings describe, at least one for each of Bridge's providers that have a family here."""
DEFAULTS = {
    "Exaone4ForCausalLM": "exaone4",
    "Ernie4_5_MoeForCausalLM": "ernie4_5_moe",
    "FalconH1ForCausalLM": "falcon_h1",
    "Gemma4ForCausalLM": "gemma4_text",
}
"""Architecture -> its model_type, with the default sizes of transformers' class."""
REFUSED = ("stepfun-ai/Step-3.5-Flash", *DEFAULTS)
SHOWN_BY_TENSORS = "attention.qk_norm_width"


def configs() -> dict[str, Any]:
    defaults = {
        name: {"model_type": kind, "architectures": [name]} for name, kind in DEFAULTS.items()
    }
    return {name: PUBLISHED.get(name) or defaults[name] for name in (*DESCRIBED, *REFUSED)}


def fields_of(model: str) -> dict[str, Any]:
    return {**STORED["common"], **STORED["models"][model]}


@pytest.mark.parametrize("model", DESCRIBED)
def test_the_settings_of_megatron_bridge_describe_the_model(model: str) -> None:
    raw = PUBLISHED[model]
    config = family_of_hf(raw, model).read_hf(raw)
    args = provider_arguments(fields_of(model), "run_config.yaml: model", complete=True)
    back = from_arguments(args, tensor_fields(config), family=config.family)
    lost = lost_fields(config, back, but=(*NOT_COMPUTED, SHOWN_BY_TENSORS))
    if "positions.scaling" in lost:
        own, found = lost.pop("positions.scaling")
        assert own is None
        assert found["factor"] == 1, "a yarn that changes something"
    assert lost == {}


@pytest.mark.parametrize("model", REFUSED)
def test_layers_that_compute_more_than_the_settings_say_need_the_config_json(model: str) -> None:
    fields = fields_of(model)
    named = "is megatron.bridge.models.*(layer_spec|block_spec|Provider); .*pass --config"
    with pytest.raises(UnknownFamily, match=named):
        provider_arguments(fields, "run_config.yaml: model", complete=True)
    provider_arguments(fields, "run_config.yaml: model", complete=False)


BRIDGE, ORACLE, UNLESS_MISSING = NEEDS_BRIDGE


@pytest.mark.slow
@BRIDGE
@ORACLE
@UNLESS_MISSING
def test_megatron_bridge_writes_these_settings(tmp_path: Path) -> None:
    (tmp_path / "configs.json").write_text(json.dumps(configs()))
    ask("tests.bridge_providers", tmp_path / "configs.json", tmp_path / "found.json")
    assert json.loads((tmp_path / "found.json").read_text()) == STORED
