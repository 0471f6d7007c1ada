"""Hybrids of Mamba 2, attention, MLPs and experts: what Megatron wrote of one, their keys, layouts, arguments and patterns."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import megaconv
from formats import torch_dist
from megaconv.errors import LayoutError, NotExpressible, TensorMismatch, UnknownFamily, UsageError
from megaconv.families import families
from tests.conftest import FIXTURES
from tests.families.test_families import assert_same, weights_of, write_model
from tests.megatron_oracle import Megatron, for_this_release, read_rank_file, version_directory
from tests.optimizer_models import write_trained_mamba
from tests.runs import assert_refused, run
from tests.transformers_oracle import compute, load

REAL = FIXTURES / "hybrid-nemotron-h-tp2"
"""Megatron core 0.16.1's torch_dist of a Nemotron-H `ME*` on two tensor ranks, of its local layers; transformers' own in hf/.
Its args have sizes alone."""


# What Megatron wrote.


def test_a_real_distributed_checkpoint_is_read_bit_for_bit() -> None:
    found = megaconv.fingerprint(REAL, config=REAL / "hf")
    assert found.tensors == megaconv.fingerprint(REAL / "hf").tensors


def test_keys_chunks_and_extra_states_are_those_that_megatron_writes(tmp_path: Path) -> None:
    options = {
        "ckpt_format": "torch_dist",
        "transformer_impl": "local",
        "tp": 2,
        "make_vocab_size_divisible_by": 1,
    }
    megaconv.convert(REAL / "hf", tmp_path / "dist", saver="core", **options)
    ours, theirs = (
        torch_dist.open_directory(version_directory(path)) for path in (tmp_path / "dist", REAL)
    )
    found, expected = (
        {
            key: (
                tensor.shape,
                tensor.dtype,
                sorted((chunk.offset, chunk.shape) for chunk in tensor.chunks),
            )
            for key, tensor in directory.tensors().items()
        }
        for directory in (ours, theirs)
    )
    assert found == expected
    assert sorted(ours.objects()) == sorted(theirs.objects())


@pytest.mark.oracle
def test_transformers_and_megatron_compute_from_ours_what_megatron_computed(
    megatron: Megatron, tmp_path: Path
) -> None:
    stored = load_file(REAL / "logits.safetensors")
    tokens, expected = stored["input_ids"], stored["logits"]
    megaconv.convert(REAL, tmp_path / "hf", saver="hf", config=REAL / "hf")
    assert (compute(load(tmp_path / "hf"), tokens) - expected).abs().max().item() < 1e-4
    layout: dict[str, Any] = {"pp": 2, "layer_split": (1, 2), "tp": 2}
    megaconv.convert(
        REAL,
        tmp_path / "core",
        saver="core",
        config=REAL / "hf",
        transformer_impl="local",
        make_vocab_size_divisible_by=2,
        options=for_this_release(),
        **layout,
    )
    logits = megatron.logits(tmp_path / "core", tokens)[..., : expected.shape[-1]]
    assert (logits - expected).abs().max().item() < 1e-4


@pytest.mark.parametrize("pattern", ["MMM", "M*-"])
def test_a_tied_head_is_in_the_files_whose_class_does_not_tie_it(
    tmp_path: Path, pattern: str
) -> None:
    """transformers takes the head of a Nemotron-H from the file alone, and without one begins it at random.

    A model of Mamba layers alone becomes a Mamba 2, whose class ties its head.
    """
    from transformers import AutoModelForCausalLM

    tied = write_model(
        tmp_path / "tied", "nemotron_h", hybrid_override_pattern=pattern, tie_word_embeddings=True
    )
    megaconv.convert(tied, tmp_path / "core", saver="core", tp=2)
    shutil.rmtree(tmp_path / "core" / "hf")  # nothing says which class that is
    megaconv.convert(tmp_path / "core", tmp_path / "out", saver="hf")
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"]
    assert model.config.tie_word_embeddings
    embedding = weights_of(tmp_path / "out")["backbone.embeddings.weight"]
    assert model.lm_head.weight.equal(embedding)
    assert model.get_input_embeddings().weight.equal(embedding)


def test_files_without_a_tied_head_are_read_and_others_have_to_hold_the_embedding(
    tmp_path: Path,
) -> None:
    tied = write_model(
        tmp_path / "tied", "nemotron_h", hybrid_override_pattern="MMM", tie_word_embeddings=True
    )
    weights = weights_of(tied)
    head = weights.pop("lm_head.weight", None)
    save_file(weights, tied / "model.safetensors", metadata={"format": "pt"})
    expected = megaconv.fingerprint(tied)
    megaconv.convert(tied, tmp_path / "out", saver="hf")
    assert weights_of(tmp_path / "out").keys() == weights.keys() | {"lm_head.weight"}
    assert megaconv.fingerprint(tmp_path / "out") == expected
    assert head is None or head.equal(weights["backbone.embeddings.weight"])
    other = {**weights, "lm_head.weight": weights["backbone.embeddings.weight"] + 1}
    save_file(other, tied / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(TensorMismatch, match=r"lm_head\.weight"):
        megaconv.convert(tied, tmp_path / "never", saver="hf")
    assert not (tmp_path / "never").exists()


def test_every_class_of_transformers_ties_its_head_or_finds_it_in_the_files() -> None:
    import transformers

    compared = 0
    for name, family in families().items():
        copied = [each for row in family.rows for each in row.copied_with("head")]
        for architecture in family.architectures:
            found = getattr(transformers, architecture, None)
            if found is not None and copied and architecture.endswith("ForCausalLM"):
                assert bool(found._tied_weights_keys) != any(
                    "hf" in each.untied for each in copied
                ), name
                compared += 1
    assert compared > 50


# Ranks and stages.


@pytest.fixture
def hf(tmp_path: Path) -> Path:
    return write_model(tmp_path / "hf", "nemotron_h")


DENSE: dict[str, Any] = {"hybrid_override_pattern": "M-M*-", "num_hidden_layers": 5}


def rank_model(checkpoint: Path, rank: str) -> dict[str, torch.Tensor]:
    (file,) = checkpoint.glob(f"*/{rank}/model_optim_rng.pt")
    model: dict[str, torch.Tensor] = read_rank_file(file)["model"]
    return model


def test_a_rank_has_its_heads_and_groups_of_each_part(hf: Path, tmp_path: Path) -> None:
    megaconv.convert(hf, tmp_path / "core", saver="core", tp=2)
    weights = weights_of(hf)
    inner, state = 12, 10
    projections = weights["backbone.layers.0.mixer.in_proj.weight"].split(
        [inner, inner, state, state, 4]
    )
    convolution = weights["backbone.layers.0.mixer.conv1d.weight"].split([inner, state, state])
    for rank in range(2):
        model = rank_model(tmp_path / "core", f"mp_rank_{rank:02d}")
        mixer = "decoder.layers.0.mixer."
        assert model[mixer + "in_proj.weight"].equal(
            torch.cat([part.chunk(2)[rank] for part in projections])
        )
        assert model[mixer + "conv1d.weight"].equal(
            torch.cat([part.chunk(2)[rank] for part in convolution])
        )
        for name, axis in (
            ("A_log", 0),
            ("D", 0),
            ("dt_bias", 0),
            ("norm.weight", 0),
            ("out_proj.weight", 1),
        ):
            whole = weights["backbone.layers.0.mixer." + name]
            assert model[mixer + name].equal(whole.chunk(2, axis)[rank]), name


@pytest.mark.parametrize(
    "split", [(1, 4), (4, 1), (2, 2, 1), (1, 2, 2), (0, 3, 2), (1, 1, 1, 1, 1)], ids=str
)
def test_stages_end_between_any_two_mixers(split: tuple[int, ...], tmp_path: Path) -> None:
    hf = write_model(tmp_path / "hf", "nemotron_h", **DENSE)
    for ckpt_format in ("torch", "torch_dist"):
        target = tmp_path / ckpt_format
        options: dict[str, Any] = {
            "ckpt_format": ckpt_format,
            "pp": len(split),
            "layer_split": split,
        }
        megaconv.convert(hf, target, saver="core", **options)
        # Without `hf/`, only the arguments describe the layers of the distributed files.
        shutil.rmtree(target / "hf")
        opened = megaconv.open(target).header.layout
        assert opened is not None
        assert opened.stage_layers == split
        megaconv.convert(target, tmp_path / f"{ckpt_format}-back", saver="hf")
        assert_same(tmp_path / f"{ckpt_format}-back", hf)


def test_rank_files_have_the_names_of_the_release_that_loads_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """From 0.19 on, the convolution's parameters are the mixer's own, and come before its other ones."""
    hf = write_model(tmp_path / "hf", "nemotron_h", **DENSE)
    megaconv.convert(hf, tmp_path / "older", saver="core")
    assert "--option release=0.19" in caplog.text
    caplog.clear()
    megaconv.convert(
        hf, tmp_path / "newer", saver="core", pp=2, layer_split=(3, 2), options={"release": "0.19"}
    )
    assert "--option release" not in caplog.text
    mixer = "decoder.layers.0.mixer."
    found = [name for name in rank_model(tmp_path / "newer", "mp_rank_00_000") if mixer in name]
    own = ["conv1d_weight", "conv1d_bias", "dt_bias", "A_log", "D"]
    fused = [f"in_proj.{name}" for name in ("layer_norm_weight", "weight", "_extra_state")]
    assert [name.removeprefix(mixer) for name in found][:8] == [*own, *fused]
    assert megaconv.diff(tmp_path / "newer", tmp_path / "older").same
    # Another layout keeps the names of its source.
    megaconv.convert(tmp_path / "newer", tmp_path / "again", saver="core", tp=2, pp=1)
    assert mixer + "conv1d_bias" in rank_model(tmp_path / "again", "mp_rank_01")
    megaconv.convert(tmp_path / "again", tmp_path / "back", saver="hf")
    assert_same(tmp_path / "back", hf)


def test_an_unknown_release_and_one_for_distributed_files_are_refused(
    hf: Path, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=r"release=0\.15: is not known; choose one of 0\.16"):
        megaconv.convert(hf, tmp_path / "never", saver="core", options={"release": "0.15"})
    with pytest.raises(UsageError, match="has no effect"):
        megaconv.convert(
            hf,
            tmp_path / "never",
            saver="core",
            ckpt_format="torch_dist",
            options={"release": "0.19"},
        )


def arguments(hf: Path, target: Path, **options: Any) -> dict[str, Any]:
    megaconv.convert(hf, target, saver="core", **options)
    return dict(vars(read_rank_file(next(target.glob("*/*/model_optim_rng.pt")))["args"]))


def test_stages_are_written_as_the_releases_of_megatron_read_them(tmp_path: Path) -> None:
    """Even ones and other first and last ones as ever; any other as core 0.17 and newer have it, in the pattern."""
    hf = write_model(tmp_path / "hf", "nemotron_h", **DENSE)
    first = arguments(hf, tmp_path / "first", pp=3, layer_split=(1, 2, 2))
    assert (first["hybrid_override_pattern"], first["decoder_first_pipeline_num_layers"]) == (
        "M-M*-",
        1,
    )
    assert "hybrid_layer_pattern" not in first
    others = arguments(hf, tmp_path / "others", pp=2, vpp=2, layer_split=(1, 2, 0, 2))
    assert (others["hybrid_override_pattern"], others["hybrid_layer_pattern"]) == (
        "M-M*-",
        "M|-M||*-",
    )
    assert others["pipeline_model_parallel_layout"] is None


@pytest.mark.parametrize(
    ("keys", "sizes", "message"),
    [
        ({"mamba_num_heads": 6, "n_groups": 2}, {"tp": 4}, "mamba_heads = 6"),
        ({"mamba_num_heads": 4, "n_groups": 1}, {"tp": 2}, "mamba_groups = 1"),
        ({"num_attention_heads": 3, "num_key_value_heads": 3}, {"tp": 2}, "heads = 3"),
        ({"moe_shared_expert_intermediate_size": 3}, {"tp": 2}, "shared_ffn = 3"),
        ({}, {"ep": 3}, "experts = 4"),
        ({}, {"pp": 2}, "layers = 3"),
    ],
)
def test_sizes_of_mamba_that_ranks_cannot_share_are_refused_by_name(
    keys: dict[str, Any], sizes: dict[str, int], message: str, tmp_path: Path
) -> None:
    hf = write_model(tmp_path / "hf", "nemotron_h", **keys)
    with pytest.raises(LayoutError, match=message):
        megaconv.convert(hf, tmp_path / "core", saver="core", **sizes)
    assert not (tmp_path / "core").exists()


def test_legacy_models_have_no_mamba(hf: Path, tmp_path: Path) -> None:
    with pytest.raises(NotExpressible):
        megaconv.convert(hf, tmp_path / "legacy", saver="legacy")


def test_experts_among_layers_of_transformer_engine_are_grouped(hf: Path, tmp_path: Path) -> None:
    """Megatron core's stack of such layers is made of no others."""
    args = arguments(hf, tmp_path / "core")
    assert args["moe_grouped_gemm"]
    assert "decoder.layers.1.mlp.experts.linear_fc1.weight3" in rank_model(
        tmp_path / "core", "mp_rank_00"
    )
    assert not arguments(hf, tmp_path / "local", transformer_impl="local")["moe_grouped_gemm"]


