"""`megatron-lite rank-channels`: its file is read by `convert --keep-channels`, and channels that add nothing can go without effect."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
)

import megaconv
from megatron_lite.inference.kept_choice import ChannelChoice, HeadChoice
from megatron_lite.processes import launch
from tests.models import write_llama
from tests.trainer.data.chat_templates import MARKED, save_tokenizer
from tests.trainer.inference.damaged_models import with_nan
from tests.trainer.inference.test_commands import run

pytestmark = pytest.mark.oracle
MLPS = {
    "layers.0.mlp": 40,
    **{f"layers.1.mlp.experts.{n}": 24 for n in range(4)},
    "layers.1.mlp.shared": 48,
}
"""The MLPs of the model -> their channels."""


@pytest.fixture(autouse=True)
def _failures_leave_the_tests_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "leave", sys.exit)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dense layer and a layer of routed and shared experts, with a tokenizer. Every fourth channel of each MLP adds nothing,
    and channels 3 and 7 of the hidden states are always 0.
    """
    directory = save_tokenizer(tmp_path_factory.mktemp("model") / "hf", MARKED["chatml"])
    torch.manual_seed(1)
    made = Qwen2MoeForCausalLM(
        Qwen2MoeConfig(
            vocab_size=420, hidden_size=32, intermediate_size=40, moe_intermediate_size=24, shared_expert_intermediate_size=48,
            num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, num_experts=4, num_experts_per_tok=2,
            mlp_only_layers=[0], max_position_embeddings=256, initializer_range=0.2, use_sliding_window=False,
        )
    )  # fmt: skip
    with torch.no_grad():
        made.model.embed_tokens.weight[:, [3, 7]] = 0
        for name, parameter in made.named_parameters():
            if name.endswith("down_proj.weight"):
                parameter[:, ::4] = 0
            elif name.endswith("experts.down_proj"):
                parameter[:, :, ::4] = 0
            if name.endswith(("down_proj.weight", "o_proj.weight")):
                parameter[[3, 7]] = 0
            elif name.endswith("experts.down_proj"):
                parameter[:, [3, 7]] = 0
    made.save_pretrained(directory)
    return directory


def ranked(output: Path, *words: object) -> dict[str, Any]:
    assert run("rank-channels", *words, "--output", output) == 0
    found: dict[str, Any] = json.loads(output.read_text())
    return found


ALL_MLPS = (
    "--ffn-hidden-size", 30, "--moe-ffn-hidden-size", 18, "--moe-shared-expert-intermediate-size", 36,
)  # fmt: skip


def test_channels_that_add_nothing_are_left_out_and_the_model_stays_the_same(
    model: Path, texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "kept.json"
    found = ranked(file, model, "--data", texts, *ALL_MLPS)
    assert found["keep"] == {mlp: [n for n in range(width) if n % 4] for mlp, width in MLPS.items()}
    assert set(found["left_out"].values()) == {0.0}
    lines = capsys.readouterr().out.splitlines()
    assert lines[:3] == [
        "channels              left out",
        "layers.0.mlp              0.0%",
        "layers.1.mlp.experts      0.0%",
    ]
    assert f"{file}: 18 of 24 channels of each expert" in lines
    assert lines[-1] == f"  megaconv convert {model} pruned --saver hf --keep-channels {file}"
    words: dict[str, Any] = {"saver": "hf", "keep_channels": file, "verify": True}
    megaconv.convert(model, tmp_path / "pruned", **words)
    whole, pruned = (
        AutoModelForCausalLM.from_pretrained(
            place, dtype=torch.float32, experts_implementation="eager"
        )
        for place in (model, tmp_path / "pruned")
    )
    tokens = torch.arange(10).unsqueeze(0)
    torch.testing.assert_close(whole(tokens).logits, pruned(tokens).logits)


def test_heads_that_add_nothing_are_left_out_with_their_groups(
    texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = save_tokenizer(tmp_path / "hf", MARKED["chatml"])
    made = _with_silent_heads({0: [4, 5, 6, 7], 1: [0, 1, 2, 3]})
    made.save_pretrained(source)
    found = ranked(tmp_path / "kept.json", source, "--data", texts, "--num-query-groups", 1)
    assert found["keep"] == {"layers.0.attn": [0, 1, 2, 3], "layers.1.attn": [4, 5, 6, 7]}
    assert set(found["left_out"].values()) == {0.0}
    file = tmp_path / "kept.json"
    lines = capsys.readouterr().out.splitlines()
    assert f"{file}: 4 of 8 heads of each attention" in lines
    assert f"{file}: 1 of 2 key/value heads of each attention" in lines
    megaconv.convert(source, tmp_path / "out", saver="hf", keep_channels=file, verify=True)
    small = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    tokens = torch.arange(10).unsqueeze(0)
    torch.testing.assert_close(small(tokens).logits, made(tokens).logits)


def test_each_group_loses_as_many_heads(texts: Path, tmp_path: Path) -> None:
    source = save_tokenizer(tmp_path / "hf", MARKED["chatml"])
    _with_silent_heads({0: [0, 2, 4, 7], 1: [1, 3, 5, 6]}).save_pretrained(source)
    found = ranked(tmp_path / "kept.json", source, "--data", texts, "--num-attention-heads", 4)
    assert found["keep"] == {"layers.0.attn": [1, 3, 5, 6], "layers.1.attn": [0, 2, 4, 7]}


def _with_silent_heads(silent: dict[int, list[int]]) -> Qwen2ForCausalLM:
    """8 heads in 2 groups. Layers -> the heads whose columns of the last matrix are 0."""
    torch.manual_seed(1)
    made = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=420, hidden_size=32, intermediate_size=40, num_hidden_layers=2, num_attention_heads=8,
            num_key_value_heads=2, max_position_embeddings=256, initializer_range=0.2,
        )
    )  # fmt: skip
    with torch.no_grad():
        for layer, heads in silent.items():
            made.model.layers[layer].self_attn.o_proj.weight.unflatten(1, (8, 4))[:, heads] = 0
    return made.eval()


