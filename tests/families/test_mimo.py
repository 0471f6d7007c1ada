"""MiMo 7B, of which transformers has no class: without its layer for multi-token prediction a Qwen 2, which is computed."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

import megaconv
from tests.families.test_families import SIZES, assert_same, weights_of, write_model
from tests.megatron_oracle import read_rank_file

MTP = {
    "enorm.weight": "token_layernorm.weight",
    "hnorm.weight": "hidden_layernorm.weight",
    "final_layernorm.weight": "final_layernorm.weight",
    "transformer_layer.self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "transformer_layer.self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "transformer_layer.mlp.linear_fc1.layer_norm_weight": "post_attention_layernorm.weight",
    "transformer_layer.mlp.linear_fc2.weight": "mlp.down_proj.weight",
}
"""mimo_bridge.py of Megatron-Bridge at 067f987df03b: behind `mtp.layers.0.` -> behind `model.mtp_layers.0.`."""


def test_its_further_layer_has_megatron_bridges_names_and_the_embeddings_half_first(
    tmp_path: Path,
) -> None:
    hf = write_model(tmp_path / "hf", "mimo")
    megaconv.convert(hf, tmp_path / "core", saver="core")
    (file,) = (tmp_path / "core").glob("*/mp_rank_00/model_optim_rng.pt")
    core, source = read_rank_file(file)["model"], weights_of(hf)
    for ours, theirs in MTP.items():
        assert torch.equal(core[f"mtp.layers.0.{ours}"], source[f"model.mtp_layers.0.{theirs}"]), (
            ours
        )
    hidden, embedding = source["model.mtp_layers.0.input_proj.weight"].chunk(2, dim=1)
    assert torch.equal(core["mtp.layers.0.eh_proj.weight"], torch.cat([embedding, hidden], dim=1))


def test_it_comes_back_from_several_ranks_in_both_formats(tmp_path: Path) -> None:
    hf = write_model(tmp_path / "hf", "mimo")
    for ckpt_format in ("torch", "torch_dist"):
        core, back = tmp_path / ckpt_format, tmp_path / f"{ckpt_format} back"
        megaconv.convert(
            hf, core, saver="core", ckpt_format=ckpt_format, tp=2, pp=2, layer_split=(2, 1)
        )
        megaconv.convert(core, back, saver="hf")
        assert_same(back, hf)
        found, wanted = (json.loads((place / "config.json").read_text()) for place in (back, hf))
        assert found == wanted | {"torch_dtype": "bfloat16"}


def test_all_else_is_a_qwen_2(tmp_path: Path) -> None:
    hf = write_model(tmp_path / "hf", "mimo")
    qwen = tmp_path / "qwen"
    qwen.mkdir()
    raw = json.loads((hf / "config.json").read_text())
    del raw["num_nextn_predict_layers"]
    (qwen / "config.json").write_text(
        json.dumps(raw | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"})
    )
    save_file(
        {name: t for name, t in weights_of(hf).items() if "mtp" not in name},
        qwen / "model.safetensors",
    )
    ours, theirs = megaconv.fingerprint(hf).tensors, megaconv.fingerprint(qwen).tensors
    assert {key: value for key, value in ours.items() if not key.name.startswith("mtp.")} == theirs
    assert SIZES["num_hidden_layers"] == 3