# Optimizer state.


@pytest.mark.parametrize(
    "options",
    [
        {"tp": 2, "pp": 3},
        {"ckpt_format": "torch_dist", "tp": 2},
        {"tp": 2, "use_distributed_optimizer": True},
    ],
    ids=str,
)
def test_optimizer_state_goes_along_of_parameters_in_fp32_too(
    options: dict[str, Any], tmp_path: Path
) -> None:
    """Megatron core makes A_log and D in fp32; its Float16Module leaves nothing in it, those of others may."""
    source = write_trained_mamba(tmp_path, fp32=("A_log", ".D"))
    before = megaconv.fingerprint(source)
    megaconv.convert(source, tmp_path / "out", saver="core", verify=True, **options)
    megaconv.convert(
        tmp_path / "out", tmp_path / "back", saver="core", transformer_impl="local", tp=1, pp=1
    )
    for path in (tmp_path / "out", tmp_path / "back"):
        after = megaconv.fingerprint(path)
        assert (after.weights, after.optimizer) == (before.weights, before.optimizer)


# Arguments and configurations.


def test_the_arguments_alone_describe_a_hybrid(hf: Path, tmp_path: Path) -> None:
    megaconv.convert(hf, tmp_path / "core", saver="core", tp=2, pp=3)
    shutil.rmtree(tmp_path / "core" / "hf")
    megaconv.convert(tmp_path / "core", tmp_path / "back", saver="hf")
    assert_same(tmp_path / "back", hf)
    before, after = (
        json.loads((path / "config.json").read_text()) for path in (hf, tmp_path / "back")
    )
    assert {key: after[key] for key in before if key in after} == before | {"intermediate_size": 8}


