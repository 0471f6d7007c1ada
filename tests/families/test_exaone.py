"""EXAONE 3: the same model as a Llama, under its published names and keys and under those of transformers 5.24."""

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

import megaconv
from megaconv.errors import CorruptCheckpoint, UnknownFamily
from megaconv.families import family, family_of_hf
from megaconv.model.meaning import lost_fields
from tests.families.test_published_models import PUBLISHED as MODELS
from tests.models import write_llama

MODULES = (
    ("model.embed_tokens.", "transformer.wte."),
    ("model.layers.", "transformer.h."),
    ("model.norm.", "transformer.ln_f."),
    (".self_attn.", ".attn.attention."),
    (".o_proj.", ".out_proj."),
    (".input_layernorm.", ".ln_1."),
    (".post_attention_layernorm.", ".ln_2."),
    (".mlp.gate_proj.", ".mlp.c_fc_0."),
    (".mlp.up_proj.", ".mlp.c_fc_1."),
    (".mlp.down_proj.", ".mlp.c_proj."),
)
"""conversion_mapping.py of transformers 5.24, read backwards."""
PUBLISHED: dict[str, Any] = MODELS["LGAI-EXAONE/EXAONE-3.5-7.8B-Instruct"]["config"]


def write_exaone(llama: Path, directory: Path) -> Path:
    """Write a Llama under the names and keys of a published EXAONE."""
    directory.mkdir()
    tensors = {}
    for name, tensor in load_file(llama / "model.safetensors").items():
        for old, new in MODULES:
            name = name.replace(old, new)
        tensors[name] = tensor
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    raw = json.loads((llama / "config.json").read_text())
    raw |= {"architectures": ["ExaoneForCausalLM"], "model_type": "exaone"}
    raw["num_layers"] = raw.pop("num_hidden_layers")
    raw["layer_norm_epsilon"] = raw.pop("rms_norm_eps")
    (directory / "config.json").write_text(json.dumps(raw))
    return directory


def test_it_has_the_weights_and_the_megatron_checkpoint_of_a_llama(tmp_path: Path) -> None:
    llama = write_llama(tmp_path / "llama")
    exaone = write_exaone(llama, tmp_path / "exaone")
    made = {
        path.name: megaconv.convert(path, tmp_path / f"{path.name} core", saver="core", tp=2)
        for path in (llama, exaone)
    }
    assert made["llama"].fingerprint == made["exaone"].fingerprint
    assert made["exaone"].header.config.family == "exaone"
    back = tmp_path / "back"
    megaconv.convert(tmp_path / "exaone core", back, saver="hf", config=exaone, verify=True)
    written, source = (load_file(path / "model.safetensors") for path in (back, exaone))
    assert written.keys() == source.keys()
    raw = json.loads((back / "config.json").read_text())
    assert raw["num_layers"] == made["exaone"].header.config.layer_count


def test_keys_of_transformers_are_the_published_ones_under_other_names() -> None:
    theirs = {
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": PUBLISHED["num_layers"],
        "rms_norm_eps": PUBLISHED["layer_norm_epsilon"],
        "hidden_act": "silu",
    }
    named_alike = PUBLISHED.keys() - {"num_layers", "layer_norm_epsilon", "activation_function"}
    kept = {key: PUBLISHED[key] for key in named_alike}
    table = family("exaone")
    assert family_of_hf(kept | theirs, "config.json") is table
    assert not lost_fields(table.read_hf(PUBLISHED), table.read_hf(kept | theirs))
    usual = family_of_hf(kept | theirs | {"model_type": "llama"}, "config.json")
    assert usual.name == "llama"


@pytest.mark.parametrize(
    ("keys", "error", "words"),
    [
        ({"activation_function": "gelu"}, UnknownFamily, "activation_function 'gelu' is not"),
        ({"num_layers": 0}, CorruptCheckpoint, "num_layers should be a positive number, found 0"),
        ({"num_hidden_layers": 31}, CorruptCheckpoint, "two names for one thing"),
    ],
)
def test_unsupported_settings_are_refused_by_the_name_of_their_key(
    keys: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        family("exaone").read_hf(PUBLISHED | keys)
