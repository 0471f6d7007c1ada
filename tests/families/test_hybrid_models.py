"""Models whose layers are a mixer and an MLP, as Megatron core's HybridModel: names, arguments, layouts, and what is refused."""

import shutil
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import megaconv
from megaconv.errors import NotExpressible, UnknownFamily, UsageError
from tests.families.test_delta_nets import with_mtp
from tests.families.test_families import assert_same, write_model
from tests.megatron_oracle import read_rank_file
from tests.optimizer_models import write_trained
from tests.runs import run

HYBRID: dict[str, Any] = {"saver": "core", "options": {"model": "hybrid"}}
STAGES: dict[str, Any] = {"pp": 2, "layer_split": (2, 1)}


def arguments(checkpoint: Path) -> dict[str, Any]:
    return dict(vars(read_rank_file(next(checkpoint.glob("*/*/model_optim_rng.pt")))["args"]))


def edited(checkpoint: Path, change: Callable[[Namespace], None]) -> Path:
    """The checkpoint with other args in its rank files, and without anything beside them."""
    for file in checkpoint.glob("*/*/model_optim_rng.pt"):
        state = read_rank_file(file)
        change(state["args"])
        torch.save(state, file)
    shutil.rmtree(checkpoint / "hf")
    (checkpoint / "megaconv.json").unlink()
    return checkpoint


# There and back.


@pytest.mark.parametrize("ckpt_format", ["torch", "torch_dist"])
@pytest.mark.parametrize(
    ("name", "family"),
    [("qwen3_next", "qwen3_next"), ("qwen3_5", "qwen3_5"), ("llama", "llama"), ("mixtral", "mixtral")],
)  # fmt: skip
def test_a_model_is_written_as_a_hybrid_model_and_read_as_itself(
    name: str, family: str, ckpt_format: str, tmp_path: Path
) -> None:
    hf = write_model(tmp_path / "hf", name)
    megaconv.convert(hf, tmp_path / "core", ckpt_format=ckpt_format, tp=2, **STAGES, **HYBRID)
    shutil.rmtree(tmp_path / "core/hf")
    found = megaconv.open(tmp_path / "core")
    assert (found.config.family, found.config.layer_count) == (family, 3)
    assert found.header.layout is not None
    assert found.header.layout.stage_layers == (2, 1)
    megaconv.convert(tmp_path / "core", tmp_path / "back", saver="hf", config=hf)
    assert_same(tmp_path / "back", hf)


@pytest.mark.parametrize("ckpt_format", ["torch", "torch_dist"])
def test_layers_for_multi_token_prediction_are_two_layers_of_their_own_stack(
    ckpt_format: str, tmp_path: Path
) -> None:
    hf = with_mtp(write_model(tmp_path / "hf", "qwen3_next"))
    megaconv.convert(hf, tmp_path / "core", ckpt_format=ckpt_format, **STAGES, **HYBRID)
    megaconv.convert(tmp_path / "core", tmp_path / "back", saver="hf")
    assert_same(tmp_path / "back", hf)


def test_another_layout_stays_a_hybrid_model_and_an_option_makes_it_a_gpt_model(
    tmp_path: Path,
) -> None:
    hf = write_model(tmp_path / "hf", "qwen3_next")
    megaconv.convert(hf, tmp_path / "core", **STAGES, **HYBRID)
    first = arguments(tmp_path / "core")
    assert (first["hybrid_layer_pattern"], first["num_layers"]) == ("GE*-|GE", 6)
    assert first["spec"] == ["megatron.core.models.hybrid.hybrid_layer_specs", "hybrid_stack_spec"]
    megaconv.convert(tmp_path / "core", tmp_path / "one", saver="core", pp=1)
    assert arguments(tmp_path / "one")["hybrid_layer_pattern"] == "GE*-GE"
    megaconv.convert(tmp_path / "core", tmp_path / "gpt", saver="core", options={"model": "gpt"})
    gpt = arguments(tmp_path / "gpt")
    assert (gpt["hybrid_layer_pattern"], gpt["num_layers"]) == (None, 3)
    assert gpt["linear_attention_freq"] == [1, 0, 1]
    for place in ("one", "gpt"):
        assert megaconv.fingerprint(tmp_path / place) == megaconv.fingerprint(hf)


def test_the_command_line_of_a_hybrid_model_has_its_pattern(tmp_path: Path) -> None:
    hf = write_model(tmp_path / "hf", "qwen3_next")
    megaconv.convert(hf, tmp_path / "core", **STAGES, **HYBRID)
    result = run("inspect", "--megatron-args", tmp_path / "core")
    assert "--hybrid-layer-pattern 'GE*-|GE'" in result.out
    assert "--spec megatron.core.models.hybrid.hybrid_layer_specs hybrid_stack_spec" in result.out
    assert "--linear-num-key-heads" in result.out
    for other in (
        "--num-layers",
        "--linear-attention-freq",
        "--experimental",
        "--is-hybrid",
        "pipeline-num-layers",
    ):
        assert other not in result.out
    assert "pretrain_hybrid.py" in result.err


