"""TensorBoard tracker: event files in the run folder's tensorboard/. Samples are texts, because there are no tables."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from driver.records.trackers.base import Identity, Outcome, TrackedRun, Tracker

FOLDER = "tensorboard"


class Tensorboard(Tracker):
    """Writer of an event file. A resumed run adds a file to the previous run's folder."""

    packages: ClassVar = ("tensorboard",)
    install: ClassVar = "run `.venv/bin/pip install -c constraints.txt tensorboard`"

    def start(self, run: TrackedRun) -> Identity | None:
        from torch.utils.tensorboard import SummaryWriter

        folder = run.folder / FOLDER
        purge = None
        if run.previous is not None and Path(run.previous.id).is_dir():
            folder, purge = Path(run.previous.id), run.first_step  # later steps of that run are made again
        self.writer: Any = SummaryWriter(str(folder), purge_step=purge)
        asked = run.settings.model_dump(include={"group", "tags", "notes"}, exclude_defaults=True)
        for title, values in (("config", run.config), ("facts", asked | run.facts | {"run_folder": str(run.folder)})):
            self.writer.add_text(title, as_code("\n".join(f"{key}: {value}" for key, value in values.items())), purge)
        return Identity(id=str(folder))

    def metrics(self, step: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step, new_style=True, double_precision=True)  # else it is rounded

    def samples(self, step: int, rows: list[dict[str, Any]]) -> None:
        shown = ("\n".join(f"{name}: {value}" for name, value in row.items()) for row in rows)
        self.writer.add_text("samples", as_code("\n\n".join(shown)), step)

    def finish(self, outcome: Outcome) -> None:
        said = f"exit reason: {outcome.exit_reason}\nmodel: {outcome.model}"
        self.writer.add_text("outcome", as_code(said))
        self.writer.close()


def as_code(text: str) -> str:
    """Format text as a Markdown code block (four spaces), because TensorBoard renders Markdown.

    >>> as_code("<b>")
    '    <b>'
    """
    return "\n".join(f"    {line}" for line in text.splitlines())
