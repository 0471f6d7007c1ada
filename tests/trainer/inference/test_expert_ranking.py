"""`megatron-lite rank-experts`: its file is read by `convert --keep-experts`, and experts without a token can go without effect."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

import megaconv
from megaconv.model.subjects import Experts
from megatron_lite.inference.expert_ranking import kept
from megatron_lite.processes import launch
from tests.trainer.data.chat_templates import MARKED, save_tokenizer
from tests.trainer.inference.damaged_models import with_nan
from tests.trainer.inference.test_commands import run

pytestmark = pytest.mark.oracle


@pytest.fixture(autouse=True)
def _failures_leave_the_tests_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "leave", sys.exit)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mixture with a tokenizer, two of whose eight experts of each layer no token chooses."""
    directory = save_tokenizer(tmp_path_factory.mktemp("model") / "hf", MARKED["chatml"])
    torch.manual_seed(1)
    made = Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            vocab_size=420, hidden_size=32, intermediate_size=64, moe_intermediate_size=24, num_hidden_layers=3,
            num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_experts=8, num_experts_per_tok=2, norm_topk_prob=True,
            max_position_embeddings=256, initializer_range=0.2,
        )
    )  # fmt: skip
    with torch.no_grad():
        for number, layer in enumerate(made.model.layers):
            # These two have the logits 0 and a little less; of opposite rows, one has a logit above 0.
            layer.mlp.gate.weight[[number, number + 1]] = 0
            layer.mlp.gate.weight[[4, 6]] = -layer.mlp.gate.weight[[5, 7]]
    made.save_pretrained(directory)
    return directory


def ranked(output: Path, *words: object) -> dict[str, Any]:
    assert run("rank-experts", *words, "--output", output) == 0
    found: dict[str, Any] = json.loads(output.read_text())
    return found


def test_experts_that_no_token_chooses_are_left_out_and_the_model_stays_the_same(
    model: Path, texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = ranked(tmp_path / "kept.json", model, "--data", texts, "--leave-out", 2)
    assert found["keep"] == {
        f"layers.{layer}": [n for n in range(8) if n not in (layer, layer + 1)]
        for layer in range(3)
    }
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "layer     choices  output"
    assert lines[1] == "layers.0     0.0%    0.0%"
    assert f"{tmp_path}/kept.json: 6 of the 8 experts of each layer" in lines
    assert (
        lines[-1]
        == f"  megaconv convert {model} pruned --saver hf --keep-experts {tmp_path}/kept.json"
    )
    words: dict[str, Any] = {"saver": "hf", "keep_experts": tmp_path / "kept.json", "verify": True}
    megaconv.convert(model, tmp_path / "pruned", **words)
    whole, pruned = (
        AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32)
        for place in (model, tmp_path / "pruned")
    )
    tokens = torch.arange(10).unsqueeze(0)
    torch.testing.assert_close(whole(tokens).logits, pruned(tokens).logits)


def test_the_file_has_the_tokens_and_the_scores_of_all_experts(
    model: Path, texts: Path, tmp_path: Path
) -> None:
    found = ranked(tmp_path / "kept.json", model, "--data", texts, "--leave-out", 5)
    for layer, scores in found["scores"].items():
        assert sum(found["chosen"][layer]) == 2 * found["tokens"]
        stay = sorted(range(8), key=lambda expert: scores[expert])[5:]
        assert found["keep"][layer] == sorted(stay)


def test_a_quarter_is_left_out_if_nothing_else_is_asked(
    model: Path, texts: Path, tmp_path: Path
) -> None:
    found = ranked(tmp_path / "kept.json", model, "--data", texts, "--seq-length", 16)
    assert {len(experts) for experts in found["keep"].values()} == {6}
    less = ranked(
        tmp_path / "less.json", model, "--data", texts, "--seq-length", 16, "--max-memory", "300KB"
    )
    assert less["chosen"] == found["chosen"]


