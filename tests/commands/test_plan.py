"""`megaconv plan`: which layouts a model can have, what a rank holds, and the memory to train it."""

import json
from pathlib import Path
from typing import Any

import pytest

import megaconv
from megaconv.commands.units import readable_time
from megaconv.errors import LayoutError, UsageError
from megaconv.model.memory import bytes_per_parameter
from tests.conftest import FIXTURES
from tests.encoder_configs import CLASSIFYING_BERT, MASKED_BERT, SCORING_LLAMA, T5
from tests.models import write_llama
from tests.runs import assert_refused, run

MIXTURE = FIXTURES / "core-mixtral-seq-tp2pp2ep2" / "checkpoint"


def planned(path: Path, *options: object) -> list[dict[str, Any]]:
    outcome = run("plan", path, *options, "--json")
    assert (outcome.status, outcome.err) == (0, "")
    found: list[dict[str, Any]] = json.loads(outcome.out)["layouts"]
    return found


@pytest.mark.parametrize(
    ("dtype", "everywhere", "over_four"),
    [("float16", 20, 8), ("bfloat16", 18, 9), ("float32", 16, 10)],
)
def test_bytes_of_a_parameter_are_megatrons(dtype: str, everywhere: int, over_four: int) -> None:
    assert bytes_per_parameter(dtype, 4, distributed_optimizer=False) == everywhere
    assert bytes_per_parameter(dtype, 4, distributed_optimizer=True) == over_four
    assert bytes_per_parameter(dtype, 1, distributed_optimizer=True) == everywhere


def test_a_momentum_is_four_bytes_less_than_two_moments() -> None:
    assert bytes_per_parameter("bfloat16", 4, distributed_optimizer=False, states=1) == 14
    assert bytes_per_parameter("bfloat16", 4, distributed_optimizer=True, states=1) == 8


def test_nothing_is_trained_in_eight_bits() -> None:
    with pytest.raises(UsageError, match="float8_e4m3fn"):
        bytes_per_parameter("float8_e4m3fn", 1, distributed_optimizer=True)


def test_a_rank_of_a_planned_layout_holds_what_a_rank_of_a_conversion_does(tmp_path: Path) -> None:
    model = write_llama(tmp_path / "model", layers=4)
    run(
        "convert",
        "--load-dir",
        model,
        "--saver",
        "core",
        "--save-dir",
        tmp_path / "out",
        "--tp",
        2,
        "--pp",
        2,
    )
    files = (tmp_path / "out").rglob("model_optim_rng.pt")
    held = [json.loads(run("inspect", file, "--json").out)["bytes"] for file in files]
    (layout,) = [one for one in planned(model) if (one["tp"], one["pp"]) == (2, 2)]
    assert layout["weight_bytes"] == max(held)


def test_the_optimizers_share_falls_with_more_gpus(tmp_path: Path) -> None:
    model = write_llama(tmp_path / "model", layers=4)
    alone, eight = planned(model)[0], planned(model, "--gpus", 8)[0]
    assert alone["training_bytes"] == 18 * alone["parameters"]
    assert eight["training_bytes"] == int((6 + 12 / 8) * eight["parameters"])


def test_experts_are_shared_out_over_their_own_data_parallel_ranks() -> None:
    (layout,) = [
        one
        for one in planned(MIXTURE, "--gpus", 8)
        if (one["tp"], one["pp"], one["ep"]) == (1, 1, 4)
    ]
    dense = layout["parameters"] - layout["expert_parameters"]
    assert layout["training_bytes"] == int(
        dense * (6 + 12 / 8) + layout["expert_parameters"] * (6 + 12 / 2)
    )


def test_every_planned_layout_can_be_converted_to(tmp_path: Path) -> None:
    model = write_llama(tmp_path / "model", layers=4)
    for one in planned(model):
        sizes = [word for name in ("tp", "pp") for word in (f"--{name}", one[name])]
        command = (
            "convert",
            "--load-dir",
            model,
            "--saver",
            "core",
            "--save-dir",
            tmp_path / "out",
            "--dry-run",
            *sizes,
        )
        assert run(*command).status == 0


def test_gpus_that_are_too_small_are_marked_and_impossible_sizes_named(tmp_path: Path) -> None:
    model = write_llama(tmp_path / "model", layers=4)
    found = planned(model, "--gpu-memory", "200KB")
    assert {one["fits"] for one in found} == {True, False}
    assert all(one["fits"] == (one["training_bytes"] <= 200_000) for one in found)
    shown = run("plan", model, "--gpu-memory", "200KB").out
    assert "too large" in shown
    assert "not possible: TP 16" in shown
    assert_refused(run("plan", model, "--gpus", 7, "--gpu-memory", "many"), 2, "many")


LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16", "vocab_size": 128256,
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "hidden_act": "silu",
    "tie_word_embeddings": False,
}  # fmt: skip
SEARCH = ("--gpus", 16, "--gpu", "h100", "--seq-length", 4096, "--global-batch-size", 48)


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    return tmp_path


def test_layouts_are_ranked_by_the_time_of_a_step(llama: Path) -> None:
    found = planned(llama, *SEARCH, "--top", 5)
    assert [one["rank"] for one in found] == [1, 2, 3, 4, 5]
    seconds = [one["step_seconds"] for one in found]
    assert seconds == sorted(seconds)
    for one in found:
        assert one["tp"] * one["pp"] * one["cp"] * one["dp"] == 16
        assert one["step_seconds"] == pytest.approx(sum(one["terms"].values()))
        memory = dict(one["memory"])
        total = memory.pop("total")
        assert total == pytest.approx(sum(memory.values()))
        assert total <= 80 * 2**30
    assert {"tp", "pp", "vpp", "ep", "etp", "cp", "dp"} <= set(found[0])


def test_a_layout_that_one_asks_for_is_shown_with_its_rank_and_its_loss(llama: Path) -> None:
    (one, *_) = planned(llama, *SEARCH, "--tp", 8, "--pp", 2, "--vpp", 1)
    assert (one["tp"], one["pp"], one["vpp"]) == (8, 2, 1)
    assert one["rank"] > 5
    assert one["limit"] == "communication"
    (one,) = planned(
        llama, *SEARCH, "--tp", 4, "--pp", 4, "--vpp", 4, "--cp", 1, "--gpu-memory", "1GB"
    )
    assert (one["fits"], one["limit"]) == (False, "memory too small")
    shown = run("plan", llama, *SEARCH, "--top", 2).out
    assert "loses by" in shown
    assert "time of the first one: compute" in shown


def test_printed_flags_start_the_planned_layout(llama: Path) -> None:
    """megatron_lite parses them to the same layout."""
    from megatron_lite.planning.command import describe

    for sizes in (("--pp", 3, "--gpus", 24), ("--pp", 4, "--vpp", 2, "--tp", 2), ("--pp", 1)):
        outcome = run("plan", llama, *SEARCH, *sizes, "--top", 1, "--json")
        found = json.loads(outcome.out)
        first, flags = found["layouts"][0], found["flags"]["megatron_lite"]
        described = describe(first["gpus"], ["--load", str(llama), *flags])
        layout = described.sizes.layout
        assert list(layout.stage_layers) == first["stage_layers"]
        assert (layout.tp, layout.pp, layout.vpp) == (first["tp"], first["pp"], first["vpp"])
        assert (described.sizes.cp, described.sizes.dp) == (first["cp"], first["dp"])
        assert described.optimizer.sharding == first["sharding"]


def test_printed_flags_start_the_planned_precision_and_adapters(llama: Path) -> None:
    from megatron_lite.planning.command import describe

    for option, flag in (("--fp8", "--fp8-format"), ("--for=lora", "--lora-rank")):
        found = json.loads(run("plan", llama, *SEARCH, option, "--json").out)
        flags = found["flags"]["megatron_lite"]
        assert flag in flags
        options = describe(16, ["--load", str(llama), *flags]).options
        assert options.dtype == "bfloat16"
        assert (options.fp8 is None) == (option != "--fp8")
        assert "--bf16" in found["flags"]["megatron_lm"]
    both = (*SEARCH, "--fp8", "--for", "lora")
    assert (
        "megatron-lite can't: adapters keep the model's precision" in run("plan", llama, *both).out
    )


def test_a_layout_in_which_ranks_share_a_key_value_head_has_no_flags_of_megatron_lite(
    tmp_path: Path,
) -> None:
    """Megatron core has such layouts, the trainer refuses them."""
    from megatron_lite.planning.command import describe

    few_heads = LLAMA_8B | {"num_key_value_heads": 2}
    (tmp_path / "config.json").write_text(json.dumps(few_heads))
    search = (*SEARCH, "--tp", 4, "--top", 1)
    found = json.loads(run("plan", tmp_path, *search, "--json").out)
    assert found["flags"]["megatron_lite"] == []
    assert (
        "megatron-lite can't: kv_heads = 2 can't be divided" in run("plan", tmp_path, *search).out
    )
    with pytest.raises(LayoutError, match="kv_heads = 2"):
        describe(16, ["--load", str(tmp_path), "--tp", "4", "--seq-length", "4096"])


