"""Adapters between peft's files and Megatron-Bridge's: against peft's own files, Megatron core's reader, and merged weights.

No software of Megatron-Bridge's wrote a file here: names are from its sources, how ranks share a tensor is Megatron core's code, which
it calls.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import yaml
from safetensors.torch import load_file

import megaconv
from formats.chunked import Chunk, ChunkedTensor
from formats.tensor import Box, LazyTensor
from megaconv.errors import TensorMismatch, UsageError
from megaconv.megatron.distributed.adapter_rows import is_halved, rows_of_b
from megaconv.model.natives import NativeTensor
from megaconv.model.regions import Region
from tests.adapters.test_adapters import (
    CONV1D,
    DORA,
    EXPERTS,
    LINEAR,
    TIED,
    assert_same_bits,
    edited,
)
from tests.conftest import FIXTURES
from tests.runs import Outcome, assert_refused, run

EMBEDDING = FIXTURES / "peft-qwen2-embed-save-bias"
ITERATION = "iter_0000001"
LAYERS, HIDDEN, HEADS, GROUPS, HEAD_DIM, FFN = 2, 32, 4, 2, 8, 56
"""The sizes of the base of LINEAR."""


def translate(source: Path, base: Path, target: Path, *options: object) -> None:
    outcome = run(
        *(
            "convert",
            "--loader",
            "peft",
            "--load-dir",
            source,
            "--config",
            base / "base",
            "--saver",
            "core",
        ),
        *("--ckpt-format", "torch_dist", "--save-dir", target, *options),
    )
    assert outcome.status == 0, outcome.err


def settings_of(adapter: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((adapter / "adapter_config.json").read_text())
    return found


@pytest.mark.parametrize(
    ("case", "kind"),
    [(LINEAR, "CanonicalLoRA"), (CONV1D, "LoRA")],
    ids=lambda word: str(word)[-12:],
)
def test_an_adapter_of_peft_comes_back_from_megatron_bridge_bit_for_bit(
    case: Path, kind: str, tmp_path: Path
) -> None:
    translate(case / "adapter", case, tmp_path / "core", "--tp", 2, "--verify")
    assert yaml.safe_load((tmp_path / "core" / ITERATION / "run_config.yaml").read_text())["peft"][
        "_target_"
    ].endswith(f".{kind}")
    outcome = run(
        "convert",
        "--load-dir",
        tmp_path / "core",
        "--saver",
        "peft",
        "--option",
        "base=a/b",
        "--save-dir",
        tmp_path / "back",
    )
    assert outcome.status == 0, outcome.err
    assert_same_bits(
        load_file(tmp_path / "back/adapter_model.safetensors"),
        load_file(case / "adapter/adapter_model.safetensors"),
    )
    ours, original = settings_of(tmp_path / "back"), settings_of(case / "adapter")
    same = ("r", "lora_alpha", "fan_in_fan_out", "bias", "task_type", "lora_dropout")
    assert {name: ours[name] for name in same} == {name: original[name] for name in same}
    assert set(ours["target_modules"]) == {
        path.rpartition(".")[2] for path in original["target_modules"]
    }
    assert ours["base_model_name_or_path"] == "a/b"


def test_an_adapter_of_some_layers_and_modules_names_them_by_their_paths(tmp_path: Path) -> None:
    def of_one(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {
            name: tensor for name, tensor in tensors.items() if "layers.1.self_attn.v_proj" in name
        }

    adapter = edited(
        LINEAR / "adapter", tmp_path / "in", {"use_rslora": True, "lora_dropout": 0.25}, of_one
    )
    outcome = run(
        *(
            "convert",
            "--loader",
            "peft",
            "--load-dir",
            adapter,
            "--config",
            LINEAR / "base",
            "--saver",
            "peft",
        ),
        *("--save-dir", tmp_path / "out"),
    )
    assert outcome.status == 0, outcome.err
    found = settings_of(tmp_path / "out")
    assert found["target_modules"] == ["model.layers.1.self_attn.v_proj"]
    # The scales are equal: 8 / sqrt(4) = 16 / 4.
    assert (found["use_rslora"], found["lora_alpha"], found["lora_dropout"]) == (False, 16, 0.25)


def test_patterns_name_the_parameter_of_all_experts(tmp_path: Path) -> None:
    patterns = (r".*\.down_proj", r".*\.gate_up_proj", "q_proj")
    given = settings_of(EXPERTS / "adapter")
    alphas = {"alpha_pattern": dict.fromkeys(patterns, given["lora_alpha"]), "lora_alpha": 99}
    edited(EXPERTS / "adapter", tmp_path / "adapter", alphas)
    for adapter, target in ((EXPERTS / "adapter", "of-one"), (tmp_path / "adapter", "by-pattern")):
        translate(adapter, EXPERTS, tmp_path / target)
        translated = tmp_path / target / ITERATION / "run_config.yaml"
        assert yaml.safe_load(translated.read_text())["peft"]["alpha"] == given["lora_alpha"]


def test_megatron_core_finds_every_ranks_rows_in_our_files(tmp_path: Path) -> None:
    """The test uses the sharded tensors of core's ColumnParallelLinear and RowParallelLinear, and of its factory for
    gated layers."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing import ShardedTensor
    from megatron.core.transformer.mlp import apply_swiglu_sharded_factory

    translate(LINEAR / "adapter", LINEAR, tmp_path / "core", "--tp", 2)
    theirs = load_file(LINEAR / "adapter/adapter_model.safetensors")
    modules = (
        ("self_attention.linear_qkv.adapter.adapter_q", "self_attn.q_proj", "in", 0),
        ("self_attention.linear_qkv.adapter.adapter_k", "self_attn.k_proj", "out", 0),
        ("self_attention.linear_proj.adapter", "self_attn.o_proj", "in", 1),
        ("self_attention.linear_proj.adapter", "self_attn.o_proj", "out", 0),
        ("mlp.linear_fc1.adapter.adapter_gate", "mlp.gate_proj", "in", 0),
        ("mlp.linear_fc1.adapter.adapter_gate", "mlp.gate_proj", "out", 0),
        ("mlp.linear_fc1.adapter.adapter_up", "mlp.up_proj", "out", 0),
    )
    wanted: dict[str, Any] = {}
    expected: dict[str, torch.Tensor] = {}
    # One process asks for what both ranks hold: Megatron core wants all shards of a tensor to be somewhere.
    for rank, layer, (module, name, matrix, axis) in product((0, 1), range(LAYERS), modules):
        which = "lora_A" if matrix == "in" else "lora_B"
        whole = theirs[f"base_model.model.model.layers.{layer}.{name}.{which}.weight"]
        part, stacked = whole.chunk(2, axis)[rank].contiguous(), (0, layer, LAYERS)
        key = f"decoder.layers.{module}.linear_{matrix}.weight"
        sharded = ShardedTensor.from_rank_offsets(
            key, torch.zeros_like(part), stacked, (axis + 1, rank, 2), prepend_axis_num=1
        )
        if "fc1" in module and matrix == "out":
            sharded = apply_swiglu_sharded_factory(sharded, (stacked,))
        wanted[f"{rank} {layer} {key}"], expected[f"{rank} {layer} {key}"] = sharded, part
    with alone():
        found = dist_checkpointing.load(
            wanted, str(tmp_path / "core" / ITERATION), validate_access_integrity=False
        )
    for key, part in expected.items():
        assert torch.equal(found[key], part), key


