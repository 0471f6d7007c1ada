"""The MTP layer of hybrids with Mamba layers: to Megatron and back, its names there, and which of them are left out."""

import json
import re
import shutil
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file

import megaconv
from formats import torch_dist
from megaconv.errors import UnknownFamily, UsageError
from tests.families.test_families import assert_same, weights_of, write_model
from tests.families.test_hybrid_models import edited
from tests.megatron_oracle import read_rank_file, version_directory
from tests.optimizer_models import write_trained

MTP_OF_HYBRID: dict[str, Any] = {
    "hybrid_override_pattern": "ME*-E",
    "num_hidden_layers": 5,
    "num_nextn_predict_layers": 1,
    "mtp_hybrid_override_pattern": "*E",
}
"""Keys of a Nemotron-H with an MTP layer."""


@pytest.fixture
def hf(tmp_path: Path) -> Path:
    return write_model(tmp_path / "hf", "nemotron_h", **MTP_OF_HYBRID)


def with_keys(hf: Path, **keys: Any) -> Path:
    config = json.loads((hf / "config.json").read_text())
    kept = {key: value for key, value in (config | keys).items() if value is not None}
    (hf / "config.json").write_text(json.dumps(kept))
    return hf


def args_of(checkpoint: Path) -> Any:
    return read_rank_file(next(checkpoint.glob("*/*/model_optim_rng.pt")))["args"]


# There and back.


@pytest.mark.parametrize(
    "layout",
    [{"tp": 2, "pp": 2, "layer_split": (3, 2)}, {"ep": 2, "pp": 5}],
    ids=str,
)
@pytest.mark.parametrize("ckpt_format", ["torch", "torch_dist"])
def test_the_layer_goes_to_megatron_and_back(
    ckpt_format: str, layout: dict[str, Any], hf: Path, tmp_path: Path
) -> None:
    megaconv.convert(hf, tmp_path / "core", saver="core", ckpt_format=ckpt_format, **layout)
    shutil.rmtree(tmp_path / "core/hf")  # the arguments and the tensors describe it
    megaconv.convert(tmp_path / "core", tmp_path / "again", saver="core", ckpt_format="torch", pp=1)
    for place in ("core", "again"):
        megaconv.convert(tmp_path / place, tmp_path / f"{place} back", saver="hf")
        assert_same(tmp_path / f"{place} back", hf)
    written = json.loads((tmp_path / "again back/config.json").read_text())
    assert {key: written[key] for key in MTP_OF_HYBRID} == MTP_OF_HYBRID


def test_local_layers_and_names_of_core_0_19_come_back(hf: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"transformer_impl": "local", "options": {"release": "0.19"}}
    megaconv.convert(hf, tmp_path / "core", saver="core", **options)
    megaconv.convert(tmp_path / "core", tmp_path / "back", saver="hf", config=hf)
    assert_same(tmp_path / "back", hf)


@pytest.mark.slow
def test_optimizer_state_follows_the_layer(hf: Path, tmp_path: Path) -> None:
    source = write_trained(hf, tmp_path / "trained")
    expected = megaconv.fingerprint(source)
    assert expected.optimizer is not None
    forms: dict[str, dict[str, Any]] = {
        "buffers": {"use_distributed_optimizer": True, "pp": 2, "layer_split": (3, 2)},
        "dist": {"ckpt_format": "torch_dist", "tp": 2},
    }
    for form, options in forms.items():
        megaconv.convert(source, tmp_path / form, saver="core", **options)
        assert megaconv.fingerprint(tmp_path / form) == expected


# What Megatron gets.


def test_the_pattern_in_the_arguments_has_the_layer_after_a_slash(hf: Path, tmp_path: Path) -> None:
    """The older argument has no form for it."""
    megaconv.convert(hf, tmp_path / "even", saver="core")
    megaconv.convert(hf, tmp_path / "stages", saver="core", pp=4, layer_split=(1, 2, 1, 1))
    for place, pattern in (("even", "ME*-E/*E"), ("stages", "M|E*|-|E/*E")):
        args = args_of(tmp_path / place)
        assert (args.hybrid_layer_pattern, args.hybrid_override_pattern) == (pattern, None)
        assert args.mtp_num_layers == 1


_LAYER = "mtp.layers.0.mtp_model_layer.layers."
NAMES = {
    *(f"mtp.layers.0.{name}.weight" for name in ("enorm", "hnorm", "eh_proj", "final_layernorm")),
    *(f"{_LAYER}0.self_attention.linear_{name}.weight" for name in ("qkv", "proj")),
    f"{_LAYER}0.input_layernorm.weight",
    f"{_LAYER}1.pre_mlp_layernorm.weight",
    *(f"{_LAYER}1.mlp.router.{name}" for name in ("weight", "expert_bias")),
    *(f"{_LAYER}1.mlp.fc{number}_latent_proj.weight" for number in (1, 2)),
    *(f"{_LAYER}1.mlp.shared_experts.linear_fc{number}.weight" for number in (1, 2)),
}
"""The parameters and buffers of the MTP layer in megatron-core 0.19.2's HybridModel of local layers, without its experts."""
EXPERT = {f"linear_fc{number}.weight" for number in (1, 2)}