def test_counts_are_shown_with_and_without_mtp_layers(tmp_path: Path) -> None:
    from tests.trainer.planning.test_command import DEEPSEEK_V3

    (tmp_path / "config.json").write_text(json.dumps(DEEPSEEK_V3))
    search = ("--gpus", 16, "--gpu", "h800", "--seq-length", 4096, "--global-batch-size", 16)
    outcome = run("plan", tmp_path, *search, "--pp", 16, "--json")
    found = json.loads(outcome.out)
    assert f"{found['parameters'] / 1e9:.0f}" == "671"
    assert f"{found['parameters_with_mtp'] / 1e9:.1f}" == "682.6"
    one = found["layouts"][0]
    assert (one["pp"], sum(one["stage_layers"]), one["fits"]) == (16, 61, False)
    assert "682,636,487,424 with MTP layers" in run("plan", tmp_path, *search, "--pp", 16).out


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--tp", 3), "--tp x --pp x --cp = 3 has to divide --gpus 16"),
        (("--tp", 64, "--gpus", 64), "--tp 64 has to divide heads = 32"),
        (("--micro-batch-size", 5), "--global-batch-size 48 --micro-batch-size 5"),
        (("--vpp", 3, "--pp", 1), "--vpp 3 needs --pp 2 or more"),
        (("--vpp", 30, "--pp", 2), "32 layers are fewer than --pp x --vpp stages"),
        (("--gpu", "z80"), "--gpu z80 is unknown"),
        (("--gpu", "a100", "--fp8"), "--gpu a100 has no FP8"),
    ],
)
def test_sizes_that_do_not_divide_are_refused_with_the_flags_of_plan(
    llama: Path, options: tuple[object, ...], named: str
) -> None:
    assert_refused(run("plan", llama, *SEARCH, *options), 2, named)


def test_adapters_alone_fit_where_training_does_not(llama: Path) -> None:
    small = ("--gpus", 1, "--seq-length", 2048, "--global-batch-size", 8, "--gpu-memory", "40GiB")
    whole = planned(llama, *small)[0]
    adapters = planned(llama, *small, "--for", "lora")[0]
    assert not whole["fits"]
    assert adapters["fits"]


def test_a_server_is_planned_with_its_times_its_memory_and_its_flags(llama: Path) -> None:
    found = planned(llama, "--for", "infer", "--gpus", 4, "--seq-length", 2048)
    assert all(type(size) is int for one in found for size in one["memory"].values())
    assert {"tp", "pp", "vpp", "ep", "etp", "cp", "dp"} <= set(found[0])
    rates = [one["tokens_per_second"] for one in found]
    assert rates == sorted(rates, reverse=True)
    for one in found:
        assert one["tp"] * one["pp"] * one["dp"] == one["gpus"] == 4
        assert one["token_seconds"] == pytest.approx(sum(one["terms"].values()))
        assert one["tokens_per_second"] == pytest.approx(one["sequences"] / one["token_seconds"])
        parts = [size for name, size in one["memory"].items() if name != "total"]
        assert one["memory"]["total"] == pytest.approx(sum(parts))
        assert one["memory"]["total"] <= 80 * 2**30
        assert one["fits"]
    shown = run("plan", llama, "--for", "infer").out
    assert "1 h100 of 80.00 GiB" in shown
    assert "a token's time in the first one: compute" in shown
    assert "vLLM:          --max-model-len 4096" in shown


def test_a_server_that_does_not_fit_is_shown_with_its_memory(llama: Path) -> None:
    (one,) = planned(llama, "--for", "infer", "--gpus", 1, "--gpu-memory", "1GiB")
    assert (one["fits"], one["limit"]) == (False, "memory too small")
    assert "0 layouts fit" in run("plan", llama, "--for", "infer", "--gpus", 1, "--gpu-memory", "1GiB").out  # fmt: skip


def test_sequences_that_one_asks_for_are_shared_by_the_replicas(llama: Path) -> None:
    found = planned(llama, "--for", "infer", "--gpus", 8, "--global-batch-size", 16, "--tp", 2)
    assert {one["sequences"] for one in found} == {16}
    assert {one["tp"] for one in found} == {2}


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--cp", 2), "--cp is for training; leave it out with --for infer"),
        (("--micro-batch-size", 2), "--micro-batch-size is for training"),
        (("--moe-token-dispatcher-type", "flex"), "--moe-token-dispatcher-type is for training"),
        (("--gpus", 3, "--tp", 2), "--gpus 3 --tp 2; --tp x --pp has to divide --gpus"),
        (("--gpu", "a100", "--fp8"), "--gpu a100 has no FP8"),
        (("--ep", 2), "--ep 2"),
    ],
)
def test_flags_that_no_server_has_are_refused(
    llama: Path, options: tuple[object, ...], named: str
) -> None:
    assert_refused(run("plan", llama, "--for", "infer", *options), 2, named)


def test_a_cache_needs_a_server(llama: Path) -> None:
    assert_refused(run("plan", llama, "--kv-cache-dtype", "fp8"), 2, "needs --for infer")


