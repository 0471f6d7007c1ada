"""`convert --keep-experts`: mixtures with some of their experts, in all formats; and what is refused."""

import json
import re
import shutil
import signal
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import megaconv
from megaconv.errors import CheckpointError, UsageError
from megaconv.options.kept_experts import EVERYWHERE, kept_experts
from tests import transformers_oracle as oracle
from tests.conftest import FIXTURES
from tests.engine.averaged_models import weights as stored
from tests.engine.test_interrupted import KILL
from tests.families.test_families import write_model
from tests.forks import start
from tests.models import write_llama
from tests.runs import assert_refused, finish, run

ALL = {**oracle.VARIANTS, **oracle.MIXTURES, **oracle.BEYOND_MEGATRON, **oracle.CONVERTED}
DENSE = ("granite_moe_hybrid", "jamba, dense")
"""Variants whose settings name experts that they don't have."""
WITH_EXPERTS = [
    name
    for name, variant in ALL.items()
    if re.search("expert|moe", str(variant)) and name not in DENSE
]
QUICK = ("mixtral", "deepseek_v3", "gpt_oss", "gemma4_text, experts", "longcat_flash", "zaya")
EACH = [
    pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in WITH_EXPERTS
]
REFUSED = ("deepseek_v4", "jetmoe")
"""Families whose tokens, or whose attention, have experts too."""


