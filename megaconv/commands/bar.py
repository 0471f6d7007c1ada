"""A terminal's progress bar with megaconv's units. Imports rich, so it is imported only if there is a terminal."""

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from megaconv.commands.units import readable


class _Speed(ProgressColumn):
    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        return Text("" if speed is None else f"{readable(int(speed))}/s")


def make_bar() -> Progress:
    amount = DownloadColumn(binary_units=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        amount,
        _Speed(),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=Console(stderr=True), transient=True)