def test_python_plans_what_the_command_plans(llama: Path) -> None:
    trained = megaconv.plan_training(
        llama, gpus=64, gpu="h800", seq_length=2048, global_batch_size=128, lora=True, tp=4, top=3
    )
    options = ("--gpus", 64, "--gpu", "h800", "--seq-length", 2048, "--global-batch-size", 128)
    assert trained.to_json()["layouts"] == planned(
        llama, *options, "--for", "lora", "--tp", 4, "--top", 3
    )
    served = megaconv.plan_serving(
        llama, gpus=4, gpu_memory="60GiB", sequences=8, kv_cache_dtype="fp8", top=2
    )
    options = ("--gpus", 4, "--gpu-memory", "60GiB", "--global-batch-size", 8)
    assert served.to_json()["layouts"] == planned(
        llama, *options, "--for", "infer", "--kv-cache-dtype", "fp8", "--top", 2
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"gpus": 0}, "gpus=0: expected 1 to 1,000,000,000"),
        ({"gpus": 2, "micro_batch_size": 0}, "micro_batch_size=0: expected 1 to 1,000,000,000"),
        ({"gpus": 2, "moe_token_dispatcher_type": "ring"}, "expected alltoall or flex"),
        ({"gpus": 2, "gpu": "abacus"}, "abacus is unknown"),
    ],
)
def test_python_refuses_what_can_not_be_planned(
    llama: Path, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        megaconv.plan_training(llama, **arguments)


def test_sizes_are_chosen_without_a_number_of_gpus(tmp_path: Path) -> None:
    model = write_llama(tmp_path / "model", layers=4)
    every = planned(model)
    chosen = planned(model, "--tp", 2, "--pp", 2)
    assert chosen == [one for one in every if (one["tp"], one["pp"]) == (2, 2)]
    assert megaconv.plan(model, tp=2, pp=2).to_json()["layouts"] == chosen


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--pp", 3), "layers = 4 can't be divided over pp x vpp = 3"),
        (("--ep", 2), "this model has no experts"),
        (("--etp", 2), "this model has no experts"),
        (("--tp", 2, "--etp", 2), "--etp 2: this model has no experts"),
        (("--vpp", 2), "--gpus is missing: the time of a step depends on the number of GPUs"),
    ],
)
def test_sizes_that_no_layout_has_are_refused_with_the_reason(
    options: tuple[object, ...], words: str, tmp_path: Path
) -> None:
    model = write_llama(tmp_path / "model", layers=4)
    assert_refused(run("plan", model, *options), 2, words)


def test_a_short_time_is_shown_in_milliseconds() -> None:
    shown = [readable_time(seconds) for seconds in (0.0083, 0.9994, 1.0, 12.345)]
    assert shown == ["8.3 ms", "999.4 ms", "1.00 s", "12.35 s"]


@pytest.mark.parametrize(
    "options",
    [
        "--ep 2 --gpus 4",
        "--etp 2 --gpus 4",
        "--ep 2 --gpus 4 --for infer",
        "--overlap-moe-expert-parallel-comm --gpus 4",
        "--moe-token-dispatcher-type flex --gpus 4 --seq-length 64",
    ],
)
def test_flags_of_experts_are_refused_for_a_model_without_experts(
    options: str, tmp_path: Path
) -> None:
    model = write_llama(tmp_path / "model")
    flag = options.split()[0]
    assert_refused(run("plan", model, *options.split()), 2, flag, "this model has no experts")


def test_flags_of_the_exchange_of_experts_are_not_passed_over() -> None:
    """They need the estimate of a step, also if nothing else asks for it."""
    outcome = run("plan", MIXTURE, "--moe-token-dispatcher-type", "flex")
    assert_refused(outcome, 2, "--gpus is missing")


@pytest.mark.parametrize(
    ("document", "reason"),
    [
        (MASKED_BERT, "bert generates no text"),
        (CLASSIFYING_BERT, "bert generates no text"),
        (T5, "--for infer is for models with a decoder alone"),
        (SCORING_LLAMA, "gives scores, so it generates no text"),
    ],
)
def test_a_model_that_no_server_generates_with_is_refused(
    document: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    place = tmp_path / "config.json"
    place.write_text(json.dumps(document))
    assert_refused(run("plan", place, "--for", "infer", "--gpus", 8), 2, reason, "leave")
    assert run("plan", place).status == 0


def test_a_t5_has_no_times_but_a_list_of_layouts(tmp_path: Path) -> None:
    place = tmp_path / "config.json"
    place.write_text(json.dumps(T5))
    refused = run("plan", place, "--gpus", 4, "--gpu", "h100")
    assert_refused(refused, 2, "with no options but --gpus and --gpu-memory, it lists")
    assert {one["gpus"] for one in planned(place, "--gpus", 4, "--gpu-memory", "80GiB")} == {4}
