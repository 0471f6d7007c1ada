"""DoRA: magnitudes begin as the lengths of the base's rows, stay float32, and are saved as peft saves them.

Ten steps of peft at many layouts: test_lora.py.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from safetensors.torch import load, load_file, save_file
from torch import Tensor

from megaconv.checkpoint import open_checkpoint
from megaconv.errors import NotExpressible, TensorMismatch
from megaconv.model.ir import WEIGHT
from megatron_lite.checkpoint.peft import adapter_files, read_adapter
from megatron_lite.checkpoint.weights import load_weights
from megatron_lite.checkpoint.whole_modules import as_floats
from megatron_lite.engine import Engine
from megatron_lite.models.lora.attached import constant_adapters, without_adapters
from megatron_lite.models.lora.dora import DoraAdapter
from megatron_lite.models.lora.parameters import Sharding
from megatron_lite.models.lora.shares import Module, Rows, Share
from megatron_lite.parallel.tensor import ColumnLinear, TensorGroup
from megatron_lite.settings.options import LoRA, Recompute
from tests.trainer.parallel.small import Case as SmallCase
from tests.trainer.parallel.small import make_engine as make_small
from tests.trainer.parallel.test_lora import (
    PEFT,
    TOLERANCE,
    TRAINED,
    Case,
    assert_saved_and_merged,
    batches,
    make,
    train,
)
from tests.trainer.parallel.worlds import World

DORA = LoRA(4, 8.0, dora=True)
FRESH = Case("llama-dora", lora=DORA)


def logits(engine: Engine) -> Tensor:
    found = engine.logits(batches(FRESH, 0, engine)[0])
    assert found is not None
    return found


def without(engine: Engine, case: Case) -> Engine:
    """The base alone."""
    plain = Engine(engine.config, engine.grid, replace(engine.options, lora=None), None)
    load_weights(plain, open_checkpoint(case.base).tensors)
    return plain


@pytest.mark.parametrize(
    "lora", [DORA, LoRA(4, 8.0, ("k_proj", "down_proj"), dora=True)], ids=["all", "some"]
)
def test_a_fresh_adapter_changes_nothing_to_the_bit(lora: LoRA) -> None:
    """With "some", the fused matrix of q, k and v has rows without an adapter."""
    case = replace(FRESH, lora=lora)
    engine = make(case)
    assert torch.equal(logits(engine), logits(without(engine, case)))
    engine.train_step(batches(case, 0, engine), 1e-2)
    assert not torch.equal(logits(engine), logits(without(engine, case)))


def of_some_layouts(**options: Any) -> list[Case]:
    """Cases whose tensor ranks sum lengths, whose stages have different layers, and whose optimizer is shared."""
    fresh = replace(FRESH, **options)
    return [
        replace(fresh, tp=2, sequence_parallel=True),
        replace(fresh, tp=2, pp=2, recompute=Recompute("full")),
        replace(fresh, dp=2, distributed=True),
    ]


@pytest.mark.parametrize("case", of_some_layouts(), ids=str)
def test_fresh_magnitudes_are_the_lengths_of_the_base_at_every_layout(
    case: Case, world: World
) -> None:
    (alone,) = world.run(1, train, FRESH, 0)
    found = world.run(case.world, train, case, 0)[0][1]
    lengths = {key: tensor for key, tensor in alone[1].items() if "magnitude" in key.name}
    assert len(lengths) == 2 * 7 * 3, (
        "of seven modules in two layers: the magnitude and its two moments"
    )
    for key, tensor in lengths.items():
        torch.testing.assert_close(found[key], tensor, rtol=1e-6, atol=0)
    weights = load_file(FRESH.base / "model.safetensors")
    for key, tensor in lengths.items():
        if key.slot == WEIGHT:
            name = key.name.replace("lora_magnitude_vector", "weight")
            torch.testing.assert_close(tensor, weights[name].float().norm(dim=1))


@pytest.mark.parametrize("case", of_some_layouts(), ids=str)
def test_fresh_adapters_train_alike_at_every_layout(case: Case, world: World) -> None:
    (alone,) = world.run(1, train, FRESH, 3)
    losses, found = world.run(case.world, train, case, 3)[0]
    assert losses == pytest.approx(alone[0], rel=TOLERANCE)
    for key, tensor in alone[1].items():
        torch.testing.assert_close(found[key], tensor, rtol=1e-3, atol=1e-5)


@pytest.mark.slow
def test_dropout_is_the_same_at_every_layout(world: World) -> None:
    drops = replace(DORA, dropout=0.3)
    (alone,) = world.run(1, train, replace(FRESH, lora=drops), 3)
    (plain,) = world.run(1, train, FRESH, 3)
    assert alone[0] != pytest.approx(plain[0], rel=1e-6)
    for case in of_some_layouts(lora=drops):
        losses = world.run(case.world, train, case, 3)[0][0]
        assert losses == pytest.approx(alone[0], rel=TOLERANCE)


class Halves:
    """In the place of a seed: drops every second column."""

    def drop(self, x: Tensor, *_: object) -> Tensor:
        kept = torch.arange(x.shape[-1]) % 2
        return x * kept * 2


def peft_with_dropout(
    x: Tensor, dropped: Tensor, matrix: ColumnLinear, a: Tensor, b: Tensor, m: Tensor
) -> Tensor:
    """peft's formula: tuners/lora/variants.py, DoraLinearVariant.forward, of release 0.21.2. scale: 2."""
    base_result = F.linear(x, matrix.weight, matrix.bias)
    norm = torch.linalg.norm(matrix.weight + 2 * (b @ a), dim=1).detach()
    mag_norm_scale = (m / norm).view(1, -1)
    lora_result = F.linear(F.linear(dropped, a), b)
    result_dora = (mag_norm_scale - 1) * F.linear(
        dropped, matrix.weight
    ) + mag_norm_scale * lora_result * 2
    return base_result + result_dora


