"""`--saver trtllm`: the files that ModelOpt writes for TensorRT-LLM, byte for byte, and refusals.

The fixtures are outputs of nvidia-modelopt 0.47 (`export_tensorrt_llm_checkpoint`).
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import megaconv
from megaconv.errors import LayoutError, NotExpressible, UsageError
from tests.calibrations import measured, write_statistics
from tests.conftest import FIXTURES
from tests.families.test_families import write_model
from tests.models import write_llama

TRTLLM = FIXTURES / "trtllm"
MODELOPT = FIXTURES / "modelopt-formats"


def ranks(directory: Path) -> dict[str, dict[str, Tensor]]:
    return {file.name: load_file(file) for file in sorted(directory.glob("rank*.safetensors"))}


def as_bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def assert_same_ranks(found: Path, expected: Path) -> None:
    ours, theirs = ranks(found), ranks(expected)
    assert ours.keys() == theirs.keys()
    for file, tensors in theirs.items():
        assert ours[file].keys() == tensors.keys()
        for name, tensor in tensors.items():
            made = ours[file][name]
            assert (made.dtype, made.shape) == (tensor.dtype, tensor.shape), name
            assert torch.equal(as_bytes(made), as_bytes(tensor)), f"{file}: {name}"


def assert_same_config(found: Path, expected: Path, **differs: Any) -> None:
    ours, theirs = (json.loads((path / "config.json").read_text()) for path in (found, expected))
    assert ours.pop("producer")["name"] == "megaconv"
    assert theirs.pop("producer")["name"] == "modelopt"
    # ModelOpt writes the number of the rank that wrote the file last.
    assert ours == {**theirs, "rank": 0, **differs}


def test_a_llama_is_written_as_modelopt_writes_it(tmp_path: Path) -> None:
    megaconv.convert(TRTLLM / "llama", tmp_path / "out", saver="trtllm", tp=2, pp=2, verify=True)
    assert_same_ranks(tmp_path / "out", TRTLLM / "llama-tp2pp2")
    assert_same_config(tmp_path / "out", TRTLLM / "llama-tp2pp2")


def test_a_gpt2_is_written_as_modelopt_writes_it(tmp_path: Path) -> None:
    megaconv.convert(TRTLLM / "gpt2", tmp_path / "out", saver="trtllm", tp=2, pp=2, verify=True)
    expected = TRTLLM / "gpt2-tp2pp2"
    assert_same_ranks(tmp_path / "out", expected)
    # ModelOpt without TensorRT-LLM beside it names rope here.
    assert_same_config(tmp_path / "out", expected, position_embedding_type="learned_absolute")


@pytest.mark.parametrize(
    ("source", "ids", "batch", "expected", "differs"),
    [
        (MODELOPT / "src", MODELOPT / "calibration.safetensors", 4, "llama-fp8-tp2pp1", {}),
        (
            TRTLLM / "gpt2", TRTLLM / "gpt2-ids.safetensors", 4, "gpt2-fp8-tp2pp1",
            {"position_embedding_type": "learned_absolute"},
        ),
    ],
    ids=["llama", "gpt2"],
)  # fmt: skip
def test_fp8_has_the_codes_and_scales_of_modelopt(
    tmp_path: Path, source: Path, ids: Path, batch: int, expected: str, differs: dict[str, str]
) -> None:
    statistics = statistics_of(source, load_file(ids)["ids"], batch, tmp_path)
    report = megaconv.convert(
        source, tmp_path / "out", saver="trtllm", quantize="fp8", calibration=statistics, tp=2, verify=True
    )  # fmt: skip
    assert report.rounding is not None
    assert report.rounding.largest > 0
    assert_same_ranks(tmp_path / "out", TRTLLM / expected)
    assert_same_config(tmp_path / "out", TRTLLM / expected, **differs)


def statistics_of(source: Path, ids: Tensor, batch: int, directory: Path) -> Path:
    """Statistics as ModelOpt measured them, with torch's fused attention."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    tensors = measured(model, list(ids.split(batch)))
    return write_statistics(directory / "amax.safetensors", tensors, source)


@pytest.mark.parametrize("sizes", [{}, {"tp": 2}, {"pp": 2}, {"tp": 2, "pp": 2}])
def test_every_layout_holds_the_model_again(tmp_path: Path, sizes: dict[str, int]) -> None:
    """The ranks' tensors, glued together by TensorRT-LLM's rules, are the source's."""
    write_llama(tmp_path / "hf", layers=2, tied=True)
    megaconv.convert(tmp_path / "hf", tmp_path / "out", saver="trtllm", verify=True, **sizes)  # type: ignore[arg-type]
    given = load_file(tmp_path / "hf/model.safetensors")
    made = list(ranks(tmp_path / "out").values())
    tp, pp = sizes.get("tp", 1), sizes.get("pp", 1)
    embedding = torch.cat([made[rank]["transformer.vocab_embedding.weight"] for rank in range(tp)])
    head = torch.cat([made[(pp - 1) * tp + rank]["lm_head.weight"] for rank in range(tp)])
    assert torch.equal(head, embedding)
    vocab = len(given["model.embed_tokens.weight"])
    assert torch.equal(embedding[:vocab], given["model.embed_tokens.weight"])
    assert not embedding[vocab:].any()
    for layer in range(2):
        stage, local = divmod(layer, 2 // pp)
        of_stage = made[stage * tp : stage * tp + tp]
        path = f"transformer.layers.{local}.mlp"
        down = torch.cat([rank[f"{path}.proj.weight"] for rank in of_stage], dim=1)
        gate = torch.cat([rank[f"{path}.fc.weight"] for rank in of_stage])
        assert torch.equal(down, given[f"model.layers.{layer}.mlp.down_proj.weight"])
        assert torch.equal(gate, given[f"model.layers.{layer}.mlp.gate_proj.weight"])


def test_rope_of_llama_3_is_described(tmp_path: Path) -> None:
    scaling = {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }  # fmt: skip
    rope = {"rope_theta": 500000.0, "rope_scaling": scaling}
    write_llama(tmp_path / "hf", layers=1, extra_config=rope)
    megaconv.convert(tmp_path / "hf", tmp_path / "out", saver="trtllm")
    written = json.loads((tmp_path / "out/config.json").read_text())
    assert written["rotary_base"] == 500000.0
    assert written["rotary_scaling"] == {"type": "llama3", **scaling}


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"quantize": "int8-sq"}, UsageError, "writes plain weights and fp8"),
        ({"quantize": "fp8"}, UsageError, "needs statistics of activations"),
        ({"calibration": "x"}, UsageError, "pass --quantize fp8 too"),
        ({"tp": 3}, LayoutError, "can't be divided"),
        ({"pp": 3}, LayoutError, "can't be divided"),
    ],
)
def test_impossible_requests_are_refused(
    tmp_path: Path, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        megaconv.convert(TRTLLM / "llama", tmp_path / "out", saver="trtllm", **options)
    assert not (tmp_path / "out").exists()


def test_models_that_the_files_cannot_describe_are_refused(tmp_path: Path) -> None:
    given = write_model(tmp_path / "qwen3", "qwen3")
    with pytest.raises(NotExpressible, match="qwen3 is not supported"):
        megaconv.convert(given, tmp_path / "out", saver="trtllm")
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
    write_llama(tmp_path / "yarn", layers=1, extra_config={"rope_scaling": scaling})
    with pytest.raises(NotExpressible, match="scaled by yarn"):
        megaconv.convert(tmp_path / "yarn", tmp_path / "out", saver="trtllm")
