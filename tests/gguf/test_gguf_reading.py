"""GGUF read: files that llama.cpp's own converter made, against the models that it made them of."""

import json
import os
import shutil
import struct
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import megaconv
from formats import gguf_header
from formats.errors import CorruptCheckpoint
from megaconv.engine.fingerprints import fingerprint_source
from megaconv.engine.opening import open_source
from megaconv.errors import UsageError
from megaconv.gguf import types
from megaconv.gguf.config import config_of
from megaconv.input import find_input
from megaconv.model.meaning import config_differences
from megaconv.options import LoadOptions
from savers import gguf as gguf_saver
from tests.conftest import FIXTURES
from tests.models import write_llama
from tests.runs import assert_refused, run

CASES = sorted(FIXTURES.glob("gguf-*/*.gguf"))
PLAIN = [case for case in CASES if "q8_0" not in case.name]
QUANTIZED = [case for case in CASES if "q8_0" in case.name]
LLAMA = FIXTURES / "gguf-llama-spm"


def original(case: Path) -> Path:
    here = case.parent / "hf"
    return here if here.is_dir() else LLAMA / "hf"


@pytest.mark.parametrize("case", PLAIN, ids=lambda case: case.parent.name)
def test_the_model_that_llama_cpp_converted_comes_back_bit_for_bit(case: Path) -> None:
    options = LoadOptions(config=original(case))
    source = open_source(find_input(case, options=options), options)
    expected = open_source(find_input(original(case)))
    assert source.header.manifest == expected.header.manifest
    assert fingerprint_source(source, 1).weights == megaconv.fingerprint(original(case)).weights


