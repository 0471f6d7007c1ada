"""`megatron-lite plan`: the numbers that are known of large models, and that of a model that is small."""

import json
from pathlib import Path
from typing import Any

import pytest

from megaconv.errors import UsageError
from megatron_lite.planning.command import describe, main
from tests.encoder_configs import MASKED_BERT, T5
from tests.models import write_llama
from tests.runs import run

GPT3 = "--num-layers 96 --hidden-size 12288 --num-attention-heads 96 --seq-length 2048 --vocab-size 50257"
LLAMA_405B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16", "vocab_size": 128256,
    "hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": 126, "num_attention_heads": 128,
    "num_key_value_heads": 8, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
    "hidden_act": "silu", "tie_word_embeddings": False,
}  # fmt: skip
DEEPSEEK_V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "torch_dtype": "bfloat16", "vocab_size": 129280,
    "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048, "num_hidden_layers": 61,
    "num_nextn_predict_layers": 1, "num_attention_heads": 128, "num_key_value_heads": 128, "n_shared_experts": 1,
    "n_routed_experts": 256, "routed_scaling_factor": 2.5, "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64,
    "v_head_dim": 128, "qk_nope_head_dim": 128, "topk_method": "noaux_tc", "n_group": 8, "topk_group": 4,
    "num_experts_per_tok": 8, "moe_layer_freq": 1, "first_k_dense_replace": 3, "norm_topk_prob": True,
    "scoring_func": "sigmoid", "hidden_act": "silu", "max_position_embeddings": 163840, "rms_norm_eps": 1e-6,
    "rope_theta": 10000, "attention_bias": False, "tie_word_embeddings": False,
}  # fmt: skip


