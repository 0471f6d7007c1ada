"""Models that see or hear as a whole, from Hugging Face directories to Megatron core and back: the tower is copied bit for bit.

Names in Megatron are compared with those that Megatron-Bridge's registries state; nothing here computes with them.
"""

import json
import shutil
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import megaconv
from megaconv.errors import NotExpressible
from megaconv.megatron.arguments.whole import HF_NAMES
from megatron_lite.checkpoint.restore import find_start
from megatron_lite.settings.config import make_settings
from tests.families.test_language_models_inside import MODELS, Inside, assert_same_weights, create
from tests.models import write_llama
from tests.runs import assert_refused, run

BRIDGE = {
    "gemma3": {
        "multi_modal_projector.proj.weight", "multi_modal_projector.mm_soft_embed_norm.weight",
        "vision_tower.embeddings.position_embedding.weight", "language_model.embedding.word_embeddings.weight",
        "language_model.decoder.final_layernorm.weight", "language_model.output_layer.weight",
    },
    "qwen2_5_vl": {"visual.patch_embed.proj.weight", "visual.merger.ln_q.weight", "language_model.decoder.final_layernorm.weight"},
    "glm4v_moe": {"visual.patch_embed.proj.weight", "language_model.decoder.final_layernorm.weight"},
    "kimi_k25": {"mm_projector.pre_norm.weight", "vision_tower.patch_embed.pos_emb.weight"},
    "mistral3": {"multi_modal_projector.norm.weight", "vision_tower.patch_conv.weight"},
    "qwen2_audio": {"audio_tower.conv1.weight", "multi_modal_projector.linear.weight"},
}  # fmt: skip
"""Names of Megatron-Bridge's models (its mapping registries, 22 August 2026), wildcards filled in."""


def state(directory: Path, rank: str = "mp_rank_00_000") -> dict[str, Any]:
    file = next(directory.glob(f"release/{rank}/model_optim_rng.pt"))
    with torch.serialization.safe_globals([Namespace]):
        return dict(torch.load(file, weights_only=False))


def as_config_json(directory: Path) -> Any:
    return json.loads((directory / "config.json").read_text())


def to_core_and_back(model: Inside, original: Path, folder: Path, ckpt_format: str) -> None:
    core, back = folder / ckpt_format, folder / f"{ckpt_format} back"
    there = megaconv.convert(original, core, saver="core", ckpt_format=ckpt_format, **model.layout)
    again = megaconv.convert(core, back, saver="hf", verify=True)
    assert there.header.config.family == model.family
    assert there.fingerprint == again.fingerprint
    assert_same_weights(back, original)
    assert as_config_json(back) == as_config_json(original)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name == "gemma3" else pytest.mark.slow) for name in MODELS],
)
def test_a_whole_model_goes_to_megatron_and_back_in_every_bit(name: str, tmp_path: Path) -> None:
    create(MODELS[name], tmp_path / "hf")
    for ckpt_format in ("torch", "torch_dist"):
        to_core_and_back(MODELS[name], tmp_path / "hf", tmp_path, ckpt_format)
    assert BRIDGE.get(name, set()) <= {
        *state(tmp_path / "torch")["model"],
        *last_stage(tmp_path / "torch"),
    }
    resharded = {
        key: value for key, value in MODELS[name].layout.items() if key == "transformer_impl"
    }
    megaconv.convert(
        tmp_path / "torch",
        tmp_path / "one",
        saver="core",
        ckpt_format="torch_dist",
        tp=1,
        pp=1,
        **resharded,
    )
    megaconv.convert(tmp_path / "one", tmp_path / "from one", saver="hf")
    assert_same_weights(tmp_path / "from one", tmp_path / "hf")


