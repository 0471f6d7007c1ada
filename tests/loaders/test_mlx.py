"""MLX's directories, as mlx-lm 0.32.2 wrote them with mlx 0.32.4.

tests/fixtures/mlx has models that `mlx_lm` quantized, and the logits that mlx computes with them in float32: a mixture whose
routers have settings of their own, latent attention with its absorbed matrices, and GPT-OSS with MXFP4 beside 8 bits.
"""

import json
from pathlib import Path
from shutil import copytree

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import megaconv
from megaconv import registry
from tests.conftest import FIXTURES
from tests.mlx_oracle import cases, write_source
from tests.models import write_llama
from tests.runs import assert_refused, run
from tests.transformers_oracle import compute, load

MLX = FIXTURES / "mlx"
TOKENS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]])
FIRST = "model.layers.0.mlp.up_proj"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return copytree(MLX / "affine", tmp_path / "model")


def edit(model: Path, **changes: object) -> None:
    """Change keys of config.json; None removes one."""
    path = model / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


def rewrite(model: Path, **changes: "torch.Tensor | None") -> None:
    """Change tensors; None removes one."""
    path = model / "model.safetensors"
    tensors = load_file(path) | changes
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, path, metadata={"format": "mlx"})


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_transformers_computes_the_logits_of_mlx(name: str, tmp_path: Path) -> None:
    megaconv.convert(MLX / name, tmp_path / "hf", saver="hf", dtype="fp32", verify=True)
    logits = compute(load(tmp_path / "hf"), TOKENS)[0].numpy()
    expected = np.load(MLX / name / "logits.npy")
    np.testing.assert_allclose(logits, expected, atol=2e-5)


