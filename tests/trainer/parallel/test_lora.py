"""LoRA: ten steps of peft, at any layout; nothing but adapters is trained; what is saved is what peft and megaconv read."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load, load_file, save_file

import megaconv
from megaconv.checkpoint import open_checkpoint
from megaconv.errors import NotExpressible, TensorMismatch, UsageError
from megaconv.families import all_families
from megaconv.model.fields import changed
from megaconv.model.ir import WEIGHT, Key
from megaconv.model.layout import LayerSplit, Layout, split_layers
from megatron_lite.checkpoint.adapters import (
    gather_adapters,
    init_adapters,
    load_adapters,
    values_of_base,
)
from megatron_lite.checkpoint.peft import adapter_files, read_adapter
from megatron_lite.checkpoint.token_rows import rows_of_base
from megatron_lite.checkpoint.weights import load_weights
from megatron_lite.checkpoint.whole_modules import as_floats
from megatron_lite.engine import Engine
from megatron_lite.models.batch import Microbatch
from megatron_lite.models.lora.adapter import Adapter
from megatron_lite.models.lora.attached import without_adapters
from megatron_lite.models.lora.peft_limits import MIXED_UP, notice_of_peft, notice_of_rows
from megatron_lite.models.lora.whole import EMBEDDING, HEAD
from megatron_lite.parallel.grid import make_grid
from megatron_lite.settings.options import LoRA, ModelOptions, OptimizerOptions, Recompute
from tests.trainer.parallel.small import MODELS
from tests.trainer.parallel.small import Case as SmallCase
from tests.trainer.parallel.small import make_engine as make_small
from tests.trainer.parallel.worlds import World
from tests.transformers_oracle import LFMS_3, MIXTURES, OWN_SIZES, VARIANTS, create

PEFT = Path(__file__).parents[2] / "fixtures"
TRAINED = Path(__file__).parents[1] / "fixtures"
ROWS, LENGTH, STEPS = 4, 16, 10
TOLERANCE = 1e-5
BOTH_WHOLE = LoRA(2, 4.0, ("down_proj", "o_proj"), whole=(EMBEDDING, HEAD))
OF_WEIGHTS = {"qwen3-5": 1e-3}
"""The tolerance after ten steps, relative to a tensor's largest element, if not 2e-4. Delta nets round more, and Adam
divides small gradients by their size: the largest difference found is 2.6e-4."""
NONE = Recompute()


@dataclass(frozen=True)
class Case:
    model: str
    tp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1
    cp: int = 1
    sequence_parallel: bool = False
    distributed: bool = False
    recompute: Recompute = NONE
    lora: LoRA | None = None
    """None: as the fixture's adapter is."""
    directory: Path | None = None
    """The directory of the base; None for a fixture."""

    @property
    def world(self) -> int:
        return self.tp * self.pp * self.dp * self.cp

    @property
    def base(self) -> Path:
        return self.directory or PEFT / f"peft-{self.model}" / "base"

    @property
    def adapter(self) -> Path:
        return PEFT / f"peft-{self.model}" / "adapter"

    def __str__(self) -> str:
        words = [
            f"{name}{getattr(self, name)}"
            for name in ("tp", "pp", "dp", "ep", "cp")
            if getattr(self, name) > 1
        ]
        flags = [
            word
            for word, said in (("sp", self.sequence_parallel), ("zero", self.distributed))
            if said
        ]
        return " ".join([self.model, *words, *flags, self.recompute.granularity or ""]).strip()


def make(case: Case, *, trained: bool = True) -> Engine:
    """An engine with the fixture's adapter; with a new adapter if the case has options for one."""
    source = open_checkpoint(case.base)
    start = read_adapter(case.adapter, source.config) if case.lora is None else None
    layout = Layout(
        case.tp,
        case.pp,
        1,
        case.ep,
        stage_layers=split_layers(source.config.layer_count, case.pp, 1, LayerSplit()),
    )
    grid = make_grid(
        layout, case.dp, torch.device("cpu"), cp=case.cp, experts=source.config.experts.count > 0
    )
    options = ModelOptions(
        "float32", sequence_parallel=case.sequence_parallel, recompute=case.recompute, vocab_divisor=1 if case.tp == 1 else 2,
        lora=start.options if start is not None else case.lora,
    )  # fmt: skip
    optimizer = OptimizerOptions(
        betas=(0.9, 0.95), clip_grad=0, distributed=case.distributed, bucket_elements=500
    )
    engine = Engine(source.config, grid, options, optimizer if trained else None)
    load_weights(engine, source.tensors)
    if start is not None:
        load_adapters(engine, {Key(name): tensor for name, tensor in start.tensors.items()})
    else:
        init_adapters(engine, 7, source.tensors)
    return engine


