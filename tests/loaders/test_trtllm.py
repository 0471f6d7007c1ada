"""Reading TensorRT-LLM's checkpoints: files of nvidia-modelopt 0.47, our own outputs, and refusals."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import megaconv
from megaconv.errors import CheckpointError
from tests.conftest import FIXTURES
from tests.models import write_llama
from tests.runs import run

TRTLLM = FIXTURES / "trtllm"
LLAMA, LLAMA_FP8 = TRTLLM / "llama-tp2pp2", TRTLLM / "llama-fp8-tp2pp1"
LAYOUTS: list[dict[str, Any]] = [{}, {"tp": 2}, {"pp": 2}, {"tp": 2, "pp": 2}]


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_checkpoint_of_modelopt_is_the_model_that_it_was_made_from(family: str) -> None:
    found = megaconv.fingerprint(TRTLLM / f"{family}-tp2pp2")
    assert found.weights == megaconv.fingerprint(TRTLLM / family).weights


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_fp8_is_read_as_torch_multiplies_it(family: str, tmp_path: Path) -> None:
    source = TRTLLM / f"{family}-fp8-tp2pp1"
    megaconv.convert(source, tmp_path / "hf", saver="hf")
    made = load_file(tmp_path / "hf/model.safetensors")
    ranks = [load_file(source / f"rank{rank}.safetensors") for rank in (0, 1)]
    for layer in range(1 if family == "llama" else 2):
        path = f"transformer.layers.{layer}.mlp.fc"
        parts = [
            rank[f"{path}.weight"].float() * rank[f"{path}.weights_scaling_factor"]
            for rank in ranks
        ]
        expected = torch.cat(parts).bfloat16()
        if family == "llama":
            assert torch.equal(made[f"model.layers.{layer}.mlp.gate_proj.weight"], expected)
        else:
            assert torch.equal(made[f"transformer.h.{layer}.mlp.c_fc.weight"], expected.T)


def test_scales_that_are_left_out_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    assert "trtllm, TP 2, PP 1, FP8" in run("inspect", LLAMA_FP8).out
    assert "10 scales of activations are left out" in caplog.text


@pytest.mark.parametrize("sizes", LAYOUTS)
@pytest.mark.parametrize("model", ["llama", "tied", "gpt2"])
def test_every_layout_comes_back_as_it_was(
    tmp_path: Path, model: str, sizes: dict[str, Any]
) -> None:
    source = TRTLLM / "gpt2"
    if model != "gpt2":
        source = write_llama(tmp_path / "hf", layers=2, tied=model == "tied")
    megaconv.convert(source, tmp_path / "out", saver="trtllm", verify=True, **sizes)
    megaconv.convert(tmp_path / "out", tmp_path / "back", saver="hf", verify=True)
    given, back = megaconv.open(source), megaconv.open(tmp_path / "back")
    assert back.config.tie_embeddings == given.config.tie_embeddings
    wanted = megaconv.fingerprint(source).weights
    assert megaconv.fingerprint(tmp_path / "out").weights == wanted
    assert megaconv.fingerprint(tmp_path / "back").weights == wanted


def test_the_commands_work_on_it(tmp_path: Path) -> None:
    megaconv.convert(TRTLLM / "llama", tmp_path / "out", saver="trtllm", tp=2, pp=2)
    assert run("verify", tmp_path / "out").status == 0
    assert run("scan", tmp_path / "out").status == 0
    assert run("diff", tmp_path / "out", LLAMA).status == 0
    assert "trtllm" in run("formats").out


def test_rope_comes_back_and_a_description_completes_it(tmp_path: Path) -> None:
    rope = {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }  # fmt: skip
    write_llama(tmp_path / "hf", layers=1, extra_config={"rope_theta": 5e5, "rope_scaling": rope})
    megaconv.convert(tmp_path / "hf", tmp_path / "out", saver="trtllm")
    positions = megaconv.open(tmp_path / "out").config.positions
    assert positions == megaconv.open(tmp_path / "hf").config.positions
    back = megaconv.open(tmp_path / "out", config=tmp_path / "hf").config
    assert back.bos_token_id == 1
    with pytest.raises(CheckpointError, match="it describes another model"):
        megaconv.open(tmp_path / "out", config=TRTLLM / "llama")


def whole_embeddings(directory: Path, padding: int) -> None:
    """Store whole embeddings, as TensorRT-LLM's own converters do by default."""
    ranks = [directory / f"rank{rank}.safetensors" for rank in (0, 1)]
    held = [load_file(file) for file in ranks]
    name = "transformer.vocab_embedding.weight"
    embedding = torch.cat([tensors[name] for tensors in held])[: 63 + padding].contiguous()
    for file, tensors in zip(ranks, held, strict=True):
        save_file({**tensors, name: embedding.clone()}, file)
    change_config(directory, use_parallel_embedding=False)


