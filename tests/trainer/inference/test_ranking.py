"""`megatron-lite rank-layers`: the change by each layer is that of transformers' states, and layers without effect are found."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BambaConfig,
    BambaForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
)

import megaconv
from megaconv import hub
from megatron_lite.inference.ranking import ranges
from megatron_lite.processes import launch
from tests.trainer.data.chat_templates import MARKED, save_tokenizer
from tests.trainer.inference.damaged_models import with_nan
from tests.trainer.inference.test_commands import run
from tests.trainer.multimodal import create

LAYERS = 6

pytestmark = pytest.mark.oracle


@pytest.fixture(autouse=True)
def _failures_leave_the_tests_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "leave", sys.exit)


IDLE = (2, 3)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama with a tokenizer. Two of its layers add nothing to their input, and layer 5 adds little."""
    directory = tmp_path_factory.mktemp("model")
    save_tokenizer(directory, MARKED["chatml"])
    torch.manual_seed(1)
    made = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=420, hidden_size=32, intermediate_size=64, num_hidden_layers=LAYERS, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=256, initializer_range=0.2,
        )
    )  # fmt: skip
    with torch.no_grad():
        for number, factor in [*((idle, 0.0) for idle in IDLE), (5, 0.1)]:
            layer = made.model.layers[number]
            layer.self_attn.o_proj.weight *= factor
            layer.mlp.down_proj.weight *= factor
    made.save_pretrained(directory)
    return directory


def ranked(capsys: pytest.CaptureFixture[str], *words: object) -> dict[str, Any]:
    assert run("rank-layers", *words, "--json") == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def states_of_transformers(model: Path, texts: Path) -> list[torch.Tensor]:
    """[tokens, hidden] after the embedding and after each layer, of all tokens but the last one of each text."""
    from megatron_lite.data.tokenizer import TokenizerOptions, build_tokenizer

    tokenizer = build_tokenizer(TokenizerOptions("HuggingFaceTokenizer", str(model)))
    computed = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    found: list[list[torch.Tensor]] = [[] for _ in range(LAYERS + 1)]

    def keep(place: int) -> Any:
        return lambda _module, _given, output: found[place].append(
            (output[0] if isinstance(output, tuple) else output).reshape(-1, 32)[:-1]
        )

    computed.model.embed_tokens.register_forward_hook(keep(0))
    for number, layer in enumerate(computed.model.layers):
        layer.register_forward_hook(keep(number + 1))
    for line in texts.read_text().splitlines():
        ids = [*tokenizer.begin, *tokenizer.tokenize(json.loads(line)["text"]), tokenizer.eod]
        with torch.no_grad():
            computed(torch.tensor([ids]))
    return [torch.cat(parts) for parts in found]