def last_stage(directory: Path) -> set[str]:
    files = sorted(directory.glob("release/mp_rank_*"))
    return {name for file in files for name in state(directory, file.name)["model"]}


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen 2.5 VL: hf, and core at tp 2, pp 2."""
    folder = tmp_path_factory.mktemp("qwen")
    create(MODELS["qwen2_5_vl"], folder / "hf")
    megaconv.convert(folder / "hf", folder / "core", saver="core", tp=2, pp=2)
    return folder


def test_the_tower_is_whole_on_every_tensor_rank_of_the_first_stage_and_nowhere_else(
    qwen: Path,
) -> None:
    source = load_file(qwen / "hf/model.safetensors")
    tower = {name for name in source if name.startswith("visual.")}
    assert tower
    for tp_rank in (0, 1):
        first = state(qwen / "core", f"mp_rank_0{tp_rank}_000")["model"]
        assert all(torch.equal(first[name], source[name]) for name in tower)
        last = state(qwen / "core", f"mp_rank_0{tp_rank}_001")["model"]
        assert all(name.startswith("language_model.") for name in last)


def test_arguments_say_that_images_give_a_token_three_positions(qwen: Path) -> None:
    args = state(qwen / "core")["args"]
    assert (args.position_embedding_type, args.mrope_section) == ("mrope", [1, 1, 2])


def test_copied_tensors_may_have_any_dtype_and_shape(qwen: Path, tmp_path: Path) -> None:
    hf = tmp_path / "hf"
    hf.mkdir()
    (hf / "config.json").write_bytes((qwen / "hf/config.json").read_bytes())
    more = {
        "visual.position_ids": torch.arange(6).reshape(1, 6),
        "visual.scale": torch.tensor(2.5),
        "visual.half": torch.randn(3, 2, 1, 4).bfloat16(),
    }
    save_file(load_file(qwen / "hf/model.safetensors") | more, hf / "model.safetensors")
    for ckpt_format in ("torch", "torch_dist"):
        megaconv.convert(hf, tmp_path / ckpt_format, saver="core", ckpt_format=ckpt_format, tp=2)
        megaconv.convert(tmp_path / ckpt_format, tmp_path / f"{ckpt_format} back", saver="hf")
        back = load_file(tmp_path / f"{ckpt_format} back/model.safetensors")
        for name, tensor in more.items():
            assert back[name].dtype == tensor.dtype
            assert torch.equal(back[name], tensor)


def test_text_only_takes_the_language_model_out_of_a_whole_megatron_checkpoint(
    qwen: Path, tmp_path: Path
) -> None:
    megaconv.convert(qwen / "hf", tmp_path / "wanted", saver="hf", text_only=True)
    megaconv.convert(qwen / "core", tmp_path / "found", saver="hf", text_only=True)
    assert_same_weights(tmp_path / "found", tmp_path / "wanted")
    assert as_config_json(tmp_path / "found")["architectures"] == ["Qwen2ForCausalLM"]


def without_our_names(core: Path, target: Path) -> Path:
    """The checkpoint as another program would write it: without the record of names, and without hf/."""
    for file in core.glob("release/mp_rank_*/model_optim_rng.pt"):
        content = torch.load(file, weights_only=False)
        delattr(content["args"], HF_NAMES)
        to = target / file.relative_to(core)
        to.parent.mkdir(parents=True)
        torch.save(content, to)
    return target


def test_names_of_megatron_bridge_are_enough_beside_the_originals_config_json(
    qwen: Path, tmp_path: Path
) -> None:
    other = without_our_names(qwen / "core", tmp_path / "other")
    megaconv.convert(other, tmp_path / "back", saver="hf", config=qwen / "hf")
    assert_same_weights(tmp_path / "back", qwen / "hf")
    outcome = run("convert", other, tmp_path / "out", "--saver", "hf")
    assert_refused(
        outcome, 2, "tensors outside the language model (visual)", "--config", "--text-only"
    )


@pytest.mark.parametrize("name", ["qwen3_vl_moe", "glm4v_moe"])
def test_transformers_loads_what_is_made_of_another_programs_checkpoint(
    name: str, tmp_path: Path
) -> None:
    """The form of the experts and the prefix of the encoder follow from the kind of the model alone."""
    from transformers import AutoModelForMultimodalLM

    create(MODELS[name], tmp_path / "hf")
    megaconv.convert(tmp_path / "hf", tmp_path / "core", saver="core")
    other = without_our_names(tmp_path / "core", tmp_path / "other")
    megaconv.convert(other, tmp_path / "back", saver="hf", config=tmp_path / "hf")
    sides = [
        AutoModelForMultimodalLM.from_pretrained(tmp_path / side, output_loading_info=True)
        for side in ("hf", "back")
    ]
    for keys in ("missing_keys", "unexpected_keys"):
        assert not sides[1][1][keys]
    expected, found = (model.state_dict() for model, _ in sides)
    assert all(torch.equal(found[key], tensor) for key, tensor in expected.items())
    prefixes = [
        {key.split(".blocks.")[0] for key in load_file(tmp_path / side / "model.safetensors") if ".blocks." in key}
        for side in ("hf", "back")
    ]  # fmt: skip
    assert prefixes[0] == prefixes[1] == {"model.visual"}


@pytest.mark.slow
def test_the_layer_for_multi_token_prediction_is_of_the_language_model(tmp_path: Path) -> None:
    """Qwen 3.5's files have it outside `model.language_model.`."""
    hf, layout = tmp_path / "hf", MODELS["qwen3_5"].layout
    create(MODELS["qwen3_5"], hf)
    tensors = load_file(hf / "model.safetensors")
    last = next(
        name.removesuffix("self_attn.q_proj.weight")
        for name in tensors
        if name.endswith("self_attn.q_proj.weight")
    )
    mtp = {
        f"mtp.layers.0.{name.removeprefix(last)}": tensor * 2
        for name, tensor in tensors.items()
        if name.startswith(last)
    }
    norm = tensors["model.language_model.norm.weight"]
    mtp |= {
        f"mtp.{name}.weight": norm * 3
        for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
    }
    mtp["mtp.fc.weight"] = torch.randn(len(norm), 2 * len(norm))
    save_file(tensors | mtp, hf / "model.safetensors", metadata={"format": "pt"})
    for name, text in (("whole", False), ("text", True)):
        megaconv.convert(hf, tmp_path / name, saver="core", text_only=text, **layout)
        back = {} if name == "whole" else {"base": hf}
        megaconv.convert(tmp_path / name, tmp_path / f"{name} back", saver="hf", **back)
        assert_same_weights(tmp_path / f"{name} back", hf)
        assert ("language_model." * (not text) + "mtp.layers.0.eh_proj.weight") in last_stage(
            tmp_path / name
        )


