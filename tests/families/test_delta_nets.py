"""Hybrids of gated delta nets and gated attention: what Megatron wrote of one, their keys, and norms that are stored less 1."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import megaconv
from formats import torch_dist
from formats.tensor import LazyTensor, matrix_shape, read_tensor
from megaconv.errors import LayoutError, NotExpressible
from megaconv.model.ir import Key
from megaconv.values.shifted import add_exactly
from tests.conftest import FIXTURES
from tests.families.test_families import assert_same, weights_of, write_model
from tests.megatron_oracle import Megatron, read_rank_file
from tests.optimizer_models import write_trained
from tests.runs import assert_refused, run
from tests.transformers_oracle import compute, load

REAL = FIXTURES / "hybrid-qwen3-next-tp2"
"""Megatron core 0.16.1's torch_dist of a Qwen3-Next on two tensor ranks, of its local layers; transformers' own in hf/."""
PLAIN: dict[str, Any] = {"config": REAL / "hf", "options": {"out_norm": "plain"}}
NORM = "decoder.layers.0.self_attention.out_norm.weight"
HF_NORM = "model.layers.0.linear_attn.norm.weight"


# What Megatron wrote.


def test_a_real_distributed_checkpoint_is_read_bit_for_bit() -> None:
    assert megaconv.fingerprint(REAL, **PLAIN).tensors == megaconv.fingerprint(REAL / "hf").tensors


def test_keys_and_chunks_are_those_that_megatron_writes(tmp_path: Path) -> None:
    """The only difference is the norm before experts: the fixture has Transformer Engine's name for it, local layers
    have not."""
    options = {
        "ckpt_format": "torch_dist",
        "transformer_impl": "local",
        "tp": 2,
        "make_vocab_size_divisible_by": 1,
    }
    megaconv.convert(REAL / "hf", tmp_path / "dist", saver="core", **options)
    ours, theirs = (
        {
            key.replace("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm."): (
                tensor.shape,
                sorted((chunk.offset, chunk.shape) for chunk in tensor.chunks),
            )
            for key, tensor in torch_dist.open_directory(next(path.glob("*/.metadata")).parent)
            .tensors()
            .items()
        }
        for path in (tmp_path / "dist", REAL)
    )
    assert ours == theirs


@pytest.mark.slow
@pytest.mark.oracle
def test_transformers_and_megatron_compute_from_ours_what_megatron_computed(
    megatron: Megatron, tmp_path: Path
) -> None:
    stored = load_file(REAL / "logits.safetensors")
    tokens, expected = stored["input_ids"], stored["logits"]
    options: dict[str, Any] = {
        "config": REAL / "hf",
        "options": {"out_norm": "plain"},
        "make_vocab_size_divisible_by": 4,
    }
    megaconv.convert(
        REAL, tmp_path / "hf", saver="hf", config=REAL / "hf", options={"out_norm": "plain"}
    )
    assert (compute(load(tmp_path / "hf"), tokens) - expected).abs().max().item() < 1e-4
    megaconv.convert(
        REAL, tmp_path / "core", saver="core", transformer_impl="local", tp=1, pp=2, **options
    )
    logits = megatron.logits(tmp_path / "core", tokens)[..., : expected.shape[-1]]
    assert (logits - expected).abs().max().item() < 1e-4


def test_without_a_word_on_whose_layers_they_are_an_option_has_to_say_it(tmp_path: Path) -> None:
    command = (
        "convert",
        "--load-dir",
        REAL,
        "--config",
        REAL / "hf",
        "--saver",
        "hf",
        "--save-dir",
        tmp_path / "hf",
    )
    assert_refused(run(*command), 2, "transformer_impl", "--option out_norm=plain")
    assert_refused(
        run(*command, "--option", "out_norm=other"), 2, "out_norm=other", "zero_centered"
    )
    assert run(*command, "--option", "out_norm=plain").status == 0
    assert_same_values(tmp_path / "hf", REAL / "hf")


def assert_same_values(found: Path, wanted: Path) -> None:
    ours, theirs = weights_of(found), weights_of(wanted)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


# The norm that Transformer Engine's layers store less 1.


@pytest.fixture
def hf(tmp_path: Path) -> Path:
    return write_model(tmp_path / "hf", "qwen3_5")


def rank_norm(checkpoint: Path) -> torch.Tensor:
    (file,) = checkpoint.glob("*/mp_rank_00/model_optim_rng.pt")
    norm: torch.Tensor = read_rank_file(file)["model"][NORM]
    return norm


def dist_norm(checkpoint: Path) -> torch.Tensor:
    return as_torch(
        torch_dist.open_directory(next(checkpoint.glob("*/.metadata")).parent).tensors()[NORM]
    )


def as_torch(tensor: LazyTensor) -> torch.Tensor:
    return (
        torch.from_numpy(read_tensor(tensor).reshape(-1))
        .view(getattr(torch, tensor.dtype))
        .reshape(tensor.shape)
    )


@pytest.mark.parametrize("ckpt_format", ["torch", "torch_dist"])
@pytest.mark.parametrize(("impl", "less"), [("transformer_engine", 1), ("local", 0)])
def test_layers_of_transformer_engine_have_the_weight_less_1_others_as_it_is(
    hf: Path, impl: str, less: int, ckpt_format: str, tmp_path: Path
) -> None:
    megaconv.convert(
        hf,
        tmp_path / "core",
        saver="core",
        transformer_impl=impl,
        ckpt_format=ckpt_format,
        verify=True,
    )
    stored = (
        rank_norm(tmp_path / "core") if ckpt_format == "torch" else dist_norm(tmp_path / "core")
    )
    assert torch.equal(stored, weights_of(hf)[HF_NORM] - less)
    megaconv.convert(tmp_path / "core", tmp_path / "back", saver="hf")
    assert_same(tmp_path / "back", hf)
    assert megaconv.fingerprint(tmp_path / "core").weights == megaconv.fingerprint(hf).weights
    assert run("diff", hf, tmp_path / "core").status == 0
    opened = megaconv.open(tmp_path / "core").load("layers.0.linear.out_norm.weight")
    assert torch.equal(opened, weights_of(hf)[HF_NORM])


def with_norm(hf: Path, value: float) -> Path:
    tensors = weights_of(hf)
    tensors[HF_NORM][0] = value
    save_file(tensors, hf / "model.safetensors", metadata={"format": "pt"})
    return hf


def test_a_weight_that_would_not_come_back_ends_the_run_with_its_name(
    hf: Path, tmp_path: Path
) -> None:
    """0.1001 - 1 needs more bits than bfloat16 has."""
    command = (
        "convert",
        "--load-dir",
        with_norm(hf, 0.1),
        "--saver",
        "core",
        "--save-dir",
        tmp_path / "core",
    )
    outcome = run(*command)
    assert_refused(
        outcome,
        2,
        "layers.0.linear.out_norm.weight",
        "0.100098",
        "bfloat16",
        "--transformer-impl local",
    )
    assert not (tmp_path / "core").exists()
    assert run(*command, "--transformer-impl", "local").status == 0
    assert run(*command, "--dtype", "fp32", "--overwrite").status == 0


def trained(hf: Path, target: Path, value: float) -> Path:
    """A checkpoint of Transformer Engine's layers whose norm training has moved to a value that has no bfloat16 beside 1."""
    megaconv.convert(hf, target, saver="core")
    (file,) = target.glob("*/mp_rank_00/model_optim_rng.pt")
    state = read_rank_file(file)
    state["model"][NORM][0] = value
    torch.save(state, file)
    (target / "megaconv.json").unlink()
    return target