def test_experts_of_a_megatron_checkpoint_are_ranked(
    model: Path, texts: Path, tmp_path: Path
) -> None:
    megaconv.convert(model, tmp_path / "core", saver="core", tp=2, ep=2)
    words = [
        "--data",
        texts,
        "--tokenizer-model",
        model,
        "--tokenizer-type",
        "HuggingFaceTokenizer",
    ]
    found = ranked(tmp_path / "kept.json", tmp_path / "core", *words)
    assert found == ranked(tmp_path / "same.json", model, "--data", texts)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--leave-out 8", "--leave-out 8: a layer has 8 experts; give a number from 1 to 7"),
        ("--leave-out 0", "--leave-out 0: a layer has 8 experts"),
        ("--leave-out 7", "--leave-out 7: keeps 1 expert, and each token needs 2; keep 2 or more"),
        ("--max-memory 10KB", "--max-memory 10,"),
        ("--samples 0", "--samples takes 1 or more"),
    ],
)
def test_wrong_numbers_are_refused(
    model: Path,
    texts: Path,
    tmp_path: Path,
    words: str,
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    output = tmp_path / "kept.json"
    assert run("rank-experts", model, "--data", texts, "--output", output, *words.split()) == 2
    assert message in capsys.readouterr().err
    assert not output.exists()


def test_a_directory_that_there_is_not_is_refused(
    model: Path, texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "nowhere" / "kept.json"
    assert run("rank-experts", model, "--data", texts, "--output", output) == 2
    assert f"there is no directory {tmp_path}/nowhere" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["rank-experts", "calibrate"])
def test_an_output_that_cannot_be_written_is_refused(
    command: str, model: Path, texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = texts.read_bytes()
    for output, message in ((tmp_path, "is a directory"), (texts, "is the file of --data too")):
        assert run(command, model, "--data", texts, "--output", output) == 2
        assert f"--output {output}: {message}" in capsys.readouterr().err
    assert texts.read_bytes() == content


def test_a_model_without_experts_is_refused(
    texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from tests.models import write_llama

    dense = write_llama(tmp_path / "llama", layers=2, vocab=420)
    save_tokenizer(dense, MARKED["chatml"])
    assert run("rank-experts", dense, "--data", texts, "--output", tmp_path / "kept.json") != 0
    assert "llama: has no experts; `megatron-lite rank-layers`" in capsys.readouterr().err


def test_a_mixture_of_dense_layers_alone_is_refused(
    model: Path, texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dense = save_tokenizer(tmp_path / "dense", MARKED["chatml"])
    config = Qwen3MoeConfig.from_pretrained(model, num_hidden_layers=2, mlp_only_layers=[0, 1])
    Qwen3MoeForCausalLM(config).save_pretrained(dense)
    assert run("rank-experts", dense, "--data", texts, "--output", tmp_path / "kept.json") != 0
    assert "dense: has no experts; `megatron-lite rank-layers`" in capsys.readouterr().err


def test_weights_that_are_not_finite_are_refused(
    model: Path, texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nan = with_nan(model, tmp_path / "nan", "model.layers.1.mlp.experts.5.down_proj.weight")
    output = tmp_path / "kept.json"
    assert run("rank-experts", nan, "--data", texts, "--output", output) != 0
    assert "layers.1 computes NaN or infinite values" in capsys.readouterr().err
    assert not output.exists()


@pytest.mark.parametrize(
    ("scores", "groups", "left_out", "expected"),
    [
        ([0.0, 3.0, 1.0, 2.0], 1, 2, [1, 3]),
        ([5.0, 5.0, 5.0, 5.0], 1, 1, [0, 1, 2]),
        ([9.0, 8.0, 7.0, 1.0, 2.0, 3.0], 2, 2, [0, 1, 4, 5]),
    ],
)
def test_the_experts_of_the_highest_scores_of_each_group_are_kept(
    scores: Sequence[float], groups: int, left_out: int, expected: list[int]
) -> None:
    experts = Experts(count=len(scores), per_token=1, groups=groups)
    assert kept(scores, experts, left_out) == expected