def batches(case: Case, step: int, engine: Engine) -> list[Microbatch]:
    tokens = torch.randint(7, 99, (ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(step))
    rows = tokens.chunk(ROWS // 2)
    every = [Microbatch(part[:, :-1], part[:, 1:], index=index) for index, part in enumerate(rows)]
    return every[engine.grid.dp_rank :: case.dp]


def train(_rank: int, case: Case, steps: int) -> tuple[list[float], dict[Key, torch.Tensor]]:
    engine = make(case)
    losses = [
        engine.train_step(batches(case, step, engine), 5e-3, 0.1).loss for step in range(steps)
    ]
    found = gather_adapters(engine)
    engine.grid.close()
    return losses, found


CASES = [
    Case(
        "llama-all-linear",
        tp=2,
        dp=2,
        sequence_parallel=True,
        distributed=True,
        recompute=Recompute("selective"),
    ),
    Case("gpt2-conv1d", pp=2),
    Case("mixtral-experts", tp=2, ep=2, sequence_parallel=True),
    Case("nemotron-h", tp=2, sequence_parallel=True, recompute=Recompute("selective")),
    Case("qwen3-5", tp=2),
    Case("gpt-oss", tp=2, ep=2, sequence_parallel=True),
    Case("llama-whole", tp=2, dp=2, sequence_parallel=True, distributed=True),
    Case("llama-tied-whole", tp=2, pp=2),
    Case("llama-rows", tp=2, dp=2, distributed=True),
    Case("llama-tied-rows", tp=2, pp=2, sequence_parallel=True),
    Case("llama-dora", tp=2, dp=2, sequence_parallel=True, distributed=True),
    Case("llama-dora"),
]
FURTHER = [
    Case("llama-all-linear"),
    Case("llama-all-linear", tp=2, pp=2, recompute=Recompute("full")),
    Case("llama-all-linear", tp=2, cp=2, sequence_parallel=True, distributed=True),
    Case("gpt2-conv1d", tp=2),
    Case("mixtral-experts"),
    Case("mixtral-experts", pp=2, dp=2, ep=2, distributed=True),
    Case("nemotron-h"),
    Case("qwen3-5"),
    Case("nemotron-h", pp=2, dp=2, distributed=True, recompute=Recompute("full")),
    Case("nemotron-h", tp=2, cp=2, sequence_parallel=True),
    Case("qwen3-5", pp=2, recompute=Recompute("full")),
    Case("qwen3-5", cp=2),
    Case("gpt-oss"),
    Case("gpt-oss", pp=2, dp=2, ep=2, distributed=True),
    Case("gpt-oss", cp=2, recompute=Recompute("full")),
    Case("llama-whole"),
    Case("llama-whole", pp=2, cp=2, recompute=Recompute("full")),
    Case("llama-tied-whole"),
    Case("llama-tied-whole", pp=2, dp=2, distributed=True),
    Case("llama-rows"),
    Case("llama-rows", pp=2, cp=2, recompute=Recompute("full")),
    Case("llama-rows", tp=2, sequence_parallel=True),
    Case("llama-tied-rows"),
    Case("llama-tied-rows", tp=2),
    Case("llama-tied-rows", pp=2, dp=2, distributed=True),
    Case("llama-dora", tp=2, recompute=Recompute("selective")),
    Case("llama-dora", tp=2, pp=2, recompute=Recompute("full")),
    Case("llama-dora", tp=2, cp=2, sequence_parallel=True),
    Case("llama-dora", pp=2, dp=2, distributed=True),
]


@pytest.mark.slow
@pytest.mark.parametrize("case", FURTHER, ids=str)
def test_ten_steps_at_every_layout_are_those_of_peft(case: Case, world: World) -> None:
    assert_ten_steps(case, world)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_ten_steps_are_those_of_peft(case: Case, world: World) -> None:
    assert_ten_steps(case, world)


def assert_ten_steps(case: Case, world: World) -> None:
    done = TRAINED / f"lora-{case.model}"
    expected = json.loads((done / "losses.json").read_text())["losses"]
    adapter = read_adapter(done, open_checkpoint(case.base).config)
    results = world.run(case.world, train, case, STEPS)
    for losses, _ in results:
        assert losses == pytest.approx(expected, rel=TOLERANCE)
    found = {key.name: tensor for key, tensor in results[0][1].items() if key.slot == WEIGHT}
    assert found.keys() == adapter.tensors.keys()
    for name, tensor in found.items():
        theirs = as_floats(adapter.tensors[name])
        allowed = OF_WEIGHTS.get(case.model, 2e-4)
        assert (tensor - theirs).abs().max() <= allowed * theirs.abs().max(), name


def test_a_fresh_adapter_changes_nothing_and_nothing_else_is_trained() -> None:
    case = Case("llama-all-linear", lora=LoRA(4, 8))
    source = open_checkpoint(case.base)
    plain = Engine(
        source.config,
        make_grid(Layout(stage_layers=(2,)), 1, torch.device("cpu")),
        ModelOptions("float32", vocab_divisor=1),
        None,
    )
    load_weights(plain, source.tensors)
    engine = make(case)
    batch = batches(case, 0, engine)[0]
    before, fresh = plain.logits(batch), engine.logits(batch)
    assert before is not None
    assert fresh is not None
    assert torch.equal(before, fresh)
    weights = {name: tensor.clone() for _, name, tensor in engine.parameters()}
    engine.train_step(batches(case, 0, engine), 1e-2)
    after = engine.logits(batch)
    assert after is not None
    assert not torch.equal(before, after)
    assert all(torch.equal(tensor, weights[name]) for _, name, tensor in engine.parameters())
    assert engine.optimizer is not None
    owned = sum(item.end - item.start for item in engine.optimizer.ranges())
    assert owned == sum(
        torch.Size(info.native.shape).numel() for infos in engine.adapters for info in infos
    )


@pytest.mark.parametrize(
    ("model", "lora"),
    [
        ("llama-all-linear", LoRA(4, 6.0, rslora=True)),
        ("llama-all-linear", LoRA(2, 4.0, ("q_proj", "mlp.down_proj"))),
        ("llama-all-linear", LoRA(2, 4.0, ("linear_qkv",))),
        ("gpt2-conv1d", LoRA(2, 4.0)),
        ("mixtral-experts", LoRA(2, 4.0)),
        ("mixtral-experts", LoRA(2, 4.0, ("gate_up_proj",))),
        ("nemotron-h", LoRA(2, 4.0)),
        ("nemotron-h", LoRA(2, 4.0, ("out_proj", "linear_fc2"))),
        ("qwen3-5", LoRA(2, 4.0)),
        ("gpt-oss", LoRA(2, 4.0)),
        ("gpt-oss", LoRA(2, 4.0, ("linear_fc1",))),
        ("llama-whole", LoRA(2, 4.0, whole=(EMBEDDING, HEAD))),
        ("llama-whole", LoRA(2, 4.0, whole=(HEAD,))),
        ("llama-tied-whole", LoRA(2, 4.0, whole=(EMBEDDING, HEAD))),
        ("gpt2-conv1d", LoRA(2, 4.0, whole=(EMBEDDING, HEAD))),
        ("llama-rows", LoRA(2, 4.0, rows=((EMBEDDING, (8, 98)), (HEAD, (8, 98))))),
        ("llama-rows", LoRA(2, 4.0, rows=((EMBEDDING, (8, 98)),))),
        ("llama-tied-rows", LoRA(2, 4.0, rows=((EMBEDDING, (8, 98)), (HEAD, (8, 98))))),
        ("gpt2-conv1d", LoRA(2, 4.0, rows=((EMBEDDING, (8, 98)), (HEAD, (8, 98))))),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value.targets),
)
def test_saved_adapters_can_be_merged_and_read_back(model: str, lora: LoRA, tmp_path: Path) -> None:
    assert_saved_and_merged(Case(model, lora=lora), lora, tmp_path)


def test_an_adapter_of_a_single_layer_is_read_back_as_one(tmp_path: Path) -> None:
    """Its configuration named the matrix of all layers, so that the layers without an adapter counted as missing."""
    lora = LoRA(2, 4.0, ("1.self_attn.q_proj",))
    engine = make(Case("llama-all-linear", lora=lora))
    held = {
        key.name: tensor for key, tensor in gather_adapters(engine).items() if key.slot == WEIGHT
    }
    for name, content in adapter_files(held, engine.config, lora, "base").items():
        (tmp_path / name).write_bytes(bytes(content))
    described = json.loads((tmp_path / "adapter_config.json").read_bytes())
    assert described["target_modules"] == ["layers.1.self_attn.q_proj"]
    again = read_adapter(tmp_path, engine.config)
    assert again.options.targets == ("layers.1.self_attn.q_proj",)
    assert again.tensors.keys() == held.keys()


@pytest.mark.parametrize("more", [{"pp": 2}, {"pp": 2, "dp": 2, "distributed": True}], ids=str)
def test_only_one_stage_may_have_adapters(more: dict[str, Any], world: World) -> None:
    case = Case("llama-all-linear", lora=LoRA(2, 4.0, ("1.self_attn.q_proj",)))
    (alone,) = world.run(1, train, case, 3)
    across = replace(case, **more)
    first, *_, last = world.run(across.world, train, across, 3)
    assert last[0] == first[0] == pytest.approx(alone[0], rel=TOLERANCE)
    assert first[1].keys() == alone[1].keys()
    for key, tensor in alone[1].items():
        torch.testing.assert_close(first[1][key], tensor, rtol=1e-3, atol=1e-5)


@pytest.mark.slow
@pytest.mark.oracle
def test_latent_attention_and_shared_experts_have_adapters_too(
    world: World, tmp_path: Path
) -> None:
    create((VARIANTS | MIXTURES)["deepseek_v3"], tmp_path / "base")
    lora = LoRA(2, 4.0)
    case = Case("deepseek_v3", lora=lora, directory=tmp_path / "base")
    assert_saved_and_merged(case, lora, tmp_path)
    (alone,) = world.run(1, train, case, 3)
    across = replace(case, tp=2, ep=2, sequence_parallel=True)
    assert world.run(2, train, across, 3)[0][0] == pytest.approx(alone[0], rel=TOLERANCE)
    modules = {name.split(".")[-3] for name in (key.name for key in alone[1])}
    assert {"kv_a_proj_with_mqa", "kv_b_proj", "gate_up_proj", "gate_proj"} <= modules


@pytest.mark.slow
@pytest.mark.oracle
@pytest.mark.parametrize("name", OWN_SIZES | LFMS_3)
def test_layers_with_sizes_of_their_own_have_adapters_too(
    name: str, world: World, tmp_path: Path
) -> None:
    create((OWN_SIZES | LFMS_3)[name], tmp_path / "base")
    lora = LoRA(2, 4.0)
    case = Case(name, lora=lora, directory=tmp_path / "base")
    assert_saved_and_merged(case, lora, tmp_path)
    (alone,) = world.run(1, train, case, 3)
    ep = 2 if open_checkpoint(case.base).config.experts.count else 1
    across = replace(case, tp=2, ep=ep, sequence_parallel=True)
    assert world.run(2, train, across, 3)[0][0] == pytest.approx(alone[0], rel=TOLERANCE)


def test_all_linear_leaves_out_the_matrix_of_mamba_that_peft_refuses() -> None:
    """peft 0.21 raises an error for `out_proj` in these models, since fused kernels would skip its adapter."""
    found = {
        lora: {info.name.split(".")[-2] for info in make(case).adapters[0]}
        for lora, case in (
            (targets, Case("nemotron-h", lora=LoRA(2, 4.0, targets)))
            for targets in (("all-linear",), ("out_proj",))
        )
    }
    assert found["all-linear",] == {
        *("in_proj", "q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj")
    }
    assert found["out_proj",] == {"out_proj"}


@pytest.mark.parametrize(
    ("base", "name", "revision"),
    [
        ("hf://org/model", "org/model", None),
        ("hf://org/model@v2", "org/model", "v2"),
        ("org/model@v2", "org/model", "v2"),
        ("models/of/mine", "models/of/mine", None),
    ],
)
def test_an_adapter_names_its_base_on_the_hub_as_peft_does(
    base: str, name: str, revision: str | None
) -> None:
    engine = make(Case("nemotron-h", lora=LoRA(2, 4.0)))
    weights = {key.name: tensor for key, tensor in gather_adapters(engine).items()}
    files = adapter_files(weights, engine.config, LoRA(2, 4.0), base)
    described = json.loads(bytes(files["adapter_config.json"]))
    assert (described["base_model_name_or_path"], described["revision"]) == (name, revision)


def assert_saved_and_merged(case: Case, lora: LoRA, tmp_path: Path) -> None:
    engine = make(case)
    for step in range(3):
        engine.train_step(batches(case, step, engine), 1e-2)
    saved = {
        key.name: tensor for key, tensor in gather_adapters(engine).items() if key.slot == WEIGHT
    }
    directory = tmp_path / "adapter"
    directory.mkdir()
    for name, content in adapter_files(saved, engine.config, lora, str(case.base)).items():
        (directory / name).write_bytes(bytes(content))
    back = read_adapter(directory, engine.config)
    assert (back.options.rank, back.options.scale) == (lora.rank, lora.scale)
    assert (back.options.whole, back.options.rows) == (lora.whole, lora.rows)
    assert back.tensors.keys() == saved.keys()
    assert all(torch.equal(as_floats(tensor), saved[name]) for name, tensor in back.tensors.items())
    again = Engine(engine.config, engine.grid, replace(engine.options, lora=back.options), None)
    assert {info.name for info in again.adapters[0]} == {info.name for info in engine.adapters[0]}

    batch = batches(case, 0, engine)[0]
    unmerged = engine.logits(batch)
    megaconv.convert(
        case.base, tmp_path / "merged", saver="hf", adapters=[str(directory)], dtype="float32"
    )
    merged = Engine(engine.config, engine.grid, replace(engine.options, lora=None), None)
    load_weights(merged, open_checkpoint(tmp_path / "merged").tensors)
    logits = merged.logits(batch)
    assert logits is not None
    assert unmerged is not None
    assert (logits - unmerged).abs().max() <= 1e-5 * unmerged.abs().max()


@pytest.mark.parametrize("model", ["llama-rows", "llama-tied-rows"])
def test_rows_of_tokens_are_written_as_peft_writes_them(model: str) -> None:
    source = open_checkpoint(PEFT / f"peft-{model}" / "base")
    adapter = read_adapter(TRAINED / f"lora-{model}", source.config)
    values = {name: as_floats(tensor) for name, tensor in adapter.tensors.items()}
    files = adapter_files(values, source.config, adapter.options, "base")
    ours = load(bytes(files["adapter_model.safetensors"]))
    theirs = load_file(TRAINED / f"lora-{model}" / "adapter_model.safetensors")
    assert ours.keys() == theirs.keys()
    order = torch.tensor([3, 0, 1, 2])  # peft's tokens are 9, 40, 98, 3
    for name, tensor in ours.items():
        expected = theirs[name][order] if "token_adapter" in name else theirs[name]
        assert torch.equal(tensor, expected)
    tokens = json.loads(bytes(files["adapter_config.json"]))["trainable_token_indices"]
    assert all(each == [3, 9, 40, 98] for each in tokens.values())
    modules = {"embed_tokens"} if source.config.tie_embeddings else {"embed_tokens", "lm_head"}
    assert tokens.keys() == modules


@pytest.mark.parametrize("model", ["llama-rows", "llama-tied-rows"])
def test_fresh_rows_begin_as_those_of_the_base_and_only_they_learn(model: str) -> None:
    rows = (EMBEDDING, (8, 98)), (HEAD, (8, 98))
    case = Case(model, lora=LoRA(2, 4.0, ("q_proj",), rows=rows))
    engine, source = make(case), open_checkpoint(case.base)
    plain = Engine(engine.config, engine.grid, replace(engine.options, lora=None), None)
    load_weights(plain, source.tensors)
    batch = batches(case, 0, engine)[0]
    before, fresh = plain.logits(batch), engine.logits(batch)
    assert before is not None
    assert fresh is not None
    assert torch.equal(before, fresh)
    for step in range(2):
        engine.train_step(batches(case, step, engine), 1e-2)
    found = {key.name: t for key, t in gather_adapters(engine).items() if key.slot == WEIGHT}
    learned = [name for name in found if name.endswith("token_rows")]
    assert len(learned) == (1 if source.config.tie_embeddings else 2)
    for name in learned:
        matrix = source.tensors[name.removesuffix(".token_rows")]
        start = rows_of_base(engine, source.tensors)[name]
        assert (found[name] - as_floats(start)).abs().max() > 1e-3
        assert matrix.shape[0] == 99
    engine.logits(batch)  # writes the rows into the head
    for _, name, tensor in engine.parameters():
        expected = plain.chunks[0].get_parameter(name)
        different = (tensor != expected).any(-1).nonzero().flatten().tolist()
        assert not different or set(different) <= {8, 98}


@pytest.mark.parametrize("model", ["llama-whole", "llama-tied-whole"])
def test_whole_modules_are_written_as_peft_writes_them(model: str) -> None:
    """A tied model's tensor has both of its names."""
    source = open_checkpoint(PEFT / f"peft-{model}" / "base")
    adapter = read_adapter(TRAINED / f"lora-{model}", source.config)
    values = {name: as_floats(tensor) for name, tensor in adapter.tensors.items()}
    files = adapter_files(values, source.config, adapter.options, "base")
    ours = load(bytes(files["adapter_model.safetensors"]))
    theirs = load_file(TRAINED / f"lora-{model}" / "adapter_model.safetensors")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())
    config = json.loads(bytes(files["adapter_config.json"]))
    assert config["modules_to_save"] == ["embed_tokens", "lm_head"]
    assert config.get("ensure_weight_tying", False) == source.config.tie_embeddings


@pytest.mark.oracle
@pytest.mark.parametrize("name", ["gpt_neox", "nemotron_h"])
def test_whole_modules_have_the_names_of_transformers_class(name: str, tmp_path: Path) -> None:
    """Its files have others: `embed_out`, `backbone.embeddings`. peft would leave those out without a word."""
    from transformers import AutoModelForCausalLM

    create((VARIANTS | MIXTURES)[name], tmp_path / "base")
    lora = LoRA(2, 4.0, whole=(EMBEDDING, HEAD))
    case = Case(name, lora=lora, directory=tmp_path / "base")
    assert_saved_and_merged(case, lora, tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    known = {f"base_model.model.{name}" for name, _ in model.named_parameters()}
    stored = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    wholes = {name for name in stored if ".lora_" not in name}
    assert len(wholes) == 2
    assert wholes <= known


@pytest.mark.parametrize("model", ["further tokens", "further tokens, tied", "mimo"])
def test_copies_of_a_model_that_predicts_further_tokens_are_stored_once(
    model: str, tmp_path: Path
) -> None:
    """The files of DeepSeek-V3 have embedding and head in its last layer once more."""
    engine = make_small(SmallCase(model, options=(("lora", BOTH_WHOLE),)))
    assert engine.config.mtp_layers
    init_adapters(engine, seed=7)
    found = {key.name: t for key, t in gather_adapters(engine).items() if key.slot == WEIGHT}
    for name, content in adapter_files(found, engine.config, BOTH_WHOLE, "base").items():
        (tmp_path / name).write_bytes(bytes(content))
    stored = load_file(tmp_path / "adapter_model.safetensors")
    wholes = {name for name in stored if ".lora_" not in name}
    assert wholes == {
        "base_model.model.model.embed_tokens.weight",
        "base_model.model.lm_head.weight",
    }
    again = read_adapter(tmp_path, engine.config)
    assert again.tensors.keys() == found.keys()


def test_a_rank_with_nothing_but_padding_of_the_vocabulary_loads_whole_modules(
    world: World,
) -> None:
    """At a padding of 128, the second of two ranks has none of 99 tokens."""
    for found in world.run(2, load_padded):
        assert found == (128, 0.0)


def load_padded(rank: int) -> tuple[int, float]:
    """(rows of this rank's embedding, the sum of the second rank's, which are padding)."""
    source = open_checkpoint(PEFT / "peft-llama-whole" / "base")
    adapter = read_adapter(PEFT / "peft-llama-whole" / "adapter", source.config)
    grid = make_grid(Layout(2, stage_layers=(2,)), 1, torch.device("cpu"))
    engine = Engine(source.config, grid, ModelOptions("float32", lora=adapter.options), None)
    load_weights(engine, source.tensors)
    load_adapters(engine, {Key(name): tensor for name, tensor in adapter.tensors.items()})
    embedding = engine.chunks[0].get_parameter("embedding.word_embeddings.weight")
    grid.close()
    return len(embedding), float(embedding.abs().sum()) if rank else 0.0


def test_only_the_whole_modules_that_are_named_learn_beside_adapters() -> None:
    lora = LoRA(2, 4.0, ("q_proj",), whole=(HEAD,))
    engine = make(Case("llama-whole", lora=lora))
    before = {name: tensor.clone() for _, name, tensor in engine.parameters()}
    engine.train_step(batches(Case("llama-whole"), 0, engine), 1e-2)
    learned = {n for _, n, tensor in engine.parameters() if not torch.equal(tensor, before[n])}
    assert learned == {"output_layer.weight"}


@pytest.mark.parametrize("model", ["llama-whole", "llama-rows", "llama-tied-rows"])
def test_a_reference_without_adapters_has_the_embedding_of_the_base(model: str) -> None:
    case = Case(model)
    source = open_checkpoint(case.base)
    engine = make(case)
    batch = batches(case, 0, engine)[0]
    adapted = engine.logits(batch)
    base = values_of_base(engine, source.tensors)
    with without_adapters(engine.chunks, base):
        found = engine.logits(batch)
    plain = Engine(engine.config, engine.grid, replace(engine.options, lora=None), None)
    load_weights(plain, source.tensors)
    expected, again = plain.logits(batch), engine.logits(batch)
    assert found is not None
    assert expected is not None
    assert adapted is not None
    assert again is not None
    assert torch.equal(found, expected)
    assert torch.equal(again, adapted)
    assert not torch.equal(found, adapted)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ("ensure_weight_tying", NotExpressible, "the adapter unties the head from the embedding"),
        ("model.norm", NotExpressible, r"whole tensors \(.*model.norm.weight.*only embedding and head"),
        ("rows", TensorMismatch, "has 98 rows, the base's has 99; .* --tokenizer"),
        ("integers", TensorMismatch, "embed.weight has dtype int32; expected float32"),
    ],
)  # fmt: skip
def test_whole_tensors_that_cannot_be_trained_are_refused(
    change: str, error: type[Exception], words: str, tmp_path: Path
) -> None:
    source = open_checkpoint(PEFT / "peft-llama-tied-whole" / "base")
    place = PEFT / "peft-llama-tied-whole" / "adapter"
    tensors = load_file(place / "adapter_model.safetensors")
    described = json.loads((place / "adapter_config.json").read_text())
    if change == "rows":
        tensors = {n: t[:98] if "layers" not in n else t for n, t in tensors.items()}
    elif change == "integers":
        tensors = {n: t.int() if "layers" not in n else t for n, t in tensors.items()}
    elif change == "model.norm":
        tensors["base_model.model.model.norm.weight"] = torch.ones(32)
    else:
        described[change] = False
    save_file({n: t.clone() for n, t in tensors.items()}, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text(json.dumps(described))
    with pytest.raises(error, match=words):
        read_adapter(tmp_path, source.config)


def test_dropout_of_adapters_is_the_same_at_every_layout_and_when_computed_again(
    world: World,
) -> None:
    targets = ("q_proj", "v_proj", "o_proj", "gate_proj", "down_proj")
    case = Case("llama-all-linear", lora=LoRA(4, 8, targets, dropout=0.3))
    (alone,) = world.run(1, train, case, 3)
    (plain,) = world.run(1, train, replace(case, lora=replace(case.lora, dropout=0.0)), 3)
    assert alone[0] != pytest.approx(plain[0], rel=1e-6)
    for other in (
        replace(case, pp=2, recompute=Recompute("full")),
        replace(case, tp=2, sequence_parallel=True),
        replace(case, tp=2),
    ):
        assert world.run(other.world, train, other, 3)[0][0] == pytest.approx(
            alone[0], rel=TOLERANCE
        )


def test_the_stacked_matrices_of_experts_are_those_of_the_file() -> None:
    """A file that peft wrote is written again as it was."""
    source = open_checkpoint(PEFT / "peft-mixtral-experts" / "base")
    place = PEFT / "peft-mixtral-experts" / "adapter"
    adapter = read_adapter(place, source.config)
    values = {name: as_floats(tensor) for name, tensor in adapter.tensors.items()}
    files = adapter_files(values, source.config, adapter.options, "base")
    ours, theirs = (
        load(bytes(files["adapter_model.safetensors"])),
        load_file(place / "adapter_model.safetensors"),
    )
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())
    config = json.loads(bytes(files["adapter_config.json"]))
    assert config["target_parameters"] == ["mlp.experts.down_proj", "mlp.experts.gate_up_proj"]
    assert config["target_modules"] == ["self_attn.q_proj"]


