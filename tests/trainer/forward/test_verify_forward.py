"""`megaconv verify A [B] --forward`: two checkpoints are compared by what they compute, and every refusal is one line."""

import json
import math
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import megaconv
from megaconv.commands.forward_pass import GROUP
from megaconv.model.fields import from_fields
from megatron_lite.forward import verification
from tests.conftest import FIXTURES
from tests.engine.test_new_tokenizer import write_tokenizer
from tests.memory import growth
from tests.models import write_large_llama, write_llama
from tests.package.test_architecture import ROOT
from tests.runs import assert_refused, run
from tests.trainer.parallel.small import SIZES
from tests.transformers_oracle import MIXTURES, VARIANTS, Variant, create, load

LINE = re.compile(r"^([a-z]+ ?\w*) +(\S+) +\(largest difference (\S+) of (\S+)\)$", re.MULTILINE)


@pytest.fixture(autouse=True)
def installed(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """The entry point of pyproject.toml, as pip leaves it behind."""
    text = (ROOT / "pyproject.toml").read_text()
    (entry,) = re.findall(rf'^\[project\.entry-points\.{GROUP}\]\n(\w+) = "(\S+)"$', text, re.M)
    site = tmp_path_factory.mktemp("site")
    information = site / "megaconv_forward-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: forward\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text(f"[{GROUP}]\n{entry[0]} = {entry[1]}\n")
    monkeypatch.syspath_prepend(site)


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return write_llama(tmp_path / "llama", layers=2, dtype="float32")


def changed(source: Path, tensor: str, factor: float, target: Path) -> Path:
    """A copy of a model in which one tensor is multiplied."""
    target.mkdir()
    (target / "config.json").write_bytes((source / "config.json").read_bytes())
    tensors = load_file(source / "model.safetensors")
    tensors[tensor] *= factor
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    return target


def states(out: str) -> dict[str, float]:
    return {name.strip(): float(relative) for name, relative, *_ in LINE.findall(out)}


@pytest.mark.parametrize(
    "option", [("--tolerance", 0.1), ("--loader-b", "core"), ("--common-tokens",)]
)
def test_options_of_two_checkpoints_need_two(llama: Path, option: tuple[object, ...]) -> None:
    outcome = run("verify", llama, "--forward", *option)
    assert_refused(outcome, 2, f"{option[0]} is for two checkpoints; give B too")


def test_one_model_in_two_formats_computes_the_same(llama: Path, tmp_path: Path) -> None:
    megaconv.convert(llama, tmp_path / "core", saver="core", tp=2, pp=2)
    outcome = run("verify", llama, tmp_path / "core", "--forward")
    assert outcome.status == 0, outcome.err
    names = ["embedding", "layer 0", "layer 1", "final norm", "logits"]
    assert states(outcome.out) == dict.fromkeys(names, 0.0)
    assert outcome.out.splitlines()[-1] == "the same: 32 tokens, no difference beyond 0.0001"


@pytest.mark.parametrize(
    ("tensor", "first"),
    [
        ("model.embed_tokens.weight", "embedding"),
        ("model.layers.0.self_attn.o_proj.weight", "layer 0"),
        ("model.layers.1.input_layernorm.weight", "layer 1"),
        ("model.norm.weight", "final norm"),
        ("lm_head.weight", "logits"),
    ],
)
def test_a_changed_tensor_is_found_where_it_is_used_first(
    tensor: str, first: str, llama: Path, tmp_path: Path
) -> None:
    other = changed(llama, tensor, 3.0, tmp_path / "other")
    outcome = run("verify", llama, other, "--forward", "--window", "64")
    found = states(outcome.out)
    assert outcome.status == 4
    assert outcome.out.splitlines()[-1].startswith(f"different: from {first} on")
    before = list(found)[: list(found).index(first)]
    assert {name: found[name] for name in before} == dict.fromkeys(before, 0.0)
    document = json.loads(run("verify", llama, other, "--forward", "--json").out)
    assert (document["same"], document["first_difference"]) == (False, first)


def test_a_difference_within_the_tolerance_is_none(llama: Path, tmp_path: Path) -> None:
    other = changed(llama, "lm_head.weight", 1.0 + 1e-3, tmp_path / "other")
    assert run("verify", llama, other, "--forward", "--window", "64").status == 4
    assert run("verify", llama, other, "--forward", "--tolerance", "0.01").status == 0


@pytest.fixture
def larger(llama: Path, tmp_path: Path) -> Path:
    """The model with nine more tokens."""
    megaconv.convert(llama, tmp_path / "larger", saver="hf", vocab_size=140)
    return tmp_path / "larger"


@pytest.mark.parametrize("is_larger_first", [False, True])
def test_the_logits_of_common_tokens_are_compared_if_asked_for(
    is_larger_first: bool, llama: Path, larger: Path
) -> None:
    pair = [larger, llama] if is_larger_first else [llama, larger]
    refused = run("verify", *pair, "--forward")
    assert_refused(refused, 4, "expected one model; --common-tokens compares the tokens that both")
    outcome = run("verify", *pair, "--forward", "--common-tokens")
    assert outcome.status == 0, outcome.err
    assert set(states(outcome.out).values()) == {0.0}
    sizes = "A has 140, B has 131" if is_larger_first else "A has 131, B has 140"
    line = f"common tokens        131: {sizes}; further logits are not compared"
    assert outcome.out.splitlines()[-2] == line
    document = json.loads(run("verify", *pair, "--forward", "--common-tokens", "--json").out)
    assert (document["vocabularies"], document["compared_tokens"]) == (
        [140, 131] if is_larger_first else [131, 140],
        131,
    )


@pytest.mark.parametrize(("row", "status"), [(130, 4), (131, 0)])
def test_a_changed_row_of_a_common_token_is_found(
    row: int, status: int, llama: Path, larger: Path
) -> None:
    tensors = load_file(larger / "model.safetensors")
    tensors["lm_head.weight"][row] += 10
    save_file(tensors, larger / "model.safetensors", {"format": "pt"})
    outcome = run("verify", llama, larger, "--forward", "--common-tokens")
    assert outcome.status == status, outcome
    last = "different: from logits on" if status else "the same"
    assert outcome.out.splitlines()[-1].startswith(last)


@pytest.mark.parametrize("is_larger_first", [False, True])
def test_a_text_has_the_tokens_of_the_model_with_fewer(
    is_larger_first: bool, tmp_path: Path
) -> None:
    """The other tokenizer has the word itself as a token, for which the smaller model has no row."""
    model = write_llama(tmp_path / "hf", layers=1, vocab=263, dtype="float32")
    write_tokenizer(model)
    new = write_tokenizer(tmp_path / "new", ("checkpoint",))
    megaconv.convert(model, tmp_path / "larger", saver="hf", tokenizer=new)
    (tmp_path / "text").write_text("a checkpoint at rest")
    pair = [tmp_path / "larger", model] if is_larger_first else [model, tmp_path / "larger"]
    words = ["--forward", "--common-tokens", "--text", tmp_path / "text", "--json"]
    outcome = run("verify", *pair, *words)
    assert outcome.status == 0, outcome.err
    assert json.loads(outcome.out)["tokens"] == len("a checkpoint at rest")


def test_models_of_one_vocabulary_have_no_line_of_common_tokens(llama: Path) -> None:
    outcome = run("verify", llama, llama, "--forward", "--common-tokens")
    assert outcome.status == 0
    assert "common tokens" not in outcome.out


def test_the_window_names_the_model_with_fewer_positions(llama: Path, tmp_path: Path) -> None:
    other = changed(llama, "model.norm.weight", 1.0, tmp_path / "other")
    config = json.loads((other / "config.json").read_text()) | {"max_position_embeddings": 16}
    (other / "config.json").write_text(json.dumps(config))
    refused = run("verify", llama, other, "--forward", "--window", 17)
    assert_refused(refused, 2, f"--window 17: {other} has 16 positions")


@pytest.mark.oracle
def test_the_perplexity_of_a_text_is_that_of_transformers(tmp_path: Path) -> None:
    """Windows one after the other, each from its first token."""
    create(VARIANTS["llama"], tmp_path / "model")
    words = {f"w{number}": number for number in range(131)}
    tokenizer = {
        "version": "1.0", "added_tokens": [], "normalizer": None, "post_processor": None, "decoder": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"}, "truncation": None, "padding": None,
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "w0"},
    }  # fmt: skip
    (tmp_path / "model" / "tokenizer.json").write_text(json.dumps(tokenizer))
    ids = [7 + 11 * number % 120 for number in range(50)]
    text = tmp_path / "text.txt"
    text.write_text(" ".join(f"w{number}" for number in ids))
    asked = "--forward", "--text", text, "--window", "16", "--json", "--max-memory", "300kB"
    outcome = run("verify", tmp_path / "model", *asked)
    assert outcome.status == 0, outcome.err
    found = json.loads(outcome.out)
    model = load(tmp_path / "model")
    total, count = 0.0, 0
    for first in range(0, 50, 16):
        window = torch.tensor([ids[first : first + 16]])
        with torch.no_grad():
            loss = model(input_ids=window, labels=window).loss
        total, count = total + float(loss) * (window.shape[1] - 1), count + window.shape[1] - 1
    assert (found["tokens"], found["predicted"]) == (50, count)
    assert found["perplexities"] == [pytest.approx(math.exp(total / count), rel=1e-4)]