@pytest.mark.parametrize(
    "case", [case for case in PLAIN if "llama3" not in case.name], ids=lambda case: case.parent.name
)
def test_a_file_alone_says_what_model_it_is(
    case: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    alone = Path(shutil.copy(case, tmp_path / "model.gguf"))
    source = open_source(find_input(alone))
    expected = open_source(find_input(original(case)))
    assert not caplog.text
    differences = config_differences(source.header.config, expected.header.config)
    # This token comes from the tokenizer. config.json doesn't repeat it.
    assert {name for name, _, _ in differences} <= {"pad_token_id"}
    assert fingerprint_source(source, 1).weights == megaconv.fingerprint(original(case)).weights


@pytest.mark.parametrize("case", QUANTIZED, ids=lambda case: case.parent.name)
def test_blocks_of_q8_0_are_multiplied_out(case: Path, tmp_path: Path) -> None:
    """The expected values come from independent arithmetic, for a tensor whose rows are in the model's order. Other
    tensors are close to the original."""
    outcome = run(
        "convert",
        case,
        tmp_path / "out",
        "--saver",
        "hf",
        "--config",
        original(case),
        "--dtype",
        "fp32",
    )
    assert outcome.status == 0, outcome.err
    found, expected = (
        load_file(tmp_path / "out/model.safetensors"),
        load_file(original(case) / "model.safetensors"),
    )
    assert found.keys() == expected.keys()
    embedding = next(name for name in found if name.endswith(("embed_tokens.weight", "wte.weight")))
    stored = gguf_header.read(case).tensors["token_embd.weight"]
    blocks = np.frombuffer(
        case.read_bytes()[stored.offset : stored.offset + stored.nbytes], np.uint8
    ).reshape(-1, 34)
    values = blocks[:, :2].copy().view(np.float16).astype(np.float32) * blocks[:, 2:].copy().view(
        np.int8
    )
    assert torch.equal(found[embedding], torch.from_numpy(values.reshape(stored.shape)))
    for name, tensor in expected.items():
        assert (found[name] - tensor.float()).abs().max() <= tensor.float().abs().max() / 127, name


def test_it_is_sharded_on_the_way(tmp_path: Path) -> None:
    case = next(case for case in PLAIN if "mixtral" in case.parent.name)
    outcome = run(
        "convert",
        case,
        tmp_path / "out",
        "--saver",
        "core",
        "--config",
        original(case),
        "--tp",
        2,
        "--ep",
        2,
        "--verify",
    )
    assert outcome.status == 0, outcome.err
    assert (
        megaconv.fingerprint(tmp_path / "out").weights
        == megaconv.fingerprint(original(case)).weights
    )


def test_a_written_gguf_file_is_read_back(tmp_path: Path) -> None:
    for kind in ("f32", "bf16"):
        outcome = run(
            "convert",
            LLAMA / "hf",
            tmp_path / kind,
            "--saver",
            "gguf",
            "--option",
            f"gguf_type={kind}",
        )
        assert outcome.status == 0, outcome.err
        shutil.copy(LLAMA / "hf/config.json", tmp_path / kind)
        back = run(
            "convert", tmp_path / kind, tmp_path / f"{kind}-hf", "--saver", "hf", "--dtype", "bf16"
        )
        assert back.status == 0, back.err
        assert (
            megaconv.fingerprint(tmp_path / f"{kind}-hf").weights
            == megaconv.fingerprint(LLAMA / "hf").weights
        )
        assert run("verify", tmp_path / kind).status == 0


def described(architecture: str, **changed: Any) -> dict[str, Any]:
    """The config.json of a file of this architecture. changed: keys without the architecture's prefix."""
    sizes = {
        "embedding_length": 64, "block_count": 4, "feed_forward_length": 96, "context_length": 128, "attention.head_count": 4,
        "attention.head_count_kv": 2, "attention.layer_norm_rms_epsilon": 1e-6, "rope.freq_base": 10000.0,
    }  # fmt: skip
    own = {f"{architecture}.{name}": value for name, value in {**sizes, **changed}.items()}
    return config_of({"general.architecture": architecture, **own}, (), 320, "here")


@pytest.mark.parametrize(
    ("architecture", "changed"),
    [
        # As llama.cpp writes an OLMo 3.
        ("olmo2", {"attention.sliding_window": 16}),
        ("olmo2", {"attention.sliding_window_pattern": [True, True, True, False]}),
        # As it writes AFM 4.5B.
        ("arcee", {"rope.scaling.type": "yarn", "rope.scaling.factor": 20.0, "rope.scaling.original_context_length": 64}),
        ("granite", {"rope.scaling.type": "linear", "rope.scaling.factor": 2.0}),
        ("llama", {"rope.scaling.type": "yarn", "rope.scaling.factor": 2.0, "rope.scaling.original_context_length": 64,
                   "rope.scaling.yarn_attn_factor": 1.5}),
        ("llama", {"rope.dimension_count": 8}),
        ("qwen2", {"rope.dimension_count": 8}),
        ("qwen3", {"attention.causal": False}),
        ("llama", {"logit_scale": 0.5}),
        ("qwen3moe", {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 32, "expert_weights_scale": 2.5}),
    ],
    ids=str,
)  # fmt: skip
def test_a_key_that_isnt_read_and_changes_the_model_is_named(
    architecture: str, changed: dict[str, Any]
) -> None:
    with pytest.raises(UsageError, match=rf"here: says {architecture}\..*give --config") as refusal:
        described(architecture, **changed)
    assert refusal.value.code == "config-needed"
    assert any(f"{architecture}.{name} = " in str(refusal.value) for name in changed)


@pytest.mark.parametrize(
    ("architecture", "changed"),
    [
        ("llama", {"vocab_size": 320, "rope.dimension_count": 16, "rope.scaling.finetuned": False, "tensor_data_layout": "x"}),
        ("llama", {"expert_count": 0, "expert_used_count": 0, "rope.scaling.type": "none"}),
        ("olmo2", {"attention.sliding_window": 0, "attention.sliding_window_pattern": [False] * 4}),
        ("qwen3", {"attention.key_length": 16, "attention.value_length": 16, "attention.causal": True, "pooling_type": 3}),
        ("arcee", {"rope.dimension_count": 16, "vocab_size": 320}),
    ],
    ids=str,
)  # fmt: skip
def test_keys_that_change_nothing_are_harmless(architecture: str, changed: dict[str, Any]) -> None:
    found, without = described(architecture, **changed), described(architecture)
    assert {**found, "head_dim": 16} == {**without, "head_dim": 16}


# What is refused.


def copied(tmp_path: Path, name: str = "model.gguf") -> Path:
    (tmp_path / "in").mkdir()
    return Path(shutil.copy(next(LLAMA.glob("*.gguf")), tmp_path / "in" / name))


def refused(path: Path, config: Path, tmp_path: Path, status: int, *words: str) -> None:
    assert_refused(
        run("convert", path, tmp_path / "out", "--saver", "hf", "--config", config), status, *words
    )
    assert not (tmp_path / "out").exists()


def test_missing_values_of_a_gguf_file_are_asked_for(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    path = shutil.copy(
        next((FIXTURES / "gguf-llama3-bpe").glob("*.gguf")), tmp_path / "in/model.gguf"
    )
    assert_refused(run("fingerprint", path), 2, "scales positions", "give --config")


def test_an_architecture_that_isnt_known_is_refused(tmp_path: Path) -> None:
    path = copied(tmp_path)
    path.write_bytes(
        path.read_bytes().replace(
            b"general.architecture\x08\0\0\0\x05\0\0\0\0\0\0\0llama",
            b"general.architecture\x08\0\0\0\x05\0\0\0\0\0\0\0rwkv7",
        )
    )
    assert_refused(run("fingerprint", path), 3, "architecture 'rwkv7'", "supported are llama")


def test_another_architecture_is_refused(tmp_path: Path) -> None:
    refused(
        copied(tmp_path),
        FIXTURES / "gguf-qwen2-bpe/hf",
        tmp_path,
        3,
        "architecture 'llama'",
        "'qwen2' there",
    )


def test_another_model_is_refused(tmp_path: Path) -> None:
    refused(
        copied(tmp_path), FIXTURES / "peft-llama-all-linear/base", tmp_path, 3, "the configuration"
    )


def config_with(source: Path, target: Path, **changed: Any) -> Path:
    config = json.loads((source / "config.json").read_text())
    target.mkdir()
    (target / "config.json").write_text(json.dumps(config | changed))
    return target


LLAMA_3 = FIXTURES / "gguf-llama3-bpe"
UNSCALED = {"rope_type": "default", "rope_theta": 500000.0}
LESS = json.loads((LLAMA_3 / "hf/config.json").read_text())["rope_parameters"] | {"factor": 2.0}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"rope_parameters": UNSCALED}, "rope_freqs.weight, which scales positions"),
        ({"rope_parameters": LESS}, "rope_freqs.weight scales positions by other numbers"),
        ({"rms_norm_eps": 1e-5}, "llama.attention.layer_norm_rms_epsilon"),
    ],
)
def test_a_configuration_that_the_metadata_contradict_is_refused(
    changed: dict[str, Any], message: str, tmp_path: Path
) -> None:
    """All tensors have the shapes of this configuration: Llama 3 and 3.1 differ in nothing else."""
    (path,) = LLAMA_3.glob("*.gguf")
    config = config_with(LLAMA_3 / "hf", tmp_path / "config", **changed)
    refused(path, config, tmp_path, 3, message)


