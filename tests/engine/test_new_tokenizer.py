"""`convert --tokenizer`: tokenizers with more tokens than the model, their files and the rows of new tokens."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import megaconv
from formats.small_files import SmallFile
from megaconv.engine.token_lists import kinds_of, token_list
from megaconv.errors import CorruptCheckpoint
from tests.models import write_llama
from tests.runs import assert_refused, run

WORDS = ("low", "er", "new", "Ġnew", "est", "wid")


def write_tokenizer(directory: Path, added: tuple[str, ...] = ()) -> Path:
    """A byte-level BPE of 263 tokens: each byte, six words that no text is split into, and a special token."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate([*letters, *WORDS])}
    made = Tokenizer(models.BPE(vocabulary, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken("</s>", special=True)])
    made.add_tokens(list(added))
    directory.mkdir(parents=True, exist_ok=True)
    made.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "PreTrainedTokenizerFast"}'
    )
    return directory


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model of 270 tokens, of which its tokenizer has 263."""
    made = write_llama(tmp_path / "hf", layers=2, vocab=270)
    write_tokenizer(made)
    (made / "chat_template.jinja").write_text("old")
    (made / "generation_config.json").write_text('{"eos_token_id": 262}')
    return made


def embedding(model: Path) -> torch.Tensor:
    return load_file(model / "model.safetensors")["model.embed_tokens.weight"]


@pytest.mark.parametrize("named", ["best", "iter_0000002", ""])
def test_the_tokenizer_may_be_that_of_a_run(named: str, model: Path, tmp_path: Path) -> None:
    """A Megatron run keeps it in hf/. The record names the iteration, because a later one may be the best."""
    run_directory = tmp_path / "tuned"
    new = write_tokenizer(run_directory / "hf", tuple(f"<tool_{n}>" for n in range(12)))
    (run_directory / "iter_0000002").mkdir()
    (run_directory / "best_checkpointed_iteration.txt").write_text("2")
    words = ["convert", model, tmp_path / "out", "--saver", "hf", "--tokenizer"]
    outcome = run(*words, run_directory / named)
    assert outcome.status == 0, outcome.err
    out = tmp_path / "out"
    assert embedding(out).shape[0] == 275
    assert (out / "tokenizer.json").read_bytes() == (new / "tokenizer.json").read_bytes()
    record = json.loads((out / "megaconv.json").read_text())
    recorded = "iter_0000002" if named else "tuned"
    assert record["provenance"]["options"]["--tokenizer"] == recorded


def test_a_run_without_a_best_iteration_is_named(model: Path, tmp_path: Path) -> None:
    (tmp_path / "tuned" / "iter_0000002").mkdir(parents=True)
    words = ["convert", model, tmp_path / "out", "--saver", "hf", "--tokenizer"]
    outcome = run(*words, tmp_path / "tuned" / "best")
    assert_refused(outcome, 2, "--tokenizer", "tuned/best: there is no", "--keep-best writes")


def test_a_model_gets_rows_for_the_new_tokens_of_its_tokenizer(model: Path, tmp_path: Path) -> None:
    new = write_tokenizer(tmp_path / "new", tuple(f"<tool_{n}>" for n in range(12)))
    (new / "chat_template.jinja").write_text("new")
    words = ["convert", model, tmp_path / "out", "--saver", "hf", "--tokenizer", new]
    outcome = run(*words)
    assert outcome.status == 0, outcome.err
    assert "embedding and head get 5 new rows (270 to 274): the mean of all old rows" in outcome.err
    out = tmp_path / "out"
    assert embedding(out).shape[0] == 275
    assert torch.equal(embedding(out)[:270], embedding(model))
    assert json.loads((out / "config.json").read_text())["vocab_size"] == 275
    assert (out / "tokenizer.json").read_bytes() == (new / "tokenizer.json").read_bytes()
    assert (out / "chat_template.jinja").read_text() == "new"
    assert (out / "generation_config.json").read_text() == '{"eos_token_id": 262}'
    record = json.loads((out / "megaconv.json").read_text())
    assert record["provenance"]["options"]["--tokenizer"] == "new"


def test_a_tokenizer_that_fits_adds_no_rows_and_a_size_may_be_larger(
    model: Path, tmp_path: Path
) -> None:
    new = write_tokenizer(tmp_path / "new", ("<tool>",))
    words = ["convert", model, tmp_path / "out", "--saver", "hf", "--tokenizer", new]
    outcome = run(*words)
    assert (outcome.status, embedding(tmp_path / "out").shape[0]) == (0, 270)
    assert "new row" not in outcome.err
    assert run(*words, "--vocab-size", 320, "--overwrite").status == 0
    assert embedding(tmp_path / "out").shape[0] == 320
    refused = run(*words, "--vocab-size", 263, "--overwrite")
    assert_refused(refused, 2, "--vocab-size 263: the tokenizer in", "needs 264 rows or more")


def test_new_rows_are_the_mean_of_the_tokens_that_a_text_had(tmp_path: Path) -> None:
    model = write_tokenizer(write_llama(tmp_path / "hf", layers=2, vocab=263, tied=True))
    new = write_tokenizer(tmp_path / "new", ("<low>", "é "))
    words = ["convert", model, tmp_path / "out", "--saver", "hf", "--tokenizer", new]
    outcome = run(*words, "--new-rows", "pieces")
    assert outcome.status == 0, outcome.err
    assert "the mean of its text's old tokens (2 of 2)" in outcome.err
    from tokenizers import Tokenizer

    old = Tokenizer.from_file(str(model / "tokenizer.json"))
    rows = embedding(tmp_path / "out")
    for number, text in ((263, "<low>"), (264, "é ")):
        pieces = old.encode(text).ids
        assert len(pieces) > 1
        assert torch.equal(rows[number], rows[pieces].double().mean(0).bfloat16())


def test_a_text_without_pieces_gets_the_mean_of_all(tmp_path: Path) -> None:
    model = write_tokenizer(write_llama(tmp_path / "hf", layers=2, vocab=263))
    new = write_tokenizer(tmp_path / "new", ("<low>",))
    words = ["convert", model, tmp_path / "out", "--saver", "hf", "--tokenizer", new]
    assert run(*words, "--vocab-size", 270, "--new-rows", "pieces").status == 0
    rows = embedding(tmp_path / "out")
    assert torch.equal(rows[264], rows[269])
    assert not torch.equal(rows[263], rows[264])


def test_a_token_that_moves_is_refused(model: Path, tmp_path: Path) -> None:
    new = write_tokenizer(tmp_path / "new")
    raw = json.loads((new / "tokenizer.json").read_text())
    vocabulary = raw["model"]["vocab"]
    vocabulary["A"], vocabulary["B"] = vocabulary["B"], vocabulary["A"]
    (new / "tokenizer.json").write_text(json.dumps(raw))
    words = ["convert", model, tmp_path / "out", "--saver", "hf", "--tokenizer", new]
    assert_refused(run(*words), 2, "is 'B', and is 'A' in the tokenizer of", "keep their numbers")
    (model / "tokenizer.json").unlink()
    outcome = run(*words)
    assert outcome.status == 0
    assert "can't be compared with the tokenizer of" in outcome.err


def test_a_renamed_added_token_is_named(model: Path, tmp_path: Path) -> None:
    new = write_tokenizer(tmp_path / "new")
    text = (new / "tokenizer.json").read_text().replace("</s>", "<end>")
    (new / "tokenizer.json").write_text(text)
    outcome = run("convert", model, tmp_path / "out", "--saver", "hf", "--tokenizer", new)
    assert outcome.status == 0
    assert "1 added token has another text" in outcome.err
    assert "token 262 is '<end>', was '</s>'" in outcome.err


def test_a_directory_without_a_tokenizer_is_refused(model: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    words = ["convert", model, tmp_path / "out", "--saver", "hf", "--tokenizer"]
    assert_refused(run(*words, tmp_path / "empty"), 2, "has no tokenizer.json, tokenizer.model")


def test_the_tokenizer_of_a_megatron_checkpoint_is_replaced(model: Path, tmp_path: Path) -> None:
    assert run("convert", model, tmp_path / "core", "--saver", "core", "--tp", "2").status == 0
    new = write_tokenizer(tmp_path / "new", tuple(f"<tool_{n}>" for n in range(12)))
    words = ["convert", tmp_path / "core", tmp_path / "more", "--saver", "core", "--tp", "4"]
    assert run(*words, "--tokenizer", new, "--new-rows", "pieces").status == 0
    assert run("convert", tmp_path / "more", tmp_path / "back", "--saver", "hf").status == 0
    back = tmp_path / "back"
    assert (back / "tokenizer.json").read_bytes() == (new / "tokenizer.json").read_bytes()
    megaconv.convert(model, tmp_path / "more_hf", saver="hf", tokenizer=new, new_rows="pieces")
    assert torch.equal(embedding(back), embedding(tmp_path / "more_hf"))


def name_end(directory: Path, text: str) -> Path:
    """Let a tokenizer end texts with a token."""
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": {"content": text}}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory


def ends(model: Path) -> list[Any]:
    """What config.json and generation_config.json say of the end of a text."""
    names = ("config.json", "generation_config.json")
    return [json.loads((model / name).read_text())["eos_token_id"] for name in names]


@pytest.mark.parametrize(
    ("before", "expected"), [(2, [263, [263, 262]]), ([2, 5], [[263, 2, 5], [263, 262]])]
)
def test_a_new_end_of_texts_is_one_of_the_model_too(
    before: Any, expected: list[Any], model: Path, tmp_path: Path
) -> None:
    config = json.loads((model / "config.json").read_text()) | {"eos_token_id": before}
    (model / "config.json").write_text(json.dumps(config))
    name_end(model, "</s>")
    new = name_end(write_tokenizer(tmp_path / "new", ("<end>",)), "<end>")
    words = ["convert", model, tmp_path / "out", "--saver", "hf", "--tokenizer", new]
    outcome = run(*words)
    assert outcome.status == 0, outcome.err
    assert f"eos_token_id is 263 now ('<end>'), as in {new}; it was " in outcome.err
    assert ends(tmp_path / "out") == expected
    assert run("convert", model, tmp_path / "core", "--saver", "core").status == 0
    again = ["convert", tmp_path / "core", tmp_path / "back", "--saver", "hf", "--tokenizer", new]
    assert run(*again).status == 0
    assert ends(tmp_path / "back") == expected


def test_special_tokens_that_the_old_tokenizer_named_stay(model: Path, tmp_path: Path) -> None:
    name_end(model, "</s>")
    new = name_end(write_tokenizer(tmp_path / "new", ("<end>",)), "</s>")
    words = ["convert", model, tmp_path / "out", "--saver", "hf", "--tokenizer", new]
    outcome = run(*words)
    assert outcome.status == 0
    assert "eos_token_id" not in outcome.err
    assert ends(tmp_path / "out") == [2, 262]


def test_an_end_that_has_another_number_is_the_new_one(model: Path, tmp_path: Path) -> None:
    config = json.loads((model / "config.json").read_text()) | {"eos_token_id": 263}
    (model / "config.json").write_text(json.dumps(config))
    name_end(write_tokenizer(model, ("<end>",)), "<end>")
    new = name_end(write_tokenizer(tmp_path / "new", ("<start>", "<end>")), "<end>")
    words = ["convert", model, tmp_path / "out", "--saver", "hf", "--tokenizer", new]
    assert run(*words).status == 0
    assert ends(tmp_path / "out") == [264, [264, 262]]


def test_generation_settings_get_an_end_that_the_model_has(model: Path, tmp_path: Path) -> None:
    config = json.loads((model / "config.json").read_text()) | {"eos_token_id": 263}
    (model / "config.json").write_text(json.dumps(config))
    name_end(model, "</s>")
    new = name_end(write_tokenizer(tmp_path / "new", ("<end>",)), "<end>")
    words = ["convert", model, tmp_path / "out", "--saver", "hf", "--tokenizer", new]
    outcome = run(*words)
    assert outcome.status == 0
    assert "generation_config.json: has other numbers now (eos_token_id)" in outcome.err
    assert ends(tmp_path / "out") == [263, [263, 262]]
    words = ["convert", tmp_path / "out", tmp_path / "back", "--saver", "hf", "--tokenizer", model]
    assert run(*words, "--vocab-size", 263).status == 0
    assert ends(tmp_path / "back") == [262, 262]


def test_without_generation_settings_the_model_keeps_the_old_end(
    model: Path, tmp_path: Path
) -> None:
    (model / "generation_config.json").unlink()
    new = name_end(write_tokenizer(tmp_path / "new", ("<end>",)), "<end>")
    words = ["convert", model, tmp_path / "out", "--saver", "hf", "--tokenizer", new]
    assert run(*words).status == 0
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["eos_token_id"] == [263, 2]


@pytest.mark.parametrize("decoder", [False, True])
def test_files_that_name_special_tokens_rank_as_in_transformers(
    decoder: bool, model: Path, tmp_path: Path
) -> None:
    new = name_end(write_tokenizer(tmp_path / "new", ("<end>",)), "</s>")
    (new / "special_tokens_map.json").write_text('{"eos_token": "<end>"}')
    if decoder:
        settings = json.loads((new / "tokenizer_config.json").read_text())
        settings["added_tokens_decoder"] = {"263": {"content": "<end>"}}
        (new / "tokenizer_config.json").write_text(json.dumps(settings))
    words = ["convert", model, tmp_path / "out", "--saver", "hf", "--tokenizer", new]
    assert run(*words).status == 0
    assert ends(tmp_path / "out")[0] == (262 if decoder else 263)


@pytest.mark.parametrize("settings", [{"pad_token": "<p>"}, {"extra_special_tokens": ["<p>"]}])
def test_a_special_token_without_a_number_is_refused(
    settings: dict[str, Any], model: Path, tmp_path: Path
) -> None:
    new = write_tokenizer(tmp_path / "new")
    (new / "tokenizer_config.json").write_text(json.dumps(settings))
    words = ["convert", model, tmp_path / "out", "--saver", "hf", "--tokenizer", new]
    assert_refused(run(*words), 2, "its settings name '<p>', which is no token with a number")


def test_a_damaged_tokenizer_is_replaced(model: Path, tmp_path: Path) -> None:
    new = write_tokenizer(tmp_path / "new")
    (model / "special_tokens_map.json").write_text("{")
    words = ["convert", model, tmp_path / "out", "--saver", "hf", "--tokenizer", new]
    outcome = run(*words)
    assert outcome.status == 0, outcome.err
    assert "can't be compared with the tokenizer of" in outcome.err
    assert not (tmp_path / "out" / "special_tokens_map.json").exists()


def test_rows_that_the_model_has_are_filled_if_asked_for(model: Path, tmp_path: Path) -> None:
    new = write_tokenizer(tmp_path / "new", ("<tool>", "<end>"))
    words = ["convert", model, tmp_path / "out", "--saver", "hf", "--tokenizer", new]
    outcome = run(*words)
    assert (
        "2 new tokens take rows that the model has already (263 to 264), with their" in outcome.err
    )
    assert torch.equal(embedding(tmp_path / "out"), embedding(model))
    outcome = run(*words, "--new-rows", "pieces", "--overwrite", "--verify")
    assert outcome.status == 0, outcome.err
    assert "2 rows of new tokens (263 to 264) in embedding and head: the mean of" in outcome.err
    from tokenizers import Tokenizer

    old, rows = Tokenizer.from_file(str(model / "tokenizer.json")), embedding(tmp_path / "out")
    assert torch.equal(rows[:263], embedding(model)[:263])
    assert torch.equal(rows[265:], embedding(model)[265:])
    pieces = embedding(model)[old.encode("<tool>").ids].double().mean(0).bfloat16()
    assert torch.equal(rows[263], pieces)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("added_tokens.json", '{"x": null}'),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"-1": {"content": "x"}}}'),
    ],
)
def test_the_file_with_a_wrong_number_is_named(
    name: str, content: str, model: Path, tmp_path: Path
) -> None:
    new = write_tokenizer(tmp_path / "new")
    (new / name).write_text(content)
    words = ["convert", model, tmp_path / "out", "--saver", "hf", "--tokenizer", new]
    assert_refused(run(*words), 3, f"{new / name}: has a value of a wrong kind")


@pytest.mark.parametrize("content", ["[]", "{", '{"eos_token": {"text": "x"}}'])
def test_damaged_settings_of_a_tokenizer_are_one_line(
    content: str, model: Path, tmp_path: Path
) -> None:
    new = write_tokenizer(tmp_path / "new", ("<end>",))
    (new / "tokenizer_config.json").write_text(content)
    words = ["convert", model, tmp_path / "out", "--saver", "hf", "--tokenizer", new]
    assert_refused(run(*words), 3, "tokenizer_config.json")


def test_tokens_that_only_a_tokenizer_json_has_get_rows(tmp_path: Path) -> None:
    """transformers 5 lists added tokens in tokenizer.json alone, also beside a tokenizer.model."""
    pieces = b"".join(_piece(text.encode()) for text in ("<unk>", "a", "b"))
    model = write_llama(tmp_path / "hf", layers=2, vocab=3, extra_config={"eos_token_id": 1})
    new = tmp_path / "new"
    new.mkdir()
    for directory in (model, new):
        (directory / "tokenizer.model").write_bytes(pieces)
    content = {
        "model": {"vocab": {"<unk>": 0, "a": 1, "b": 2}},
        "added_tokens": [{"id": 3, "content": "<t>"}],
    }
    (new / "tokenizer.json").write_text(json.dumps(content))
    words = ["convert", model, tmp_path / "out", "--saver", "hf", "--tokenizer", new]
    outcome = run(*words)
    assert outcome.status == 0, outcome.err
    assert embedding(tmp_path / "out").shape[0] == 4


def test_padding_and_truncation_of_a_tokenizer_do_not_change_pieces(tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    model = write_tokenizer(write_llama(tmp_path / "hf", layers=2, vocab=263))
    plain = Tokenizer.from_file(str(model / "tokenizer.json"))
    padded = Tokenizer.from_file(str(model / "tokenizer.json"))
    padded.enable_padding(length=32)
    padded.enable_truncation(3)
    padded.save(str(model / "tokenizer.json"))
    new = write_tokenizer(tmp_path / "new", ("<wider>",))
    words = ["convert", model, tmp_path / "out", "--saver", "hf", "--tokenizer", new]
    assert run(*words, "--new-rows", "pieces").status == 0
    rows = embedding(tmp_path / "out")
    expected = rows[plain.encode("<wider>").ids].double().mean(0).bfloat16()
    assert torch.equal(rows[263], expected)


@pytest.mark.parametrize("kind", ["WordPiece", "Unigram"])
def test_the_token_for_unknown_text_is_no_piece(kind: str, tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    texts = ["[UNK]", "ab", "cd"]
    if kind == "WordPiece":
        inner: Any = models.WordPiece({text: n for n, text in enumerate(texts)}, unk_token="[UNK]")
    else:
        inner = models.Unigram([(text, -1.0) for text in texts], 0)
    made = Tokenizer(inner)
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    model = write_llama(tmp_path / "hf", layers=2, vocab=3, extra_config={"eos_token_id": 1})
    made.save(str(model / "tokenizer.json"))
    made.add_tokens(["ab cd", "zz", "zz ab"])
    (tmp_path / "new").mkdir()
    made.save(str(tmp_path / "new" / "tokenizer.json"))
    words = ["convert", model, tmp_path / "out", "--saver", "hf", "--tokenizer", tmp_path / "new"]
    outcome = run(*words, "--new-rows", "pieces")
    assert outcome.status == 0, outcome.err
    assert "the mean of its text's old tokens (2 of 3), or of all" in outcome.err
    rows = embedding(tmp_path / "out")
    assert torch.equal(rows[3], rows[1:3].double().mean(0).bfloat16())
    assert torch.equal(rows[4], rows[:3].double().mean(0).bfloat16())
    assert torch.equal(rows[5], rows[1])


def test_a_text_that_is_none_in_utf_8_has_no_pieces(model: Path, tmp_path: Path) -> None:
    new = write_tokenizer(tmp_path / "new")
    (new / "added_tokens.json").write_text('{"\\ud800": 270}')
    words = ["convert", model, tmp_path / "out", "--saver", "hf", "--tokenizer", new]
    assert_refused(
        run(*words, "--new-rows", "pieces"), 3, "no text in UTF-8; choose --new-rows mean"
    )
    assert run(*words).status == 0


def test_rows_in_use_are_not_taken_away(model: Path, tmp_path: Path) -> None:
    words = ["convert", model, tmp_path / "out", "--saver", "hf", "--vocab-size"]
    assert_refused(run(*words, 200), 2, "the model's tokenizer needs 263 rows or more")
    assert run(*words, 263).status == 0
    config = json.loads((model / "config.json").read_text()) | {"pad_token_id": 269}
    (model / "config.json").write_text(json.dumps(config))
    words[2] = tmp_path / "other"
    named = f"config.json of {model} names the token 269; choose 270 or more"
    assert_refused(run(*words, 263), 2, named)
    (model / "config.json").write_text(json.dumps(config | {"pad_token_id": 10**12}))
    assert_refused(run(*words, 263), 2, f"{model} names the token 1000000000000; correct the file")
    (model / "config.json").write_text(json.dumps(config | {"pad_token_id": None}))
    (model / "generation_config.json").write_text('{"eos_token_id": [2, 268]}')
    assert_refused(run(*words, 263), 2, f"generation_config.json of {model} names the token 268")


def test_the_file_of_a_tokenizer_asks_for_its_directory(model: Path, tmp_path: Path) -> None:
    words = ["convert", model, tmp_path / "out", "--saver", "hf", "--tokenizer"]
    refused = run(*words, model / "tokenizer.json")
    assert_refused(refused, 2, f"is a file; give the directory of the tokenizer, {model}")


def test_tokens_without_rows_of_a_made_tokenizer_are_named(model: Path, tmp_path: Path) -> None:
    assert (
        run(
            "convert",
            model,
            tmp_path / "m.gguf",
            "--saver",
            "gguf",
            "--option",
            "tokenizer_pre=gpt-2",
        ).status
        == 0
    )
    words = ["convert", tmp_path / "m.gguf", tmp_path / "out", "--saver", "hf", "--vocab-size", 200]
    assert_refused(run(*words), 2, "the model's tokenizer needs")


def _piece(text: bytes) -> bytes:
    inner = b"\x0a" + bytes([len(text)]) + text
    return b"\x0a" + bytes([len(inner)]) + inner


FILES: dict[str, tuple[bytes, dict[int, str]]] = {
    "tokenizer.model": (_piece(b"<s>") + _piece(b"a"), {0: "<s>", 1: "a"}),
    "tokenizer.model, tiktoken": (b"YQ== 0\nYg== 1\n", {0: "YQ==", 1: "Yg=="}),
    "vocab.json": (b'{"b": 1, "a": 0}', {0: "a", 1: "b"}),
    "vocab.txt": ("[PAD]\r\na\u2028b\nc\n".encode(), {0: "[PAD]", 1: "a\u2028b", 2: "c"}),
    "tokenizer.json": (b'{"model": {"vocab": [["x", -1.0], ["y", -2.0]]}}', {0: "x", 1: "y"}),
}


@pytest.mark.parametrize("kind", FILES)
def test_tokens_are_listed_from_each_kind_of_file(kind: str) -> None:
    content, expected = FILES[kind]
    kind = kind.partition(",")[0]
    contents = {kind: content, "added_tokens.json": b'{"<t>": 9}'}
    contents["tokenizer_config.json"] = b'{"added_tokens_decoder": {"8": {"content": "<u>"}}}'
    files = {name: SmallFile.of(name, each) for name, each in contents.items()}
    assert kinds_of(files) == [kind]
    found = token_list(files, kind)
    assert dict(found.usual) == expected
    assert dict(found.added) == {8: "<u>", 9: "<t>"}
    assert found.count == 10


@pytest.mark.parametrize(
    "content",
    [
        b"[]",
        b"{}",
        b'{"model": []}',
        b'{"model": {"vocab": {}}}',
        b'{"model": {"vocab": {"a": -1}}}',
        b'{"model": {"vocab": {"a": 1.5}}}',
        b'{"model": {"vocab": {"a": true}}}',
        b'{"model": {"vocab": {"a": 1e400}}}',
        b'{"model": {"vocab": {"a": 99999999999}}}',
        b'{"model": {"vocab": [1]}}',
        b'{"model": {"vocab": {"a": 0}}, "added_tokens": [{"id": "x", "content": "y"}]}',
        b'{"model": {"vocab": {"a": 0}}, "added_tokens": 5}',
        b'{"model": {"vocab": {"a": 0}}, "added_tokens": [{"id": 99999999, "content": "y"}]}',
        b"[" * 100_000,
        b"\xff",
    ],
)
def test_damaged_files_are_one_line(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    file.write_bytes(content)
    with pytest.raises(CorruptCheckpoint, match=r"tokenizer\.json"):
        token_list({"tokenizer.json": SmallFile.of("tokenizer.json", file)}, "tokenizer.json")
