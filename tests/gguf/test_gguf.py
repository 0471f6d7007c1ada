"""GGUF outputs: tensor by tensor and value by value against what llama.cpp's own converter made of the same models."""

import json
import shutil
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import megaconv
from megaconv.values.ggml_quantizers import q8_0
from tests.conftest import FIXTURES
from tests.models import write_llama
from tests.runs import assert_refused, run

CASES = sorted(FIXTURES.glob("gguf-*/*.gguf"))
LLAMA = FIXTURES / "gguf-llama-spm" / "hf"
BPE = FIXTURES / "gguf-llama3-bpe" / "hf"

NOT_WRITTEN = {"general.name", "general.size_label", "tokenizer.ggml.eot_token_id"}
"""Names for people, made of the directory's; and a constant of the converter's for Gemma."""
OURS = {"llama3-bpe-bf16": {"tokenizer.ggml.add_bos_token": False}}
"""This tokenizer puts no token before a text, and llama.cpp one before all of Llama 3's where it isn't told."""
_PLAIN = {4: "<I", 5: "<i", 6: "<f", 7: "<?"}
_SIZES = {0: (1, 4), 1: (1, 2), 8: (32, 34), 30: (1, 2)}
"""Type of a tensor -> (numbers in a block, its bytes)."""


class Reader:
    """GGUF read by the letter of its specification, apart from what writes it."""

    def __init__(self, path: Path) -> None:
        self.content, self.at = path.read_bytes(), 8
        assert self.content[:8] == b"GGUF" + struct.pack("<I", 3)
        tensors, values = self.number("<Q"), self.number("<Q")
        self.values = {self.text(): self.value(self.number("<I")) for _ in range(values)}
        table = [
            (self.text(), self.sizes(), self.number("<I"), self.number("<Q"))
            for _ in range(tensors)
        ]
        start = -(-self.at // 32) * 32
        self.tensors: dict[str, tuple[list[int], int, bytes]] = {}
        for name, sizes, kind, offset in table:
            assert offset % 32 == 0
            block, size = _SIZES[kind]
            count = int(np.prod(sizes)) // block * size
            self.tensors[name] = (
                sizes,
                kind,
                self.content[start + offset : start + offset + count],
            )

    def number(self, kind: str) -> Any:
        found = struct.unpack_from(kind, self.content, self.at)[0]
        self.at += struct.calcsize(kind)
        return found

    def text(self) -> str:
        size = self.number("<Q")
        self.at += size
        return self.content[self.at - size : self.at].decode()

    def sizes(self) -> list[int]:
        return [self.number("<Q") for _ in range(self.number("<I"))]

    def value(self, kind: int) -> Any:
        if kind == 9:
            inner, count = self.number("<I"), self.number("<Q")
            return [self.value(inner) for _ in range(count)]
        return self.text() if kind == 8 else self.number(_PLAIN[kind])


def written(source: Path, target: Path, *options: str) -> Reader:
    given = [word for option in options for word in ("--option", option)]
    outcome = run("convert", "--load-dir", source, "--saver", "gguf", "--save-dir", target, *given)
    assert outcome.status == 0, outcome
    return Reader(target / "model.gguf")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.stem)
def test_files_hold_what_llama_cpps_converter_writes(case: Path, tmp_path: Path) -> None:
    source = case.parent / "hf" if (case.parent / "hf").is_dir() else LLAMA
    expected = Reader(case)
    found = written(source, tmp_path / "out", f"gguf_type={case.stem.rpartition('-')[2]}")
    kept = {name: value for name, value in expected.values.items() if name not in NOT_WRITTEN}
    assert found.values == kept | OURS.get(case.stem, {})
    assert found.tensors.keys() == expected.tensors.keys()
    for name, tensor in expected.tensors.items():
        assert found.tensors[name] == tensor, name


def test_a_sharded_checkpoint_gives_the_same_gguf_as_its_hugging_face_form(tmp_path: Path) -> None:
    source = FIXTURES / "gguf-mixtral-spm" / "hf"
    megaconv.convert(source, tmp_path / "core", saver="core", tp=2, pp=2, ep=2)
    found, expected = written(tmp_path / "core", tmp_path / "a"), written(source, tmp_path / "b")
    assert (found.tensors, found.values) == (expected.tensors, expected.values)


