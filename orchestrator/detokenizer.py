"""Token ids to text, a few ids at a time."""

import codecs
from collections.abc import Iterable

from tandem.vocabulary import Vocabulary


class IncrementalDetokenizer:
    """Whatever the ids and their grouping: the deltas, `flush` included, join to `vocabulary.decode(ids)`.

    Bytes of a character that is not complete yet wait for the next ids; what can never become a character is
    U+FFFD. Ids outside the vocabulary have no text. `at_start` as in `Vocabulary.decode`.
    """

    def __init__(self, vocabulary: Vocabulary, skip_special: bool = True, at_start: bool = True) -> None:
        self._vocabulary = vocabulary
        self._hidden_ids = vocabulary.special_ids if skip_special else frozenset[int]()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._strip_next_space = at_start and vocabulary.strips_leading_space

    def push(self, token_ids: Iterable[int]) -> str:
        """The text that `token_ids` complete."""
        shown = (token_id for token_id in token_ids if token_id not in self._hidden_ids)
        return self._delta(b"".join(map(self._vocabulary.token_bytes, shown)), final=False)

    def flush(self) -> str:
        """The rest: U+FFFD if the ids ended inside a character. Nothing can be pushed meaningfully after it."""
        return self._delta(b"", final=True)

    def _delta(self, data: bytes, final: bool) -> str:
        text = self._decoder.decode(data, final)
        if text and self._strip_next_space:
            self._strip_next_space = False
            return text.removeprefix(" ")
        return text
