"""The algorithm of speculative decoding, as one request sees it. Everything else in this project serves this page.

A small draft model guesses the next K tokens; the large target model scores all of them in ONE forward pass and
keeps the leading ones that it would have chosen itself, plus one token of its own. Each round therefore yields
1 .. K+1 tokens of the target's own output, for about the price of one.

There is one kind of round. Greedy or sampled, with or without a draft service, and when the draft service is
slow, wrong or dead: an empty proposal is plain decoding.

Source: Leviathan et al., "Fast inference from transformers via speculative decoding", 2023; Chen et al.,
"Accelerating large language model decoding with speculative sampling", 2023.
"""

from collections.abc import AsyncGenerator
from typing import Protocol

from orchestrator.sequence import RoundOutput, Sequence
from tandem.types import Proposal, Verdict


class ProposerSession(Protocol):
    """One request's session at the draft service, or none."""

    async def propose(self, sequence: Sequence) -> Proposal:
        """At most `sequence.num_draft_tokens()` drafts that continue the sequence. Never fails: empty instead."""
        ...

    def close(self, sequence: Sequence) -> None:
        """Free the session; waits for nothing."""
        ...


class VerifierSession(Protocol):
    """One request's session at the target service."""

    def open(self, sequence: Sequence) -> None:
        """Let the target begin with the prompt; waits for nothing."""
        ...

    async def verify(self, sequence: Sequence, proposal: Proposal) -> Verdict:
        """What the target decides about the sequence's current round; ServiceError if it never will."""
        ...

    def close(self, sequence: Sequence) -> None:
        """Free the session; waits for nothing."""
        ...


async def generate(
    sequence: Sequence, proposer: ProposerSession, verifier: VerifierSession
) -> AsyncGenerator[RoundOutput, None]:
    """Run rounds until the sequence has ended, yielding what each adds to the answer.

    Both sessions are freed however this ends: finished, failed, or closed by whoever iterates.
    """
    try:
        # 0. Open: the target works on the prompt while the first drafts are made.
        if sequence.finish_reason is None:  # a resumed answer may have ended before
            verifier.open(sequence)
        while sequence.finish_reason is None:
            # 1. Propose: the draft service guesses up to K tokens.
            proposal = await proposer.propose(sequence)
            # 2. Verify: the target scores them in one forward pass, keeps some, and adds a token of its own.
            verdict = await verifier.verify(sequence, proposal)
            # 3. Commit: the sequence grows, and both services will go back to exactly these tokens.
            output = sequence.commit(proposal, verdict)
            # 4. Emit.
            yield output
    finally:
        try:
            proposer.close(sequence)
        finally:
            verifier.close(sequence)
