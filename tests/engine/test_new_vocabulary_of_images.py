"""`convert --vocab-size` of whole multimodal models: their language model gets rows, and all other tensors stay."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import megaconv
from megaconv.errors import NotExpressible
from tests.engine.test_new_vocabulary import MORE
from tests.runs import run
from tests.trainer.multimodal import create
from tests.trainer.multimodal_configs import MODELS
from tests.whole_models import logits_of_text, weights

QUICK = ("qwen2_5_vl", "gemma3", "llava")
EACH = [pytest.param(kind, marks=[] if kind in QUICK else [pytest.mark.slow]) for kind in MODELS]
REFUSED = ("gemma4_small",)
"""Models with an embedding in each layer."""

pytestmark = pytest.mark.oracle


def load(model: Path) -> Any:
    transformers = pytest.importorskip("transformers")
    made = transformers.AutoModelForImageTextToText.from_pretrained(model, dtype=torch.float32)
    return made.eval()


@pytest.mark.parametrize("kind", EACH)
def test_each_model_computes_as_transformers_resized_model(kind: str, tmp_path: Path) -> None:
    create(kind, tmp_path / "hf")
    before = megaconv.inspect(tmp_path / "hf").header.config.vocab
    if kind in REFUSED:
        with pytest.raises(NotExpressible, match="embeddings in each layer"):
            megaconv.convert(tmp_path / "hf", tmp_path / "out", saver="hf", vocab_size=before + 1)
        return
    megaconv.convert(tmp_path / "hf", tmp_path / "out", saver="hf", vocab_size=before + MORE)
    expected = load(tmp_path / "hf")
    expected.resize_token_embeddings(before + MORE, mean_resizing=False)
    for module in (expected.get_input_embeddings(), expected.get_output_embeddings()):
        rows = module.weight.data
        rows[-MORE:] = rows[:-MORE].double().mean(0)
    found = load(tmp_path / "out")
    torch.testing.assert_close(
        logits_of_text(found), logits_of_text(expected), rtol=1e-5, atol=1e-5
    )
    assert found.config.get_text_config().vocab_size == before + MORE


def test_a_tokenizer_and_megatron_go_along(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    create("qwen2_5_vl", tmp_path / "hf")
    before = megaconv.inspect(tmp_path / "hf").header.config.vocab
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    present = len(tokenizer)
    tokenizer.add_tokens([f"<tool_{number}>" for number in range(before - len(tokenizer) + 3)])
    tokenizer.eos_token = "<tool_0>"
    tokenizer.save_pretrained(tmp_path / "new")
    words = ["--tokenizer", tmp_path / "new", "--new-rows", "zero"]
    core = run("convert", tmp_path / "hf", tmp_path / "core", "--saver", "core", "--tp", 2, *words)
    assert core.status == 0, core.err
    assert "embedding and head get 3 new rows" in core.err
    back = run("convert", tmp_path / "core", tmp_path / "back", "--saver", "hf")
    assert back.status == 0, back.err
    old, made = weights(tmp_path / "hf"), weights(tmp_path / "back")
    assert old.keys() == made.keys()
    changed = {name for name, value in old.items() if made[name].shape != value.shape}
    assert changed == {"lm_head.weight", "model.embed_tokens.weight"}
    for name in changed:
        assert torch.equal(made[name][:present], old[name][:present])
        assert not made[name][present:].any()
    assert (tmp_path / "back" / "preprocessor_config.json").exists()
    content = (tmp_path / "back" / "tokenizer.json").read_bytes()
    assert content == (tmp_path / "new" / "tokenizer.json").read_bytes()
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    inner = config.get("text_config", config)
    assert inner["vocab_size"] == before + 3
    assert inner["eos_token_id"] == tokenizer.eos_token_id
