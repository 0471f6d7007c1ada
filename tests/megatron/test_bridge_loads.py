"""Megatron-Bridge's own code loads what `--option for=megatron-bridge` writes, and computes what transformers computes.

It needs an environment of its own (docs/distributed-checkpoints.md has the commands), whose Python MEGATRON_BRIDGE_PYTHON names.
"""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import megaconv
from tests.bridge_process import NEEDS_BRIDGE, ask
from tests.megatron.test_oracles import DIVISOR, TOLERANCE, Reference, References, references

__all__ = ["references"]

pytestmark = NEEDS_BRIDGE
LOCAL = {"transformer_impl": "local"}
"""The oracle builds these layers; of experts their keys are others than Transformer Engine's."""
MODELS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "llama": ("GPTModelProvider", {**LOCAL, "tp": 2, "pp": 2}),
    "llama, tied, rope scaling of llama 3": ("GPTModelProvider", {}),
    "llama, all biases": ("GPTModelProvider", {}),
    "mistral": ("GPTModelProvider", {}),
    "qwen2, tied": ("GPTModelProvider", {"tp": 2}),
    "qwen3": ("GPTModelProvider", {}),
    "arcee": ("GPTModelProvider", {}),
    "smollm3": ("GPTModelProvider", {}),
    "gpt2": ("GPTModelProvider", {}),
    "gpt2, exact gelu": ("GPTModelProvider", {}),
    "qwen3_moe": ("GPTModelProvider", {"ep": 2, **LOCAL}),
    "mixtral": ("GPTModelProvider", LOCAL),
    "gpt_oss": ("GPTModelProvider", LOCAL),
    "deepseek_v3, yarn": ("MLAModelProvider", LOCAL),
}
"""Variant -> (the provider that Bridge builds it by, how it is written)."""


def with_tokenizer(model: Path, target: Path) -> Path:
    """A copy with a tokenizer of three words."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    shutil.copytree(model, target)
    tokenizer = Tokenizer(models.WordLevel({"ab": 0, "ba": 1, "no": 2}, unk_token="no"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(target / "tokenizer.json"))
    (target / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    return target


@pytest.fixture(scope="module")
def answers(
    references: References, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[dict[str, Any], Any]]:
    """(what Bridge says, logits) of every model, from one process: importing Bridge takes longer than all else."""
    import numpy as np

    directory, made = tmp_path_factory.mktemp("bridge"), {name: references(name) for name in MODELS}
    first = next(iter(made.values()))
    np.save(directory / "tokens.npy", first.tokens.numpy())
    inputs = {name: reference.directory for name, reference in made.items()}
    inputs["llama"] = with_tokenizer(inputs["llama"], directory / "with-tokenizer")
    always = {
        "make_vocab_size_divisible_by": DIVISOR,
        "ckpt_format": "torch_dist",
        "options": {"for": "megatron-bridge"},
    }
    for name, (_, how) in MODELS.items():
        megaconv.convert(inputs[name], directory / name, saver="core", **always, **how)
    written = [directory / name for name in MODELS]
    said, warnings = ask("tests.bridge_oracle", directory / "tokens.npy", *written)
    assert len(said) == len(written), warnings[-4000:]
    assert "Dropping unexpected config keys" not in warnings, "Bridge has left out a setting"
    files = {name: directory / f"{name}.npy" for name in MODELS}
    answered = {name: np.load(file) if file.is_file() else None for name, file in files.items()}
    return {name: (reply, answered[name]) for name, reply in zip(MODELS, said, strict=True)}


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_megatron_bridge_computes_what_transformers_does(
    name: str, references: References, answers: Any
) -> None:
    reply, logits = answers[name]
    assert "failed" not in reply, reply["trace"]
    reference: Reference = references(name)
    assert (reply["provider"], reply["step"]) == (MODELS[name][0], 1)
    assert (
        abs(logits[..., : reference.logits.shape[-1]] - reference.logits.numpy()).max() < TOLERANCE
    )


@pytest.mark.slow
def test_megatron_bridge_finds_the_tokenizer(answers: Any) -> None:
    assert answers["llama"][0]["tokens"] == [0, 1]
