"""Indexers of sparse attention: the two orders of their elements, whose norms are where, and what a family can't have."""

from pathlib import Path
from typing import Any

import pytest
import torch

import megaconv
from megaconv.errors import NotExpressible
from megaconv.megatron.arguments.sparse import INDEXER_ORDER
from tests.families.test_families import assert_same, weights_of, write_model
from tests.optimizer_models import load as load_rank
from tests.optimizer_models import write_trained
from tests.runs import assert_refused, run

FAMILIES = ("deepseek_v32", "glm_moe_dsa")
HEADS, HEAD, ROPE = 2, 8, 4
SIZES = {"index_n_heads": HEADS, "index_head_dim": HEAD, "qk_rope_head_dim": ROPE, "head_dim": ROPE}
ATTENTION, HF = "decoder.layers.1.self_attention.", "model.layers.1.self_attn."
IN_0_16 = {"deepseek_v32": [4, 5, 6, 7, 0, 2, 1, 3], "glm_moe_dsa": [4, 5, 6, 7, 0, 1, 2, 3]}
"""The elements of a head of 8 in core 0.16, by their place in the files: first those that don't rotate; halves become
pairs of neighbours."""
FOR_0_16: dict[str, Any] = {"saver": "core", "options": {"indexer_for": "0.16"}}


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def hf(family: str, tmp_path: Path) -> Path:
    return write_model(tmp_path / "hf", family, **SIZES)


def rank(checkpoint: Path) -> dict[str, Any]:
    (file,) = checkpoint.glob("*/mp_rank_00/model_optim_rng.pt")
    return load_rank(file)


def indexer(checkpoint: Path) -> dict[str, torch.Tensor]:
    """The tensors of the indexer of one layer, each as heads of rows."""
    prefix = ATTENTION + "core_attention.indexer."
    found = {
        name.removeprefix(prefix): value
        for name, value in rank(checkpoint)["model"].items()
        if prefix in name
    }
    return {name: value for name, value in found.items() if not name.endswith("_extra_state")}


def test_the_order_is_that_of_the_files_unless_an_option_asks_for_that_of_core_0_16(
    family: str, hf: Path, tmp_path: Path
) -> None:
    weights, prefix = weights_of(hf), HF + "indexer."
    names = {
        "wq_b": "linear_wq_b",
        "wk": "linear_wk",
        "k_norm": "k_norm",
        "weights_proj": "linear_weights_proj",
    }
    meant = {
        ".".join((names[module], kind)): weights[prefix + f"{module}.{kind}"]
        for module in names
        for kind in (("weight", "bias") if module == "k_norm" else ("weight",))
    }
    megaconv.convert(hf, tmp_path / "core", saver="core")
    found = indexer(tmp_path / "core")
    assert found.keys() == meant.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in meant.items())
    megaconv.convert(hf, tmp_path / "old", **FOR_0_16)
    found = indexer(tmp_path / "old")
    for name in ("linear_wq_b.weight", "linear_wk.weight", "k_norm.weight", "k_norm.bias"):
        heads = meant[name].unflatten(0, (-1, HEAD))
        assert torch.equal(found[name].unflatten(0, (-1, HEAD)), heads[:, IN_0_16[family]]), name
    assert torch.equal(found["linear_weights_proj.weight"], meant["linear_weights_proj.weight"])


@pytest.mark.parametrize("impl", ["transformer_engine", "local"])
@pytest.mark.parametrize("ckpt_format", ["torch", "torch_dist"])
def test_either_order_comes_back_and_becomes_the_other(
    hf: Path, ckpt_format: str, impl: str, tmp_path: Path
) -> None:
    options: dict[str, Any] = {
        "ckpt_format": ckpt_format,
        "transformer_impl": impl,
        "tp": 2,
        "verify": True,
    }
    megaconv.convert(hf, tmp_path / "old", **FOR_0_16, **options)
    megaconv.convert(tmp_path / "old", tmp_path / "new", saver="core", **options)
    assert megaconv.fingerprint(tmp_path / "new").weights == megaconv.fingerprint(hf).weights
    for core in ("old", "new"):
        megaconv.convert(tmp_path / core, tmp_path / f"{core}-hf", saver="hf")
        assert_same(tmp_path / f"{core}-hf", hf)