def chosen_by_layer(model: Path, random: Random) -> dict[str, list[int]]:
    """Other experts of each layer, the same number of each group; all but one, or half of them."""
    checkpoint = megaconv.open(model)
    experts = checkpoint.config.experts
    groups = experts.groups or 1
    of_group = experts.count // groups
    least = max(2, -(-experts.per_token // (experts.group_topk or 1)))
    size = max(least, of_group - 1)
    names = [
        re.match(r"((?:layers|mtp)\.\d+)\.mlp\.experts\.", name) for name in checkpoint.tensors
    ]
    return {
        layer: sorted(
            group * of_group + number
            for group in range(groups)
            for number in random.sample(range(of_group), size)
        )
        for layer in sorted({match[1] for match in names if match})
    }


def weights(model: Path) -> dict[str, torch.Tensor]:
    checkpoint = megaconv.open(model)
    return {name: checkpoint.load(name) for name in checkpoint.tensors}


def assert_kept(output: Path, source: Path, kept: dict[str, list[int]]) -> None:
    """The output has these experts under their new numbers, the router's rows for them, and all other tensors."""
    whole, found = weights(source), weights(output)
    count = megaconv.open(source).config.experts.count
    expected = {}
    for name, tensor in whole.items():
        match = re.fullmatch(r"((?:layers|mtp)\.\d+)\.mlp\.(experts\.(\d+)\.)?(.+)", name)
        if match is None or match[1] not in kept:
            expected[name] = tensor
        elif match[2] is None:
            has_rows = match[4].startswith("router.") and len(tensor) >= count > len(kept[match[1]])
            rows = [*kept[match[1]], *range(count, len(tensor))]
            is_by_expert = has_rows and found[name].shape != tensor.shape
            expected[name] = tensor[rows] if is_by_expert else tensor
        elif int(match[3]) in kept[match[1]]:
            number = kept[match[1]].index(int(match[3]))
            expected[f"{match[1]}.mlp.experts.{number}.{match[4]}"] = tensor
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=0, msg=name)


def sliced_logits(
    output: Path, source: Path, kept: dict[str, list[int]], tokens: torch.Tensor
) -> Any:
    """The logits of transformers' model with the rows of these experts, taken from its own state dictionary."""
    whole, small = oracle.load(source), oracle.load(output)
    shapes = {name: tensor.shape for name, tensor in small.state_dict().items()}
    count = megaconv.open(source).config.experts.count
    sliced = {}
    for name, tensor in whole.state_dict().items():
        if tensor.shape != shapes[name]:
            layer = re.search(r"\.(?:layers|h|blocks)\.(\d+)\.", name)
            assert layer is not None
            # DBRX has the rows of all experts in one matrix.
            by_expert = (
                tensor if len(tensor) < 2 * count else tensor.view(count, -1, *tensor.shape[1:])
            )
            rows = [*kept[f"layers.{layer[1]}"], *range(count, len(by_expert))]
            tensor = by_expert[rows].reshape(shapes[name])
        sliced[name] = tensor
    small.load_state_dict(sliced)
    return oracle.compute(small, tokens)


@pytest.mark.oracle
@pytest.mark.parametrize("name", EACH)
def test_transformers_computes_each_family_with_the_kept_experts(name: str, tmp_path: Path) -> None:
    source, output = tmp_path / "hf", tmp_path / "out"
    oracle.create(ALL[name], source)
    kept = chosen_by_layer(source, Random(name))
    if name.partition(",")[0] in REFUSED:
        with pytest.raises(CheckpointError, match="--keep-experts"):
            megaconv.convert(source, output, saver="hf", keep_experts=kept)
        return
    made = megaconv.convert(source, output, saver="hf", keep_experts=kept, workers=1, verify=True)
    assert made.changes.experts is not None
    assert made.changes.experts.kept == kept
    assert_kept(output, source, kept)
    if name.startswith("longcat"):  # its layers have other numbers in transformers
        return
    tokens = torch.randint(7, 120, (1, 12))
    found = oracle.compute(oracle.load(output), tokens)
    expected = sliced_logits(output, source, kept, tokens)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Experts in four layers, of which the first two are dense, and in an MTP layer."""
    place = tmp_path_factory.mktemp("mixture") / "hf"
    sizes = {"num_hidden_layers": 4, "n_routed_experts": 8, "num_experts_per_tok": 2}
    return write_model(
        place, "glm4_moe", first_k_dense_replace=2, num_nextn_predict_layers=1, **sizes
    )


LAYERS = ("layers.2", "layers.3", "mtp.0")
OTHERS = {"layers.2": [0, 2, 3, 7], "layers.3": [1, 4, 5, 6], "mtp.0": [0, 1, 6, 7]}


def same_of_all(experts: list[int]) -> dict[str, list[int]]:
    return dict.fromkeys(LAYERS, experts)


def kept_file(place: Path, keep: Any) -> Path:
    place.write_text(json.dumps({"keep": keep, "tokens": 12}))
    return place


@pytest.mark.parametrize(
    "layout",
    [
        ["--tp", "2", "--ep", "2"],
        ["--ep", "8", "--ckpt-format", "torch_dist"],
        ["--pp", "2", "--ep", "4", "--etp", "1"],
    ],
    ids=" ".join,
)
def test_experts_are_kept_between_all_formats(
    layout: list[str], mixture: Path, tmp_path: Path
) -> None:
    assert run("convert", mixture, tmp_path / "core", "--saver", "core", *layout).status == 0
    file = kept_file(tmp_path / "kept.json", OTHERS)
    outcome = run(
        "convert", tmp_path / "core", tmp_path / "out", "--keep-experts", file, "--verify"
    )
    assert outcome.status == 0, outcome.err
    assert "4 of the 8 experts of each layer" in outcome.err
    assert_kept(tmp_path / "out", mixture, OTHERS)
    assert run("verify", tmp_path / "out").status == 0
    record = json.loads((tmp_path / "out" / "megaconv.json").read_text())
    assert record["provenance"]["options"]["--keep-experts"] == OTHERS


def test_expert_parallel_ranks_are_those_that_divide_the_kept_experts(
    mixture: Path, tmp_path: Path
) -> None:
    assert run("convert", mixture, tmp_path / "core", "--saver", "core", "--ep", "4").status == 0
    words = ["convert", tmp_path / "core", tmp_path / "out", "--keep-experts", "0-5"]
    assert run(*words).status == 0
    layout = megaconv.inspect(tmp_path / "out").header.layout
    assert layout is not None
    assert layout.ep == 2


def test_the_same_experts_of_all_layers_are_kept(mixture: Path, tmp_path: Path) -> None:
    outcome = run(
        "convert", mixture, tmp_path / "out", "--saver", "hf", "--keep-experts", "6,0-2", "--json"
    )
    assert outcome.status == 0, outcome.err
    same = same_of_all([0, 1, 2, 6])
    assert_kept(tmp_path / "out", mixture, same)
    experts = json.loads(outcome.out)["changes"]["experts"]
    assert experts == {
        "before": 8, "after": 4, "per_token": 2, "granularity": 1, "experts_of": [], "kept": same,
    }  # fmt: skip


def test_layers_are_chosen_after_the_experts(mixture: Path, tmp_path: Path) -> None:
    """A file names the layers of the input, also if some of them are left out."""
    megaconv.convert(mixture, tmp_path / "out", saver="hf", keep_experts=OTHERS, layers=[0, 3])
    megaconv.convert(mixture, tmp_path / "few", saver="hf", layers=[0, 3])
    of_output = {"layers.1": OTHERS["layers.3"], "mtp.0": OTHERS["mtp.0"]}
    assert_kept(tmp_path / "out", tmp_path / "few", of_output)


def test_experts_of_an_average_are_kept_after_it(mixture: Path, tmp_path: Path) -> None:
    words = ["convert", mixture, tmp_path / "out", "--average", mixture, "--saver", "hf"]
    assert run(*words, "--keep-experts", "0-3").status == 0
    assert_kept(tmp_path / "out", mixture, same_of_all([0, 1, 2, 3]))


def test_all_names_of_the_number_of_experts_are_brought_up_to_date(tmp_path: Path) -> None:
    """transformers reads either name of a Qwen 3 MoE's number of experts."""
    model = write_model(tmp_path / "hf", "qwen3_moe", num_experts=8, num_local_experts=8)
    megaconv.convert(model, tmp_path / "out", saver="hf", keep_experts=[0, 5, 7])
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["num_experts"] == 3
    assert config.get("num_local_experts", 3) == 3


def test_the_dtype_of_config_json_is_that_of_most_weights_that_stay(
    mixture: Path, tmp_path: Path
) -> None:
    """transformers loads all weights in it: that of the whole model would round those that stay."""
    tensors = stored(mixture)
    wide = {name for name in tensors if re.search(r"\.experts\.[01]\.|layers\.[01]\.", name)}
    shutil.copytree(mixture, tmp_path / "hf")
    made = {name: each.float() if name in wide else each for name, each in tensors.items()}
    save_file(made, tmp_path / "hf" / "model.safetensors", {"format": "pt"})
    config = tmp_path / "hf" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"torch_dtype": "bfloat16"}))
    megaconv.convert(tmp_path / "hf", tmp_path / "whole", saver="hf")
    megaconv.convert(tmp_path / "hf", tmp_path / "few", saver="hf", keep_experts=[0, 1])
    dtypes = [
        json.loads((tmp_path / name / "config.json").read_text())["torch_dtype"]
        for name in ("whole", "few")
    ]
    assert dtypes == ["bfloat16", "float32"]


