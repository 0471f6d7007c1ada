"""Llama 3.2 Vision: damaged models and wrong options are refused, with the numbers of the original's layers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import megaconv
from tests.families.test_llama_vision import ADDED, LAYERS, PREFIX, VOCAB, create, write_adapter
from tests.runs import assert_refused, run
from tests.whole_models import raw_config_of, weights, write_model_files


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return create(tmp_path_factory.mktemp("mllama") / "hf")


def test_an_adapter_of_the_original_is_not_merged_by_the_numbers_of_the_llama(
    tmp_path: Path,
) -> None:
    source = create(tmp_path / "hf", "text")
    write_adapter(tmp_path / "adapter", {"model.layers.2.self_attn.q_proj": (64, 64)})
    command = ("convert", source, tmp_path / "out", "--saver", "hf", "--text-only")
    outcome = run(*command, "--adapter", tmp_path / "adapter")
    assert_refused(outcome, 2, "numbers the layers", "megaconv merge MODEL ADAPTER")


@pytest.mark.parametrize("saver", ["core", "legacy", "gguf", "mlx"])
def test_the_whole_model_is_refused_elsewhere_with_one_remedy(
    saver: str, original: Path, tmp_path: Path
) -> None:
    outcome = run("convert", original, tmp_path / "out", "--saver", saver)
    assert_refused(outcome, 3, "cross-attention to images", "--text-only", "LlamaForCausalLM")


def test_only_the_llama_is_quantized(original: Path, tmp_path: Path) -> None:
    command = (
        "convert",
        original,
        tmp_path / "out",
        "--saver",
        "hf",
        "--quantize",
        "fp8-per-channel",
    )
    assert_refused(run(*command), 3, "--quantize", "--text-only")
    done = run(*command, "--text-only")
    assert done.status == 0, done.err
    assert raw_config_of(tmp_path / "out")["quantization_config"]["quant_method"] == "modelopt"


@pytest.mark.parametrize(
    "listed",
    ["1, 4", [1, "4"], [1, 4.0], [1, LAYERS], [-2, 1], [1, 4, 4], list(range(LAYERS)), {"1": 4}],
    ids=str,
)
def test_an_impossible_list_of_layers_is_refused(
    listed: Any, original: Path, tmp_path: Path
) -> None:
    raw = raw_config_of(original)
    raw["text_config"]["cross_attention_layers"] = listed
    source = write_model_files(tmp_path / "hf", weights(original), raw)
    for option in ([], ["--text-only"]):
        outcome = run("convert", source, tmp_path / "out", "--saver", "hf", *option)
        assert_refused(
            outcome, 3, str(source / "config.json"), "cross_attention_layers should list"
        )


Change = Callable[[dict[str, torch.Tensor], dict[str, Any]], Any]
DAMAGED: dict[str, tuple[Change, tuple[str, ...]]] = {
    "a listed layer has self-attention": (
        lambda tensors, text: text.update(cross_attention_layers=[1, 3, 4]),
        ("layer 3 has self-attention", "cross_attention_layers is [1, 3, 4]"),
    ),
    "a layer with cross-attention is not listed": (
        lambda tensors, text: text.update(cross_attention_layers=[4]),
        ("layer 1 has cross-attention",),
    ),
    "there are more layers": (
        lambda tensors, text: text.update(num_hidden_layers=5),
        ("holds layer 5", "5 layers (num_hidden_layers)"),
    ),
    "there are fewer layers": (
        lambda tensors, text: text.update(num_hidden_layers=7),
        ("lacks layers.6.input_layernorm.weight",),
    ),
    "a layer with cross-attention is missing": (
        lambda tensors, text: [
            tensors.pop(name) for name in [*tensors] if name.startswith(f"{PREFIX}4.")
        ],
        ("lacks layers.4.input_layernorm.weight", "and 5 more"),
    ),
    "a gate is missing": (
        lambda tensors, text: tensors.pop(f"{PREFIX}1.cross_attn_mlp_gate"),
        ("lacks layers.1.cross_attn_mlp_gate",),
    ),
    "a tensor is missing": (
        lambda tensors, text: tensors.pop(f"{PREFIX}5.mlp.up_proj.weight"),
        ("lacks layers.5.mlp.up_proj.weight",),
    ),
    "a tensor is there under both names": (
        lambda tensors, text: tensors.update(
            {"model.language_model.layers.0.input_layernorm.weight": torch.ones(64)}
        ),
        ("layers.0.input_layernorm.weight twice",),
    ),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_damaged_model_is_refused_with_the_numbers_of_its_own_layers(
    damage: str, original: Path, tmp_path: Path
) -> None:
    change, words = DAMAGED[damage]
    tensors, raw = weights(original), raw_config_of(original)
    change(tensors, raw["text_config"])
    source = write_model_files(tmp_path / "hf", tensors, raw)
    for option in ([], ["--text-only"]):
        outcome = run("convert", source, tmp_path / "out", "--saver", "hf", *option)
        assert_refused(outcome, 3, *words)


@pytest.mark.parametrize(
    ("name", "tensor", "words"),
    [
        ("language_model.lm_head.weight", None, "has no lm_head.weight"),
        ("language_model.model.embed_tokens.weight", None, "has no model.embed_tokens.weight"),
        ("language_model.model.embed_tokens.weight", torch.ones(VOCAB, 64), "128 rows"),
        ("language_model.lm_head.weight", torch.ones(VOCAB + ADDED, 64), "120 rows"),
        (f"{PREFIX}0.mlp.extra.weight", torch.ones(2, 2), "mlp.extra.weight"),
        (f"{PREFIX}2.mlp.up_proj.weight", torch.ones(2, 2), "mlp.up_proj.weight"),
    ],
)
def test_a_llama_that_is_not_complete_is_refused(
    name: str, tensor: torch.Tensor | None, words: str, original: Path, tmp_path: Path
) -> None:
    tensors = weights(original)
    tensors.pop(name, None)
    tensors |= {} if tensor is None else {name: tensor}
    source = write_model_files(tmp_path / "hf", tensors, raw_config_of(original))
    outcome = run("convert", source, tmp_path / "out", "--saver", "core", "--text-only")
    assert_refused(outcome, 3, words)


def test_another_original_is_refused(original: Path, tmp_path: Path) -> None:
    alone = tmp_path / "alone"
    megaconv.convert(original, alone, saver="hf", text_only=True, workers=1)
    tensors, raw = weights(original), raw_config_of(original)
    name = "language_model.model.embed_tokens.weight"
    other = write_model_files(tmp_path / "other", {**tensors, name: tensors[name][:-1]}, raw)
    command = ("convert", alone, tmp_path / "out", "--saver", "hf", "--base")
    assert_refused(run(*command, other), 3, "is not the original of this model", "embed_tokens")
    raw["text_config"]["cross_attention_layers"] = [2, 4]
    wrong = write_model_files(tmp_path / "wrong", tensors, raw)
    assert_refused(run(*command, wrong), 3, "layer 1 has cross-attention")


def test_mlx_files_of_the_whole_model_are_refused(original: Path, tmp_path: Path) -> None:
    outcome = run("convert", original, tmp_path / "out", "--loader", "mlx", "--saver", "hf")
    assert_refused(outcome, 3, "MLX's files of Llama 3.2 Vision are not read")