def test_channels_of_hidden_states_that_are_always_0_are_left_out(
    model: Path, texts: Path, tmp_path: Path
) -> None:
    found = ranked(tmp_path / "kept.json", model, "--data", texts, "--hidden-size", 30)
    assert found["keep"] == {"hidden": [n for n in range(32) if n not in (3, 7)]}
    assert found["left_out"] == {"hidden": 0.0}


def test_a_megatron_checkpoint_has_the_same_channels(
    model: Path, texts: Path, tmp_path: Path
) -> None:
    megaconv.convert(model, tmp_path / "core", saver="core", tp=2, ep=2)
    words = [
        "--tokenizer-model",
        model,
        "--tokenizer-type",
        "HuggingFaceTokenizer",
        "--hidden-size",
        16,
        *ALL_MLPS,
    ]
    found = ranked(tmp_path / "kept.json", tmp_path / "core", "--data", texts, *words)
    same = ranked(tmp_path / "same.json", model, "--data", texts, "--hidden-size", 16, *ALL_MLPS)
    assert found == same
    less = ["--max-memory", "3MB", "--hidden-size", 16, *ALL_MLPS]
    found = ranked(tmp_path / "less.json", model, "--data", texts, *less)
    assert found["keep"] == same["keep"]


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        ("", 2, "give a size that the model gets: --hidden-size, --ffn-hidden-size, "),
        ("--hidden-size 32", 2, "--hidden-size 32: {} has 32 channels of the hidden states; give a number from 1 to 31"),
        ("--ffn-hidden-size 0", 2, "--ffn-hidden-size 0: {} has 40 channels of each MLP"),
        ("--hidden-size 16 --max-memory 10KB", 2, "--max-memory 10,"),
        ("--num-attention-heads 3", 2, "the model has 2 heads in each group, and 2 groups stay; give a multiple of 2 up to 4"),
        ("--num-attention-heads 3 --num-query-groups 1", 2, "and 1 group stays; give a multiple of 1 up to 2"),
        ("--num-query-groups 2", 2, "--num-query-groups 2: {} has 2 key/value heads of each attention; give a number from 1 to 1"),
        ("--mamba-num-heads 2", 3, "--mamba-num-heads: {} has no heads of each Mamba; leave the flag out"),
    ],
)  # fmt: skip
def test_wrong_sizes_are_refused(
    model: Path, texts: Path, tmp_path: Path, words: str, status: int, message: str, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    output = tmp_path / "kept.json"
    given = [model, "--data", texts, "--output", output, *words.split()]
    assert run("rank-channels", *given) == status
    assert message.format(model) in capsys.readouterr().err
    assert not output.exists()


def test_sizes_that_a_model_does_not_have_are_refused_before_anything_is_measured(
    texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dense = write_llama(tmp_path / "llama", layers=2, vocab=420)
    save_tokenizer(dense, MARKED["chatml"])
    words = [dense, "--data", texts, "--output", tmp_path / "kept.json"]
    assert run("rank-channels", *words, "--moe-ffn-hidden-size", 8) != 0
    assert "llama has no channels of each expert; leave the flag out" in capsys.readouterr().err


def test_weights_that_are_not_finite_are_refused(
    model: Path, texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nan = with_nan(model, tmp_path / "nan", "model.layers.1.mlp.experts.2.down_proj.weight")
    output = tmp_path / "kept.json"
    words = [nan, "--data", texts, "--output", output, *ALL_MLPS]
    assert run("rank-channels", *words) != 0
    assert "layers.1.mlp.experts.2 computes NaN or infinite values" in capsys.readouterr().err
    assert not output.exists()


def test_the_heads_of_the_highest_scores_are_kept_in_each_group() -> None:
    scores = torch.tensor([1.0, 9.0, 8.0, 2.0, 3.0, 4.0])
    assert HeadChoice(of_group=2, heads=3, groups=3).best(scores) == [1, 2, 5]
    assert HeadChoice(of_group=2, heads=4, groups=2).best(scores) == [0, 1, 2, 3]
    assert HeadChoice(of_group=3, heads=2, groups=1).best(scores) == [1, 2]
    assert HeadChoice(of_group=1, heads=2, groups=2).best(scores) == [1, 2]
    assert HeadChoice(of_group=3, heads=4, groups=2).first() == [0, 1, 3, 4]


def test_the_channels_of_the_highest_scores_are_kept() -> None:
    assert ChannelChoice(2).best(torch.tensor([0.0, 3.0, 1.0, 2.0])) == [1, 3]
    assert ChannelChoice(3).best(torch.tensor([5.0, 5.0, 5.0, 5.0])) == [0, 1, 2]
