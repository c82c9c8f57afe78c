"""What a step costs beyond its rows, as measured, and who shares it: the more do, the dearer are drafts."""

from dataclasses import dataclass

_NEW_SHARE = 1 / 8  # of a new step in what is known of its width
MAX_ROWS = 1e6  # as good as: rows cost nothing


@dataclass(slots=True)
class _Width:
    """Steps of about as many rows: their means."""

    rows: float
    seconds: float


class StepCosts:
    """Fits seconds = c * (overhead_rows + rows) to the steps of all widths there have been.

    Each power of two of rows counts once, however many its steps were, and by its relative error: so a hundred small
    steps and one large one say as much as one small step and a hundred large ones.
    """

    def __init__(self) -> None:
        self.overhead_rows = 0.0  # 0: not known, while all steps were about as wide
        self.sessions = 0.0  # whose rounds a step decides, mean of late
        self._widths: dict[int, _Width] = {}

    def count(self, num_sessions: int, rows: int, seconds: float) -> None:
        """A step that decided rounds of so many sessions, with so many rows (at least 1), took so long."""
        if num_sessions:
            self.sessions += _NEW_SHARE * (num_sessions - self.sessions) if self.sessions else num_sessions
        if seconds <= 0.0:
            return
        known = self._widths.setdefault(rows.bit_length(), _Width(rows, seconds))
        known.rows += _NEW_SHARE * (rows - known.rows)
        known.seconds += _NEW_SHARE * (seconds - known.seconds)
        self.overhead_rows = self._fit()

    def _fit(self) -> float:
        """Least squares of a line, by hand: there are two numbers to find, after every step."""
        widths = self._widths.values()
        if len(widths) < 2:
            return 0.0
        weights = [width.seconds**-2 for width in widths]
        total = sum(weights)
        mean_rows = sum(w * width.rows for w, width in zip(weights, widths, strict=True)) / total
        mean_s = sum(w * width.seconds for w, width in zip(weights, widths, strict=True)) / total
        spread = sum(w * (width.rows - mean_rows) ** 2 for w, width in zip(weights, widths, strict=True))
        slope = (
            sum(
                w * (width.rows - mean_rows) * (width.seconds - mean_s)
                for w, width in zip(weights, widths, strict=True)
            )
            / spread
        )
        if slope <= 0.0:
            return MAX_ROWS
        return min(MAX_ROWS, max(1.0, mean_s / slope - mean_rows))
