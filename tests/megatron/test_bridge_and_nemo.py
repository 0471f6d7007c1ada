"""Directories as Megatron-Bridge and NeMo 2 save them (made by hand: tests/neighbours.py) are read as Megatron core's own."""

import logging
import shutil
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings

import megaconv
from megaconv.checkpoint import open_checkpoint
from megaconv.errors import CheckpointError, CorruptCheckpoint, UnknownFamily
from megaconv.megatron.arguments.provider import provider_arguments
from megaconv.megatron.arguments.read import from_arguments
from megaconv.model.config import ModelConfig
from megaconv.options import LoadOptions
from tests.config_models import LLAMA, configs, found_in_tensors
from tests.conftest import FIXTURES
from tests.megatron.test_megatron_args import arguments
from tests.neighbours import ITERATION, own_args, prefix_keys, provider, write_bridge, write_nemo
from tests.put_together import assert_holds, assert_holds_optimizer
from tests.runs import assert_refused, run

DENSE, EXPERTS = "dist-llama-tp2pp2", "dist-mixtral-tp2ep2"
SHARDED, BUCKETS = (
    "dist-v0.15-llama-optim-dp2-fully_sharded_model_space",
    "dist-llama-optim-dp2buckets-dp_reshardable",
)
Write = Callable[..., Path]
WRITERS = pytest.mark.parametrize(
    "write", [write_bridge, write_nemo], ids=["Megatron-Bridge", "NeMo 2"]
)


@WRITERS
@pytest.mark.parametrize("fixture", [DENSE, EXPERTS])
def test_every_weight_and_the_model_are_those_of_megatron(
    write: Write, fixture: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "megaconv"):
        checkpoint = open_checkpoint(write(tmp_path / "in", fixture))
    assert_holds(checkpoint, FIXTURES / fixture / "expected.safetensors")
    original = open_checkpoint(FIXTURES / fixture)
    assert checkpoint.config == original.config
    assert checkpoint.header.layout == original.header.layout
    assert checkpoint.header.training.iteration == 10
    assert "no known release" not in caplog.text


@pytest.mark.parametrize("fixture", [SHARDED, BUCKETS])
def test_the_optimizer_of_megatron_bridge_is_read_bit_for_bit(fixture: str, tmp_path: Path) -> None:
    sections = {
        "optimizer": {"lr": 0.25, "timers": {"_target_": "a.B"}},
        "ddp": {"overlap_grad_reduce": True},
    }
    checkpoint = megaconv.open(write_bridge(tmp_path / "in", fixture, sections))
    assert_holds_optimizer(checkpoint, FIXTURES / fixture / "expected.safetensors")
    training = checkpoint.header.training
    assert (training.consumed_train_samples, training.arguments) == (80, {"lr": 0.25})


def test_the_optimizer_of_nemo_is_left_out_with_a_notice(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint = megaconv.open(write_nemo(tmp_path / "in", SHARDED))
    assert not checkpoint.slots
    assert "optimizer of a NeMo checkpoint is not read" in caplog.text


@WRITERS
def test_the_commands_find_out_what_it_is(write: Write, tmp_path: Path) -> None:
    path, out = write(tmp_path / "in", DENSE), tmp_path / "out"
    writer = "Megatron-Bridge" if write is write_bridge else "NeMo 2"
    inspected = run("inspect", path)
    assert f"core, torch_dist format of {writer}" in inspected.out
    flags = run("inspect", path, "--megatron-args")
    # Megatron-LM can't load keys that begin with `module.`.
    assert ("--load" in flags.out.split()) == (write is write_bridge)
    converted = run("convert", "--load-dir", path, "--saver", "hf", "--save-dir", out)
    assert converted.status == 0, converted.err
    assert megaconv.fingerprint(out).weights == megaconv.fingerprint(FIXTURES / DENSE).weights


def test_the_directory_of_one_iteration_is_read_as_well(tmp_path: Path) -> None:
    path = write_bridge(tmp_path / "in", DENSE)
    assert open_checkpoint(path / ITERATION).config == open_checkpoint(path).config
    assert "NeMo" not in run("inspect", path / ITERATION).out


def test_megatron_bridges_own_tracker_says_which_iteration_is_the_last(tmp_path: Path) -> None:
    path = write_bridge(tmp_path / "in", DENSE)
    shutil.copytree(path / ITERATION, path / "iter_0000020")
    (path / "latest_checkpointed_iteration.txt").unlink()
    assert open_checkpoint(path).header.training.iteration == 10
    shutil.rmtree(path / ITERATION)
    shutil.copytree(path / "iter_0000020", path / "iter_0000030")
    assert_refused(run("fingerprint", path), 3, "latest_train_state.pt: names iter_0000010")


@WRITERS
def test_a_tokenizer_in_the_checkpoint_goes_along(write: Write, tmp_path: Path) -> None:
    path = write(tmp_path / "in", DENSE)
    place = (
        path / ITERATION / "tokenizer"
        if write is write_bridge
        else path / "context" / "nemo_tokenizer"
    )
    place.mkdir()
    (place / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0}}}')
    assert set(open_checkpoint(path).header.files) == {"tokenizer.json"}


