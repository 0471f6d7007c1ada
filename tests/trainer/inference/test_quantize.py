"""`--quantize q8_0`: the logits of a model whose matrices are rounded, and where the flag is refused."""

import json
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron_lite.cli import main
from megatron_lite.inference.batching import generate
from megatron_lite.inference.opening import Opened, open_model
from megatron_lite.inference.requests import Request
from megatron_lite.inference.sampling import Sampling
from megatron_lite.inference.slots import Scored
from megatron_lite.models.ends import Head
from megatron_lite.processes import launch
from megatron_lite.products.int8_kernels import has_int8_products
from megatron_lite.products.product import PLAIN
from megatron_lite.settings.parallel import Parallel
from tests.memory import growth
from tests.trainer.inference.conversations import save
from tests.trainer.inference.test_adapters import WHOLE, write_adapter
from tests.trainer.loop.launches import launch as start

pytestmark = [
    pytest.mark.oracle,
    pytest.mark.skipif(
        not has_int8_products(), reason="this torch has no int8 kernel for this processor"
    ),
]

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "gpt2": ("gpt2", {}),
    "mixture": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "layer inputs": (
        "gemma4_text",
        {
            "head_dim": 16,
            "global_head_dim": 24,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "hidden_size_per_layer_input": 16,
            "num_kv_shared_layers": 2,
            "use_double_wide_mlp": True,
        },
    ),
    "latent": (
        "deepseek_v3",
        {
            "num_key_value_heads": 8,
            "q_lora_rank": 24,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 8,
            "v_head_dim": 12,
            "n_routed_experts": 8,
            "n_group": 2,
            "topk_group": 1,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
        },
    ),
}
SLOW = ("llama", "gpt2", "latent", "layer inputs")
ROW = tuple(range(5, 45))


def opened(path: Path, **changes: Any) -> Opened:
    flags: dict[str, Any] = {
        "load": str(path), "dtype": "fp32", "slots": 4, "max_length": 80, "tokenizer_type": None, "tokenizer_model": None,
        "vocab_file": None, "merge_file": None, "training": None, "adapter": [], "stream_weights": False, "quantize": "q8_0",
        "draft_tokens": 0,
    }  # fmt: skip
    return open_model(Namespace(**flags | changes), Parallel(), launch.start(Parallel()))


def score(path: Path, **changes: Any) -> Scored:
    [scored] = opened(path, **changes).model.score([ROW])
    return scored


def rounded(weight: Tensor) -> Tensor:
    """Each row in 127 steps of its largest absolute value."""
    step = weight.abs().amax(-1, keepdim=True) / 127
    return torch.where(step > 0, (weight / step).round() * step, 0.0)


def round_matrices(model: nn.Module) -> None:
    """Round what the flag rounds in a model of transformers. A tied head is rounded without the embedding."""
    for name, module in model.named_modules():
        for own, parameter in module.named_parameters(recurse=False):
            plain = isinstance(module, nn.Embedding) or "gate" in name.split(".")
            if own in ("weight", "gate_up_proj", "down_proj") and parameter.dim() > 1 and not plain:
                turned = type(module).__name__ == "Conv1D"  # GPT-2's matrices are [in, out]
                data = parameter.data.t() if turned else parameter.data
                found = rounded(data)
                parameter.data = found.t().contiguous() if turned else found


@pytest.mark.parametrize(
    "name", ["mixture", *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]
)
def test_it_computes_the_model_whose_matrices_are_rounded(name: str, tmp_path: Path) -> None:
    model_type, settings = MODELS[name]
    tied = {"tie_word_embeddings": False}
    model = save(tmp_path / "plain", model_type, **tied | settings)
    model(torch.tensor([ROW]))
    round_matrices(model)
    model.save_pretrained(tmp_path / "rounded")
    for file in (tmp_path / "plain").glob("token*"):
        (tmp_path / "rounded" / file.name).write_bytes(file.read_bytes())
    found = score(tmp_path / "plain")
    expected = score(tmp_path / "rounded", quantize=None)
    torch.testing.assert_close(found.log_probs, expected.log_probs, atol=0.03, rtol=0.01)
    plain = score(tmp_path / "plain", quantize=None)
    # It is far nearer to the rounded model than to the plain one.
    error = (found.log_probs - expected.log_probs).abs().mean()
    assert error < (found.log_probs - plain.log_probs).abs().mean() / 4


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("tied")
    save(made, "qwen3", head_dim=16, tie_word_embeddings=True)
    return made


