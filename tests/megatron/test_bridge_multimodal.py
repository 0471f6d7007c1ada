"""Multimodal checkpoints of Megatron-Bridge: megaconv reads every bit of its own, and Bridge computes with ours.

It needs the environment of test_bridge_loads.py. Core's wrappers of Transformer Engine's layers run with a stand-in for the
engine (tests/engine_on_cpu.py), so the names and the extra states are those of a run on a GPU.
"""

import json
import subprocess
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import megaconv
from megaconv.errors import UnknownFamily
from tests.bridge_oracle import REPLY
from tests.bridge_process import ENVIRONMENT, NEEDS_BRIDGE, PYTHON, ROOT, ask
from tests.families.test_language_models_inside import MODELS, create
from tests.megatron.test_oracles import TOLERANCE

pytestmark = NEEDS_BRIDGE
MEDIA = 100
"""The token that stands for a part of an image or of a sound."""
TOKENS = {
    **dict.fromkeys(("image_token_id", "image_token_index", "audio_token_index"), MEDIA),
    **{"video_token_id": 101, "vision_start_token_id": 102, "vision_end_token_id": 103},
    **{"image_start_token_id": 102, "image_end_token_id": 103},
    **{"video_start_token_id": 104, "video_end_token_id": 105},
}
"""Key of config.json -> a token of the small vocabulary."""
FOR_BRIDGE: dict[str, Any] = {
    "saver": "core",
    "ckpt_format": "torch_dist",
    "options": {"for": "megatron-bridge"},
}
YARN = {
    **{"rope_type": "yarn", "rope_theta": 5000.0, "factor": 4.0, "beta_fast": 32.0},
    **{"beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1},
    "original_max_position_embeddings": 24,
}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}


@dataclass(frozen=True)
class Case:
    """A kind of multimodal model."""

    text: Mapping[str, Any] = field(default_factory=dict)
    vision: Mapping[str, Any] = field(default_factory=dict)
    whole: Mapping[str, Any] = field(default_factory=dict)
    """What its config.json has besides, as the published ones have it."""
    provider: str = ""
    """The provider that an output names; empty if none is written."""
    dtype: str = "fp32"
    """The dtype in which Bridge saves it."""


TANH = {"hidden_act": "gelu_pytorch_tanh"}
NO_DEEPSTACK = {**TANH, "deepstack_visual_indexes": []}
OUT_NORM = "linear_attn.norm.weight"
"""The end of the names of norms that Bridge stores without their 1."""
LINEAR = {"rope_type": "linear", "rope_theta": 50000.0, "factor": 8.0}
GEMMA_ROPES = {"rope_parameters": {"full_attention": LINEAR, "sliding_attention": ROPE}}
WINDOWS = {"sliding_window": 7, "layer_types": ["sliding_attention", "full_attention"] * 2}
EPSILON = {"rms_norm_eps": 1e-5}
"""Bridge's Gemma 3 and EXAONE 4.5 have this epsilon in their norms after sublayers, whatever their settings say."""
CASES: Mapping[str, Case] = {
    "qwen2_5_vl": Case(provider="Qwen25VLModelProvider"),
    "qwen3_vl": Case(vision=TANH, provider="Qwen3VLModelProvider"),
    "qwen3_vl_moe": Case(vision=TANH, provider="Qwen3VLMoEModelProvider"),
    "glm4v_moe": Case(text={"use_qk_norm": False}, provider="GLM45VModelProvider"),
    "qwen2_audio": Case(provider="Qwen2AudioModelProvider"),
    "exaone4_5": Case(text={**EPSILON, **WINDOWS}, provider="Exaone45ModelProvider"),
    "gemma3": Case(
        text={**EPSILON, **GEMMA_ROPES, **WINDOWS},
        vision={"vision_use_head": False},
        whole={"tie_word_embeddings": True, "mm_tokens_per_image": 4},
        provider="Gemma3VLModelProvider",
        dtype="bf16",
    ),
    "mistral3": Case(
        vision={"rope_parameters": ROPE, "image_size": 56}, provider="Ministral3ModelProvider"
    ),
    "qwen3_5": Case(vision=NO_DEEPSTACK, provider="Qwen35VLModelProvider"),
    "qwen3_5_moe": Case(vision=NO_DEEPSTACK, provider="Qwen35VLMoEModelProvider"),
}
WRITTEN = tuple(name for name, case in CASES.items() if case.provider)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Any]]:
    """(its Hugging Face directory, the model) by name."""
    folder = tmp_path_factory.mktemp("models")
    return {name: (folder / name, made(name, case, folder / name)) for name, case in CASES.items()}


