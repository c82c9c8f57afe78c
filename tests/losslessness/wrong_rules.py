"""Rules that look right and are not: what the chi-square must find.

Each takes the place of one policy's rule in the target. All were met in public systems, or are one slip away.

Letters: K drafts, V vocabulary.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from unittest import mock

import torch

from engine.sampling import policies
from engine.sampling.block import acceptance_steps
from engine.sampling.gumbel import NoiseKey, gumbel_argmax, noise_key, uniform
from engine.sampling.policies import Decision, VerifyRows, draft_q
from engine.sampling.rejection import Q, acceptance_probability, probabilities, residual, sample_weights
from engine.sampling.sampler import sample_row
from tandem.rng import F64, Stream
from tandem.types import VerificationPolicy

Rule = Callable[[torch.Tensor, VerifyRows], Decision]


def fresh_draw_after_a_difference(processed: torch.Tensor, request: VerifyRows) -> Decision:
    """`coupled`, but a draft that is not the target's choice is followed by another draw instead of that choice."""
    for index, draft_token_id in enumerate(request.proposal.draft_token_ids):
        row = processed[index]
        if sample_row(row, request.row(index)) != draft_token_id:
            return Decision(index, gumbel_argmax(row.numpy(), _key(request, index, Stream.RESIDUAL)))
    return _plain(processed, request)


def recovered_from_the_target(processed: torch.Tensor, request: VerifyRows) -> Decision:
    """`rejection`, but what follows a rejected draft is sampled from p: the draft's share is given twice."""
    return _reject(processed, request, lambda p, q, index: sample_weights(p, _key(request, index, Stream.RESIDUAL)))


def recovered_with_the_drafts_noise(processed: torch.Tensor, request: VerifyRows) -> Decision:
    """`rejection`, but the recovered token is drawn with the noise that the draft was drawn with."""
    return _reject(
        processed, request, lambda p, q, index: sample_weights(residual(p, q), _key(request, index, Stream.DRAFT))
    )


def block_that_stops_at_a_failure(processed: torch.Tensor, request: VerifyRows) -> Decision:
    """`block`, but the search for the last draft that stands ends where one fails, as `rejection`'s does."""
    draft_token_ids = request.proposal.draft_token_ids
    p = [probabilities(row) for row in processed]
    q = [draft_q(request, index) for index in range(len(draft_token_ids))]
    num_accepted, weight_after = 0, 1.0
    for index, (weight, chance) in enumerate(acceptance_steps(p[:-1], q, draft_token_ids)):
        if uniform(_key(request, index, Stream.ACCEPT)) >= chance:
            rest = residual(p[num_accepted], q[num_accepted], weight_after)
            return Decision(num_accepted, sample_weights(rest, _key(request, num_accepted, Stream.RESIDUAL)))
        num_accepted, weight_after = index + 1, weight
    return _plain(processed, request)


RULES: Mapping[str, Rule] = MappingProxyType(
    {
        "fresh draw after a difference": fresh_draw_after_a_difference,
        "recovered from the target": recovered_from_the_target,
        "recovered with the draft's noise": recovered_with_the_drafts_noise,
        "stops at a failure": block_that_stops_at_a_failure,
    }
)


@contextlib.contextmanager
def in_place_of(policy: VerificationPolicy, name: str | None) -> Iterator[None]:
    """Inside, this process's targets verify `policy` by the named rule; by its own for None."""
    rules = policies._RULES if name is None else {**policies._RULES, policy: RULES[name]}
    with mock.patch.object(policies, "_RULES", rules):
        yield


def _reject(processed: torch.Tensor, request: VerifyRows, recover: Callable[[F64, Q, int], int]) -> Decision:
    """Each draft by itself; `recover` chooses what follows the first rejected one."""
    for index, draft_token_id in enumerate(request.proposal.draft_token_ids):
        p, q = probabilities(processed[index]), draft_q(request, index)
        if uniform(_key(request, index, Stream.ACCEPT)) >= acceptance_probability(p, q, draft_token_id):
            return Decision(index, recover(p, q, index))
    return _plain(processed, request)


def _plain(processed: torch.Tensor, request: VerifyRows) -> Decision:
    """All drafts stand."""
    num_drafts = len(request.proposal.draft_token_ids)
    return Decision(num_drafts, sample_row(processed[num_drafts], request.row(num_drafts)))


def _key(request: VerifyRows, index: int, stream: Stream) -> NoiseKey:
    row = request.row(index)
    return noise_key(request.spec, stream, row.position, row.committed_len)
