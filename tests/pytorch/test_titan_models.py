"""torchtitan's Qwen3, GPT-OSS and DeepSeek: read and written under torchtitan's own names.

The names and shapes of the first tests are those of the state_dict of torchtitan 0.3.0's models. The last test compares
with torchtitan itself, on two processes (docs/optimizer.md has the commands).
"""

import os
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

import megaconv
from megaconv.errors import NotExpressible, UsageError
from tests import torch_runs
from tests.families.test_families import write_model

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

TITAN = os.environ.get("TORCHTITAN_PYTHON", "")
FAMILIES = ("qwen3", "qwen3_moe", "gpt_oss", "deepseek_v2", "deepseek_v3")
SINCE_03 = {"names": "torchtitan-0.3"}
_ATTENTION = {
    "q_proj": "qkv_linear.wq",
    "k_proj": "qkv_linear.wk",
    "v_proj": "qkv_linear.wv",
    "o_proj": "wo",
    "q_norm": "q_norm",
    "k_norm": "k_norm",
    "q_a_proj": "wq_a",
    "q_a_layernorm": "q_norm",
    "q_b_proj": "wq_b",
    "kv_a_proj_with_mqa": "wkv_a",
    "kv_a_layernorm": "kv_norm",
    "kv_b_proj": "wkv_b",
}
_MLP = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
_STACKS = {"gate_proj": "w1_EFD", "up_proj": "w3_EFD", "down_proj": "w2_EDF"}
_OF_GPT_OSS = {
    "gate_up_proj": "mlp1_weight_EGD",
    "gate_up_proj_bias": "mlp1_bias_EG",
    "down_proj": "mlp2_weight_EDF",
    "down_proj_bias": "mlp2_bias_ED",
}
_INNER = "moe.routed_experts.inner_experts."
_ENDS = {
    "model.embed_tokens.weight": "tok_embeddings.weight",
    "model.norm.weight": "norm.weight",
    "lm_head.weight": "lm_head.weight",
}


def as_titan_has_it(hf: Mapping[str, torch.Tensor], layers: int) -> dict[str, torch.Tensor]:
    """The tensors of transformers' files under torchtitan's names, by the rules of its adapters."""
    is_latent = any("kv_b_proj" in name for name in hf)
    found: dict[str, torch.Tensor] = {}
    experts: dict[str, dict[int, torch.Tensor]] = {}
    for name, tensor in hf.items():
        if name in _ENDS:
            found[_ENDS[name]] = tensor
            continue
        _, _, layer, module, *words = name.split(".")
        if module in ("embed_tokens", "shared_head") and words != ["norm", "weight"]:
            continue  # copies that transformers' files have with a layer of multi-token prediction
        number = int(layer)
        prefix = f"layers.{number}." if number < layers else f"mtp_layers.{number - layers}."
        if words[:1] == ["experts"] and len(words) == 4:
            stack = prefix + _INNER + _STACKS[words[2]]
            experts.setdefault(stack, {})[int(words[1])] = tensor
        else:
            part, turned = _in_layer(module, words, is_latent=is_latent)
            found[prefix + part] = tensor.transpose(1, 2).contiguous() if turned else tensor
    for stack, parts in experts.items():
        found[stack] = torch.stack([parts[expert] for expert in sorted(parts)])
    return found


def _in_layer(module: str, words: list[str], *, is_latent: bool) -> tuple[str, bool]:
    """(torchtitan's name in a layer, True if it stores each expert transposed)."""
    match module, *words:
        case "input_layernorm", last:
            return f"attention_norm.{last}", False
        case "post_attention_layernorm", last:
            return f"ffn_norm.{last}", False
        case "self_attn", "sinks":
            return "attention.sinks", False
        case "self_attn", "q_proj", last if is_latent:
            return f"attention.wq.{last}", False
        case "self_attn", part, last:
            return f"attention.{_ATTENTION[part]}.{last}", False
        case "mlp", "gate", "e_score_correction_bias":
            return "moe.expert_bias_E", False
        case "mlp", ("gate" | "router"), last:
            return f"moe.router.gate.{last}", False
        case "mlp", "shared_experts", part, last:
            return f"moe.shared_experts.{_MLP[part]}.{last}", False
        case "mlp", "experts", part:
            return _INNER + _OF_GPT_OSS[part], not part.endswith("bias")
        case "mlp", part, last:
            return f"feed_forward.{_MLP[part]}.{last}", False
        case "shared_head", "norm", last:
            return f"mtp_norm.{last}", False
    return ".".join((module, *words)), False


def save(tensors: Mapping[str, torch.Tensor], path: Path) -> Path:
    dcp.save(dict(tensors), checkpoint_id=path, no_dist=True)
    return path


def load_all(path: Path) -> dict[str, torch.Tensor]:
    found = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    state = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in found.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    dcp.load(state, checkpoint_id=path, no_dist=True)
    return state