def made(name: str, case: Case, directory: Path) -> Any:
    kind = MODELS[name]
    if name == "mistral3":
        text = {"model_type": "ministral3", "head_dim": 12, "rope_parameters": YARN}
        kind = replace(kind, family="ministral3", text=text)
    create(kind, directory, deepcopy(case.vision))  # transformers changes the dict that it gets
    raw = json.loads((directory / "config.json").read_text())
    raw |= {key: token for key, token in TOKENS.items() if key in raw} | dict(case.whole)
    raw["text_config"] |= case.text
    if "vision_config" in raw:
        raw["vision_config"] |= case.vision
    (directory / "config.json").write_text(json.dumps(raw))
    stored = load_file(directory / "model.safetensors")
    tensors = {
        key: exact_without_1(tensor) if key.endswith(OUT_NORM) else tensor
        for key, tensor in stored.items()
        if not (raw["tie_word_embeddings"] and "lm_head" in key)
    }
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return loaded(directory)


def exact_without_1(weight: torch.Tensor) -> torch.Tensor:
    """The weight with few bits, so that subtracting 1 doesn't round it."""
    return (weight * 64).round() / 64


def loaded(directory: Path) -> Any:
    """transformers' model. Bridge's mergers of Qwen3-VL and Qwen 3.5 compute the approximation of gelu, so these do too."""
    from transformers import AutoModelForMultimodalLM

    options: Any = {"dtype": torch.float32, "attn_implementation": "eager"}
    model = AutoModelForMultimodalLM.from_pretrained(directory, **options).eval()
    for module in model.modules():
        if (
            type(module).__name__.startswith(("Qwen3VL", "Qwen3_5"))
            and "Merger" in type(module).__name__
        ):
            module.act_fn = torch.nn.GELU(approximate="tanh")
    return model


# Bridge's checkpoints.


