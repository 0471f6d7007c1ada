"""DeepSpeed's ZeRO checkpoints: against what DeepSpeed's own tool makes of them, and what is refused."""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import megaconv
from tests.conftest import FIXTURES
from tests.runs import assert_refused, run
from tests.trust.torch_containers import members, stored

CASES = sorted(FIXTURES.glob("deepspeed-*"))
GROUPS = FIXTURES / "deepspeed-zero2-llama-tied-groups-dp2"
FROZEN = FIXTURES / "deepspeed-zero1-llama-tied-frozen-dp2"
CUT = FIXTURES / "deepspeed-zero3-llama-dp2"
TRAINED = [case for case in CASES if case != FROZEN]


def converted(source: Path, target: Path, *options: object) -> dict[str, torch.Tensor]:
    outcome = run("convert", "--load-dir", source, "--saver", "hf", "--save-dir", target, *options)
    assert outcome.status == 0, outcome
    found: dict[str, torch.Tensor] = load_file(target / "model.safetensors")
    return found


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_fp32_weights_are_those_of_deepspeeds_own_tool(case: Path, tmp_path: Path) -> None:
    expected = load_file(case / "expected.safetensors")
    found = converted(case / "checkpoint", tmp_path / "out", "--dtype", "fp32")
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor, expected[name].float()), name


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_without_a_dtype_weights_are_as_the_module_computes_with_them(
    case: Path, tmp_path: Path
) -> None:
    expected = load_file(case / "expected.safetensors")
    found = converted(case / "checkpoint" / "global_step3", tmp_path / "out")
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor, expected[name].bfloat16()), name


@pytest.mark.parametrize("case", TRAINED, ids=lambda case: case.name)
@pytest.mark.parametrize("ckpt_format", ["torch", "torch_dist"])
def test_optimizer_state_goes_along_to_megatron(
    case: Path, ckpt_format: str, tmp_path: Path
) -> None:
    options = {} if case == GROUPS else {"weight_decay": "megatron"}  # elsewhere norms decay
    report = megaconv.convert(
        case / "checkpoint",
        tmp_path / "core",
        saver="core",
        tp=2,
        ckpt_format=ckpt_format,
        options=options,
    )
    found = megaconv.fingerprint(tmp_path / "core")
    assert found == report.fingerprint
    assert found.optimizer is not None
    assert json.loads(run("inspect", tmp_path / "core", "--json").out)["optimizer"]["step"] == 3


@pytest.mark.parametrize("case", [GROUPS, CUT], ids=lambda case: case.name)
def test_moments_are_put_together_from_all_ranks(case: Path) -> None:
    """Against torch's own reading of the files, and the offsets that each rank notes for itself."""
    slots = megaconv.open(case / "checkpoint").slots
    assert {key.slot for key in slots} == {"master", "exp_avg", "exp_avg_sq"}
    tensor = slots[next(key for key in slots if key == ("layers.0.mlp.down.weight", "exp_avg"))]
    name, shape = "model.layers.0.mlp.down_proj.weight", (32, 56)
    states = [read(case / "checkpoint/global_step3", rank) for rank in (0, 1)]
    if case == CUT:
        start, piece = offset(case, name), 32 * 56 // 2
        parts = [
            state["optimizer_state_dict"]["state"][0]["exp_avg"][start : start + piece]
            for state in states
        ]
    else:
        held = [state["param_slice_mappings"][0].get(name) for state in states]
        flat = [state["base_optimizer_state"]["state"][0]["exp_avg"] for state in states]
        parts = [
            each[at.start : at.start + at.numel]
            for each, at in zip(flat, held, strict=True)
            if at is not None
        ]
    values = megaconv_tensor(tensor)
    assert torch.equal(values, torch.cat(parts).reshape(shape))


def megaconv_tensor(tensor: object) -> torch.Tensor:
    from formats.tensor import read_tensor

    return torch.from_numpy(read_tensor(tensor).view("float32"))  # type: ignore[arg-type]


