"""Going on with a generation whose orchestrator was lost: the same request again, with what has arrived."""

import random
from dataclasses import dataclass

from tandem.client_answers import AnswersFolder
from tandem.client_errors import TandemError, UnavailableError
from tandem.orchestrator.v1 import orchestrator_pb2 as pb

FIRST_WAIT_S, LONGEST_WAIT_S = 0.1, 3.0


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a client looks for an orchestrator that goes on."""

    num_tries: int = 12  # in a row without a token
    num_addresses: int = 1  # called in turn; once no certificate of theirs is right, there is nothing to wait for

    def wait_s(self, num_failures: int) -> float:
        """Before the next try: doubled each time up to a limit, times a random 0.5 .. 1.5."""
        longest = min(FIRST_WAIT_S * 2.0 ** min(num_failures - 1, 16), LONGEST_WAIT_S)
        return longest * random.uniform(0.5, 1.5)


class Resumption:
    """What to do after each failure of one generation."""

    def __init__(self, request: pb.GenerateRequest, folder: AnswersFolder, patience: Patience | None) -> None:
        """`patience`: None for a client that does not go on by itself."""
        self.request = request  # of the next call
        self.num_resumes = 0
        self._folder = folder
        self._patience = patience
        self._num_failures = 0  # in a row
        self._num_lasting = 0  # of them, the last ones in a row
        self._num_tokens = 0  # at the last failure

    def wait_s(self, error: TandemError) -> float | None:
        """Seconds until `request` is to be sent; None when the error is the application's to see."""
        if self._patience is None or not isinstance(error, UnavailableError):
            return None
        self._num_lasting = self._num_lasting + 1 if error.is_lasting else 0
        if self._num_lasting >= self._patience.num_addresses:
            return None
        num_tokens = self._folder.num_tokens
        self._num_failures = 1 if num_tokens > self._num_tokens else self._num_failures + 1
        self._num_tokens = num_tokens
        if self._num_failures >= self._patience.num_tries:
            return None
        self.request = self._folder.resuming(self.request)
        self.num_resumes += 1
        return self._patience.wait_s(self._num_failures)