def change_config(directory: Path, **values: Any) -> None:
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


@pytest.mark.parametrize("padding", [0, 1])
def test_an_embedding_that_every_rank_holds_is_read_too(tmp_path: Path, padding: int) -> None:
    copy = shutil.copytree(LLAMA, tmp_path / "copy")
    whole_embeddings(copy, padding)
    assert megaconv.fingerprint(copy).weights == megaconv.fingerprint(LLAMA).weights


def test_a_description_of_tensorrt_llm_itself_is_read(tmp_path: Path) -> None:
    """The keys that its LLaMAConfig writes, and the cache's dtype, which older releases note."""
    copy = shutil.copytree(LLAMA, tmp_path / "copy")
    mapping = {
        "world_size": 4, "gpus_per_node": 8, "cp_size": 1, "tp_size": 2, "pp_size": 2, "moe_tp_size": 2,
        "moe_cluster_size": 1, "moe_ep_size": 1, "attn_tp_size": 2, "attn_cp_size": 1, "cp_config": {},
        "enable_attention_dp": False, "enable_lm_head_tp_in_adp": False,
    }  # fmt: skip
    change_config(copy, mapping=mapping, rotary_embedding_dim=8, kv_dtype="bfloat16")
    assert megaconv.fingerprint(copy).weights == megaconv.fingerprint(LLAMA).weights


def test_missing_sizes_have_tensorrt_llms_defaults(tmp_path: Path) -> None:
    write_llama(tmp_path / "hf", layers=1, hidden=32, ffn=128)
    megaconv.convert(tmp_path / "hf", tmp_path / "out", saver="trtllm")
    file = tmp_path / "out/config.json"
    raw = json.loads(file.read_text())
    del raw["intermediate_size"]
    file.write_text(json.dumps(raw))
    assert megaconv.open(tmp_path / "out").config.mlp.ffn == 128


@pytest.mark.parametrize("algorithm", ["INT8", "FP8"])
def test_scales_of_a_quantized_cache_are_left_out(
    tmp_path: Path, algorithm: str, caplog: pytest.LogCaptureFixture
) -> None:
    copy = shutil.copytree(LLAMA, tmp_path / "copy")
    quantization = {"quant_algo": None, "kv_cache_quant_algo": algorithm}
    change_config(copy, quantization=quantization)
    with_tensor(copy, "transformer.layers.0.attention.kv_cache_scaling_factor", torch.ones(1))
    assert megaconv.fingerprint(copy).weights == megaconv.fingerprint(LLAMA).weights
    assert "of activations are left out" in caplog.text


def test_first_stages_have_one_layer_more_if_the_layers_cannot_be_divided(tmp_path: Path) -> None:
    """TensorRT-LLM divides layers as torch.tensor_split does."""
    source = write_llama(tmp_path / "hf", layers=3)
    megaconv.convert(source, tmp_path / "three", saver="trtllm", pp=3)
    first, second, last = (
        load_file(tmp_path / f"three/rank{rank}.safetensors") for rank in range(3)
    )
    moved = {name.replace("layers.0.", "layers.1."): tensor for name, tensor in second.items()}
    uneven = tmp_path / "uneven"
    uneven.mkdir()
    shutil.copy(tmp_path / "three/config.json", uneven)
    change_config(uneven, mapping={"world_size": 2, "tp_size": 1, "pp_size": 2})
    save_file(first | moved, uneven / "rank0.safetensors")
    save_file(last, uneven / "rank1.safetensors")
    assert megaconv.fingerprint(uneven).weights == megaconv.fingerprint(source).weights


def exchanged(directory: Path, first: int, second: int) -> None:
    one, other = (directory / f"rank{rank}.safetensors" for rank in (first, second))
    one.rename(directory / "kept")
    other.rename(one)
    (directory / "kept").rename(other)


def without(directory: Path, rank: int) -> None:
    (directory / f"rank{rank}.safetensors").unlink()


def doubled(directory: Path) -> None:
    shutil.copy(directory / "rank3.safetensors", directory / "rank4.safetensors")


def truncated(directory: Path) -> None:
    file = directory / "rank1.safetensors"
    file.write_bytes(file.read_bytes()[:-10])


def with_tensor(directory: Path, name: str, tensor: torch.Tensor | None) -> None:
    file = directory / "rank0.safetensors"
    tensors = load_file(file)
    tensors.pop(name, None)
    save_file(tensors if tensor is None else {**tensors, name: tensor}, file)


