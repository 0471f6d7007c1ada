"""`--adapter`: adapters beside the model compute what a merged model computes, switched by name, at any layout."""

import json
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import megaconv
from megaconv.errors import UsageError
from megatron_lite.cli import main
from megatron_lite.inference.batching import generate
from megatron_lite.inference.opening import Opened, open_model
from megatron_lite.inference.requests import Request
from megatron_lite.processes import launch
from megatron_lite.settings.parallel import Parallel
from tests.trainer.inference.conversations import save
from tests.trainer.inference.serving import ForkedServing
from tests.trainer.loop.launches import train

pytestmark = pytest.mark.oracle

NAMES = ("small", "large", "whole", "doubled")
ROWS = ("few", "more")
"""Adapters that have rows of single tokens."""
WHOLE = ("model.embed_tokens.weight", "lm_head.weight")
PROMPT = (5, 9, 3, 7, 1)


def write_adapter(
    model: Path,
    directory: Path,
    rank: int,
    alpha: float,
    ends: tuple[str, ...],
    whole: tuple[str, ...] = (),
    tokens: tuple[int, ...] = (),
    *,
    dora: bool = False,
) -> None:
    """An adapter as peft writes it, with random values for the matrices whose names end so, and for whole tensors."""
    random = torch.Generator().manual_seed(rank)
    tensors = {}
    for name, weight in load_file(model / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if module.endswith(ends):
            out, width = weight.shape
            prefix = f"base_model.model.{module}"
            tensors[f"{prefix}.lora_A.weight"] = torch.randn(rank, width, generator=random)
            tensors[f"{prefix}.lora_B.weight"] = torch.randn(out, rank, generator=random) / 2
            if dora:
                factors = 1 + torch.rand(out, generator=random)
                tensors[f"{prefix}.lora_magnitude_vector"] = weight.norm(dim=1) * factors
        elif name in whole:
            noise = torch.randn(weight.shape, generator=random)
            tensors[f"base_model.model.{name}"] = weight + noise * weight.std()
        elif name in WHOLE and tokens:
            rows = torch.randn(len(tokens), weight.shape[1], generator=random) * weight.std()
            tensors[f"base_model.model.{module}.token_adapter.trainable_tokens_delta"] = rows
    described = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(model),
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": list(ends),
        "use_dora": dora,
        "trainable_token_indices": {"embed_tokens": tokens, "lm_head": tokens} if tokens else None,
    }
    directory.mkdir()
    save_file(tensors, directory / "adapter_model.safetensors", {"format": "pt"})
    (directory / "adapter_config.json").write_text(json.dumps(described))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`base`, several adapters, and the model with each of them merged."""
    root = tmp_path_factory.mktemp("adapters")
    (root / "base").mkdir()
    save(root / "base")
    write_adapter(root / "base", root / "small", 2, 4.0, ("q_proj", "v_proj"))
    write_adapter(root / "base", root / "large", 4, 2.0, ("o_proj", "up_proj", "down_proj"))
    write_adapter(root / "base", root / "whole", 3, 6.0, ("k_proj",), WHOLE)
    write_adapter(
        root / "base", root / "doubled", 3, 5.0, ("q_proj", "k_proj", "o_proj"), dora=True
    )
    write_adapter(root / "base", root / "few", 3, 6.0, ("k_proj",), tokens=(9, 3))
    write_adapter(root / "base", root / "more", 2, 6.0, ("v_proj",), tokens=(4, 9, 7))
    for name in NAMES + ROWS:
        megaconv.merge(root / "base", str(root / name), root / f"{name}-merged")
    return root


def opened(path: Path, *adapters: str) -> Opened:
    given = Namespace(
        load=str(path), dtype="fp32", slots=4, max_length=64, tokenizer_type=None, tokenizer_model=None, vocab_file=None,
        merge_file=None, training=None, adapter=list(adapters), stream_weights=False, quantize=None, draft_tokens=0,
    )  # fmt: skip
    return open_model(given, Parallel(), launch.start(Parallel()))


@pytest.fixture(scope="module")
def together(models: Path) -> Opened:
    return opened(models / "base", *(str(models / name) for name in NAMES))


def merged_scores(models: Path, directory: str) -> torch.Tensor:
    [scored] = opened(models / directory).model.score([PROMPT])
    return scored.log_probs


@pytest.mark.parametrize(
    ("adapter", "directory"),
    [
        (0, "base"),
        (1, "small-merged"),
        (4, "doubled-merged"),
        (3, "whole-merged"),
        (2, "large-merged"),
        (None, "small-merged"),
    ],
)
def test_an_adapter_scores_as_the_merged_model(
    adapter: int | None, directory: str, together: Opened, models: Path
) -> None:
    [scored] = together.model.score([PROMPT], adapter=adapter)
    # Log-probabilities near -6 differ by up to 2e-5 on processors with AVX-512: the adapter's scores are large.
    torch.testing.assert_close(
        scored.log_probs, merged_scores(models, directory), atol=1e-5, rtol=1e-5
    )


@pytest.mark.parametrize(
    ("adapter", "directory"),
    [(0, "base"), (1, "small-merged"), (3, "whole-merged"), (None, "small-merged")],
)
@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_an_adapter_makes_the_vectors_of_the_merged_model(
    pooling: str, adapter: int | None, directory: str, together: Opened, models: Path
) -> None:
    rows = [PROMPT, PROMPT[:2]]
    found = together.model.embed(rows, pooling, adapter)
    expected = opened(models / directory).model.embed(rows, pooling)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_adapters_with_rows_of_their_own_tokens_score_as_the_merged_models(models: Path) -> None:
    """Two adapters have rows of different tokens; those of the others are the base's."""
    model = opened(
        models / "base", *(str(models / name) for name in ("few", "small", "more"))
    ).model
    names = ("base", "few-merged", "small-merged", "more-merged")
    for number in (2, 1, 3, 0):
        [scored] = model.score([PROMPT], adapter=number)
        expected = merged_scores(models, names[number])
        torch.testing.assert_close(scored.log_probs, expected, atol=1e-5, rtol=1e-5)
    with pytest.raises(UsageError, match="for the embedding, and another adapter has it whole"):
        opened(models / "base", str(models / "few"), str(models / "whole"))