def biases(titan: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The biases of experts that torchtitan's model has, as zeros."""
    prefixes = {name.partition("moe.")[0] for name in titan if ".moe." in name}
    return {f"{prefix}moe.expert_bias_E": torch.zeros(4) for prefix in prefixes}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_is_read_and_written_under_torchtitans_names(family: str, tmp_path: Path) -> None:
    hf = write_model(tmp_path / "hf", family)
    own = as_titan_has_it(load_file(hf / "model.safetensors"), layers=3)
    expected = biases(own) | own
    path = save(expected, tmp_path / "titan")
    assert megaconv.diff(path, hf, config=hf).same
    assert "torchtitan" in megaconv.inspect(path, config=hf).header.source
    megaconv.convert(hf, tmp_path / "made", saver="dcp", options=SINCE_03, verify=True)
    found = load_all(tmp_path / "made")
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def test_a_tied_head_is_written_under_both_names(tmp_path: Path) -> None:
    """torchtitan's checkpointer looks for both, and reads nothing if one is missing."""
    for family, names, head in (
        ("qwen3", "torchtitan-0.3", "lm_head.weight"),
        ("llama", "torchtitan-0.3", "lm_head.weight"),
        ("llama", "torchtitan", "output.weight"),
    ):
        hf = write_model(tmp_path / f"{names}-{family}", family, tie_word_embeddings=True)
        made = tmp_path / f"{names}-{family}-made"
        megaconv.convert(hf, made, saver="dcp", options={"names": names}, verify=True)
        found = load_all(made)
        assert torch.equal(found[head], found["tok_embeddings.weight"])
        assert megaconv.diff(made, hf).same


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "deepseek_v2"])
def test_a_bias_of_experts_that_the_family_lacks_is_no_silent_loss(
    family: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    hf = write_model(tmp_path / "hf", family)
    own = as_titan_has_it(load_file(hf / "model.safetensors"), layers=3)
    moved = {name: tensor + 0.001 for name, tensor in biases(own).items()}
    path = save(own | moved, tmp_path / "titan")
    with pytest.raises(NotExpressible, match="expert_bias=drop"):
        megaconv.fingerprint(path, config=hf)
    dropped = {"expert_bias": "drop"}
    megaconv.convert(path, tmp_path / "out", saver="hf", config=hf, options=dropped)
    assert "biases of experts" in caplog.text
    assert megaconv.diff(tmp_path / "out", hf).same
    with pytest.raises(UsageError, match="expert_bias=keep"):
        megaconv.convert(
            path, tmp_path / "no", saver="hf", config=hf, options={"expert_bias": "keep"}
        )


def test_layers_of_multi_token_prediction_may_be_missing(tmp_path: Path) -> None:
    """torchtitan trains DeepSeek V3 without them by default."""
    hf = write_model(tmp_path / "hf", "deepseek_v3")
    own = as_titan_has_it(load_file(hf / "model.safetensors"), layers=3)
    kept = {name: tensor for name, tensor in own.items() if not name.startswith("mtp_layers.")}
    assert len(kept) < len(own)
    path = save(kept, tmp_path / "titan")
    assert megaconv.open(path, config=hf).config.mtp_layers == 0


def test_names_of_earlier_releases_are_for_llama_alone(tmp_path: Path) -> None:
    hf = write_model(tmp_path / "hf", "qwen3")
    with pytest.raises(NotExpressible, match=r"choose torchtitan-0\.3"):
        megaconv.convert(hf, tmp_path / "no", saver="dcp", options={"names": "torchtitan"})


@pytest.mark.torchtitan
@pytest.mark.skipif(not TITAN, reason="TORCHTITAN_PYTHON names no Python with torchtitan 0.3.0")
@pytest.mark.parametrize(
    ("family", "qkv"), [*((family, "fused") for family in FAMILIES), ("qwen3", "separate")]
)
def test_torchtitans_checkpointer_loads_what_became_of_its_checkpoint(
    family: str, qkv: str, tmp_path: Path
) -> None:
    """Weights, optimizer and step return bit for bit. The weights equal those of torchtitan's adapter, if it has them."""
    keys = {"qwen3": {"tie_word_embeddings": True}, "qwen3_moe": {"mlp_only_layers": []}}
    hf = write_model(tmp_path / "hf", family, **keys.get(family, {}))
    torch_runs.launch(TITAN, "tests.titan_models", "save", hf, tmp_path, qkv)
    saved = tmp_path / "checkpoint/step-1"
    names = {"names": "torchtitan-0.3" + ("" if qkv == "fused" else "-separate")}
    made = tmp_path / "made/step-1"
    megaconv.convert(saved, made, saver="dcp", config=hf, options=names, optimizer=True)
    torch_runs.launch(TITAN, "tests.titan_models", "load", hf, tmp_path, qkv)
    before = torch.load(tmp_path / "state.pt", weights_only=True)
    after = torch.load(tmp_path / "loaded.pt", weights_only=True)
    assert before.pop("step") == after.pop("step") == 1
    for part, state in before.items():
        assert state.keys() == after[part].keys()
        differing = [key for key, value in state.items() if not equal(value, after[part][key])]
        assert not differing, part
    assert_as_adapter_has_it(saved, hf, tmp_path)


def equal(one: object, other: object) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one, other)
    return one == other


def assert_as_adapter_has_it(saved: Path, hf: Path, path: Path) -> None:
    """torchtitan's adapter leaves out all experts of a GPT-OSS, whose names it doesn't know, and names V2's zero biases."""
    megaconv.convert(saved, path / "read", saver="hf", config=hf)
    found = load_file(path / "read/model.safetensors")
    expected = load_file(path / "adapter.safetensors")
    of_biases = {name for name in expected if "e_score_correction_bias" in name} - found.keys()
    for name in expected.keys() - of_biases:
        assert torch.equal(found[name], expected[name]), name
    further = {name for name in found.keys() - expected.keys() if "model.layers.3" not in name}
    assert all("mlp.experts." in name for name in further)
