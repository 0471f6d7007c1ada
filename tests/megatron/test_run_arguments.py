"""Megatron's arguments survive every kind of conversion: the next run finds those of the earlier run."""

from pathlib import Path
from typing import Any

import pytest
import torch

import megaconv
from formats import rank_files, torch_zip
from formats.pickle_records import Opaque, TorchDtype
from megaconv.megatron.arguments.harmless import HARMLESS
from megaconv.megatron.arguments.known import READ, REFUSED
from megaconv.megatron.arguments.run_arguments import LAYOUT, OF_OUTPUT
from tests.conftest import FIXTURES
from tests.models import write_llama
from tests.optimizer_models import load, write_trained_llama
from tests.runs import run

Arguments = dict[str, Any]

REAL = {
    "torch": FIXTURES / "core-llama-optim-tp2pp2" / "checkpoint",
    "torch_dist": FIXTURES / "dist-llama-tp2pp2",
    "zarr": FIXTURES / "zarr-llama-optim-tp2pp2" / "checkpoint",
}
"""Checkpoints of Megatron core 0.16, 0.16 and 0.7."""

GIVEN: Arguments = {
    "seq_length": 16, "encoder_seq_length": 16, "data_path": ["0.3", "a_text_document", "0.7", "b_text_document"], "split": "969,30,1",
    "attention_dropout": 0.1, "hidden_dropout": 0.1, "lr_decay_samples": None, "tokenizer_type": "NullTokenizer", "vocab_size": 99,
    "global_batch_size": 16, "apply_query_key_layer_scaling": True, "sequence_parallel": True, "skipped_train_samples": 4,
    "log_interval": 7, "main_grads_dtype": torch.float32, "eval_iters": 11, "recompute_modules": ["core_attn"],
    "kv_lora_rank": 32,
    "train_iters": 40, "no_save_optim": None, "no_save_rng": None, "overlap_param_gather": True, "of_a_fork_of_megatron": {"name": "value"},
}  # fmt: skip
"""Arguments of a run that has each of them otherwise than a checkpoint from nowhere would."""


def state_of(checkpoint: Path) -> tuple[Arguments, dict[str, Any]]:
    """(args, all that lies beside them)."""
    version = rank_files.find_version(checkpoint)
    assert version is not None
    common = version / "common.pt"
    file = common if common.is_file() else next(iter(rank_files.read(version).files.values()))
    state: Any = torch_zip.read(file)
    return dict(vars(state.pop("args"))), state


def changes(before: Arguments, after: Arguments) -> dict[str, tuple[object, object]]:
    """Every argument that is another one, or gone. A tuple and a list of the same are the same."""
    found = {}
    for name, value in before.items():
        if name not in after:
            found[name] = (value, "gone")
        elif repr(after[name]) != repr(value):
            found[name] = (value, after[name])
    return found


def of_other_classes(arguments: Arguments) -> set[str]:
    """The arguments whose values are objects that not every release of Megatron can load."""
    return {name for name, value in arguments.items() if isinstance(value, Opaque)}


def trained_run(root: Path, **given: Any) -> Path:
    """A run with an optimizer, one process, and arguments of its own."""
    source = write_trained_llama(
        root / "run", vocab=100, extra_config={"max_position_embeddings": 131072}
    )
    (file,) = source.glob("*/mp_rank_00/model_optim_rng.pt")
    state = load(file)
    vars(state["args"]).update(GIVEN | given)
    state["num_floating_point_operations_so_far"] = 1.5e21
    torch.save(state, file)
    return source


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained_run(tmp_path_factory.mktemp("trained"))


@pytest.mark.parametrize("ckpt_format", ["torch", "torch_dist", "zarr"])
@pytest.mark.parametrize("source_format", list(REAL))
def test_a_real_run_keeps_all_arguments_at_its_own_layout(
    tmp_path: Path, source_format: str, ckpt_format: str
) -> None:
    source = REAL[source_format]
    before, beside = state_of(source)
    megaconv.convert(
        source,
        tmp_path / "out",
        saver="core",
        ckpt_format=ckpt_format,
        transformer_impl=before["transformer_impl"],
    )
    after, now = state_of(tmp_path / "out")

    expected = of_other_classes(before) | {"rank", "local_rank"}
    if ckpt_format != source_format:
        expected |= {"ckpt_format", "use_dist_ckpt", "dist_ckpt_format"}
    if after["no_save_optim"]:  # the source holds no optimizer
        expected |= {"no_save_optim"}
    if after["no_save_rng"]:  # the output holds no generators
        expected |= {"no_save_rng"}
    if ckpt_format == "torch_dist" and source_format != "torch_dist":
        # The optimizer is written in the form that any layout can load.
        expected |= {"use_distributed_optimizer"}
    found = changes(before, after).keys()
    assert found <= expected
    # Rank files have the rank of their own directory, which here is the source's first.
    unchanged = {
        "ckpt_format",
        "use_dist_ckpt",
        "dist_ckpt_format",
        "no_save_optim",
        "no_save_rng",
        "rank",
    }
    assert expected - found <= unchanged
    assert (
        now["num_floating_point_operations_so_far"]
        == beside["num_floating_point_operations_so_far"]
    )
    assert now["iteration"] == beside["iteration"]


