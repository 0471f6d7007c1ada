"""One page of a speedrun, with nothing from elsewhere in it: curves, perplexities, the answer.

python report.py DIRECTORY REPORT.html
"""

import json
import sys
from html import escape
from pathlib import Path
from typing import Any

PARTS = (
    ("Pretraining", "pretrain.jsonl", ("loss",)),
    ("Finetuning on conversations", "chat-metrics.jsonl", ("loss",)),
    ("Preferences by DPO", "dpo-metrics.jsonl", ("loss", "reward_margin", "reward_accuracy")),
)
WIDTH, HEIGHT, LEFT, BOTTOM = 640, 220, 48, 24
STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:760px;margin:2rem auto;padding:0 1rem;color-scheme:light dark}"
    "svg{width:100%;height:auto}polyline{fill:none;stroke:#2f6fb3;stroke-width:1.5}text{font-size:11px;fill:currentColor}"
    "line{stroke:#8888}table{border-collapse:collapse}th,td{text-align:left;padding:2px 12px 2px 0;border-bottom:1px solid #8888}"
    "blockquote{border-left:3px solid #2f6fb3;margin:0;padding:0 1rem}"
)


def points(path: Path, name: str) -> list[tuple[float, float]]:
    """(step, value) of a metrics file."""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [(line["iteration"], line[name]) for line in lines if name in line]


def curve(found: list[tuple[float, float]], name: str) -> str:
    """SVG."""
    steps, values = zip(*found, strict=True)
    low, high = min(values), max(values)
    across, up = max(steps) - min(steps) or 1, high - low or 1

    def place(step: float, value: float) -> str:
        x = LEFT + (step - min(steps)) / across * (WIDTH - LEFT - 8)
        y = 8 + (high - value) / up * (HEIGHT - BOTTOM - 8)
        return f"{x:.1f},{y:.1f}"

    base = HEIGHT - BOTTOM
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(name)} by step">'
        f'<line x1="{LEFT}" y1="{base}" x2="{WIDTH}" y2="{base}"/><line x1="{LEFT}" y1="0" x2="{LEFT}" y2="{base}"/>'
        f'<text x="0" y="16">{high:.3g}</text><text x="0" y="{base}">{low:.3g}</text>'
        f'<text x="{LEFT}" y="{HEIGHT - 6}">step {min(steps):g}</text>'
        f'<text x="{WIDTH}" y="{HEIGHT - 6}" text-anchor="end">step {max(steps):g}</text>'
        f'<polyline points="{" ".join(place(*point) for point in found)}"/></svg>'
    )


def table(rows: list[tuple[str, ...]]) -> str:
    first, *others = ["".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows]
    return (
        "<table>"
        + "".join(f"<tr>{row}</tr>" for row in (first.replace("td>", "th>"), *others))
        + "</table>"
    )


def evaluations(directory: Path) -> Any:
    for stage in ("pretrained", "chat", "model"):
        results = json.loads((directory / f"evaluation-{stage}.json").read_text(encoding="utf-8"))
        (figures,) = results["results"].values()
        yield stage, f"{figures['loss']:.4f}", f"{figures['word_perplexity']:.1f}"


def main(directory: Path, target: Path) -> None:
    answer = json.loads((directory / "answer.json").read_text(encoding="utf-8"))
    parts = ["<h1>Speedrun</h1>"]
    for title, file, names in PARTS:
        parts.append(f"<h2>{title}</h2>")
        for name in names:
            found = points(directory / file, name)
            parts.append(
                f"<p>{name}: {found[0][1]:.4f} at step {found[0][0]}, {found[-1][1]:.4f} at step {found[-1][0]}</p>"
            )
            parts.append(curve(found, name))
    rows = [("checkpoint", "loss by token", "perplexity by word"), *evaluations(directory)]
    parts += ["<h2>Held-out pages</h2>", table(rows)]
    parts += [
        f"<h2>{escape(answer['question'])}</h2>",
        f"<blockquote>{escape(answer['answer'])}</blockquote>",
    ]
    head = f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Speedrun</title><style>{STYLE}</style></head>'
    target.write_text(f"{head}<body>{''.join(parts)}</body></html>\n", encoding="utf-8")
    print(f"{target}: curves, perplexities and the answer")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