def test_a_scaled_file_is_not_a_model_without_scaling(tmp_path: Path) -> None:
    """The file is ours, of a model with linear scaling; the configuration is of the model without."""
    linear = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}
    scaled = Path(shutil.copytree(LLAMA / "hf", tmp_path / "scaled"))
    config = json.loads((scaled / "config.json").read_text()) | {"rope_parameters": linear}
    (scaled / "config.json").write_text(json.dumps(config))
    megaconv.convert(scaled, tmp_path / "gguf", saver="gguf")
    file = shutil.copy(tmp_path / "gguf/model.gguf", tmp_path / "scaled.gguf")
    refused(Path(file), LLAMA / "hf", tmp_path, 3, "llama.rope.scaling.factor = 4.0")


def with_key(source: Path, target: Path, key: str, value: float) -> Path:
    """A copy of a file with one further number in its metadata, padded to the file's alignment."""
    content, header = source.read_bytes(), gguf_header.read(source)
    tensors, keys = struct.unpack_from("<QQ", content, 8)
    added = text(key) + struct.pack("<If", 6, value)
    # The table of tensors follows the keys.
    first = min(content.index(text(name)) for name in header.tensors)
    head = content[:8] + struct.pack("<QQ", tensors, keys + 1) + content[24:first] + added
    kept = content[first : header.nbytes]
    while len(head + kept) % 32 and kept.endswith(b"\0"):
        kept = kept[:-1]
    padding = b"\0" * (-len(head + kept) % 32)
    target.write_bytes(head + kept + padding + content[header.nbytes :])
    return target


@pytest.mark.parametrize(
    "key", ["final_logit_softcapping", "attention.clamp_kqv", "rope.scaling.attn_factor"]
)
def test_a_key_that_the_configuration_has_no_value_for_is_named(
    key: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (source,) = LLAMA.glob("*.gguf")
    path = with_key(source, tmp_path / "model.gguf", f"llama.{key}", 1.5)
    megaconv.convert(path, tmp_path / "out", saver="hf", config=LLAMA / "hf")
    assert f"says llama.{key} = 1.5, which the configuration has no value for" in caplog.text


@pytest.mark.parametrize("case", PLAIN, ids=lambda case: case.name)
def test_files_of_llama_cpp_agree_with_their_models(
    case: Path, caplog: pytest.LogCaptureFixture
) -> None:
    megaconv.open(case, config=original(case))
    assert "--config wins" not in caplog.text


def test_a_configuration_that_scales_where_the_file_does_not_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    linear = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}
    config = config_with(LLAMA / "hf", tmp_path / "config", rope_parameters=linear)
    megaconv.convert(copied(tmp_path), tmp_path / "out", saver="hf", config=config)
    assert "has no llama.rope.scaling.factor" in caplog.text


