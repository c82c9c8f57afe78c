"""Line charts for reports, as SVG: panels above each other over one axis."""

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure

_WIDTH, _PANEL_HEIGHT = 9.0, 2.0  # inches
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "tandem",
    "font.size": 8,
}  # text stays text; one input, one file


@dataclass(frozen=True, slots=True)
class Line:
    """Points in order of x."""

    label: str
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Panel:
    """One pair of axes; y begins at 0 unless all its values are far above it."""

    title: str
    lines: Sequence[Line]


def draw(panels: Sequence[Panel], x_label: str) -> str:
    """The file's text; ValueError when there is no point at all."""
    if not any(line.points for panel in panels for line in panel.lines):
        raise ValueError("there are no points to draw")
    figure = figure_of(panels, x_label)
    file = io.StringIO()
    with rc_context(_STYLE):
        figure.savefig(file, format="svg", metadata={"Date": None})
    return file.getvalue()


def figure_of(panels: Sequence[Panel], x_label: str) -> Figure:
    """With one axes a panel, in their order."""
    with rc_context(_STYLE):
        figure = Figure(figsize=(_WIDTH, _PANEL_HEIGHT * len(panels)), layout="constrained")
        for panel, axes in zip(panels, figure.subplots(len(panels), sharex=True, squeeze=False)[:, 0], strict=True):
            for line in panel.lines:
                axes.plot([x for x, _ in line.points], [y for _, y in line.points], label=line.label, linewidth=1.0)
            ys = [y for line in panel.lines for _, y in line.points]
            if ys and min(ys) <= 0.8 * max(ys):
                axes.set_ylim(bottom=min(0.0, *ys))
            axes.set_title(panel.title, loc="left", fontweight="bold")
            axes.grid(color="#ddd")
            axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
        axes.set_xlabel(x_label)
    return figure
