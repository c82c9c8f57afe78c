"""Proposer `synthetic`: drafts that are right exactly as often as was asked, for tests and for planning capacity.

The target's own model drafts, so under `greedy` and `coupled` a draft is the token that the target will choose. Then
draft i of a round is made wrong with probability 1 - rate i. A wrong draft is refused and ends what can be accepted,
so of the rounds that accept i drafts a share of rate i accepts draft i as well, and the text stays the target's own.
"""

import argparse
from collections.abc import Sequence
from dataclasses import replace

from draft_service.proposers.base import (
    DraftKvUsage,
    MissingHiddenStates,
    ProposeInput,
    Proposer,
    ProposerCapabilities,
    SessionKey,
)
from draft_service.proposers.kind import OptionGroup, ProposerError, ProposerKind, ProposerSettings
from tandem.rng import Stream, stream_word, uniform
from tandem.types import DraftProbsTransport, Proposal, SessionSpec, VerificationPolicy
from tandem.validation import check_range

_RATES_EXAMPLE = "0.9,0.8,0.7"


class SyntheticProposer:
    """Spoils the drafts of a proposer that is always right."""

    def __init__(self, right: Proposer, num_token_ids: int, acceptance_rates: Sequence[float]) -> None:
        """Drafts past the last rate have the last one.

        Args:
            right: drafts what the target will choose; at least two ids, all below `num_token_ids`.
        """
        self._right = right
        self._num_token_ids = num_token_ids
        self._rates = checked_rates(acceptance_rates)
        self._last = len(self._rates) - 1

    @property
    def capabilities(self) -> ProposerCapabilities:
        """The right one's; under a ratio test even its drafts would be refused now and then."""
        return replace(
            self._right.capabilities,
            name="synthetic",
            transports=frozenset({DraftProbsTransport.ONE_HOT, DraftProbsTransport.COUPLED}),
            policies=frozenset({VerificationPolicy.GREEDY, VerificationPolicy.COUPLED}),
        )

    def propose(self, batch: Sequence[ProposeInput]) -> list[Proposal | MissingHiddenStates | None]:
        """As many drafts as the right proposer makes, and when it makes them, at most one of them wrong."""
        proposals = self._right.propose(batch)
        return [
            self._spoil(proposal, item) if isinstance(proposal, Proposal) else proposal
            for proposal, item in zip(proposals, batch, strict=True)
        ]

    def forget(self, session_key: SessionKey) -> None:
        """As the right one."""
        self._right.forget(session_key)

    def kv_usage(self) -> DraftKvUsage | None:
        """The right one's."""
        return self._right.kv_usage()

    def _spoil(self, proposal: Proposal, item: ProposeInput) -> Proposal:
        """The proposal with its first unlucky draft made wrong; whatever comes after that one cannot be accepted."""
        token_ids = list(proposal.draft_token_ids)
        committed_len = len(item.committed_token_ids)
        for index, token_id in enumerate(token_ids):
            if _luck(item.spec, committed_len + index, committed_len) >= self._rates[min(index, self._last)]:
                token_ids[index] = self._wrong_token_id(token_id, item.spec)
                break
        return Proposal(tuple(token_ids))

    def _wrong_token_id(self, token_id: int, spec: SessionSpec) -> int:
        """Another id, which does not end the chain unless every other one does."""
        others = ((token_id + step) % self._num_token_ids for step in range(1, self._num_token_ids))
        fallback = (token_id + 1) % self._num_token_ids
        return next((other for other in others if other not in spec.ending_token_ids), fallback)


def _luck(spec: SessionSpec, position: int, committed_len: int) -> float:
    """The position's scalar of the DRAFT stream, uniform in (0, 1).

    Luck must not depend on the text. Under `greedy` and `coupled` every token follows from the logits and the TARGET
    stream; nothing there looks at the DRAFT stream, so its draws are independent of all tokens. They carry the round's
    base, which grows with every round, so no draw is used twice: what earlier rounds accepted says nothing about this.
    """
    assert spec.sampling.seed is not None  # no session is without
    word = stream_word(Stream.DRAFT, position, committed_len)
    return uniform(spec.sampling.seed, word, position, spec.sample_index)


def checked_rates(rates: Sequence[float]) -> tuple[float, ...]:
    """The rates; ValueError when there is none, or naming the first that is no probability."""
    if not rates:
        raise ValueError("acceptance_rates: at least 1 rate is needed")
    for index, rate in enumerate(rates):
        check_range(f"acceptance_rates[{index}]", rate, 0.0, 1.0)
    return tuple(rates)


def parse_rates(text: str) -> tuple[float, ...]:
    """ "0.9,0.8" -> (0.9, 0.8); ArgumentTypeError otherwise."""
    try:
        return checked_rates([float(rate) for rate in text.split(",")])
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def add_options(group: OptionGroup) -> None:
    """Add --acceptance-rates."""
    group.add_argument(
        "--acceptance-rates",
        type=parse_rates,
        metavar="RATE,...",
        help=f"how often a round's 1st, 2nd, ... draft is right, e.g. {_RATES_EXAMPLE}; the last holds for later ones",
    )


def load_synthetic(settings: ProposerSettings) -> SyntheticProposer:
    """With the model of `draft_model`'s options, which must be the target's."""
    from draft_service.proposers.draft_model import load_whole_model  # torch, only for who needs it

    if settings.options.acceptance_rates is None:
        raise ProposerError(f"needs --acceptance-rates, e.g. {_RATES_EXAMPLE}")
    right = load_whole_model(settings)
    return SyntheticProposer(right, right.num_token_ids, settings.options.acceptance_rates)


KIND = ProposerKind(load_synthetic, add_options)
