"""The target's hidden states that one session has been sent and its proposer has not taken up."""

from tandem.types import ErrorCode, HiddenStates, ItemError


class HiddenBuffer:
    """Consecutive rows, in the chunks they came in."""

    def __init__(self) -> None:
        self._chunks: list[HiddenStates] = []
        self._first_row = 0  # earlier ones have been taken up
        self._end_row = 0

    @property
    def chunks(self) -> tuple[HiddenStates, ...]:
        """What is there."""
        return tuple(self._chunks)

    def add(self, states: HiddenStates, row_bytes: int) -> None:
        """Append rows; those that came before are skipped, for a row of committed tokens never changes.

        ItemError HIDDEN_STATES_MISSING when rows before them never came, INVALID_ARGUMENT for rows of another size.
        """
        if len(states.data) != states.num_rows * row_bytes:
            raise ItemError(
                ErrorCode.INVALID_ARGUMENT,
                f"hidden_states: {states.num_rows} rows of {len(states.data)} bytes, this proposer needs {row_bytes} "
                "bytes a row",
            )
        if states.first_row > self._end_row:
            raise missing(self._end_row)
        if states.end_row > self._end_row:
            self._chunks.append(states.rows_from(self._end_row))
            self._end_row = states.end_row

    def lacks(self, num_rows: int) -> ItemError | None:
        """HIDDEN_STATES_MISSING unless the first `num_rows` have all come."""
        return missing(self._end_row) if self._end_row < num_rows else None

    def truncate(self, num_rows: int) -> None:
        """The tokens from there on are other ones now; a no-op when there are fewer."""
        if num_rows >= self._end_row:
            return
        kept = [chunk for chunk in self._chunks if chunk.first_row < num_rows]
        self._chunks = [chunk.rows_before(num_rows) for chunk in kept]
        self._end_row = num_rows
        self._first_row = min(self._first_row, num_rows)

    def take_up(self, num_rows: int) -> None:
        """The proposer has seen the first `num_rows`."""
        if num_rows <= self._first_row:
            return
        kept = [chunk for chunk in self._chunks if chunk.end_row > num_rows]
        self._chunks = [chunk.rows_from(max(num_rows, chunk.first_row)) for chunk in kept]
        self._first_row = num_rows


def missing(row: int) -> ItemError:
    """The error that makes the orchestrator re-open, and send all rows."""
    return ItemError(
        ErrorCode.HIDDEN_STATES_MISSING, f"hidden_states: those of row {row} are not here; send all again"
    )