@pytest.mark.parametrize("ckpt_format", ["torch", "torch_dist", "zarr"])
@pytest.mark.parametrize("source_format", list(REAL))
def test_at_another_layout_only_what_says_which_rank_holds_what_is_another(
    tmp_path: Path, source_format: str, ckpt_format: str
) -> None:
    source = REAL[source_format]
    before, _ = state_of(source)
    megaconv.convert(source, tmp_path / "out", saver="core", tp=1, pp=1, ckpt_format=ckpt_format)
    after, _ = state_of(tmp_path / "out")
    found = changes(before, after)
    decided = {each for names in OF_OUTPUT.values() for each in names}
    assert found.keys() <= decided | of_other_classes(before)
    sizes = (
        "tensor_model_parallel_size",
        "pipeline_model_parallel_size",
        "world_size",
        "padded_vocab_size",
    )
    assert {each: found.get(each) for each in sizes} == {
        "tensor_model_parallel_size": (2, 1), "pipeline_model_parallel_size": (2, 1), "world_size": (4, 1),
        "padded_vocab_size": found.get("padded_vocab_size"),
    }  # fmt: skip
    assert {found[each][1] for each in set(LAYOUT) & found.keys()} <= {1, None, False}


@pytest.mark.parametrize("ckpt_format", ["torch", "torch_dist", "zarr"])
def test_a_conversion_keeps_the_arguments_of_the_run(
    trained: Path, tmp_path: Path, ckpt_format: str
) -> None:
    megaconv.convert(trained, tmp_path / "out", saver="core", tp=2, ckpt_format=ckpt_format)
    after, beside = state_of(tmp_path / "out")
    expected = GIVEN | {
        "main_grads_dtype": TorchDtype("float32"),
        "no_save_optim": None,
        "no_save_rng": True,
    }
    assert {name: after[name] for name in GIVEN} == expected
    assert after["max_position_embeddings"] == 131072
    assert beside["num_floating_point_operations_so_far"] == 1.5e21


def test_a_chain_through_all_formats_and_layouts_loses_no_argument(
    trained: Path, tmp_path: Path
) -> None:
    before, _ = state_of(trained)
    steps = [("torch_dist", 2), ("zarr", 1), ("torch", 2), ("torch", 1)]
    source = trained
    for number, (ckpt_format, tp) in enumerate(steps):
        target = tmp_path / str(number)
        megaconv.convert(
            source, target, saver="core", tp=tp, ckpt_format=ckpt_format, transformer_impl="local"
        )
        source = target
    after, beside = state_of(source)
    # No generators of random numbers go to another layout, and one rank has no sequence parallelism.
    assert changes(before, after) == {
        "no_save_rng": (None, True),
        "sequence_parallel": (True, False),
    }
    assert beside["num_floating_point_operations_so_far"] == 1.5e21


def test_a_legacy_run_keeps_what_it_was_given_too(tmp_path: Path) -> None:
    source = FIXTURES / "legacy-llama-tp2pp2" / "checkpoint"
    before, _ = state_of(source)
    megaconv.convert(source, tmp_path / "core", saver="core", transformer_impl="local")
    megaconv.convert(tmp_path / "core", tmp_path / "legacy", saver="legacy")
    for target in (tmp_path / "core", tmp_path / "legacy"):
        decided = {each for names in OF_OUTPUT.values() for each in names}
        assert changes(before, state_of(target)[0]).keys() <= decided | of_other_classes(before)


def test_weights_alone_keep_the_arguments_and_say_that_no_optimizer_is_there(
    trained: Path, tmp_path: Path
) -> None:
    before, _ = state_of(trained)
    megaconv.convert(
        trained, tmp_path / "out", saver="core", optimizer=False, transformer_impl="local"
    )
    after, _ = state_of(tmp_path / "out")
    nothing = {"no_save_optim": (None, True), "no_save_rng": (None, True)}
    assert changes(before, after) == nothing | {"sequence_parallel": (True, False)}


