"""The output of `megaconv inspect` about a model: its tree, its tensors, its layout."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file

import megaconv
from megaconv.api import inspect as inspected
from megaconv.commands.views import stats
from megaconv.commands.views.tree import Module
from megaconv.commands.views.tree import tree as tree_of
from megaconv.engine.statistics import Statistics
from megaconv.families import family
from megaconv.model.layout import Layout
from megaconv.model.naming import CORE
from megaconv.model.natives import RankTensors
from megaconv.model.rank_share import rank_shares
from megaconv.terminal import folded
from tests.config_models import raw_config, read
from tests.conftest import FIXTURES
from tests.models import write_llama
from tests.runs import assert_refused, run

MIXTURE = FIXTURES / "core-mixtral-seq-tp2pp2ep2" / "checkpoint"


def shown(path: Path, *options: str) -> Any:
    outcome = run("inspect", path, *options, "--json")
    assert (outcome.status, outcome.err) == (0, "")
    return json.loads(outcome.out)


# --tree


def test_equal_layers_are_one_line_of_the_tree(tmp_path: Path) -> None:
    model = write_llama(tmp_path / "model", layers=4)
    tree = shown(model, "--tree")["tree"]
    layers = next(module for module in tree["modules"] if module["name"] == "layers")
    assert [(module["name"], module["copies"]) for module in layers["modules"]] == [("0-3", 4)]
    assert tree["parameters"] == sum(
        tensor.numel() for tensor in load_file(model / "model.safetensors").values()
    )
    assert tree["parameters"] == sum(module["parameters"] for module in tree["modules"])
    assert "layers.0-3 " in run("inspect", model, "--tree").out


def test_layers_that_differ_are_lines_of_their_own() -> None:
    sizes = {f"layers.{layer}.mlp.weight": (8 if layer == 2 else 4, 16) for layer in range(5)}
    (layers,) = tree_of(sizes).modules
    assert [(module.name, module.parameters) for module in layers.modules] == [
        ("0-1", 8),
        ("2", 8),
        ("3-4", 8),
    ]


def test_the_sizes_of_folded_modules_are_those_of_all_of_them() -> None:
    def check(module: Module) -> None:
        assert module.parameters >= sum(inner.parameters for inner in module.modules)
        for inner in module.modules:
            check(inner)

    sizes = {
        f"layers.{layer}.experts.{e}.up.weight": (3, 6) for layer in range(2) for e in range(4)
    }
    root = tree_of(sizes)
    check(root)
    assert (root.parameters, root.nbytes) == (24, 48)
    assert root.modules[0].modules[0].modules[0].modules[0].copies == 4


def unknown(tmp_path: Path) -> Path:
    """A model of no family, in files of their usual kind."""
    model = write_llama(tmp_path / "model", layers=2)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(
        json.dumps(config | {"architectures": ["BlenderbotModel"], "model_type": "blenderbot"})
    )
    return model


def test_an_unknown_model_has_a_tree_by_its_own_names(tmp_path: Path) -> None:
    (head, inner) = shown(unknown(tmp_path), "--tree")["tree"]["modules"]
    assert (inner["name"], head["name"]) == ("model", "lm_head")


# --tensors


def test_tensors_are_found_by_canonical_and_by_native_name(tmp_path: Path) -> None:
    model = write_llama(tmp_path / "model", layers=2)
    by_canonical = shown(model, "--tensors", "layers.1.attn.*")["tensors"]
    by_native = shown(model, "--tensors", "model.layers.1.self_attn.*")["tensors"]
    assert by_canonical == by_native
    assert len(by_canonical) == 4
    assert len(shown(model, "--tensors")["tensors"]) == 21


def test_a_glob_that_fits_no_tensor_is_an_error(tmp_path: Path) -> None:
    model = write_llama(tmp_path / "model")
    for path in (model, model / "model.safetensors"):
        assert_refused(
            run("inspect", path, "--tensors", "layer.0.*"),
            2,
            "--tensors 'layer.0.*'",
            "fits no tensor",
        )


def test_a_page_in_a_directory_that_is_not_there_is_an_error_before_anything_is_read(
    tmp_path: Path,
) -> None:
    model, page = write_llama(tmp_path / "model"), tmp_path / "none" / "page.html"
    assert_refused(
        run("inspect", model, "--stats", "--html", page),
        2,
        "--html",
        str(page),
        "no such directory",
    )
    assert_refused(run("inspect", model, "--html", tmp_path), 2, "--html", "is a directory")


def test_a_tensors_file_and_offset_lead_to_its_bytes(tmp_path: Path) -> None:
    model = write_llama(tmp_path / "model", layers=1)
    (place,) = shown(model, "--tensors", "final_norm.weight")["tensors"]["final_norm.weight"][
        "places"
    ]
    (at,) = place["files"]
    raw = (model / at["file"]).read_bytes()[at["offset"] :][:64]
    expected = load_file(model / "model.safetensors")[place["native"]]
    assert (
        np.frombuffer(raw, np.uint16).tolist()
        == expected.view(dtype=__import__("torch").uint16).tolist()
    )


def test_each_rank_has_its_slice_of_a_tensor() -> None:
    tensor = shown(MIXTURE, "--tensors", "layers.0.attn.o.weight")["tensors"][
        "layers.0.attn.o.weight"
    ]
    held = {
        place["where"].split("/")[0]: place["columns"]
        for place in tensor["places"]
        if not place["copy"]
    }
    assert sorted(held.values()) == [[0, 16], [16, 32]]
    assert {name[:10] for name in held} == {"mp_rank_00", "mp_rank_01"}


def test_chunks_of_a_distributed_checkpoint_are_listed_with_their_files() -> None:
    tensor = shown(FIXTURES / "dist-llama-tp2pp2", "--tensors", "embed.weight")["tensors"][
        "embed.weight"
    ]
    files = [at["file"] for place in tensor["places"] for at in place["files"]]
    assert len(files) == 2
    assert all(file.startswith("iter_0000010/__") for file in files)


# --layout


@pytest.mark.parametrize(
    "name",
    [
        "core-llama-tp2pp2vpp2", "core-llama-tp1pp2-first1", "core-gpt2-tp2pp2", "core-mixtral-seq-tp2pp2ep2",
        "core-qwenlike-tp2pp1", "core-moe-shared-tp2ep2", "core-bert-tp2pp2",
    ],
)  # fmt: skip
def test_a_ranks_parameters_are_those_of_its_tensors(name: str) -> None:
    header = inspected(FIXTURES / name / "checkpoint").header
    assert header.layout is not None
    assert header.padded_vocab is not None
    rows = family(header.config.family).rows
    natives = RankTensors(rows, header.config, CORE, header.layout, header.padded_vocab)
    shares = rank_shares(rows, header.config, header.layout, header.padded_vocab)
    assert [share.parameters for share in shares] == held(natives, header.layout)


@pytest.mark.parametrize("tied", [False, True])
def test_a_rank_with_mtp_layers_has_the_embedding_too(tied: bool) -> None:
    raw = raw_config(
        "deepseek_v3", num_hidden_layers=4, num_nextn_predict_layers=1, tie_word_embeddings=tied
    )
    config, layout = read(raw), Layout(pp=2, vpp=1, stage_layers=(2, 2))
    rows = family("deepseek_v3").rows
    natives = RankTensors(rows, config, CORE, layout, config.vocab)
    assert [share.parameters for share in rank_shares(rows, config, layout, config.vocab)] == held(
        natives, layout
    )


def held(natives: RankTensors, layout: Layout) -> list[int]:
    """Elements of the tensors of each stage, on its first rank."""
    found = [0] * layout.pp
    for chunk in layout.chunks():
        written = [
            native for native in natives.of(0, chunk) if native.copy is None or native.copy.written
        ]
        found[chunk.pp_rank] += sum(int(np.prod(native.shape)) for native in written)
    return found


def test_the_picture_of_a_layout_shows_which_stage_has_which_layers() -> None:
    found = shown(FIXTURES / "core-llama-tp2pp2vpp2" / "checkpoint", "--layout")["layout"]
    assert [(stage["pp_rank"], stage["first_layer"]) for stage in found["stages"]] == [
        (0, 0),
        (1, 1),
        (0, 2),
        (1, 3),
    ]
    lines = run(
        "inspect", FIXTURES / "core-llama-tp2pp2vpp2" / "checkpoint", "--layout"
    ).out.splitlines()
    rows = {line.split()[1]: line[8:14] for line in lines if line.startswith("pp ")}
    assert {rank: [cell for cell in row if cell != " "] for rank, row in rows.items()} == {
        "0": ["E", rows["0"][1], rows["0"][3]],
        "1": [rows["1"][2], rows["1"][4], "H"],
    }


def test_the_picture_of_an_encoder_and_a_decoder_shows_the_layers_of_both() -> None:
    run_of_t5 = FIXTURES / "pipelined-t5-tp1e2d2" / "checkpoint"
    stages = shown(run_of_t5, "--layout")["layout"]["stages"]
    assert [(stage["encoder_layers"], stage["layers"]) for stage in stages] == [
        (1, 0), (1, 0), (0, 1), (0, 1),
    ]  # fmt: skip
    lines = run("inspect", run_of_t5, "--layout").out.splitlines()
    assert "layers 0-1 of the encoder, 0-1 of the decoder" in lines[1]
    rows = [line[8:14] for line in lines if line.startswith("pp ")]
    encoder, decoder = rows[0][1], rows[2][3]
    assert rows == [f"E{encoder}    ", f"  {encoder}   ", f"  E{decoder}  ", f"    {decoder}H"]
    assert f"{encoder} a layer of the encoder" in "\n".join(lines)


def test_the_picture_of_a_mixture_shares_out_its_experts() -> None:
    found = shown(MIXTURE, "--layout")["layout"]
    assert found["experts_of_ep_rank"] == [[0, 1], [2, 3]]
    assert found["ranks"] == 8
    assert "ep 0: 0-1, ep 1: 2-3" in run("inspect", MIXTURE, "--layout").out


def test_the_picture_names_a_single_expert_of_a_rank_once(tmp_path: Path) -> None:
    megaconv.convert(MIXTURE, tmp_path / "ep4", saver="core", tp=1, pp=1, ep=4, etp=1)
    shown_text = run("inspect", tmp_path / "ep4", "--layout").out
    assert "experts of each layer: ep 0: 0, ep 1: 1, ep 2: 2, ep 3: 3" in shown_text
    assert "all weights but the experts' are on 4 data-parallel ranks" in shown_text


def test_a_layout_of_an_unknown_model_is_refused(tmp_path: Path) -> None:
    assert_refused(run("inspect", unknown(tmp_path), "--layout"), 2, "--layout", "BlenderbotModel")


def test_lines_fit_a_terminal_that_is_narrow(tmp_path: Path) -> None:
    values = Statistics(8, 0.5, 1.0, -2.5, 3.0, 1, 0, 0, (1,) * 32, 8)
    found = {"layers.0.mlp.experts.0.down.weight": values}
    wide, narrow = list(stats.lines(found)), list(stats.lines(found, columns=80))
    assert (len(wide), max(map(len, wide)) > 80) == (2, True)
    assert (len(narrow), max(map(len, narrow)) <= 80) == (3, True)
    line = "    decoder.layers.0.self_attention.linear_qkv.weight rows 0-15  iter_0000005/mp_rank_00/model_optim_rng.pt at 10,816"
    assert folded(line, None) == [line]
    assert folded(line, 70) == [
        "    decoder.layers.0.self_attention.linear_qkv.weight rows 0-15",
        "        iter_0000005/mp_rank_00/model_optim_rng.pt at 10,816",
    ]