def test_config_json_states_its_dtype_where_it_did(qwen: Path, tmp_path: Path) -> None:
    hf = tmp_path / "hf"
    shutil.copytree(qwen / "hf", hf)
    raw = as_config_json(hf)
    raw["text_config"]["dtype"] = raw.pop("dtype")
    (hf / "config.json").write_text(json.dumps(raw))
    megaconv.convert(hf, tmp_path / "core", saver="core")
    for dtype, found in ((None, "float32"), ("bf16", "bfloat16")):
        megaconv.convert(tmp_path / "core", tmp_path / found, saver="hf", dtype=dtype)
        assert as_config_json(tmp_path / found) == raw | {
            "text_config": raw["text_config"] | {"dtype": found}
        }
    assert (
        load_file(tmp_path / "bfloat16/model.safetensors")["visual.merger.ln_q.weight"].dtype
        == torch.bfloat16
    )


# What can't be.


def test_a_language_model_alone_is_not_taken_for_the_whole(qwen: Path, tmp_path: Path) -> None:
    megaconv.convert(qwen / "hf", tmp_path / "core", saver="core", text_only=True)
    outcome = run(
        "convert", tmp_path / "core", tmp_path / "out", "--saver", "hf", "--config", qwen / "hf"
    )
    assert_refused(
        outcome, 2, "holds a language model alone", "Qwen2_5_VLForConditionalGeneration", "--base"
    )
    tensors = {
        name: tensor
        for name, tensor in load_file(qwen / "hf/model.safetensors").items()
        if "visual" not in name
    }
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf/config.json").write_bytes((qwen / "hf/config.json").read_bytes())
    save_file(tensors, tmp_path / "hf/model.safetensors")
    assert_refused(
        run("convert", tmp_path / "hf", tmp_path / "out", "--saver", "core"),
        3,
        "holds a language model alone",
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["--saver", "gguf"],
            "--saver gguf: can't store the multimodal model Qwen2_5_VLForConditionalGeneration",
        ),
        (["--saver", "deepspeed"], "--text-only"),
        (["--saver", "hf", "--quantize", "fp8"], "--quantize"),
    ],
)
def test_options_for_language_models_only_are_refused_for_multimodal_models(
    words: list[str], said: str, qwen: Path, tmp_path: Path
) -> None:
    outcome = run("convert", qwen / "hf", tmp_path / "out", *words)
    assert_refused(outcome, 2, said)