@contextmanager
def alone() -> Iterator[None]:
    """The process group of one process."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


# LoRA of fused layers, as Bridge has it unless CanonicalLoRA is asked for.


def matrices() -> dict[str, torch.Tensor]:
    """The matrices of LoRA on linear_qkv and linear_fc1, by their keys."""
    generator = torch.Generator().manual_seed(3)
    shapes = {
        "self_attention.linear_qkv.adapter.linear_in": (4, HIDDEN),
        "self_attention.linear_qkv.adapter.linear_out": ((HEADS + 2 * GROUPS) * HEAD_DIM, 4),
        "mlp.linear_fc1.adapter.linear_in": (4, HIDDEN),
        "mlp.linear_fc1.adapter.linear_out": (2 * FFN, 4),
    }
    return {
        f"decoder.layers.{name}.weight": torch.randn(LAYERS, *shape, generator=generator)
        for name, shape in shapes.items()
    }


def fused(
    tmp_path: Path,
    *,
    settings: dict[str, Any] | None = None,
    without: str = "",
    extra: tuple[str, ...] = (),
) -> Path:
    """A checkpoint of Bridge's LoRA, by torch's own writer."""
    tensors = matrices() | {name: torch.zeros(LAYERS, 1) for name in extra}
    kept = {name: tensor for name, tensor in tensors.items() if not (without and without in name)}
    return saved(tmp_path, kept, settings)


LORA = "megatron.bridge.peft.lora.LoRA"


def saved(
    tmp_path: Path, tensors: dict[str, torch.Tensor], settings: dict[str, Any] | None = None
) -> Path:
    version = tmp_path / "bridge" / ITERATION
    dcp.save(dict(tensors), checkpoint_id=version, no_dist=True)
    (version / "metadata.json").write_text(
        '{"sharded_backend": "torch_dist", "sharded_backend_version": 1}'
    )
    torch.save({"checkpoint_version": 3.0}, version / "common.pt")
    if settings is None or settings:
        describe(version, 2, {"_target_": LORA, "dim": 4, "alpha": 6, "dropout": 0.1}, settings)
    return tmp_path / "bridge"


def describe(
    version: Path, tp: int, peft: dict[str, Any], settings: dict[str, Any] | None = None
) -> None:
    written = {"model": {"tensor_model_parallel_size": tp}, "peft": peft} | (settings or {})
    (version / "run_config.yaml").write_text(yaml.safe_dump(written))


def test_a_fused_adapter_changes_weights_as_it_does_in_megatron(tmp_path: Path) -> None:
    """Merged into the fused weights of Megatron core by hand, and into transformers' by what --saver peft writes."""
    bridge, base = fused(tmp_path), LINEAR / "base"
    outcome = run(
        "convert",
        "--load-dir",
        bridge,
        "--config",
        base,
        "--saver",
        "peft",
        "--save-dir",
        tmp_path / "peft",
    )
    assert outcome.status == 0, outcome.err
    assert settings_of(tmp_path / "peft")["lora_alpha"] == 6
    adapters = {"before": [], "after": [str(tmp_path / "peft")]}
    for side, merged in adapters.items():
        megaconv.convert(base, tmp_path / side, saver="core", dtype="fp32", adapters=merged)
    before, after = (
        torch.load(
            tmp_path / side / "release" / "mp_rank_00/model_optim_rng.pt", weights_only=False
        )["model"]
        for side in adapters
    )
    for module in ("self_attention.linear_qkv", "mlp.linear_fc1"):
        a, b = (
            matrices()[f"decoder.layers.{module}.adapter.linear_{which}.weight"]
            for which in ("in", "out")
        )
        for layer in range(LAYERS):
            name = f"decoder.layers.{layer}.{module}.weight"
            torch.testing.assert_close(
                after[name] - before[name], b[layer] @ a[layer] * (6 / 4), atol=2e-6, rtol=1e-5
            )


