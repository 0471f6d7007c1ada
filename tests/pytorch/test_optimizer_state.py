"""Optimizer state for PyTorch and DeepSpeed: torch itself reads every file, by its own DCP reader or with weights_only."""

import warnings
from collections.abc import Mapping
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import megaconv
from formats import torch_zip
from megaconv.errors import CorruptCheckpoint, NotExpressible
from megaconv.model.training import TrainingState
from megaconv.pytorch.megatron_entry import entry, with_entry
from tests.conftest import FIXTURES
from tests.families.test_families import write_model
from tests.megatron_oracle import read_rank_file
from tests.optimizer_models import SCHEDULER, write_trained_llama
from tests.optimizer_readers import read_single, version_of

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
MOMENTS = ("exp_avg", "exp_avg_sq")
SAME = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "decoder.layers.0.self_attention.linear_proj.weight": "model.layers.0.self_attn.o_proj.weight",
    "decoder.layers.1.mlp.linear_fc2.weight": "model.layers.1.mlp.down_proj.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
    "output_layer.weight": "lm_head.weight",
}
"""Megatron's names -> transformers' of tensors that both store alike."""


VOCAB = 131
PADDED = ("embedding.word_embeddings.weight", "output_layer.weight")
"""Tensors whose further rows belong to no token. A conversion makes them zeros."""


@pytest.fixture(scope="module")
def megatron(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint in bf16 whose optimizer torch's AdamW has made in three steps."""
    return write_trained_llama(tmp_path_factory.mktemp("run") / "core", layers=2, tied=False)


@pytest.fixture(scope="module")
def stored(megatron: Path) -> Path:
    megaconv.convert(megatron, megatron.parent / "dcp", saver="dcp", verify=True)
    return megatron.parent / "dcp"


@pytest.fixture(scope="module")
def universal(stored: Path) -> Path:
    megaconv.convert(
        stored, stored.parent / "universal", saver="deepspeed", dtype="bf16", verify=True
    )
    return stored.parent / "universal"


def load_all(path: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint, read by PyTorch's own reader."""
    reader = dcp.FileSystemReader(path)
    state = {
        key: torch.empty(held.size, dtype=held.properties.dtype)
        for key, held in reader.read_metadata().state_dict_metadata.items()
        if isinstance(held, TensorStorageMetadata)
    }
    dcp.load(state, storage_reader=reader, no_dist=True)
    return state


def module_of(weights: Mapping[str, torch.Tensor]) -> nn.Module:
    """Modules within modules, with parameters of these names."""
    root = nn.Module()
    for name, weight in weights.items():
        *parents, last = name.split(".")
        place = root
        for parent in parents:
            if parent not in dict(place.named_children()):
                place.add_module(parent, nn.Module())
            place = place.get_submodule(parent)
        place.register_parameter(last, nn.Parameter(weight.clone()))
    return root


def adamw(model: nn.Module) -> tuple[torch.optim.AdamW, Any]:
    """An AdamW of a new run, with other settings than the stored ones."""
    trained = list(model.parameters())
    groups = [
        {"params": [each for each in trained if each.dim() > 1], "weight_decay": 0.7},
        {"params": [each for each in trained if each.dim() == 1], "weight_decay": 0.6},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.5, eps=0.1)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))


def test_a_new_run_of_torch_takes_over_weights_moments_steps_groups_and_schedule(
    megatron: Path, stored: Path
) -> None:
    masters = read_single(megatron)
    tensors = load_all(stored)
    weights = {name: each for name, each in tensors.items() if not name.startswith("optimizer.")}
    model = module_of({name: torch.zeros_like(each) for name, each in weights.items()})
    optimizer, scheduler = adamw(model)
    state = {
        **model.state_dict(),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=FLAT),
        "lr_scheduler": scheduler.state_dict(),
        "train_state": {"step": 0, "ntokens_seen": 0},
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(state, checkpoint_id=stored, no_dist=True)
    set_optimizer_state_dict(model, optimizer, state["optimizer"], options=FLAT)
    scheduler.load_state_dict(state["lr_scheduler"])
    assert state["train_state"]["step"] == 1
    assert (scheduler.last_epoch, scheduler.base_lrs) == (1, [0.01, 0.01])
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    assert {(group["lr"], group["eps"]) for group in optimizer.param_groups} == {(0.01, 1e-8)}
    parameters = dict(model.named_parameters())
    for theirs, ours in SAME.items():
        rows = VOCAB if theirs in PADDED else None
        held = optimizer.state[parameters[ours]]
        assert float(held["step"]) == 3
        assert torch.equal(state[ours], masters["master"][theirs][:rows])
        for slot in MOMENTS:
            assert torch.equal(held[slot], masters[slot][theirs][:rows])


