"""`megatron-lite plot`: curves of runs from the logs that the trainer and Megatron-LM write."""

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from megatron_lite.commands import plot
from megatron_lite.loop.curve import thinned
from megatron_lite.loop.log import MetricsFile
from tests.browsers import PHONE, Page, fits, opened, shown
from tests.trainer.loop.launches import LLAMA, train


def logged(directory: Path, scale: float = 1.0, steps: int = 30, **others: Any) -> Path:
    """A run's directory with its metrics file."""
    directory.mkdir(parents=True)
    lines = []
    for step in range(10, 10 * steps + 1, 10):
        loss = 2 + 6 * math.exp(-step * scale / 100)
        figures = {"loss": loss, "grad_norm": 1.5, "learning_rate": 1e-3 / step, "tokens_per_second": 5e3, "mfu": None}  # fmt: skip
        lines.append({"iteration": step, **figures, **others})
    lines.append({"iteration": 10 * steps, "validation_loss": 2.5})
    (directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return directory


def values(capsys: pytest.CaptureFixture[str], *words: object) -> list[dict[str, Any]]:
    assert plot.main([*map(str, words), "--json"]) == 0
    runs: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["runs"]
    return runs


def refused(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    assert plot.main([str(word) for word in words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    return err


def test_a_later_line_of_a_step_counts_and_a_line_that_was_cut_off_does_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = logged(tmp_path / "run") / "metrics.jsonl"
    with log.open("a") as file:
        file.write('{"iteration": 20, "loss": 9.5}\n{"iteration": 30, "loss": NaN}\n')
    sink = MetricsFile(log)
    sink.write(40, {"iteration": 40, "loss": math.nan, "grad_norm": math.inf})
    sink.close()
    assert log.read_text().splitlines()[-1] == '{"iteration": 40, "loss": null, "grad_norm": null}'
    with log.open("a") as file:
        file.write('{"iterat')
    (run,) = values(capsys, tmp_path / "run")
    assert run["values"]["loss"][:4] == [[10, pytest.approx(2 + 6 * math.exp(-0.1))], [20, 9.5], [30, None], [40, None]]  # fmt: skip
    assert len(run["values"]["loss"]) == 30
    assert run["values"]["validation_loss"] == [[300, 2.5]]
    assert "mfu" not in run["values"]


def test_a_terminal_shows_all_runs_in_each_plot(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    logged(tmp_path / "a")
    logged(tmp_path / "b", scale=3)
    assert plot.main([f"slow={tmp_path / 'a'}", f"fast={tmp_path / 'b' / 'metrics.jsonl'}"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "loss, nats a token"
    drawn = lines[1:11]
    assert drawn[0].startswith("     7.429 │•")
    assert sum(line.count("+") for line in drawn) > 20
    # The faster run is below the slower one, until both have the same loss.
    assert drawn[-1].count("•") == 1
    assert lines[12] == f"{'':12}10{'':55}300  step"
    assert lines[-2:] == ["• slow", "+ fast"]
    assert "speed, tokens per second of a device" in lines


def test_a_run_without_a_log_is_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "no such file" in refused(capsys, tmp_path / "absent")
    (tmp_path / "data.jsonl").write_text('{"text": "a"}\n')
    assert "--metrics-file" in refused(capsys, tmp_path)
    assert "line 1 is not that of a logged step" in refused(capsys, tmp_path / "data.jsonl")
    run = logged(tmp_path / "run")
    assert "there are grad_norm" in refused(capsys, run, "--value", "mfu")
    assert "no such directory" in refused(capsys, run, "--html", tmp_path / "no" / "x.html")
    (run / "other.jsonl").write_text('{"iteration": 1, "loss": 1}\n')
    assert "several metrics files, metrics.jsonl, other.jsonl" in refused(capsys, run)


def test_long_curves_keep_their_mean_in_fewer_points() -> None:
    points = [(step, float(step % 7)) for step in range(7000)]
    found = thinned(points, 100)
    assert len(found) == 100
    assert found[-1][0] == 6999
    assert [value for _, value in found] == pytest.approx([3.0] * 100, abs=0.1)


def test_a_page_draws_each_run_in_the_right_place(tmp_path: Path) -> None:
    runs = [logged(tmp_path / "a"), logged(tmp_path / "b", scale=3)]
    page = tmp_path / "page.html"
    assert plot.main([*map(str, runs), "--html", str(page)]) == 0
    text = page.read_text()
    assert "<script" not in text
    assert "://" not in text
    svg = text.split("<svg viewBox")[1]
    lines = re.findall(r'<polyline class="line l(\d)( dashed)?" points="([^"]*)"', svg)
    kinds = [(number, dashes) for number, dashes, _ in lines]
    assert kinds == [("0", ""), ("1", ""), ("0", " dashed"), ("1", " dashed")]
    slow, fast, validation, _ = (points_of(text) for _, _, text in lines)
    # x grows with the steps over the whole width. The validation loss is one point.
    assert slow[0].x == fast[0].x == 76
    assert slow[-1].x == fast[-1].x == validation[0].x == 970
    # y grows as the loss falls.
    ratio = (slow[-1].y - slow[0].y) / (fast[-1].y - fast[0].y)
    fallen = [6 * (math.exp(-scale * 0.1) - math.exp(-scale * 3)) for scale in (1, 3)]
    assert ratio == pytest.approx(fallen[0] / fallen[1], rel=0.01)


class Point(NamedTuple):
    """A point of a drawn line."""

    x: float
    y: float


def points_of(text: str) -> list[Point]:
    """The points of an SVG polyline: `x,y x,y ...`."""
    return [Point(*map(float, point.split(","))) for point in text.split()]


def test_a_browser_shows_curves_with_hostile_names(tmp_path: Path, browser: Page) -> None:
    hostile = "</title><script>document.body.remove()</script><img src>"
    words = [f"{hostile}={logged(tmp_path / 'a')}", f"b={logged(tmp_path / 'b', scale=3)}"]
    page = tmp_path / "page.html"
    assert plot.main([*words, "--html", str(page)]) == 0
    with opened(page, browser) as tab:
        assert tab.run("!document.querySelector('img, script')")
        assert hostile in tab.run("document.querySelector('tbody').textContent")
        assert tab.run("document.querySelectorAll('figure svg').length") == 4
        assert shown(tab, "figure svg")
        spoken = tab.run("document.querySelector('figure svg').getAttribute('aria-label')")
        assert "loss (nats a token) by step" in spoken
        assert "b: from 6.445 to 2.001" in spoken
        tab.resize(*PHONE)
        tab.prefer("dark")
        assert fits(tab)
        assert shown(tab, "figure")
        assert tab.run("getComputedStyle(document.body).backgroundColor") == "rgb(20, 23, 27)"


@pytest.mark.slow
def test_logs_of_real_runs_are_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tensorboard")
    flags = "--train-iters 6 --log-interval 2 --eval-iters 1 --eval-interval 3"
    for name, rate in (("a", "1e-3"), ("b", "1e-2")):
        run = f"pretrain {LLAMA} {flags} --lr {rate} --metrics-file {name}/metrics.jsonl --tensorboard-dir {name}/events"
        train(tmp_path, 1, run)
    lines, events = values(capsys, tmp_path / "a", tmp_path / "a" / "events")
    for name, points in lines["values"].items():
        steps = [step for step, _ in points]
        assert steps == [step for step, _ in events["values"][name]]
        assert [value for _, value in points] == pytest.approx(
            [value for _, value in events["values"][name]]
        )
    assert [step for step, _ in lines["values"]["loss"]] == [2, 4, 6]
    assert [step for step, _ in lines["values"]["validation_loss"]] == [3, 6]
    assert plot.main([str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    assert "• " in capsys.readouterr().out


@pytest.mark.slow
def test_megatrons_names_in_tensorboard_are_understood(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("tensorboard")
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(tmp_path))
    for step in (1, 2):
        for tag, value in (("lm loss", 3.0 - step), ("learning-rate", 0.5), ("grad-norm", 2.0)):
            writer.add_scalar(tag, value, step)
    writer.close()
    (run,) = values(capsys, tmp_path)
    assert run["values"] == {
        "loss": [[1, 2.0], [2, 1.0]],
        "learning_rate": [[1, 0.5], [2, 0.5]],
        "grad_norm": [[1, 2.0], [2, 2.0]],
    }


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_that_closes_the_pipe_ends_the_command_without_a_traceback(
    tmp_path: Path, unbuffered: str
) -> None:
    logged(tmp_path / "run")
    reading, writing = os.pipe()
    os.close(reading)
    ended = subprocess.run(
        [sys.executable, "-m", "megatron_lite", "plot", str(tmp_path / "run")],
        stdout=writing, stderr=subprocess.PIPE, text=True, timeout=60, check=False,
        env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
    )  # fmt: skip
    os.close(writing)
    assert (ended.returncode, ended.stderr) == (1, "")


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_full_stdout_is_one_line(tmp_path: Path, unbuffered: str) -> None:
    logged(tmp_path / "run")
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run(
            [sys.executable, "-m", "megatron_lite", "plot", str(tmp_path / "run")],
            stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False,
            env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
        )  # fmt: skip
    assert ended.returncode == 1
    assert ended.stderr.count("\n") == 1
    assert "No space left on device" in ended.stderr
