"""Runs that learn from a teacher: what they say, save and refuse; they go on to the same bits."""

import json
import re
import shutil
from pathlib import Path

import pytest

import megaconv
from tests.trainer.loop.launches import LLAMA, launch, metrics, train
from tests.trainer.loop.test_manners import refused

FIXTURES = Path(__file__).parents[2] / "fixtures"
STUDENT, TEACHER = (
    FIXTURES / f"peft-{name}" / "base" for name in ("llama-all-linear", "mixtral-experts")
)
JETMOE = FIXTURES / "peft-jetmoe-parameters" / "base"
RETRO = FIXTURES / "retro-tp2-torch"
WORDS = (
    f"finetune --load {STUDENT} --finetune-data prompts.jsonl --seq-length 16 --lr 1e-2 --lr-decay-style constant --log-interval 1 "
    "--global-batch-size 4 --metrics-file metrics.jsonl --distributed-timeout-minutes 1 --make-vocab-size-divisible-by 2 --fp32"
)
FIGURES = ("loss", "cross_entropy", "divergence")


def write_prompts(directory: Path) -> None:
    directory.mkdir(exist_ok=True)
    records = [{"prompt": f"{n} 2", "completion": f"3 {n} 4"} for n in range(7, 31)]
    (directory / "prompts.jsonl").write_text("\n".join(map(json.dumps, records)))


def figures(directory: Path) -> list[list[float]]:
    return [[line[name] for name in FIGURES] for line in metrics(directory) if "loss" in line]


def test_a_run_says_who_teaches_and_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    for name in ("whole", "same"):
        write_prompts(tmp_path / name)
    command = f"{WORDS} --teacher-load {TEACHER} --distill-alpha 0.5 --save ckpt --split 80,20,0 --eval-interval 2 --eval-iters 1"
    log = train(tmp_path / "whole", 1, f"{command} --train-iters 4").log(0)
    assert re.search(rf"^teacher: {TEACHER}, [\d,]+ parameters, not trained$", log, re.M)
    lines = re.findall(
        r"^step +\d+/4 .* loss (\S+) \| cross entropy (\S+) \| divergence (\S+) \|", log, re.M
    )
    assert len(lines) == 4
    for loss, crossed, apart in (map(float, line) for line in lines):
        assert loss == pytest.approx(0.5 * crossed + 0.5 * apart, abs=1e-4)
    assert re.search(r"validation loss \S+ \| cross entropy \S+ \| divergence \S+$", log, re.M), log
    assert "perplexity" not in log

    train(tmp_path / "same", 1, f"{command} --train-iters 4 --exit-interval 2")
    again = train(tmp_path / "same", 1, f"{command} --train-iters 4 --resume")
    assert "continuing after step 2, 8 samples" in again.log(0)
    assert figures(tmp_path / "same") == figures(tmp_path / "whole")
    assert megaconv.fingerprint(tmp_path / "same" / "ckpt") == megaconv.fingerprint(
        tmp_path / "whole" / "ckpt"
    )


def test_a_corpus_is_learned_from_a_teacher_at_another_layout(tmp_path: Path) -> None:
    """The teacher is a Megatron checkpoint whose layout has nothing to do with the run's."""
    megaconv.convert(
        TEACHER, tmp_path / "teacher", saver="core", tp=2, make_vocab_size_divisible_by=1
    )
    words = WORDS.replace("--finetune-data prompts.jsonl", "--mock-data --eval-iters 0")
    for name, size, layout in (
        ("alone", 1, ""),
        ("four", 4, "--tp 2 --sequence-parallel --pp 2 --use-distributed-optimizer"),
    ):
        (tmp_path / name).mkdir()
        train(
            tmp_path / name,
            size,
            f"{words} {layout} --teacher-load {tmp_path / 'teacher'} --train-iters 3 --save ckpt",
        )
    for one, other in zip(figures(tmp_path / "alone"), figures(tmp_path / "four"), strict=True):
        assert other == pytest.approx(one, rel=1e-5, abs=1e-6)


ON_POLICY = (
    WORDS.replace("--seq-length 16 ", "")
    + f" --teacher-load {TEACHER} --distill-on-policy --distill-beta 1 --max-completion-length 8"
)


