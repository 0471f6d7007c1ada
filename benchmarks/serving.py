"""Compares the planner's estimates of text generation with published rates. It needs no GPU.

python -m benchmarks.serving           the errors of published rates and prompts, as the tables of docs/planning.md
"""

from collections.abc import Iterator

from benchmarks.published_serving import FIRST_TOKENS, LATENCIES, ROWS, Generated
from megaconv.model.layout import Layout
from megaconv.planning.gpus import GPUS
from megaconv.planning.layer_costs import Machine
from megaconv.planning.served import Served, Server
from megaconv.planning.serving import Serving


def rate_of(row: Generated) -> float:
    """Return the estimated rate of a row, with caches that are filled as on average."""
    answering = _served(row, row.prompt + row.answer // 2)
    seconds = row.answer * answering.time.total
    if row.with_prompt:
        seconds += row.batch * _served(row, row.prompt).first_token
    return row.batch * row.answer / seconds


def _served(row: Generated, tokens: int) -> Served:
    layers = row.config.layer_count
    serving = Serving(
        config=row.config,
        layout=Layout(row.tp, 1, stage_layers=(layers,)),
        dp=1,
        seq=tokens,
        batch=row.batch,
        fp8=row.fp8,
        cached=1 if row.fp8 else 2,
    )
    return Server(row.config, Machine(GPUS[row.gpu], fp8=row.fp8)).estimate(serving)


def table() -> Iterator[str]:
    """Yield the lines of the table."""
    yield "| model | GPUs | sequences | tokens of prompt, answer | published | estimated | error | fitted | source |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for row in ROWS:
        rate = rate_of(row)
        precision = ", FP8" if row.fp8 else ""
        yield (
            f"| {row.name}{precision} | {row.tp} {row.gpu} | {row.batch} | {row.prompt:,}, {row.answer:,} | "
            f"{row.rate:,.0f} tokens/s | {rate:,.0f} tokens/s | {rate / row.rate - 1:+.0%} | "
            f"{'yes' if row.fitted else ''} | {row.source} |"
        )


def first_tokens() -> Iterator[str]:
    """Yield the lines of the table of prompts."""
    yield "| model | GPUs | tokens of the prompt | published | estimated | error | source |"
    yield "|---|---|---|---|---|---|---|"
    for row in FIRST_TOKENS:
        layout = Layout(row.tp, 1, stage_layers=(row.config.layer_count,))
        serving = Serving(config=row.config, layout=layout, dp=1, seq=row.prompt, fp8=row.fp8)
        machine = Machine(GPUS[row.gpu], fp8=row.fp8)
        seconds = Server(row.config, machine).estimate(serving).first_token
        precision = ", FP8" if row.fp8 else ""
        yield (
            f"| {row.name}{precision} | {row.tp} {row.gpu} | {row.prompt:,} | {row.seconds * 1000:.0f} ms | "
            f"{seconds * 1000:.0f} ms | {seconds / row.seconds - 1:+.0%} | {LATENCIES} |"
        )


if __name__ == "__main__":
    for line in (*table(), "", *first_tokens()):
        print(line)
