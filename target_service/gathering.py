"""Whom the next step waits for: sessions whose verdicts have just gone out and who send their next round at once.

Rounds that arrive while a step is being computed could take the next step for themselves. Those of the step before
would then come just too late for it, and so on: two half batches that take turns for ever, though a step of all
would hardly take longer than one of half of them. The same happens to every session beside a long prompt. A short
wait after a step brings them together once, and then they stay together.

The wait is at most a share of the step before it. Nobody is waited for whose next round took longer the last time,
for instance because a draft model is asked in between.
"""

from target_service.answers import StreamId, StreamSessionId

WAIT_SHARE = 1 / 8  # of the last step's time


class Gathering:
    """Times in seconds on the event loop's clock."""

    def __init__(self) -> None:
        self._answered_s: dict[StreamSessionId, float] = {}  # sessions whose next round is to come
        self._slow: set[StreamSessionId] = set()  # took longer than a wait the last time
        self._expected: set[StreamSessionId] = set()  # were part of the last step and may come in time
        self._longest_wait_s = 0.0
        self._until_s = 0.0

    @property
    def until_s(self) -> float:
        """When to wait no longer."""
        return self._until_s

    @property
    def is_complete(self) -> bool:
        """Whether everyone who was expected is there."""
        return not self._expected

    def end_step(self, started_s: float, now_s: float) -> None:
        """A step has ended; its verdicts are `answered` next."""
        self._expected.clear()
        self._longest_wait_s = WAIT_SHARE * (now_s - started_s)
        self._until_s = now_s + self._longest_wait_s

    def answered(self, key: StreamSessionId, now_s: float) -> None:
        """A verdict goes out, and another round is to come."""
        self._answered_s[key] = now_s
        if key not in self._slow:
            self._expected.add(key)

    def arrived(self, key: StreamSessionId, now_s: float) -> None:
        """The session has sent something."""
        self._expected.discard(key)
        answered_s = self._answered_s.pop(key, None)
        if answered_s is None:
            return
        if now_s - answered_s <= self._longest_wait_s:
            self._slow.discard(key)
        else:
            self._slow.add(key)

    def forget(self, key: StreamSessionId) -> None:
        """The session has ended."""
        self._answered_s.pop(key, None)
        self._slow.discard(key)
        self._expected.discard(key)

    def forget_stream(self, stream_id: StreamId) -> None:
        """All sessions of the stream have ended."""
        for key in {*self._answered_s, *self._slow}:
            if key[0] == stream_id:
                self.forget(key)
