"""Rank files of `torch` are put together block by block from the ranks that share an optimizer, and never half there."""

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from formats import torch_zip
from megaconv.model.layout import Layout
from megatron_lite.checkpoint import rank_file
from megatron_lite.checkpoint.rank_state import rank_snapshot
from megatron_lite.checkpoint.saver import Saver
from megatron_lite.checkpoint.snapshot import Snapshot
from megatron_lite.checkpoint.state import Progress, param_groups
from megatron_lite.checkpoint.together import SaveError
from megatron_lite.checkpoint.weights import init_weights
from megatron_lite.engine import Engine
from megatron_lite.parallel import comm
from megatron_lite.parallel.grid import make_grid
from megatron_lite.settings.config import Settings
from megatron_lite.settings.options import ModelOptions, OptimizerOptions
from tests.trainer.parallel.conftest import world  # noqa: F401  # a fixture
from tests.trainer.parallel.small import CPU, MODELS
from tests.trainer.parallel.worlds import World

BLOCK = 4096


def shared_engine(model: str, ep: int) -> Engine:
    """bf16, its optimizer shared over the ranks and filled with other numbers in each place."""
    config = MODELS[model]
    grid = make_grid(Layout(ep=ep, stage_layers=(4,)), dist.get_world_size(), CPU, experts=ep > 1)
    engine = Engine(
        config, grid, ModelOptions("bfloat16", vocab_divisor=4), OptimizerOptions(distributed=True)
    )
    init_weights(engine, 0.1, 3)
    assert engine.optimizer is not None
    for owned in engine.optimizer.ranges():
        for number, tensor in enumerate(owned.tensors.values()):
            tensor.copy_(torch.arange(owned.start, owned.end) + number * 1e5)
    return engine


def common() -> dict[str, Any]:
    groups = param_groups(Settings(), Progress(1), (1e-3, 0.1, None))
    args = Namespace(params_dtype=torch.bfloat16)
    return {"args": args, "iteration": 1, "optimizer": {"optimizer": {"param_groups": groups}}}


def write_together(
    rank: int, root: Path, model: str, ep: int, copied: bool
) -> tuple[int, dict[str, torch.Tensor]]:
    """(bytes of the largest message, this rank's weights)."""
    engine, saving = shared_engine(model, ep), dist.new_group(backend="gloo")
    received = [0]
    receive = comm.receive

    def watching(tensor: torch.Tensor, *how: Any) -> Any:
        received.append(tensor.nbytes)
        return receive(tensor, *how)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(comm, "receive", watching)
        patch.setattr(rank_file, "BLOCK_BYTES", BLOCK)
        saver = Saver(root, "torch", rank, saving, {}, asynchronous=copied)
        saver.save(rank_snapshot(engine, common(), with_optimizer=True, impl="transformer_engine"))
        if copied:  # later changes by training are not saved
            assert engine.optimizer is not None
            for owned in engine.optimizer.ranges():
                for tensor in owned.tensors.values():
                    tensor.zero_()
        saver.finish()
    dist.destroy_process_group(saving)
    weights = {name: tensor.clone() for _, name, tensor in engine.parameters()}
    engine.grid.close()
    return max(received), weights


@pytest.mark.parametrize(
    ("model", "ep", "files"),
    [("qwen3", 1, ["mp_rank_00"]), ("mixtral", 2, ["mp_rank_00_000", "mp_rank_00_001"])],
)
@pytest.mark.parametrize("copied", [False, True], ids=["at once", "asynchronously"])
def test_a_file_holds_all_ranks_parts_and_a_rank_never_more_than_a_block_of_others(
    world: World,  # noqa: F811
    model: str,
    ep: int,
    files: list[str],
    copied: bool,
    tmp_path: Path,
) -> None:
    """With experts both ranks write files, and each file has parts of the other rank."""
    found = world.run(2, write_together, tmp_path / "ckpt", model, ep, copied)
    assert 0 < max(received for received, _ in found) <= BLOCK
    for name, (_, weights) in zip(files, found, strict=False):
        state = torch.load(
            tmp_path / "ckpt" / "iter_0000001" / name / "model_optim_rng.pt", weights_only=False
        )
        assert state["args"].params_dtype == torch.bfloat16
        model_state = state["model"]
        for tensor_name, expected in weights.items():
            assert torch.equal(model_state[tensor_name], expected), tensor_name
        optimizers = (
            state["optimizer"] if isinstance(state["optimizer"], list) else [state["optimizer"]]
        )
        count = 0
        for optimizer in optimizers:
            masters = [tensor for group in optimizer["fp32_from_fp16_params"] for tensor in group]
            for master, slots in zip(
                masters, optimizer["optimizer"]["state"].values(), strict=True
            ):
                whole = torch.arange(master.numel(), dtype=torch.float32)
                for number, tensor in enumerate((master, slots["exp_avg"], slots["exp_avg_sq"])):
                    assert torch.equal(tensor.reshape(-1), whole + number * 1e5)
                count += 1
        assert count == len(weights)


def test_a_file_that_cant_be_written_is_one_line_and_leaves_what_was_there(tmp_path: Path) -> None:
    content = {"step": 1}
    saver = Saver(tmp_path, "torch", 0, None, {})
    saver.save(
        Snapshot(1, {}, rank_file=rank_file.RankFile("mp_rank_00/model_optim_rng.pt", content, ()))
    )
    saved = tmp_path / "iter_0000001" / "mp_rank_00" / "model_optim_rng.pt"
    assert torch_zip.read(saved) == content
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank_file.os, "fsync", full_disk)
        with pytest.raises(
            SaveError, match=r"iter_0000002: can't be written: No space left on device"
        ):
            saver.save(
                Snapshot(
                    2,
                    {},
                    rank_file=rank_file.RankFile("mp_rank_00/model_optim_rng.pt", content, ()),
                )
            )
    assert not (tmp_path / "iter_0000002").exists()
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "1"
    assert torch_zip.read(saved) == content


def full_disk(_: int) -> None:
    raise OSError(28, "No space left on device")