def test_q8_0_rounds_halves_away_from_zero_and_keeps_zeros() -> None:
    block = np.zeros((3, 32), np.float32)
    block[0, :4] = 127, 0.5, -0.5, 2.5
    block[1, 0] = 1e-3
    made = q8_0(block)
    assert made[0, 2:6].view(np.int8).tolist() == [127, 1, -1, 3]
    assert made[0, :2].view(np.float16)[0] == 1
    assert not made[2].any()


def test_rows_that_are_no_whole_blocks_are_stored_in_16_bits(tmp_path: Path) -> None:
    found = written(
        write_llama(tmp_path / "in", ffn=112), tmp_path / "out", "gguf_type=q8_0", "tokenizer=none"
    )
    kinds = {name: kind for name, (_, kind, _) in found.tensors.items()}
    assert (
        kinds["blk.0.ffn_down.weight"],
        kinds["blk.0.ffn_up.weight"],
        kinds["output_norm.weight"],
    ) == (1, 8, 0)


def test_parameters_are_the_models_and_not_bytes_of_blocks(tmp_path: Path) -> None:
    source = write_llama(tmp_path / "in")
    place = (
        "--load-dir",
        source,
        "--saver",
        "gguf",
        "--save-dir",
        tmp_path / "out",
        "--option",
        "tokenizer=none",
    )
    outcome = run("convert", *place, "--option", "gguf_type=q8_0", "--json")
    assert json.loads(outcome.out)["parameters"] == megaconv.inspect(source).to_json()["parameters"]


def test_families_without_names_there_are_refused_with_the_list(tmp_path: Path) -> None:
    source = FIXTURES / "core-bert-tp2pp2" / "checkpoint"
    outcome = run(
        "convert", "--load-dir", source, "--saver", "gguf", "--save-dir", tmp_path / "out"
    )
    assert_refused(outcome, 2, "bert", "qwen3_moe", "--saver hf")


def test_gguf_refuses_missing_tokenizers_and_unknown_types_with_a_remedy(tmp_path: Path) -> None:
    source, place = write_llama(tmp_path / "in"), ("--save-dir", tmp_path / "out")
    command = ("convert", "--load-dir", source, "--saver", "gguf", *place)
    assert_refused(run(*command), 2, "tokenizer=none", "--config")
    assert_refused(run(*command, "--option", "gguf_type=q4_k"), 2, "q4_k", "q8_0")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("tokenizer=nonee",), "tokenizer=nonee: is not known; write none"),
        (("tokenizer=none", "tokenizer_pre=qwen2"), "no effect with --option tokenizer=none"),
        (("tokenizer_pre=qwen2",), "no effect on"),
    ],
)
def test_options_of_the_tokenizer_that_have_no_effect_are_refused(
    options: tuple[str, ...], words: str, tmp_path: Path
) -> None:
    """The source has a SentencePiece model, which llama.cpp splits by itself."""
    source = FIXTURES / "gguf-llama-spm/hf"
    given = [word for option in options for word in ("--option", option)]
    outcome = run("convert", source, tmp_path / "out", "--saver", "gguf", *given)
    assert_refused(outcome, 2, words)


@pytest.mark.parametrize("name", ["tiktoken.model", "qwen.tiktoken"])
def test_ranks_of_tiktoken_alone_are_refused_with_what_they_lack(name: str, tmp_path: Path) -> None:
    source = write_llama(tmp_path / "in")
    (source / name).write_text("IQ== 0\nIg== 1\n")
    outcome = run(
        "convert", "--load-dir", source, "--saver", "gguf", "--save-dir", tmp_path / "out"
    )
    assert_refused(
        outcome,
        2,
        name,
        "the special tokens, which are in",
        "tokenizer.json",
        "--option tokenizer=none",
    )


@pytest.mark.parametrize("number", [-5, float("nan"), float("inf"), 2.5, None])
@pytest.mark.parametrize("added", [True, False])
def test_a_wrong_number_of_a_token_is_refused_with_its_file(
    added: bool, number: float | None, tmp_path: Path
) -> None:
    """Python takes -5 for the fifth token from the end."""
    source = shutil.copytree(BPE, tmp_path / "in")
    file = source / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    if added:
        tokenizer["added_tokens"][0]["id"] = number
    else:
        tokenizer["model"]["vocab"]["!"] = number
    file.write_text(json.dumps(tokenizer))
    outcome = run("convert", source, tmp_path / "out", "--saver", "gguf")
    assert_refused(
        outcome, 3, f"{file}: token ", f"has the number {number}; expected a whole number"
    )