def test_a_tied_head_is_rounded_and_the_embedding_is_not(tied: Path) -> None:
    model = opened(tied).model
    [chunk] = model.engine.chunks
    [head] = [module for module in chunk.modules() if isinstance(module, Head)]
    table = chunk.get_parameter("embedding.word_embeddings.weight")
    hidden = torch.randn(3, 1, table.shape[1])
    logits = head.logits(hidden, None if head.weight is not None else table)[0]
    expected = hidden[:, 0] @ rounded(table).t()
    torch.testing.assert_close(logits, expected[:, : logits.shape[1]], atol=2e-3, rtol=1e-3)
    [plain] = opened(tied, quantize=None).model.engine.chunks
    assert table.equal(plain.get_parameter("embedding.word_embeddings.weight"))


@pytest.mark.parametrize("dora", [False, True])
def test_adapters_are_computed_beside_the_rounded_matrices(
    dora: bool, tied: Path, tmp_path: Path
) -> None:
    write_adapter(tied, tmp_path / "own", 4, 8.0, ("q_proj", "down_proj"), dora=dora)
    own = {"adapter": [str(tmp_path / "own")]}
    adapted, base = opened(tied, **own).model, opened(tied).model
    [found], [without] = adapted.score([ROW]), adapted.score([ROW], adapter=0)
    [of_base] = base.score([ROW])
    assert without.log_probs.equal(of_base.log_probs)
    plain, plain_base = score(tied, quantize=None, **own), score(tied, quantize=None)
    effect = (plain.log_probs - plain_base.log_probs).abs().mean()
    error = (found.log_probs - plain.log_probs).abs().mean()
    assert error < effect / 2


@pytest.mark.parametrize("tied", [False, True])
def test_a_head_that_an_adapter_changes_stays_plain(tied: bool, tmp_path: Path) -> None:
    save(tmp_path / "base", "qwen3", head_dim=16, tie_word_embeddings=tied)
    adapter = tmp_path / "own"
    if tied:
        write_adapter(tmp_path / "base", adapter, 4, 8.0, ("down_proj",), tokens=(5, 9))
    else:
        write_adapter(tmp_path / "base", adapter, 4, 8.0, ("down_proj",), WHOLE)
    model = opened(tmp_path / "base", adapter=[str(adapter)]).model
    [found] = model.score([ROW])
    [chunk] = model.engine.chunks
    [head] = [module for module in chunk.modules() if isinstance(module, Head)]
    assert head.product_of_logits is PLAIN
    expected = score(tmp_path / "base", quantize=None, adapter=[str(adapter)])
    assert (found.log_probs - expected.log_probs).abs().mean() < 0.1


def run(*words: object) -> int:
    with pytest.raises(SystemExit) as end:
        main([str(word) for word in words])
    return int(end.value.code or 0)


def test_a_line_says_what_is_rounded_and_what_is_not(
    tied: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "leave", sys.exit)
    words = ("--load", tied, "--dtype", "fp32", "--quantize", "q8_0", "--max-new-tokens", 3, "go")
    assert run("generate", *words) == 0
    output = capfd.readouterr()
    assert output.out.startswith("go")
    assert "--quantize q8_0: 17 matrices in int8, " in output.err
    assert "plain: embedding.word_embeddings.weight" in output.err