def test_one_a_for_several_weights_goes_back_into_one_for_each(tmp_path: Path) -> None:
    bridge = fused(tmp_path)
    run(
        "convert",
        "--load-dir",
        bridge,
        "--config",
        LINEAR / "base",
        "--saver",
        "peft",
        "--save-dir",
        tmp_path / "peft",
    )
    tensors = load_file(tmp_path / "peft/adapter_model.safetensors")
    prefix = "base_model.model.model.layers.1.self_attn"
    assert torch.equal(
        tensors[f"{prefix}.q_proj.lora_A.weight"], tensors[f"{prefix}.v_proj.lora_A.weight"]
    )
    outcome = run(
        *(
            "convert",
            "--load-dir",
            bridge,
            "--config",
            LINEAR / "base",
            "--saver",
            "core",
            "--ckpt-format",
            "torch_dist",
        ),
        *("--tp", 2, "--save-dir", tmp_path / "again"),
    )
    assert outcome.status == 0, outcome.err
    both = ("--config", LINEAR / "base", "--saver", "peft", "--save-dir")
    assert run("convert", "--load-dir", tmp_path / "again", *both, tmp_path / "second").status == 0
    assert_same_bits(load_file(tmp_path / "second/adapter_model.safetensors"), tensors)


# What is refused.


