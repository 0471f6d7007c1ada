"""Llamas with norms of weight + 1 (--apply-layernorm-1p): kept between Megatron's files, and read as plain norms for transformers."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaForCausalLM
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

import megaconv
from megaconv.errors import NotExpressible
from tests.conftest import FIXTURES
from tests.runs import assert_refused, run

LLAMA = FIXTURES / "peft-llama-all-linear/base"


def centered(directory: Path, dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    """A Llama whose norms have weights of 16 bits about 0, saved; it computes x * weight until `with_gemmas_norms`."""
    model = AutoModelForCausalLM.from_pretrained(LLAMA, dtype=dtype)
    torch.manual_seed(3)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data = (torch.randn_like(parameter) * 0.25).bfloat16().to(dtype)
    model.save_pretrained(directory)
    return model


def with_gemmas_norms(model: LlamaForCausalLM) -> LlamaForCausalLM:
    """The model with Gemma's norms, which compute x * (1 + weight), in place of Llama's."""
    for name, module in list(model.named_modules()):
        if isinstance(module, LlamaRMSNorm):
            norm = GemmaRMSNorm(len(module.weight), eps=module.variance_epsilon)
            norm.weight = module.weight
            model.set_submodule(name, norm)
    return model


def megatron_run(directory: Path, source: Path, **options: Any) -> Path:
    """A Megatron checkpoint of a run with --apply-layernorm-1p, without config.json and record."""
    megaconv.convert(source, directory, saver="core", **options)
    for file in directory.rglob("*.pt"):
        state = torch.load(file, weights_only=False)
        args = state.get("args")
        if args is not None:
            args.apply_layernorm_1p = args.layernorm_zero_centered_gamma = True
            torch.save(state, file)
    for path in directory.rglob("hf"):
        shutil.rmtree(path)
    (directory / "megaconv.json").unlink()
    return directory


def tokens() -> torch.Tensor:
    return torch.randint(0, 99, (2, 16), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("ckpt_format", ["torch", "torch_dist"])
def test_transformers_llama_computes_what_norms_of_weight_plus_one_compute(
    ckpt_format: str, tmp_path: Path
) -> None:
    model = with_gemmas_norms(centered(tmp_path / "hf"))
    sizes = {"tp": 2, "pp": 2} if ckpt_format == "torch" else {}
    ckpt = megatron_run(tmp_path / "ckpt", tmp_path / "hf", ckpt_format=ckpt_format, **sizes)
    outcome = run("convert", ckpt, tmp_path / "out", "--saver", "hf", "--option", "norms=plain")
    assert outcome.status == 0, outcome
    out = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    with torch.no_grad():
        assert torch.equal(out(tokens()).logits, model(tokens()).logits)


def test_sixteen_bits_need_float32_or_rounding(tmp_path: Path) -> None:
    model = centered(tmp_path / "hf", torch.bfloat16)
    norm = model.model.norm.weight.detach()
    ckpt = megatron_run(tmp_path / "ckpt", tmp_path / "hf")
    with pytest.raises(NotExpressible, match="--dtype float32, or --allow-lossy out_norm"):
        megaconv.convert(ckpt, tmp_path / "no", saver="hf", options={"norms": "plain"})
    for name, changed in (("wide", {"dtype": "fp32"}), ("rounded", {"allow_lossy": ["out_norm"]})):
        megaconv.convert(ckpt, tmp_path / name, saver="hf", options={"norms": "plain"}, **changed)
    wide, rounded = (
        load_file(tmp_path / name / "model.safetensors")["model.norm.weight"]
        for name in ("wide", "rounded")
    )
    assert torch.equal(wide, norm.float() + 1)
    assert torch.equal(rounded, (norm.float() + 1).bfloat16())


def test_a_run_is_resharded_with_its_norms_and_plain_norms_have_the_same_fingerprint(
    tmp_path: Path,
) -> None:
    centered(tmp_path / "hf", torch.bfloat16)
    ckpt = megatron_run(tmp_path / "ckpt", tmp_path / "hf")
    assert run("convert", ckpt, tmp_path / "tp2", "--saver", "core", "--tp", "2").status == 0
    file = next((tmp_path / "tp2").rglob("mp_rank_00/*.pt"))
    args = torch.load(file, weights_only=False)["args"]
    assert args.apply_layernorm_1p
    assert args.layernorm_zero_centered_gamma
    # The resharded checkpoint has a record of its own, which plain norms don't contradict.
    for name, source in (("one", ckpt), ("two", tmp_path / "tp2")):
        options = {"norms": "plain"}
        megaconv.convert(source, tmp_path / name, saver="hf", dtype="fp32", options=options)
    assert megaconv.fingerprint(tmp_path / "one") == megaconv.fingerprint(tmp_path / "two")


def test_without_the_option_the_message_names_it(tmp_path: Path) -> None:
    centered(tmp_path / "hf")
    ckpt = megatron_run(tmp_path / "ckpt", tmp_path / "hf")
    outcome = run("convert", ckpt, tmp_path / "out", "--saver", "hf")
    assert_refused(outcome, 2, "norm.zero_centered", "--option norms=plain", "--dtype fp32")


def test_a_configuration_with_plain_norms_needs_the_option(tmp_path: Path) -> None:
    """Otherwise the weights about 0 would be those of plain norms."""
    centered(tmp_path / "hf")
    ckpt = megatron_run(tmp_path / "ckpt", tmp_path / "hf")
    options = ("--saver", "hf", "--config", tmp_path / "hf")
    outcome = run("convert", ckpt, tmp_path / "out", *options)
    assert_refused(outcome, 3, "config.json", "apply_layernorm_1p", "--option norms=plain")
    outcome = run("convert", ckpt, tmp_path / "out", *options, "--option", "norms=plain")
    assert outcome.status == 0, outcome


@pytest.mark.parametrize(
    ("value", "words"), [("plain", "plain already"), ("other", "is not known")]
)
def test_an_option_without_effect_is_refused(value: str, words: str, tmp_path: Path) -> None:
    megaconv.convert(LLAMA, tmp_path / "ckpt", saver="core")
    option = f"norms={value}"
    outcome = run(
        "convert", tmp_path / "ckpt", tmp_path / "out", "--saver", "hf", "--option", option
    )
    assert_refused(outcome, 2, option, words)
