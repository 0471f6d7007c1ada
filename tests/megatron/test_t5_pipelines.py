"""A T5 whose encoder and decoder are on pipeline stages of their own, as Megatron had it before core 0.14.

tests/fixtures/pipelined-t5-*: modules of the real megatron-core 0.12.3, one process a rank on the CPU (gloo), built as
pretrain_t5.py and get_model of that release do, and saved as state_dict_for_save_checkpoint() gives them. Their values are
random, and others in tensors that nothing computes with; the logits went through all stages. Their args are those that core
0.12 wrote into legacy-t5-tp2pp1, with the sizes changed by hand; the norms that end a stack are torch's in place of
Transformer Engine's. e2d2: two stages of the encoder, two of the decoder.
"""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import megaconv
from formats.tensor import read_tensor
from megaconv.checkpoint import open_checkpoint
from megaconv.engine.conversion import fingerprint
from megaconv.errors import CorruptCheckpoint, NotExpressible, TensorMismatch, UnknownFormat
from megaconv.model.ir import Key
from megaconv.model.layout import LayerSplit, Layout
from megaconv.model.training import EXP_AVG, EXP_AVG_SQ
from tests import encoder_forward
from tests.conftest import FIXTURES
from tests.encoder_cases import assert_close, convert, first_file, question, refused, weights
from tests.megatron.test_real_megatron_files import assert_same_model
from tests.megatron_oracle import read_rank_file
from tests.optimizer_models import trained
from tests.put_together import assert_holds, rank_files
from tests.runs import assert_refused, run

SMALL, DEEP = "pipelined-t5-tp2e1d1", "pipelined-t5-tp1e2d2"
ENGINE = {"transformer_impl": "transformer_engine"}
LEGACY = FIXTURES / "legacy-t5-tp2pp1" / "checkpoint"
"""2 layers of an encoder, 1 of a decoder."""
LAYOUTS = {SMALL: Layout(2, 2, stage_layers=(0, 1), encoder_stage_layers=(1,)),
           DEEP: Layout(1, 4, stage_layers=(0, 0, 1, 1), encoder_stage_layers=(1, 1))}  # fmt: skip


def source(name: str) -> Path:
    return FIXTURES / name / "checkpoint"