def offset(case: Path, name: str) -> int:
    """Elements of a rank's vector before a parameter, under stage 3."""
    state = torch.load(
        case / "checkpoint/global_step3/zero_pp_rank_0_mp_rank_00_model_states.pt",
        weights_only=False,
    )
    shapes: Mapping[str, torch.Size] = state["param_shapes"][0]
    before = list(shapes)[: list(shapes).index(name)]
    return sum(-(-shapes[each].numel() // 2) for each in before)


class Record:
    """Stands for a class of DeepSpeed's."""

    def __init__(self, *args: object) -> None:
        self.args = args


def read(directory: Path, rank: int) -> dict[str, Any]:
    import pickle
    from types import ModuleType

    class Unpickler(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> object:
            return Record if module.startswith("deepspeed") else super().find_class(module, name)

    module = ModuleType("pickle_of_deepspeed")
    module.Unpickler, module.load, module.loads = Unpickler, pickle.load, pickle.loads  # type: ignore[attr-defined]
    file = directory / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
    found: dict[str, Any] = torch.load(file, weights_only=False, pickle_module=module)[
        "optimizer_state_dict"
    ]
    return found


def test_parameters_that_are_not_trained_are_named_and_taken_from_the_module(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    outcome = run(
        "convert",
        "--load-dir",
        FROZEN / "checkpoint",
        "--saver",
        "core",
        "--save-dir",
        tmp_path / "core",
    )
    assert outcome.status == 0, outcome
    assert "model.layers.0.self_attn.q_proj.weight" in caplog.text
    assert "optimizer state was left out" in outcome.err
    shown = run("inspect", FROZEN / "checkpoint").out
    assert "step 3, its state can't be converted" in shown


def test_megatrons_scheduler_goes_on_from_the_samples_seen_with_settings_of_the_run(
    tmp_path: Path,
) -> None:
    outcome = run(
        "convert",
        "--load-dir",
        GROUPS / "checkpoint",
        "--saver",
        "core",
        "--save-dir",
        tmp_path / "core",
    )
    assert "--override-opt-param-scheduler" in outcome.err
    run("convert", tmp_path / "core", tmp_path / "again", "--saver", "core", "--tp", 2)
    for path in (tmp_path / "core", tmp_path / "again"):
        (file, *_) = sorted(path.rglob("model_optim_rng.pt"))
        kept = torch.load(file, weights_only=False)["opt_param_scheduler"]
        scheduler(override=True).load_state_dict(kept)
        with pytest.raises(AssertionError, match="do not match"):
            scheduler(override=False).load_state_dict(kept)
        resumed = scheduler(override=True)
        resumed.load_state_dict(kept)
        assert (resumed.num_steps, resumed.max_lr) == (6, 0.1)


def scheduler(*, override: bool) -> Any:
    optimizer = torch.optim.SGD(
        [{"params": [torch.nn.Parameter(torch.zeros(1))], "wd_mult": 1.0}], lr=0.1
    )
    return scheduler_of(optimizer, override=override)


def scheduler_of(optimizer: torch.optim.Optimizer, *, override: bool) -> Any:
    """Megatron core's own."""
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler  # slowly

    return OptimizerParamScheduler(
        optimizer, init_lr=0.0, max_lr=0.1, min_lr=0.0, lr_warmup_steps=0, lr_decay_steps=100, lr_decay_style="linear",
        start_wd=0.5, end_wd=0.5, wd_incr_steps=100, wd_incr_style="constant", use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=override,
    )  # fmt: skip


def broken(source: Path, target: Path) -> Path:
    shutil.copytree(source / "checkpoint", target)
    return target / "global_step3"


def test_a_rank_that_is_missing_is_named(tmp_path: Path) -> None:
    step = broken(GROUPS, tmp_path / "in")
    (step / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    assert_refused(run("inspect", tmp_path / "in"), 3, str(step), "2 ranks", "rank 1")


def test_partitions_of_another_run_are_refused(tmp_path: Path) -> None:
    step = broken(GROUPS, tmp_path / "in")
    name = "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
    shutil.copy(FROZEN / "checkpoint/global_step3" / name, step / name)
    assert run("inspect", tmp_path / "in").status == 3


def test_experts_and_a_tag_that_leads_elsewhere_are_refused(tmp_path: Path) -> None:
    step = broken(GROUPS, tmp_path / "in")
    (step / "layer_1_expert_0_mp_rank_00_model_states.pt").write_bytes(b"")
    assert_refused(
        run("inspect", tmp_path / "in"),
        3,
        "layer_1_expert_0_mp_rank_00_model_states.pt",
        "not supported",
    )
    (tmp_path / "in" / "latest").write_text("../elsewhere")
    assert_refused(run("inspect", tmp_path / "in"), 6, "latest", "../elsewhere")


def test_without_a_config_json_it_is_asked_for(tmp_path: Path) -> None:
    broken(GROUPS, tmp_path / "in")
    (tmp_path / "in" / "config.json").unlink()
    assert_refused(run("inspect", tmp_path / "in"), 2, "--config")
    assert run("inspect", tmp_path / "in", "--config", GROUPS / "checkpoint").status == 0


def rewritten(file: Path, change: Callable[[dict[str, Any]], object]) -> None:
    state = torch.load(file, map_location="cpu", weights_only=False)
    change(state)
    torch.save(state, file)


@pytest.mark.parametrize(
    "change",
    [
        lambda state: state.update(dp_world_size=10**12),
        lambda state: state.update(dp_world_size="two"),
        lambda state: state.update(shared_params=[7]),
        lambda state: state.update(shared_params={7: 7}),
    ],
)
def test_settings_of_a_wrong_kind_end_in_one_line(
    change: Callable[[dict[str, Any]], object], tmp_path: Path
) -> None:
    step = broken(GROUPS, tmp_path / "in")
    rewritten(step / "mp_rank_00_model_states.pt", change)
    assert_refused(run("fingerprint", tmp_path / "in"), 3, str(step))


def test_an_optimizer_without_a_state_ends_in_one_line(tmp_path: Path) -> None:
    step = broken(GROUPS, tmp_path / "in")
    file = step / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"
    entries = members(file.read_bytes())
    file.write_bytes(
        stored(
            [
                (name, data.replace(b"optimizer_state_dict", b"optimizer_state_dicX"))
                for name, data in entries
            ]
        )
    )
    assert_refused(run("fingerprint", tmp_path / "in"), 3, str(step), "optimizer_state_dict")


@pytest.mark.parametrize("step", [float("inf"), torch.ones(9)], ids=str)
def test_a_step_that_is_no_number_ends_in_one_line(step: object, tmp_path: Path) -> None:
    shutil.copytree(FIXTURES / "universal-zero2-llama-tied-groups-dp2", tmp_path / "in")
    file = next((tmp_path / "in").glob("*/zero/*/step.pt"))
    torch.save(step, file)
    assert_refused(
        run("fingerprint", tmp_path / "in"), 3, "is not a ZeRO checkpoint of a known form"
    )


def test_two_files_of_one_rank_are_refused(tmp_path: Path) -> None:
    step = broken(GROUPS, tmp_path / "in")
    name = "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    shutil.copy(step / f"bf16_{name}", step / name)
    assert_refused(run("fingerprint", tmp_path / "in"), 3, "another file of a rank that has one")
