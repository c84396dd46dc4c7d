"""Curves of a run, from its `logging.jsonl`."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path

from matplotlib.figure import Figure  # without pyplot: no global state, no display
from pandas import DataFrame

CURVES = {
    "loss": ("loss", "loss a trained token"),
    "learning_rate": ("learning_rate", "learning rate"),
    "tokens_per_second": ("tokens_per_second", "tokens / s"),
}


class Curve(Figure):
    """A figure that a notebook shows by itself."""

    def _repr_png_(self) -> bytes:
        buffer = BytesIO()
        self.savefig(buffer, format="png", dpi=120)
        return buffer.getvalue()


def curve(metrics: DataFrame, name: str) -> Figure:
    """One curve over the steps; the loss comes with the evaluation's where there is one."""
    column, label = CURVES[name]
    figure = Curve(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    known = metrics.dropna(subset=[column])
    axes.plot(
        known["step"], known[column], marker="o" if len(known) < 20 else None, markersize=3, label=column
    )
    if name == "loss" and "eval_loss" in metrics:
        judged = metrics.dropna(subset=["eval_loss"])
        axes.plot(judged["step"], judged["eval_loss"], marker="s", markersize=4, label="eval_loss")
        axes.legend(frameon=False)
    if name == "tokens_per_second":
        axes.set_ylim(bottom=0)
    axes.set_xlabel("step")
    axes.set_ylabel(label)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def save_plots(metrics: DataFrame, folder: Path) -> list[Path]:
    """Write every curve as a PNG; returns the files."""
    folder.mkdir(exist_ok=True)
    written = []
    for name in CURVES:
        path = folder / f"{name}.png"
        curve(metrics, name).savefig(path, dpi=120)
        written.append(path)
    return written
