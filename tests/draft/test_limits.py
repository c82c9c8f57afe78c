"""Limits: whole distributions as far as one proposal may hold them, and what cannot be or contradicts is refused."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from draft_service.limits import DraftLimits, Offer
from draft_service.proposers.base import ProposerCapabilities
from draft_service.proposers.draft_model import DraftModelProposer
from engine.backends.base import KvUsage
from engine.backends.toy_backend import ToyEngine, hashed_logits
from tandem.types import DraftProbsTransport, ErrorCode, ModelInfo, SessionSpec, VerificationPolicy
from tests.draft.support import VOCAB, coupled_spec, make_spec
from tests.draft.wire import Peer, error_of, open_item, proposal_of, propose_item, running

PROMPT = (1, 2, 3)
DRAFT_BYTES = 4 * VOCAB


def sampled(
    transport: DraftProbsTransport, policy: VerificationPolicy = VerificationPolicy.REJECTION
) -> SessionSpec:
    return make_spec(PROMPT, policy=policy, transport=transport, temperature=1.0)


FULL = sampled(DraftProbsTransport.FULL)


def on_a_stream(act: Callable[[Peer], Awaitable[None]], max_draft_probs_bytes: int) -> None:
    """Run against a real server of a toy draft model."""
    proposer = DraftModelProposer(ToyEngine(hashed_logits(VOCAB), VOCAB))

    async def main() -> None:
        async with running(proposer, DraftLimits(max_draft_probs_bytes=max_draft_probs_bytes)) as server:
            peer = Peer(server.stub.Propose())
            await act(peer)
            peer.call.cancel()

    asyncio.run(asyncio.wait_for(main(), 20))


@pytest.mark.parametrize("policy", [VerificationPolicy.REJECTION, VerificationPolicy.BLOCK])
def test_as_many_drafts_are_granted_as_one_proposal_may_hold_distributions_of(policy: VerificationPolicy) -> None:
    async def act(peer: Peer) -> None:
        await peer.ask(open_item(sampled(DraftProbsTransport.FULL, policy)))
        proposal = proposal_of(await peer.ask(propose_item(PROMPT, 1, 3, num_draft_tokens=8)))
        assert len(proposal.draft_token_ids) == 3
        assert [entry.probs.size for entry in proposal.draft_probs] == [VOCAB] * 3

    on_a_stream(act, 4 * DRAFT_BYTES - 1)


@pytest.mark.parametrize(
    "spec",
    [sampled(DraftProbsTransport.SPARSE), sampled(DraftProbsTransport.ONE_HOT), coupled_spec(PROMPT), make_spec()],
)
def test_the_limit_takes_no_draft_of_a_session_that_sends_no_whole_distributions(spec: SessionSpec) -> None:
    async def act(peer: Peer) -> None:
        await peer.ask(open_item(spec))
        proposal = proposal_of(await peer.ask(propose_item(PROMPT, 1, 3, num_draft_tokens=8)))
        assert len(proposal.draft_token_ids) == 8

    on_a_stream(act, 1)


def test_a_session_of_which_not_one_draft_fits_is_refused_naming_both_figures() -> None:
    async def act(peer: Peer) -> None:
        code, message = error_of(await peer.ask(open_item(FULL)))
        assert code is ErrorCode.INVALID_ARGUMENT
        assert message == (
            "draft_probs_transport 'full': one draft of 32 ids takes 128 bytes, "
            "more than the limit of 127 of a proposal"
        )
        assert (await peer.ask(open_item(make_spec(), session=2))).WhichOneof("outcome") == "opened"

    on_a_stream(act, DRAFT_BYTES - 1)


@pytest.mark.parametrize(("vocab_size", "expected"), [(152_064, 16), (262_144, 16), (300_000, 13), (1 << 22, 1)])
def test_the_limit_as_it_is_grants_what_large_vocabularies_leave_room_for(vocab_size: int, expected: int) -> None:
    transports = frozenset(DraftProbsTransport)
    capabilities = ProposerCapabilities("any", False, False, transports, model=ModelInfo(vocab_size=vocab_size))
    assert Offer(DraftLimits(), capabilities).max_draft_tokens(FULL) == expected


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"max_draft_tokens": 0}, "--max-draft-tokens 0 is less than 1"),
        ({"max_sessions": 0}, "--max-sessions 0 is less than 1"),
        ({"max_batch": -1}, "--max-batch -1 is less than 1"),
        ({"session_lease_s": 0.0}, "--session-lease 0 is not above 0"),
    ],
)
def test_limits_that_cannot_be_are_refused_by_name(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        DraftLimits(**fields)


def test_limits_that_contradict_the_engine_are_refused_naming_both() -> None:
    limits = DraftLimits(max_draft_tokens=9, max_batch=8)
    limits.check_step(8)
    with pytest.raises(ValueError, match="--max-batch 8 is more than --max-step-tokens 7"):
        limits.check_step(7)
    limits.check_memory(KvUsage(3, 0, 0, 3, block_size=3))
    with pytest.raises(ValueError, match=r"--kv-memory has room for 8 tokens .* --max-draft-tokens 9 needs 9"):
        limits.check_memory(KvUsage(2, 0, 0, 2, block_size=4))
