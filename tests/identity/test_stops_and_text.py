"""Where an answer ends and what its text is depend on its tokens alone, however rounds cut them.

Random outputs, ends and rounds, against a reference that looks at the whole text at every token.
"""

from collections.abc import Sequence as Tokens
from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.sequence import Sequence
from tandem.types import LogprobsOptions, Proposal
from tandem.vocabulary import Vocabulary
from tests.identity.plain import Answer, answer_of, complete_text
from tests.orchestrator.fakes import BYTES, LETTERS, PIECES, PROMPT, make_sequence, verdict_of

NUM_TOKENS = 24
MAX_DRAFTS = 8
# Few ids, so that stops are met; halves of characters, and the character that stands for broken ones.
VOCABULARIES = {"letters": LETTERS, "bytes": BYTES, "pieces": PIECES}
ALPHABETS = {
    "letters": LETTERS.encode("abc "),
    "bytes": [*sorted(set("ab 🔥é\ufffd".encode())), 256],
    "pieces": range(PIECES.vocab_size),
}


@dataclass(frozen=True)
class Case:
    """An output, what may end it, and the drafts of its rounds."""

    kind: str  # of vocabulary
    script: Tokens[int]
    stops: Tokens[str]
    include_stop: bool
    ending: Tokens[int]
    min_tokens: int
    max_tokens: int
    drafts: Tokens[tuple[int, int]]  # each round's: right ones, then wrong ones

    @property
    def vocabulary(self) -> Vocabulary:
        return VOCABULARIES[self.kind]

    def sequence(self) -> Sequence:
        return make_sequence(
            vocabulary=self.vocabulary,
            max_tokens=self.max_tokens,
            min_tokens=self.min_tokens,
            stops=self.stops,
            include_stop=self.include_stop,
            stop_token_ids=self.ending[:1],
            eos=self.ending[1:],
            logprobs=LogprobsOptions(),
            k=MAX_DRAFTS,
        )

    def proposal(self, sequence: Sequence, num_right: int, num_wrong: int) -> Proposal:
        start = sequence.num_completion_tokens
        right = self.script[start : start + num_right]
        wrong = [(token_id + 1) % self.vocabulary.vocab_size for token_id in self.script[start + len(right) :]]
        return Proposal(tuple([*right, *wrong[:num_wrong]][: sequence.num_draft_tokens()]))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    kind = draw(st.sampled_from(sorted(ALPHABETS)))
    vocabulary, alphabet = VOCABULARIES[kind], ALPHABETS[kind]
    script = draw(st.lists(st.sampled_from(alphabet), min_size=NUM_TOKENS, max_size=NUM_TOKENS))
    text = vocabulary.decode(script, at_start=False)
    parts = st.tuples(st.integers(0, len(text)), st.integers(1, 6)).map(lambda part: text[part[0] :][: part[1]])
    stops = draw(st.lists(st.one_of(parts, st.text("abc 🔥é\ufffd", max_size=5)).filter(bool), max_size=4))
    max_tokens = draw(st.integers(1, NUM_TOKENS))
    return Case(
        kind,
        script,
        stops,
        include_stop=draw(st.booleans()),
        ending=draw(st.lists(st.sampled_from(alphabet), max_size=2)) if draw(st.booleans()) else (),
        min_tokens=draw(st.integers(0, min(max_tokens, 8))),
        max_tokens=max_tokens,
        drafts=draw(st.lists(st.tuples(st.integers(0, MAX_DRAFTS), st.integers(0, 2)), min_size=1)),
    )


@settings(max_examples=500, derandomize=True)
@given(case=cases())
def test_streamed_answers_are_the_whole_text_cut_where_it_ends(case: Case) -> None:
    sequence = case.sequence()
    spec = sequence.session_spec()
    expected = answer_of(case.script, spec, case.vocabulary, case.stops, case.include_stop)
    longest = max(map(len, case.stops), default=1)
    text = ""
    logprobs: list[float] = []
    while sequence.finish_reason is None:
        proposal = case.proposal(sequence, *case.drafts[sequence.round % len(case.drafts)])
        output = sequence.commit(proposal, verdict_of(case.script, sequence, proposal.draft_token_ids))
        assert output.token_ids
        text += output.text
        logprobs += [entry.logprob for entry in output.logprobs]
        assert expected.text.startswith(text)
        if sequence.finish_reason is None:
            known = complete_text(case.vocabulary, sequence.tokens.token_ids[len(PROMPT) :])
            assert known.startswith(text)
            assert len(known) - len(text) < longest
    token_ids = tuple(sequence.tokens.token_ids[len(PROMPT) :])
    matched_stop = (
        sequence.matched_token_id if sequence.matched_token_id is not None else sequence.matched_stop_string
    )
    assert Answer(token_ids, text, sequence.finish_reason, matched_stop) == expected
    assert sequence.num_completion_tokens == len(expected.token_ids)
    assert logprobs == [-1.0 - index for index in range(len(token_ids))]  # the script's, one a token