def test_a_language_model_that_is_no_longer_what_the_config_json_describes_is_refused(
    qwen: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    for file in (qwen / "core").rglob("*"):
        to = other / file.relative_to(qwen / "core")
        to.parent.mkdir(parents=True, exist_ok=True)
        if file.name == "model_optim_rng.pt":
            content = torch.load(file, weights_only=False)
            content["args"].rotary_base = 77
            torch.save(content, to)
        elif file.is_file() and file.name != "megaconv.json":
            to.write_bytes(file.read_bytes())
    outcome = run("convert", other, tmp_path / "out", "--saver", "hf")
    assert_refused(outcome, 2, "positions.theta is 77.0", "Qwen2_5_VLForConditionalGeneration")


def test_positions_of_another_models_images_are_refused(qwen: Path, tmp_path: Path) -> None:
    """The sections of mrope don't change a text's positions, but those of an image."""
    other = tmp_path / "other"
    shutil.copytree(qwen / "hf", other)
    config = json.loads((other / "config.json").read_text())
    ropes = config["text_config"]["rope_parameters"]
    assert ropes["mrope_section"] == [1, 1, 2]
    ropes["mrope_section"] = [2, 1, 1]
    (other / "config.json").write_text(json.dumps(config))
    outcome = run("convert", qwen / "core", tmp_path / "out", "--saver", "hf", "--config", other)
    assert_refused(outcome, 3, "its mrope_section is [1, 1, 2], that of", "is [2, 1, 1]")


def test_a_plain_model_with_text_only_is_refused(tmp_path: Path) -> None:
    megaconv.convert(write_llama(tmp_path / "hf"), tmp_path / "core", saver="core")
    outcome = run("convert", tmp_path / "core", tmp_path / "out", "--saver", "hf", "--text-only")
    assert_refused(outcome, 2, "--text-only", "leave it out")


def test_optimizer_state_is_refused_and_can_be_left_behind(qwen: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(qwen / "core", other, ignore=shutil.ignore_patterns("megaconv.json"))
    for file in other.glob("release/mp_rank_*/model_optim_rng.pt"):
        content = torch.load(file, weights_only=False)
        state = {"state": {}, "param_groups": [{"params": [], "lr": 0.1, "step": 2}]}
        torch.save(
            {**content, "optimizer": {"optimizer": state, "fp32_from_fp16_params": []}}, file
        )
    outcome = run("convert", other, tmp_path / "out", "--saver", "core", "--tp", "1")
    assert_refused(
        outcome, 2, "optimizer state of Qwen2_5_VLForConditionalGeneration", "--no-optimizer"
    )
    outcome = run(
        "convert", other, tmp_path / "out", "--saver", "core", "--tp", "1", "--no-optimizer"
    )
    assert outcome.status == 0, outcome.err


@pytest.mark.slow
def test_the_trainer_refuses_what_it_cannot_compute(qwen: Path) -> None:
    with pytest.raises(
        NotExpressible, match="is a multimodal model, and only language models are supported"
    ):
        find_start(make_settings({"load": str(qwen / "core")}), finetune=True)
    plan = [sys.executable, "-m", "megatron_lite", "plan", "--vocab-size", "131", "--load"]
    outcome = subprocess.run(
        [*plan, str(qwen / "core")], capture_output=True, text=True, timeout=300
    )
    assert outcome.returncode == 2
    assert "is a multimodal model" in outcome.stderr
    assert "Traceback" not in outcome.stderr
    # Of Hugging Face's files, the language model is taken.
    assert subprocess.run([*plan, str(qwen / "hf")], timeout=300).returncode == 0
    assert find_start(make_settings({"load": str(qwen / "hf")}), finetune=True) is not None


# What is shown.


def test_the_command_line_is_that_of_the_language_model_alone(qwen: Path) -> None:
    assert_refused(
        run("inspect", qwen / "core", "--megatron-args"), 2, "--megatron-args", "--text-only"
    )
    assert (
        "--position-embedding-type"
        in run("inspect", qwen / "core", "--megatron-args", "--text-only").out
    )


def test_inspect_says_what_lies_beside_the_language_model(qwen: Path) -> None:
    for name in ("hf", "core"):
        shown = run("inspect", qwen / name).out
        assert "visual (30 tensors), of Qwen2_5_VLForConditionalGeneration" in shown
        assert json.loads(run("inspect", qwen / name, "--json").out)["beside"] == {"visual": 30}
        assert "visual" not in run("inspect", qwen / name, "--text-only").out


@pytest.mark.parametrize("words", [("gguf",), ("hf", "--quantize", "fp8-block")])
def test_the_remedy_for_a_megatron_checkpoint_is_the_language_model_alone_too(
    qwen: Path, words: tuple[str, ...], tmp_path: Path
) -> None:
    command = ("convert", qwen / "core", tmp_path / "out", "--saver", *words)
    assert_refused(run(*command), 2, "--text-only converts the language model in it")
    further = ("--option", "tokenizer=none") if words == ("gguf",) else ()
    outcome = run(*command, "--text-only", *further)
    assert outcome.status == 0, outcome.err


def test_plan_and_diff_take_the_language_model_alone_where_they_are_asked_to(
    qwen: Path, tmp_path: Path
) -> None:
    megaconv.convert(qwen / "hf", tmp_path / "text", saver="core", text_only=True)
    alone, whole = (run("plan", qwen / "hf", *words).out for words in (["--text-only"], []))
    assert alone == run("plan", tmp_path / "text").out != whole
    assert run("diff", qwen / "hf", tmp_path / "text").status == 4
    assert run("diff", qwen / "hf", tmp_path / "text", "--text-only").status == 0
    assert run("diff", qwen / "core", qwen / "hf", "--text-only").status == 0
    assert_refused(
        run("diff", tmp_path / "text", tmp_path / "text", "--text-only"),
        2,
        "both are language models",
    )
