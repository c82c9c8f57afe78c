"""Proposer `eagle`: the drafts of its definition, whatever the batch, the rounds before and the memory."""

from collections.abc import Sequence

import pytest
import torch

from draft_service.proposers.base import (
    HiddenStatesNeed,
    MissingHiddenStates,
    ProposeInput,
    SessionKey,
)
from draft_service.proposers.eagle import EagleProposer
from draft_service.proposers.model_base import Drafting, ModelIdentity
from engine.backends.torch_backend import TorchEngine
from engine.heads.eagle import build_eagle
from engine.kernels.cpu_reference import TorchKernels
from engine.models.linear import PackedLinear
from tandem.types import Proposal, SessionSpec
from tests.draft.support import coupled_spec
from tests.fixtures.tiny_models import tiny_model
from tests.heads import LAYERS, NaiveEagle, StatesOf, random_eagle

TARGET = tiny_model("llama")
ARTEFACT = random_eagle(TARGET)
NAIVE = NaiveEagle(ARTEFACT, TARGET)
NEED = HiddenStatesNeed(LAYERS, TARGET.config.hidden_size)


def make(
    num_blocks: int = 64, block_size: int = 4, max_step_tokens: int = 512, max_context: int = 256
) -> EagleProposer:
    head = build_eagle(ARTEFACT, TARGET, torch.float32, PackedLinear, max_context)
    engine = TorchEngine(head, TorchKernels(), num_blocks=num_blocks, block_size=4)
    return EagleProposer(engine, head, ModelIdentity("eagle", hidden_states=NEED), Drafting(max_step_tokens))


class Target(StatesOf):
    """With the right drafts."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed, len(LAYERS))

    def drafts(self, length: int, num_drafts: int = 3) -> Proposal:
        states = self.states[: length - 1].float()
        return Proposal(tuple(NAIVE.greedy(self.tokens[:length], states, num_drafts)))


def proposals(proposer: EagleProposer, *batch: ProposeInput) -> list[Proposal | MissingHiddenStates | None]:
    return proposer.propose(batch)


def test_the_drafts_are_those_of_the_definition_for_every_length_and_k() -> None:
    target = Target(1)
    for length in (2, 3, 7, 30):
        for num_drafts in (1, 2, 5):
            proposer = make()
            assert proposals(proposer, target.input(1, length, 0, num_drafts)) == [
                target.drafts(length, num_drafts)
            ]


def test_sessions_of_a_batch_each_have_their_own_k_and_no_step_is_computed_for_who_wants_no_more() -> None:
    proposer, targets = make(), [Target(seed) for seed in range(4)]
    steps: list[int] = []
    forward = proposer._forward

    def counted(inputs: Sequence[object], *rest: object) -> object:
        steps.append(len(inputs))
        return forward(inputs, *rest)  # type: ignore[arg-type]

    proposer._forward = counted  # type: ignore[method-assign, assignment]
    batch = [target.input(n, 5 + 3 * n, 0, 1 + n) for n, target in enumerate(targets)]
    assert proposals(proposer, *batch) == [target.drafts(5 + 3 * n, 1 + n) for n, target in enumerate(targets)]
    assert steps == [4, 3, 2, 1]


def test_later_rounds_feed_the_targets_states_in_place_of_its_own() -> None:
    proposer, target = make(), Target(2)
    length, known = 6, 0
    for num_new in (1, 2, 3, 4, 1, 4):
        assert proposals(proposer, target.input(1, length, known)) == [target.drafts(length)]
        assert proposer.kv.num_rows(SessionKey(1)) == length - 1
        known, length = length - 1, length + num_new


def test_a_prompt_longer_than_its_share_of_a_step_is_caught_up_in_parts() -> None:
    proposer, long, short = make(max_step_tokens=8), Target(3), Target(4)
    answers = []
    for _ in range(8):
        answers.append(proposals(proposer, long.input(1, 30), short.input(2, 4)))
        if answers[-1][0] is not None:
            break
    assert answers[-1] == [long.drafts(30), short.drafts(4)]
    assert [answer[0] for answer in answers[:-1]] == [None] * (len(answers) - 1)
    assert len(answers) > 3


def test_rows_that_were_lost_are_asked_for_and_then_drafted_from() -> None:
    proposer, target = make(), Target(5)
    assert proposals(proposer, target.input(1, 6)) == [target.drafts(6)]
    proposer.kv.release(SessionKey(1))
    assert proposals(proposer, target.input(1, 8, 5)) == [MissingHiddenStates()]
    assert proposals(proposer, target.input(1, 8, 0)) == [target.drafts(8)]


def test_without_memory_a_session_has_no_drafts_and_leaves_no_rows() -> None:
    proposer, older, younger = make(num_blocks=4), Target(6), Target(7)
    assert proposals(proposer, older.input(1, 14), younger.input(2, 9)) == [older.drafts(14), Proposal()]
    proposer.forget(SessionKey(1))
    assert proposals(proposer, younger.input(2, 9)) == [younger.drafts(9)]
    proposer.forget(SessionKey(2))
    assert proposer.kv_usage().blocks.used_blocks == 0


def test_at_the_end_of_the_context_it_drafts_less_and_then_nothing() -> None:
    proposer, target = make(max_context=10), Target(8)
    assert proposals(proposer, target.input(1, 11)) == [target.drafts(11, 1)]
    assert proposals(proposer, target.input(1, 12)) == [Proposal()]
    assert proposals(proposer, target.input(2, 1)) == [Proposal()]  # there is no state yet


def test_sampled_drafts_are_of_the_reduced_vocabulary_and_of_the_targets_noise() -> None:
    target = Target(9)
    spec: SessionSpec = coupled_spec(target.tokens[:2], max_tokens=200, temperature=2.0)
    item = target.input(1, 8)
    sampled = ProposeInput(item.session_key, spec, item.committed_token_ids, 5, item.hidden_states)
    (first,), (again,) = make().propose([sampled]), make().propose([sampled])
    assert isinstance(first, Proposal)
    assert first == again
    assert first != target.drafts(8, 5)
    assert all(60 <= token_id < 160 for token_id in first.draft_token_ids)


@pytest.mark.parametrize("needed", [LAYERS])
def test_the_handshake_says_which_states_it_needs(needed: tuple[int, ...]) -> None:
    capabilities = make().capabilities
    assert capabilities.name == "eagle"
    assert capabilities.hidden_states == HiddenStatesNeed(needed, 64)
    assert capabilities.model.vocab_size == 160
