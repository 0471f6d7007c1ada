"""Towers that Megatron-Bridge builds of Megatron's own layers: names, shards, keys, and what megatron-core computes with them.

Bridge's names are those of mapping_registry() in qwen3_vl_bridge.py, qwen35_vl_bridge.py and exaone45_bridge.py of Megatron-Bridge
at 067f987df03b, written down as facts.
"""

import json
import re
import shutil
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import megaconv
from formats.torch_dist import open_directory
from megaconv.families.parts import whole_model
from megaconv.families.parts.towers import TOWERS
from megaconv.model.beside import BESIDE
from megaconv.model.naming import CORE, HF
from megaconv.model.patterns import expand
from tests import tower_oracle
from tests.families.test_language_models_inside import (
    MODELS,
    VISION,
    Inside,
    assert_same_weights,
    create,
)
from tests.families.test_whole_models import state, without_our_names
from tests.runs import assert_refused, run

_V, _L, _HF = "vision_model.", "vision_model.decoder.layers.*.", "model.visual.blocks.*."
Names = Mapping[str, tuple[str, ...]]


def same(ours: str, theirs: str, *words: str) -> Names:
    return {f"{ours}.{word}": (f"{theirs}.{word}",) for word in words}


BOTH = ("weight", "bias")
LAYER: Names = {
    **same(_L + "self_attention.linear_qkv", _HF + "attn.qkv", *BOTH),
    **same(_L + "self_attention.linear_proj", _HF + "attn.proj", *BOTH),
    _L + "self_attention.linear_qkv.layer_norm_weight": (_HF + "norm1.weight",),
    _L + "mlp.linear_fc1.layer_norm_weight": (_HF + "norm2.weight",),
}
PATCHES = same(_V + "patch_embed.proj", "model.visual.patch_embed.proj", "weight")
QWEN3_5: Names = {
    **LAYER,
    **PATCHES,
    **same(_V + "patch_embed.proj", "model.visual.patch_embed.proj", "bias"),
    **same(_V + "pos_embed", "model.visual.pos_embed", "weight"),
    _L + "self_attention.linear_qkv.layer_norm_bias": (_HF + "norm1.bias",),
    _L + "mlp.linear_fc1.layer_norm_bias": (_HF + "norm2.bias",),
    **same(_L + "mlp.linear_fc1", _HF + "mlp.linear_fc1", *BOTH),
    **same(_L + "mlp.linear_fc2", _HF + "mlp.linear_fc2", *BOTH),
    **same(_V + "merger.patch_norm", "model.visual.merger.norm", *BOTH),
    **same(_V + "merger.linear_fc1", "model.visual.merger.linear_fc1", *BOTH),
    **same(_V + "merger.linear_fc2", "model.visual.merger.linear_fc2", *BOTH),
}
_DEEP, _HF_DEEP = _V + "decoder.deepstack_merger_list.*.", "model.visual.deepstack_merger_list.*."
DEEPSTACK: Names = {
    **same(_DEEP + "patch_norm", _HF_DEEP + "norm", *BOTH),
    **same(_DEEP + "linear_fc1", _HF_DEEP + "linear_fc1", *BOTH),
    **same(_DEEP + "linear_fc2", _HF_DEEP + "linear_fc2", *BOTH),
}
EXAONE: Names = {
    **LAYER,
    **PATCHES,
    **{
        f"{_L}mlp.linear_fc1.{word}": tuple(f"{_HF}mlp.{x}_proj.{word}" for x in ("gate", "up"))
        for word in BOTH
    },
    **same(_L + "mlp.linear_fc2", _HF + "mlp.down_proj", *BOTH),
    _V + "merger.patch_norm.weight": ("model.visual.merger.ln_q.weight",),
    **same(_V + "merger.linear_fc1", "model.visual.merger.mlp.0", *BOTH),
    **same(_V + "merger.linear_fc2", "model.visual.merger.mlp.2", *BOTH),
}
BRIDGE: Mapping[str, Names] = {
    **dict.fromkeys(("qwen3_vl", "qwen3_vl_moe"), QWEN3_5 | DEEPSTACK),
    **dict.fromkeys(("qwen3_5", "qwen3_5_moe"), QWEN3_5),
    "exaone4_5": EXAONE,
}
DEEPSTACK_IN_VAIN = ("qwen3_5", "qwen3_5_moe")
"""Share a table with models that have deepstack mergers, and have none."""


