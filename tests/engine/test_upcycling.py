"""`convert --num-experts`: mixtures made from dense models compute what these compute; and what is refused."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import megaconv
from megaconv.errors import CheckpointError, NotExpressible, UnsupportedInput
from tests import transformers_oracle as oracle
from tests import upcycling_oracle
from tests.conftest import FIXTURES
from tests.engine.test_new_vocabulary import KILL_LATE
from tests.forks import start
from tests.megatron_oracle import for_this_release
from tests.models import write_llama
from tests.runs import assert_refused, finish, run

DENSE = {
    "llama": "mixtral",
    "llama, linear rope scaling": "mixtral",
    "mistral": "mixtral",
    "phi3": "mixtral",
    "exaone": "mixtral",
    "iquestcoder": "mixtral",
    "qwen3": "qwen3_moe",
    "qwen3, tied": "qwen3_moe",
    "olmo2": "flex_olmo",
    "granite": "granite_moe",
    "granite_swa": "granite_moe_swa",
    "cohere2": "cohere2_moe",
}
"""Variants of dense models -> the family of the mixture."""
ALL = {**oracle.VARIANTS, **oracle.BEYOND_MEGATRON, **oracle.CONVERTED}
OTHERS = [name for name in ALL if name not in DENSE]


def hashes(model: Path) -> dict[str, str]:
    return {str(key): value for key, value in megaconv.fingerprint(model).tensors.items()}


def logits(model: Path, tokens: torch.Tensor) -> torch.Tensor:
    return oracle.compute(oracle.load(model), tokens)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("llama") / "hf", layers=2, ffn=64, dtype="float32")


@pytest.mark.oracle
@pytest.mark.parametrize("name", DENSE)
def test_a_mixture_computes_what_the_dense_model_computes(name: str, tmp_path: Path) -> None:
    oracle.create(ALL[name], tmp_path / "hf")
    words: dict[str, Any] = {"saver": "hf", "num_experts": 8, "workers": 1, "verify": True}
    made = megaconv.convert(tmp_path / "hf", tmp_path / "out", **words)
    assert made.header.config.family == DENSE[name]
    tokens = torch.randint(7, 120, (2, 12))
    expected = logits(tmp_path / "hf", tokens)
    found = logits(tmp_path / "out", tokens)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.oracle
@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_each_other_model_is_refused_or_computed_as_before(name: str, tmp_path: Path) -> None:
    oracle.create(ALL[name], tmp_path / "hf")
    try:
        megaconv.convert(tmp_path / "hf", tmp_path / "out", saver="hf", num_experts=8)
    except (NotExpressible, UnsupportedInput):
        return
    tokens = torch.randint(7, 120, (2, 12))
    expected = logits(tmp_path / "hf", tokens)
    torch.testing.assert_close(logits(tmp_path / "out", tokens), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.oracle
@pytest.mark.parametrize(("parts", "topk"), [(1, 1), (1, 3), (2, 2), (2, 4), (4, 4)])
def test_experts_that_are_parts_compute_the_same(
    parts: int, topk: int, llama: Path, tmp_path: Path
) -> None:
    words: dict[str, Any] = {"moe_upcycling_granularity": parts, "moe_router_topk": topk}
    megaconv.convert(llama, tmp_path / "out", saver="hf", num_experts=8, **words)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["intermediate_size"] == 64 // parts
    assert (config["num_local_experts"], config["num_experts_per_tok"]) == (8, topk)
    tokens = torch.randint(7, 120, (2, 12))
    expected = logits(llama, tokens)
    torch.testing.assert_close(logits(tmp_path / "out", tokens), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.oracle
def test_the_weights_are_those_that_megatron_core_makes(llama: Path, tmp_path: Path) -> None:
    words: dict[str, Any] = {"saver": "core", "transformer_impl": "local"}
    words["options"] = for_this_release()
    megaconv.convert(llama, tmp_path / "dense", **words)
    megaconv.convert(llama, tmp_path / "mixture", num_experts=4, **words)
    other = write_llama(tmp_path / "other", layers=2, ffn=64, dtype="float32", seed=1)
    megaconv.convert(other, tmp_path / "others", num_experts=4, **words)
    made, of_other = upcycling_oracle.differing_weights(
        tmp_path / "dense", tmp_path / "mixture", tmp_path / "others"
    )
    assert made == []
    assert of_other


@pytest.mark.parametrize("parts", [1, 2])
def test_mixtures_are_made_between_all_formats(parts: int, llama: Path, tmp_path: Path) -> None:
    experts = ["--num-experts", 4, "--moe-upcycling-granularity", parts]
    layout = ["--tp", "2", "--pp", "2", "--ep", "2", "--etp", "1"]
    hf = run("convert", llama, tmp_path / "hf", "--saver", "hf", *experts)
    assert hf.status == 0, hf.err
    core = ["convert", llama, tmp_path / "core", "--saver", "core", *layout, *experts]
    assert run(*core, "--ckpt-format", "torch_dist", "--verify").status == 0
    assert hashes(tmp_path / "core") == hashes(tmp_path / "hf")
    assert run("convert", llama, tmp_path / "dense", "--saver", "core", "--tp", "2").status == 0
    back = ["convert", tmp_path / "dense", tmp_path / "back", "--saver", "hf", *experts]
    assert run(*back).status == 0
    assert hashes(tmp_path / "back") == hashes(tmp_path / "hf")
    assert run("verify", tmp_path / "back").status == 0
    record = json.loads((tmp_path / "back" / "megaconv.json").read_text())
    assert record["provenance"]["options"]["--num-experts"] == 4


def test_the_experts_are_of_several_models_in_turn(llama: Path, tmp_path: Path) -> None:
    others = [
        write_llama(tmp_path / f"m{seed}", layers=2, ffn=64, dtype="float32", seed=seed)
        for seed in (1, 2)
    ]
    core = tmp_path / "core"
    assert run("convert", others[1], core, "--saver", "core", "--tp", "2").status == 0
    words = ["convert", llama, tmp_path / "out", "--saver", "hf", "--num-experts", 4]
    outcome = run(*words, "--experts-of", others[0], "--experts-of", core)
    assert outcome.status == 0, outcome.err
    assert f"in turn of {others[0]}, {core}" in outcome.err
    found, dense = hashes(tmp_path / "out"), [hashes(other) for other in others]
    for expert in range(4):
        for matrix in ("gate", "up", "down"):
            of_model = dense[expert % 2][f"layers.1.mlp.{matrix}.weight"]
            assert found[f"layers.1.mlp.experts.{expert}.{matrix}.weight"] == of_model
    assert found["layers.1.attn.q.weight"] == hashes(llama)["layers.1.attn.q.weight"]
    inputs = json.loads((tmp_path / "out" / "megaconv.json").read_text())["provenance"]["inputs"]
    assert [(each["as"], each["name"]) for each in inputs[1:]] == [
        ("experts", "m1"),
        ("experts", "core"),
    ]


def test_chosen_layers_and_a_larger_vocabulary_go_along(llama: Path, tmp_path: Path) -> None:
    other = write_llama(tmp_path / "other", layers=2, ffn=64, dtype="float32", seed=1)
    words = ["convert", llama, tmp_path / "out", "--saver", "hf", "--num-experts", 2]
    more = ["--experts-of", llama, "--experts-of", other, "--layers", "1", "--vocab-size", 136]
    outcome = run(*words, *more)
    assert outcome.status == 0, outcome.err
    assert "1 layer of the input: 1\neach MLP becomes 2 experts of a mixtral" in outcome.err
    found = hashes(tmp_path / "out")
    assert found["layers.0.mlp.experts.0.up.weight"] == hashes(llama)["layers.1.mlp.up.weight"]
    assert found["layers.0.mlp.experts.1.up.weight"] == hashes(other)["layers.1.mlp.up.weight"]
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["num_hidden_layers"], config["vocab_size"]) == (1, 136)


@pytest.mark.parametrize("parts", [1, 2])
def test_changed_weights_are_refused(parts: int, llama: Path, tmp_path: Path) -> None:
    megaconv.convert(llama, tmp_path / "hf", saver="hf")
    file = tmp_path / "hf" / "model.safetensors"
    tensors = load_file(file)
    name = "mlp.up_proj" if parts == 1 else "self_attn.q_proj"  # an MLP in parts isn't compared
    tensors[f"model.layers.1.{name}.weight"][0, 0] += 1
    save_file(tensors, file, {"format": "pt"})
    words = ["convert", tmp_path / "hf", tmp_path / "out", "--saver", "hf", "--num-experts", 4]
    outcome = run(*words, "--moe-upcycling-granularity", parts)
    assert outcome.status == 3
    assert "1 tensor with other values than were written: layers.1." in outcome.err
    assert not (tmp_path / "out").exists()


def test_a_killed_run_is_not_continued_with_experts_of_another_model(
    llama: Path, tmp_path: Path
) -> None:
    other = write_llama(tmp_path / "other", layers=2, ffn=64, dtype="float32", seed=1)
    words = ["convert", llama, tmp_path / "out", "--saver", "hf", "--resume", "--workers", 1]
    words += ["--num-experts", 4, "--experts-of"]
    killed = finish(start(*words, llama, before=KILL_LATE))
    assert killed.status == -signal.SIGKILL, killed
    outcome = run(*words, other)
    assert outcome.status == 0, outcome.err
    megaconv.convert(llama, tmp_path / "new", saver="hf", num_experts=4, experts_of=[other])
    assert hashes(tmp_path / "out") == hashes(tmp_path / "new")


def test_keys_of_the_dense_model_stay(tmp_path: Path) -> None:
    settings = {"note": [1], "attention_dropout": 0.1, "initializer_range": 0.5, "use_cache": False}
    others = {"auto_map": {"a": "b"}, "dtype": "bfloat16", "num_local_experts_of": 3}
    source = write_llama(tmp_path / "hf", layers=2, extra_config=settings | others)
    megaconv.convert(source, tmp_path / "out", saver="hf", num_experts=4, dtype="fp32")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert {key: config.get(key) for key in settings} == settings
    assert (config["model_type"], config["architectures"]) == ("mixtral", ["MixtralForCausalLM"])
    assert not {"auto_map", "num_local_experts_of"} & config.keys()
    assert [config[key] for key in ("dtype", "torch_dtype") if key in config] == ["float32"]
    assert run("convert", source, tmp_path / "core", "--saver", "core").status == 0
    words = ["convert", tmp_path / "core", tmp_path / "back", "--saver", "hf", "--config", source]
    outcome = run(*words, "--num-experts", 4)
    assert (outcome.status, outcome.err.count("\n")) == (0, 1), outcome.err


def test_optimizer_state_is_left_out_and_refused(tmp_path: Path) -> None:
    trained = FIXTURES / "core-llama-optim-tp2pp2" / "checkpoint"
    words = ["convert", trained, tmp_path / "out", "--saver", "core", "--num-experts", "4"]
    assert_refused(run(*words, "--optimizer"), 2, "--optimizer", "--num-experts")
    assert run(*words).status == 0
    assert not megaconv.inspect(tmp_path / "out").header.has_optimizer


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--num-experts", "1"], "'--num-experts': 1 is not in the range"),
        (
            ["--num-experts", "4", "--moe-router-topk", "5"],
            "a token has 5 experts (--moe-router-topk)",
        ),
        (
            ["--num-experts", "4", "--moe-upcycling-granularity", "4"],
            "a token has 8 experts by default",
        ),
        (["--moe-router-topk", "2"], "has no effect without --num-experts"),
        (["--experts-of", "x"], "has no effect without --num-experts"),
        (["--moe-upcycling-granularity", "2"], "has no effect without --num-experts"),
        (
            ["--num-experts", "4", "--moe-upcycling-granularity", "3"],
            "--num-experts 4: expected a multiple of --moe-upcycling-granularity 3",
        ),
        (
            ["--num-experts", "6", "--moe-upcycling-granularity", "3"],
            "the width of the MLPs, 64, can't be divided by it",
        ),
        (
            ["--num-experts", "2", *(word for _ in range(3) for word in ("--experts-of", "x"))],
            "3 models are 3 experts; expected --num-experts 3 or more",
        ),
        (["--num-experts", "4", "--base", "."], "leave --base out"),
        (["--num-experts", "4", "--experts-of", "/no/such"], "/no/such: no such file or directory"),
    ],
)
def test_impossible_options_are_one_line(
    words: list[str], message: str, llama: Path, tmp_path: Path
) -> None:
    assert_refused(run("convert", llama, tmp_path / "out", "--saver", "hf", *words), 2, message)
    assert not (tmp_path / "out").exists()


def test_models_of_other_shapes_are_refused(llama: Path, tmp_path: Path) -> None:
    wider = write_llama(tmp_path / "wider", layers=2, ffn=96, dtype="float32")
    halves = write_llama(tmp_path / "halves", layers=2, ffn=64, dtype="bfloat16")
    words = ["convert", llama, tmp_path / "out", "--saver", "hf", "--num-experts", 2]
    refused = run(*words, "--experts-of", wider)
    assert_refused(refused, 3, "layers.0.mlp.down.weight has the shape [32, 96]", "[32, 64] in")
    refused = run(*words, "--experts-of", halves)
    assert_refused(refused, 3, "is bfloat16, and float32 in", "--dtype")


def test_models_without_a_mixture_are_refused(tmp_path: Path) -> None:
    oracle.create(oracle.VARIANTS["qwen2"], tmp_path / "qwen2")
    with pytest.raises(NotExpressible, match=r"other parts of this qwen2.*attention\.qkv_bias"):
        megaconv.convert(tmp_path / "qwen2", tmp_path / "o", saver="hf", num_experts=4)
    oracle.create(oracle.MIXTURES["mixtral"], tmp_path / "mixtral")
    with pytest.raises(UnsupportedInput, match="experts already"):
        megaconv.convert(tmp_path / "mixtral", tmp_path / "o", saver="hf", num_experts=4)


def test_adapters_and_models_without_a_family_are_refused(llama: Path, tmp_path: Path) -> None:
    case = FIXTURES / "peft-llama-all-linear"
    words = ["--saver", "hf", "--num-experts", "4"]
    both = run("convert", case / "base", tmp_path / "o", *words, "--adapter", case / "adapter")
    assert_refused(both, 2, "--num-experts and --adapter", "merge the adapter first")
    of_adapter = run(
        "convert", case / "base", tmp_path / "o", *words, "--experts-of", case / "adapter"
    )
    assert_refused(of_adapter, 3, "is an adapter")
    unknown = tmp_path / "unknown"
    unknown.mkdir()
    (unknown / "config.json").write_text('{"model_type": "unheard_of", "architectures": ["X"]}')
    (unknown / "model.safetensors").write_bytes((llama / "model.safetensors").read_bytes())
    with pytest.raises(CheckpointError, match="needs a model of a known family"):
        megaconv.convert(unknown, tmp_path / "o", saver="hf", num_experts=4)