def test_between_two_checkpoints_of_transformer_engine_no_bit_is_touched(
    hf: Path, tmp_path: Path
) -> None:
    source = trained(hf, tmp_path / "trained", 0.0123)
    megaconv.convert(
        source, tmp_path / "dist", saver="core", ckpt_format="torch_dist", tp=2, verify=True
    )
    megaconv.convert(tmp_path / "dist", tmp_path / "again", saver="core", tp=1, verify=True)
    assert torch.equal(rank_norm(tmp_path / "again"), rank_norm(source))
    assert megaconv.fingerprint(tmp_path / "dist").weights == megaconv.fingerprint(source).weights
    assert megaconv.fingerprint(source).weights != megaconv.fingerprint(hf).weights


def test_an_out_norm_without_an_exact_value_is_rounded_only_with_allow_lossy(
    hf: Path, tmp_path: Path
) -> None:
    source = trained(hf, tmp_path / "trained", 0.0123)
    command = ("convert", "--load-dir", source, "--saver", "hf", "--save-dir", tmp_path / "out")
    assert_refused(
        run(*command), 2, "layers.0.linear.out_norm.weight", "0.0123", "--allow-lossy out_norm"
    )
    assert run(*command, "--allow-lossy", "out_norm", "--verify").status == 0
    assert weights_of(tmp_path / "out")[HF_NORM][0].item() == torch.tensor(1.0123).bfloat16().item()
    assert run(*command, "--dtype", "fp32", "--overwrite", "--verify").status == 0
    bf16 = torch.tensor(0.0123).bfloat16().float().item()
    assert weights_of(tmp_path / "out")[HF_NORM][0].item() == 1 + bf16


