"""What may leave the service: a proposal cut down to the drafts that the round can use, whoever made it."""

import logging

from draft_service.proposers.base import ProposeInput
from tandem.types import Proposal, SessionSpec

_log = logging.getLogger(__name__)


def trim_proposal(proposal: Proposal, item: ProposeInput, vocab_size: int) -> Proposal:
    """The longest usable start of a proposal.

    Drafts past an ending id are cut silently, and so is an ending id where min_tokens forbids it: the target could
    never accept them. One that was sampled from a q that travels stays, though: refusing a sampled draft for its value
    would bias what comes in its place. Everything else that is cut is a fault of the proposer's and logged: more drafts
    than were asked for, ids outside the vocabulary, a tree, missing draft_probs.
    """
    fault = _fault(proposal, item.spec)
    if fault:
        _log.warning("proposal dropped: %s", fault)
        return Proposal()
    drafts = proposal.draft_token_ids
    num_valid = next(
        (index for index, token_id in enumerate(drafts) if not 0 <= token_id < vocab_size), len(drafts)
    )
    num_valid = min(num_valid, item.num_draft_tokens)
    if num_valid < len(drafts):
        _log.warning(
            "proposal cut from %d drafts to %d: %d were asked for, ids must be in 0..%d",
            len(drafts),
            num_valid,
            item.num_draft_tokens,
            vocab_size - 1,
        )
    num_kept = min(num_valid, _num_until_end(drafts, item))
    return Proposal(drafts[:num_kept], proposal.draft_probs[:num_kept])


def _fault(proposal: Proposal, spec: SessionSpec) -> str:
    """Why no draft of the proposal can be used; empty when some can."""
    num_drafts, num_probs = len(proposal.draft_token_ids), len(proposal.draft_probs)
    if proposal.parents:
        return "it is a tree"
    if num_probs != num_drafts and (spec.uses_draft_probs or num_probs):
        return f"{num_probs} draft_probs for {num_drafts} drafts"
    return ""


def _num_until_end(drafts: tuple[int, ...], item: ProposeInput) -> int:
    """How many drafts there are up to an ending id, itself included where it may end the generation or was sampled."""
    output_len = len(item.committed_token_ids) - item.spec.prompt_len
    num_forbidden = 0 if item.spec.uses_draft_probs else item.spec.min_tokens - output_len
    for index, token_id in enumerate(drafts):
        if token_id in item.spec.ending_token_ids:
            return index + (index >= num_forbidden)
    return len(drafts)