def test_weights_that_changed_since_they_were_written_are_refused(
    mixture: Path, tmp_path: Path
) -> None:
    megaconv.convert(mixture, tmp_path / "hf", saver="hf")
    file = tmp_path / "hf" / "model.safetensors"
    tensors = stored(tmp_path / "hf")
    tensors["model.layers.2.mlp.experts.4.up_proj.weight"][0, 0] += 1
    save_file(tensors, file, {"format": "pt"})
    words = ["convert", tmp_path / "hf", tmp_path / "out", "--saver", "hf", "--keep-experts"]
    refused = run(*words, "3-4")
    assert refused.status == 3
    assert "1 tensor with other values than were written: layers.2.mlp.experts.4.up" in refused.err
    assert not (tmp_path / "out").exists()
    assert run(*words, "2-3").status == 0


def test_a_killed_run_is_not_continued_with_other_experts(mixture: Path, tmp_path: Path) -> None:
    words = ["convert", mixture, tmp_path / "out", "--saver", "hf", "--resume", "--workers", 1]
    kill = KILL.format(owner="os", name="pwrite", number=30, journaled="pass")
    killed = finish(start(*words, "--keep-experts", "0-3", before=kill))
    assert killed.status == -signal.SIGKILL, killed
    assert run(*words, "--keep-experts", "2-5").status == 0
    assert_kept(tmp_path / "out", mixture, same_of_all([2, 3, 4, 5]))