def test_names_and_keys_are_those_of_core_0_19(hf: Path, tmp_path: Path) -> None:
    for ckpt_format in ("torch", "torch_dist"):
        options = {"ckpt_format": ckpt_format, "transformer_impl": "local"}
        megaconv.convert(hf, tmp_path / ckpt_format, saver="core", **options)
    (file,) = (tmp_path / "torch").glob("*/*/model_optim_rng.pt")
    names = read_rank_file(file)["model"]
    keys = torch_dist.open_directory(version_directory(tmp_path / "torch_dist")).tensors()
    for found, experts in ((names, "local_experts.3."), (keys, "experts.")):
        of_layer = {
            name for name in found if name.startswith("mtp.") and "_extra_state" not in name
        }
        assert {name for name in of_layer if ".mlp.experts." not in name} == NAMES
        before = f"{_LAYER}1.mlp.experts.{experts}"
        assert {before + name for name in EXPERT} <= of_layer


def test_a_release_without_such_layers_is_refused(hf: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"release=0\.16: has no MTP layers in hybrids; choose"):
        megaconv.convert(hf, tmp_path / "never", saver="core", options={"release": "0.16"})


def test_a_pattern_of_its_own_for_the_layer_is_read(hf: Path, tmp_path: Path) -> None:
    """As in Megatron-Bridge's provider. Other patterns, and one layer that predicts several tokens, are refused."""

    def apart(args: Namespace) -> None:
        args.hybrid_layer_pattern, args.mtp_hybrid_override_pattern = "ME*-E", "*E"

    def repeated(args: Namespace) -> None:
        args.mtp_use_repeated_layer = True

    megaconv.convert(hf, tmp_path / "core", saver="core")
    expected = megaconv.fingerprint(hf)
    assert megaconv.fingerprint(edited(tmp_path / "core", apart)) == expected
    megaconv.convert(hf, tmp_path / "repeated", saver="core")
    with pytest.raises(UnknownFamily, match="mtp_use_repeated_layer"):
        megaconv.open(edited(tmp_path / "repeated", repeated))


# What config.json says.


@pytest.mark.parametrize("word", ["attention", "full_attention"])
def test_words_of_transformers_are_read_as_the_pattern(word: str, hf: Path, tmp_path: Path) -> None:
    keys = {"mtp_hybrid_override_pattern": None, "mtp_layers_block_type": [word, "moe"]}
    expected = megaconv.fingerprint(hf)
    assert megaconv.fingerprint(with_keys(hf, **keys)) == expected


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"num_nextn_predict_layers": 2}, "num_nextn_predict_layers is 2; megaconv converts one"),
        ({"num_nextn_predict_layers": None}, "num_nextn_predict_layers is 0"),
        ({"mtp_hybrid_override_pattern": "*-"}, r"their pattern is '\*-'; megaconv converts '\*E'"),
        ({"mtp_layers_block_type": ["attention", "mamba"]}, r"their pattern is '\*M'"),
        ({"mtp_layers_block_type": ["attention", "other"]}, r"their pattern is '\*\?'"),
    ],
    ids=str,
)
def test_other_layers_are_left_out_with_a_notice(
    keys: dict[str, Any], reason: str, hf: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected = {name: w for name, w in weights_of(hf).items() if not name.startswith("mtp.")}
    megaconv.convert(with_keys(hf, **keys), tmp_path / "core", saver="core")
    assert re.search(rf"multi-token prediction \({reason}.*\) are not converted", caplog.text)
    assert args_of(tmp_path / "core").hybrid_override_pattern == "ME*-E"
    megaconv.convert(tmp_path / "core", tmp_path / "back", saver="hf")
    assert weights_of(tmp_path / "back").keys() == expected.keys()


def test_a_model_whose_files_lack_the_layer_is_converted_without_it(
    hf: Path, tmp_path: Path
) -> None:
    """transformers saves config.json with the number of MTP layers, and none of their tensors."""
    kept = {name: w for name, w in weights_of(hf).items() if not name.startswith("mtp.")}
    save_file(kept, hf / "model.safetensors", metadata={"format": "pt"})
    megaconv.convert(hf, tmp_path / "core", saver="core", tp=2)
    assert args_of(tmp_path / "core").mtp_num_layers is None
    megaconv.convert(tmp_path / "core", tmp_path / "back", saver="hf")
    assert_same(tmp_path / "back", hf)
    written = json.loads((tmp_path / "back/config.json").read_text())
    assert written["num_nextn_predict_layers"] == 1


def test_base_adds_layers_that_were_left_out(hf: Path, tmp_path: Path) -> None:
    with_keys(hf, num_nextn_predict_layers=2)
    megaconv.convert(hf, tmp_path / "core", saver="core")
    megaconv.convert(tmp_path / "core", tmp_path / "back", saver="hf", base=hf)
    found, wanted = weights_of(tmp_path / "back"), weights_of(hf)
    assert found.keys() == wanted.keys()
    assert all(found[name].equal(weight) for name, weight in wanted.items())