def forget(checkpoint: Path) -> Path:
    """Remove our argument, so that the checkpoint looks as if Megatron had written it."""
    (file,) = checkpoint.glob("*/mp_rank_00/model_optim_rng.pt")
    state = load_rank(file)
    delattr(state["args"], INDEXER_ORDER)
    torch.save(state, file)
    (checkpoint / "megaconv.json").unlink()
    return checkpoint


def test_norms_of_latent_vectors_tell_the_release_where_nothing_else_does(
    hf: Path, tmp_path: Path
) -> None:
    """From core 0.19 on, these norms are separate modules among Transformer Engine's layers too."""
    megaconv.convert(hf, tmp_path / "new", saver="core")
    megaconv.convert(hf, tmp_path / "old", **FOR_0_16)
    assert ATTENTION + "kv_layernorm.weight" in rank(tmp_path / "new")["model"]
    assert ATTENTION + "linear_kv_up_proj.layer_norm_weight" in rank(tmp_path / "old")["model"]
    megaconv.convert(forget(tmp_path / "old"), tmp_path / "back", saver="hf")
    assert_same(tmp_path / "back", hf)


def test_among_local_layers_an_option_has_to(hf: Path, tmp_path: Path) -> None:
    megaconv.convert(hf, tmp_path / "old", **FOR_0_16, transformer_impl="local")
    command = ("convert", "--load-dir", forget(tmp_path / "old"), "--saver", "hf", "--save-dir")
    assert run(*command, tmp_path / "wrong").status == 0
    assert not torch.equal(
        *(weights_of(path)[HF + "indexer.wk.weight"] for path in (hf, tmp_path / "wrong"))
    )
    assert run(*command, tmp_path / "right", "--option", "indexer_from=0.16").status == 0
    assert_same(tmp_path / "right", hf)


def test_the_order_is_pointed_out(hf: Path, tmp_path: Path) -> None:
    notices = megaconv.convert(hf, tmp_path / "core", saver="core").notices
    assert any("--option indexer_for=0.16" in notice for notice in notices)


@pytest.mark.slow
def test_the_optimizer_goes_along_in_either_order(hf: Path, tmp_path: Path) -> None:
    source = write_trained(hf, tmp_path / "trained")
    before = megaconv.fingerprint(source)
    old = {**FOR_0_16, "transformer_impl": "local"}
    for ckpt_format, sizes in (("torch", {"tp": 2, "ep": 2}), ("torch_dist", {"tp": 2, "pp": 3})):
        target = tmp_path / ckpt_format
        megaconv.convert(source, target, **old, ckpt_format=ckpt_format, verify=True, **sizes)
        megaconv.convert(
            target,
            tmp_path / f"{ckpt_format}-new",
            saver="core",
            transformer_impl="local",
            tp=1,
            pp=1,
            ep=1,
        )
        for path in (target, tmp_path / f"{ckpt_format}-new"):
            after = megaconv.fingerprint(path)
            assert (after.weights, after.optimizer) == (before.weights, before.optimizer), path


def test_options_that_are_not_known_or_not_for_the_model_are_refused(tmp_path: Path) -> None:
    hf = write_model(tmp_path / "v3", "deepseek_v3")
    command = (
        "convert",
        "--load-dir",
        hf,
        "--saver",
        "core",
        "--save-dir",
        tmp_path / "core",
        "--option",
    )
    assert_refused(run(*command, "indexer_for=0.16"), 2, "the model has no indexer")
    assert_refused(run(*command, "indexer_for=0.17"), 2, "choose 0.16 or 0.19")


@pytest.mark.parametrize(
    "keys",
    [
        {"indexer_types": ["full", "shared", "full"]},
        {"index_topk_pattern": "FSF"},
        {"index_topk_freq": 2, "index_skip_topk_offset": 1},
    ],
)
def test_layers_that_share_an_indexers_choice_have_no_indexer(
    keys: dict[str, Any], tmp_path: Path
) -> None:
    """As in GLM-5.2, whose layer for multi-token prediction has one."""
    hf = write_model(tmp_path / "hf", "glm_moe_dsa", num_nextn_predict_layers=1, **SIZES, **keys)
    with_indexer = {name.split(".")[2] for name in weights_of(hf) if ".indexer." in name}
    assert with_indexer == {"0", "2", "3"}
    megaconv.convert(hf, tmp_path / "out", saver="hf", verify=True)
    assert_same(tmp_path / "out", hf)
    with pytest.raises(NotExpressible, match=r"layers\.shares_index"):
        megaconv.convert(hf, tmp_path / "core", saver="core")