def test_a_rounded_out_norm_does_not_contradict_the_record_of_its_source(
    hf: Path, tmp_path: Path
) -> None:
    source = trained(hf, tmp_path / "trained", 0.0123)
    megaconv.convert(source, tmp_path / "dist", saver="core", ckpt_format="torch_dist")
    command = ("convert", tmp_path / "dist", tmp_path / "out", "--saver", "hf")
    assert run(*command, "--allow-lossy", "out_norm").status == 0
    assert run("diff", tmp_path / "dist", tmp_path / "out").status == 0
    assert run("diff", tmp_path / "out", tmp_path / "dist").status == 0
    norm = load_file(tmp_path / "out" / "model.safetensors")
    norm[HF_NORM][0] += 1
    save_file(norm, tmp_path / "out" / "model.safetensors", metadata={"format": "pt"})
    assert_refused(run("diff", tmp_path / "dist", tmp_path / "out"), 3, "out_norm", "megaconv.json")


def test_a_patch_of_an_inexact_out_norm_is_refused_with_a_remedy(hf: Path, tmp_path: Path) -> None:
    """`delta` itself has neither of the options, so that the message names the command that has them."""
    source = trained(hf, tmp_path / "trained", 0.0123)
    megaconv.convert(hf, tmp_path / "old", saver="core", ckpt_format="torch_dist")
    megaconv.convert(source, tmp_path / "new", saver="core", ckpt_format="torch_dist")
    command = ("delta", tmp_path / "old", tmp_path / "new", "--save-dir", tmp_path / "patch")
    assert_refused(run(*command), 2, "convert it with --dtype float32")
    assert not (tmp_path / "patch").exists()


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_exactly_the_sums_that_come_back_to_the_same_bits_are_made(dtype: str) -> None:
    """Every 16-bit number, infinities and what is no number too; of float32 those with as many bits."""
    numbers = np.arange(1 << 16, dtype=np.uint16)
    stored = (numbers.astype(np.uint32) << 16 if dtype == "float32" else numbers).view(np.uint8)
    values = torch.from_numpy(stored.copy()).view(getattr(torch, dtype))
    back = (values - 1) + 1
    exact = (
        back.view(torch.uint8).view(len(numbers), -1)
        == values.view(torch.uint8).view(len(numbers), -1)
    ).all(1)
    width = stored.size // len(numbers)
    for index in range(0, len(numbers), 97):
        made = add_exactly(stored[index * width : (index + 1) * width], dtype, -1)
        if torch.isnan(values[index]):  # torch leaves open which of them comes out
            continue
        assert (made is not None) == bool(exact[index]), values[index]
        if made is not None:
            assert (
                torch.from_numpy(made.copy()).view(values.dtype).item()
                == (values[index] - 1).item()
            )


# What a family can't have.


def test_more_tensor_ranks_than_key_value_heads_are_refused(hf: Path, tmp_path: Path) -> None:
    """Megatron core 0.16.1 takes each rank its part of q and not of the gate."""
    config = json.loads(
        (
            write_model(tmp_path / "one", "qwen3_5", num_key_value_heads=1) / "config.json"
        ).read_text()
    )
    assert config["num_key_value_heads"] == 1
    with pytest.raises(LayoutError, match=r"kv_heads = 1 .* gated"):
        megaconv.convert(tmp_path / "one", tmp_path / "core", saver="core", tp=2)


def test_heads_of_linear_attention_have_to_be_divisible(tmp_path: Path) -> None:
    source = write_model(
        tmp_path / "hf", "qwen3_5", linear_num_key_heads=3, linear_num_value_heads=6
    )
    with pytest.raises(LayoutError, match="linear_key_heads = 3"):
        megaconv.convert(source, tmp_path / "core", saver="core", tp=2)


def test_legacy_models_have_no_linear_attention(hf: Path, tmp_path: Path) -> None:
    with pytest.raises(NotExpressible):
        megaconv.convert(hf, tmp_path / "legacy", saver="legacy")


# Layers for multi-token prediction.


