"""The real llama.cpp loads what --saver gguf writes, and computes what transformers computes, of every architecture that is written.

It needs a Python that has llama_cpp (docs/formats.md has the commands), which LLAMA_CPP_PYTHON names.
"""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import megaconv
from megaconv.gguf.names import ARCHITECTURES
from megaconv.gguf.tokenizer import PATTERNS
from tests.conftest import FIXTURES
from tests.gguf.further_models import FURTHER
from tests.llama_cpp_oracle import REPLY
from tests.models import write_llama
from tests.transformers_oracle import (
    LATENT,
    MIXTURES,
    VARIANTS,
    VOCAB,
    WINDOW,
    Variant,
    compute,
    create,
    family_of,
    load,
    rope,
    rope_of,
    two_ropes,
)

if TYPE_CHECKING:
    import torch

PYTHON = os.environ.get("LLAMA_CPP_PYTHON") or sys.executable
HERE = importlib.util.find_spec("llama_cpp") is not None
pytestmark = [
    pytest.mark.llama_cpp,
    pytest.mark.oracle,
    pytest.mark.skipif(
        not (os.environ.get("LLAMA_CPP_PYTHON") or HERE),
        reason="llama_cpp is not installed here, and LLAMA_CPP_PYTHON names no Python that has it: docs/formats.md, GGUF",
    ),
]

ALL_VARIANTS = {**VARIANTS, **MIXTURES}
SEQUENCE, CONTEXT = 40, 256
"""Tokens, more than any window here; and the least positions that llama.cpp makes a context for."""
TOLERANCE = 1e-4
"""The tolerance of logits in float32, because sums have another order."""
GATED_GELU, OF_46_LAYERS = 0.02, 0.05
"""The tolerances with gelu from a table: between two of its values, the last bit of a sum decides, and attention
passes the error on."""

GELU_MODELS = dict.fromkeys(
    ("starcoder2", "starcoder2, tied", "phi", "gpt_neox", "gpt_neox, one after the other", "bloom"),
    2e-3,
)
"""The same for gelu without a gate, in layers of LayerNorm."""

_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 24}
_FACTORS = {"short_factor": [1.0, 1.1, 1.25, 1.5], "long_factor": [1.5, 2.0, 3.5, 6.0]}
"""Factors of heads of which 8 elements rotate."""


def _deepseek_yarn(mscale: float) -> dict[str, Any]:
    return rope(5000.0, **_YARN, mscale=mscale, mscale_all_dim=mscale)


def _longrope(original: int, positions: int, **more: Any) -> dict[str, Any]:
    scaling = {"rope_type": "longrope", **_FACTORS, **more}
    return {
        "max_position_embeddings": positions,
        "original_max_position_embeddings": original,
        **rope(5000.0, **scaling),
    }


