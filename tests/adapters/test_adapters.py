"""LoRA adapters merged into weights: against what peft made of the same files, and what is refused."""

import json
import shutil
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import megaconv
from formats.tensor import Box, matrix_shape, read_tensor
from megaconv.adapters.low_rank import product, row_norms
from megaconv.adapters.merging import merge
from megaconv.engine.opening import open_source
from megaconv.input import find_input
from megaconv.options import AdapterChoice
from tests.conftest import FIXTURES
from tests.runs import assert_refused, run

LINEAR = FIXTURES / "peft-llama-all-linear"
TIED = FIXTURES / "peft-llama-patterns-rslora-tied"
DORA = FIXTURES / "peft-qwen3-dora"
EXPERTS = FIXTURES / "peft-mixtral-experts"
CASES = sorted(FIXTURES.glob("peft-*"))
CONV1D = FIXTURES / "peft-gpt2-conv1d"
PREFIX = "base_model.model."


def edited(
    adapter: Path,
    target: Path,
    config: dict[str, Any] | None = None,
    tensors: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]] = dict,
) -> Path:
    """A copy of an adapter with other keys in its configuration, and other tensors."""
    shutil.copytree(adapter, target)
    file = target / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | (config or {})))
    weights = target / "adapter_model.safetensors"
    save_file(
        {name: tensor.clone() for name, tensor in tensors(load_file(weights)).items()}, weights
    )
    return target