MTP = {
    "eh_proj.weight", "enorm.weight", "hnorm.weight", "final_layernorm.weight",
    "mtp_model_layer.self_attention.linear_qkv.layer_norm_weight", "mtp_model_layer.self_attention.linear_qkv.weight",
    "mtp_model_layer.self_attention.q_layernorm.weight", "mtp_model_layer.self_attention.k_layernorm.weight",
    "mtp_model_layer.self_attention.linear_proj.weight",
}  # fmt: skip
MTP_EXPERTS = {
    "mtp_model_layer.pre_mlp_layernorm.weight", "mtp_model_layer.mlp.router.weight",
    "mtp_model_layer.mlp.shared_experts.linear_fc1.weight", "mtp_model_layer.mlp.shared_experts.linear_fc2.weight",
    "mtp_model_layer.mlp.shared_experts.gate_weight",
}  # fmt: skip
MTP_DENSE = {
    f"mtp_model_layer.mlp.{name}"
    for name in ("linear_fc1.layer_norm_weight", "linear_fc1.weight", "linear_fc2.weight")
}
"""Names behind `mtp.layers.0.`, by Megatron-Bridge's mappings of Qwen3-Next and Qwen 3.5 (22 August 2026), experts aside."""


def with_mtp(hf: Path) -> Path:
    """Layer 1 has full attention, and layer 2, the last one, the MLP."""
    tensors = weights_of(hf)
    taken = {1: ("self_attn.", "input_layernorm."), 2: ("mlp.", "post_attention_layernorm.")}
    mtp = {
        f"mtp.layers.0.{name.removeprefix(f'model.layers.{layer}.')}": torch.randn_like(tensor)
        for layer, words in taken.items()
        for name, tensor in tensors.items()
        if name.startswith(tuple(f"model.layers.{layer}.{word}" for word in words))
    }
    hidden = tensors["model.norm.weight"]
    norms = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
    mtp |= {f"mtp.{name}.weight": torch.randn_like(hidden) for name in norms}
    mtp["mtp.fc.weight"] = torch.randn(len(hidden), 2 * len(hidden)).to(hidden.dtype)
    save_file(tensors | mtp, hf / "model.safetensors", metadata={"format": "pt"})
    return hf


@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5", "qwen3_5_moe"])
@pytest.mark.parametrize("ckpt_format", ["torch", "torch_dist"])
def test_the_layer_for_multi_token_prediction_goes_to_megatron_and_back(
    name: str, ckpt_format: str, tmp_path: Path
) -> None:
    hf = with_mtp(write_model(tmp_path / "hf", name))
    megaconv.convert(
        hf, tmp_path / "core", saver="core", ckpt_format=ckpt_format, tp=2, pp=2, layer_split=(2, 1)
    )
    megaconv.convert(tmp_path / "core", tmp_path / "again", saver="core", ckpt_format="torch", pp=1)
    for place in ("core", "again"):
        megaconv.convert(tmp_path / place, tmp_path / f"{place} back", saver="hf")
        assert_same(tmp_path / f"{place} back", hf)
    (file,) = (tmp_path / "again").glob("*/mp_rank_00*/model_optim_rng.pt")
    state = read_rank_file(file)
    of_bridge = {
        key.replace("transformer_layer", "mtp_model_layer"): value
        for key, value in state["model"].items()
    }
    found = {
        key.removeprefix("mtp.layers.0.")
        for key in of_bridge
        if key.startswith("mtp.") and "_extra_state" not in key
    }
    wanted = MTP | (MTP_DENSE if name == "qwen3_5" else MTP_EXPERTS)
    assert {key for key in found if ".experts." not in key} == wanted
    torch.save({**state, "model": of_bridge}, file)  # the form of later releases
    (tmp_path / "again/megaconv.json").unlink()
    megaconv.convert(tmp_path / "again", tmp_path / "from later", saver="hf")
    assert_same(tmp_path / "from later", hf)


def packed(
    tensors: dict[str, torch.Tensor], layer: str, experts: int = 4
) -> dict[str, torch.Tensor]:
    """The tensors, with the experts of a layer packed into two."""
    before = f"{layer}.mlp.experts."
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith(before)}

    def of(word: str) -> torch.Tensor:
        return torch.stack(
            [tensors[f"{before}{expert}.{word}_proj.weight"] for expert in range(experts)]
        )

    return kept | {
        f"{before}gate_up_proj": torch.cat([of("gate"), of("up")], dim=1),
        f"{before}down_proj": of("down"),
    }