def test_dropout_is_that_of_peft() -> None:
    """The magnitude scales the base's product with the dropped input, and W x itself stays."""
    torch.manual_seed(3)
    matrix = ColumnLinear(6, 5, TensorGroup(), bias=True)
    module = Module("q_proj", None, None, 5, 6, transposed=False)
    share = Share(module, (Rows(range(5), 0),), (0, 6))
    options = LoRA(2, 4.0, dropout=0.5, dora=True)
    adapter = DoraAdapter([share], 5, options, Sharding.COLUMNS, TensorGroup(), (0, 1))
    for parameter in (*matrix.parameters(), *adapter.parameters()):
        torch.nn.init.normal_(parameter)
    matrix.adapter = adapter
    x = torch.randn(4, 3, 6)
    [pair] = adapter.every_pair
    values = pair.lora_a, pair.lora_b, pair.magnitude
    for seed in (None, Halves()):
        adapter.seed = seed  # type: ignore[assignment]
        found = matrix(x)
        dropped = x if seed is None else seed.drop(x)
        expected = peft_with_dropout(x, dropped, matrix, *values)
        torch.testing.assert_close(found, expected)
        weights = torch.randn_like(found)
        for ours, theirs in zip(
            torch.autograd.grad((found * weights).sum(), values),
            torch.autograd.grad((expected * weights).sum(), values),
            strict=True,
        ):
            torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize(
    ("model", "lora"),
    [
        ("llama-dora", DORA),
        ("llama-dora", LoRA(2, 4.0, ("q_proj", "down_proj"), rslora=True, dora=True)),
        ("gpt2-conv1d", DORA),
        ("mixtral-experts", LoRA(2, 4.0, ("q_proj", "o_proj"), dora=True)),
        ("nemotron-h", DORA),
        ("qwen3-5", DORA),
    ],
)
def test_saved_adapters_can_be_merged_and_read_back(model: str, lora: LoRA, tmp_path: Path) -> None:
    assert_saved_and_merged(Case(model, lora=lora), lora, tmp_path)


def test_files_are_those_of_peft() -> None:
    source = open_checkpoint(PEFT / "peft-llama-dora" / "base")
    adapter = read_adapter(TRAINED / "lora-llama-dora", source.config)
    values = {name: as_floats(tensor) for name, tensor in adapter.tensors.items()}
    files = adapter_files(values, source.config, adapter.options, "base")
    ours = load(bytes(files["adapter_model.safetensors"]))
    theirs = load_file(TRAINED / "lora-llama-dora" / "adapter_model.safetensors")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())
    assert json.loads(bytes(files["adapter_config.json"]))["use_dora"] is True


def test_a_model_without_adapters_is_the_base_and_constant_adapters_compute_the_same() -> None:
    case = Case("llama-dora")
    engine = make(case)
    adapted = logits(engine)
    with without_adapters(engine.chunks):
        assert torch.equal(logits(engine), logits(without(engine, case)))
    with constant_adapters(engine.chunks):
        assert torch.equal(logits(engine), adapted)
    engine.train_step(batches(case, 0, engine), 1e-2)
    assert not torch.equal(logits(engine), adapted)


def test_magnitudes_are_float32_beside_weights_in_bf16_and_do_not_decay() -> None:
    options = (("lora", DORA), ("dtype", "bfloat16"))
    engine = make_small(SmallCase("llama", options=options))
    magnitudes = [info for infos in engine.adapters for info in infos if info.in_float32]
    assert len(magnitudes) == 4 * 7
    for info in magnitudes:
        assert info.name.endswith(".magnitude")
        assert not info.decays
        assert engine.chunks[0].get_parameter(info.name).dtype == torch.float32


def test_experts_are_refused() -> None:
    with pytest.raises(NotExpressible) as refused:
        make(Case("mixtral-experts", lora=DORA))
    assert str(refused.value) == (
        "model.layers.0.mlp.experts.0.gate_up_proj belongs to experts, for which peft has no DoRA; "
        "with --lora-dora, name other matrices: --lora-targets k_proj o_proj q_proj v_proj"
    )


def without_a_vector(_: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    del tensors[next(name for name in tensors if name.endswith("magnitude_vector"))]


def without_the_flag(config: dict[str, Any], _: dict[str, Tensor]) -> None:
    config["use_dora"] = False


def shorter(_: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    name = "base_model.model.model.layers.0.mlp.up_proj.lora_magnitude_vector"
    tensors[name] = tensors[name][:-1].clone()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (without_a_vector, "has no magnitude, but its configuration requires the opposite"),
        (without_the_flag, "has a magnitude, but its configuration requires the opposite"),
        (shorter, r"up_proj.lora_magnitude_vector has shape \[55\], the model needs 56 x 1"),
    ],
)
def test_adapters_that_contradict_themselves_are_refused(
    change: Callable[[dict[str, Any], dict[str, Tensor]], None],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    place = PEFT / "peft-llama-dora" / "adapter"
    config = json.loads((place / "adapter_config.json").read_text())
    tensors = load_file(place / "adapter_model.safetensors")
    change(config, tensors)
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    monkeypatch.setattr(Case, "adapter", tmp_path)
    with pytest.raises(TensorMismatch, match=words):
        make(Case("llama-dora"))