@pytest.mark.parametrize("name", ["affine", "mxfp4", "qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_megatron_gets_the_same_values(name: str, tmp_path: Path) -> None:
    sizes = {"ep": 2} if name == "gpt_oss" else {"tp": 2}
    core = megaconv.convert(
        MLX / name, tmp_path / "core", saver="core", dtype="bf16", verify=True, **sizes
    )
    back = megaconv.convert(tmp_path / "core", tmp_path / "hf", saver="hf")
    plain = megaconv.convert(MLX / name, tmp_path / "plain", saver="hf", dtype="bf16")
    assert core.fingerprint == back.fingerprint == plain.fingerprint
    config = json.loads((tmp_path / "plain" / "config.json").read_text())
    assert not config.keys() & {"quantization", "quantization_config"}


def test_dequantized_weights_have_the_dtype_of_their_scales(tmp_path: Path) -> None:
    megaconv.convert(MLX / "qwen3_moe", tmp_path / "hf", saver="hf")
    dtypes = {tensor.dtype for tensor in load_file(tmp_path / "hf" / "model.safetensors").values()}
    assert dtypes == {torch.float32}


def test_a_plan_and_an_inspection_know_the_model(model: Path) -> None:
    assert run("plan", model).status == 0
    found = run("inspect", model)
    assert found.status == 0
    assert "mlx, 4 bits" in found.out


def test_plain_weights_are_recognised_by_the_file(tmp_path: Path) -> None:
    source = write_llama(tmp_path / "model")
    assert registry.detect(source).name == "hf"
    path = source / "model.safetensors"
    save_file(load_file(path), path, metadata={"format": "mlx"})
    assert registry.detect(source).name == "mlx"
    expected = megaconv.convert(write_llama(tmp_path / "hf"), tmp_path / "a", saver="core")
    assert (
        megaconv.convert(source, tmp_path / "b", saver="core").fingerprint == expected.fingerprint
    )


def test_older_files_keep_the_matrix_of_latent_attention(tmp_path: Path) -> None:
    """mlx-lm splits kv_b_proj; files of older releases have it as in transformers."""
    expected = megaconv.convert(MLX / "deepseek_v3", tmp_path / "hf", saver="hf")
    older = tmp_path / "hf" / "model.safetensors"
    tensors = load_file(older)
    for layer, part in ((1, "gate"), (1, "up"), (1, "down")):
        names = [
            f"model.layers.{layer}.mlp.experts.{expert}.{part}_proj.weight" for expert in range(4)
        ]
        stack = torch.stack([tensors.pop(name) for name in names])
        tensors[f"model.layers.{layer}.mlp.switch_mlp.{part}_proj.weight"] = stack
    save_file(tensors, older, metadata={"format": "mlx"})
    (tmp_path / "hf" / "megaconv.json").unlink()
    found = megaconv.convert(tmp_path / "hf", tmp_path / "again", saver="hf")
    assert found.fingerprint == expected.fingerprint


@pytest.mark.parametrize(
    ("whole", "own"),
    [
        ({"bits": 4, "group_size": 32}, True),
        ({"bits": 8, "group_size": 64}, {"group_size": 32}),
        ({"bits": 8, "group_size": 64, "mode": "mxfp8"}, {"group_size": 32, "mode": "affine"}),
    ],
)
def test_settings_of_a_module_are_completed_as_mlx_does(
    whole: dict[str, object], own: object, model: Path
) -> None:
    """True stands for the settings of the whole model, and missing keys for those that the mode usually has."""
    expected = megaconv.fingerprint(model)
    tensors = load_file(model / "model.safetensors")
    modules = [name.removesuffix(".scales") for name in tensors if name.endswith(".scales")]
    edit(model, quantization={**whole, **dict.fromkeys(modules, own)}, quantization_config=None)
    assert megaconv.fingerprint(model) == expected


@pytest.mark.parametrize("part", ["scales", "biases"])
def test_missing_scales_and_biases_are_named(part: str, model: Path, tmp_path: Path) -> None:
    rewrite(model, **{f"{FIRST}.{part}": None})
    refused = run("convert", model, tmp_path / "out", "--saver", "core")
    assert_refused(refused, 3, "model.safetensors", f"there is no {FIRST}.{part}")


def test_scales_without_settings_are_refused(model: Path, tmp_path: Path) -> None:
    edit(model, quantization=None, quantization_config=None)
    refused = run("convert", model, tmp_path / "out", "--saver", "core", "--loader", "mlx")
    assert_refused(refused, 3, "has scales, and config.json has no `quantization`")


def test_settings_that_do_not_fit_are_refused(model: Path, tmp_path: Path) -> None:
    edit(model, quantization={"bits": 8, "group_size": 32})
    refused = run("convert", model, tmp_path / "out", "--saver", "core")
    assert_refused(refused, 3, "expected uint32 with", "by 8 bits in groups of 32")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"bits": 7, "group_size": 32}, "with 7 bits in groups of 32; supported are"),
        ({"bits": 10**400, "group_size": 32}, f"with 1{'0' * 39} bits in groups of 32"),
        ({"bits": 4, "group_size": 48}, "in groups of 48; supported are"),
        ({"bits": 4, "group_size": 32, "mode": "new"}, "mode 'new'"),
        ({"bits": "4", "group_size": 32}, "bits: should be a whole number, found '4'"),
        ({"bits": 4, "group_size": 32, "mode": ["affine"]}, "mode: should be a word"),
        ({"bits": 4, "group_size": 32, FIRST: False}, "config.json says False for it"),
    ],
)
def test_unknown_settings_are_refused(
    settings: dict[str, object], words: str, model: Path, tmp_path: Path
) -> None:
    edit(model, quantization=settings)
    assert_refused(run("convert", model, tmp_path / "out", "--saver", "core"), 3, words)


def test_a_scale_of_a_whole_tensor_is_refused(model: Path, tmp_path: Path) -> None:
    rewrite(model, **{f"{FIRST}.global_scale": torch.ones(1)})
    refused = run("convert", model, tmp_path / "out", "--saver", "core")
    assert_refused(refused, 3, f"{FIRST}.global_scale scales a whole tensor")


def test_words_are_never_taken_for_weights(model: Path, tmp_path: Path) -> None:
    """`--loader hf` doesn't know the form; a damaged description doesn't make numbers of words either."""
    refused = run("convert", model, tmp_path / "out", "--saver", "core", "--loader", "hf")
    assert_refused(refused, 3, "quantized by MLX", "--loader mlx")
    names = [
        name
        for name in load_file(model / "model.safetensors")
        if name.endswith((".scales", ".biases"))
    ]
    rewrite(model, **dict.fromkeys(names))
    refused = run("convert", model, tmp_path / "out", "--saver", "core")
    assert_refused(refused, 3, "there is no", ".scales")


