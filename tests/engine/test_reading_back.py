"""`--verify` of outputs that no loader gives as they were streamed: GGUF files, and adapters of peft's."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from formats import gguf_header
from megaconv import registry
from megaconv.engine import conversion
from tests.conftest import FIXTURES
from tests.families.test_families import DEEPSEEK, write_model
from tests.models import write_llama
from tests.runs import Outcome, assert_refused, run

TYPES = ("f32", "f16", "bf16", "q8_0")
MODELS = sorted(
    {case.parent / "hf" for case in FIXTURES.glob("gguf-*/*.gguf") if (case.parent / "hf").is_dir()}
)
BLOCKS = {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 32,
    "head_dim": 8,
    "intermediate_size": 64,
}
FURTHER = {
    "deepseek_v3": {
        **DEEPSEEK,
        **BLOCKS,
        "num_key_value_heads": 4,
        "kv_lora_rank": 32,
        "n_group": 1,
        "topk_group": 1,
    },
    "gemma3_text": {**BLOCKS, "query_pre_attn_scalar": 8, "sliding_window": 7},
    "phi3": {**BLOCKS, "sliding_window": 7},
}
ADAPTER = FIXTURES / "peft-llama-all-linear"


def write(source: Path, target: Path, kind: str, *words: object) -> Outcome:
    options = ("--option", f"gguf_type={kind}", "--verify", "--json", *words)
    return run("convert", source, target, "--saver", "gguf", *options)


def require_verified(outcome: Outcome) -> None:
    assert outcome.status == 0, outcome.err
    assert json.loads(outcome.out)["verified"] is True


def after_writing(monkeypatch: pytest.MonkeyPatch, damage: Callable[[Path], None]) -> None:
    """Damage an output before it is read back, as a faulty disk does."""
    verify = conversion.verify_fingerprint

    def damaged(path: Path, *arguments: object) -> None:
        damage(path)
        verify(path, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(conversion, "verify_fingerprint", damaged)


def flipped(path: Path, offset: int) -> None:
    content = bytearray(path.read_bytes())
    content[offset] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("source", MODELS, ids=lambda source: source.parent.name)
def test_every_type_of_a_gguf_output_is_read_back(source: Path, kind: str, tmp_path: Path) -> None:
    require_verified(write(source, tmp_path / "out", kind))


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("family", FURTHER)
def test_families_with_other_stored_forms_are_read_back(
    family: str, kind: str, tmp_path: Path
) -> None:
    source = write_model(tmp_path / "hf", family, max_position_embeddings=64, **FURTHER[family])
    require_verified(write(source, tmp_path / "out", kind, "--option", "tokenizer=none"))


def test_verify_reads_back_quantized_tensors_of_many_ranks_after_a_cast(tmp_path: Path) -> None:
    core = ("convert", FIXTURES / "gguf-mixtral-spm" / "hf", tmp_path / "core", "--saver", "core")
    assert run(*core, "--tp", 2, "--pp", 2, "--ep", 2).status == 0
    require_verified(write(tmp_path / "core", tmp_path / "out", "q8_0", "--dtype", "fp32"))


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize(
    "name", ["token_embd.weight", "blk.1.attn_q.weight", "blk.0.attn_norm.weight"]
)
@pytest.mark.parametrize("at", ["first", "last"])
def test_one_bit_that_reads_back_otherwise_ends_the_run(
    kind: str, name: str, at: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def damage(path: Path) -> None:
        tensor = gguf_header.read(path / "model.gguf").tensors[name]
        flipped(path / "model.gguf", tensor.offset + (0 if at == "first" else tensor.nbytes - 1))

    after_writing(monkeypatch, damage)
    source = write_model(tmp_path / "hf", "mistral", **BLOCKS)
    outcome = write(source, tmp_path / "out", kind, "--option", "tokenizer=none")
    assert (outcome.status, json.loads(outcome.out)["error"]["code"]) == (4, "models-differ")
    assert "reads back differently from what was written" in outcome.err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["token_embd.weight", "output_norm.weight"])
def test_a_header_with_another_name_for_a_tensor_ends_the_run(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def damage(path: Path) -> None:
        file = path / "model.gguf"
        flipped(file, file.read_bytes().index(name.encode()))

    after_writing(monkeypatch, damage)
    outcome = write(
        write_llama(tmp_path / "hf"), tmp_path / "out", "bf16", "--option", "tokenizer=none"
    )
    assert outcome.status == 4
    assert f"{name} reads back differently from what was written" in outcome.err


def test_a_type_in_the_header_that_is_another_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def damage(path: Path) -> None:
        file = path / "model.gguf"
        name = b"output_norm.weight"
        # The type follows the only size. This flip changes it from F32 to F16.
        flipped(file, file.read_bytes().index(name) + len(name) + 4 + 8)

    after_writing(monkeypatch, damage)
    outcome = write(
        write_llama(tmp_path / "hf"), tmp_path / "out", "f32", "--option", "tokenizer=none"
    )
    assert outcome.status in (3, 4), outcome
    assert not (tmp_path / "out").exists()


def translated(target: Path) -> Outcome:
    place = ("--load-dir", ADAPTER / "adapter", "--config", ADAPTER / "base", "--save-dir", target)
    return run("convert", "--loader", "peft", "--saver", "peft", *place, "--verify", "--json")


def test_an_adapter_is_read_back_without_its_base(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    require_verified(translated(tmp_path / "out"))
    after_writing(monkeypatch, lambda path: flipped(path / "adapter_model.safetensors", -1))
    outcome = translated(tmp_path / "again")
    assert outcome.status == 4
    assert "reads back differently" in outcome.err
    assert not (tmp_path / "again").exists()


@pytest.mark.parametrize(
    ("kind", "damaged"),
    [("separate", "context/2_Dense/model.safetensors"), ("shared", "model.safetensors")],
)
def test_the_directories_of_a_biencoder_are_read_back_though_no_loader_reads_them(
    kind: str, damaged: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = FIXTURES / f"biencoder-legacy-{kind}"
    words = ("--saver", "hf", "--verify", "--json")
    require_verified(run("convert", source, tmp_path / "out", *words))
    after_writing(monkeypatch, lambda path: flipped(path / damaged, -1))
    outcome = run("convert", source, tmp_path / "again", *words)
    assert outcome.status == 4
    assert "reads back differently" in outcome.err
    assert not (tmp_path / "again").exists()


def test_verify_is_refused_for_a_saver_without_a_reader_of_stored_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("savers.gguf.SAVER", replace(registry.saver("gguf"), read_back=None))
    place = (
        write_llama(tmp_path / "hf"),
        tmp_path / "out",
        "--saver",
        "gguf",
        "--option",
        "tokenizer=none",
    )
    assert_refused(
        run("convert", *place, "--verify"),
        2,
        "--verify: --saver gguf stores other values",
        "leave it out",
    )