def assert_same_bits(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert tensor.dtype == right[name].dtype
        assert torch.equal(tensor, right[name]), name


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_merged_weights_are_those_of_peft_bit_for_bit(case: Path, tmp_path: Path) -> None:
    outcome = run("merge", case / "base", case / "adapter", "--save-dir", tmp_path / "out")
    assert outcome.status == 0, outcome
    assert f"adapter {case / 'adapter'}" in outcome.err  # a merge is never silent
    assert_same_bits(
        load_file(tmp_path / "out/model.safetensors"), load_file(case / "merged/model.safetensors")
    )


def test_an_adapter_is_merged_while_the_model_is_sharded(tmp_path: Path) -> None:
    report = megaconv.convert(
        EXPERTS / "base",
        tmp_path / "core",
        saver="core",
        tp=2,
        pp=2,
        ep=2,
        adapters=[str(EXPERTS / "adapter")],
    )
    assert (
        report.fingerprint
        == megaconv.fingerprint(EXPERTS / "merged")
        == megaconv.fingerprint(tmp_path / "core")
    )


@pytest.mark.parametrize("case", [DORA, EXPERTS, CONV1D], ids=lambda case: case.name)
def test_a_rectangle_of_a_merged_tensor_has_the_bits_of_the_whole(case: Path) -> None:
    source = open_source(find_input(case / "base"))
    for key, tensor in merge(source, [AdapterChoice(str(case / "adapter"))]).tensors():
        rows, cols = matrix_shape(tensor.shape)
        whole = read_tensor(tensor)
        size = whole.shape[1] // cols
        for box in (
            Box(0, 1, 0, cols),
            Box(rows - 1, rows, cols - 1, cols),
            Box(rows // 3, rows, cols // 2, cols),
        ):
            part = np.empty((box.rows, box.cols * size), np.uint8)
            tensor.read_into(box, part)
            assert np.array_equal(
                part, whole[box.row0 : box.row1, box.col0 * size : box.col1 * size]
            ), key


def test_two_adapters_are_merged_one_after_the_other_each_times_its_weight(tmp_path: Path) -> None:
    words = (f"{LINEAR / 'adapter'}:0.5", f"{LINEAR / 'adapter'}:-2")
    assert run("merge", LINEAR / "base", *words, "--save-dir", tmp_path / "out").status == 0
    name = "model.layers.1.mlp.up_proj"
    adapter = load_file(LINEAR / "adapter/adapter_model.safetensors")
    delta = adapter[f"{PREFIX}{name}.lora_B.weight"] @ adapter[f"{PREFIX}{name}.lora_A.weight"]
    expected = load_file(LINEAR / "base/model.safetensors")[name + ".weight"]
    for weight in (0.5, -2):
        expected = (expected.float() + delta * (2 * weight)).bfloat16()  # lora_alpha 8, r 4
    assert torch.equal(load_file(tmp_path / "out/model.safetensors")[name + ".weight"], expected)


def test_a_merged_model_is_quantized_as_in_a_second_step(tmp_path: Path) -> None:
    base, adapter = LINEAR / "base", LINEAR / "adapter"
    options = ("--save-dir", tmp_path / "one", "--quantize", "fp8-per-channel", "--verify")
    assert run("merge", base, adapter, *options).status == 0
    megaconv.merge(base, adapter, tmp_path / "merged")
    megaconv.convert(tmp_path / "merged", tmp_path / "two", saver="hf", quantize="fp8-per-channel")
    megaconv.merge(base, adapter, tmp_path / "python", quantize="fp8-per-channel")
    one, two, python = (
        (tmp_path / name / "model.safetensors").read_bytes() for name in ("one", "two", "python")
    )
    assert one == two == python


def test_python_takes_paths_of_adapters(tmp_path: Path) -> None:
    base, adapter = LINEAR / "base", LINEAR / "adapter"
    named = megaconv.merge(base, str(adapter), tmp_path / "named")
    given: list[Path | list[Path]] = [adapter, [adapter]]
    for number, adapters in enumerate(given):
        merged = megaconv.merge(base, adapters, tmp_path / str(number))
        assert merged.fingerprint == named.fingerprint
    converted = megaconv.convert(base, tmp_path / "core", saver="core", adapters=[adapter])
    assert converted.fingerprint == named.fingerprint


def test_an_adapter_is_merged_in_the_wider_of_two_dtypes(tmp_path: Path) -> None:
    adapter = LINEAR / "adapter"
    assert (
        run(
            "merge", LINEAR / "base", adapter, "--save-dir", tmp_path / "wide", "--dtype", "fp32"
        ).status
        == 0
    )
    wide = load_file(tmp_path / "wide/model.safetensors")
    merged = load_file(LINEAR / "merged/model.safetensors")
    assert_same_bits({name: tensor.bfloat16() for name, tensor in wide.items()}, merged)
    assert any(not torch.equal(tensor, merged[name].float()) for name, tensor in wide.items())


def test_a_base_of_two_dtypes_is_merged_in_the_requested_one(tmp_path: Path) -> None:
    """As the attention of a GPT-OSS beside its experts in MXFP4, which are read in the requested dtype."""
    adapter = LINEAR / "adapter"
    for name, narrow in (("mixed", "v_proj"), ("wide", "nothing")):
        shutil.copytree(LINEAR / "base", tmp_path / name)
        weights = tmp_path / name / "model.safetensors"
        tensors = load_file(weights)
        for key, tensor in tensors.items():
            tensors[key] = tensor if narrow in key else tensor.float()
        save_file(tensors, weights, {"format": "pt"})
        out = tmp_path / f"merged-{name}"
        megaconv.merge(tmp_path / name, adapter, out, dtype="float32")
    assert_same_bits(
        *(load_file(tmp_path / f"merged-{name}/model.safetensors") for name in ("mixed", "wide"))
    )


def test_the_output_names_the_adapter_and_its_hash(tmp_path: Path) -> None:
    report = megaconv.convert(
        LINEAR / "base", tmp_path / "out", saver="hf", adapters=[f"{LINEAR / 'adapter'}:0.5"]
    )
    (adapter,) = json.loads((tmp_path / "out/megaconv.json").read_text())["adapters"]
    assert (adapter["path"], adapter["weight"]) == (str(LINEAR / "adapter"), 0.5)
    assert (
        adapter["sha256"]
        == sha256((LINEAR / "adapter/adapter_model.safetensors").read_bytes()).hexdigest()
    )
    assert report.to_json()["adapters"] == [adapter]


@pytest.mark.parametrize("saver", ["hf", "core"])
def test_an_adapter_is_not_merged_into_its_own_output_again(saver: str, tmp_path: Path) -> None:
    """The refusal also holds if the output was converted in between and another adapter was merged into it."""
    adapter = LINEAR / "adapter"
    other = edited(
        adapter,
        tmp_path / "other",
        tensors=lambda given: {name: 2 * each for name, each in given.items()},
    )
    megaconv.merge(LINEAR / "base", str(adapter), tmp_path / "first")
    megaconv.convert(tmp_path / "first", tmp_path / "second", saver=saver)
    megaconv.merge(tmp_path / "second", str(other), tmp_path / "third")
    for base in ("first", "second", "third"):
        again = run("merge", tmp_path / base, f"{adapter}:0.5", "--save-dir", tmp_path / "out")
        assert_refused(
            again, 2, str(adapter), f"{tmp_path / base} has it merged into its weights already"
        )
    record = json.loads((tmp_path / "third/megaconv.json").read_text())
    assert [each["path"] for each in record["adapters"]] == [str(adapter), str(other)]
    moved = shutil.copytree(tmp_path / "first", tmp_path / "moved")
    (moved / "megaconv.json").unlink()
    assert run("merge", moved, adapter, "--save-dir", tmp_path / "out").status == 0


def test_an_adapter_is_not_merged_into_what_a_patch_of_its_output_makes(tmp_path: Path) -> None:
    base, adapter, patch = LINEAR / "base", LINEAR / "adapter", tmp_path / "patch"
    megaconv.merge(base, str(adapter), tmp_path / "merged")
    assert run("delta", base, tmp_path / "merged", "--save-dir", patch).status == 0
    assert run("apply", base, patch, "--save-dir", tmp_path / "made").status == 0
    into_made = ("merge", tmp_path / "made", adapter)
    into_patch = ("convert", patch, "--saver", "hf", "--option", f"base={base}")
    for words in (into_made, (*into_patch, "--adapter", adapter)):
        again = run(*words, "--save-dir", tmp_path / "out")
        assert_refused(again, 2, str(adapter), "has it merged into its weights already")


def test_an_adapter_is_not_merged_twice_in_one_command(tmp_path: Path) -> None:
    """Under another name neither."""
    adapter = LINEAR / "adapter"
    copy = shutil.copytree(adapter, tmp_path / "copy")
    for second in (adapter, copy):
        outcome = run("merge", LINEAR / "base", adapter, second, "--save-dir", tmp_path / "out")
        assert_refused(outcome, 2, "is given twice")


HUB_NAME = "meta-llama/Llama-2-7b-hf"


@pytest.mark.parametrize(
    ("trained_on", "base", "config", "warned"),
    [
        (HUB_NAME, "llama-2-7B-hf", {}, False),
        (HUB_NAME, "runs/llama-2-7b-hf/iter_0000005", {}, False),
        (HUB_NAME, "models--meta-llama--Llama-2-7b-hf/snapshots/0123abc", {}, False),
        ("/cache/models--meta-llama--Llama-2-7b-hf/snapshots/0123abc/", "llama-2-7b-hf", {}, False),
        (HUB_NAME, "tuned", {"_name_or_path": HUB_NAME}, False),
        ("", "tuned", {}, False),
        (HUB_NAME, "Llama-2-7b-chat-hf", {}, True),
        ("base", "tuned", {"_name_or_path": HUB_NAME}, True),
    ],
)
def test_an_adapter_of_a_model_with_another_name_gives_a_warning(
    trained_on: str, base: str, config: dict[str, Any], warned: bool, tmp_path: Path
) -> None:
    adapter = edited(
        LINEAR / "adapter", tmp_path / "adapter", {"base_model_name_or_path": trained_on}
    )
    place = shutil.copytree(LINEAR / "base", tmp_path / base)
    file = place / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    outcome = run("merge", place, adapter, "--save-dir", tmp_path / "out")
    assert outcome.status == 0
    words = f"adapter {adapter} was trained on {trained_on!r}, and the base here is {place}"
    assert (words in " ".join(outcome.err.split())) == warned


def test_the_model_that_a_base_was_converted_from_is_its_name_too(tmp_path: Path) -> None:
    adapter = edited(
        LINEAR / "adapter", tmp_path / "adapter", {"base_model_name_or_path": "runs/original"}
    )
    shutil.copytree(LINEAR / "base", tmp_path / "original")
    megaconv.convert(tmp_path / "original", tmp_path / "sharded", saver="core")
    report = megaconv.merge(tmp_path / "sharded", str(adapter), tmp_path / "out")
    assert not any("was trained on" in notice for notice in report.notices)


def test_a_source_with_fingerprints_of_its_own_is_not_called_damaged(tmp_path: Path) -> None:
    megaconv.convert(LINEAR / "base", tmp_path / "core", saver="core", tp=2)
    report = megaconv.convert(
        tmp_path / "core", tmp_path / "out", saver="hf", adapters=[str(LINEAR / "adapter")]
    )
    assert report.fingerprint == megaconv.fingerprint(LINEAR / "merged")


def test_a_head_is_untied_from_an_embedding_that_alone_has_an_adapter(tmp_path: Path) -> None:
    def of_the_embedding(_: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        name = PREFIX + "model.embed_tokens.lora_embedding_"
        return {name + "A": torch.randn(4, 99), name + "B": torch.randn(32, 4)}

    adapter = edited(TIED / "adapter", tmp_path / "adapter", {"rank_pattern": {}}, of_the_embedding)
    outcome = run("merge", TIED / "base", adapter, "--save-dir", tmp_path / "out")
    assert outcome.status == 0, outcome
    assert "no longer tied" in outcome.err
    merged, base = (
        load_file(tmp_path / "out/model.safetensors"),
        load_file(TIED / "base/model.safetensors"),
    )
    assert torch.equal(merged["lm_head.weight"], base["model.embed_tokens.weight"])
    assert not torch.equal(merged["model.embed_tokens.weight"], base["model.embed_tokens.weight"])
    assert json.loads((tmp_path / "out/config.json").read_text())["tie_word_embeddings"] is False
    keeps = edited(adapter, tmp_path / "keeps", {"ensure_weight_tying": True})
    assert run("merge", TIED / "base", keeps, "--save-dir", tmp_path / "tied").status == 0
    assert "lm_head.weight" not in load_file(tmp_path / "tied/model.safetensors")


def test_a_tied_head_may_repeat_the_changes_of_the_embedding(tmp_path: Path) -> None:
    """peft 0.21 writes the head's matrices, and whole tensors, a second time with ensure_weight_tying."""
    first = {"A": torch.randn(4, 99), "B": torch.randn(32, 4)}
    of_embedding = {
        f"{PREFIX}model.embed_tokens.lora_embedding_{letter}": tensor
        for letter, tensor in first.items()
    }
    of_head = {
        PREFIX + "lm_head.lora_A.weight": first["B"].T.contiguous(),
        PREFIX + "lm_head.lora_B.weight": first["A"].T.contiguous(),
    }
    whole = torch.randn(99, 32)
    wholes = {PREFIX + "lm_head.weight": whole, PREFIX + "model.embed_tokens.weight": whole}
    settings = {"rank_pattern": {}, "ensure_weight_tying": True}

    def merged(name: str, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        adapter = edited(TIED / "adapter", tmp_path / name, settings, lambda _: tensors)
        outcome = run("merge", TIED / "base", adapter, "--save-dir", tmp_path / f"{name}-out")
        assert outcome.status == 0, outcome
        return load_file(tmp_path / f"{name}-out/model.safetensors")

    once = merged("once", of_embedding)
    assert_same_bits(merged("twice", of_embedding | of_head), once)
    replaced = merged("wholes", wholes)
    assert "lm_head.weight" not in replaced
    assert torch.equal(
        replaced["model.embed_tokens.weight"],
        whole.to(replaced["model.embed_tokens.weight"].dtype),
    )

    changed_head = {PREFIX + "lm_head.lora_A.weight": torch.randn(4, 32)}
    apart = merged("apart", of_embedding | of_head | changed_head)
    assert torch.equal(apart["model.embed_tokens.weight"], once["model.embed_tokens.weight"])
    alone = merged("alone", of_head | changed_head)
    assert torch.equal(apart["lm_head.weight"], alone["lm_head.weight"])
    assert not torch.equal(apart["lm_head.weight"], once["model.embed_tokens.weight"])


def test_rows_of_a_tied_head_alone_untie_it(tmp_path: Path) -> None:
    """peft computes with the embedding of the base then."""
    rows = torch.randn(2, 32)
    settings = {"rank_pattern": {}, "trainable_token_indices": {"lm_head": [7, 3]}}
    adapter = edited(
        TIED / "adapter", tmp_path / "adapter", settings,
        lambda _: {f"{PREFIX}lm_head.token_adapter.trainable_tokens_delta": rows},
    )  # fmt: skip
    outcome = run("merge", TIED / "base", adapter, "--save-dir", tmp_path / "out")
    assert outcome.status == 0, outcome
    base, found = (
        load_file(tmp_path / path / "model.safetensors") for path in (TIED / "base", "out")
    )
    embedding = base["model.embed_tokens.weight"]
    assert torch.equal(found["model.embed_tokens.weight"], embedding)
    embedding[[7, 3]] = rows.to(embedding.dtype)
    assert torch.equal(found["lm_head.weight"], embedding)


def test_weights_that_a_merge_would_make_infinite_or_nan_are_refused(tmp_path: Path) -> None:
    def diverged(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        first = next(iter(tensors))
        return tensors | {first: torch.full_like(tensors[first], torch.nan)}

    adapter = LINEAR / "adapter"
    base, out = tmp_path / "base", tmp_path / "out"
    nan = edited(adapter, tmp_path / "nan", tensors=diverged)
    assert run("convert", LINEAR / "base", base, "--saver", "hf", "--dtype", "fp16").status == 0
    for given in (f"{adapter}:1e30", f"{adapter}:1e7", nan):
        outcome = run("merge", base, given, "--save-dir", out)
        assert outcome.status == 2
        assert "infinite in float16, or NaN" in outcome.err.splitlines()[-1]
        assert not out.exists()
    assert run("merge", base, f"{adapter}:1e7", "--dtype", "fp32", "--save-dir", out).status == 0
    lossy = ("--saver", "hf", "--allow-lossy", "overflow", "--save-dir", tmp_path / "lossy")
    assert run("convert", base, "--adapter", f"{adapter}:1e7", *lossy).status == 0
    assert run("convert", base, "--adapter", nan, *lossy, "--overwrite").status == 2


def test_a_row_of_zeros_stays_one_with_dora(tmp_path: Path) -> None:
    """Neurons that were removed have such rows, and no gradient. Merging was refused for NaN."""
    row, weight = 3, "model.layers.0.self_attn.q_proj.weight"

    def zeroed(name: str) -> Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]:
        def change(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            tensors[name][row] = 0
            return tensors

        return change

    dora = FIXTURES / "peft-llama-dora"
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    edited(dora / "adapter", adapter, tensors=zeroed(Q + "lora_B.weight"))
    shutil.copytree(dora / "base", base)
    stored = load_file(base / "model.safetensors")
    save_file(zeroed(weight)(stored), base / "model.safetensors", {"format": "pt"})
    assert run("merge", base, adapter, "--save-dir", tmp_path / "out").status == 0
    found = load_file(tmp_path / "out" / "model.safetensors")[weight]
    expected = load_file(dora / "merged" / "model.safetensors")[weight]
    assert not found[row].any()
    expected[row] = 0
    assert torch.equal(found, expected)


def test_infinite_weights_of_a_base_stay_infinite(tmp_path: Path) -> None:
    shutil.copytree(LINEAR / "base", tmp_path / "base")
    weights = tmp_path / "base/model.safetensors"
    tensors = load_file(weights)
    name = "model.layers.0.self_attn.q_proj.weight"
    tensors[name][0, 0] = torch.inf
    save_file(tensors, weights)
    outcome = run("merge", tmp_path / "base", LINEAR / "adapter", "--save-dir", tmp_path / "out")
    assert outcome.status == 0, outcome
    assert torch.isinf(load_file(tmp_path / "out/model.safetensors")[name]).sum() == 1


def test_patterns_of_ranks_and_alphas_name_a_parameter_as_peft_does(tmp_path: Path) -> None:
    """peft compares a pattern with the path of a parameter: `experts` is none, `experts.down_proj` and `.*\\.gate_up_proj` are.

    peft itself writes the last one for `target_modules="all-linear"`.
    """
    right = ("experts.down_proj", r".*\.gate_up_proj", "q_proj")
    given = json.loads((EXPERTS / "adapter/adapter_config.json").read_text())
    ranks = dict.fromkeys(right, given["r"])
    alphas = dict.fromkeys(right, given["lora_alpha"])
    config = {
        "r": 99,
        "lora_alpha": 99,
        "rank_pattern": {"experts": 98, **ranks},
        "alpha_pattern": {"experts": 98, **alphas},
    }
    adapter = edited(EXPERTS / "adapter", tmp_path / "adapter", config)
    outcome = run("merge", EXPERTS / "base", adapter, "--save-dir", tmp_path / "out")
    assert outcome.status == 0, outcome
    merged = EXPERTS / "merged/model.safetensors"
    assert_same_bits(load_file(tmp_path / "out/model.safetensors"), load_file(merged))


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"peft_type": "IA3"}, ("peft_type 'IA3'", "LORA")),
        ({"init_lora_weights": "pissa_niter_4"}, ("pissa_niter_4", "changed the base's weights")),
        ({"layer_replication": [[0, 1]]}, ("layer_replication", "not supported")),
        ({"a_kind_of_tomorrow": {"on": True}}, ("a_kind_of_tomorrow",)),
        ({"r": 5}, ("rank 4", "5")),
        ({"r": "4"}, ("adapter_config.json", "not the configuration")),
        (
            {"use_rslora": "yes"},
            ("adapter_config.json", "use_rslora 'yes'", "neither true nor false"),
        ),
        ({"use_dora": 1}, ("use_dora 1", "neither true nor false")),
        ({"target_parameters": "experts"}, ("target_parameters", "no list of names")),
        ({"rank_pattern": {"(": 4}}, ("adapter_config.json", "not the configuration")),
        ({"rank_pattern": {"(?i)q_proj": 4}}, ("adapter_config.json", "not the configuration")),
        ({"rank_pattern": {"([a-z._0-9]+)+x": 4}}, ("adapter_config.json", "too many repeats")),
        ({"alpha_pattern": {".*.*.*.*x": 4}}, ("adapter_config.json", "too many repeats")),
        ({"alpha_pattern": {"m?" * 30 + "x": 4}}, ("adapter_config.json", "too many repeats")),
        ({"alpha_pattern": {"(m|o|d)" * 30: 4}}, ("adapter_config.json", "too many repeats")),
        (
            {"alpha_pattern": {f"layers.{number}.*.*x": 4 for number in range(2000)}},
            ("adapter_config.json", "2,000 patterns in alpha_pattern"),
        ),
        ({"use_dora": True}, ("no magnitude",)),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_adapters_of_other_kinds_are_refused_by_name(
    config: dict[str, Any], words: tuple[str, ...], tmp_path: Path
) -> None:
    adapter = edited(LINEAR / "adapter", tmp_path / "adapter", config)
    outcome = run("merge", LINEAR / "base", adapter, "--save-dir", tmp_path / "out")
    assert_refused(outcome, outcome.status, str(adapter), *words)
    assert outcome.status in (2, 3)
    assert not (tmp_path / "out").exists()


Q = PREFIX + "model.layers.0.self_attn.q_proj."


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t | {PREFIX + "model.layers.7.mlp.up_proj.lora_A.weight": t[Q + "lora_A.weight"],
                        PREFIX + "model.layers.7.mlp.up_proj.lora_B.weight": t[Q + "lora_B.weight"]},
         ("model.layers.7.mlp.up_proj", "no such module")),
        (lambda t: {name: tensor for name, tensor in t.items() if name != Q + "lora_B.weight"}, ("q_proj", "one of its two")),
        (lambda t: t | {Q + "lora_B.weight": torch.zeros(31, 4)}, ("[31, 4]", "[32, 32]")),
        (lambda t: t | {"model.norm.weight": torch.zeros(32)}, ("model.norm.weight", PREFIX)),
        (lambda t: t | {PREFIX + "model.nothing.weight": torch.zeros(32)}, ("model.nothing.weight", "not in the model")),
        (lambda t: t | {Q + "lora_C.weight": torch.zeros(4, 4)}, ("lora_C.weight", "not supported")),
        (lambda t: t | {Q + "lora_B.bias": torch.zeros(32)}, ("q_proj.bias", "not in the model")),
    ],
    ids=["module", "pair", "shape", "prefix", "replaced", "kind", "bias"],
)  # fmt: skip
def test_no_tensor_of_an_adapter_is_left_out_silently(
    change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]],
    words: tuple[str, ...],
    tmp_path: Path,
) -> None:
    adapter = edited(LINEAR / "adapter", tmp_path / "adapter", tensors=change)
    outcome = run("merge", LINEAR / "base", adapter, "--save-dir", tmp_path / "out")
    assert_refused(outcome, outcome.status, *words)
    assert outcome.status in (2, 3)


