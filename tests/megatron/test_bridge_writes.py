"""Checkpoints that Megatron-Bridge's own AutoBridge makes of Hugging Face models are read bit for bit.

It needs the environment of test_bridge_loads.py. The layers are core's local ones, which run on a CPU.
"""

from collections.abc import Mapping
from pathlib import Path

import pytest

import megaconv
from megaconv.model.fields import NOT_COMPUTED
from megaconv.model.meaning import lost_fields
from tests.bridge_process import NEEDS_BRIDGE, ask
from tests.megatron.test_bridge_loads import with_tokenizer
from tests.megatron.test_oracles import References, references

__all__ = ["references"]

pytestmark = NEEDS_BRIDGE
WITH_TOKENIZER = "llama"
MODELS: Mapping[str, str] = {
    WITH_TOKENIZER: "fp32",
    "llama, tied, rope scaling of llama 3": "fp32",
    "mistral": "fp32",
    "qwen2, tied": "fp32",
    "qwen3": "fp32",
    "qwen3_moe": "fp32",
    "gpt_oss": "bf16",
    "deepseek_v3, yarn": "fp32",
}
"""Variant -> the dtype in which Bridge saves it. It builds every GPT-OSS in bf16."""
OWN_VALUES = {"gpt_oss": ("mlp.clamp", "positions.scaling")}
"""Variant -> fields in which Bridge doesn't read config.json. It has those of the published GPT-OSS."""
NEW = "mtp."
"""Beginning of the names of tensors that Bridge makes anew: transformers' DeepSeek-V3 has no MTP layers."""


@pytest.fixture(scope="module")
def written(
    references: References, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[Path, Path]]:
    """(the model, the checkpoint that Bridge made of it) by variant, from one process."""
    folder = tmp_path_factory.mktemp("written")
    models = {name: references(name).directory for name in MODELS}
    models[WITH_TOKENIZER] = with_tokenizer(models[WITH_TOKENIZER], folder / "with-tokenizer")
    pairs = {name: (model, folder / name) for name, model in models.items()}
    paths = [path for pair in pairs.values() for path in pair]
    replies, warnings = ask("tests.bridge_writer", *paths)
    assert replies == [{}] * len(MODELS), f"{replies}\n{warnings[-4000:]}"
    return pairs


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_every_weight_that_megatron_bridge_saved_is_that_of_the_model(
    name: str, written: dict[str, tuple[Path, Path]], tmp_path: Path
) -> None:
    model, checkpoint = written[name]
    megaconv.convert(model, tmp_path / "model", saver="hf", dtype=MODELS[name])
    expected, found = megaconv.open(tmp_path / "model"), megaconv.open(checkpoint)
    others = (*NOT_COMPUTED, "mtp_layers", *OWN_VALUES.get(name, ()))
    assert lost_fields(expected.config, found.config, but=others) == {}
    differences = megaconv.diff(tmp_path / "model", checkpoint).differences
    assert [each for each in differences if not str(each.key).startswith(NEW)] == []


@pytest.mark.slow
def test_the_tokenizer_that_megatron_bridge_saved_is_in_the_output(
    written: dict[str, tuple[Path, Path]], tmp_path: Path
) -> None:
    megaconv.convert(written[WITH_TOKENIZER][1], tmp_path / "back", saver="hf")
    assert (tmp_path / "back" / "tokenizer.json").is_file()