@pytest.mark.parametrize(
    "layers", [["mtp.layers.0"], [f"model.layers.{layer}" for layer in range(3)]]
)
@pytest.mark.parametrize("together", [False, True])
def test_experts_of_a_predicting_layer_may_be_packed_where_others_are_not_and_the_other_way_round(
    layers: list[str], together: bool, tmp_path: Path
) -> None:
    """Qwen 3.6 has the first form, Qwen 3.5 the second."""
    hf = with_mtp(write_model(tmp_path / "hf", "qwen3_5_moe"))
    tensors = weights_of(hf)
    other = shutil.copytree(hf, tmp_path / "other")
    for layer in {
        *layers,
        *(
            ["mtp.layers.0", "model.layers.0", "model.layers.1", "model.layers.2"]
            if together
            else []
        ),
    }:
        tensors = packed(tensors, layer)
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    assert megaconv.fingerprint(other).weights == megaconv.fingerprint(hf).weights
    megaconv.convert(other, tmp_path / "core", saver="core", ep=2)
    megaconv.convert(tmp_path / "core", tmp_path / "back", saver="hf", base=other)
    assert_same(tmp_path / "back", other)


def test_a_gated_delta_net_has_its_convolution_with_an_axis_of_1(hf: Path, tmp_path: Path) -> None:
    megaconv.convert(hf, tmp_path / "core", saver="core", tp=2)
    found = [
        read_rank_file(path)["model"]["decoder.layers.0.self_attention.conv1d.weight"]
        for path in sorted((tmp_path / "core").glob("*/mp_rank_*/model_optim_rng.pt"))
    ]
    whole = weights_of(hf)["model.layers.0.linear_attn.conv1d.weight"]
    assert [tuple(part.shape) for part in found] == [(10, 1, 4)] * 2
    assert matrix_shape(tuple(whole.shape)) == (20, 4)
    q, k, v = whole.split([6, 6, 8])
    for rank, part in enumerate(found):
        assert torch.equal(part, torch.cat([q.chunk(2)[rank], k.chunk(2)[rank], v.chunk(2)[rank]]))


def test_the_arguments_alone_describe_a_hybrid(hf: Path, tmp_path: Path) -> None:
    megaconv.convert(hf, tmp_path / "core", saver="core", tp=2, pp=2, layer_split=(1, 2))
    shutil.rmtree(tmp_path / "core" / "hf")
    megaconv.convert(tmp_path / "core", tmp_path / "back", saver="hf")
    assert_same(tmp_path / "back", hf)


# The same norm's optimizer state.


def test_masters_of_norms_that_are_stored_less_1_keep_their_bits_too(
    hf: Path, tmp_path: Path
) -> None:
    """Trained, hardly any of them has an exact value beside 1."""
    source = write_trained(hf, tmp_path / "trained", transformer_impl="transformer_engine")
    before = megaconv.fingerprint(source)
    for ckpt_format in ("torch", "torch_dist"):
        options: dict[str, Any] = {"ckpt_format": ckpt_format, "tp": 2, "pp": 1, "verify": True}
        megaconv.convert(source, tmp_path / ckpt_format, saver="core", **options)
        after = megaconv.fingerprint(tmp_path / ckpt_format)
        assert (after.weights, after.optimizer) == (before.weights, before.optimizer)


def test_allowed_to_round_a_weight_stays_the_rounded_value_of_its_master(
    hf: Path, tmp_path: Path
) -> None:
    source = write_trained(hf, tmp_path / "trained", transformer_impl="transformer_engine")
    local: dict[str, Any] = {"saver": "core", "transformer_impl": "local", "verify": True}
    with pytest.raises(NotExpressible, match=r"out_norm\.weight.*--allow-lossy out_norm"):
        megaconv.convert(source, tmp_path / "local", **local)
    megaconv.convert(source, tmp_path / "local", allow_lossy=("out_norm",), **local)
    opened = megaconv.open(tmp_path / "local")
    name = "layers.0.linear.out_norm.weight"
    master = as_torch(opened.slots[Key(name, "master")])
    assert torch.equal(opened.load(name), master.bfloat16())
    assert (master - 1 - rank_master(source)).abs().max() < 2**-23


def rank_master(checkpoint: Path) -> torch.Tensor:
    """The fp32 copy of the first layer's norm, which is known by its value."""
    (file,) = checkpoint.glob("*/mp_rank_00/model_optim_rng.pt")
    state = read_rank_file(file)
    masters: list[torch.Tensor] = state["optimizer"]["fp32_from_fp16_params"][1]
    norm = state["model"][NORM]
    (found,) = [m for m in masters if m.shape == norm.shape and torch.equal(m.bfloat16(), norm)]
    return found