def test_a_file_that_ends_early_is_refused(tmp_path: Path) -> None:
    path = copied(tmp_path)
    path.write_bytes(path.read_bytes()[:-5000])
    refused(path, LLAMA / "hf", tmp_path, 3, "reaches past the end of the file")


def test_one_of_several_files_is_refused(tmp_path: Path) -> None:
    refused(
        copied(tmp_path, "model-00001-of-00002.gguf"),
        LLAMA / "hf",
        tmp_path,
        3,
        "llama-gguf-split --merge",
    )


# Files that a stranger wrote.


def text(word: str) -> bytes:
    return struct.pack("<Q", len(word)) + word.encode()


def number(value: int) -> bytes:
    return struct.pack("<II", 4, value)


def array(*values: int) -> bytes:
    return struct.pack("<IIQ", 9, 4, len(values)) + struct.pack(f"<{len(values)}I", *values)


LLAMA_KEYS = {
    "general.architecture": struct.pack("<I", 8) + text("llama"),
    **{
        f"llama.{name}": number(16)
        for name in ("embedding_length", "block_count", "feed_forward_length", "context_length")
    },
    **{f"llama.attention.{name}": number(2) for name in ("head_count", "head_count_kv")},
    "llama.attention.layer_norm_rms_epsilon": struct.pack("<If", 6, 1e-5),
}
EMBEDDING = ("token_embd.weight", (8, 16), 0, 0)
"""Name, shape, type, offset."""


def write(
    folder: Path,
    keys: list[tuple[str, bytes]],
    *tensors: tuple[str, tuple[int, ...], int, int],
    data: int = 512,
) -> Path:
    head = (
        b"GGUF"
        + struct.pack("<IQQ", 3, len(tensors), len(keys))
        + b"".join(text(key) + value for key, value in keys)
    )
    for name, shape, kind, offset in tensors:
        head += text(name) + struct.pack(
            f"<I{len(shape)}QIQ", len(shape), *reversed(shape), kind, offset
        )
    path = folder / "model.gguf"
    path.write_bytes(head + bytes(-len(head) % 32) + bytes(data))
    return path


@pytest.mark.parametrize(
    "changed",
    [
        {"llama.attention.head_count": number(0)},
        {"llama.attention.head_count": array(2, 2, 2)},
        {"llama.attention.head_count": struct.pack("<I", 8) + text("x")},
        {"llama.attention.head_count_kv": array(2, 2)},
        {"llama.embedding_length": array(2)},
        {"llama.rope.freq_base": array(1, 2)},
        {"llama.expert_count": struct.pack("<I", 8) + text("x")},
    ],
    ids=str,
)
@pytest.mark.parametrize("config", [(), ("--config", LLAMA / "hf")], ids=["alone", "config"])
def test_metadata_of_a_wrong_kind_end_in_one_line(
    changed: dict[str, bytes], config: tuple[object, ...], tmp_path: Path
) -> None:
    path = write(tmp_path, [*(LLAMA_KEYS | changed).items()], EMBEDDING)
    assert_refused(run("fingerprint", path, *config), 3)


def test_a_file_that_names_no_architecture_is_no_model_of_a_family_that_gguf_hasnt(
    tmp_path: Path,
) -> None:
    path = write(tmp_path, [], EMBEDDING)
    config = FIXTURES / "peft-llama-all-linear/base"
    other = tmp_path / "config"
    shutil.copytree(config, other)
    (other / "config.json").write_text(
        (config / "config.json").read_text().replace("llama", "granite").replace("Llama", "Granite")
    )
    outcome = run("fingerprint", path, "--config", other)
    assert_refused(outcome, 3)
    shutil.copy(FIXTURES / "hybrid-nemotron-h-tp2/hf/config.json", other / "config.json")
    assert_refused(run("fingerprint", path, "--config", other), 3, "architecture None")