def test_optimizer_state_does_not_go_along_with_merged_weights(tmp_path: Path) -> None:
    source = FIXTURES / "core-llama-optim-tp2pp2/checkpoint"
    options = (
        "--load-dir",
        source,
        "--save-dir",
        tmp_path / "out",
        "--saver",
        "core",
        "--adapter",
        LINEAR / "adapter",
    )
    assert_refused(run("convert", *options, "--optimizer"), 2, "--optimizer", "--adapter")


def test_an_adapter_of_a_bare_model_is_merged(tmp_path: Path) -> None:
    """peft of an AutoModel has its names: `layers.0`, without `model.`."""
    adapter = edited(
        LINEAR / "adapter", tmp_path / "adapter",
        tensors=lambda held: {name.replace(".model.model.", ".model."): each for name, each in held.items()},
    )  # fmt: skip
    assert run("merge", LINEAR / "base", adapter, "--save-dir", tmp_path / "out").status == 0
    assert_same_bits(
        load_file(tmp_path / "out/model.safetensors"),
        load_file(LINEAR / "merged/model.safetensors"),
    )


def conv1d(directory: Path, **settings: Any) -> tuple[Path, dict[str, torch.Tensor]]:
    """(a bare GPT-2, which no family describes, with an adapter of one square weight; the adapter's tensors)."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=4, n_positions=64)
    transformers.GPT2Model(config).save_pretrained(directory / "base")
    module = f"{PREFIX}h.0.attn.c_proj."
    tensors = {"lora_A.weight": torch.randn(2, 32), "lora_B.weight": torch.randn(32, 2)}
    if settings.get("use_dora"):
        tensors["lora_magnitude_vector"] = torch.ones(32)
    (directory / "adapter").mkdir()
    save_file(
        {module + name: each for name, each in tensors.items()},
        directory / "adapter/adapter_model.safetensors",
    )
    given = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "fan_in_fan_out": True, **settings}
    (directory / "adapter/adapter_config.json").write_text(json.dumps(given))
    return directory, tensors


def test_the_configuration_says_how_a_model_without_a_family_stores_weights(tmp_path: Path) -> None:
    """[in, out], as Conv1D of GPT-2. The shape of a square weight doesn't say so."""
    model, adapter = conv1d(tmp_path)
    outcome = run("merge", model / "base", model / "adapter", "--save-dir", tmp_path / "out")
    assert outcome.status == 0, outcome
    name = "h.0.attn.c_proj.weight"
    before, after = (
        load_file(tmp_path / path / "model.safetensors")[name] for path in ("base", "out")
    )
    change = adapter["lora_B.weight"] @ adapter["lora_A.weight"]
    torch.testing.assert_close(after, before + change.T)


