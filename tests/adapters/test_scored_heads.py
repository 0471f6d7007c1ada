"""Adapters of reward models and classifiers, merged into a language model that has no head of scores."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.runs import assert_refused, run

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 130,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 99,
    "initializer_range": 0.2,
}
MATRIX = "model.layers.1.self_attn.q_proj"


def make_base(directory: Path, *, tied: bool, kind: str = "Qwen2") -> Path:
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**SIZES, tie_word_embeddings=tied)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).to(torch.bfloat16)
    model.save_pretrained(directory)
    return directory


def make_adapter(directory: Path, **heads: torch.Tensor) -> Path:
    """An adapter of one matrix with the names of peft's files, and whole tensors beside it."""
    directory.mkdir()
    torch.manual_seed(1)
    prefix = "base_model.model."
    tensors = {
        f"{prefix}{MATRIX}.lora_A.weight": torch.randn(4, 64),
        f"{prefix}{MATRIX}.lora_B.weight": torch.randn(64, 4),
        **{prefix + name.replace("__", "."): tensor for name, tensor in heads.items()},
    }
    save_file(tensors, directory / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "SEQ_CLS",
        "r": 4,
        "lora_alpha": 8,
        "target_modules": ["q_proj"],
        "modules_to_save": ["classifier", "score"],
    }
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory


@pytest.mark.parametrize("tied", [False, True])
def test_the_head_for_words_makes_room_for_that_of_scores(tied: bool, tmp_path: Path) -> None:
    base = make_base(tmp_path / "base", tied=tied)
    score = torch.randn(3, 64)
    adapter = make_adapter(tmp_path / "adapter", score__weight=score)
    outcome = run("merge", base, adapter, "--save-dir", tmp_path / "out")
    assert outcome.status == 0
    assert "the output is a Qwen2ForSequenceClassification" in outcome.err + outcome.out
    found = load_file(tmp_path / "out/model.safetensors")
    own, change = (
        load_file(base / "model.safetensors"),
        load_file(adapter / "adapter_model.safetensors"),
    )
    a, b = (change[f"base_model.model.{MATRIX}.lora_{word}.weight"] for word in "AB")
    expected = {name: tensor for name, tensor in own.items() if name != "lm_head.weight"}
    expected[f"{MATRIX}.weight"] = (own[f"{MATRIX}.weight"].float() + 2 * (b @ a)).bfloat16()
    expected["score.weight"] = score.bfloat16()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    _, said = transformers.AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "out", output_loading_info=True
    )
    assert not said["missing_keys"]
    assert not said["unexpected_keys"]
    raw = json.loads((tmp_path / "out/config.json").read_text())
    assert raw["architectures"] == ["Qwen2ForSequenceClassification"]
    assert list(raw["id2label"]) == ["0", "1", "2"]


def test_an_adapter_of_a_class_that_transformers_lacks_is_refused(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base", tied=False, kind="Olmo2")
    heads = {"score__weight": torch.randn(1, 64), "score__bias": torch.randn(1)}
    adapter = make_adapter(tmp_path / "adapter", **heads)
    outcome = run("merge", base, adapter, "--save-dir", tmp_path / "out")
    assert_refused(outcome, 2, "no ForTokenClassification", "olmo2")
    other = make_adapter(tmp_path / "other", v_head__weight=torch.randn(1, 64))
    outcome = run("merge", base, other, "--save-dir", tmp_path / "out")
    assert_refused(outcome, 3, "v_head.weight", "merge with peft")


@pytest.mark.slow
@pytest.mark.parametrize("task", ["SEQ_CLS", "TOKEN_CLS"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("adapter_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_merged_reward_model_is_that_of_peft(
    task: str, tied: bool, adapter_dtype: torch.dtype, tmp_path: Path
) -> None:
    peft = pytest.importorskip("peft", reason="peft, the oracle, is not installed")
    kind = {"SEQ_CLS": "ForSequenceClassification", "TOKEN_CLS": "ForTokenClassification"}[task]
    auto = getattr(transformers, f"AutoModel{kind}")
    base = make_base(tmp_path / "base", tied=tied)
    model = auto.from_pretrained(base, num_labels=1, dtype=torch.bfloat16)
    settings = {"target_modules": ["q_proj", "v_proj", "down_proj"], "r": 4, "lora_alpha": 17}
    model = peft.get_peft_model(model, peft.LoraConfig(task_type=task, **settings))
    with torch.no_grad():
        for parameter in (each for each in model.parameters() if each.requires_grad):
            parameter.add_(torch.randn_like(parameter) * 0.1)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.to(adapter_dtype)
    model.save_pretrained(tmp_path / "adapter")
    again = auto.from_pretrained(base, num_labels=1, dtype=torch.bfloat16)
    merged = peft.PeftModel.from_pretrained(again, tmp_path / "adapter").merge_and_unload()
    # Beside adapters, peft keeps the new head in fp32. A model of one dtype is what the output is.
    merged.to(torch.bfloat16).save_pretrained(tmp_path / "merged")
    assert run("merge", base, tmp_path / "adapter", "--save-dir", tmp_path / "out").status == 0
    ours = load_file(tmp_path / "out/model.safetensors")
    theirs = load_file(tmp_path / "merged/model.safetensors")
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert torch.equal(ours[name].view(torch.int16), tensor.view(torch.int16)), name
    written, expected = (
        json.loads((tmp_path / place / "config.json").read_text()) for place in ("out", "merged")
    )
    for key in ("architectures", "id2label", "label2id", "hidden_size", "vocab_size"):
        assert written[key] == expected[key]