_V2 = {**LATENT, "n_group": None, "topk_group": None}
_PLAIN_GEMMA = {
    "head_dim": 12,
    "query_pre_attn_scalar": 12,
    "sliding_window": WINDOW,
    "tie_word_embeddings": True,
}
_CAPS = {"attn_logit_softcapping": 1.5, "final_logit_softcapping": 2.5}
_TWO_BASES = two_ropes(rope_of(5000.0), rope_of(200.0))
_FIVE_OF_SIX = {
    "num_hidden_layers": 7,
    "layer_types": ["sliding_attention"] * 5 + ["full_attention", "sliding_attention"],
}
MODELS: Mapping[str, Variant] = {
    **FURTHER,
    **{
        name: ALL_VARIANTS[name]
        for name in (
            *("llama", "llama, tied, rope scaling of llama 3", "llama, linear rope scaling", "llama, head_dim of its own"),
            *("llama, all biases", "mistral, no window, head_dim of its own", "mixtral", "gpt2", "gemma"),
            *("qwen2", "qwen2, tied", "qwen3", "qwen3, tied", "qwen3_moe", "deepseek_v3"),
        )
    },
    "llama, yarn": Variant("llama", rope(5000.0, **_YARN)),
    "qwen2, yarn": Variant("qwen2", rope(5000.0, **_YARN)),
    "qwen3, linear": Variant("qwen3", {"head_dim": 12, **rope(5000.0, rope_type="linear", factor=2.5)}),
    "qwen3_moe, yarn": Variant("qwen3_moe", {**ALL_VARIANTS["qwen3_moe"].settings, **rope(5000.0, **_YARN)}),
    "qwen2_moe": replace(
        ALL_VARIANTS["qwen2_moe"], settings={**ALL_VARIANTS["qwen2_moe"].settings, "mlp_only_layers": []}
    ),
    "deepseek_v3, without q_lora_rank": Variant("deepseek_v3", {**LATENT, "q_lora_rank": None}),
    "deepseek_v3, yarn": Variant("deepseek_v3", {**LATENT, **_deepseek_yarn(1.0)}),
    "deepseek_v3, all groups": Variant("deepseek_v3", {**LATENT, "n_group": 2, "topk_group": 2}),
    "deepseek_v2": Variant("deepseek_v2", {**_V2, "q_lora_rank": None}),
    "deepseek_v2, as many layers as V2 Lite": Variant("deepseek_v2", {**_V2, "q_lora_rank": None, "num_hidden_layers": 27}),
    "deepseek_v2, q_lora_rank, yarn": Variant("deepseek_v2", {**_V2, **_deepseek_yarn(0.707)}),
    "phi3": Variant("phi3", {"original_max_position_embeddings": 96, "sliding_window": None}),
    "phi3, part of a head, tied": Variant(
        "phi3",
        {"num_attention_heads": 4, "original_max_position_embeddings": 96, "sliding_window": None, "tie_word_embeddings": True,
         **rope(5000.0, partial_rotary_factor=0.75)},
    ),
    "phi3, longrope, short": Variant("phi3", {**_longrope(512, 1024), "sliding_window": 2048}),
    "phi3, longrope, long": Variant("phi3", {**_longrope(16, 1024), "sliding_window": None}),
    "phi3, longrope, part of a head": Variant(
        "phi3", {"num_attention_heads": 4, "sliding_window": None, **_longrope(16, 1024, partial_rotary_factor=0.5)}
    ),
    "gemma2": Variant(
        "gemma2", {**_PLAIN_GEMMA, **_CAPS},
        {"one less": {"sliding_window": WINDOW - 1}, "one more": {"sliding_window": WINDOW + 1}, "scale": {"query_pre_attn_scalar": 8},
         "uncapped scores": {"attn_logit_softcapping": None}, "uncapped logits": {"final_logit_softcapping": None}},
    ),
    "gemma2, windows elsewhere": Variant(
        "gemma2",
        {**_PLAIN_GEMMA, **_CAPS,
         "layer_types": ["full_attention", "full_attention", "sliding_attention", "full_attention"]},
    ),
    "gemma2, as many layers as 27B": Variant(
        "gemma2", {**_PLAIN_GEMMA, **_CAPS, "num_hidden_layers": 46, "query_pre_attn_scalar": 8}
    ),
    "gemma3_text": Variant(
        "gemma3_text", {**_PLAIN_GEMMA, **_FIVE_OF_SIX, **_TWO_BASES},
        {"one less": {"sliding_window": WINDOW - 1}, "one base": two_ropes(rope_of(5000.0), rope_of(5000.0))},
    ),
    "gemma3_text, scaled, windows elsewhere": Variant(
        "gemma3_text",
        {**_PLAIN_GEMMA, "layer_types": ["full_attention", "sliding_attention"] * 2, "tie_word_embeddings": False,
         **two_ropes(rope_of(5000.0, rope_type="linear", factor=4.0), rope_of(200.0))},
    ),
    "olmo2": ALL_VARIANTS["olmo2"],
}  # fmt: skip
ROUNDED = {"bf16": 0.03, "f16": 0.003, "q8_0": 0.1}
"""Type -> how far a dense llama's logits may be off on average, as a part of their size; llama.cpp rounds activations too."""


def gelu_of_a_table(found: "torch.Tensor") -> "torch.Tensor":
    """llama.cpp looks gelu up in a table of float16 between -10 and 10; exact arithmetic is within 0.01 of it here."""
    import torch

    looked_up = torch.nn.functional.gelu(found.half().float(), approximate="tanh").half().float()
    return torch.where(
        found <= -10, torch.zeros_like(found), torch.where(found >= 10, found, looked_up)
    )


def expected_of(directory: Path, tokens: "torch.Tensor") -> "torch.Tensor":
    """transformers' logits, of models with gelu by llama.cpp's table."""
    model = load(directory)
    for module in model.modules():
        if "gelu" in type(module).__name__.lower():
            module.forward = gelu_of_a_table  # type: ignore[method-assign,assignment]
    return compute(model, tokens)