def test_optimizer_state_is_left_out(tmp_path: Path) -> None:
    trained = FIXTURES / "dist-mixtral-optim-ep2-fully_reshardable"
    count = megaconv.open(trained).config.experts.count
    words = [
        "convert",
        trained,
        tmp_path / "out",
        "--saver",
        "core",
        "--keep-experts",
        f"1-{count - 1}",
    ]
    assert_refused(run(*words, "--optimizer"), 2, "--optimizer", "--keep-experts")
    assert run(*words).status == 0
    assert not megaconv.inspect(tmp_path / "out").header.has_optimizer


@pytest.mark.parametrize(
    ("given", "status", "message"),
    [
        ("0-8", 2, "layers.2 of {} has no expert 8; its experts are 0 to 7"),
        ("3", 2, "layers.2: keeps 1 expert, and each token needs 2; keep 2 or more"),
        ("3-1", 2, "write numbers of experts from 0, such as 0-15,24-31"),
        ("0,0,1", 2, "0,0,1: names expert 0 twice"),
        ("nowhere.json", 2, "nowhere.json: is neither a list of experts, such as 0-47,60, nor a file"),
        ("", 2, "--keep-experts '': is an empty path; is a variable unset"),
        ({**OTHERS, "layers.3": [0, 1]}, 2, "layers.3 keeps 2 experts and mtp.0 4; all must keep"),
        ({"layers.2": [0, 1]}, 2, "says nothing of layers.3, mtp.0, which has experts in {} too"),
        ({**OTHERS, "layers.1": [0, 1, 2, 3]}, 2, "layers.1 of {} has no experts"),
        ({"layer 2": [0, 1]}, 3, "expected names such as layers.3 or mtp.0 in place of 'layer 2'"),
        ({"layers.2": [0, -1]}, 3, "expected a list of numbers from 0 for layers.2"),
        ({"layers.2": [True]}, 3, "expected a list of numbers from 0 for layers.2"),
        ({**OTHERS, "layers.2": [0, int("9" * 4000)]}, 2, "has no expert 99999999999999999999; its experts are"),
        ({**OTHERS, "layers." + "7" * 9999: [0]}, 3, "expected names such as layers.3"),
        ({"layers.2": []}, 3, "expected a list of numbers from 0 for layers.2"),
        ({"layers.2": [3, 3]}, 2, "layers.2: names expert 3 twice"),
        ({}, 3, 'expected an object "keep" with the experts of each layer'),
        ([], 3, 'expected an object "keep" with the experts of each layer'),
    ],
)  # fmt: skip
def test_experts_that_there_are_not_are_one_line(
    given: Any, status: int, message: str, mixture: Path, tmp_path: Path
) -> None:
    word = given if isinstance(given, str) else kept_file(tmp_path / "kept.json", given)
    outcome = run("convert", mixture, tmp_path / "out", "--saver", "hf", f"--keep-experts={word}")
    assert_refused(outcome, status, message.format(mixture))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[1]", b"\xff\xfe", b'{"keep": 1e999}', b"[" * 100_000]
)
def test_damaged_files_are_one_line(content: bytes, mixture: Path, tmp_path: Path) -> None:
    file = tmp_path / "kept.json"
    file.write_bytes(content)
    outcome = run("convert", mixture, tmp_path / "out", "--saver", "hf", "--keep-experts", file)
    assert_refused(outcome, 3, "kept.json")