def test_a_missing_number_of_mamba_groups_is_asked_for(hf: Path, tmp_path: Path) -> None:
    core = tmp_path / "core"
    megaconv.convert(hf, core, saver="core")
    shutil.rmtree(core / "hf")
    (file,) = core.glob("*/*/model_optim_rng.pt")
    state = read_rank_file(file)
    del state["args"].mamba_num_groups
    torch.save(state, file)
    (core / "megaconv.json").unlink()
    assert_refused(run("inspect", core), 3, "mamba_num_groups", "--config")


@pytest.mark.parametrize(
    "words",
    [
        {"layers_block_type": ["mamba", "moe", "attention"], "hybrid_override_pattern": None},
        {
            "layers_block_type": ["linear_attention", "moe", "full_attention"],
            "hybrid_override_pattern": "MMM",
        },
        {"head_dim": None, "attention_head_dim": 3},
        {"time_step_limit": [0.0, float("inf")]},
        {"time_step_limit": [0.0, {"__float__": "Infinity"}], "num_nextn_predict_layers": 1},
    ],
    ids=str,
)
def test_older_and_newer_words_of_config_json_mean_the_same(
    words: dict[str, Any], hf: Path, tmp_path: Path
) -> None:
    raw = json.loads((hf / "config.json").read_text())
    changed = {key: value for key, value in (raw | words).items() if value is not None}
    other = tmp_path / "other"
    shutil.copytree(hf, other)
    (other / "config.json").write_text(json.dumps(changed))
    ours, theirs = (megaconv.open(path).config for path in (hf, other))
    assert ours == theirs