def refused_of_peft(
    tmp_path: Path, adapter: Path, base: Path, *words: str, status: int = 2, tp: int = 1
) -> None:
    outcome = run(
        *(
            "convert",
            "--loader",
            "peft",
            "--load-dir",
            adapter,
            "--config",
            base / "base",
            "--saver",
            "core",
        ),
        *("--ckpt-format", "torch_dist", "--save-dir", tmp_path / "out", "--tp", tp),
    )
    assert_refused(outcome, status, *words)
    assert not (tmp_path / "out").exists()


def dora(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same adapter with DoRA's magnitudes, each row of another length."""
    lengths = {
        name.replace("lora_B.weight", "lora_magnitude_vector"): torch.linspace(0.5, 2, len(tensor))
        + number / 7
        for number, (name, tensor) in enumerate(tensors.items())
        if name.endswith("lora_B.weight")
    }
    return tensors | lengths


@pytest.mark.parametrize(
    ("case", "words"),
    [
        (DORA, ["DoRA without an adapter of layers.0.attn.q", "only in its base", "merge"]),
        (EMBEDDING, ["whole tensors", "embedding"]),
        (TIED, ["alpha / rank is", "Megatron-Bridge has one for all modules"]),
    ],
    ids=lambda case: getattr(case, "name", ""),
)
def test_an_adapter_that_bridge_does_not_support_is_refused_by_name(
    case: Path, words: list[str], tmp_path: Path
) -> None:
    refused_of_peft(tmp_path, case / "adapter", case, *words)


def test_an_adapter_for_a_hybrid_model_is_refused(tmp_path: Path) -> None:
    target = tmp_path / "out"
    with pytest.raises(UsageError, match="builds its model as GPTModel"):
        megaconv.convert(
            LINEAR / "adapter", target, config=LINEAR / "base", loader="peft", saver="core",
            ckpt_format="torch_dist", options={"model": "hybrid"},
        )  # fmt: skip
    assert not target.exists()


def test_dora_whose_length_bridge_would_take_of_a_part_of_a_row_is_refused(tmp_path: Path) -> None:
    adapter = edited(LINEAR / "adapter", tmp_path / "in", {"use_dora": True}, dora)
    refused_of_peft(tmp_path, adapter, LINEAR, "DoRA of", "at tp = 2", "choose --tp 1", tp=2)


def test_dora_of_a_layer_whose_bias_bridge_would_scale_is_refused(tmp_path: Path) -> None:
    adapter = edited(CONV1D / "adapter", tmp_path / "in", {"use_dora": True}, dora)
    refused_of_peft(tmp_path, adapter, CONV1D, "linear_qkv", "scales the layer's bias")


def test_an_adapter_of_a_mamba_mixer_is_refused(tmp_path: Path) -> None:
    case = FIXTURES / "peft-nemotron-h"
    refused_of_peft(tmp_path, case / "adapter", case, "Mamba mixer's in_proj in five parts")


def test_an_attention_with_a_gate_has_lora_and_its_linear_layers_one_rank(tmp_path: Path) -> None:
    """CanonicalLoRA has adapters of q, k and v alone. Bridge keeps the fused in_proj of a delta net by ranks."""
    case = FIXTURES / "peft-qwen3-5"
    assert_same_function(case / "adapter", case, tmp_path)
    assert run_config(tmp_path)["_target_"] == LORA
    refused_of_peft(tmp_path, case / "adapter", case, "in_proj", "size 1 alone", tp=2)


def test_a_mamba_mixers_saved_adapter_is_refused(tmp_path: Path) -> None:
    name = "decoder.layers.0.mixer.in_proj.adapter.linear_out.weight.z"
    refused = convert_back(fused(tmp_path, extra=(name,)), tmp_path)
    assert_refused(refused, 2, "Mamba mixer's in_proj in five parts")


@pytest.mark.parametrize(
    ("config", "name", "shape", "words"),
    [
        ({}, "experts.lora_A.weight", (448,), ["mlp.experts has matrices [448]"]),
        ({"use_dora": True}, "experts.lora_magnitude_vector", (32,), ["magnitude"]),
    ],
)
def test_matrices_of_experts_of_another_kind_are_named(
    config: dict[str, Any], name: str, shape: tuple[int, ...], words: list[str], tmp_path: Path
) -> None:
    def changed(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        kept = {key: tensor for key, tensor in tensors.items() if "experts.lora" in key}
        return kept | {
            f"base_model.model.model.layers.{layer}.mlp.{name}": torch.zeros(shape)
            for layer in (0, 1)
        }

    adapter = edited(EXPERTS / "adapter", tmp_path / "in", config, changed)
    refused_of_peft(tmp_path, adapter, EXPERTS, *words, status=2 if config else 3)


def convert_back(core: Path, tmp_path: Path, base: Path = LINEAR) -> Outcome:
    target = ("--saver", "peft", "--save-dir", tmp_path / "out")
    return run("convert", "--load-dir", core, "--config", base / "base", *target)


def back(core: Path, base: Path, target: Path) -> dict[str, torch.Tensor]:
    outcome = run(
        "convert",
        "--load-dir",
        core,
        "--config",
        base / "base",
        "--saver",
        "peft",
        "--save-dir",
        target,
    )
    assert outcome.status == 0, outcome.err
    return load_file(target / "adapter_model.safetensors")


def merged(adapter: Path, base: Path, target: Path) -> dict[str, torch.Tensor]:
    assert run("merge", base / "base", adapter, "--dtype", "fp32", "--save-dir", target).status == 0
    return load_file(target / "model.safetensors")


def assert_same_function(
    adapter: Path, base: Path, tmp_path: Path, *options: object
) -> dict[str, torch.Tensor]:
    """There and back through Bridge's layout: the weights that it is merged into are the same but for the order of sums."""
    translate(adapter, base, tmp_path / "core", "--verify", *options)
    found = back(tmp_path / "core", base, tmp_path / "back")
    ours, theirs = (
        merged(tmp_path / "back", base, tmp_path / "ours"),
        merged(adapter, base, tmp_path / "theirs"),
    )
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, atol=1e-6, rtol=1e-6)
    return found


def test_adapters_of_some_layers_and_modules_are_filled_up_with_zeros(tmp_path: Path) -> None:
    def some(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        wanted = ("layers.1.self_attn.q_proj", "layers.1.mlp.up_proj")
        kept = {
            name: tensor for name, tensor in tensors.items() if any(word in name for word in wanted)
        }
        return {
            name: tensor[:3] if "lora_A" in name else tensor[:, :3] for name, tensor in kept.items()
        }

    adapter = edited(LINEAR / "adapter", tmp_path / "in", {"r": 3, "lora_alpha": 6}, some)
    found = assert_same_function(adapter, LINEAR, tmp_path, "--tp", 2)
    prefix = "base_model.model.model.layers"
    # Two ranks can share this rank of the adapter.
    assert tuple(found[f"{prefix}.1.self_attn.q_proj.lora_A.weight"].shape) == (4, HIDDEN)
    assert not found[f"{prefix}.1.self_attn.k_proj.lora_B.weight"].any()
    assert not found[f"{prefix}.0.mlp.up_proj.lora_A.weight"].any()
    assert settings_of(tmp_path / "back")["lora_alpha"] == 8  # 2 times the rank, as before


def test_several_as_become_one_below_the_other(tmp_path: Path) -> None:
    found = assert_same_function(
        LINEAR / "adapter", LINEAR, tmp_path, "--option", "lora=fused", "--tp", 2
    )
    assert {len(tensor) for name, tensor in found.items() if "lora_A" in name} == {12}
    assert (run_config(tmp_path)["_target_"], run_config(tmp_path)["dim"]) == (
        "megatron.bridge.peft.lora.LoRA",
        12,
    )


def run_config(tmp_path: Path) -> dict[str, Any]:
    read = yaml.safe_load((tmp_path / "core" / ITERATION / "run_config.yaml").read_text())
    found: dict[str, Any] = read["peft"]
    return found


def test_dora_goes_there_and_back_with_its_magnitudes(tmp_path: Path) -> None:
    adapter = edited(LINEAR / "adapter", tmp_path / "in", {"use_dora": True}, dora)
    found = assert_same_function(adapter, LINEAR, tmp_path)
    assert run_config(tmp_path)["_target_"] == "megatron.bridge.peft.dora.DoRA"
    assert settings_of(tmp_path / "back")["use_dora"] is True
    lengths = {
        name: tensor
        for name, tensor in load_file(adapter / "adapter_model.safetensors").items()
        if "magn" in name
    }
    assert_same_bits({name: found[name] for name in lengths}, lengths)
    # What Bridge's own adapters come back as has one A three times, which is found to be one again.
    translate(tmp_path / "back", LINEAR, tmp_path / "again")
    assert_same_bits(back(tmp_path / "again", LINEAR, tmp_path / "second"), found)


@pytest.mark.parametrize(
    "options", [(), ("--option", "lora=fused", "--tp", 2)], ids=["canonical", "fused"]
)
def test_adapters_of_fused_experts_become_those_of_each(
    options: tuple[object, ...], tmp_path: Path
) -> None:
    # merged() rounds as peft does for parameters, and as for layers: the same in float32
    found = assert_same_function(EXPERTS / "adapter", EXPERTS, tmp_path, *options)
    fused = load_file(EXPERTS / "adapter/adapter_model.safetensors")
    module, rank = "base_model.model.model.layers.1.mlp.experts.", 2
    a = found["base_model.model.model.layers.1.block_sparse_moe.experts.3.w2.lora_A.weight"]
    b = found["base_model.model.model.layers.1.block_sparse_moe.experts.3.w2.lora_B.weight"]
    assert torch.equal(a[:rank], fused[f"{module}lora_A.weight"][3 * rank : 4 * rank])
    assert torch.equal(b[:, :rank], fused[f"{module}lora_B.weight"][:, 3::4])
    assert settings_of(tmp_path / "back")["target_modules"] == [
        "k_proj",
        "q_proj",
        "v_proj",
        "w1",
        "w2",
        "w3",
    ]


def test_one_pair_for_all_experts_goes_into_a_grouped_layer_and_back(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(7)
    pairs = {word: (torch.randn(4, ins, generator=generator), torch.randn(out, 4, generator=generator))
             for word, ins, out in (("w1", HIDDEN, FFN), ("w2", FFN, HIDDEN), ("w3", HIDDEN, FFN))}  # fmt: skip
    pairs["w3"] = pairs["w1"][0], pairs["w3"][1]

    def shared(_: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        name = "base_model.model.model.layers.{}.block_sparse_moe.experts.{}.{}.lora_{}.weight"
        return {
            name.format(layer, expert, word, "AB"[which]): matrix
            for layer, expert, (word, both) in product(range(LAYERS), range(4), pairs.items())
            for which, matrix in enumerate(both)
        }

    adapter = edited(
        EXPERTS / "adapter", tmp_path / "in", {"r": 4, "target_parameters": None}, shared
    )
    found = assert_same_function(adapter, EXPERTS, tmp_path, "--moe-grouped-gemm")
    assert_same_bits(found, load_file(adapter / "adapter_model.safetensors"))
    metadata = (
        dcp.FileSystemReader(tmp_path / "core" / ITERATION).read_metadata().state_dict_metadata
    )
    sizes = {name: tuple(each.size) for name, each in metadata.items() if hasattr(each, "size")}
    stem = "decoder.layers.mlp.experts.experts.linear_fc"
    assert sizes == {
        f"{stem}1.adapter.linear_in.weight": (LAYERS, 4, 4, HIDDEN),
        f"{stem}1.adapter.linear_out.weight": (LAYERS, 4, 2 * FFN, 4),
        f"{stem}2.adapter.linear_in.weight": (LAYERS, 4, 4, FFN),
        f"{stem}2.adapter.linear_out.weight": (LAYERS, 4, HIDDEN, 4),
    }
    assert f"{stem}1.adapter.linear_in._extra_state/shard_1_2" in metadata
    assert run_config(tmp_path)["target_modules"] == ["linear_fc1", "linear_fc2"]
    assert "share_expert_adapters" not in run_config(tmp_path)


def test_adapters_of_each_expert_go_into_a_grouped_layer_and_back(tmp_path: Path) -> None:
    found = assert_same_function(EXPERTS / "adapter", EXPERTS, tmp_path, "--moe-grouped-gemm")
    settings = run_config(tmp_path)
    assert settings["_target_"].endswith("CanonicalLoRA")
    assert settings["share_expert_adapters"] is False
    assert settings["target_modules"] == [
        *("linear_fc1_gate", "linear_fc1_up", "linear_fc2", "linear_k", "linear_q", "linear_v")
    ]
    name = "base_model.model.model.layers.1.block_sparse_moe.experts.3.w{}.lora_A.weight"
    assert torch.equal(found[name.format(1)], found[name.format(3)])


def test_one_pair_for_all_experts_of_an_early_release_is_read(tmp_path: Path) -> None:
    """Until Bridge 0.5.0, a grouped layer's adapter has no axis for the experts."""
    generator = torch.Generator().manual_seed(5)
    shapes = {"fc1.adapter.linear_in": (4, HIDDEN), "fc1.adapter.linear_out": (2 * FFN, 4)}
    tensors = {
        f"decoder.layers.mlp.experts.experts.linear_{name}.weight": torch.randn(
            LAYERS, *shape, generator=generator
        )
        for name, shape in shapes.items()
    }
    one_rank = {"model": {"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 1}}
    bridge = saved(tmp_path, tensors, one_rank)
    found = back(bridge, EXPERTS, tmp_path / "back")
    name = "base_model.model.model.layers.1.block_sparse_moe.experts.{}.w{}.lora_{}.weight"
    a, b = tensors.values()
    for expert in range(4):
        assert torch.equal(found[name.format(expert, 1, "A")], a[1])
        assert torch.equal(found[name.format(expert, 3, "B")], b[1, FFN:])
    (settings,) = bridge.rglob("run_config.yaml")
    two_ranks = settings.read_text().replace("expert_tensor_parallel_size: 1", "")
    settings.write_text(two_ranks)
    command = ["--load-dir", bridge, "--config", EXPERTS / "base", "--saver", "peft"]
    refused = run("convert", *command, "--save-dir", tmp_path / "out")
    assert_refused(refused, 2, "experts at expert tensor-parallel size 2")


# The order of rows of a linear_fc1 without a gate, which depends on Bridge's release.


class _Nothing:
    def tensor(self) -> LazyTensor:
        raise AssertionError("the order of rows is told without a read")


def chunked(rows: int, chunks: int) -> ChunkedTensor:
    """B of this many rows, in equal chunks."""
    step = rows // chunks
    places = [Chunk.whole((row, 0), (step, 4), _Nothing()) for row in range(0, rows, step)]
    return ChunkedTensor((rows, 4), "F32", places)


@pytest.mark.parametrize(
    ("ranks", "chunks", "halved"), [(2, 2, False), (2, 4, True), (8, 8, False)]
)
def test_chunks_tell_the_order_of_rows_of_a_layer_without_a_gate(
    ranks: int, chunks: int, *, halved: bool
) -> None:
    assert is_halved(without_gate(), "", ranks, chunked(64, chunks), "here") is halved
    order = rows_of_b(without_gate(), "", ranks, "here", halved=halved)
    (regions,) = order.parts.values()
    first = [(region.box.row0, region.row) for region in regions][:2]
    # A half of rank 0 has 16 rows, and the half of rank 1 lies between them.
    assert first == ([(0, 0), (16, 32)] if halved else [(0, 0)])


@pytest.mark.parametrize("chunks", [1, 2, 16])
def test_an_order_of_rows_that_isnt_known_is_refused(chunks: int) -> None:
    with pytest.raises(TensorMismatch, match=rf"B has {chunks} chunks of rows; expected 4 .* or 8"):
        is_halved(without_gate(), "", 4, chunked(64, chunks), "here")


def without_gate() -> NativeTensor:
    """A linear_fc1 of 64 rows."""
    parts = {"layers.0.mlp.up.weight": (Region(Box(0, 64, 0, 16), 0),)}
    return NativeTensor("decoder.layers.0.mlp.linear_fc1.weight", parts, (64, 16), tp=0)


def test_matrices_that_dont_fit_their_weight_are_named(tmp_path: Path) -> None:
    name = "base_model.model.model.layers.0.mlp.up_proj.lora_B.weight"
    adapter = edited(
        LINEAR / "adapter",
        tmp_path / "in",
        tensors=lambda tensors: tensors | {name: torch.zeros(7, 4)},
    )
    refused_of_peft(
        tmp_path, adapter, LINEAR, "mlp.up_proj", "[7, 4]", "expected [r, 32] and [56, r]", status=3
    )


@pytest.mark.parametrize(
    ("made", "words", "status"),
    [
        ({"without": "fc1.adapter.linear_in"}, ["fc1.adapter has only one of its two matrices"], 3),
        (
            {"extra": ("decoder.layers.mlp.experts.experts.linear_fc1.adapter.linear_in.weight",)},
            ["experts", "no adapter of a linear"],
            3,
        ),
        (
            {"extra": ("decoder.layers.mlp.linear_fc9.adapter.linear_in.weight",)},
            ["linear_fc9", "no adapter of a linear"],
            3,
        ),
        (
            {"settings": {"peft": {"_target_": "megatron.bridge.peft.lora.VLMLoRA"}}},
            ["VLMLoRA", "only LoRA"],
            3,
        ),
        (
            {"settings": {"peft": {"_target_": "megatron.bridge.peft.dora.DoRA", "alpha": 4}}},
            ["linear_qkv.adapter has no weight_magnitude"],
            3,
        ),
        (
            {"settings": {"peft": {"alpha": 4, "experts_shared_outer_loras": True}}},
            ["experts_shared_outer_loras", "not supported"],
            3,
        ),
        ({"settings": {"peft": {"alpha": 4, "novelty": 7}}}, ["novelty: 7", "isn't known"], 3),
        ({"settings": {"peft": {"alpha": "much"}}}, ["'much'", "expected a positive number"], 2),
        ({"settings": {"peft": None}}, ["has no `peft:`"], 3),
        ({"settings": {}}, ["has no run_config.yaml", "--option lora_alpha"], 2),
    ],
)
def test_a_damaged_or_unknown_adapter_of_bridges_is_refused(
    made: dict[str, Any], words: list[str], status: int, tmp_path: Path
) -> None:
    path = fused(tmp_path, **made)
    outcome = run(
        "convert",
        "--load-dir",
        path,
        "--config",
        LINEAR / "base",
        "--saver",
        "peft",
        "--save-dir",
        tmp_path / "out",
    )
    assert_refused(outcome, status, *words)


def test_an_adapter_is_no_model_and_a_model_no_adapter(tmp_path: Path) -> None:
    bridge = fused(tmp_path)
    convert = ("convert", "--save-dir", tmp_path / "out", "--load-dir")
    assert_refused(
        run(*convert, bridge, "--saver", "hf"), 2, "is an adapter of Megatron-Bridge", "--config"
    )
    assert_refused(
        run(*convert, bridge, "--config", LINEAR / "base", "--saver", "hf"),
        2,
        "is an adapter",
        "--saver peft",
    )
    assert_refused(
        run(*convert, LINEAR / "base", "--saver", "peft"), 2, "the input is a whole model"
    )
    assert_refused(
        run(*convert, LINEAR / "adapter", "--saver", "core"), 3, "is an adapter", "--loader peft"
    )
    assert_refused(
        run(*convert, LINEAR / "adapter", "--loader", "peft", "--saver", "core"), 2, "--config"
    )
    assert not (tmp_path / "out").exists()


def test_without_run_config_alpha_is_given(tmp_path: Path) -> None:
    path = fused(tmp_path, settings={})
    outcome = run(
        *(
            "convert",
            "--load-dir",
            path,
            "--config",
            LINEAR / "base",
            "--saver",
            "peft",
            "--save-dir",
            tmp_path / "out",
        ),
        *("--option", "lora_alpha=12"),
    )
    assert outcome.status == 0, outcome.err
    assert settings_of(tmp_path / "out")["lora_alpha"] == 12