def test_a_chain_through_fsdp2_and_deepspeed_ends_in_the_bits_that_it_began_with(
    megatron: Path, universal: Path, tmp_path: Path
) -> None:
    megaconv.convert(
        universal,
        tmp_path / "end",
        saver="core",
        transformer_impl="local",
        make_vocab_size_divisible_by=8,
        optimizer=True,
    )
    begin, end = read_single(megatron), read_single(tmp_path / "end")
    assert begin.keys() == end.keys() == {"weight", "master", *MOMENTS}
    for slot, held in begin.items():
        for name, tensor in held.items():
            rows = VOCAB if name in PADDED else None
            assert torch.equal(tensor[:rows], end[slot][name][:rows]), (slot, name)
    first, last = (
        read_rank_file(version_of(path) / "mp_rank_00" / "model_optim_rng.pt")
        for path in (megatron, tmp_path / "end")
    )
    assert last["opt_param_scheduler"] == first["opt_param_scheduler"] == SCHEDULER
    assert last["iteration"] == first["iteration"]
    groups = [each["optimizer"]["optimizer"]["param_groups"] for each in (first, last)]
    for before, after in zip(*groups, strict=True):
        same = ("lr", "betas", "eps", "weight_decay", "wd_mult", "params")
        assert {name: after[name] for name in same} == {name: before[name] for name in same}


def test_deepspeeds_own_universal_checkpoint_is_written_again_as_it_was(tmp_path: Path) -> None:
    """torch loads the files of ds_to_universal and those of megaconv alike."""
    original = FIXTURES / "universal-zero2-llama-tied-groups-dp2"
    megaconv.convert(original, tmp_path / "out", saver="deepspeed", optimizer=True)
    name = (tmp_path / "out" / "latest_universal").read_text()
    assert name == (original / "latest_universal").read_text().strip()
    theirs, ours = original / name / "zero", tmp_path / "out" / name / "zero"
    found = (str(file.relative_to(theirs)) for file in theirs.glob("*/*.pt"))
    files = sorted(name for name in found if not name.startswith("lm_head."))  # tied
    assert files == sorted(str(file.relative_to(ours)) for file in ours.glob("*/*.pt"))
    for file in files:
        before = torch.load(theirs / file, weights_only=True)
        after = torch.load(ours / file, weights_only=True)
        if file.endswith("step.pt"):
            assert (after.dtype, float(after)) == (torch.float32, float(before))
        else:
            assert torch.equal(after["param"], before["param"]), file
    stored: Any = torch_zip.read(theirs / "optimizer_state.pt")  # torch needs DeepSpeed's classes
    before = stored["param_groups"]
    after = torch.load(ours / "optimizer_state.pt", weights_only=True)["param_groups"]
    for mine, its in zip(after, before, strict=True):
        assert {key: its[key] for key in mine} == mine
        assert {"lr", "betas", "eps", "weight_decay"} <= mine.keys()


def test_every_file_for_deepspeed_has_what_its_engine_looks_up(universal: Path) -> None:
    """Source: _load_checkpoint and load_hp_checkpoint_state of deepspeed 0.19.8."""
    step = universal / (universal / "latest_universal").read_text()
    for name in ("mp_rank_00_model_states", "zero_pp_rank_0_mp_rank_00_model_states"):
        state = torch.load(step / f"{name}.pt", weights_only=True)
        assert {"module", "dp_world_size", "mp_world_size", "lr_scheduler"} <= state.keys()
        assert (state["global_steps"], state["skipped_steps"]) == (1, 0)
        assert state["lr_scheduler"]["last_batch_iteration"] == 0
        assert "base_lrs" not in state["lr_scheduler"]
    groups = torch.load(step / "zero" / "optimizer_state.pt", weights_only=True)
    of_zero_3 = groups["optimizer_state_dict"]
    assert float(of_zero_3["state"][0]["step"]) == 3
    # ZeRO 3 would give the first group's decay to the norms too.
    assert "weight_decay" not in of_zero_3["param_groups"][0]
    assert [group["weight_decay"] for group in groups["param_groups"]] == [0.1, 0.0]