def edit(root: Path, directory: str, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the state in one rank file."""
    (path,) = root.glob(f"*/{directory}/model_optim_rng.pt")
    state = read_rank_file(path)
    change(state)
    torch.save(state, path)


# What Megatron core 0.12 has.


@pytest.mark.parametrize("name", [SMALL, DEEP])
def test_every_weight_is_read_bit_for_bit(name: str, caplog: pytest.LogCaptureFixture) -> None:
    checkpoint = open_checkpoint(source(name))
    assert checkpoint.layout == LAYOUTS[name]
    assert_holds(checkpoint, FIXTURES / name / "expected.safetensors")
    assert caplog.text == ""  # unused copies hold other values, and they mean nothing


def test_the_weights_compute_what_megatron_computed() -> None:
    asked, expected = question(SMALL)
    answer = encoder_forward.t5(
        open_checkpoint(source(SMALL)), asked["input_ids"], asked["decoder_input_ids"]
    )
    assert_close(answer, expected["logits"][..., :100])


UNUSED = {
    f"{SMALL}/000": {"lm_head.output_layer.bias", "output_layer.bias"},
    f"{DEEP}/000": {"decoder_relative_pos_emb.relative_attention_bias.weight"},
    f"{DEEP}/001": {
        "decoder_relative_pos_emb.relative_attention_bias.weight",
        *(f"{head}output_layer.{word}" for head in ("", "lm_head.") for word in ("weight", "bias")),
    },
    f"{DEEP}/002": {"encoder_relative_pos_emb.relative_attention_bias.weight"},
    f"{DEEP}/003": {"encoder_relative_pos_emb.relative_attention_bias.weight"},
}
"""Fixture and pipeline rank -> what Megatron has there for nothing: it is written, as a copy of what is used elsewhere."""


@pytest.mark.parametrize("name", [SMALL, DEEP])
def test_the_same_model_at_the_same_layout_becomes_the_same_files(
    name: str, tmp_path: Path
) -> None:
    theirs, ours = rank_files(source(name)), rank_files(convert(source(name), tmp_path / "out"))
    assert list(ours) == list(theirs)
    for file, state in theirs.items():
        tp_rank, pp_rank = Path(file).parent.name.split("_")[2:]
        unused = UNUSED.get(f"{name}/{pp_rank}", set())
        found, wanted = ours[file]["model"], state["model"]
        assert list(found) == list(wanted)
        for tensor in unused:
            assert (found[tensor].shape, found[tensor].dtype) == (
                wanted[tensor].shape,
                wanted[tensor].dtype,
            )
            assert not np.array_equal(read_tensor(found[tensor]), read_tensor(wanted[tensor]))
        used = [
            {key: value for key, value in model.items() if key not in unused}
            for model in (found, wanted)
        ]
        assert_same_model(*used, 100, int(tp_rank))
        for argument in ("tensor_model_parallel_size", "pipeline_model_parallel_size", "world_size", "num_layers",
                         "encoder_pipeline_model_parallel_size", "encoder_tensor_model_parallel_size"):  # fmt: skip
            assert getattr(ours[file]["args"], argument) == getattr(state["args"], argument), (
                argument
            )


def test_the_documentations_commands_work_as_they_stand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (Path(__file__).parents[2] / "docs" / "encoders.md").read_text()
    commands = re.findall(
        r"^megaconv (convert .*)$", page[page.index("### Pipeline stages") :], re.MULTILINE
    )
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t5").symlink_to(source(DEEP))
    for command in commands:
        outcome = run(*command.split())
        assert outcome.status == 0, (command, outcome.err)
    assert [str(open_checkpoint(tmp_path / name).layout) for name in ("split", "apart", "whole")] == [
        "TP 1, PP 4 (encoder 1+1, decoder 1+1)", "TP 1, PP 3 (encoder 2, decoder 1+1)", "TP 1, PP 1",
    ]  # fmt: skip
    assert weights(tmp_path / "whole") == weights(source(DEEP))


def test_a_copy_of_the_embedding_that_differs_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    out = convert(source(SMALL), tmp_path / "out")
    edit(
        out,
        "mp_rank_01_001",
        lambda state: state["model"]["embedding.word_embeddings.weight"].add_(1),
    )
    assert weights(out) == weights(source(SMALL))
    assert "the copy embedding.word_embeddings.weight in mp_rank_01_001/" in caplog.text


def test_stages_with_relative_positions_of_their_own_are_no_t5(tmp_path: Path) -> None:
    """Nothing in Megatron keeps the tables of several stages alike, and each computes with its own."""
    out = convert(source(DEEP), tmp_path / "out")
    name = "encoder_relative_pos_emb.relative_attention_bias.weight"
    edit(out, "mp_rank_00_003", lambda state: state["model"][name].add_(1))
    assert weights(out) == weights(source(DEEP))
    edit(out, "mp_rank_00_000", lambda state: state["model"][name].add_(1))
    with pytest.raises(
        TensorMismatch, match=rf"the copy {name} in mp_rank_00_00\d/.*contradicts itself"
    ):
        weights(out)


# Other layouts.


@pytest.mark.parametrize(
    ("name", "steps"),
    [
        (SMALL, [("core", {"tp": 1, "pp": 1}), ("core", {"tp": 4, "pp": 2, "split_rank": 1}), ("core", {"tp": 2, **ENGINE}),
                 ("legacy", {"tp": 1}), ("legacy", {"pp": 1}), ("core", {"tp": 2, "pp": 2, "split_rank": 1})]),
        (DEEP, [("core", {"pp": 2, "split_rank": 1}), ("core", {"tp": 2, "pp": 3, "split_rank": 2}), ("core", {"pp": 1}),
                ("core", {"ckpt_format": "torch_dist"}), ("core", {"tp": 1, "pp": 4, "split_rank": 2})]),
    ],
)  # fmt: skip
def test_every_step_of_a_chain_holds_the_same_model(
    name: str, steps: list[tuple[str, dict[str, Any]]], tmp_path: Path
) -> None:
    path = source(name)
    for number, (saver, options) in enumerate(steps):
        path = convert(path, tmp_path / str(number), saver, **options)
        assert weights(path) == weights(source(name)), (saver, options)
    checkpoint, first = open_checkpoint(path), open_checkpoint(source(name))
    assert (checkpoint.config, checkpoint.layout) == (first.config, first.layout)
    assert megaconv.verify(path).same
    assert megaconv.diff(source(name), path).same


def test_a_decoder_of_another_depth_is_read_and_is_for_legacy_models(tmp_path: Path) -> None:
    """Core's own training script let a decoder have decoder_num_layers at first, and num_layers later."""
    out = convert(source(SMALL), tmp_path / "out", tp=1)

    def deepen(state: dict[str, Any]) -> None:
        model = state["model"]
        model |= {
            name.replace(".0.", ".1."): value
            for name, value in model.items()
            if name.startswith("decoder.layers.")
        }
        state["args"].decoder_num_layers = 2

    edit(out, "mp_rank_00_001", deepen)
    edit(out, "mp_rank_00_000", lambda state: setattr(state["args"], "decoder_num_layers", 2))
    config = open_checkpoint(out).config
    assert (config.encoder.layers, config.layer_count) == (1, 2)
    assert "--saver legacy" in refused(out, tmp_path / "core", "core")
    legacy = convert(out, tmp_path / "legacy", "legacy", pp=3, split_rank=1)
    assert weights(legacy) == weights(out)
    assert str(open_checkpoint(legacy).layout) == "TP 1, PP 3 (encoder 1, decoder 1+1)"


# Legacy models.


def by_hand(target: Path, model: dict[str, Any], args: Any, **sizes: int) -> Path:
    """Megatron's legacy T5 of 2 + 1 layers on 3 stages: the encoder's first and second layer, the decoder."""
    language = model["language_model"]
    vars(args).update(sizes)
    first = {
        name: value for name, value in language["encoder"].items() if name.startswith("layers.0.")
    }
    second = {
        name.replace("layers.1.", "layers.0."): value
        for name, value in language["encoder"].items()
        if not name.startswith("layers.0.")
    }
    stages: list[dict[str, Any]] = [
        {"language_model": {"embedding": language["embedding"], "encoder": first}},
        {"language_model": {"encoder": second}},
        {"language_model": {"embedding": language["embedding"], "decoder": language["decoder"]}, "lm_head": model["lm_head"]},
    ]  # fmt: skip
    for stage, held in enumerate(stages):
        path = target / "iter_0000005" / f"mp_rank_00_{stage:03d}" / "model_optim_rng.pt"
        path.parent.mkdir(parents=True)
        torch.save({"args": args, "checkpoint_version": 3.0, "iteration": 5, "model": held}, path)
    (target / "latest_checkpointed_iteration.txt").write_text("5")
    return target


def test_a_legacy_t5_cut_by_hand_is_read_and_is_what_we_write(tmp_path: Path) -> None:
    state = read_rank_file(first_file(convert(LEGACY, tmp_path / "whole", "legacy", tp=1)))
    sizes = {"pipeline_model_parallel_size": 3, "pipeline_model_parallel_split_rank": 2}
    cut = by_hand(tmp_path / "cut", state["model"], state["args"], **sizes)
    assert weights(cut) == weights(LEGACY)
    assert str(open_checkpoint(cut).layout) == "TP 1, PP 3 (encoder 1+1, decoder 1)"
    ours = convert(tmp_path / "whole", tmp_path / "ours", "legacy", pp=3, split_rank=2)
    for path in sorted(cut.glob("*/mp_rank_*/*.pt")):
        wanted, found = (read_rank_file(file) for file in (path, ours / path.relative_to(cut)))
        assert {name: getattr(found["args"], name) for name in sizes} == sizes
        assert_same_nested(found["model"], wanted["model"])


def assert_same_nested(found: Any, wanted: Any) -> None:
    if isinstance(wanted, dict):
        assert list(found) == list(wanted)
        for name, value in wanted.items():
            assert_same_nested(found[name], value)
    else:
        assert found is None if wanted is None else torch.equal(found, wanted)


def test_the_last_of_several_stages_of_a_legacy_decoder_repeats_the_embedding(
    tmp_path: Path,
) -> None:
    deep = convert(source(SMALL), tmp_path / "core", tp=1, pp=1)
    state = read_rank_file(first_file(deep))
    model, args = state["model"], state["args"]
    again = {
        name.replace(".0.", ".1."): value
        for name, value in model.items()
        if "r.layers.0." in name and value is not None
    }
    model |= again
    args.num_layers = args.encoder_num_layers = args.decoder_num_layers = 2
    torch.save(state, first_file(deep))
    out = convert(deep, tmp_path / "legacy", "legacy", pp=4, split_rank=2)
    stages = [read_rank_file(path)["model"] for path in sorted(out.glob("*/mp_rank_*/*.pt"))]
    assert [sorted(stage) for stage in stages] == [
        *[["language_model"]] * 3,
        ["language_model", "lm_head", "word_embeddings_for_head"],
    ]
    assert [sorted(stage["language_model"]) for stage in stages] == [
        ["embedding", "encoder"], ["encoder"], ["decoder", "embedding"], ["decoder"]
    ]  # fmt: skip
    assert weights(out) == weights(deep)


# Optimizer state.


def parameters(model: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The parameters as Megatron's modules list them: a tensor with two names occurs once."""
    again = ("position_embeddings.", "output_layer.")
    return {
        name: t
        for name, t in model.items()
        if isinstance(t, torch.Tensor) and not name.startswith(again)
    }


def of_values(model: dict[str, Any]) -> dict[str, Any]:
    """A plain optimizer whose first moments are twice the weights, and second moments their squares."""
    held = parameters(model)
    state = trained({name: tensor.clone() for name, tensor in held.items()}, float16=False)
    numbered = [t for t in held.values() if t.dim() > 1] + [
        t for t in held.values() if t.dim() == 1
    ]
    for number, tensor in enumerate(numbered):
        state["state"][number] |= {"exp_avg": 2 * tensor, "exp_avg_sq": tensor * tensor}
    return state


@pytest.mark.parametrize("name", [SMALL, DEEP])
def test_every_parameter_finds_its_own_optimizer_state(name: str, tmp_path: Path) -> None:
    """Idle ones are counted, and theirs is dropped."""
    root = tmp_path / "trained"
    shutil.copytree(source(name), root)
    for path in root.glob("*/mp_rank_*"):
        edit(root, path.name, lambda state: state.update(optimizer=of_values(state["model"])))
    checkpoint = open_checkpoint(root)
    assert len(checkpoint.slots) == 2 * len(checkpoint.tensors)
    for tensor in checkpoint.tensors:
        value = checkpoint.load(tensor)
        for slot, expected in ((EXP_AVG, 2 * value), (EXP_AVG_SQ, value * value)):
            found = (
                read_tensor(checkpoint.slots[Key(tensor, slot)])
                .view(np.float32)
                .reshape(value.shape)
            )
            assert np.array_equal(found, expected.numpy()), (tensor, slot)
    whole = convert(root, tmp_path / "whole", tp=1, pp=1)
    apart = convert(whole, tmp_path / "apart", tp=2, pp=2, split_rank=1)
    assert fingerprint(root) == fingerprint(whole) == fingerprint(apart)
    for path in apart.glob("*/mp_rank_*/model_optim_rng.pt"):
        state = read_rank_file(path)
        held = sum(len(group["params"]) for group in state["optimizer"]["param_groups"])
        assert held == len(parameters(state["model"]))


def test_the_distributed_optimizers_state_is_refused_both_ways_and_can_be_left_out(
    tmp_path: Path,
) -> None:
    whole = convert(source(SMALL), tmp_path / "whole", tp=1, pp=1)
    edit(whole, "mp_rank_00", lambda state: state.update(optimizer=of_values(state["model"])))
    options = {"pp": 2, "split_rank": 1}
    assert "distributed optimizer" in refused(
        whole, tmp_path / "out", "core", **options, use_distributed_optimizer=True
    )
    apart = convert(whole, tmp_path / "apart", **options, optimizer=False)
    assert weights(apart) == weights(source(SMALL))
    buffers = {"optimizer": {"param_groups": []}}
    edit(apart, "mp_rank_00_000", lambda found: found.update(optimizer=buffers))
    with pytest.raises(
        NotExpressible, match=r"mp_rank_00_000.*distributed optimizer.*--no-optimizer"
    ):
        weights(apart)


# What can't be.


@pytest.mark.parametrize(
    ("saver", "options", "words"),
    [
        ("core", {"pp": 2}, "pp = 2: the model has 2 layers of an encoder and 2 of a decoder.*--pipeline-model-parallel-split-rank"),
        ("legacy", {"pp": 2, "vpp": 2, "split_rank": 1}, "without virtual stages"),
        ("core", {"pp": 2, "layer_split": (1, 1)}, "evenly and without virtual stages"),
        ("core", {"pp": 2, "split_rank": 2}, "split rank = 2 with pp = 2"),
        ("core", {"split_rank": 4}, "split rank = 4 with pp = 4"),
        ("core", {"pp": 4, "split_rank": 3}, "layers of the encoder = 2 can't be divided over .* before the split rank = 3"),
        ("core", {"pp": 4, "split_rank": 1}, "layers of the decoder = 2 can't be divided over .* from the split rank on = 3"),
        ("core", {"ckpt_format": "torch_dist"}, "pp = 4: a distributed checkpoint .* choose --pp 1"),
        ("core", {"ckpt_format": "zarr", "pp": 2, "split_rank": 1}, "pp = 2: a distributed checkpoint"),
    ],
)  # fmt: skip
def test_a_layout_that_a_t5_does_not_support_is_refused(
    saver: str, options: dict[str, Any], words: str, tmp_path: Path
) -> None:
    assert re.search(words, refused(source(DEEP), tmp_path / "out", saver, **options))


def test_a_model_of_one_stack_has_no_split_rank(tmp_path: Path) -> None:
    llama = FIXTURES / "core-llama-tp1pp1" / "checkpoint"
    assert "has no encoder" in refused(llama, tmp_path / "out", "core", pp=2, split_rank=1)


def test_stages_that_mix_the_stacks_or_lack_layers_are_refused(tmp_path: Path) -> None:
    out = convert(source(DEEP), tmp_path / "out")
    edit(out, "mp_rank_00_001", lambda state: setattr(state["args"], "encoder_num_layers", 3))
    edit(out, "mp_rank_00_000", lambda state: setattr(state["args"], "encoder_num_layers", 3))
    with pytest.raises(
        TensorMismatch, match=r"hold 2 layers of an encoder \(1\+1\), their args say 3"
    ):
        open_checkpoint(out)
    names = ("decoder.layers.0.mlp.linear_fc1.bias",)
    edit(
        out,
        "mp_rank_00_001",
        lambda state: state["model"].update(dict.fromkeys(names, torch.zeros(24))),
    )
    edit(out, "mp_rank_00_000", lambda state: setattr(state["args"], "num_layers", 3))
    with pytest.raises(
        TensorMismatch, match=r"1\+1\+0\+0 layers of an encoder and 0\+1\+1\+1 of a decoder"
    ):
        open_checkpoint(out)


@pytest.mark.parametrize(
    ("name", "gone", "left"), [(SMALL, "1", 1), (SMALL, "0", 1), (DEEP, "23", 2), (DEEP, "3", 3)]
)
def test_a_stage_that_is_missing_is_missed(name: str, gone: str, left: int, tmp_path: Path) -> None:
    shutil.copytree(source(name), tmp_path / "part")
    for stage in gone:
        for directory in tmp_path.glob(f"part/*/mp_rank_*_00{stage}"):
            shutil.rmtree(directory)
    with pytest.raises(
        CorruptCheckpoint, match=rf"rank directories for {left} in all; is one missing\?"
    ):
        open_checkpoint(tmp_path / "part")


def test_an_encoder_with_fewer_tensor_ranks_is_refused(tmp_path: Path) -> None:
    """Core 0.9 to 0.13 could do that for models whose stacks share no embedding."""
    out = convert(source(SMALL), tmp_path / "out")
    edit(
        out,
        "mp_rank_00_000",
        lambda state: setattr(state["args"], "encoder_tensor_model_parallel_size", 1),
    )
    with pytest.raises(
        UnknownFormat, match="its encoder has tensor parallel size 1, its decoder 2"
    ):
        open_checkpoint(out)


def test_a_distributed_checkpoint_without_the_trained_head_is_refused(tmp_path: Path) -> None:
    """In core 0.12.3, the encoder's unused head has replica 0 of lm_head.output_layer.bias. The decoder's head is a
    copy."""
    out = convert(source(SMALL), tmp_path / "out", pp=1, ckpt_format="torch_dist")
    (common,) = out.glob("*/common.pt")
    state = read_rank_file(common)
    state["args"].encoder_pipeline_model_parallel_size = 1
    torch.save(state, common)
    with pytest.raises(TensorMismatch, match="untrained head in place of the decoder's"):
        open_checkpoint(out)


# The command line.


def test_both_of_megatrons_ways_to_count_stages_are_known(tmp_path: Path) -> None:
    ways = {"split": ["--pp", 3, "--pipeline-model-parallel-split-rank", 1],
            "encoder": ["--pp", 2, "--encoder-pipeline-model-parallel-size", 1]}  # fmt: skip
    core = ["--load-dir", source(DEEP), "--saver", "core", "--transformer-impl", "local"]
    for name, options in ways.items():
        assert run("convert", *core, "--save-dir", tmp_path / name, *options).status == 0
        layout = json.loads(run("inspect", tmp_path / name, "--json").out)["layout"]
        sizes = {"tp": 1, "pp": 3, "vpp": 1, "ep": 1, "etp": 1}
        assert layout == {**sizes, "stage_layers": [0, 1, 1], "encoder_stage_layers": [2]}
    dry = run(
        "convert",
        *core,
        "--save-dir",
        tmp_path / "dry",
        "--encoder-pipeline-model-parallel-size",
        2,
        "--dry-run",
    )
    assert dry.out.count("model_optim_rng.pt") == 3
    both = [*ways["split"], *ways["encoder"][2:]]
    assert_refused(
        run("convert", *core, "--save-dir", tmp_path / "both", *both), 2, "give one of them"
    )


def test_a_split_rank_is_a_way_to_share_layers_out() -> None:
    assert LayerSplit(split_rank=1) != LayerSplit()
    chunks = list(LAYOUTS[DEEP].chunks())
    assert [chunk.encoder for chunk in chunks] == [range(1), range(1, 2), range(2, 2), range(2, 2)]
    assert [(chunk.embeds, chunk.ends_encoder, chunk.is_last) for chunk in chunks] == [
        (True, False, False), (False, True, False), (True, False, False), (False, False, True)
    ]  # fmt: skip
