"""Retro: checkpoints of megatron-core 0.15.3, and outputs in its formats at any tensor-parallel size."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import megaconv
from formats import torch_dist, torch_zip
from megaconv.errors import CheckpointError
from megaconv.families import family
from megaconv.model.layout import Layout
from megaconv.model.naming import CORE_LOCAL
from megaconv.model.natives import native_tensors
from tests.trainer.parallel.test_retro import FIXTURES as OF_TRAINER

FIXTURES = Path(__file__).parents[1] / "fixtures"
RANKS, DISTRIBUTED = FIXTURES / "retro-tp2-torch", FIXTURES / "retro-tp2-dist"


def test_both_formats_hold_the_weights_that_were_saved() -> None:
    assert megaconv.fingerprint(RANKS) == megaconv.fingerprint(DISTRIBUTED)
    opened, layout = megaconv.open(RANKS), Layout(stage_layers=(6,))
    (chunk,) = layout.chunks()
    config, rows = opened.config, family("retro").rows
    whole = load_file(OF_TRAINER / "retro-rope" / "weights.safetensors")
    natives = list(native_tensors(rows, config, CORE_LOCAL, layout, 0, chunk, config.vocab))
    assert {native.name for native in natives} == set(whole)
    for native in natives:
        for name, regions in native.parts.items():
            ours = opened.load(name)
            for region in regions:
                box, row = region.box, region.row
                theirs = whole[native.name][row : row + box.rows]
                assert torch.equal(ours[box.row0 : box.row1], theirs)


@pytest.mark.parametrize("ckpt_format", ["torch", "torch_dist"])
@pytest.mark.parametrize("tp", [1, 4])
def test_there_and_back_is_the_same_to_the_bit(ckpt_format: str, tp: int, tmp_path: Path) -> None:
    megaconv.convert(
        RANKS,
        tmp_path / "there",
        saver="core",
        ckpt_format=ckpt_format,
        tp=tp,
        transformer_impl="local",
    )
    assert megaconv.fingerprint(tmp_path / "there") == megaconv.fingerprint(RANKS)
    megaconv.convert(
        tmp_path / "there",
        tmp_path / "back",
        saver="core",
        ckpt_format="torch",
        tp=2,
        transformer_impl="local",
    )
    for rank in ("mp_rank_00", "mp_rank_01"):
        file = Path("iter_0000010") / rank / "model_optim_rng.pt"
        ours, theirs = (
            torch.load(root / file, weights_only=False)["model"]
            for root in (tmp_path / "back", RANKS)
        )
        assert list(ours) == list(theirs)
        assert all(
            torch.equal(ours[name], tensor)
            if isinstance(tensor, torch.Tensor)
            else ours[name] == tensor
            for name, tensor in theirs.items()
        )


def test_a_distributed_output_has_megatron_cores_keys(tmp_path: Path) -> None:
    megaconv.convert(
        RANKS, tmp_path / "out", saver="core", ckpt_format="torch_dist", transformer_impl="local"
    )
    ours, theirs = (
        torch_dist.open_directory(root / "iter_0000010") for root in (tmp_path / "out", DISTRIBUTED)
    )
    shapes = [
        {name: tensor.shape for name, tensor in each.tensors().items()} for each in (ours, theirs)
    ]
    assert shapes[0] == shapes[1]
    assert set(ours.objects()) == set(theirs.objects())


def test_arguments_say_what_tensors_do_not(tmp_path: Path) -> None:
    megaconv.convert(DISTRIBUTED, tmp_path / "out", saver="core")
    file = tmp_path / "out" / "iter_0000010" / "mp_rank_00" / "model_optim_rng.pt"
    args = vars(torch_zip.read(file)["args"])
    expected = {
        "chunk_length": 8,
        "num_neighbors": 2,
        "num_retrieved_chunks": 2,
        "encoder_layers": 2,
    }
    assert {name: args[f"retro_{name}"] for name in expected} == expected
    assert args["retro_add_retriever"] is True


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"saver": "hf"}, "transformers has no class for a Retro; --drop-retrieval"),
        ({"saver": "core", "pp": 2}, "Megatron's Retro has no pipeline stages"),
        ({"saver": "legacy"}, "is written for Megatron core"),
        ({"saver": "hf", "drop_retrieval": True}, "norm.final is False"),
        ({"saver": "gguf"}, "retro is not supported"),
    ],
)  # fmt: skip
def test_an_output_that_can_not_hold_it_is_refused(
    options: dict[str, object], message: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=message):
        megaconv.convert(RANKS, tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()