def test_dora_of_conv1d_needs_a_family(tmp_path: Path) -> None:
    model, _ = conv1d(tmp_path, use_dora=True)
    described = json.loads((model / "base" / "config.json").read_text())
    described["architectures"] = ["UnknownModel"]
    (model / "base" / "config.json").write_text(json.dumps(described))
    outcome = run("merge", model / "base", model / "adapter", "--save-dir", tmp_path / "out")
    assert_refused(outcome, 2, "h.0.attn.c_proj: DoRA is merged into", "Conv1D of a known family")


@pytest.mark.parametrize("rank", [1, 3, 8, 16, 31])
def test_a_product_adds_in_the_order_of_the_rank(rank: int) -> None:
    """torch's sums: one fused multiply-add after the other. Double precision holds each product exactly."""
    generator = np.random.default_rng(rank)
    left = generator.standard_normal((65, rank), np.float32)
    right = generator.standard_normal((rank, 97), np.float32)
    expected = np.zeros((65, 97), np.float32)
    for column, row in zip(left.T.astype(np.float64), right.astype(np.float64), strict=True):
        expected = (np.outer(column, row) + expected).astype(np.float32)
    assert np.array_equal(product(left, right), expected)
    assert np.array_equal(product(left[7:8], right[:, 5:6]), expected[7:8, 5:6])


