"""Proposer `ngram`: copies what followed, proposes nothing where nothing repeats, never changes the output."""

import pytest

from draft_service.proposers.base import ProposeInput, SessionKey
from draft_service.proposers.ngram import NgramProposer
from engine.backends.toy_backend import hashed_logits, scripted_logits
from tandem.prompt_lookup import PromptLookup
from tandem.types import Proposal, SessionSpec, VerificationPolicy
from tests.draft.support import VOCAB, commit, decide, make_spec

PROPOSER = NgramProposer(PromptLookup())


def propose(*sequences: list[int], num_draft_tokens: int = 4, proposer: NgramProposer = PROPOSER) -> list[Proposal]:
    return proposer.propose(
        [
            ProposeInput(SessionKey(index), make_spec(tokens), tokens, num_draft_tokens)
            for index, tokens in enumerate(sequences)
        ]
    )


def generate(spec: SessionSpec, num_draft_tokens: int) -> tuple[list[int], int]:
    """The tokens of a whole generation and the number of its rounds; 0 drafts is plain decoding."""
    logits_of = scripted_logits([7, 8, 9, 7, 8, 5], VOCAB) if spec.sampling.is_greedy else hashed_logits(VOCAB)
    committed, num_rounds = list(spec.token_ids), 0
    while len(committed) < spec.max_len:
        wanted = min(num_draft_tokens, spec.max_len - len(committed) - 1)
        item = ProposeInput(SessionKey(1), spec, tuple(committed), wanted)
        proposal = PROPOSER.propose([item])[0] if wanted else Proposal()
        commit(committed, proposal, decide(logits_of, spec, committed, proposal))
        num_rounds += 1
    return committed, num_rounds


def test_each_session_of_a_batch_gets_its_own_drafts_up_to_what_it_wants() -> None:
    repeating, short = [1, 2, 3, 4, 5, 6, 1, 2], [1]
    assert propose(repeating, short, repeating) == [Proposal((3, 4, 5, 6)), Proposal(), Proposal((3, 4, 5, 6))]
    assert propose(repeating, num_draft_tokens=2) == [Proposal((3, 4))]


@pytest.mark.parametrize("prompt", [[1], [1, 1], [1, 2]])
def test_a_prompt_shorter_than_the_smallest_ngram_gets_no_drafts_alone_or_in_a_batch(prompt: list[int]) -> None:
    proposer = NgramProposer(PromptLookup(max_ngram_size=5, min_ngram_size=3))
    long = [1, 2, 3, 9, 1, 2, 3]
    assert propose(prompt, proposer=proposer) == [Proposal()]
    assert propose(prompt, long, prompt, proposer=proposer) == [Proposal(), Proposal((9, 1, 2, 3)), Proposal()]


def test_on_repeating_text_the_output_is_that_of_plain_decoding_in_fewer_rounds() -> None:
    spec = make_spec([3, 4], max_tokens=40)
    plain, num_plain_rounds = generate(spec, 0)
    drafted, num_rounds = generate(spec, 4)
    assert drafted == plain
    assert num_plain_rounds == 40
    assert num_rounds < 20


def test_under_rejection_a_one_hot_proposal_is_verified_and_the_run_ends_in_time() -> None:
    spec = make_spec([1, 2, 1], max_tokens=30, policy=VerificationPolicy.REJECTION, temperature=0.5)
    tokens, _ = generate(spec, 4)
    assert len(tokens) == spec.max_len
