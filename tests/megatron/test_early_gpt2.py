"""GPT-2 of Megatron-LM's first release (2019): real rank files become the model that computes the real logits."""

import subprocess
import sys
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import megaconv
from megaconv.engine.conversion import convert, fingerprint
from megaconv.engine.preparation import ConvertOptions
from megaconv.errors import TensorMismatch, UnknownFamily, UsageError
from megaconv.options import LoadOptions, SaveOptions
from tests.conftest import FIXTURES

FIXTURE = FIXTURES / "early-gpt2-2019-mp2"
CHECKPOINT = FIXTURE / "checkpoint"
LOAD = LoadOptions(num_attention_heads=4, true_vocab_size=112)


def converted(
    source: Path, target: Path, saver: str, load: LoadOptions = LOAD, **save: Any
) -> Path:
    convert(source, target, saver, ConvertOptions(load=load, save=SaveOptions(**save), workers=2))
    return target


def edited(tmp_path: Path, edit: Any) -> Path:
    """A copy of the checkpoint whose rank files are changed."""
    copy = copytree(CHECKPOINT, tmp_path / "copy")
    for path in copy.glob("*/mp_rank_*/model_optim_rng.pt"):
        state = torch.load(path, weights_only=False)
        edit(state)
        torch.save(state, path)
    return copy


def test_transformers_computes_the_real_models_logits(tmp_path: Path) -> None:
    from transformers import GPT2LMHeadModel

    model = GPT2LMHeadModel.from_pretrained(converted(CHECKPOINT, tmp_path / "hf", "hf"))
    expected = load_file(FIXTURE / "logits.safetensors")
    with torch.no_grad():
        logits = model(expected["ids"]).logits
    torch.testing.assert_close(logits, expected["logits"], rtol=0, atol=1e-5)


def test_the_weights_are_those_of_the_whole_tensors(tmp_path: Path) -> None:
    whole = load_file(FIXTURE / "whole.safetensors")
    hf = converted(CHECKPOINT, tmp_path / "hf", "hf")
    names = {
        "word_embeddings": "wte",
        "position_embeddings": "wpe",
        "transformer.layers.": "h.",
        "input_layernorm": "ln_1",
        "post_attention_layernorm": "ln_2",
        "transformer.final_layernorm": "ln_f",
        "attention.query_key_value": "attn.c_attn",
        "attention.dense": "attn.c_proj",
        "mlp.dense_h_to_4h": "mlp.c_fc",
        "mlp.dense_4h_to_h": "mlp.c_proj",
    }
    renamed = {}
    for name, tensor in whole.items():
        is_matrix_of_layer = ".layers." in name and tensor.dim() == 2
        for theirs, ours in names.items():
            name = name.replace(theirs, ours)
        renamed[f"transformer.{name}"] = (tensor.T if is_matrix_of_layer else tensor).contiguous()
    (tmp_path / "theirs").mkdir()
    save_file(renamed, tmp_path / "theirs" / "model.safetensors", {"format": "pt"})
    (tmp_path / "theirs" / "config.json").write_bytes((hf / "config.json").read_bytes())
    assert (
        fingerprint(CHECKPOINT, LOAD).weights
        == fingerprint(tmp_path / "theirs", LoadOptions()).weights
    )


@pytest.mark.parametrize("tp", [1, 2])
def test_core_at_any_layout_holds_the_same_weights(tp: int, tmp_path: Path) -> None:
    core = converted(CHECKPOINT, tmp_path / "core", "core", tp=tp)
    assert fingerprint(core, LoadOptions()).weights == fingerprint(CHECKPOINT, LOAD).weights


def test_a_config_json_gives_the_number_of_heads(tmp_path: Path) -> None:
    hf = converted(CHECKPOINT, tmp_path / "hf", "hf")
    assert (
        fingerprint(CHECKPOINT, LoadOptions(config=hf)).weights
        == fingerprint(hf, LoadOptions()).weights
    )


def test_the_number_of_heads_is_not_guessed(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--num-attention-heads"):
        converted(CHECKPOINT, tmp_path / "hf", "hf", LoadOptions())
    assert not (tmp_path / "hf").exists()


def test_heads_that_contradict_config_json_are_refused(tmp_path: Path) -> None:
    hf = converted(CHECKPOINT, tmp_path / "hf", "hf")
    with pytest.raises(TensorMismatch, match=r"attention\.heads"):
        converted(
            CHECKPOINT, tmp_path / "again", "hf", LoadOptions(config=hf, num_attention_heads=8)
        )


OTHER_INPUTS = ("legacy-gpt2-tp1pp1", "core-llama-tp1pp1", "dist-llama-tp2pp2")


@pytest.mark.parametrize("name", OTHER_INPUTS)
def test_another_input_has_to_have_as_many_heads_as_the_option_says(
    name: str, tmp_path: Path
) -> None:
    inside = FIXTURES / name / "checkpoint"
    source = inside if inside.is_dir() else FIXTURES / name
    heads = megaconv.open(source).config.attention.heads
    assert fingerprint(source, LoadOptions(num_attention_heads=heads)).weights
    expected = f"--num-attention-heads {heads * 2}: .* has {heads} attention heads; leave it out"
    with pytest.raises(UsageError, match=expected):
        converted(source, tmp_path / "hf", "hf", LoadOptions(num_attention_heads=heads * 2))
    assert not (tmp_path / "hf").exists()


def test_a_bert_of_the_same_release_is_refused_by_name(tmp_path: Path) -> None:
    def to_bert(state: dict[str, Any]) -> None:
        state["model"] = {"bert.embeddings.word_embeddings.weight": torch.zeros(8, 4)}

    with pytest.raises(UnknownFamily, match="BERT"):
        converted(edited(tmp_path, to_bert), tmp_path / "hf", "hf")


def test_a_run_in_fp16_is_read_although_its_optimizer_is_of_a_class_of_that_release(
    tmp_path: Path,
) -> None:
    """That release pickles fp16.loss_scaler.DynamicLossScaler, a module that no current release has."""
    copy = copytree(CHECKPOINT, tmp_path / "copy")
    script = """
import sys, types, torch
module = types.ModuleType("fp16.loss_scaler")
module.DynamicLossScaler = type("DynamicLossScaler", (), {"__module__": "fp16.loss_scaler"})
sys.modules["fp16"], sys.modules["fp16.loss_scaler"] = types.ModuleType("fp16"), module
for path in sys.argv[1:]:
    state = torch.load(path, weights_only=False)
    scaler = module.DynamicLossScaler()
    scaler.cur_scale = 65536.0
    state["optimizer"] = {"loss_scaler": scaler, "fp32_from_fp16": [[torch.zeros(4)]]}
    torch.save(state, path, _use_new_zipfile_serialization=False)
"""
    paths = sorted(str(path) for path in copy.glob("*/mp_rank_*/*.pt"))
    subprocess.run([sys.executable, "-c", script, *paths], check=True)
    assert fingerprint(copy, LOAD).weights == fingerprint(CHECKPOINT, LOAD).weights