def ours(kind: str) -> Names:
    found: dict[str, tuple[str, ...]] = {}
    for row in TOWERS[kind].rows:
        if row.stage == "deepstack" and kind in DEEPSTACK_IN_VAIN:
            continue
        core, hf = (
            [
                word.removeprefix(BESIDE).replace("{l}", "*")
                for each in row.spelling(naming)
                for word in expand(each.name)
            ]
            for naming in (CORE, HF)
        )
        each = [hf] if len(core) == 1 else [[word] for word in hf]
        found |= {word: tuple(words) for word, words in zip(core, each, strict=True)}
    return found


@pytest.mark.parametrize("kind", TOWERS)
def test_every_name_of_a_tower_is_the_one_that_megatron_bridge_has(kind: str) -> None:
    assert ours(kind) == BRIDGE[kind]


@pytest.mark.parametrize("kind", TOWERS)
def test_sizes_that_a_vision_config_leaves_out_are_those_of_its_class(kind: str) -> None:
    from transformers import CONFIG_MAPPING

    config = CONFIG_MAPPING[kind]().vision_config
    assert {key: getattr(config, key) for key in TOWERS[kind].defaults} == TOWERS[kind].defaults


# What megatron-core computes.


def write_job(kind: str, folder: Path, ranks: int) -> tuple[Any, Any]:
    """A random model as core checkpoint, and what comes into its tower's first layer; returns what transformers makes of that."""
    gated = kind == "exaone4_5"
    activation = {"hidden_act": "silu" if gated else "gelu_pytorch_tanh"}
    everywhere = {"fullatt_block_indexes": [0, 1], **activation}
    model = Inside(kind, MODELS[kind].family, MODELS[kind].text)
    whole = create(model, folder / "hf", vision=everywhere)
    megaconv.convert(
        folder / "hf", folder / "core", saver="core", tp=ranks, pp=1, transformer_impl="local"
    )
    tower, seen = whole.model.visual, dict[str, Any]()

    def look(module: Any, args: Any, kwargs: Any) -> None:
        cos, sin = kwargs["position_embeddings"]
        seen.update(hidden=args[0].clone(), angles=torch.atan2(sin, cos))

    tower.blocks[0].register_forward_pre_hook(look, with_kwargs=True)
    pixels = torch.randn(16, prod(tower.patch_embed.proj.weight.shape[1:]))
    with torch.no_grad():
        made = tower(pixels, grid_thw=torch.tensor([[1, 4, 4]]))
    torch.save(seen, folder / "input.pt")
    sizes = {
        "layers": VISION["num_hidden_layers"],
        "hidden": 32,
        "heads": 4,
        "kv_heads": 2 if gated else 4,
        "ffn": 40,
    }
    deepstack = [0] if kind == "qwen3_vl" else []
    job = {**sizes, "merge": 4, "out": 64, "gated": gated, "deepstack": deepstack, "ranks": ranks}
    (folder / "job.json").write_text(json.dumps(job))
    return made.pooler_output, getattr(made, "deepstack_features", None) or []


@pytest.mark.parametrize(
    ("kind", "ranks"),
    [
        ("qwen3_vl", 1),
        pytest.param("qwen3_vl", 2, marks=pytest.mark.slow),
        pytest.param("qwen3_5", 2, marks=pytest.mark.slow),
        pytest.param("exaone4_5", 2, marks=pytest.mark.slow),
    ],
)
def test_megatron_core_computes_what_transformers_does_from_a_tower(
    kind: str, ranks: int, tmp_path: Path
) -> None:
    expected, deep = write_job(kind, tmp_path, ranks)
    found, found_deep = tower_oracle.compute(tmp_path, ranks)
    assert expected.std() > 0.5
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
    assert len(found_deep) == len(deep) == (kind == "qwen3_vl")
    for one, other in zip(found_deep, deep, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-4)