def test_an_adapter_of_another_base_is_pointed_out(
    models: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    opened(models / "base", str(models / "small"))
    assert "warning" not in capsys.readouterr().err
    opened(models / "large-merged", f"chat={models / 'small'}")
    assert (
        f"warning: the adapter chat was trained on {models / 'base'}, but --load is {models / 'large-merged'}"
        in capsys.readouterr().err
    )


def test_adapters_differ(models: Path) -> None:
    small, large, base = (
        merged_scores(models, name) for name in ("small-merged", "large-merged", "base")
    )
    assert (small - base).abs().max() > 1e-2
    assert (large - base).abs().max() > 1e-2
    assert (large - small).abs().max() > 1e-2


def test_requests_of_all_adapters_run_in_one_batch(together: Opened, models: Path) -> None:
    requests = [Request(PROMPT, 8, adapter=number) for number in (0, 2, 3, 4, 1, 2)]
    answers = [answer.tokens for answer in generate(together.model, requests)]
    names = ("large", "whole", "doubled", "small", "large")
    directories = ("base", *(f"{name}-merged" for name in names))
    for tokens, directory in zip(answers, directories, strict=True):
        [alone] = generate(opened(models / directory).model, [Request(PROMPT, 8)])
        assert tokens == alone.tokens


def test_two_adapters_of_one_name_are_refused(models: Path) -> None:
    with pytest.raises(UsageError, match="names two adapters"):
        opened(models / "base", str(models / "small"), f"small={models / 'large'}")


def test_a_directory_of_an_adapter_may_have_an_equals_sign(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sweeps name their runs so."""
    monkeypatch.chdir(models)
    (models / "lr=1").symlink_to(models / "small")
    assert opened(models / "base", "lr=1").adapters == ("lr=1",)
    assert opened(models / "base", "chat=lr=1").adapters == ("chat",)


@pytest.mark.slow
@pytest.mark.parametrize("adapter", ["large", "whole", "more", "doubled"])
@pytest.mark.parametrize("layout", ["--tp 2", "--pp 2"])
def test_two_ranks_generate_with_the_adapter(
    layout: str, adapter: str, models: Path, tmp_path: Path
) -> None:
    flags = f"--dtype fp32 --max-new-tokens 8 {layout}"
    train(tmp_path, 2, f"generate --load {models}/base --adapter {models}/{adapter} Hello {flags}")
    with_adapter = (tmp_path / "log-0.txt").read_text()
    train(tmp_path, 2, f"generate --load {models}/{adapter}-merged Hello {flags}")
    assert with_adapter == (tmp_path / "log-0.txt").read_text()


def test_a_request_chooses_its_adapter_by_name(models: Path) -> None:
    server = ForkedServing(
        models / "base",
        "--dtype",
        "fp32",
        "--adapter",
        str(models / "small"),
        "--adapter",
        f"big={models / 'large'}",
    )
    try:
        status, listed = server.ask("/v1/models")
        assert status == 200
        assert [model["id"] for model in listed["data"]] == ["base", "small", "big"]
        answers: dict[Any, str] = {}
        for model in ("base", "small", "big", None):
            body = {"prompt": "Hello", "max_tokens": 8, "temperature": 0, "model": model}
            status, answer = server.ask("/v1/completions", body)
            assert status == 200
            answers[model] = answer["choices"][0]["text"]
            assert answer["model"] == (model or "small")
        assert answers[None] == answers["small"]
        assert len(set(answers.values())) == 3
        for model, directory in ((None, "small-merged"), ("base", "base"), ("big", "large-merged")):
            body = {"input": list(PROMPT), "model": model}
            status, answer = server.ask("/v1/embeddings", body)
            assert (status, answer["model"]) == (200, model or "small")
            expected = opened(models / directory).model.embed([PROMPT], "last")
            vector = torch.tensor([answer["data"][0]["embedding"]])
            torch.testing.assert_close(vector, expected, atol=1e-5, rtol=1e-5)
        status, error = server.ask("/v1/completions", {"prompt": "Hello", "model": "other"})
        assert status == 404
        assert "'small'" in error["error"]["message"]
    finally:
        server.end()


def test_the_command_line_takes_an_adapter(
    models: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "leave", sys.exit)
    texts = []
    for words in (["base", "--adapter", str(models / "large")], ["large-merged"], ["base"]):
        with pytest.raises(SystemExit):
            main(
                [
                    "generate",
                    "--load",
                    str(models / words[0]),
                    *words[1:],
                    "--dtype",
                    "fp32",
                    "Hello",
                    "--max-new-tokens",
                    "8",
                ]
            )
        texts.append(capfd.readouterr().out)
    assert texts[0] == texts[1] != texts[2]


def test_an_adapter_with_the_models_name_is_refused(
    models: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No request could choose this adapter."""
    monkeypatch.setattr(launch, "leave", sys.exit)
    words = [
        "serve",
        "--load",
        str(models / "base"),
        "--adapter",
        f"base={models / 'small'}",
        "--port",
        "0",
    ]
    with pytest.raises(SystemExit) as end:
        main(words)
    assert end.value.code == 2
    assert "base is the name of the model and of an adapter" in capfd.readouterr().err