def test_other_commands_and_streamed_weights_refuse_the_flag(
    tied: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "leave", sys.exit)
    asked = ("--load", tied, "--quantize", "q8_0")
    assert run("generate", *asked, "--stream-weights", "go")
    assert "leave --quantize out" in capfd.readouterr().err
    for words in (
        ("calibrate", *asked, "--data", "x", "--output", "y"),
        ("pretrain", *asked),
        ("finetune", *asked),
    ):
        assert run(*words)
        assert "--quantize" in capfd.readouterr().err
    assert run("generate", "--load", tied, "--quantize", "q5_0", "go")
    assert "q8_0" in capfd.readouterr().err


def scored_at(layout: str, size: int, model: Path, directory: Path) -> Tensor:
    """The log-probabilities that `megatron_lite score --quantize q8_0` writes at a layout."""
    directory.mkdir()
    (directory / "rows.jsonl").write_text(json.dumps({"tokens": ROW}))
    flags = f"--load {model} --dtype fp32 --quantize q8_0 --input rows.jsonl --output out.jsonl"
    statuses = start(directory, size, f"score {flags} {layout}").wait()
    assert statuses == [0] * size
    found: list[float] = json.loads((directory / "out.jsonl").read_text())["log_probs"]
    return torch.tensor(found)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["--tp 2", "--pp 2"])
def test_two_ranks_compute_what_one_does(layout: str, tied: Path, tmp_path: Path) -> None:
    alone = scored_at("", 1, tied, tmp_path / "alone")
    found = scored_at(layout, 2, tied, tmp_path / "two")
    # Each tensor-parallel rank has its own largest value in the rows of matrices that are sharded by columns.
    torch.testing.assert_close(found, alone, atol=0.03, rtol=0.01)
    if "pp" in layout:
        assert found.equal(alone)


@pytest.mark.slow
def test_the_plain_model_never_exists_in_memory(tmp_path: Path) -> None:
    sizes = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 6}
    save(tmp_path, "llama", **sizes)
    weights = sum(file.stat().st_size for file in tmp_path.glob("*.safetensors"))
    opened(tmp_path, load=str(tmp_path))  # warm-up
    with growth() as plain:
        kept = opened(tmp_path, quantize=None)
    del kept
    with growth() as found:
        kept = opened(tmp_path)
    del kept
    assert plain.most > 0.9 * weights
    # A quarter of the float32 weights, the block that is rounded, and copies of one matrix.
    assert found.most < weights / 4 + (64 << 20) < 0.6 * weights


def train(model: nn.Module, tokens: Tensor, steps: int) -> None:
    """Train on windows of 64 bytes."""
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        starts = torch.randint(0, len(tokens) - 64, (16,), generator=generator)
        rows = torch.stack([tokens[start : start + 64] for start in starts.tolist()])
        loss = model(rows, labels=rows).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.slow
def test_a_trained_model_keeps_its_perplexity_and_most_greedy_tokens(tmp_path: Path) -> None:
    text = (Path(__file__).parents[3] / "CONTRIBUTING.md").read_text()
    sizes = {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 3}
    model = save(tmp_path, "llama", max_position_embeddings=128, **sizes)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.04)
    tokens = torch.tensor(opened(tmp_path).tokenizer.tokenize(text))
    train(model.train(), tokens, 250)
    model.eval().save_pretrained(tmp_path)
    rows = [tokens[start : start + 64].tolist() for start in range(0, 3200, 64)]
    losses, answers = [], []
    for quantize in (None, "q8_0"):
        engine = opened(tmp_path, quantize=quantize, max_length=128).model
        scored = engine.score(rows)
        losses.append(-torch.cat([row.log_probs for row in scored]))
        asked = [Request(tuple(row[:32]), 16, Sampling(0)) for row in rows]
        answers.append(torch.tensor([answer.tokens for answer in generate(engine, asked)]))
    plain, found = losses
    assert plain.mean() < 2  # it has learned: a random model has 5.6
    assert abs(found.mean() - plain.mean()) < 0.005
    assert (found - plain).abs().mean() < 0.02
    assert (answers[0] == answers[1]).all(1).float().mean() > 0.9