@pytest.mark.parametrize(
    ("key", "value", "error"),
    [
        ("hybrid_override_pattern", "MG*", NotExpressible),
        ("layers_block_type", ["mamba", "moe", "conv"], NotExpressible),
        ("layer_norm_epsilon", 1e-6, UnknownFamily),
        ("time_step_limit", [0.01, 0.1], NotExpressible),
        ("conv_kernel", 3, UnknownFamily),
        ("mamba_proj_bias", True, UnknownFamily),
    ],
)
def test_keys_that_megatron_cannot_represent_are_refused_by_name(
    key: str, value: Any, error: type[Exception], hf: Path, tmp_path: Path
) -> None:
    raw = json.loads((hf / "config.json").read_text())
    (hf / "config.json").write_text(json.dumps(raw | {key: value}))
    with pytest.raises(error, match=key):
        megaconv.convert(hf, tmp_path / "core", saver="core")


def test_inspect_shows_the_pattern_and_what_it_consists_of(tmp_path: Path) -> None:
    hf = write_model(tmp_path / "hf", "nemotron_h", **DENSE)
    outcome = run("inspect", hf)
    assert "M-M*- (2 Mamba 2, 1 attention, 2 MLP)" in outcome.out
    assert "4 heads of 3 in 2 groups, state 5" in outcome.out


def test_a_notice_names_time_steps_that_only_transformers_limits(hf: Path, tmp_path: Path) -> None:
    report = megaconv.convert(hf, tmp_path / "core", saver="core")
    assert any("time_step_min" in notice for notice in report.notices)