# Without settings.


@WRITERS
def test_without_its_settings_a_config_json_is_asked_for_and_enough(
    write: Write, tmp_path: Path
) -> None:
    path = write(tmp_path / "in", DENSE)
    run("convert", "--load-dir", FIXTURES / DENSE, "--saver", "hf", "--save-dir", tmp_path / "hf")
    next(path.rglob("*.yaml")).unlink()
    assert_refused(run("inspect", path), 3, "has no args", "run_config.yaml", "--config")
    checkpoint = open_checkpoint(path, LoadOptions(config=tmp_path / "hf"))
    assert_holds(checkpoint, FIXTURES / DENSE / "expected.safetensors")


def test_the_distributed_weights_of_an_unpacked_nemo_1_archive_are_read_with_a_config_json(
    tmp_path: Path,
) -> None:
    """The error message gives this next step. Keys begin with `model.`, and nothing else is read."""
    path = write_nemo(tmp_path / "in", DENSE, prefix="model.") / "weights"
    path.rename(tmp_path / "in" / "model_weights")
    shutil.rmtree(tmp_path / "in" / "context")
    (tmp_path / "in" / "model_config.yaml").write_text("encoder_seq_length: 64")
    assert_refused(run("fingerprint", tmp_path / "in"), 3, "give its model_weights/, and --config")
    run("convert", "--load-dir", FIXTURES / DENSE, "--saver", "hf", "--save-dir", tmp_path / "hf")
    checkpoint = open_checkpoint(
        tmp_path / "in" / "model_weights", LoadOptions(config=tmp_path / "hf")
    )
    assert_holds(checkpoint, FIXTURES / DENSE / "expected.safetensors")


def test_the_settings_beside_the_weights_of_an_unpacked_nemo_1_archive_are_compared(
    tmp_path: Path,
) -> None:
    """With other heads, the rows of a fused query, key and value would be other heads' rows."""
    path = write_nemo(tmp_path / "in", DENSE, prefix="model.") / "weights"
    path.rename(tmp_path / "in" / "model_weights")
    shutil.rmtree(tmp_path / "in" / "context")
    (tmp_path / "in" / "model_config.yaml").write_text("num_attention_heads: 2")
    run("convert", FIXTURES / DENSE, tmp_path / "hf", "--saver", "hf")
    weights = tmp_path / "in" / "model_weights"
    outcome = run("fingerprint", weights, "--config", tmp_path / "hf")
    assert_refused(outcome, 3, "model_config.yaml: says num_attention_heads = 2")


def test_missing_fields_of_a_provider_are_asked_for(tmp_path: Path) -> None:
    fields = provider(own_args(DENSE))
    for name in ("rotary_base", "num_query_groups", "normalization", "activation_func"):
        rest = {key: value for key, value in fields.items() if key != name}
        with pytest.raises(CorruptCheckpoint, match=rf"x.yaml: has no {name}, .*--config"):
            provider_arguments(rest, "x.yaml", complete=True)
        provider_arguments(rest, "x.yaml", complete=False)
    with pytest.raises(CorruptCheckpoint, match="has no moe_router_topk"):
        provider_arguments(
            {key: value for key, value in fields.items() if key != "moe_router_topk"}
            | {"num_moe_experts": 4},
            "x.yaml",
            complete=True,
        )


# What is refused.