def test_an_optimizer_that_torch_did_not_flatten_is_read_as_the_same(
    megatron: Path, stored: Path, tmp_path: Path
) -> None:
    tensors = load_all(stored)
    weights = {name: each for name, each in tensors.items() if not name.startswith("optimizer.")}
    model = module_of(weights)
    optimizer, _ = adamw(model)
    get_optimizer_state_dict(model, optimizer)  # makes the state
    for name, parameter in model.named_parameters():
        for slot in (*MOMENTS, "step"):
            optimizer.state[parameter][slot] = tensors[f"optimizer.state.{name}.{slot}"]
    nested = get_optimizer_state_dict(model, optimizer)
    state = {"app": {"model": model.state_dict(), "optim": nested}}
    dcp.save(state, checkpoint_id=tmp_path / "nested", no_dist=True)
    found = megaconv.fingerprint(tmp_path / "nested", config=stored)
    assert found == megaconv.fingerprint(stored)
    assert found.optimizer is not None
    training = megaconv.open(tmp_path / "nested", config=stored).header.training
    assert training.optimizer is not None
    assert training.optimizer.torch is not None
    assert [each["weight_decay"] for each in training.optimizer.torch.groups] == [0.7, 0.6]


@pytest.mark.parametrize("flat", [True, False])
def test_a_learning_rate_in_a_tensor_is_read(flat: bool, stored: Path, tmp_path: Path) -> None:
    """torch wants one where a compiled step changes the rate."""
    tensors = load_all(stored)
    weights = {name: each for name, each in tensors.items() if not name.startswith("optimizer.")}
    model = module_of(weights)
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.25))
    for parameter in model.parameters():
        parameter.grad = parameter.detach() / 8
    optimizer.step()
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    held = get_optimizer_state_dict(model, optimizer, options=options)
    dcp.save({**weights, "optimizer": held}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    training = megaconv.open(tmp_path / "dcp", config=stored).header.training
    assert training.optimizer is not None
    assert training.optimizer.torch is not None
    assert {group["lr"] for group in training.optimizer.torch.groups} == {0.25}
    assert {group.settings["lr"] for group in training.optimizer.groups} == {0.25}


def test_weights_in_16_bits_have_no_optimizer_in_dcp(megatron: Path, tmp_path: Path) -> None:
    report = megaconv.convert(megatron, tmp_path / "out", saver="dcp", dtype="bf16")
    assert any("trains fp32 weights" in notice for notice in report.notices)
    assert megaconv.fingerprint(tmp_path / "out").optimizer is None
    with pytest.raises(NotExpressible, match="trains fp32 weights"):
        megaconv.convert(
            megatron, tmp_path / "no", saver="dcp", dtype="bf16", optimizer=True, dry_run=True
        )


def test_fp32_weights_of_deepspeeds_optimizer_become_the_weights_of_an_output_with_a_record(
    universal: Path, stored: Path, tmp_path: Path
) -> None:
    """The source's megaconv.json lists 16-bit weights and masters. The masters are read as the weights."""
    megaconv.convert(universal, tmp_path / "out", saver="dcp", dtype="fp32", optimizer=True)
    assert megaconv.fingerprint(tmp_path / "out") == megaconv.fingerprint(stored)
    found, wanted = load_all(tmp_path / "out"), load_all(stored)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[key], tensor) for key, tensor in wanted.items())


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_deepspeeds_optimizer_is_kept_with_weights_of_any_dtype(
    dtype: str, universal: Path, stored: Path, tmp_path: Path
) -> None:
    """The weights are rounded from the masters, which stay masters."""
    for source in (universal, stored):
        megaconv.convert(source, tmp_path / source.name, saver="core", dtype=dtype, optimizer=True)
    found, wanted = (read_single(tmp_path / source.name) for source in (universal, stored))
    for slot in ("weight", "master", *MOMENTS):
        assert found[slot].keys() == wanted[slot].keys()
        assert all(torch.equal(found[slot][name], each) for name, each in wanted[slot].items())


def test_changed_fp32_weights_of_deepspeeds_optimizer_are_found_when_they_become_the_weights(
    universal: Path, tmp_path: Path
) -> None:
    copytree(universal, tmp_path / "universal")
    (file,) = (tmp_path / "universal").glob("*/zero/model.norm.weight/fp32.pt")
    master = torch.load(file, weights_only=True)
    changed = master["param"].clone()
    changed[0] = torch.nextafter(
        changed[0], torch.tensor(torch.inf)
    )  # rounded, it is the same weight
    torch.save(master | {"param": changed}, file)
    with pytest.raises(
        CorruptCheckpoint, match=r"other values than were written: final_norm\.weight"
    ):
        megaconv.convert(tmp_path / "universal", tmp_path / "out", saver="hf", dtype="fp32")