FORMATS: dict[str, tuple[Variant, dict[str, dict[str, object]]]] = {
    "llama": (
        VARIANTS["llama"],
        {
            "core": {"saver": "core", "tp": 2, "pp": 2},
            "torch_dist": {"saver": "core", "ckpt_format": "torch_dist"},
            "dcp": {"saver": "dcp"},
            "gguf": {"saver": "gguf", "options": {"tokenizer": "none"}},
        },
    ),
    "qwen3_moe": (
        MIXTURES["qwen3_moe"],
        {
            "core": {"saver": "core", "tp": 2, "ep": 2},
            "gguf": {"saver": "gguf", "options": {"tokenizer": "none"}},
        },
    ),
}


@pytest.mark.slow
@pytest.mark.oracle
@pytest.mark.parametrize("name", FORMATS)
def test_formats_compute_the_same(name: str, tmp_path: Path) -> None:
    variant, formats = FORMATS[name]
    create(variant, tmp_path / "hf")
    for form, options in formats.items():
        target = tmp_path / (form + ".gguf" if form == "gguf" else form)
        megaconv.convert(tmp_path / "hf", target, **options)  # type: ignore[arg-type]
        outcome = run("verify", tmp_path / "hf", target, "--forward", "--tolerance", "1e-5")
        assert outcome.status == 0, (form, outcome)