_QKV = "transformer.layers.0.attention.qkv"
DAMAGES: list[tuple[Path, Callable[[Path], object], str]] = [
    (LLAMA, lambda path: without(path, 0), "1 of 4 rank files missing: rank0.safetensors"),
    (LLAMA, lambda path: without(path, 2), "1 of 4 rank files missing: rank2.safetensors"),
    (LLAMA, doubled, "rank4.safetensors: is of a rank that the model doesn't have"),
    (LLAMA, truncated, "rank1.safetensors"),
    (LLAMA, lambda path: exchanged(path, 0, 2), "rank0.safetensors: 1 tensor is missing: transformer.vocab"),
    (LLAMA, lambda path: with_tensor(path, "x", torch.ones(1)), "rank0.safetensors: 1 tensor is unknown"),
    (LLAMA, lambda path: with_tensor(path, f"{_QKV}.weight", torch.ones(2, 2).bfloat16()), "rank0.safetensors: transformer"),
    (LLAMA_FP8, lambda path: with_tensor(path, f"{_QKV}.weights_scaling_factor", None), "and there is no"),
    (LLAMA_FP8, lambda path: with_tensor(path, f"{_QKV}.weights_scaling_factor", torch.ones(2)), "one float32"),
    (LLAMA_FP8, lambda path: change_config(path, quantization={}), "tensors are unknown"),
]  # fmt: skip


@pytest.mark.parametrize(("source", "damage", "said"), DAMAGES)
def test_damaged_files_are_refused_in_one_line(
    tmp_path: Path, source: Path, damage: Callable[[Path], object], said: str
) -> None:
    copy = shutil.copytree(source, tmp_path / "copy")
    damage(copy)
    outcome = run("convert", copy, tmp_path / "out", "--saver", "hf")
    assert outcome.status == 3
    assert said in outcome.err.splitlines()[-1]
    assert str(copy) in outcome.err.splitlines()[-1]
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("ranks", [(0, 1), (2, 3), (1, 2)])
def test_exchanged_files_of_our_own_are_named(tmp_path: Path, ranks: tuple[int, int]) -> None:
    """Ranks of one stage have equal names and shapes. The noted rank tells them apart."""
    megaconv.convert(TRTLLM / "llama", tmp_path / "out", saver="trtllm", tp=2, pp=2)
    exchanged(tmp_path / "out", *ranks)
    outcome = run("inspect", tmp_path / "out")
    assert outcome.status == 3
    said = f"rank{ranks[0]}.safetensors: was written as rank {ranks[1]} of 4"
    assert said in outcome.err.splitlines()[-1]


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"architecture": "QWenForCausalLM"}, "'QWenForCausalLM' of TensorRT-LLM is not supported"),
        ({"quantization": {"quant_algo": "W4A16_AWQ"}}, "weights quantized as 'W4A16_AWQ'"),
        ({"moe": {"num_experts": 8}}, "experts are not supported"),
        ({"embedding_multiplier": 12.0}, "embedding_multiplier = 12.0 is not supported"),
        ({"embedding_sharding_dim": 1}, "embedding_sharding_dim = 1 is not supported"),
        ({"new_setting": 3}, "has the key 'new_setting' = 3"),
        ({"mapping": {"tp_size": 2, "pp_size": 1, "world_size": 4}}, "tp_size * pp_size is 2"),
        ({"mapping": {"tp_size": 1 << 40}}, "mapping.tp_size should be 1 to 65,536"),
        ({"mapping": {"tp_size": 1, "cp_size": 2}}, "cp_size = 2 is not supported"),
        ({"mapping": {"tp_size": 2, "pp_size": 3}}, "pp_size is 3, but the model has 2 layers"),
        ({"mapping": {"attn_tp_size": 1, "attn_cp_size": 2}}, "attn_cp_size = 2 is not supported"),
        ({"rotary_embedding_dim": 4}, "rotary_embedding_dim = 4 is not supported"),
        ({"mapping": {"tp_size": 4}}, "can't be divided"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers should be at most 2,000"),
        ({"num_attention_heads": 0}, "has a value of a wrong kind"),
        ({"hidden_size": "x"}, "has a value of a wrong kind"),
        ({"hidden_act": "swoosh"}, "swoosh"),
        ({"rmsnorm": False}, "rmsnorm = False is not supported"),
        ({"bias": True, "attn_bias": False}, "bias = True is not supported"),
    ],
)
def test_a_description_that_is_not_understood_is_refused(
    tmp_path: Path, values: dict[str, Any], said: str
) -> None:
    copy = shutil.copytree(LLAMA, tmp_path / "copy")
    change_config(copy, **values)
    outcome = run("fingerprint", copy)
    assert outcome.status == 3
    (line,) = outcome.err.splitlines()
    assert said in line
    assert str(copy / "config.json") in line


def test_rank_files_without_a_description_are_named(tmp_path: Path) -> None:
    copy = shutil.copytree(LLAMA, tmp_path / "copy")
    (copy / "config.json").unlink()
    outcome = run("fingerprint", copy)
    assert outcome.status == 3
    assert "has a rank file of TensorRT-LLM (rank0.safetensors)" in outcome.err