BUFFERS = {"apertus": (".act_fn.beta", ".act_fn.eps"), "gemma4_unified_text": (".layer_scalar",)}
"""Families with buffers that no optimizer trains -> the ends of the names of these buffers."""


def write_fsdp_run(family: str, path: Path) -> Path:
    """Write a DCP checkpoint of a model after a step of torch's AdamW. Returns the Hugging Face directory of the model."""
    hf = write_model(path.parent / f"{path.name}-hf", family)
    weights = {name: each.float() for name, each in load_file(hf / "model.safetensors").items()}
    buffers = {name: each for name, each in weights.items() if name.endswith(BUFFERS[family])}
    assert buffers
    model = module_of({name: each for name, each in weights.items() if name not in buffers})
    optimizer, _ = adamw(model)
    for parameter in model.parameters():
        parameter.grad = parameter.detach() / 8
    optimizer.step()
    state = {
        **model.state_dict(),
        **buffers,
        "optimizer": get_optimizer_state_dict(model, optimizer, options=FLAT),
    }
    dcp.save(state, checkpoint_id=path, no_dist=True)
    return hf


@pytest.mark.parametrize("family", BUFFERS)
def test_buffers_that_no_optimizer_trains_are_no_frozen_parameters(
    family: str, tmp_path: Path
) -> None:
    hf = write_fsdp_run(family, tmp_path / "run")
    megaconv.convert(
        tmp_path / "run",
        tmp_path / "universal",
        saver="deepspeed",
        config=hf,
        optimizer=True,
        verify=True,
    )
    megaconv.convert(tmp_path / "universal", tmp_path / "back", saver="dcp", optimizer=True)
    found, wanted = load_all(tmp_path / "back"), load_all(tmp_path / "run")
    of_state = {key for key in wanted if key.endswith(MOMENTS)}
    assert of_state
    weights = {key for key in wanted if not key.startswith("optimizer.")}
    for key in of_state | weights:
        assert torch.equal(found[key], wanted[key]), key


@pytest.mark.parametrize("saver", ["dcp", "deepspeed"])
def test_the_state_of_sgd_is_left_out_by_name(saver: str, tmp_path: Path) -> None:
    source = write_trained_llama(tmp_path / "sgd", kind="sgd", layers=1)
    report = megaconv.convert(source, tmp_path / "out", saver=saver)
    assert any("SGD" in notice for notice in report.notices)
    assert report.fingerprint is not None
    assert report.fingerprint.optimizer is None
    with pytest.raises(NotExpressible, match="SGD"):
        megaconv.convert(source, tmp_path / "no", saver=saver, optimizer=True, dry_run=True)


def test_torchtitans_newer_names_are_written_and_read(
    megatron: Path, stored: Path, tmp_path: Path
) -> None:
    """By default its Llama has one parameter for q, k and v, and three weights in its checkpoints."""
    for names, trained in (("torchtitan-0.3", "wqkv"), ("torchtitan-0.3-separate", "wq")):
        target = tmp_path / names
        megaconv.convert(megatron, target, saver="dcp", options={"names": names})
        keys = dcp.FileSystemReader(target).read_metadata().state_dict_metadata.keys()
        assert {
            "layers.0.attention.qkv_linear.wq.weight",
            f"optimizer.state.layers.0.attention.qkv_linear.{trained}.weight.exp_avg",
            f"optimizer.param_groups.layers.0.attention.qkv_linear.{trained}.weight.lr",
            "optimizer.param_groups.lm_head.weight.fused",
            "lr_scheduler.last_epoch",
            "train_state.ntokens_seen",
        } <= keys
        assert megaconv.fingerprint(target) == megaconv.fingerprint(stored)


def test_megatrons_numbers_count_only_at_the_iteration_that_they_are_of() -> None:
    run = TrainingState(7, consumed_train_samples=56, scheduler={"num_steps": 56, "max_lr": 0.1})
    assert with_entry(TrainingState(7), entry(run)) == run
    assert with_entry(TrainingState(9), entry(run)) == TrainingState(9)
    with pytest.raises(ValueError, match="a scheduler of"):
        with_entry(TrainingState(7), entry(run) | {"scheduler": {"max_lr": object()}})
