"""generate, chat and score from the command line: what they print, and what they refuse."""

import io
import json
import re
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from megaconv.terminal import one_line
from megatron_lite.cli import main
from megatron_lite.inference import batching, opening, sampling
from megatron_lite.inference.model import EngineModel
from megatron_lite.processes import launch
from tests.trainer.inference.conversations import decoded, save
from tests.trainer.inference.models import slots_of
from tests.trainer.inference.serving import ForkedServing
from tests.trainer.loop.launches import train

pytestmark = pytest.mark.oracle


NUMBERS = ("--tokenizer-type", "NullTokenizer")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    directory = tmp_path_factory.mktemp("chat")
    return directory, save(directory)


@pytest.fixture(autouse=True)
def _failures_leave_the_tests_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "leave", sys.exit)


def run(*words: object) -> int:
    with pytest.raises(SystemExit) as end:
        main([str(word) for word in words])
    return int(end.value.code or 0)


def continued(directory: Path, model: Any, text: str, count: int, **settings: Any) -> Any:
    from transformers import AutoTokenizer

    ids = AutoTokenizer.from_pretrained(directory)(text, return_tensors="pt").input_ids
    found = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=count,
        do_sample=False,
        pad_token_id=0,
        **settings,
    )
    return found[:, ids.shape[1] :].tolist()


def test_generate_prints_what_transformers_continues(
    model: tuple[Path, Any], capfd: pytest.CaptureFixture[str]
) -> None:
    directory, theirs = model
    assert run("generate", "--load", directory, "Hello", "--max-new-tokens", 12) == 0
    expected = decoded(directory, continued(directory, theirs, "Hello", 12)[0])
    assert capfd.readouterr().out == f"Hello{expected}\n"


def test_the_model_may_be_the_first_word(
    model: tuple[Path, Any], capfd: pytest.CaptureFixture[str]
) -> None:
    directory, _ = model
    asked = ("Hello", "--max-new-tokens", 12)
    assert run("generate", directory, *asked) == 0
    short = capfd.readouterr().out
    assert run("generate", *asked, "--load", directory) == 0
    assert short == capfd.readouterr().out != ""


def test_generate_writes_answers_in_the_order_of_the_prompts(
    model: tuple[Path, Any], tmp_path: Path
) -> None:
    directory, theirs = model
    prompts = ["one", "Grüße", "a much longer prompt than the others", "x"]
    (tmp_path / "prompts.jsonl").write_text(
        "".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts)
    )
    files = ("--prompts-file", tmp_path / "prompts.jsonl", "--output", tmp_path / "answers.jsonl")
    assert (
        run(
            "generate",
            "--load",
            directory,
            "--max-new-tokens",
            9,
            "--slots",
            3,
            "--log-probs",
            2,
            *files,
        )
        == 0
    )
    lines = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    assert [line["prompt"] for line in lines] == prompts
    for line in lines:
        assert line["tokens"] == continued(directory, theirs, line["prompt"], 9)[0]
        assert len(line["log_probs"]) == len(line["tokens"]) == len(line["top_log_probs"])


