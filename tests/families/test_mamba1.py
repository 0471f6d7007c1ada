"""Mamba 1 alone (Mamba, Falcon Mamba) and beside attention (Jamba): widths, names of older files, experts, and refusals."""

from pathlib import Path
from typing import Any

import pytest
import torch

import megaconv
from megaconv.errors import CheckpointError
from megaconv.families import family
from tests.config_models import raw_config
from tests.transformers_oracle import CONVERTED, compute, create, load
from tests.whole_models import (
    assert_same_files,
    raw_config_of,
    tokens,
    weights,
    write_model_files,
)


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    pytest.importorskip("transformers")
    root = tmp_path_factory.mktemp("mamba1")
    for name in ("mamba", "mamba, tied", "falcon_mamba", "jamba"):
        create(CONVERTED[name], root / name)
    return {path.name: path for path in root.iterdir()}


@pytest.mark.oracle
@pytest.mark.parametrize("name", ["mamba", "falcon_mamba"])
@pytest.mark.parametrize(
    ("keys", "width"),
    [
        ({"intermediate_size": 96, "expand": 16}, 96),
        ({"intermediate_size": None, "expand": 4}, 128),
    ],
)
def test_the_stated_width_counts_and_without_it_that_of_expand(
    name: str, keys: dict[str, Any], width: int
) -> None:
    """Published files of Falcon Mamba have an `expand` of 16 and a width of twice the hidden size."""
    transformers = pytest.importorskip("transformers")
    raw = raw_config(name, **keys, time_step_rank="auto")
    if keys["intermediate_size"] is None:
        del raw["intermediate_size"]
    found = family(name).read_hf(raw).mamba1
    theirs = transformers.AutoConfig.for_model(**raw)
    assert found.width == theirs.intermediate_size == width
    assert found.rank == theirs.time_step_rank == 2


@pytest.mark.oracle
def test_the_embeddings_name_in_older_files_is_read(
    sources: dict[str, Path], tmp_path: Path
) -> None:
    source = sources["mamba, tied"]
    older = {
        name.replace("embeddings.", "embedding."): tensor
        for name, tensor in weights(source).items()
    }
    assert "backbone.embedding.weight" in older
    hf = write_model_files(tmp_path / "hf", older, raw_config_of(source))
    megaconv.convert(hf, tmp_path / "out", saver="hf", verify=True, workers=1)
    assert_same_files(tmp_path / "out", source)


@pytest.mark.oracle
def test_experts_of_a_jamba_in_one_tensor_are_read_and_kept(
    sources: dict[str, Path], tmp_path: Path
) -> None:
    source = sources["jamba"]
    model = load(source)
    stacked = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    assert "model.layers.1.feed_forward.experts.gate_up_proj" in stacked
    assert "model.layers.1.feed_forward.experts.3.up_proj.weight" in weights(source)
    hf = write_model_files(tmp_path / "hf", stacked, raw_config_of(source))
    megaconv.convert(hf, tmp_path / "dcp", saver="dcp", workers=1)
    megaconv.convert(tmp_path / "dcp", tmp_path / "out", saver="hf", verify=True, workers=1)
    assert torch.equal(compute(load(tmp_path / "out"), tokens()), compute(model, tokens()))


@pytest.mark.oracle
def test_mixers_and_routers_are_not_quantized(sources: dict[str, Path], tmp_path: Path) -> None:
    options: dict[str, Any] = {"quantize": "fp8-per-channel", "workers": 1}
    megaconv.convert(sources["jamba"], tmp_path / "out", saver="hf", **options)
    written = weights(tmp_path / "out")
    in_fp8 = {name for name, held in written.items() if held.dtype == torch.float8_e4m3fn}
    assert {name.split(".")[-2] for name in in_fp8} == {
        *("q_proj", "k_proj", "v_proj", "o_proj"),
        *("gate_proj", "up_proj", "down_proj"),
    }


REFUSED: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("mamba", {"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
    ("mamba", {"state_size": 0}, "state_size should be a positive number, found 0"),
    ("mamba", {"time_step_rank": "all"}, "time_step_rank should be a positive number, found 'all'"),
    ("falcon_mamba", {"mixer_rms_eps": "tiny"}, "mixer_rms_eps should be a number, found 'tiny'"),
    ("jamba", {"attn_layer_offset": 2}, "attn_layer_offset should be a number below attn_layer_period 2, found 2"),
    ("jamba", {"expert_layer_period": 0}, "expert_layer_period should be a positive number, found 0"),
    ("jamba", {"mamba_d_conv": None, "mamba_expand": -1}, "mamba_expand should be a positive number"),
    ("jamba", {"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
    ("jamba", {"num_experts_per_tok": 7}, "can't have 7 of 6 experts"),
)  # fmt: skip


@pytest.mark.parametrize(("name", "keys", "words"), REFUSED)
def test_settings_that_no_such_model_has_are_refused_by_name(
    name: str, keys: dict[str, Any], words: str
) -> None:
    with pytest.raises(CheckpointError, match=words):
        family(name).read_hf(raw_config(name, **keys))


@pytest.mark.oracle
@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("mamba.A_log", None, "missing"),
        ("mamba.dt_layernorm.weight", None, "missing"),
        ("mamba.dt_proj.bias", torch.ones(3), r"is \[3\], expected \[128\]"),
        ("mamba.x_proj.weight", torch.ones(16, 4), r"is \[16, 4\], expected \[16, 128\]"),
    ],
)
def test_a_missing_or_misshapen_tensor_is_refused_by_name(
    name: str, change: torch.Tensor | None, words: str, sources: dict[str, Path], tmp_path: Path
) -> None:
    held = weights(sources["jamba"])
    name = f"model.layers.0.{name}"
    del held[name]
    hf = write_model_files(
        tmp_path / "hf",
        held if change is None else held | {name: change},
        raw_config_of(sources["jamba"]),
    )
    with pytest.raises(CheckpointError, match=f"{name}.*{words}|{words}.*{name}"):
        megaconv.convert(hf, tmp_path / "out", saver="hf", workers=1)