def ask(directory: Path, **question: Any) -> dict[str, Any]:
    """llama.cpp's answer; fails with what it says where it has none."""
    file = directory / "question.json"
    file.write_text(
        json.dumps(
            {
                key: str(value) if isinstance(value, Path) else value
                for key, value in question.items()
            }
        )
    )
    root = Path(__file__).parents[2]
    command = [PYTHON, "-W", "ignore", "-m", "tests.llama_cpp_oracle", str(file)]
    done = subprocess.run(
        command, cwd=root, capture_output=True, text=True, timeout=300, check=False
    )
    replies = [
        line.removeprefix(REPLY) for line in done.stdout.splitlines() if line.startswith(REPLY)
    ]
    assert replies, done.stdout[-2000:] + done.stderr[-4000:]
    found: dict[str, Any] = json.loads(replies[0])
    assert "failed" not in found, done.stderr[-4000:]
    return found


def logits_of(model: Path, tokens: "torch.Tensor", directory: Path) -> "torch.Tensor":
    import numpy as np
    import torch

    np.save(directory / "tokens.npy", tokens.numpy())
    places = {"tokens": directory / "tokens.npy", "logits": directory / "logits.npy"}
    ask(directory, model=model, context=CONTEXT, **places)
    return torch.from_numpy(np.load(directory / "logits.npy"))


@pytest.fixture(scope="module")
def models(
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[str], tuple[Path, "torch.Tensor", "torch.Tensor"]]:
    """Name -> (the model as transformers saved it, tokens, transformers' logits)."""
    import torch

    @cache
    def made(name: str) -> tuple[Path, torch.Tensor, torch.Tensor]:
        directory = tmp_path_factory.mktemp("llama-cpp") / "model"
        create(MODELS[name], directory)
        tokens = torch.randint(0, VOCAB, (2, SEQUENCE), generator=torch.Generator().manual_seed(4))
        return directory, tokens, expected_of(directory, tokens)

    return made


TEXTS = (
    "Hello world, it's 1234567 tokens!  Two  spaces\n\nand lines.\tDon't, I'LL; x_y+z (a/b)",
    "Grüße 你好 ひらがな, ça va? naïve -- 3.14%",
)
SPLIT = {"llama-bpe": "gguf-llama3-bpe", "qwen2": "gguf-qwen2-bpe", "gpt-2": "gguf-gpt2-bpe"}
"""llama.cpp's name of a way of splitting text -> a model with such a tokenizer."""


def answers(source: Path, target: Path, directory: Path) -> tuple[list[list[int]], list[list[int]]]:
    """Tokens by (llama.cpp, transformers) of the texts, from what is written of a model with its tokenizer."""
    from transformers import AutoTokenizer

    megaconv.convert(source, target, saver="gguf")
    theirs = AutoTokenizer.from_pretrained(source)
    texts = [*TEXTS, *(f"a{token}  b" for token in theirs.all_special_tokens)]
    return ask(directory, model=target / "model.gguf", texts=texts)["texts"], [
        theirs(text)["input_ids"] for text in texts
    ]


@pytest.mark.parametrize("name", SPLIT)
def test_llama_cpp_splits_text_as_transformers_does(name: str, tmp_path: Path) -> None:
    found, expected = answers(FIXTURES / SPLIT[name] / "hf", tmp_path / "gguf", tmp_path)
    assert found == expected


def byte_level(patterns: Sequence[str], vocabulary: int, special: Sequence[str]) -> Any:
    """A tokenizer that splits by these expressions in turn, trained on the texts."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    steps: list[Any] = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [*steps, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, initial_alphabet=alphabet, special_tokens=list(special)
    )
    tokenizer.train_from_iterator(TEXTS * 50, trainer)
    return tokenizer


@pytest.mark.parametrize("name", ["gpt-4o", "deepseek-v3"])
def test_expressions_of_published_tokenizers_are_llama_cpps_of_that_name(
    name: str, tmp_path: Path
) -> None:
    """o200k, of GPT-OSS and Phi-4 mini; and DeepSeek V3's three."""
    patterns = next(each for each, called in PATTERNS.items() if called == name)
    source = write_llama(
        tmp_path / "hf", vocab=400, extra_config={"bos_token_id": 0, "eos_token_id": 0}
    )
    byte_level(patterns, 400, ["<|end|>"]).save(str(source / "tokenizer.json"))
    (source / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>"}'
    )
    found, expected = answers(source, tmp_path / "gguf", tmp_path)
    assert found == expected