def test_adapters_of_another_number_of_experts_are_refused(tmp_path: Path) -> None:
    whole = PEFT / "peft-mixtral-experts"
    megaconv.convert(whole / "base", tmp_path / "fewer", saver="hf", keep_experts=[0, 2])
    config = open_checkpoint(tmp_path / "fewer").config
    with pytest.raises(
        TensorMismatch, match=r"experts\S* has an A of 8 rows, .* needs 4; give the"
    ):
        read_adapter(whole / "adapter", config)


class Unread(list[int]):
    """A list that may be replaced, but not read."""

    def __eq__(self, other: object) -> bool:
        raise AssertionError("the rows are read")

    def __iter__(self) -> Any:
        raise AssertionError("the rows are read")

    __hash__ = None  # type: ignore[assignment]


def test_a_forward_pass_does_not_go_through_the_rows_of_an_adapter() -> None:
    """A matrix may have 30,000 rows. torch.compile would compare each of them, and take minutes for a layer."""
    case = Case("llama-all-linear")
    engine = make(case)
    adapters = [
        module
        for chunk in engine.chunks
        for module in chunk.modules()
        if isinstance(module, Adapter)
    ]
    assert {adapter.rows == sorted(adapter.rows) for adapter in adapters} == {True, False}
    engine.train_step(batches(case, 0, engine), lr=1e-3)
    for adapter in adapters:
        adapter.rows = Unread()
    engine.train_step(batches(case, 1, engine), lr=1e-3)