def test_a_run_learns_from_what_the_teacher_predicts_of_its_own_completions(
    tmp_path: Path,
) -> None:
    for name in ("whole", "same"):
        write_prompts(tmp_path / name)
    command = f"{ON_POLICY} --valid-finetune-data prompts.jsonl --eval-interval 4 --eval-iters 1 --save ckpt --lora-rank 4"
    log = train(tmp_path / "whole", 1, f"{command} --train-iters 16").log(0)
    assert (
        "24 prompts, 1 completion each of at most 8 tokens: 4 completions a step, 6 steps an epoch"
        in log
    )
    assert "rewards" not in log
    apart = [line[2] for line in figures(tmp_path / "whole")]
    assert sum(apart[-4:]) < 0.8 * sum(apart[:4])
    assert "validation loss" in log

    train(tmp_path / "same", 1, f"{command} --train-iters 16 --exit-interval 8")
    train(tmp_path / "same", 1, f"{command} --train-iters 16 --resume")
    assert figures(tmp_path / "same") == figures(tmp_path / "whole")


def test_completions_are_the_same_at_another_layout(tmp_path: Path) -> None:
    for name, size, layout in (("alone", 1, ""), ("four", 4, "--tp 2 --pp 2")):
        write_prompts(tmp_path / name)
        train(tmp_path / name, size, f"{ON_POLICY} {layout} --eval-iters 0 --train-iters 3")
    for one, other in zip(figures(tmp_path / "alone"), figures(tmp_path / "four"), strict=True):
        assert other == pytest.approx(one, rel=1e-5, abs=1e-6)


def test_a_teacher_may_have_rows_that_no_token_uses(tmp_path: Path) -> None:
    write_prompts(tmp_path)
    megaconv.convert(TEACHER, tmp_path / "larger", saver="hf", vocab_size=112)
    for name, teacher in (("same", TEACHER), ("larger", tmp_path / "larger")):
        command = f"{WORDS} --teacher-load {teacher} --train-iters 2 --metrics-file {name}.jsonl"
        train(tmp_path, 1, command)
    lines = [
        [json.loads(line)["loss"] for line in (tmp_path / name).read_text().splitlines()]
        for name in ("same.jsonl", "larger.jsonl")
    ]
    assert lines[0] == lines[1]


def test_teachers_of_other_tokens_are_refused(tmp_path: Path) -> None:
    write_prompts(tmp_path)
    megaconv.convert(TEACHER, tmp_path / "smaller", saver="hf", vocab_size=90)
    error = refused(tmp_path, f"{WORDS} --teacher-load smaller --train-iters 2")
    assert "--teacher-load smaller: has 90 tokens, and the trained model 99" in error

    for name, source, word in (("student", STUDENT, "a"), ("teacher", TEACHER, "b")):
        shutil.copytree(source, tmp_path / name)
        (tmp_path / name / "vocab.json").write_text(json.dumps({"x": 0, word: 1}))
    command = (
        WORDS.replace(str(STUDENT), "student") + " --tokenizer-type NullTokenizer --vocab-size 98"
    )
    error = refused(tmp_path, f"{command} --teacher-load teacher --train-iters 2")
    assert (
        "--teacher-load teacher: has another tokenizer, in which token 1 is 'b' and not 'a'"
        in error
    )


def test_a_fresh_student_has_the_tokenizer_of_its_teacher(tmp_path: Path) -> None:
    """Its tokenizer is that of the flags. The teacher's predictions were learned as those of other words."""
    for name, word in (("student", "a"), ("teacher", "b")):
        shutil.copytree(TEACHER, tmp_path / name)
        tokens = {"x": 0, word: 1, "<|endoftext|>": 2}
        (tmp_path / name / "vocab.json").write_text(json.dumps(tokens))
        (tmp_path / name / "merges.txt").write_text("#version: 0.2\n")
    words = (
        "--tokenizer-type GPT2BPETokenizer --vocab-file student/vocab.json --merge-file student/merges.txt "
        "--make-vocab-size-divisible-by 2"
    )
    model = LLAMA.replace("--vocab-size 60", words)
    error = refused(tmp_path, f"pretrain {model} --train-iters 2 --teacher-load teacher")
    assert "--teacher-load teacher: has another tokenizer, in which token 1 is 'b'" in error