@pytest.mark.parametrize(("stored", "lanes"), [("[out, in]", 8), ("[in, out]", 1)])
def test_norms_of_rows_are_those_of_torch(stored: str, lanes: int) -> None:
    weight = torch.randn(96, 128, generator=torch.Generator().manual_seed(1))
    if stored == "[in, out]":
        weight = weight.T.contiguous().T  # Conv1D of GPT-2, which peft transposes
    expected = torch.linalg.norm(weight, dim=1).numpy()
    assert np.array_equal(row_norms(weight.contiguous().numpy(), lanes), expected)


def test_an_adapter_of_16_bits_is_computed_in_float32(tmp_path: Path) -> None:
    """peft loads its matrices as float32, also for a base of 16 bits."""
    halved = edited(
        LINEAR / "adapter", tmp_path / "bf16",
        tensors=lambda held: {name: each.bfloat16() for name, each in held.items()},
    )  # fmt: skip
    widened = edited(
        halved, tmp_path / "fp32",
        tensors=lambda held: {name: each.float() for name, each in held.items()},
    )  # fmt: skip
    for adapter in (halved, widened):
        out = tmp_path / f"{adapter.name}-out"
        assert run("merge", LINEAR / "base", adapter, "--save-dir", out).status == 0
    assert_same_bits(
        load_file(tmp_path / "bf16-out/model.safetensors"),
        load_file(tmp_path / "fp32-out/model.safetensors"),
    )