def test_memory_stays_bounded(tmp_path: Path, llama: Path) -> None:
    """A model of 400 MB in bf16."""
    model = write_large_llama(tmp_path / "large")
    assert run("verify", llama, "--forward").status == 0  # its imports take memory too
    with growth() as found:
        assert run("verify", model, "--forward", "--max-memory", "64MiB").status == 0
    assert 0 < found.most < 100 << 20


def test_many_short_rows_have_few_logits_at_a_time(tmp_path: Path) -> None:
    """2,000 rows of a vocabulary of 20,000 would be 160 MB of logits."""
    config = from_fields("llama", SIZES | {"vocab": 20_000, "positions.theta": 1e4})
    limit = 8 << 20
    passes = verification.passes_of(config, [(1, 2)] * 2000, 4, limit)
    assert sum(len(batch.tokens) for batch in passes) == 2000
    assert max(len(batch.tokens) for batch in passes) * config.vocab * 4 <= limit


BERTS_SIZES: dict[str, int] = {"layers": 2, "vocab": 100}
"""The sizes of the fixture core-bert-tp2pp2."""
REFUSED = {
    "no such checkpoint": (("{model}/none", "--forward"), 2),
    "B without --forward": (("{model}", "{model}"), 2),
    "a text without --forward": (("{model}", "--text", "x"), 2),
    "a dtype of another kind": (("{model}", "--forward", "--dtype", "int8"), 2),
    "common tokens without --forward": (("{model}", "--common-tokens"), 2),
    "no such text": (("{model}", "--forward", "--text", "none"), 2),
    "no tokenizer": (("{model}", "--forward", "--text", "{text}"), 2),
    "a window beyond the positions": (("{model}", "--forward", "--window", "65"), 2),
    "too little memory": (("{model}", "--forward", "--max-memory", "8192"), 2),
    "a tolerance that is no number": (("{model}", "{model}", "--forward", "--tolerance", "nan"), 2),
    "another model": (("{model}", "{other}", "--forward"), 4),
    "one tower and two": (("{shared}", "{separate}", "--forward"), 4),
    "an encoder and a decoder": (("{bert}", "{like_bert}", "--forward"), 4),
    "a decoder and an encoder": (("{like_bert}", "{bert}", "--forward"), 4),
    "an encoder and a text": (("{bert}", "--forward", "--text", "{text}"), 2),
    "a retro": (("{retro}", "--forward"), 2),
    "another loader": (("{model}", "{model}", "--forward", "--loader-b", "core"), 3),
}


@pytest.mark.parametrize("case", REFUSED)
def test_every_refusal_is_one_line(case: str, llama: Path, tmp_path: Path) -> None:
    arguments, status = REFUSED[case]
    places = {
        "model": llama,
        "other": write_llama(tmp_path / "other", layers=1),
        "text": tmp_path / "text.txt",
        "bert": FIXTURES / "core-bert-tp2pp2" / "checkpoint",
        "retro": FIXTURES / "retro-tp2-torch",
        "shared": FIXTURES / "biencoder-legacy-shared",
        "separate": FIXTURES / "biencoder-legacy-separate",
        "like_bert": write_llama(tmp_path / "like_bert", **BERTS_SIZES),
    }
    places["text"].write_text("a text")
    outcome = run("verify", *(word.format(**places) for word in arguments))
    assert (outcome.status, outcome.out) == (status, "")
    assert outcome.err.count("\n") == 1, outcome.err


def test_without_the_trainer_it_says_what_to_install(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megaconv.commands.forward_pass.GROUP", "nothing")
    outcome = run("verify", llama, "--forward")
    assert outcome.status == 2
    assert "pip install '.[train,data]'" in outcome.err
