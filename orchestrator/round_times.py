"""How long a replica takes for a round, and how long one should be waited for.

Smoothed mean and deviation, and a limit that doubles when it was too short, are those of TCP's retransmission timer
(RFC 6298), whose question is the same.
"""

_MEAN_SHARE, _DEVIATION_SHARE = 1 / 8, 1 / 4  # of a new time in what is known
_NUM_DEVIATIONS = 8.0  # a draft that is given up in vain costs more than one that is waited for a little
_LEAST_S = 0.25
LONGEST_S = 5.0


class RoundTimes:
    """Of all sessions on one replica."""

    def __init__(self) -> None:
        self._mean_s: float | None = None
        self._deviation_s = 0.0
        self._num_late = 0  # in a row

    @property
    def limit_s(self) -> float:
        """Longest wait for a round now; LONGEST_S while nothing is known."""
        if self._mean_s is None:
            return LONGEST_S
        limit_s = max(_LEAST_S, self._mean_s + _NUM_DEVIATIONS * self._deviation_s)
        return min(LONGEST_S, limit_s * 2.0 ** min(self._num_late, 16))

    def took(self, time_s: float) -> None:
        """A round was answered."""
        self._num_late = 0
        if self._mean_s is None:
            self._mean_s, self._deviation_s = time_s, time_s / 2
            return
        self._deviation_s += _DEVIATION_SHARE * (abs(time_s - self._mean_s) - self._deviation_s)
        self._mean_s += _MEAN_SHARE * (time_s - self._mean_s)

    def was_late(self) -> None:
        """A round was not answered within the limit."""
        self._num_late += 1