def test_a_family_that_was_not_compared_is_refused(tmp_path: Path) -> None:
    arcee = {"architectures": ["ArceeForCausalLM"], "model_type": "arcee", "hidden_act": "relu2"}
    source = write_llama(tmp_path / "model", extra_config=arcee)
    refused = run("convert", source, tmp_path / "out", "--saver", "core", "--loader", "mlx")
    assert_refused(refused, 3, "MLX's files of arcee are not read; docs/mlx.md")


def test_gate_and_up_of_other_shapes_are_refused(tmp_path: Path) -> None:
    source = copytree(MLX / "gpt_oss", tmp_path / "model")
    rewrite(source, **{"model.layers.0.mlp.experts.up_proj.bias": torch.zeros(4, 31)})
    refused = run("convert", source, tmp_path / "out", "--saver", "core")
    assert_refused(
        refused, 3, "gate_proj.bias is [4, 32] float32, and its up_proj is [4, 31] float32"
    )


def test_norms_beside_convolutions_of_transformers_are_those_of_transformers(
    tmp_path: Path,
) -> None:
    """mlx-lm adds 1 to them, if it turns the convolutions around."""
    source = write_source(tmp_path / "source", cases()["qwen3_5"]["config"])
    expected = megaconv.convert(source, tmp_path / "a", saver="hf", text_only=True)
    path = source / "model.safetensors"
    inside = {
        f"language_model.{name.replace('model.language_model.', 'model.')}": tensor
        for name, tensor in load_file(path).items()
    }
    save_file(inside, path, metadata={"format": "mlx"})
    found = megaconv.convert(source, tmp_path / "b", saver="hf")
    assert found.fingerprint == expected.fingerprint


def test_a_gate_without_axes_is_refused(tmp_path: Path) -> None:
    source = copytree(MLX / "gpt_oss", tmp_path / "model")
    experts = "model.layers.0.mlp.experts"
    scalars = {f"{experts}.{part}_proj.bias": torch.zeros(()) for part in ("gate", "up")}
    rewrite(source, **scalars)
    refused = run("convert", source, tmp_path / "out", "--saver", "core")
    assert_refused(refused, 3, "gate_proj.bias is [] float32", "an axis of experts")


def test_an_index_of_the_only_file_is_no_second_model(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """mlx-lm writes an index beside model.safetensors too."""
    index = model / "model.safetensors.index.json"
    names = load_file(model / "model.safetensors")
    index.write_text(json.dumps({"weight_map": dict.fromkeys(names, "model.safetensors")}))
    megaconv.convert(model, tmp_path / "a", saver="hf")
    assert "two models" not in caplog.text
    index.write_text(
        json.dumps({"weight_map": dict.fromkeys(names, "model-00001-of-00002.safetensors")})
    )
    megaconv.convert(model, tmp_path / "b", saver="hf")
    assert "two models" in caplog.text


def test_a_multimodal_model_gives_its_language_model(tmp_path: Path) -> None:
    """mlx-vlm keeps the encoders, mlx-lm drops them."""
    source = write_llama(tmp_path / "inside")
    path = source / "model.safetensors"
    tensors = {f"language_model.{name}": tensor for name, tensor in load_file(path).items()}
    inside = json.loads((source / "config.json").read_text())
    outer = {
        "architectures": ["LlavaForConditionalGeneration"],
        "model_type": "llava",
        "text_config": inside,
    }
    (source / "config.json").write_text(json.dumps(outer))
    save_file(tensors, path, metadata={"format": "mlx"})
    expected = megaconv.convert(write_llama(tmp_path / "alone"), tmp_path / "a", saver="core")
    found = megaconv.convert(source, tmp_path / "b", saver="core")
    assert found.fingerprint == expected.fingerprint
    save_file(
        tensors | {"vision_tower.x.weight": torch.ones(2, 2)}, path, metadata={"format": "mlx"}
    )
    refused = run("convert", source, tmp_path / "c", "--saver", "core")
    assert_refused(
        refused,
        2,
        "holds a multimodal model (vision_tower); --text-only converts its language model",
    )
    taken = megaconv.convert(source, tmp_path / "c", saver="core", text_only=True)
    assert taken.fingerprint == expected.fingerprint