@pytest.mark.parametrize("word", ["{}:much", "{}:nan", "{}-nothing:0.5"])
def test_a_weight_that_is_no_number_or_a_missing_directory_is_an_error(
    word: str, tmp_path: Path
) -> None:
    outcome = run(
        "merge", LINEAR / "base", word.format(LINEAR / "adapter"), "--save-dir", tmp_path / "out"
    )
    assert_refused(outcome, 2, str(LINEAR / "adapter"))


@pytest.mark.slow
@pytest.mark.parametrize("adapter_dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {"target_modules": "all-linear", "bias": "all", "r": 16, "lora_alpha": 17},
        {"target_modules": ["q_proj", "k_proj"], "lora_bias": True, "r": 3, "use_rslora": True},
        {"target_modules": ["v_proj", "up_proj"], "use_dora": True, "r": 1},
        {
            "target_modules": ["embed_tokens", "lm_head", "o_proj"],
            "modules_to_save": ["norm"],
            "r": 200,
        },
    ],
    ids=["all-linear", "lora-bias", "dora", "embedding"],
)
def test_merged_weights_equal_those_of_peft(
    options: dict[str, Any], adapter_dtype: torch.dtype, tmp_path: Path
) -> None:
    """Against the installed peft, on kinds that the fixtures don't have. peft loads an adapter of 16 bits as float32."""
    peft = pytest.importorskip("peft", reason="peft, the oracle, is not installed")
    from transformers import AutoModelForCausalLM, Qwen2Config

    torch.manual_seed(0)
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 130,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 99,
    }
    config = Qwen2Config(
        **sizes, num_key_value_heads=2, tie_word_embeddings=False, initializer_range=0.2
    )
    base = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    base.save_pretrained(tmp_path / "base")
    model = peft.get_peft_model(base, peft.LoraConfig(**options))
    with torch.no_grad():
        for parameter in (each for each in model.parameters() if each.requires_grad):
            parameter.add_(torch.randn_like(parameter) * 0.1)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.to(adapter_dtype)
    model.save_pretrained(tmp_path / "adapter")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.bfloat16)
    model = peft.PeftModel.from_pretrained(loaded, tmp_path / "adapter")
    model.merge_and_unload().save_pretrained(tmp_path / "merged")
    assert (
        run("merge", tmp_path / "base", tmp_path / "adapter", "--save-dir", tmp_path / "out").status
        == 0
    )
    assert_same_bits(
        load_file(tmp_path / "out/model.safetensors"),
        load_file(tmp_path / "merged/model.safetensors"),
    )