def test_an_adapter_that_all_experts_would_share_is_refused() -> None:
    """transformers' DBRX has one matrix for all experts. Each expert trained a copy of A, and one copy was saved."""

    def engine(*targets: str, trains: bool = True) -> Engine:
        options = (("lora", LoRA(2, 4.0, targets)), ("trains", trains))
        return make_small(SmallCase("dbrx", options=options))

    for targets in ("all-linear",), ("mlp.w1",), ("linear_fc2",):
        with pytest.raises(NotExpressible, match="one matrix for all experts of a layer"):
            engine(*targets)
    assert all(engine("Wqkv", "out_proj").adapters)
    assert all(engine("mlp.w1", trains=False).adapters)


@pytest.mark.oracle
def test_models_whose_adapters_peft_mixes_up_are_those_that_transformers_converts() -> None:
    from transformers.conversion_mapping import _MODEL_TO_CONVERSION_PATTERN

    converted = {name for name, like in _MODEL_TO_CONVERSION_PATTERN.items() if like == "qwen2_moe"}
    known = {each.model_type for each in all_families().values()} & (converted | {"qwen2_moe"})
    assert known == {each.model_type for each in all_families().values()} & MIXED_UP
    experts = "model.layers.1.mlp.experts.3.gate_up_proj"
    config = MODELS["deepseek_v3"]
    assert notice_of_peft(config, [experts, "model.layers.1.self_attn.o_proj"]) is None
    notice = notice_of_peft(config, [experts, "model.layers.1.mlp.shared_experts.up_proj"])
    assert notice is not None
    assert "peft 0.21 can't load this adapter" in notice
    assert notice_of_peft(MODELS["llama"], ["model.layers.1.mlp.up_proj"]) is None