@pytest.mark.parametrize(
    ("content", "key"),
    [
        ('{"keep": {"layers.3": [0, 1], "mtp.0": [0, 1], "layers.3": [2, 3]}}', "layers.3"),
        ('{"keep": {"layers.3": [0, 1]}, "tokens": 1, "keep": {"layers.3": [2, 3]}}', "keep"),
    ],
)
def test_a_key_that_is_there_twice_is_named(
    content: str, key: str, mixture: Path, tmp_path: Path
) -> None:
    """Python's reader takes the last one."""
    file = tmp_path / "kept.json"
    file.write_text(content)
    outcome = run("convert", mixture, tmp_path / "out", "--saver", "hf", "--keep-experts", file)
    assert_refused(outcome, 3, f"kept.json: has the key '{key}' twice; name each key")
    assert not (tmp_path / "out").exists()


def test_groups_of_experts_keep_the_same_number(tmp_path: Path) -> None:
    oracle.create(ALL["deepseek_v3"], tmp_path / "hf", n_routed_experts=16)
    words = ["convert", tmp_path / "hf", tmp_path / "out", "--saver", "hf", "--keep-experts"]
    assert_refused(
        run(*words, "0-11"), 2, "the router has 4 groups of experts; keep the same number"
    )
    assert_refused(
        run(*words, "0,4,8,12"), 2, "keeps 1 of each group of experts; the router needs 2 or more"
    )
    assert run(*words, "0-2,4-6,8-10,12-14").status == 0


@pytest.mark.parametrize(("groups", "kept"), [(1, "2"), (2, "0,2")])
def test_groups_that_are_all_taken_keep_two_experts_too(
    groups: int, kept: str, tmp_path: Path
) -> None:
    """transformers' class computes the best two experts of each group."""
    sizes = {"n_group": groups, "topk_group": groups, "num_experts_per_tok": groups}
    oracle.create(ALL["deepseek_v3"], tmp_path / "hf", n_routed_experts=4, **sizes)
    words = ["convert", tmp_path / "hf", tmp_path / "out", "--saver", "hf", "--keep-experts"]
    assert_refused(run(*words, kept), 2, "keeps 1 of each group of experts; the router needs 2")


def test_other_models_are_refused(mixture: Path, tmp_path: Path) -> None:
    dense = write_llama(tmp_path / "llama", layers=2)
    words = [tmp_path / "out", "--saver", "hf", "--keep-experts", "0-3"]
    assert_refused(run("convert", dense, *words), 3, "llama has no experts; leave the option out")
    assert_refused(
        run("convert", mixture, *words, "--base", mixture),
        2,
        "--keep-experts and --base",
        "leave --base out",
    )
    assert_refused(run("convert", mixture, *words, "--num-experts", 8), 3, "has 4 experts already")
    case = FIXTURES / "peft-llama-all-linear"
    both = ["--adapter", case / "adapter"]
    assert_refused(run("convert", case / "base", *words, *both), 2, "merge the adapter first")


def test_a_mixture_of_dense_layers_alone_is_refused(tmp_path: Path) -> None:
    dense = tmp_path / "dense"
    oracle.create(ALL["deepseek_v3"], dense, num_hidden_layers=2, first_k_dense_replace=2)
    words = [tmp_path / "out", "--saver", "hf", "--keep-experts", "0-7"]
    assert_refused(run("convert", dense, *words), 3, "dense has no experts; leave the option out")


def test_values_of_python_are_read() -> None:
    assert kept_experts(range(3)) == {EVERYWHERE: (0, 1, 2)}
    assert kept_experts({"layers.0": [2, 0]}) == {"layers.0": (0, 2)}
    with pytest.raises(TypeError, match=r"experts holds 0\.5"):
        kept_experts([0.5])  # type: ignore[list-item]
    with pytest.raises(UsageError, match=r"layers\.0: names expert 1 twice"):
        kept_experts({"layers.0": [1, 1]})