@WRITERS
@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"mrope_section": [16, 24, 24]}, ["mrope_section is [16, 24, 24]", "time, height and width"]),
        ({"softmax_type": "off-by-one"}, ["softmax_type is 'off-by-one'"]),
        ({"position_embedding_type": "mrope"}, ["position_embedding_type is 'mrope'"]),
        ({"activation_func": {"_target_": "torch.nn.functional.relu"}}, ["activation_func is 'torch.nn.functional.relu'"]),
        ({"activation_func": {"_target_": "mine.silu"}}, ["activation_func is 'mine.silu'"]),
        ({"transformer_layer_spec": {"_target_": "mine.spec"}}, ["spec is ['mine.spec']", "modules of the user's own"]),
        ({"scale_factor": 8.0, "low_freq_factor": 2.0}, ["low_freq_factor is 2.0", "1.0 alone"]),
        ({"num_layers": 5}, ["hold 4 layers", "say 5"]),
        ({"num_attention_heads": "many"}, ["heads should be a positive number", "'many'"]),
    ],
)  # fmt: skip
def test_a_setting_that_would_be_lost_is_refused_as_megatrons_argument_is(
    write: Write, changed: dict[str, Any], words: list[str], tmp_path: Path
) -> None:
    path = write(tmp_path / "in", DENSE, **changed)
    with pytest.raises(CheckpointError) as refused:
        open_checkpoint(path)
    assert refused.value.exit_status == 3
    for word in words:
        assert word in str(refused.value)


def test_an_unknown_setting_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    open_checkpoint(write_bridge(tmp_path / "in", DENSE, our_attention=3))
    assert "our_attention" in caplog.text