def test_changes_are_those_of_transformers_states(
    model: Path, texts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = ranked(capsys, model, "--data", texts, "--leave-out", 3, "--dtype", "fp32")
    states = states_of_transformers(model, texts)
    assert found["tokens"] == len(states[0])
    for number, line in enumerate(found["layers"]):
        cosine = torch.cosine_similarity(states[number], states[number + 1], dim=-1)
        assert line == {
            "layer": number,
            "change": pytest.approx(float(1 - cosine.mean()), abs=1e-5),
        }
    angles = [
        float(torch.arccos(torch.cosine_similarity(states[n], states[n + 3], dim=-1)).mean()) / torch.pi
        for n in range(LAYERS - 2)
    ]  # fmt: skip
    first = min(range(len(angles)), key=angles.__getitem__)
    assert found["block"]["first"] == first
    assert found["block"]["last"] == first + 2
    assert found["block"]["degrees"] == pytest.approx(180 * angles[first], abs=0.02)


def test_layers_without_effect_are_left_out_and_the_model_stays_the_same(
    model: Path, texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = ranked(capsys, model, "--data", texts, "--leave-out", 2)
    assert (found["block"]["first"], found["block"]["last"]) == IDLE
    assert found["block"]["layers"] == found["single"]["layers"] == "0-1,4-5"
    megaconv.convert(model, tmp_path / "pruned", saver="hf", layers=found["block"]["layers"])
    whole, pruned = (
        AutoModelForCausalLM.from_pretrained(place) for place in (model, tmp_path / "pruned")
    )
    tokens = torch.arange(10).unsqueeze(0)
    assert torch.equal(whole(tokens).logits, pruned(tokens).logits)


def test_the_passes_of_less_memory_have_the_same_result(
    model: Path, texts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = ranked(capsys, model, "--data", texts, "--seq-length", 16)
    parts = ranked(capsys, model, "--data", texts, "--seq-length", 16, "--max-memory", "200KB")
    for one, other in zip(whole["layers"], parts["layers"], strict=True):
        assert other["change"] == pytest.approx(one["change"], abs=1e-6)


def test_the_lines_have_commands(
    model: Path, texts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("rank-layers", model, "--data", texts, "--leave-out", 3) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "layer  change"
    assert lines[3] == "    2  0.0000"
    assert lines[8].startswith("the 3 consecutive layers of the least change: layers ")
    assert lines[9].startswith(f"  megaconv convert {model} pruned --saver hf --layers 0")
    assert lines[10] == "the 3 single layers of the least change: 2, 3, 5"
    assert lines[11].endswith("--layers 0-1,4")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--leave-out 6", "--leave-out 6: the model has 6 layers; give a number from 1 to 5"),
        ("--leave-out 0", "--leave-out 0: the model has 6 layers"),
        ("--max-memory 10KB", "--max-memory 10,"),
        ("--samples 0", "--samples takes 1 or more"),
        ("--seq-length 0", "--seq-length 2 or more"),
        ("--seq-length 1", "--seq-length 2 or more"),
        ("--seq-length -5", "--seq-length 2 or more"),
    ],
)
def test_wrong_numbers_are_refused(
    model: Path, texts: Path, words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("rank-layers", model, "--data", texts, *words.split()) == 2
    assert message in capsys.readouterr().err


def test_weights_that_are_not_finite_are_refused(
    model: Path, texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nan = with_nan(model, tmp_path / "nan", "model.layers.1.mlp.down_proj.weight")
    assert run("rank-layers", nan, "--data", texts) != 0
    assert "layer 1 computes NaN or infinite values" in capsys.readouterr().err


def test_a_name_with_a_blank_is_quoted(
    model: Path, texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(model, tmp_path / "my model")
    assert run("rank-layers", tmp_path / "my model", "--data", texts) == 0
    assert f"megaconv convert '{tmp_path}/my model' pruned" in capsys.readouterr().out


def test_a_multimodal_model_of_the_hub_is_converted_by_its_language_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = tmp_path / "whole"
    create("qwen2_vl", directory)
    texts = tmp_path / "texts.jsonl"
    texts.write_text('{"text": "a cat"}')
    monkeypatch.setattr(hub, "_fetch", lambda *_, **__: directory)
    assert run("rank-layers", "org/whole", "--data", texts, "--leave-out", 1) == 0
    expected = "megaconv convert org/whole pruned --saver hf --text-only --layers "
    assert expected in capsys.readouterr().out


def test_layouts_are_refused(model: Path, texts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in ("--tp 2", "--slots 4", "--max-length 64", "--distributed-backend gloo"):
        assert run("rank-layers", model, "--data", texts, *words.split()) == 2
        assert f"unrecognized arguments: {words}" in capsys.readouterr().err


def test_help_lists_only_flags_that_work(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("rank-layers", "--help") == 0
    listed = capsys.readouterr().out
    assert "--seq-length" in listed
    for flag in ("--tp", "--pp", "--ep", "--slots", "--max-length", "--distributed", "parallelism"):
        assert flag not in listed


def test_a_sample_may_have_all_positions_of_the_model(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    long = tmp_path / "long.jsonl"
    long.write_text(json.dumps({"text": "the cat sat on the mat " * 1000}))
    assert ranked(capsys, model, "--data", long, "--seq-length", 200)["tokens"] == 199
    assert ranked(capsys, model, "--data", long, "--seq-length", 1000)["tokens"] == 255
    shutil.copytree(model, tmp_path / "longer")
    config = json.loads((model / "config.json").read_text())
    config["max_position_embeddings"] = 8192
    (tmp_path / "longer" / "config.json").write_text(json.dumps(config))
    found = ranked(capsys, tmp_path / "longer", "--data", long, "--seq-length", 4500)
    assert found["tokens"] == 4499


def test_only_layers_without_which_a_model_remains_are_proposed(
    tmp_path: Path, texts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a Bamba, a mixer and its MLP are two layers, which follow each other by turns."""
    directory = save_tokenizer(tmp_path / "bamba", MARKED["chatml"])
    small = BambaConfig(
        vocab_size=420, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
        mamba_n_heads=8, mamba_d_head=8, mamba_d_state=8, mamba_n_groups=1, mamba_expand=2, attn_layer_indices=[1, 3],
        max_position_embeddings=256,
    )  # fmt: skip
    BambaForCausalLM(small).save_pretrained(directory)
    for count in (1, 2, 3):
        words = ("rank-layers", directory, "--data", texts, "--leave-out", count, "--json")
        status = run(*words)
        shown = capsys.readouterr()
        if status:
            assert count % 2
            assert "no" in shown.err
            continue
        found = json.loads(shown.out)
        for place, proposal in (("block", found["block"]), ("single", found["single"])):
            if proposal is not None:
                megaconv.convert(
                    directory, tmp_path / f"{count}-{place}", saver="hf", layers=proposal["layers"]
                )


def test_ranges_are_those_that_layers_takes() -> None:
    assert ranges([0, 1, 2, 5, 7, 8]) == "0-2,5,7-8"
