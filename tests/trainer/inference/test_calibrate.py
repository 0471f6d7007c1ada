"""`megatron-lite calibrate`: the statistics that transformers' model shows, at any layout, and AWQ's factors."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

import megaconv
from megaconv.errors import TensorMismatch
from megatron_lite.data.indexed import DTYPES
from megatron_lite.data.indexed_writer import IndexedWriter
from megatron_lite.inference.calibration.awq import ALPHAS, losses_of, scale_at, weight_means
from megatron_lite.processes import launch
from tests.calibrations import awq_scale, measured
from tests.conftest import FIXTURES
from tests.trainer.inference.conversations import save
from tests.trainer.inference.models import tiny
from tests.trainer.inference.test_adapters import write_adapter
from tests.trainer.inference.test_commands import run
from tests.trainer.loop.launches import train

pytestmark = pytest.mark.oracle

SRC = FIXTURES / "modelopt-formats/src"
IDS = load_file(FIXTURES / "modelopt-formats/calibration.safetensors")["ids"]


@pytest.fixture(autouse=True)
def _failures_leave_the_tests_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "leave", sys.exit)


def write_dataset(prefix: Path, rows: Sequence[Sequence[int]]) -> Path:
    with IndexedWriter(prefix, DTYPES[8]) as writer:
        for row in rows:
            writer.add(row, [len(row)])
    return prefix


def words(source: Path, data: Path, output: Path, *more: object) -> tuple[object, ...]:
    return ("calibrate", "--load", source, "--data", data, "--output", output, *more)


def of_transformers(source: Path, ids: Tensor) -> dict[str, Tensor]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        source, dtype=torch.bfloat16, attn_implementation="eager"
    )
    return measured(model, list(ids.split(4)))


def test_statistics_are_those_of_transformers_and_belong_to_the_weights(tmp_path: Path) -> None:
    data = write_dataset(tmp_path / "data", IDS.tolist())
    output = tmp_path / "amax.safetensors"
    assert run(*words(SRC, data, output, "--seq-length", 32, "--slots", 4, "--awq")) == 0
    found, expected = load_file(output), of_transformers(SRC, IDS)
    factors = {name for name in found if name.endswith(".awq_scale")}
    assert found.keys() - factors == expected.keys()
    assert len(factors) == 7
    one_step = 2**-7  # one step of bfloat16
    for name, tensor in expected.items():
        assert found[name].shape == tensor.shape, name
        off = (found[name] - tensor).abs()
        if "channel" not in name:
            assert (off <= one_step * tensor).all(), name
        assert off.norm() <= 0.01 * tensor.norm(), name
    with safe_open(output, "pt") as file:
        assert file.metadata()["weights_fingerprint"] == megaconv.fingerprint(SRC).weights


def test_a_conversion_takes_the_statistics_in_any_format_of_the_same_weights(
    tmp_path: Path,
) -> None:
    data = write_dataset(tmp_path / "data", IDS.tolist())
    output = tmp_path / "amax.safetensors"
    megaconv.convert(SRC, tmp_path / "core", saver="core", tp=2)
    assert run(*words(tmp_path / "core", data, output, "--awq")) == 0
    for kind in ("fp8", "int8-sq", "int4-awq", "w4a8-awq"):
        report = megaconv.convert(
            SRC, tmp_path / kind, saver="hf", quantize=kind, calibration=output, kv_cache="fp8",
            verify=True,
        )  # fmt: skip
        assert report.rounding is not None


def test_an_adapter_is_quantized_by_statistics_of_the_merged_model_in_one_pass(
    tmp_path: Path,
) -> None:
    data = write_dataset(tmp_path / "data", IDS.tolist())
    adapter, merged = tmp_path / "adapter", tmp_path / "merged"
    write_adapter(SRC, adapter, 2, 4.0, ("q_proj", "o_proj", "up_proj", "down_proj"))
    megaconv.merge(SRC, adapter, merged)
    one, two = tmp_path / "one.safetensors", tmp_path / "two.safetensors"
    assert run(*words(SRC, data, one, "--awq", "--adapter", adapter)) == 0
    assert run(*words(merged, data, two, "--awq")) == 0
    assert one.read_bytes() == two.read_bytes()
    forms: list[dict[str, Any]] = [
        {"saver": "hf", "quantize": kind} for kind in ("fp8", "int8-sq", "int4-awq", "w4a8-awq")
    ]
    for form in (*forms, {"saver": "gguf", "options": {"gguf_type": "q4_0", "tokenizer": "none"}}):
        name = form.get("quantize", "gguf")
        form["calibration"] = one
        megaconv.convert(SRC, tmp_path / name / "merged", adapters=[adapter], **form)
        megaconv.convert(merged, tmp_path / name / "converted", **form)
        [weights] = (
            path
            for path in (tmp_path / name / "merged").iterdir()
            if path.suffix in (".gguf", ".safetensors")
        )
        converted = tmp_path / name / "converted" / weights.name
        assert weights.read_bytes() == converted.read_bytes(), name


def test_statistics_with_an_adapter_belong_neither_to_its_base_nor_to_half_of_it(
    tmp_path: Path,
) -> None:
    data = write_dataset(tmp_path / "data", IDS.tolist())
    adapter, output = tmp_path / "adapter", tmp_path / "amax.safetensors"
    write_adapter(SRC, adapter, 2, 4.0, ("q_proj",))
    assert run(*words(SRC, data, output, "--adapter", adapter)) == 0
    options: dict[str, Any] = {"saver": "hf", "quantize": "fp8", "calibration": output}
    with pytest.raises(TensorMismatch, match="its statistics are of the weights"):
        megaconv.convert(SRC, tmp_path / "out", **options)
    with pytest.raises(TensorMismatch, match="pass the same adapters with --adapter"):
        megaconv.merge(SRC, f"{adapter}:0.5", tmp_path / "out", **options)
    assert run(*words(SRC, data, output)) == 0
    with pytest.raises(TensorMismatch, match="with the adapters has the weights"):
        megaconv.merge(SRC, adapter, tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "case", ["peft-qwen3-dora", "initialized-pissa", "peft-llama-resized-saved"]
)
def test_adapters_that_change_more_than_products_are_calibrated(tmp_path: Path, case: str) -> None:
    """DoRA, PiSSA, and an adapter with further tokens."""
    base, adapter = FIXTURES / case / "base", FIXTURES / case / "adapter"
    merged = tmp_path / "merged"
    megaconv.merge(base, adapter, merged)
    data = write_dataset(tmp_path / "data", [[5, 9, 3, 7, 1, 2], [4, 4, 8]])
    one, two = tmp_path / "one.safetensors", tmp_path / "two.safetensors"
    assert run(*words(base, data, one, "--adapter", adapter)) == 0
    assert run(*words(merged, data, two)) == 0
    assert one.read_bytes() == two.read_bytes()
    megaconv.merge(base, adapter, tmp_path / "out", saver="hf", quantize="fp8", calibration=one)


@pytest.mark.parametrize(
    ("layout", "ranks"), [("--tp 2", 2), ("--pp 2", 2), ("", 2), ("--ep 2", 2)]
)
def test_the_layout_does_not_change_the_statistics(tmp_path: Path, layout: str, ranks: int) -> None:
    source = tmp_path / "model"
    tiny("mixtral" if "ep" in layout else "llama").save_pretrained(source)
    vocab = json.loads((source / "config.json").read_text())["vocab_size"]
    rows = torch.randint(0, vocab, (8, 12), generator=torch.Generator().manual_seed(1))
    data = write_dataset(tmp_path / "data", rows.tolist())
    common = ("--dtype", "fp32", "--slots", 2)
    assert run(*words(source, data, tmp_path / "one.safetensors", *common)) == 0
    command = words(source, data, tmp_path / "all.safetensors", *common, *layout.split())
    train(tmp_path, ranks, " ".join(map(str, command)))
    one, all_ = (load_file(tmp_path / f"{name}.safetensors") for name in ("one", "all"))
    assert one.keys() == all_.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(all_[name], tensor, rtol=2e-5, atol=1e-6, msg=name)


def test_the_chosen_factors_lose_no_more_than_any_others() -> None:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(64, 256, generator=generator) * torch.rand(256, generator=generator).exp()
    weight = torch.randn(96, 256, generator=generator)
    mean = x.abs().mean(0)
    losses = losses_of(x, weight, mean)
    best = int(losses.argmin())
    assert losses[best] < losses[0]
    scale = scale_at(ALPHAS[best], mean, weight_means(weight))
    torch.testing.assert_close(scale, awq_scale(weight, [x]))


def write_chat(path: Path) -> Path:
    """Write a conversation, and return its file."""
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}]
    path.write_text(json.dumps({"messages": turns}) + "\n")
    return path


def test_chats_are_calibrated_with_their_template(tmp_path: Path) -> None:
    save(tmp_path / "model")
    write_chat(tmp_path / "chats.jsonl")
    output = tmp_path / "amax.safetensors"
    assert run(*words(tmp_path / "model", tmp_path / "chats.jsonl", output)) == 0
    with safe_open(output, "pt") as file:
        assert file.metadata()["samples"] == "1"
        assert int(file.metadata()["tokens"]) > 4


def test_a_model_without_a_template_takes_one_from_a_file(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model, output = tmp_path / "model", tmp_path / "amax.safetensors"
    save(model)
    chats = write_chat(tmp_path / "chats.jsonl")
    assert run(*words(model, chats, tmp_path / "own.safetensors")) == 0
    template = (model / "chat_template.jinja").rename(tmp_path / "template.jinja")
    assert run(*words(model, chats, output)) == 2
    assert (
        "the tokenizer has no chat template; give one: --chat-template FILE"
        in capfd.readouterr().err
    )
    assert run(*words(model, chats, output, "--chat-template", template)) == 0
    assert "without effect" not in capfd.readouterr().err
    assert output.read_bytes() == (tmp_path / "own.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--tp", 2, "--awq"), "--awq: the search needs whole matrices"),
        (("--samples", 0), "--samples takes 1 or more"),
        (("--seq-length", 1), "--seq-length 2 or more"),
        (("--max-length", 64), "--max-length"),
        (("--slots", 0), "--slots 0 must be 1 or more"),
    ],
)
def test_bad_flags_are_refused(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], more: tuple[object, ...], message: str
) -> None:
    data = write_dataset(tmp_path / "data", [[1, 2, 3]])
    assert run(*words(SRC, data, tmp_path / "amax.safetensors", *more)) == 2
    assert message in capfd.readouterr().err


def test_tokens_of_another_vocabulary_are_refused(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    data = write_dataset(tmp_path / "data", [[1, 2, 64]])
    assert run(*words(SRC, data, tmp_path / "amax.safetensors")) == 2
    assert "token 64 is outside the model's vocabulary of 64" in capfd.readouterr().err
    assert not (tmp_path / "amax.safetensors").exists()