def planned(capsys: pytest.CaptureFixture[str], words: str) -> dict[str, Any]:
    assert main([*words.split(), "--json"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    found: dict[str, Any] = json.loads(out)
    return found


def test_gpt3_takes_what_its_paper_and_megatrons_formula_say(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """174.6 billion parameters; without a distributed optimizer 18 bytes of each; arXiv:2104.04473 trains it at TP 8, PP 8."""
    found = planned(capsys, f"{GPT3} --world-size 1024 --tp 8 --pp 8 --global-batch-size 1536")
    assert found["parameters"] == 96 * (12 * 12288**2 + 13 * 12288) + (50257 + 2048 + 2) * 12288
    assert f"{found['parameters'] / 1e9:.1f}" == "174.6"
    assert found["layout"]["dp"] == 16
    assert found["batch"]["microbatches"] == 96
    assert found["bubble"] == pytest.approx(7 / (96 + 7))
    assert all(stage["state_bytes"] == 18 * stage["parameters"] for stage in found["stages"])
    between = found["stages"][1:-1]
    assert {stage["parameters"] for stage in between} == {
        12 * (12 * 12288**2 // 8 + 7 * 12288 // 8 + 6 * 12288)
    }
    messages = {
        item["kind"]: item["bytes"] for item in between[0]["communication"] if item["group"] == "pp"
    }
    assert messages == {"send": 96 * 2 * 2048 * 12288 * 2}


def test_llama_3_405b_takes_what_its_shape_says(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_405B))
    flags = "--tp 8 --pp 18 --sequence-parallel --use-distributed-optimizer --seq-length 8192 --global-batch-size 2016"
    found = planned(capsys, f"--load {tmp_path / 'config.json'} --world-size 16128 {flags}")
    assert found["parameters"] == 405_853_388_800
    assert found["layout"]["dp"] == 112
    layer = 2 * 16384 * (16384 + 1024) + 3 * 16384 * 53248
    (one,) = {stage["parameters"] for stage in found["stages"][1:-1]}
    assert one == 7 * (layer // 8 + 2 * 16384)
    assert found["stages"][1]["state_bytes"] == round(one * (6 + 12 / 112))
    assert found["not_trained_yet"] is None


LLAMA_8B = {
    **LLAMA_405B, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8,
}  # fmt: skip
GB = 10**9


def test_llama_3_8b_leaves_20_gb_of_each_of_eight_gpus_if_parameters_are_sharded(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """bf16, sequences of 8,192 tokens, selective recomputation, no other parallelism, on 80 GB each."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    flags = "--seq-length 8192 --global-batch-size 64 --bf16 --recompute-granularity selective"
    command = f"--load {tmp_path / 'config.json'} --world-size 8 {flags}"
    found = {
        strategy: planned(capsys, f"{command} --data-parallel-sharding-strategy {strategy}")
        for strategy in ("optim", "optim_grads", "optim_grads_params")
    }
    count = found["optim"]["parameters"]
    assert count == 8_030_261_248
    (kept,) = (plan["stages"][0] for plan in [found["optim_grads_params"]])
    assert kept["state_bytes"] == count * 2
    totals = [plan["stages"][0]["bytes"] / GB for plan in found.values()]
    assert totals == sorted(totals, reverse=True)
    assert totals[-1] < 60


def test_deepseek_v3_is_planned_though_it_may_not_be_trained_yet(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """671,026,419,200 parameters without the layer that predicts a further token; experts have their own data-parallel ranks."""
    (tmp_path / "config.json").write_text(
        json.dumps({**DEEPSEEK_V3, "num_nextn_predict_layers": 0})
    )
    layers = "--decoder-first-pipeline-num-layers 3 --decoder-last-pipeline-num-layers 2"
    flags = f"--pp 16 --ep 64 {layers} --use-distributed-optimizer --seq-length 4096 --global-batch-size 15360"
    found = planned(capsys, f"--load {tmp_path} --world-size 2048 {flags}")
    assert found["parameters"] == 671_026_419_200
    assert (found["layout"]["dp"], found["layout"]["expert_dp"]) == (128, 2)
    rows = 120 * 4096 * 8 * (2 * 7168 + 1) * 2
    (exchanged,) = (item for item in found["stages"][1]["communication"] if item["group"] == "ep")
    assert exchanged["bytes"] == 4 * (2 * rows + 120 * 256 * 8)


def test_a_plan_for_people_names_every_stage_and_group(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    model = write_llama(tmp_path / "model", layers=4)
    assert (
        main(
            f"--load {model} --world-size 8 --tp 2 --pp 2 --seq-length 16 --global-batch-size 8".split()
        )
        == 0
    )
    out = capsys.readouterr().out
    assert "TP 2, PP 2" in out
    assert "DP 2" in out
    for group in ("tp", "replicas", "pp", "world"):
        assert f"\n{group:>8}  " in out


def test_one_rank_has_no_traffic(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["--load", str(write_llama(tmp_path / "model"))]) == 0
    assert "hands over" not in capsys.readouterr().out


def test_plan_refuses_the_flags_that_pretrain_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(f"{GPT3} --tp 7".split()) == 2
    assert main(f"{GPT3} --world-size 12 --tp 8".split()) == 2
    assert main(f"{GPT3} --world-size 0".split()) == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 3
    assert "--world-size 0 must be 1 or more" in errors[2]
    assert "12 processes can't be divided" in errors[1]
    with pytest.raises(UsageError, match="--vocab-size is missing"):
        describe(1, GPT3.replace("--vocab-size 50257", "").split())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--dpo", "--dpo needs --load, which is the reference model"),
        ("--lora-alpha 3", "--lora-alpha requires --lora-rank"),
        ("--lora-rank 4 --lora-targets rotor", "--lora-targets rotor: is no matrix of this model"),
        ("--lora-rank 4 --lora-targets q_proj,k_proj", "leave out the commas: q_proj k_proj"),
        ("--lora-load adapter", "give --lora-rank and --lora-targets in place of --lora-load"),
        ("--lora-rank 4 --lora-modules-to-save norm", "is no embedding and no head of this model"),
        ("--lora-rank 4 --optimizer muon", "is for whole matrices"),
        ("--grpo --beta 0.1", "--beta needs --load, which is the reference model"),
        ("--grpo --max-completion-length 2048", "has no room for a prompt"),
        ("--grpo --context-parallel-size 2", "--grpo generates one token at a time"),
        ("--grpo --dpo", "--grpo and --dpo are two objectives"),
        ("--dpo --beta 0.1", "--beta is a flag of --grpo; with --dpo, give --dpo-beta"),
        ("--seq-length -5", "--seq-length -5 must be 1 or more"),
    ],
)
def test_flags_of_objectives_and_adapters_are_refused_as_in_a_run(
    words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = f"{GPT3} {words}".split()
    if words in ("--grpo --dpo", "--dpo --beta 0.1"):
        asked += ["--load", "model"]
    assert main(asked) == 2
    assert message in capsys.readouterr().err


@pytest.fixture
def llama_8b(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    return f"--load {tmp_path} --seq-length 2048 --global-batch-size 32 --world-size 8"


def test_adapters_of_an_8b_model_take_a_gpu_that_training_all_weights_does_not_fit(
    llama_8b: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """41,943,040 parameters at rank 16 on all linear layers, the number that peft prints."""
    whole = planned(capsys, llama_8b)
    lora = planned(capsys, f"{llama_8b} --lora-rank 16")
    (full,), (adapted,) = whole["stages"], lora["stages"]
    assert adapted["adapter_parameters"] == 41_943_040
    assert adapted["state_bytes"] == adapted["parameters"] * 2 + 41_943_040 * 18
    assert full["bytes"] > whole["gpu_memory"] > adapted["bytes"]
    # A third of the products with frozen matrices is left out.
    assert 0.6 < lora["terms"]["compute"] / whole["terms"]["compute"] < 0.75
    assert main([*llama_8b.split(), "--lora-rank", "16"]) == 0
    out = capsys.readouterr().out
    assert "41,943,040 parameters of adapters" in out
    assert "% of the 80.00 GiB of h100\n" in out
    assert main(llama_8b.split()) == 0
    assert "so it does not fit" in capsys.readouterr().out


def test_moments_in_bf16_take_four_bytes_less(
    llama_8b: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = "--use-precision-aware-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16"
    (wide,), (narrow,) = (
        planned(capsys, f"{llama_8b} --adam-beta2 0.95 {flags}")["stages"] for flags in ("", words)
    )
    assert wide["state_bytes"] == wide["parameters"] * 18
    assert narrow["state_bytes"] == narrow["parameters"] * 14
    assert wide["widened_bytes"] == 0
    assert narrow["widened_bytes"] == 2 * 2**24 * 4


def test_gradients_in_bf16_take_two_bytes_less(
    llama_8b: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = "--bf16 --use-precision-aware-optimizer --main-grads-dtype bf16"
    sharded = f"{words} --world-size 4 --data-parallel-sharding-strategy optim_grads"
    (narrow,), (part,) = (
        planned(capsys, f"{llama_8b} {flags}")["stages"] for flags in (words, sharded)
    )
    assert narrow["state_bytes"] == narrow["parameters"] * 16
    assert narrow["widened_bytes"] == 64 << 20
    rest = narrow["activation_bytes"] + narrow["passing_bytes"]
    assert narrow["bytes"] == narrow["state_bytes"] + narrow["widened_bytes"] + rest
    assert part["state_bytes"] == part["parameters"] * (2 + 2 / 4 + 12 / 4)


def test_embedding_and_head_beside_adapters_have_gradients_and_state(
    llama_8b: str, capsys: pytest.CaptureFixture[str]
) -> None:
    lora = planned(capsys, f"{llama_8b} --lora-rank 16")
    words = f"{llama_8b} --lora-rank 16 --lora-modules-to-save embed_tokens lm_head"
    whole = planned(capsys, words)
    (adapted,), (beside,) = lora["stages"], whole["stages"]
    of_vocabulary = 2 * 128_256 * 4096
    assert beside["state_bytes"] - adapted["state_bytes"] == of_vocabulary * 16
    assert beside["adapter_parameters"] == adapted["adapter_parameters"]
    of_rows = f"{llama_8b} --lora-rank 16 --lora-trainable-token-indices 7 128000-128002"
    (rows,) = planned(capsys, of_rows)["stages"]
    assert rows["adapter_parameters"] - adapted["adapter_parameters"] == 2 * 4 * 4096
    assert rows["state_bytes"] - adapted["state_bytes"] == 2 * 4 * 4096 * 18
    assert whole["terms"]["compute"] > lora["terms"]["compute"]
    completions = f"{words} --grpo --beta 0.1 --max-completion-length 64"
    (with_reference,) = planned(capsys, completions)["stages"]
    assert with_reference["reference_bytes"] == of_vocabulary * 2
    assert main(words.split()) == 0
    assert beside["whole_parameters"] == of_vocabulary
    expected = f"and {of_vocabulary:,} of modules that are trained whole; all others are frozen"
    assert expected in capsys.readouterr().out


def test_words_of_finetune_are_planned_as_they_stand(
    llama_8b: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The data may be missing. Several ranks shard the optimizer's state, as in `finetune MODEL DATA`."""
    load, flags = llama_8b.split()[1], " ".join(llama_8b.split()[2:])
    short = planned(capsys, f"{load} chats.jsonl {flags} --epochs 3")
    assert short == planned(capsys, f"{load} {flags}")
    assert short == planned(capsys, f"{llama_8b} --use-distributed-optimizer")
    recipe = planned(capsys, f"{load} --recipe llama3-8b-lora {flags}")
    assert recipe["stages"][0]["adapter_parameters"] == 41_943_040
    assert main(f"{load} chats.jsonl more {flags}".split()) == 2
    assert main(f"{load} {llama_8b}".split()) == 2
    errors = capsys.readouterr().err.splitlines()
    assert "plan takes MODEL and DATA first, then flags" in errors[0]
    assert "--load is already set by MODEL" in errors[1]


def test_a_pair_is_two_sequences_and_its_reference_is_measured_before_the_first_step(
    llama_8b: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pairs = planned(capsys, f"{llama_8b} --dpo --lora-rank 16")
    texts = llama_8b.replace("--global-batch-size 32", "--global-batch-size 64")
    same = planned(capsys, f"{texts} --micro-batch-size 2 --lora-rank 16")
    assert pairs["batch"] == same["batch"]
    assert pairs["stages"][0]["bytes"] == same["stages"][0]["bytes"]
    # The head is computed once more.
    assert 1 < pairs["step_seconds"] / same["step_seconds"] < 1.1
    # A pass without gradients takes about half of the time of a step with frozen weights.
    assert 0.3 < pairs["reference_seconds"] / same["step_seconds"] < 0.6
    without = planned(capsys, f"{llama_8b} --dpo --dpo-loss simpo --lora-rank 16")
    assert "reference_seconds" not in without
    assert without["step_seconds"] == pairs["step_seconds"]


def test_rated_answers_are_measured_with_another_answer_before_each_step(
    llama_8b: str, capsys: pytest.CaptureFixture[str]
) -> None:
    rated = planned(capsys, f"{llama_8b} --kto --lora-rank 16")
    same = planned(capsys, f"{llama_8b} --lora-rank 16")
    assert rated["stages"][0]["bytes"] == same["stages"][0]["bytes"]
    measuring = rated["terms"]["log-probabilities"]
    assert 0.3 < measuring / same["step_seconds"] < 0.6
    assert rated["reference_seconds"] == 2 * measuring
    assert main([*f"{llama_8b} --kto --lora-rank 16".split()]) == 0
    assert "s for each step's rated answers" in capsys.readouterr().out


def test_a_teacher_is_planned_with_its_own_size(
    llama_8b: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A student of an eighth of the layers learns from the whole model."""
    teacher = Path(llama_8b.split()[1])
    config = json.loads(
        (teacher / "config.json").read_text() if teacher.is_dir() else teacher.read_text()
    )
    student = tmp_path / "student" / "config.json"
    student.parent.mkdir()
    student.write_text(json.dumps({**config, "num_hidden_layers": 4}))
    words = llama_8b.replace(str(teacher), str(student))
    alone = planned(capsys, words)
    taught = planned(capsys, f"{words} --teacher-load {teacher}")
    (one,), (two,) = alone["stages"], taught["stages"]
    assert (one["teacher_bytes"], two["parameters"]) == (0, one["parameters"])
    batch = taught["batch"]
    tokens = batch["microbatches"] * batch["micro"] * batch["sequence"]
    assert two["teacher_bytes"] == 2 * (8_030_261_248 + tokens * 4096)
    assert two["bytes"] == one["bytes"] + two["teacher_bytes"]
    assert taught["terms"]["teacher"] > alone["terms"]["compute"]
    assert main([*words.split(), "--teacher-load", str(teacher)]) == 0
    assert "GiB of the teacher" in capsys.readouterr().out
    student.write_text(json.dumps({**config, "vocab_size": 200_000}))
    assert main([*words.split(), "--teacher-load", str(teacher)]) == 2
    assert "has 128,256 tokens, and the trained model 200,000" in capsys.readouterr().err


def test_a_step_of_completions_generates_measures_and_updates(
    llama_8b: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = f"{llama_8b} --use-distributed-optimizer --grpo --num-generations 4"
    plain = planned(capsys, words)
    twice = planned(capsys, f"{words} --beta 0.04 --num-iterations 2")
    (one,), (two,) = plain["stages"], twice["stages"]
    assert one["reference_bytes"] == 0
    assert two["reference_bytes"] == 2 * two["parameters"]
    # 16 completions on each rank: 32 layers with 8 heads of 128 keys and values in bf16.
    assert one["generation_bytes"] == 16 * 2048 * 32 * 2 * 8 * 128 * 2
    assert "log-probabilities" not in plain["terms"]
    assert twice["terms"]["generation"] == plain["terms"]["generation"] > 0
    assert twice["terms"]["compute"] > 2 * plain["terms"]["compute"]
    assert twice["step_seconds"] == pytest.approx(sum(twice["terms"].values()))
    assert main([*words.split(), "--beta", "0.04"]) == 0
    out = capsys.readouterr().out
    assert "generation takes 4.00 GiB for 16 completions at a time" in out
    assert "14.96 GiB of the reference model" in out


def test_a_reward_model_has_one_score_in_place_of_logits_and_a_pair_two_sequences(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(LLAMA_405B))
    words = f"--load {config} --world-size 128 --tp 8 --pp 2 --seq-length 4096"
    pairs = planned(capsys, f"{words} --global-batch-size 16 --reward-modeling")
    texts = planned(capsys, f"{words} --global-batch-size 32 --micro-batch-size 2")
    assert pairs["batch"] == texts["batch"]
    assert texts["parameters"] - pairs["parameters"] == (128256 - 1) * 16384
    first, last = (
        [plan["stages"][rank]["activation_bytes"] for plan in (texts, pairs)] for rank in (0, 1)
    )
    assert first[0] == first[1]
    padded_vocab = 129024
    gradient_of_head = (padded_vocab // 8 - 1) * 16384 * 2
    input_of_head = 2 * 4096 * 16384 * 2  # scores are those of each sequence's last token
    assert last[0] - last[1] == gradient_of_head + input_of_head
    assert pairs["step_seconds"] < texts["step_seconds"]


def test_a_reward_model_is_planned_without_mtp_layers(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    config = tmp_path / "config.json"
    counts = []
    for layers in (1, 0):
        config.write_text(json.dumps({**DEEPSEEK_V3, "num_nextn_predict_layers": layers}))
        words = f"--load {config} --reward-modeling --seq-length 512 --global-batch-size 8"
        counts.append(planned(capsys, words)["stages"][0]["parameters"])
    assert counts[0] == counts[1]
    assert main(f"{GPT3} --reward-modeling".split()) == 2
    assert "--reward-modeling needs --load" in capsys.readouterr().err


def test_copies_of_offloaded_activations_take_time_where_the_link_to_main_memory_is_slow(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Grace's link is seven times as fast as PCIe 5.0: it hides the copies of a GPT-3 layer."""
    words = f"{GPT3} --world-size 64 --tp 8 --sequence-parallel"
    slow, fast, resident = (
        planned(capsys, f"{words} --gpu {gpu} --cpu-offloading-num-layers {layers}")
        for gpu, layers in (("a100", 90), ("gh200", 90), ("a100", 0))
    )
    assert slow["offloaded_bytes"] == fast["offloaded_bytes"] > resident["offloaded_bytes"] == 0
    assert fast["offload_seconds"] == resident["offload_seconds"] == 0
    assert slow["offload_seconds"] == pytest.approx(slow["step_seconds"] - resident["step_seconds"])
    assert slow["offload_seconds"] > 0
    asked = [*words.split(), "--cpu-offloading-num-layers", "90", "--gpu", "a100"]
    assert main(asked) == 0
    out, _ = capsys.readouterr()
    assert f"their copies at 32 GB/s add {slow['offload_seconds']:.2f} s to a step" in out


@pytest.mark.parametrize(
    ("document", "reason"),
    [
        (MASKED_BERT, "norms after the residual sums, as the original BERT"),
        (T5, "the model is a T5 of transformers"),
    ],
)
def test_a_model_that_can_not_be_trained_is_refused_with_the_plan_that_works(
    document: dict[str, Any], reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = tmp_path / "config.json"
    place.write_text(json.dumps(document))
    assert main([str(place)]) == 2
    said = capsys.readouterr().err
    assert reason in said
    assert f"`megaconv plan {place}` lists" in said
    assert "--saver" not in said
    assert run("plan", place).status == 0
