"""Biencoders: Megatron's own legacy checkpoints through core and back, and as directories for sentence-transformers."""

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import megaconv
from megaconv.engine.conversion import fingerprint
from megaconv.errors import LayoutError
from megaconv.families.biencoder import TOWERS
from megatron_lite.inference.towers import open_towers
from tests.conftest import FIXTURES

KINDS = ("separate", "shared")
VOCAB = 169
VOCABULARY = Path(__file__).parents[1] / "trainer" / "fixtures" / "retriever" / "vocab.txt"

FLAGS = Namespace(
    vocab_file=str(VOCABULARY),
    merge_file=None,
    tokenizer_type=None,
    tokenizer_model=None,
    training=None,
)


def checkpoint(kind: str) -> Path:
    return FIXTURES / f"biencoder-legacy-{kind}"


def flat(model: dict[str, Any], before: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in model.items():
        found |= (
            flat(value, f"{before}{name}/") if isinstance(value, dict) else {before + name: value}
        )
    return found


def model_of(root: Path) -> dict[str, Any]:
    (file,) = root.glob("iter_*/mp_rank_00/model_optim_rng.pt")
    state = torch.load(file, weights_only=False)
    return flat(state["model"])


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_goes_through_core_and_back_bit_for_bit(kind: str, tmp_path: Path) -> None:
    sizes = {"true_vocab_size": VOCAB, "make_vocab_size_divisible_by": 8}
    core, ranks, back = tmp_path / "core", tmp_path / "ranks", tmp_path / "back"
    megaconv.convert(
        checkpoint(kind), core, saver="core", ckpt_format="torch_dist", tp=2, pp=2, **sizes
    )
    megaconv.convert(core, ranks, saver="core", ckpt_format="torch", tp=2, pp=1)
    megaconv.convert(ranks, back, saver="legacy", tp=1, pp=1)
    before, after = model_of(checkpoint(kind)), model_of(back)
    assert list(before) == list(after)
    for name, tensor in before.items():
        if tensor is None:
            assert after[name] is None
        else:  # the padding of the vocabulary is free
            assert torch.equal(tensor[:VOCAB], after[name][:VOCAB]), name
    assert fingerprint(core).weights == fingerprint(back).weights


def test_a_sharded_legacy_biencoder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LayoutError, match="tensor and pipeline parallel size 1 only"):
        megaconv.convert(checkpoint("separate"), tmp_path / "out", saver="legacy", tp=2)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", KINDS)
def test_transformers_tower_and_the_written_layer_embed_as_the_trainers_towers(
    kind: str, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    out = tmp_path / "out"
    megaconv.convert(checkpoint(kind), out, saver="hf", true_vocab_size=VOCAB)
    towers = open_towers(FLAGS, str(checkpoint(kind)), None)
    tokens = torch.tensor([[2, 23, 114, 57, 3, 0, 0], [2, 9, 8, 7, 6, 5, 3]])
    for tower in ("query", "context") if kind == "separate" else ("",):
        directory = out / tower
        modules = json.loads((directory / "modules.json").read_text())
        assert [module["path"] for module in modules][:2] == ["", "1_Pooling"]
        model = transformers.MegatronBertModel.from_pretrained(directory, add_pooling_layer=False)
        with torch.no_grad():
            found = model.eval()(tokens, attention_mask=(tokens > 0).long()).last_hidden_state[:, 0]
        if kind == "separate":
            dense = load_file(directory / "2_Dense" / "model.safetensors")
            found = found @ dense["linear.weight"].T + dense["linear.bias"]
        embed = towers.context if tower == "context" else towers.query
        assert abs(found.numpy() - embed(tokens.numpy())).max() <= 1e-5


@pytest.mark.parametrize("kind", KINDS)
def test_sentence_transformers_embeds_as_the_trainers_towers(kind: str, tmp_path: Path) -> None:
    sentences = pytest.importorskip("sentence_transformers")
    out = tmp_path / "out"
    megaconv.convert(checkpoint(kind), out, saver="hf", true_vocab_size=VOCAB)
    towers = open_towers(FLAGS, str(checkpoint(kind)), None)
    texts = ["la bu ko fo dalebu", "ra ne nu"]
    tokenizer = towers.tokenizer
    rows = [[2, *tokenizer.tokenize(text), 3] for text in texts]
    longest = max(map(len, rows))
    ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows]).numpy()
    wanted = {
        "query": towers.query(ids),
        "context": towers.context(ids),
        "shared": towers.query(ids),
    }
    for tower in [name for name in TOWERS if (name == "shared") == (kind == "shared")]:
        directory = out if tower == "shared" else out / tower
        (directory / "vocab.txt").write_bytes(VOCABULARY.read_bytes())
        (directory / "tokenizer_config.json").write_text(
            json.dumps({"tokenizer_class": "BertTokenizer", "do_lower_case": True})
        )
        found = sentences.SentenceTransformer(str(directory), device="cpu").encode(texts)
        assert abs(found - wanted[tower]).max() <= 1e-5