def test_tokens_beside_a_sentencepiece_model_are_special_in_llama_cpp_too(tmp_path: Path) -> None:
    """Phi-3's: behind its 32,000 pieces stand tokens that take white space behind them along."""
    source = phi3_with_tokenizer(tmp_path / "hf")
    megaconv.convert(source, tmp_path / "gguf", saver="gguf")
    texts = ["<|user|>ab<|end|>", "<|user|>  ab<|end|>\nab", "ab<|endoftext|> ab"]
    found = ask(tmp_path, model=tmp_path / "gguf/model.gguf", texts=texts)["texts"]
    user, end, last = 324, 325, 323
    first, second, third = found
    assert first[0] == user
    assert first[-1] == end
    assert second == [*first, *first[1:-1]]  # neither the spaces nor the line's end are tokens
    assert third.count(last) == 1
    assert len(third) > 2 * third.index(last)  # the space behind it is one


def phi3_with_tokenizer(path: Path) -> Path:
    """A Phi-3 with the pieces of a Llama, and tokens of its own behind them, as its tokenizer_config.json lists them."""
    settings = {"vocab_size": 332, "original_max_position_embeddings": 96, "sliding_window": None}
    create(Variant("phi3", settings), path)
    shutil.copy(FIXTURES / "gguf-llama-spm/hf/tokenizer.model", path)
    listed = {"323": ("<|endoftext|>", False), "324": ("<|user|>", True), "325": ("<|end|>", True)}
    added = {
        number: {"content": text, "special": True, "rstrip": strips}
        for number, (text, strips) in listed.items()
    }
    tokenizer = {
        "tokenizer_class": "LlamaTokenizer",
        "added_tokens_decoder": added,
        "add_bos_token": False,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    return path


def written(source: Path, target: Path, kind: str) -> Path:
    megaconv.convert(source, target, saver="gguf", options={"gguf_type": kind, "tokenizer": "none"})
    return target / "model.gguf"


def test_every_family_that_is_written_is_run() -> None:
    assert {family_of(variant) for variant in MODELS.values()} == set(ARCHITECTURES)


@pytest.mark.parametrize("name", MODELS)
def test_llama_cpp_computes_what_transformers_does(name: str, models: Any, tmp_path: Path) -> None:
    source, tokens, expected = models(name)
    found = logits_of(written(source, tmp_path / "gguf", "f32"), tokens, tmp_path)
    difference = (found - expected).abs()
    if name.startswith("gemma"):
        assert difference.max().item() <= (OF_46_LAYERS if "27B" in name else GATED_GELU)
    else:
        assert difference.max().item() <= GELU_MODELS.get(name, TOLERANCE)
        assert found.argmax(-1).equal(expected.argmax(-1))


@pytest.mark.parametrize(
    ("name", "other"),
    [(name, other) for name, variant in MODELS.items() for other in variant.others],
)
def test_other_settings_change_the_logits_by_more_than_the_tolerance(
    name: str, other: str, models: Any
) -> None:
    source, tokens, expected = models(name)
    logits = compute(load(source, **MODELS[name].others[other]), tokens)
    assert (logits - expected).abs().max().item() > 10 * (
        GATED_GELU if name.startswith("gemma") else GELU_MODELS.get(name, TOLERANCE)
    )


@pytest.mark.parametrize("kind", ROUNDED)
def test_types_of_fewer_bits_are_read_by_llama_cpp(kind: str, models: Any, tmp_path: Path) -> None:
    source, tokens, expected = models("llama")
    found = logits_of(written(source, tmp_path / "gguf", kind), tokens, tmp_path)
    difference = (found - expected).abs()
    assert difference.max().item() > TOLERANCE
    assert difference.mean().item() <= ROUNDED[kind] * expected.abs().mean().item()


def test_a_sharded_checkpoint_without_a_config_json_is_run_too(models: Any, tmp_path: Path) -> None:
    """Qwen 3, whose heads are of a size of their own."""
    source, tokens, expected = models("qwen3")
    megaconv.convert(source, tmp_path / "core", saver="core", tp=2, pp=2)
    found = logits_of(written(tmp_path / "core", tmp_path / "gguf", "f32"), tokens, tmp_path)
    assert (found - expected).abs().max().item() <= TOLERANCE