def test_a_type_that_cant_be_undone_is_named(tmp_path: Path) -> None:
    path = write(tmp_path, [*LLAMA_KEYS.items()], ("token_embd.weight", (8, 32), 9, 0), data=288)
    assert_refused(run("fingerprint", path), 3, "token_embd.weight is of type Q8_1")


SECOND = ("blk.0.attn_norm.weight", (16,), 0, 512)


@pytest.mark.parametrize(
    ("keys", "tensors", "data", "word"),
    [
        ([*LLAMA_KEYS.items()] * 2, (EMBEDDING,), 512, "general.architecture twice"),
        ([*LLAMA_KEYS.items()], (EMBEDDING, (*EMBEDDING[:3], 512)), 1024, "token_embd.weight twice"),
        ([*LLAMA_KEYS.items()], (EMBEDDING, (*SECOND[:3], 480)), 576, "should begin at 512"),
        ([*LLAMA_KEYS.items()], (EMBEDDING, (*SECOND[:3], 544)), 640, "should begin at 512"),
        ([*LLAMA_KEYS.items()], (EMBEDDING, SECOND), 576 + 4096, "more bytes than its tensors"),
        ([("general.alignment", number(24))], (EMBEDDING,), 512, "general.alignment is 24"),
        ([("general.alignment", struct.pack("<I?", 7, True))], (EMBEDDING,), 512, "general.alignment is True"),
        ([], (("x", (0, 1 << 63), 0, 0),), 0, "sizes"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_a_header_that_contradicts_itself_or_the_file_is_refused(
    keys: list[tuple[str, bytes]], tensors: tuple[Any, ...], data: int, word: str, tmp_path: Path
) -> None:
    with pytest.raises(CorruptCheckpoint, match=word):
        gguf_header.read(write(tmp_path, keys, *tensors, data=data))


@pytest.mark.parametrize(
    "head",
    [
        struct.pack("<QQ", 0, 1) + text("a") + struct.pack("<IIQ", 9, 8, 1 << 36),
        struct.pack("<QQ", 0, 1) + text("a") + struct.pack("<IQ", 8, 1 << 39),
        struct.pack("<QQ", 0, 1 << 40),
        struct.pack("<QQ", 1 << 40, 0),
    ],
    ids=["array", "string", "keys", "tensors"],
)
def test_a_terabyte_of_header_is_not_read(head: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<I", 3) + head)
    os.truncate(path, 1 << 40)
    started = time.monotonic()
    with pytest.raises(CorruptCheckpoint, match="is not a valid GGUF file"):
        gguf_header.read(path)
    assert time.monotonic() - started < 20


@pytest.mark.parametrize(
    ("kind", "others", "kept"),
    [
        ("f16", "float32", "float32"),
        ("bf16", "float16", "float16"),
        ("q8_0", "float32", "float32"),
        ("q8_0", "float16", "bfloat16"),
    ],
)
def test_a_matrix_of_another_dtype_keeps_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, others: str, kept: str
) -> None:
    """In 16 bits, few of its numbers would stay. Norms and routers are F32 in each file."""
    source = write_llama(tmp_path / "hf", layers=2)
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"torch_dtype": "float32"}))
    numbers = {
        name: tensor.float() * 1.001
        for name, tensor in load_file(source / "model.safetensors").items()
    }
    save_file(numbers, source / "model.safetensors", {"format": "pt"})
    whole = types.types_of

    def with_another(*words: Any) -> dict[str, str]:
        return whole(*words) | {"blk.0.attn_output.weight": others}

    monkeypatch.setattr(gguf_saver, "types_of", with_another)
    megaconv.convert(
        source, tmp_path / "gguf", saver="gguf", options={"gguf_type": kind, "tokenizer": "none"}
    )
    place = find_input(tmp_path / "gguf")
    manifest = {str(key): info.dtype for key, info in open_source(place).header.manifest.items()}
    matrix = "layers.0.attn.o.weight"
    assert manifest[matrix] == kept
    usual = {"f16": "float16", "bf16": "bfloat16", "q8_0": "bfloat16"}[kind]
    assert {dtype for name, dtype in manifest.items() if name != matrix} == {usual}
    megaconv.convert(tmp_path / "gguf", tmp_path / "back", saver="hf")
    found = load_file(tmp_path / "back" / "model.safetensors")[
        "model.layers.0.self_attn.o_proj.weight"
    ]
    expected = numbers["model.layers.0.self_attn.o_proj.weight"].to(getattr(torch, others))
    assert torch.equal(found, expected.to(getattr(torch, kept)))