@pytest.fixture(scope="module")
def imported(
    models: dict[str, tuple[Path, Any]], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """The checkpoint that Bridge's AutoBridge made of each model."""
    folder = tmp_path_factory.mktemp("imported")
    pairs = [path for name in CASES for path in (models[name][0], folder / name)]
    replies, warnings = ask("tests.bridge_writer", "--engine", *pairs)
    assert replies == [{}] * len(CASES), f"{replies}\n{warnings[-4000:]}"
    return {name: folder / name for name in CASES}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_every_bit_that_megatron_bridge_imported_comes_back(
    name: str, models: dict[str, tuple[Path, Any]], imported: dict[str, Path], tmp_path: Path
) -> None:
    original, case = models[name][0], CASES[name]
    megaconv.convert(original, tmp_path / "expected", saver="hf", dtype=case.dtype)
    megaconv.convert(imported[name], tmp_path / "back", saver="hf", config=original)
    expected, found = weights(tmp_path / "expected"), weights(tmp_path / "back")
    assert set(found) == set(expected)
    for key, tensor in expected.items():
        assert torch.equal(found[key], tensor), key
    files = [tmp_path / side / "config.json" for side in ("expected", "back")]
    assert json.loads(files[0].read_text()) == json.loads(files[1].read_text())


def weights(directory: Path) -> dict[str, torch.Tensor]:
    """The weights of transformers' model, which finds each of them in the files, and nothing else."""
    from transformers import AutoModelForMultimodalLM

    model, said = AutoModelForMultimodalLM.from_pretrained(
        directory, dtype="auto", output_loading_info=True
    )
    assert not said["missing_keys"]
    assert not said["unexpected_keys"]
    state: dict[str, torch.Tensor] = model.state_dict()
    return state


@pytest.mark.slow
def test_a_checkpoint_without_config_json_is_refused_by_its_provider(
    imported: dict[str, Path], tmp_path: Path
) -> None:
    with pytest.raises(UnknownFamily, match=r"Qwen25VLModelProvider.*pass --config"):
        megaconv.convert(imported["qwen2_5_vl"], tmp_path / "out", saver="hf")
    assert not (tmp_path / "out").exists()


# Our checkpoints.


@dataclass(frozen=True)
class Asked:
    """The words of a forward pass, for transformers and for Bridge."""

    common: dict[str, torch.Tensor]
    transformers: dict[str, torch.Tensor]
    bridge: dict[str, torch.Tensor]


def asked(name: str, medium: str) -> Asked:
    random = torch.Generator().manual_seed(5)
    ids = torch.randint(7, 99, (2, 12), generator=random)
    kinds = torch.zeros_like(ids, dtype=torch.int32)
    needs_kinds = {"mm_token_type_ids": kinds} if name in ("glm4v_moe", "qwen3_vl") else {}
    if medium == "text":
        return Asked({"input_ids": ids}, {}, needs_kinds if name == "glm4v_moe" else {})
    if name == "qwen2_audio":
        ids[:, 1:11] = MEDIA
        sound = {"input_features": torch.randn(2, 8, 40, generator=random)}
        sound["feature_attention_mask"] = torch.ones(2, 40, dtype=torch.int64)
        return Asked({"input_ids": ids, **sound}, {"attention_mask": torch.ones_like(ids)}, {})
    ids[:, 1], ids[:, 2:6], ids[:, 6] = 102, MEDIA, 103
    kinds[:, 2:6] = 1
    image = {"pixel_values": torch.randn(32, 3 * 2 * 14 * 14, generator=random)}
    image["image_grid_thw"] = torch.tensor([[1, 4, 4], [1, 4, 4]])
    if name == "mistral3":
        pixels = {"pixel_values": torch.randn(2, 3, 56, 56, generator=random)}
        pixels["image_sizes"] = torch.tensor([[56, 56], [56, 56]])
        return Asked({"input_ids": ids, **pixels}, {}, {})
    if name == "gemma3":
        pixels = {"pixel_values": torch.randn(2, 3, 28, 28, generator=random)}
        return Asked({"input_ids": ids, **pixels}, {"token_type_ids": kinds}, {})
    seen = {"mm_token_type_ids": kinds, "attention_mask": torch.ones_like(ids)}
    return Asked({"input_ids": ids, **image}, seen, needs_kinds)


MEDIA_KINDS = ("text", "image or sound")


@pytest.fixture(scope="module", params=[1, 2], ids=["tp 1", "tp 2"])
def answers(
    request: pytest.FixtureRequest,
    models: dict[str, tuple[Path, Any]],
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[tuple[str, str], tuple[dict[str, Any], Any, Any]]:
    """(what Bridge says, its logits, transformers' logits) by model and medium. Importing Bridge takes longer than all else."""
    import numpy as np

    world, folder = request.param, tmp_path_factory.mktemp("answers")
    jobs = []
    for name in WRITTEN:
        megaconv.convert(models[name][0], folder / name, tp=world, **FOR_BRIDGE)
        for medium in MEDIA_KINDS:
            words, place = asked(name, medium), str(folder / f"{name} {medium}")
            given: dict[str, Any] = {**words.common, **words.bridge}
            np.savez(f"{place}.npz", **given)
            jobs.append(
                {
                    "checkpoint": str(folder / name),
                    "inputs": f"{place}.npz",
                    "logits": f"{place}.npy",
                }
            )
    replies = answered(jobs, world, folder)
    found = {}
    for job, reply in zip(jobs, replies, strict=True):
        name, medium = Path(job["logits"]).stem.split(" ", 1)
        words = asked(name, medium)
        with torch.no_grad():
            expected = models[name][1](**words.common, **words.transformers).logits.numpy()
        logits = np.load(job["logits"]) if "failed" not in reply else None
        found[name, medium] = (reply, logits, expected)
    return found


def answered(jobs: list[dict[str, Any]], world: int, folder: Path) -> list[dict[str, Any]]:
    """Rank 0's replies. If another rank fails in a job, its reply stands there."""
    (folder / "jobs.json").write_text(json.dumps(jobs))
    command = [PYTHON, "-W", "ignore", "-m", "tests.bridge_whole"]
    words = [str(world), str(folder / "meet"), str(folder / "jobs.json")]
    logs = [(folder / f"rank-{rank}").open("w+") for rank in range(world)]
    ranks = [
        subprocess.Popen([*command, str(rank), *words], cwd=ROOT, env=ENVIRONMENT, stdout=log, stderr=log)
        for rank, log in enumerate(logs)
    ]  # fmt: skip
    for rank in ranks:
        rank.wait(timeout=1200)
    replies: dict[int, dict[str, Any]] = {}
    for log in logs:
        log.seek(0)
        for line in log.read().splitlines():
            if line.startswith(REPLY):
                reply = json.loads(line.removeprefix(REPLY))
                if "Connection closed by peer" not in reply.get("failed", ""):
                    replies.setdefault(reply["job"], reply)
        log.close()
    return [replies[number] for number in range(len(jobs))]


@pytest.mark.slow
@pytest.mark.parametrize("medium", MEDIA_KINDS)
@pytest.mark.parametrize("name", WRITTEN)
def test_megatron_bridge_computes_from_our_output_what_transformers_does(
    name: str, medium: str, answers: Any
) -> None:
    reply, logits, expected = answers[name, medium]
    assert "failed" not in reply, reply["trace"]
    assert reply["provider"] == CASES[name].provider
    assert abs(logits[..., : expected.shape[-1]] - expected).max() < TOLERANCE