@pytest.mark.parametrize(
    "text",
    [
        "model: !!python/object/apply:os.system [touch done]",
        "model: {num_layers: !!python/object/apply:os.system [touch done]}",
        "[1, 2]",
        "model: {1: 2}",
        "model: &a {b: *a}",
        "model: " + "[" * 1000,
    ],
)
def test_settings_that_are_hostile_do_nothing_and_are_refused(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_bridge(tmp_path / "in", DENSE)
    (path / ITERATION / "run_config.yaml").write_text(text)
    monkeypatch.chdir(tmp_path)
    assert_refused(run("inspect", path), 3, "run_config.yaml")
    assert not (tmp_path / "done").exists()


def test_settings_with_names_of_python_are_settings_as_any_other(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    names = ("self", "__class__", "__dict__", "__getattribute__", "not a word")
    path = write_bridge(tmp_path / "in", DENSE, **dict.fromkeys(names, 3))
    assert open_checkpoint(path).config == open_checkpoint(FIXTURES / DENSE).config
    assert all(name in caplog.text for name in names)


def test_a_tag_where_a_number_should_be_is_refused(tmp_path: Path) -> None:
    path = write_bridge(tmp_path / "in", DENSE)
    file = path / ITERATION / "run_config.yaml"
    file.write_text(file.read_text().replace("num_layers: 4", "num_layers: !mine 4"))
    assert run("inspect", path).status == 3


def test_a_train_state_that_can_not_be_is_refused(tmp_path: Path) -> None:
    import torch

    path = write_bridge(tmp_path / "in", DENSE)
    torch.save({"step": torch.tensor(float("nan"))}, path / ITERATION / "train_state.pt")
    assert_refused(run("inspect", path), 3, "train_state.pt: its step")


def test_an_adapter_of_megatron_bridge_is_not_taken_for_a_model(tmp_path: Path) -> None:
    path = write_bridge(tmp_path / "in", DENSE, {"peft": {"dim": 8}})
    prefix_keys(
        path / ITERATION / ".metadata", "decoder.layers.0.self_attention.linear_qkv.adapter."
    )
    assert_refused(
        run("fingerprint", path), 2, "is an adapter of Megatron-Bridge", "--config", "--saver peft"
    )


# Settings one by one.


def config(**changed: Any) -> Any:
    fields = provider(own_args(DENSE), num_layers=LLAMA.layer_count, **changed)
    found = found_in_tensors(LLAMA) | {"mlp.gated": fields["gated_linear_unit"]}
    return from_arguments(provider_arguments(fields, "x.yaml", complete=True), found)


def function(name: str, **more: Any) -> dict[str, Any]:
    return {"_target_": name, **(more or {"_call_": False})}


@pytest.mark.parametrize(
    ("func", "gated", "fused", "expected"),
    [
        (function("torch.nn.functional.silu"), True, True, "silu"),
        (function("torch._C._nn.gelu"), True, False, "gelu"),
        (function("torch._C._nn.gelu"), True, True, "gelu_tanh"),
        (
            function("torch._C._nn.gelu", _partial_=True, _args_=[], approximate="tanh"),
            True,
            False,
            "gelu_tanh",
        ),
        (function("megatron.core.activations.fast_gelu"), True, False, "gelu_tanh"),
        (function("nemo.collections.llm.fn.activation.openai_gelu"), True, False, "gelu_tanh"),
        (function("megatron.core.activations.quick_gelu"), True, True, "quick_gelu"),
        (function("megatron.core.activations.squared_relu"), False, False, "relu2"),
    ],
)
def test_a_function_becomes_the_flags_that_stand_for_it(
    func: dict[str, Any], gated: bool, fused: bool, expected: str
) -> None:
    fields = provider(
        own_args(DENSE), activation_func=func, gated_linear_unit=gated, bias_activation_fusion=fused
    )
    args = provider_arguments(fields, "x.yaml", complete=True)
    flags = {
        "swiglu": "silu",
        "squared_relu": "relu2",
        "quick_geglu": "quick_gelu",
        "bias_gelu_fusion": "gelu_tanh",
    }
    on = [meaning for flag, meaning in flags.items() if getattr(args, flag)]
    assert (on or ["gelu"]) == [expected]
    assert not hasattr(args, "activation_func")


def test_a_function_given_other_arguments_is_refused() -> None:
    with pytest.raises(UnknownFamily, match=r"activation_func is 'torch\._C\._nn\.gelu'"):
        config(activation_func=function("torch._C._nn.gelu", _partial_=True, approximate="other"))


def test_settings_of_positions_and_heads_are_read() -> None:
    assert config(scale_factor=32.0).positions.scaling["factor"] == 32.0
    assert config(scale_factor=32.0).positions.scaling["rope_type"] == "llama3"
    assert config(rope_scaling=True, rope_scaling_factor=4.0).positions.scaling["factor"] == 4.0
    assert config(seq_len_interpolation_factor=2.0).positions.scaling == {
        "rope_type": "linear",
        "factor": 2.0,
    }
    assert config(seq_length=77).max_positions == 77
    assert config(window_size=[15, 0]).window == 16
    assert config(num_query_groups=None).attention.kv_heads == own_args(DENSE).num_attention_heads


def test_settings_of_pipeline_stages_have_megatron_lms_names() -> None:
    fields = provider(own_args(DENSE), num_layers_in_first_pipeline_stage=1)
    args = provider_arguments(fields, "x.yaml", complete=True)
    assert isinstance(args, Namespace)
    assert args.decoder_first_pipeline_num_layers == 1


def test_settings_of_layers_may_stand_below_a_name_of_their_own() -> None:
    fields = provider(own_args(DENSE))
    outer = {
        "vocab_size",
        "seq_length",
        "position_embedding_type",
        "rotary_base",
        "rotary_percent",
        "_target_",
    }
    nested = {name: value for name, value in fields.items() if name in outer}
    nested["transformer"] = {name: value for name, value in fields.items() if name not in outer}
    assert provider_arguments(nested, "x", complete=True) == provider_arguments(
        fields, "x", complete=True
    )


@given(configs())
@settings(max_examples=150, deadline=None)
def test_every_model_that_arguments_describe_is_the_same_as_a_providers_settings(
    config: ModelConfig,
) -> None:
    args, found = arguments(config), found_in_tensors(config)
    expected = from_arguments(Namespace(**args), found)
    assert (
        from_arguments(provider_arguments(as_provider(args), "x", complete=True), found) == expected
    )


def as_provider(args: dict[str, Any]) -> dict[str, Any]:
    """The settings that say what Megatron-LM's arguments say."""
    functions = {
        "swiglu": "torch.nn.functional.silu",
        "squared_relu": "megatron.core.activations.squared_relu",
        "quick_geglu": "megatron.core.activations.quick_gelu",
        "bias_gelu_fusion": "megatron.core.activations.fast_gelu",
    }
    func = next((name for flag, name in functions.items() if args[flag]), "torch._C._nn.gelu")
    renamed = {
        "group_query_attention", "untie_embeddings_and_output_weights", "max_position_embeddings", "norm_epsilon",
        "use_rope_scaling", "rotary_seq_len_interpolation_factor", "apply_layernorm_1p", "openai_gelu", *functions,
    }  # fmt: skip
    return {name: value for name, value in args.items() if name not in renamed} | {
        "activation_func": function(func),
        "seq_length": args["max_position_embeddings"],
        "share_embeddings_and_output_weights": not args["untie_embeddings_and_output_weights"],
        "num_query_groups": args["num_query_groups"] if args["group_query_attention"] else None,
        "seq_len_interpolation_factor": args["rotary_seq_len_interpolation_factor"],
        "rope_scaling": args["use_rope_scaling"],
    }


def test_our_test_files_are_plain_yaml(tmp_path: Path) -> None:
    """Megatron-Bridge and NeMo both write such YAML: with a safe dumper, and classes as `_target_`."""
    for write in (write_bridge, write_nemo):
        file = next(write(tmp_path / write.__name__, DENSE).rglob("*.yaml"))
        assert "!!" not in file.read_text()
        assert yaml.safe_load(file.read_text())