def test_a_pipe_has_json_lines_if_its_first_line_is_an_object(
    model: tuple[Path, Any], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {}
    for text in ('{"prompt": "one"}\n{"prompt": "two"}\n', "one\ntwo\n"):
        monkeypatch.setattr(sys, "stdin", io.StringIO(text))
        assert run("generate", model[0], "--prompts-file", "-", "--output", "-") == 0
        found[text] = capfd.readouterr().out
    assert len(set(found.values())) == 1


def test_a_byte_order_mark_is_no_part_of_the_input(
    model: tuple[Path, Any], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "windows.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "Hello", "completion": " you"}\r\n')
    assert run("generate", model[0], "--prompts-file", path, "--output", "-") == 0
    assert json.loads(capfd.readouterr().out)["prompt"] == "Hello"
    assert run("score", model[0], "--input", path) == 0
    assert json.loads(capfd.readouterr().out)["tokens"]


@pytest.mark.parametrize("command", ["generate MODEL Hello", "evaluate MODEL --corpus TEXT"])
def test_rows_beyond_the_positions_of_rope_get_one_warning(
    model: tuple[Path, Any], tmp_path: Path, capfd: pytest.CaptureFixture[str], command: str
) -> None:
    (tmp_path / "text.txt").write_text("Hello you")
    places = {"MODEL": str(model[0]), "TEXT": str(tmp_path / "text.txt")}
    words = [places.get(word, word) for word in command.split()]
    for length, count in ((96, 0), (97, 1)):
        assert run(*words, "--max-length", length) == 0
        warning = f"--max-length {length} exceeds the model's 96 positions"
        assert capfd.readouterr().err.count(warning) == count


def test_generate_prints_beams(model: tuple[Path, Any], capfd: pytest.CaptureFixture[str]) -> None:
    directory, theirs = model
    assert run("generate", "--load", directory, "Hello", "--max-new-tokens", 6, "--beams", 3) == 0
    rows = continued(directory, theirs, "Hello", 6, num_beams=3, num_return_sequences=3)
    assert [line[11:] for line in capfd.readouterr().out.splitlines()] == [
        one_line("Hello" + decoded(directory, row)) for row in rows
    ]


@pytest.mark.parametrize(
    ("words", "rows"),
    [("score --input {rows} --output {out}", 0), ("chat --max-new-tokens 2", 1)],
)
def test_a_command_has_memory_for_the_rows_that_it_generates(
    model: tuple[Path, Any],
    words: str,
    rows: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """score generates none, and chat one at a time."""
    sizes = []

    class Recorded(EngineModel):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            sizes.append(self.cache.bytes())

    monkeypatch.setattr(opening, "EngineModel", Recorded)
    monkeypatch.setattr(sys, "stdin", io.StringIO("how are you\n"))
    file = tmp_path / "rows.jsonl"
    file.write_text('{"tokens": [1, 2, 3]}')
    command, *more = words.format(rows=file, out=tmp_path / "out").split()
    assert run(command, model[0], *more) == 0
    assert run("generate", model[0], "how", "--max-new-tokens", 1, "--slots", 1) == 0
    alone, of_a_row = sizes
    assert alone == rows * of_a_row
    for flag in ("--slots", "--max-length")[: 2 - rows]:
        assert run(command, model[0], *more, flag, 3) == 2
        assert f"unrecognized arguments: {flag}" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_flags_of_samples_without_a_temperature_are_named(
    command: str,
    model: tuple[Path, Any],
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    directory, _ = model
    monkeypatch.setattr(sys, "stdin", io.StringIO("a"))
    words = [command, "--load", directory, *(["Hello"] if command == "generate" else ["--raw"])]
    flags = ["--top-k", 40, "--min-p", 0.1, "--max-new-tokens", 1]
    assert run(*words, *flags) == 0
    said = "without effect here: --top-k, --min-p; samples need a --temperature above 0\n"
    assert capfd.readouterr().err == said
    assert run(*words, *flags, "--temperature", 1) == 0
    assert capfd.readouterr().err == ""


def test_a_stop_word_ends_an_answer(
    model: tuple[Path, Any], capfd: pytest.CaptureFixture[str]
) -> None:
    directory, theirs = model
    whole = decoded(directory, continued(directory, theirs, "Hello", 12)[0])
    word = whole[5:7]
    assert (
        run("generate", "--load", directory, "Hello", "--max-new-tokens", 12, "--stop", word) == 0
    )
    assert capfd.readouterr().out == f"Hello{whole[: whole.index(word)]}\n"


def test_chats_of_a_file_are_answered_by_the_chat_template(
    model: tuple[Path, Any], tmp_path: Path
) -> None:
    """The answer that a record ends with is the reference. Paired with it, a user can judge the model's own."""
    directory, theirs = model
    asked = [{"role": "user", "content": "hi"}]
    records: list[Any] = [
        {"messages": [*asked, {"role": "assistant", "content": "hello"}]},
        {"conversations": [{"from": "human", "value": "and then?"}], "system": "be brief"},
        {"prompt": "Hello"},
    ]
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, records)))
    words = ("--prompts-file", tmp_path / "in.jsonl", "--output", tmp_path / "out.jsonl")
    assert run("generate", "--load", directory, *words, "--max-new-tokens", 8) == 0
    found = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    begins = [
        "<|user|>hi<|end|><|assistant|>",
        "<|system|>be brief<|end|><|user|>and then?<|end|><|assistant|>",
        "Hello",
    ]
    for line, begin in zip(found, begins, strict=True):
        assert line["text"] == decoded(directory, continued(directory, theirs, begin, 8)[0])
    assert [line["prompt"] for line in found] == ["hi", "and then?", "Hello"]
    assert [line.get("reference") for line in found] == ["hello", None, None]


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        (
            {"messages": [{"role": "assistant", "content": "a"}]},
            "has no message of the user to answer",
        ),
        ({"text": "a"}, 'has "text"; expected "prompt", or a chat ("messages")'),
        ({"messages": []}, 'its "messages" should be a list of messages'),
        ({"prompt": 3}, "the prompt should be text, found 3"),
        ([1], 'expected an object with "prompt" or "messages", found \'[1]\''),
    ],
)
def test_other_records_are_refused(
    record: Any,
    expected: str,
    model: tuple[Path, Any],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text(json.dumps(record))
    assert run("generate", "--load", model[0], "--prompts-file", path) == 2
    assert capfd.readouterr().err.endswith(f"{path}:1: {expected}\n")


def test_chat_remembers_what_was_said(
    model: tuple[Path, Any], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, theirs = model
    monkeypatch.setattr(sys, "stdin", io.StringIO("hi\nand then?\n"))
    assert run("chat", "--load", directory, "--system", "be brief", "--max-new-tokens", 8) == 0
    begin = "<|system|>be brief<|end|><|user|>hi<|end|><|assistant|>"
    first = decoded(directory, continued(directory, theirs, begin, 8)[0])
    second = continued(
        directory, theirs, f"{begin}{first}<|end|><|user|>and then?<|end|><|assistant|>", 8
    )[0]
    assert capfd.readouterr().out == f"{first}\n{decoded(directory, second)}\n"


def test_texts_are_continued_without_a_template(
    model: tuple[Path, Any], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoTokenizer

    directory, theirs = model
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hello\n\n/quit\nnever\n"))
    assert run("chat", "--load", directory, "--raw", "--max-new-tokens", 8) == 0
    first = decoded(directory, continued(directory, theirs, "Hello", 8)[0])
    tokenizer = AutoTokenizer.from_pretrained(directory)
    start = tokenizer.bos_token or tokenizer.eos_token
    second = decoded(directory, continued(directory, theirs, start, 8)[0])
    assert capfd.readouterr().out == f"{first}\n{second}\n"
    assert run("chat", "--load", directory, "--raw", "--system", "x") == 2
    assert "leave --system out" in capfd.readouterr().err


@pytest.mark.parametrize("more", [[], ["--raw"]])
def test_a_line_that_is_not_utf8_is_left_out_and_the_chat_goes_on(
    more: list[str],
    model: tuple[Path, Any],
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    outputs = []
    for typed in (b"hi\n", b"caf\xe9\nhi\n"):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(typed), "utf-8", "strict"))
        assert run("chat", "--load", model[0], "--max-new-tokens", 8, *more) == 0
        outputs.append(capfd.readouterr())
    assert outputs[0].out == outputs[1].out
    assert outputs[1].err == "the line has bytes that are not UTF-8; it was left out\n"


def test_a_conversation_with_half_a_character_is_refused_by_its_reason(
    model: tuple[Path, Any], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    assert run("chat", "--load", model[0], "--system", "caf\udce9") == 2
    assert "half of a surrogate pair, which is no character" in capfd.readouterr().err


def test_an_interrupted_answer_ends_and_the_conversation_continues(
    model: tuple[Path, Any], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, theirs = model
    monkeypatch.setattr(sys, "stdin", io.StringIO("hi\n/new\nhi\n"))
    asked = []

    def choose(*given: Any, **more: Any) -> int:
        asked.append(1)
        if len(asked) == 3:
            signal.raise_signal(signal.SIGINT)
        return sampling.choose(*given)

    monkeypatch.setattr(batching, "choose", choose)
    assert run("chat", "--load", directory, "--max-new-tokens", 8) == 0
    whole = continued(directory, theirs, "<|user|>hi<|end|><|assistant|>", 8)[0]
    assert (
        capfd.readouterr().out == f"{decoded(directory, whole[:3])}\n{decoded(directory, whole)}\n"
    )


def test_score_gives_the_log_probability_of_each_token(
    model: tuple[Path, Any], tmp_path: Path
) -> None:
    directory, theirs = model
    rows = [[7, 9, 30, 31], [100, 5], list(range(4, 40))]
    lines = [json.dumps({"tokens": row}) for row in rows] + [
        json.dumps({"prompt": "ab", "completion": "cd"})
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    assert (
        run(
            "score",
            "--load",
            directory,
            "--input",
            tmp_path / "rows.jsonl",
            "--output",
            tmp_path / "out.jsonl",
            "--top",
            2,
        )
        == 0
    )
    found = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    for row, line, expected in zip(rows, found, slots_of(theirs).score(rows, 2), strict=False):
        assert line["tokens"] == row[1:]
        assert line["log_probs"] == pytest.approx(expected.log_probs.tolist(), abs=1e-4)
        assert line["sum"] == pytest.approx(float(expected.log_probs.sum()), abs=1e-3)
        assert [token for token, _ in line["top_log_probs"][0]] == expected.top_ids[0].tolist()
    assert len(found[-1]["tokens"]) == len(found[-1]["log_probs"]) == 2


def test_token_ids_are_continued_without_a_tokenizer(
    model: tuple[Path, Any], tmp_path: Path
) -> None:
    directory, theirs = model
    words = (
        "--tokenizer-type",
        "NullTokenizer",
        "--output",
        tmp_path / "out.jsonl",
        "--max-new-tokens",
        5,
    )
    assert run("generate", "--load", directory, "7 9 30", *words) == 0
    found = theirs.generate(
        torch.tensor([[7, 9, 30]]), max_new_tokens=5, do_sample=False, pad_token_id=0
    )
    line = json.loads((tmp_path / "out.jsonl").read_text())
    assert line["tokens"] == found[0, 3:].tolist()
    assert line["prompt"] + line["text"] == " ".join(map(str, [7, 9, 30, *line["tokens"]]))


def test_the_server_separates_prompt_and_answer(model: tuple[Path, Any]) -> None:
    server = ForkedServing(model[0], *NUMBERS)
    try:
        asked = {"prompt": [7, 9, 30], "max_tokens": 3, "temperature": 0}
        answers = [
            server.ask("/v1/completions", asked | {"echo": echo})[1] for echo in (False, True)
        ]
    finally:
        server.end()
    alone, echoed = (answer["choices"][0]["text"] for answer in answers)
    assert len(alone.split(" ")) == 4
    assert echoed == f"7 9 30{alone}"


def test_tasks_of_token_ids_are_measured_without_a_tokenizer(
    model: tuple[Path, Any], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "test.wiki").write_text("7 9 30 12\n")
    (tmp_path / "test.lambada").write_text('{"text": "7 9 30 12"}\n')
    for task, name in (("WIKITEXT103", "test.wiki"), ("LAMBADA", "test.lambada")):
        words = ("--task", task, "--valid-data", tmp_path / name, *NUMBERS)
        assert run("evaluate", "--load", model[0], *words) == 0
    out = capfd.readouterr().out
    assert re.search(r"test.wiki +tokens +4\n", out)
    assert re.search(r"test.lambada +examples +1\n", out)


def test_a_training_scripts_flags_don_t_change_a_measurement(
    model: tuple[Path, Any], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "test.lambada").write_text('{"text": "7 9 30 12"}\n')
    directory, theirs = model
    words = ("--load", directory, "--task", "LAMBADA", *NUMBERS)
    data = ("--valid-data", tmp_path / "test.lambada")
    assert run("evaluate", *words, *data) == 0
    expected = capfd.readouterr().out
    layers = theirs.config.num_hidden_layers
    of_training = ("--num-layers", layers, "--micro-batch-size", 8, "--log-interval", 10)
    assert run("evaluate", *words, *of_training, "--no-load-optim", *data) == 0
    out, err = capfd.readouterr()
    assert out == expected
    assert "without effect here: --log-interval, --no-load-optim\n" in err


@pytest.mark.slow
def test_ranks_started_together_generate_what_one_does(
    model: tuple[Path, Any], tmp_path: Path
) -> None:
    directory, _ = model
    assert (
        run("generate", "--load", directory, "one", "two", "--output", tmp_path / "alone.jsonl")
        == 0
    )
    train(
        tmp_path / "run", 4, f"generate --load {directory} one two --output out.jsonl --tp 2 --pp 2"
    )
    assert (tmp_path / "run" / "out.jsonl").read_text() == (tmp_path / "alone.jsonl").read_text()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["generate", "--load", "MODEL"], "--prompts-file"),
        (["generate", "--load", "MODEL", "x", "--top-p", "2"], "top_p 2.0"),
        (["generate", "--load", "MODEL", "x", "--max-new-tokens", "200"], "room for 96; shorten"),
        (["generate", "--load", "MODEL", "x", "--max-new-tokens", "0"], "--max-new-tokens 0 must"),
        (["generate", "--load", "MODEL", "x", "--output", "/dev/null"], "/dev/null: is not a file"),
        (
            ["generate", "--load", "MODEL", "--prompts-file", "LONG", "--output", "KEPT"],
            "prompt 2: a prompt of",
        ),
        (["generate", "--load", "MODEL", "--prompts-file", "LONG"], "prompt 2: a prompt of"),
        (["score", "--load", "MODEL", "--input", "BAD", "--output", "KEPT"], ".jsonl:2: "),
        (["score", "--load", "MODEL", "--input", "nowhere", "--output", "KEPT"], "nowhere"),
        (["score", "--load", "MODEL", "--input", "WORDS", "--top", "-1"], "--top -1 must be 0 or"),
        (["score", "--load", "MODEL", "--input", "WORDS", "--top", "999"], "--top 999 exceeds the"),
        (["generate", "--load", "MODEL", "x", "--log-probs", "999"], "--log-probs 999 exceeds the"),
        (["generate", "--load", "MODEL", "x", "--length-penalty", "2"], "requires --beams"),
        (
            ["generate", "--load", "MODEL", "x", "--beams", "2", "--repetition-penalty", "2"],
            "excludes --temperature, --repetition-penalty",
        ),
        (["generate", "--load", "nowhere", "x"], "nowhere"),
        (
            ["evaluate", "--load", "nowhere", "--corpus", "WIKI", "--output", "nowhere/x"],
            "--output nowhere/x: there is no directory nowhere",
        ),
        (["generate", "--load", "MODEL", "--prompts-file", "missing.txt"], "missing.txt"),
        (["generate"], "MODEL is missing"),
        (
            [
                "evaluate",
                "--load",
                "MODEL",
                "--task",
                "LAMBADA",
                "--valid-data",
                "LAST",
                "--num-layers",
                "99",
            ],
            "--num-layers 99 contradicts the checkpoint",
        ),
        (
            ["serve", "--load", "MODEL", "--hidden-size", "99"],
            "--hidden-size 99 contradicts the checkpoint",
        ),
        (
            ["serve", "--load", "MODEL", "--model-type", "bert"],
            "--model-type bert contradicts the checkpoint",
        ),
        (["score", "--load", "MODEL", "--input", "BAD"], ".jsonl:2: "),
        (["chat"], "MODEL is missing; write: megatron-lite chat MODEL"),
        (
            ["score", "--load", "MODEL", "--input", "WORDS", *NUMBERS],
            "the text 'one two' is not a row of token ids",
        ),
        (
            [
                "evaluate",
                "--load",
                "MODEL",
                "--task",
                "WIKITEXT103",
                "--valid-data",
                "WIKI",
                *NUMBERS,
            ],
            "test.wiki: the text 'some words\\n' is not a row of token ids",
        ),
        (
            ["evaluate", "--load", "MODEL", "--task", "LAMBADA", "--valid-data", "LAST", *NUMBERS],
            "test.lambada:1: the text 'some words' is not a row of token ids",
        ),
        (
            [
                "evaluate",
                "--load",
                "MODEL",
                "--task",
                "LAMBADA",
                "--strict-lambada",
                "--valid-data",
                "LAST",
                *NUMBERS,
            ],
            "test.lambada:1: the text ' words' is not a row of token ids",
        ),
        (
            [
                "evaluate",
                "--load",
                "MODEL",
                "--task",
                "WIKITEXT103",
                "--valid-data",
                "HIGH",
                *NUMBERS,
            ],
            "token 9999 is outside the model's vocabulary",
        ),
        (
            ["generate", "--load", "MODEL", "7 9999", *NUMBERS],
            "token 9999 is outside the model's vocabulary",
        ),
        (
            ["generate", "--load", "MODEL", "7 -9", *NUMBERS],
            "token -9 is outside the model's vocabulary",
        ),
        (["score", "--load", "MODEL", "--input", "EMPTY"], "empty.jsonl: holds no rows to score"),
        (
            ["score", "--load", "MODEL", "--input", "BAD", "--output", "BAD"],
            "bad.jsonl: is the file of --input too",
        ),
        (
            ["generate", "--load", "MODEL", "--prompts-file", "EMPTY"],
            "empty.jsonl: holds no prompts",
        ),
        (
            ["generate", "--load", "MODEL", "--prompts-file", "WORDS", "--output", "WORDS"],
            "words.jsonl: is the file of --prompts-file too",
        ),
        (
            ["chat", "--load", "MODEL", *NUMBERS],
            "the model has no tokenizer; --tokenizer-model DIR",
        ),
        (
            ["generate", "--load", "MODEL", "some words", *NUMBERS],
            "--tokenizer-model DIR gives one",
        ),
    ],
)
def test_mistakes_are_refused_in_one_line(
    model: tuple[Path, Any],
    words: list[str],
    said: str,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "bad.jsonl").write_text('{"tokens": [1, 2]}\n{"tokens": [1, 999]}\n')
    (tmp_path / "words.jsonl").write_text('{"prompt": "7 9", "completion": "one two"}\n')
    (tmp_path / "test.wiki").write_text("some words\n")
    (tmp_path / "high.wiki").write_text("7 9 9999")
    (tmp_path / "test.lambada").write_text('{"text": "some words"}\n')
    names = {
        "BAD": "bad.jsonl",
        "WORDS": "words.jsonl",
        "WIKI": "test.wiki",
        "HIGH": "high.wiki",
        "LAST": "test.lambada",
        "EMPTY": "empty.jsonl",
        "LONG": "long.txt",
        "KEPT": "kept.jsonl",
    }
    places = {"MODEL": str(model[0])} | {word: str(tmp_path / name) for word, name in names.items()}
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "long.txt").write_text("short\n" + "long " * 90)
    (tmp_path / "kept.jsonl").write_text("of an earlier run\n")
    before = {file: file.read_bytes() for file in tmp_path.iterdir()}
    code = run(*(places.get(word, word) for word in words))
    out, err = capfd.readouterr()
    error = err.strip().splitlines()
    assert out == ""
    assert code != 0
    assert said in error[-1]
    assert {file: file.read_bytes() for file in tmp_path.iterdir()} == before
    assert not any("Traceback" in line for line in error)


@pytest.mark.parametrize(
    ("model_type", "tokens", "status", "message"),
    [
        ("gpt2", 96, 0, ""),
        ("gpt2", 97, 2, "rows.jsonl:2: has 97 tokens, and the model only 96 positions"),
        ("llama", 96, 0, ""),
        ("llama", 97, 0, "rows of up to 97 tokens exceed the model's 96 positions"),
    ],
)
def test_scored_rows_beyond_the_positions_are_refused_or_named(
    model_type: str,
    tokens: int,
    status: int,
    message: str,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """A table of positions ends. Rope goes on, as transformers computes it."""
    theirs = save(tmp_path / "model", model_type, max_position_embeddings=96)
    row = [each % 50 + 1 for each in range(tokens)]
    rows, out = tmp_path / "rows.jsonl", tmp_path / "out.jsonl"
    rows.write_text(f'{{"tokens": [1, 2, 3]}}\n{{"tokens": {row}}}\n')
    assert run("score", tmp_path / "model", "--input", rows, "--output", out) == status
    said = [
        line for line in capfd.readouterr().err.splitlines() if line.startswith("megatron-lite")
    ]
    assert len(said) == bool(message)
    assert message in "".join(said)
    assert out.exists() == (status == 0)
    if status == 0:
        found = json.loads(out.read_text().splitlines()[1])["log_probs"]
        with torch.no_grad():
            logits = theirs(torch.tensor([row])).logits[0].float().log_softmax(-1)
        expected = logits[:-1].gather(1, torch.tensor(row[1:])[:, None])[:, 0]
        assert found == pytest.approx(expected.tolist(), abs=1e-4)