def test_a_teacher_is_not_in_the_directory_of_the_run(tmp_path: Path) -> None:
    """--resume would take the student as its teacher, and --keep-last would remove it."""
    write_prompts(tmp_path)
    for inside in (".", "hf"):
        shutil.copytree(TEACHER, tmp_path / "ckpt" / inside, dirs_exist_ok=True)
        place = f"ckpt/{inside}"
        command = f"{WORDS} --teacher-load {place} --save {tmp_path}/ckpt --train-iters 2"
        assert f"--teacher-load {place}: is in the directory of --save" in refused(
            tmp_path, command
        )


@pytest.mark.parametrize("adapters", ["", "--lora-rank 2"])
def test_the_short_form_continues_no_run_with_another_teacher(
    adapters: str, tmp_path: Path
) -> None:
    """It learned from the labels alone, or from the other teacher, and said nothing."""
    write_prompts(tmp_path)
    shutil.copytree(TEACHER, tmp_path / "other")
    short = f"finetune {STUDENT} prompts.jsonl --save tuned --train-iters 1 --global-batch-size 4 --seq-length 16 {adapters}"
    train(tmp_path, 1, f"{short} --teacher-load {TEACHER}")
    for flags, words in (
        ("", "--save tuned: holds a run with --teacher-load"),
        (
            "--teacher-load other",
            f"--save tuned: holds a run with the teacher {TEACHER}, not other",
        ),
    ):
        again = launch(tmp_path, 1, f"{short} {flags}")
        assert again.wait() == [2], again.logs()
        assert words in again.log(0)
    again = train(tmp_path, 1, f"{short} --teacher-load {TEACHER}")
    assert "nothing left: the run has made its" in again.log(0)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--distill-alpha 0.5", "--distill-alpha requires --teacher-load"),
        (f"--teacher-load {TEACHER} --distill-alpha 1.5", "--distill-alpha 1.5 has to lie between 0 and 1"),
        (f"--teacher-load {TEACHER} --distill-beta -1", "--distill-beta -1 has to lie between 0 and 1"),
        (f"--teacher-load {TEACHER} --distill-temperature 0", "--distill-temperature 0 must be more than 0"),
        (f"--teacher-load {TEACHER} --distill-temperature inf", "--distill-temperature inf must be more than 0 and finite"),
        (f"--teacher-load {TEACHER} --dpo --finetune-data x --load {STUDENT}", "--teacher-load and --dpo are two objectives"),
        ("--distill-on-policy", "--distill-on-policy requires --teacher-load"),
        ("--max-completion-length 8", "--max-completion-length requires --grpo or --distill-on-policy"),
        (f"--teacher-load {TEACHER} --distill-on-policy", "--distill-on-policy completes prompts of --finetune-data, which is missing"),
        ("--teacher-load nothere", "nothere: no such file or directory"),
        ("--teacher-model nothere", "unknown flag --teacher-model; did you mean --teacher-load?"),
        ("--export-kd-teacher-load nothere", "learn from a teacher with --teacher-load"),
        (f"--teacher-load {RETRO}", "is a Retro, which reads neighbors of its text; choose another teacher"),
        (f"--teacher-load {JETMOE}", f"{JETMOE}: a jetmoe is converted, but can't be trained yet"),
    ],
)  # fmt: skip
def test_flags_that_contradict_each_other_are_refused(
    flags: str, words: str, tmp_path: Path
) -> None:
    model = LLAMA.replace("--vocab-size 60", "--vocab-size 98")
    assert words in refused(tmp_path, f"pretrain {model} --train-iters 2 {flags}")


def test_a_layout_that_the_teacher_cannot_have_is_refused_with_its_name(tmp_path: Path) -> None:
    """The student has four key/value heads, the teacher two."""
    write_prompts(tmp_path)
    student = FIXTURES / "peft-gpt2-conv1d" / "base"
    command = WORDS.replace(str(STUDENT), str(student))
    running = launch(tmp_path, 4, f"{command} --tp 4 --teacher-load {TEACHER} --train-iters 2")
    assert running.wait() == [2] * 4
    words = f"--teacher-load {TEACHER}: kv_heads = 2 can't be divided over tensor parallel size (tp) = 4"
    assert running.logs().count(words) == 1