def test_optimizer_state_follows_the_layers(tmp_path: Path) -> None:
    source = write_trained(write_model(tmp_path / "hf", "qwen3_5"), tmp_path / "trained")
    expected = megaconv.fingerprint(source)
    assert expected.optimizer is not None
    forms: dict[str, dict[str, Any]] = {
        "plain": {},
        "buffers": {"use_distributed_optimizer": True},
        "dist": {"ckpt_format": "torch_dist"},
    }
    for form, options in forms.items():
        megaconv.convert(source, tmp_path / form, **STAGES, **HYBRID, **options)
        assert megaconv.fingerprint(tmp_path / form) == expected


# What other runs saved.


def test_equal_stages_of_a_pattern_without_stages_are_read(tmp_path: Path) -> None:
    def without_stages(args: Namespace) -> None:
        args.hybrid_layer_pattern = args.hybrid_layer_pattern.replace("|", "")
        args.decoder_first_pipeline_num_layers = 4

    hf = write_model(tmp_path / "hf", "llama")
    megaconv.convert(hf, tmp_path / "core", **STAGES, **HYBRID)
    core = edited(tmp_path / "core", without_stages)
    assert megaconv.fingerprint(core) == megaconv.fingerprint(hf)


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("DE*-GE", r"has 'D' \(sparse attention\).*supported: \*, -, E, G, M"),
        ("+E+-+E", r"has '\+' \(latent attention\)"),
        ("XE*-GE", "has 'X', which"),
        ("GEG*-E", r"gated delta net \(G\) only in a model whose layers are G or \*, and - or E"),
        ("MEG-ME", r"gated delta net \(G\) only"),
        ("GE*-GE/M*", r"MTP layers \(after '/'\) of one attention and an MLP"),
        (
            "ME*-ME/M*",
            r"one MTP layer \(after '/'\) of such a model, of attention and experts \(\*E\)",
        ),
        ("ME*-ME/*E/*E", "reads one MTP layer"),
        ("M-*-M-/*E", "only beside other layers with experts"),
    ],
)
def test_a_pattern_that_megaconv_cannot_read_is_refused_with_its_symbol(
    pattern: str, message: str, tmp_path: Path
) -> None:
    def other(args: Namespace) -> None:
        args.hybrid_layer_pattern = pattern

    megaconv.convert(write_model(tmp_path / "hf", "qwen3_next"), tmp_path / "core", **HYBRID)
    with pytest.raises(UnknownFamily, match=message):
        megaconv.open(edited(tmp_path / "core", other))


def test_a_stage_that_ends_between_a_mixer_and_its_mlp_is_refused(tmp_path: Path) -> None:
    def other(args: Namespace) -> None:
        args.hybrid_layer_pattern = "GE*|-GE"

    megaconv.convert(write_model(tmp_path / "hf", "qwen3_next"), tmp_path / "core", **HYBRID)
    with pytest.raises(UnknownFamily, match=r"a pipeline stage has 3 layers.*save it with other"):
        megaconv.open(edited(tmp_path / "core", other))


# What can't be written.


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("deepseek_v3", "latent attention"),
        ("gemma2", "windows"),
        ("olmo2", "norms after sublayers"),
        ("nemotron_h", "layer 0 is 'mamba' and 'none'"),
    ],
)
def test_a_model_that_hybrid_model_does_not_compute_is_refused(
    name: str, what: str, tmp_path: Path
) -> None:
    hf = write_model(tmp_path / "hf", name)
    for ckpt_format in ("torch", "torch_dist"):
        with pytest.raises(NotExpressible, match=f"model=hybrid: .*{what}.*leave the option out"):
            megaconv.convert(hf, tmp_path / "never", ckpt_format=ckpt_format, **HYBRID)


def test_an_unknown_class_and_one_for_megatron_bridge_are_refused(tmp_path: Path) -> None:
    hf = write_model(tmp_path / "hf", "llama")
    with pytest.raises(UsageError, match="model=t5: is not known; choose gpt or hybrid"):
        megaconv.convert(hf, tmp_path / "never", saver="core", options={"model": "t5"})
    both = {"model": "hybrid", "for": "megatron-bridge"}
    with pytest.raises(UsageError, match="builds these models as GPTModel"):
        megaconv.convert(
            hf, tmp_path / "never", saver="core", ckpt_format="torch_dist", options=both
        )


def test_a_release_is_refused_beside_the_one_class_that_it_does_not_name(tmp_path: Path) -> None:
    hf = write_model(tmp_path / "hf", "llama")
    both = {"model": "hybrid", "release": "0.16"}
    with pytest.raises(UsageError, match=r"release: has no effect with model=hybrid"):
        megaconv.convert(hf, tmp_path / "never", saver="core", options=both)
    assert not (tmp_path / "never").exists()