def test_a_split_of_stages_is_as_the_run_said_it_while_the_layout_is_the_same(
    tmp_path: Path,
) -> None:
    source = FIXTURES / "core-llama-tp1pp2-layout" / "checkpoint"
    before, _ = state_of(source)
    megaconv.convert(source, tmp_path / "same", saver="core")
    megaconv.convert(source, tmp_path / "other", saver="core", pp=1)
    pattern = "pipeline_model_parallel_layout"
    assert before[pattern]
    assert repr(state_of(tmp_path / "same")[0][pattern]) == repr(before[pattern])
    assert state_of(tmp_path / "other")[0][pattern] is None


def test_an_argument_that_the_tensors_contradict_is_written_as_they_show_it(tmp_path: Path) -> None:
    """Megatron core gives the decoder of this T5 as many layers as its encoder, whatever the argument says."""
    source = FIXTURES / "core-t5-tp2pp1" / "checkpoint"
    megaconv.convert(source, tmp_path / "out", saver="core", transformer_impl="local")
    found = changes(state_of(source)[0], state_of(tmp_path / "out")[0])
    assert found["decoder_num_layers"] == (2, 1)
    assert "decoder_seq_length" not in found


def test_arguments_of_the_run_do_not_override_the_config_json_of_the_user(
    tmp_path: Path,
) -> None:
    """An argument that the run's model had no use for could otherwise describe a third model."""
    source = trained_run(tmp_path, rotary_base=500000, rotary_percent=0.5)
    hf = write_llama(
        tmp_path / "other", tied=True, vocab=100, extra_config={"max_position_embeddings": 131072}
    )
    megaconv.convert(source, tmp_path / "out", saver="core", config=hf)
    after, _ = state_of(tmp_path / "out")
    assert (after["rotary_base"], after["rotary_percent"]) == (10000, 1.0)
    assert after["seq_length"] == 16


def test_inspect_prints_the_runs_own_length_and_dropout(trained: Path) -> None:
    lines = run("inspect", trained, "--megatron-args").out.splitlines()
    assert {
        "--seq-length 16",
        "--max-position-embeddings 131072",
        "--attention-dropout 0.1",
    } <= set(lines)
    assert not [
        line
        for line in lines
        if line.startswith(("--kv-lora-rank", "--data-path", "--log-interval"))
    ]


def test_values_that_not_every_release_can_load_stay_behind(tmp_path: Path) -> None:
    source = trained_run(
        tmp_path,
        of_no_size=1 << 80,
        in_a_list=[1, 1 << 80],
        tensor=torch.ones(2),
        kept=[1, [2.5, None]],
    )
    megaconv.convert(source, tmp_path / "out", saver="core")
    after, _ = state_of(tmp_path / "out")
    assert after["kept"] == [1, [2.5, None]]
    assert not {"of_no_size", "in_a_list", "tensor"} & after.keys()


def test_the_counted_operations_have_to_be_possible(tmp_path: Path) -> None:
    source = trained_run(tmp_path)
    (file,) = source.glob("*/mp_rank_00/model_optim_rng.pt")
    state = load(file)
    for number in (-1, float("nan"), 10**400):
        state["num_floating_point_operations_so_far"] = number
        torch.save(state, file)
        outcome = run("inspect", source)
        assert outcome.status != 0
        assert "num_floating_point_operations_so_far should be from 0 to" in outcome.err


@pytest.mark.parametrize("name", ["consumed_train_samples", "consumed_valid_samples"])
def test_the_consumed_samples_have_to_be_a_number(tmp_path: Path, name: str) -> None:
    source = trained_run(tmp_path, **{name: "80"})
    refusal = f"{name} should be a number of samples, found '80'"
    convert = ("convert", source, tmp_path / "out", "--saver", "hf")
    for command in (("inspect", source), convert):
        outcome = run(*command)
        assert outcome.status == 3
        assert refusal in outcome.err
    assert not (tmp_path / "out").exists()


def test_every_argument_that_a_conversion_decides_is_one_of_megatron() -> None:
    known = READ.union(REFUSED, *HARMLESS.values())
    decided = [name for names in OF_OUTPUT.values() for name in names]
    assert len(decided) == len(set(decided))
    assert set(decided) <= known