def test_a_missing_adapter_and_a_directory_without_one_have_different_errors(
    tmp_path: Path,
) -> None:
    model, out = FIXTURES / "peft-llama-all-linear" / "base", tmp_path / "out"
    assert_refused(
        run("merge", model, tmp_path / "adaptor", "--save-dir", out),
        2,
        "adaptor",
        "no such directory",
    )
    assert_refused(
        run("merge", model, model, "--save-dir", out),
        2,
        "has no adapter_config.json, and is a whole model",
    )


def test_the_newest_adapter_of_a_run_is_merged_and_named(tmp_path: Path) -> None:
    case, run_of_it = LINEAR, tmp_path / "run"
    shutil.copytree(case / "adapter", run_of_it / "iter_0000012")
    edited(case / "adapter", run_of_it / "iter_0000010", {"lora_alpha": 1})
    (run_of_it / "latest_checkpointed_iteration.txt").write_text("12")
    outcome = run("merge", case / "base", run_of_it, "--save-dir", tmp_path / "out")
    assert f"adapter {run_of_it / 'iter_0000012'}:" in outcome.err
    assert_same_bits(
        load_file(tmp_path / "out/model.safetensors"), load_file(case / "merged/model.safetensors")
    )


def test_a_quiet_merge_prints_no_summary(tmp_path: Path) -> None:
    case = FIXTURES / "peft-llama-all-linear"
    outcome = run(
        "merge", case / "base", case / "adapter", "--save-dir", tmp_path / "out", "--quiet"
    )
    assert (outcome.status, outcome.out, outcome.err.count("\n")) == (0, "", 1)
    assert outcome.err.startswith("merged LoRA adapter")