@pytest.mark.parametrize(("text", "is_left_out"), [("<|image|>", True), ("<|other|>", False)])
def test_a_token_after_the_last_row_is_left_out_if_it_stands_for_an_image(
    text: str, is_left_out: bool, tmp_path: Path
) -> None:
    """The Llama inside Llama 3.2 Vision has no row for this token, and its tokenizer has it."""
    source = shutil.copytree(BPE, tmp_path / "in")
    expected = written(source, tmp_path / "expected").values
    vocab = json.loads((source / "config.json").read_text())["vocab_size"]
    file = source / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    tokenizer["added_tokens"].append(
        {**tokenizer["added_tokens"][-1], "content": text, "id": vocab}
    )
    file.write_text(json.dumps(tokenizer))
    if is_left_out:
        assert written(source, tmp_path / "out").values == expected
        return
    outcome = run("convert", source, tmp_path / "out", "--saver", "gguf")
    message = f"{file}: the tokenizer has {vocab + 1} tokens, the embedding {vocab} rows"
    assert_refused(outcome, 3, message)


def test_a_tokenizer_that_splits_text_in_an_unknown_way_asks_for_its_name(tmp_path: Path) -> None:
    source = tmp_path / "in"
    source.mkdir()
    for path in BPE.iterdir():
        (source / path.name).write_bytes(path.read_bytes())
    file = source / "tokenizer.json"
    file.write_text(file.read_text().replace("{1,3}", "{1,4}"))
    outcome = run(
        "convert", "--load-dir", source, "--saver", "gguf", "--save-dir", tmp_path / "out"
    )
    assert_refused(outcome, 2, "tokenizer.json", "tokenizer_pre=NAME")
    assert (
        written(source, tmp_path / "named", "tokenizer_pre=mine").values["tokenizer.ggml.pre"]
        == "mine"
    )


WORDS = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
DIGITS = {"type": "Digits", "individual_digits": True}


@pytest.mark.parametrize(
    ("steps", "name"),
    [
        ([WORDS], "gpt-2"),
        ([DIGITS, WORDS], "starcoder"),
        ([{**DIGITS, "individual_digits": False}, WORDS], None),
        ([{"type": "Punctuation", "behavior": "Isolated"}, WORDS], None),
        ([{**WORDS, "add_prefix_space": True}], None),
        ([{**WORDS, "use_regex": False}], None),
    ],
)
def test_every_step_that_splits_text_counts(
    steps: list[dict[str, Any]], name: str | None, tmp_path: Path
) -> None:
    """StarCoder and SmolLM have each digit alone. As GPT-2's, llama.cpp would join them."""
    source = shutil.copytree(BPE, tmp_path / "in")
    file = source / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    tokenizer["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": steps}
    file.write_text(json.dumps(tokenizer))
    if name is None:
        outcome = run("convert", source, tmp_path / "out", "--saver", "gguf")
        assert_refused(outcome, 2, "tokenizer.json", "tokenizer_pre=NAME")
    else:
        assert written(source, tmp_path / "out").values["tokenizer.ggml.pre"] == name


def test_a_padding_token_of_minus_1_is_none(tmp_path: Path) -> None:
    source = with_config(tmp_path / "hf", pad_token_id=-1)
    megaconv.convert(source, tmp_path / "out", saver="gguf")
    values = Reader(tmp_path / "out" / "model.gguf").values
    assert "tokenizer.ggml.padding_token_id" not in values
    assert values["tokenizer.ggml.eos_token_id"] == 2


def test_positions_of_more_than_32_bits_are_refused(tmp_path: Path) -> None:
    source = with_config(tmp_path / "hf", max_position_embeddings=1 << 32)
    outcome = run("convert", source, tmp_path / "out", "--saver", "gguf")
    assert_refused(outcome, 2, "llama.context_length is 4,294,967,296", "config.json")


def with_config(target: Path, **changed: object) -> Path:
    """A Llama with other values in its config.json."""
    shutil.copytree(LLAMA, target)
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | changed))
    return target
