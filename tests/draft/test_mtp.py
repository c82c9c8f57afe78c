"""Proposer `mtp`: the drafts of its definition from one state a round, whatever the batch."""

import pytest
import torch

from draft_service.proposers.base import HiddenStatesNeed, MissingHiddenStates, ProposeInput
from draft_service.proposers.model_base import ModelIdentity
from draft_service.proposers.mtp import MtpProposer
from engine.backends.torch_backend import TorchEngine
from engine.heads.artefact import ArtefactError
from engine.heads.mtp import build_mtp
from engine.kernels.cpu_reference import TorchKernels
from engine.models.linear import PackedLinear
from tandem.types import Proposal
from tests.fixtures.tiny_models import tiny_model
from tests.heads import StatesOf, naive_mtp, random_eagle, random_mtp

TARGET = tiny_model("llama")
ARTEFACT = random_mtp(TARGET)


def make(num_blocks: int = 64) -> MtpProposer:
    head = build_mtp(ARTEFACT, TARGET, torch.float32, PackedLinear, 256)
    engine = TorchEngine(head, TorchKernels(), num_blocks=num_blocks, block_size=4)
    need = HiddenStatesNeed(head.layers, TARGET.config.hidden_size)
    return MtpProposer(engine, head, ModelIdentity("mtp", hidden_states=need))


def right(target: StatesOf, length: int, num_drafts: int = 3) -> Proposal:
    state = target.states[length - 2, 0].float()
    return Proposal(tuple(naive_mtp(ARTEFACT, TARGET, target.tokens[:length], state, num_drafts)))


def test_the_drafts_are_those_of_the_definition_even_past_the_last_step_with_norms() -> None:
    target = StatesOf(1, 1)
    for length in (2, 3, 9):
        for num_drafts in (1, 3, 6):
            item = target.input(1, length, 0, num_drafts)
            assert make().propose([item]) == [right(target, length, num_drafts)]


def test_rounds_of_a_batch_need_only_the_last_row_and_leave_nothing() -> None:
    proposer, targets = make(), [StatesOf(seed, 1) for seed in range(3)]
    for length in (5, 6, 9, 13):
        batch = [target.input(n, length + n, length + n - 2, 1 + n) for n, target in enumerate(targets)]
        assert proposer.propose(batch) == [right(t, length + n, 1 + n) for n, t in enumerate(targets)]
        assert all(proposer.kv.num_rows(item.session_key) == 0 for item in batch)


def test_a_round_without_its_row_asks_for_it() -> None:
    item = StatesOf(2, 1).input(1, 6, 5)
    assert item.hidden_states == ()
    assert make().propose([item]) == [MissingHiddenStates()]
    one: ProposeInput = StatesOf(2, 1).input(1, 1)
    assert make().propose([one]) == [Proposal()]  # there is no state yet


def test_a_head_of_another_kind_is_refused() -> None:
    with pytest.raises(ArtefactError, match="a head of kind 'eagle', not 'mtp'"):
        build_mtp(random_eagle(TARGET), TARGET, torch.float32, PackedLinear, 64)