# What is written.


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3-VL: hf, and core at tp 2, pp 2."""
    folder = tmp_path_factory.mktemp("qwen3-vl")
    create(MODELS["qwen3_vl"], folder / "hf")
    megaconv.convert(folder / "hf", folder / "core", saver="core", tp=2, pp=2)
    return folder


def test_a_rank_has_its_heads_and_all_of_a_tower_is_on_the_first_stage(qwen: Path) -> None:
    source = load_file(qwen / "hf/model.safetensors")
    q, k, v = source["model.visual.blocks.1.attn.qkv.weight"].reshape(3, 4, 8, 32)
    for tp_rank in (0, 1):
        held = state(qwen / "core", f"mp_rank_0{tp_rank}_000")["model"]
        heads = torch.stack([q, k, v], dim=1)[2 * tp_rank : 2 * tp_rank + 2]
        assert torch.equal(
            held[_L.replace("*", "1") + "self_attention.linear_qkv.weight"], heads.reshape(-1, 32)
        )
        fc2 = source["model.visual.merger.linear_fc2.weight"][:, 64 * tp_rank : 64 * tp_rank + 64]
        assert torch.equal(held["vision_model.merger.linear_fc2.weight"], fc2)
        assert torch.equal(
            held["vision_model.pos_embed.weight"], source["model.visual.pos_embed.weight"]
        )
        last = state(qwen / "core", f"mp_rank_0{tp_rank}_001")["model"]
        assert not any(name.startswith("vision_model.") for name in last)


def test_layers_of_a_tower_are_stacked_under_keys_as_those_of_the_language_model(
    qwen: Path, tmp_path: Path
) -> None:
    megaconv.convert(qwen / "hf", tmp_path / "core", saver="core", ckpt_format="torch_dist", tp=2)
    directory = open_directory(tmp_path / "core" / "release")
    shapes = {
        name: tensor.shape
        for name, tensor in directory.tensors().items()
        if name.startswith("vision_model.")
    }
    layers, deep = "vision_model.decoder.layers.", "vision_model.decoder.deepstack_merger_list."
    assert shapes[layers + "self_attention.linear_qkv.weight"] == (2, 96, 32)
    assert shapes[layers + "mlp.linear_fc1.layer_norm_bias"] == (2, 32)
    assert shapes[deep + "linear_fc2.weight"] == (1, 64, 128)
    assert shapes["vision_model.patch_embed.proj.weight"] == (32, 3, 2, 14, 14)
    assert {re.sub(r"(layers|merger_list)\.", r"\1.*.", name) for name in shapes} == set(
        BRIDGE["qwen3_vl"]
    )
    objects = [name for name in directory.objects() if name.startswith("vision_model.")]
    assert f"{layers}self_attention.linear_qkv._extra_state/shard_1_2" in objects
    assert f"{deep}patch_norm._extra_state/shard_0_1" in objects


def test_a_checkpoint_of_megatron_bridges_is_read_beside_the_originals_config_json(
    qwen: Path, tmp_path: Path
) -> None:
    other = without_our_names(qwen / "core", tmp_path / "other")
    megaconv.convert(other, tmp_path / "back", saver="hf", config=qwen / "hf")
    assert_same_weights(tmp_path / "back", qwen / "hf")


def test_a_tower_that_was_copied_is_still_read(
    qwen: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Older versions of megaconv copied these towers."""
    with monkeypatch.context() as before:
        before.setattr(whole_model, "TOWERS", {})
        megaconv.convert(qwen / "hf", tmp_path / "core", saver="core", tp=2)
    assert "visual.merger.norm.weight" in state(tmp_path / "core", "mp_rank_00")["model"]
    megaconv.convert(tmp_path / "core", tmp_path / "back", saver="hf")
    assert_same_weights(tmp_path / "back", qwen / "hf")


# What can't be.


def with_vision(qwen: Path, folder: Path, **values: Any) -> Path:
    shutil.copytree(qwen / "hf", folder)
    raw = json.loads((folder / "config.json").read_text())
    raw["vision_config"] |= values
    (folder / "config.json").write_text(json.dumps(raw))
    return folder


def test_more_tensor_ranks_than_heads_of_a_tower_are_refused(qwen: Path, tmp_path: Path) -> None:
    outcome = run("convert", qwen / "hf", tmp_path / "out", "--saver", "core", "--tp", "8")
    assert_refused(outcome, 2, "tower_heads = 4", "tensor parallel size (tp) = 8")


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"depth": 10**9}, ("vision_config.depth should be a positive number", "1000000000")),
        ({"num_heads": 0}, ("vision_config.num_heads should be a positive number",)),
        ({"num_heads": 5}, ("can't have 5 heads in a width of 32",)),
        ({"deepstack_visual_indexes": 3}, ("deepstack_visual_indexes should list layers",)),
        ({"intermediate_size": 48}, ("model.visual.blocks.0.mlp.linear_fc1",)),
        ({"depth": 3}, ("model.visual.blocks.2.",)),
    ],
)
def test_a_vision_config_that_describes_no_tower_or_another_is_refused(
    values: dict[str, Any], words: tuple[str, ...], qwen: Path, tmp_path: Path
) -> None:
    hf = with_vision(qwen, tmp_path / "hf", **values)
    assert_refused(run("convert", hf, tmp_path / "out", "--saver", "core"), 3, *words)


def test_a_tensor_that_a_tower_lacks_is_named(qwen: Path, tmp_path: Path) -> None:
    hf = with_vision(qwen, tmp_path / "hf")
    tensors = load_file(hf / "model.safetensors")
    del tensors["model.visual.merger.norm.bias"]
    save_file(tensors, hf / "model.safetensors")
    outcome = run("convert", hf, tmp_path / "out", "--saver", "core")
    assert_refused(outcome, 3, "model.visual.merger.norm.bias")
