"""`--base` after `--tokenizer`: config.json keeps the new special tokens, and no file of the old tokenizer comes back."""

import json
from pathlib import Path
from typing import Any

import pytest

import megaconv
from tests.engine.test_new_tokenizer import write_tokenizer
from tests.families.test_language_models_inside import MODELS, create
from tests.models import write_llama
from tests.runs import Outcome, run

NEW_END = 266


@pytest.fixture
def original(tmp_path: Path) -> Path:
    """A model of 270 tokens, of which its tokenizer has 263, with a file that the new tokenizer doesn't have."""
    made = write_tokenizer(write_llama(tmp_path / "original", layers=1, vocab=270))
    (made / "added_tokens.json").write_text('{"</s>": 262}')
    (made / "extra.txt").write_text("of the original")
    return made


@pytest.fixture
def changed(original: Path, tmp_path: Path) -> Path:
    """A Megatron checkpoint of the model with another tokenizer, whose texts end with another token."""
    new = write_tokenizer(tmp_path / "new", tuple(f"<tool_{n}>" for n in range(5)))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<tool_3>"}
    (new / "tokenizer_config.json").write_text(json.dumps(settings))
    (original / "generation_config.json").write_text('{"eos_token_id": 2}')
    megaconv.convert(original, tmp_path / "core", saver="core", tokenizer=new)
    return tmp_path / "core"


def back(source: Path, original: Path) -> Outcome:
    words = ["convert", source, original.parent / "back", "--saver", "hf", "--base", original]
    outcome = run(*words)
    assert outcome.status == 0, outcome.err
    return outcome


def settings(original: Path, name: str = "config.json") -> dict[str, Any]:
    found: dict[str, Any] = json.loads((original.parent / "back" / name).read_text())
    return found


def test_the_new_end_of_texts_stays_in_config_json(original: Path, changed: Path) -> None:
    outcome = back(changed, original)
    line = f"config.json: eos_token_id is {NEW_END}, as in the input; {original} has 2"
    assert line in outcome.err
    assert settings(original)["eos_token_id"] == NEW_END
    assert NEW_END in settings(original, "generation_config.json")["eos_token_id"]
    other = json.loads((original / "config.json").read_text()) | {"eos_token_id": NEW_END}
    assert settings(original) == other


def test_files_of_the_old_tokenizer_do_not_come_back(original: Path, changed: Path) -> None:
    outcome = back(changed, original)
    assert f"added_tokens.json of {original} left out" in outcome.err
    assert not (original.parent / "back" / "added_tokens.json").exists()
    assert (original.parent / "back" / "extra.txt").read_text() == "of the original"


def test_an_unchanged_model_gets_all_of_the_original(original: Path, tmp_path: Path) -> None:
    megaconv.convert(original, tmp_path / "core", saver="core")
    (tmp_path / "core" / "hf" / "added_tokens.json").unlink()
    outcome = back(tmp_path / "core", original)
    assert "left out" not in outcome.err
    assert "as in the input" not in outcome.err
    assert settings(original) == json.loads((original / "config.json").read_text())
    assert (original.parent / "back" / "added_tokens.json").is_file()


def test_fewer_ends_of_texts_than_the_original_has_are_no_others(
    original: Path, tmp_path: Path
) -> None:
    """The language model that transformers saves by itself has the class's default."""
    megaconv.convert(original, tmp_path / "alone", saver="hf")
    raw = json.loads((original / "config.json").read_text()) | {"eos_token_id": [2, 7]}
    (original / "config.json").write_text(json.dumps(raw))
    assert "as in the input" not in back(tmp_path / "alone", original).err
    assert settings(original)["eos_token_id"] == [2, 7]


def test_a_checkpoint_without_a_config_json_names_no_tokens(original: Path, changed: Path) -> None:
    (changed / "hf" / "config.json").unlink()
    assert "as in the input" not in back(changed, original).err
    assert settings(original)["eos_token_id"] == 2


@pytest.mark.oracle
@pytest.mark.parametrize("stated", ["outside", "inside"])
def test_a_multimodal_original_names_them_where_it_did(stated: str, tmp_path: Path) -> None:
    original = tmp_path / "original"
    create(MODELS["gemma3"], original)
    raw = json.loads((original / "config.json").read_text())
    raw["text_config"].pop("eos_token_id", None)
    raw.pop("eos_token_id", None)
    (raw if stated == "outside" else raw["text_config"])["eos_token_id"] = 2
    (original / "config.json").write_text(json.dumps(raw))
    megaconv.convert(original, tmp_path / "alone", saver="hf", text_only=True)
    config = json.loads((tmp_path / "alone" / "config.json").read_text())
    assert config["eos_token_id"] == 2
    (tmp_path / "alone" / "config.json").write_text(json.dumps(config | {"eos_token_id": 9}))
    assert "eos_token_id is 9, as in the input" in back(tmp_path / "alone", original).err
    found = settings(original)
    assert found["text_config"]["eos_token_id"] == 9
    assert found.get("eos_token_id") == (9 if stated == "outside" else None)


def test_files_about_the_originals_own_weights_are_left_out(tmp_path: Path) -> None:
    """An engine would take the output for a quantized model, and `verify` for a changed one."""
    source, core = write_llama(tmp_path / "hf", hidden=64, layers=1), tmp_path / "core"
    original = tmp_path / "original"
    megaconv.convert(source, core, saver="core")
    megaconv.convert(source, original, saver="hf", quantize="fp8-per-channel")
    assert (original / "hf_quant_config.json").exists()
    about_weights = (
        "hf_quant_config.json",
        "quantize_config.json",
        "quant_config.json",
        "model.sig",
    )
    for name in (*about_weights[1:], "extra.txt"):
        (original / name).write_text("{}")
    outcome = back(core, original)
    assert outcome.status == 0, outcome.err
    made = tmp_path / "back"
    assert not [name for name in about_weights if (made / name).exists()]
    assert (made / "extra.txt").exists()
    assert megaconv.verify(made).same
    assert "modelopt" not in run("inspect", made).out