def test_a_line_says_that_peft_computes_rows_of_a_head_without_its_bias() -> None:
    rows = LoRA(2, 4.0, rows=((HEAD, (3,)),))
    of_embedding = LoRA(2, 4.0, rows=((EMBEDDING, (3,)),))
    biased = changed(MODELS["llama"], {"head.bias": True})
    assert "leaves out the bias of the head" in (notice_of_rows(biased, rows) or "")
    assert notice_of_rows(biased, of_embedding) is None
    assert notice_of_rows(MODELS["llama"], rows) is None


def test_trained_rows_have_the_rate_of_embedding_and_head() -> None:
    rows = (EMBEDDING, (8, 98)), (HEAD, (8, 98))
    case = Case("llama-rows", lora=LoRA(2, 4.0, ("q_proj",), rows=rows))
    engine = make(case)
    before = {key: tensor.clone() for key, tensor in gather_adapters(engine).items()}
    engine.train_step(batches(case, 0, engine), 1e-2, decoupled_lr=0.0)
    after = gather_adapters(engine)
    weights = [key for key in before if key.slot == WEIGHT]
    moved = {key.name for key in weights if not torch.equal(before[key], after[key])}
    assert moved
    assert not any(name.endswith("token_rows") for name in moved)


def test_the_last_row_of_a_token_that_is_listed_twice_counts_as_in_peft(tmp_path: Path) -> None:
    place = PEFT / "peft-llama-rows" / "adapter"
    described = json.loads((place / "adapter_config.json").read_text())
    described["trainable_token_indices"] = {
        "embed_tokens": [9, 40, 9, 3],
        "lm_head": [9, 40, 98, 3],
    }
    (tmp_path / "adapter_config.json").write_text(json.dumps(described))
    tensors = load_file(place / "adapter_model.safetensors")
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    config = open_checkpoint(PEFT / "peft-llama-rows" / "base").config
    read = read_adapter(tmp_path, config)
    assert dict(read.options.rows) == {EMBEDDING: (3, 9, 40), HEAD: (3, 9, 40, 98)}
    prefix = "base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta"
    found = as_floats(read.tensors["embed.weight.token_rows"])
    assert torch.equal(found, tensors[prefix][[3, 2, 1]].float())


def test_unknown_targets_of_adapters_are_refused() -> None:
    with pytest.raises(
        UsageError,
        match="--lora-targets embed_tokens: is no matrix of this model; there are all-linear, down_proj",
    ):
        make(Case("llama-all-linear", lora=LoRA(4, 8, ("embed_tokens",))))
    with pytest.raises(UsageError, match="no matrix of this model's layers is among them"):
        make(Case("llama-all-linear", lora=LoRA(4, 8, ("other.q_proj",))))
    with pytest.raises(
        UsageError, match=r"--lora-targets conv1d: is no matrix of this model; .* in_proj"
    ):
        make(Case("nemotron-h", lora=LoRA(4, 8, ("in_proj", "conv1d"))))
    engine = make(Case("llama-all-linear", lora=LoRA(4, 8, ("q_proj",))))
    adapter = read_adapter(PEFT / "peft-llama-all-linear" / "adapter", engine.config)
    with pytest.raises(TensorMismatch, match="is the adapter of no matrix that has one here"):
        load_adapters(engine, {Key(name): tensor for name, tensor in adapter.tensors.items()})
