"""Faults put into the real code one at a time: those that other systems had, and those that this one could have.

Each says whom it breaks, under which session and in which rounds.
"""

import inspect
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from engine.sampling import block, draft_sampler, policies, processors, rejection
from engine.sampling.rows import Row
from tandem import rng
from tandem.types import SamplingParams, VerificationPolicy

REJECTION, BLOCK = VerificationPolicy.REJECTION, VerificationPolicy.BLOCK
BOTH, ONE_ROUND, TWO_ROUNDS = (REJECTION, BLOCK), (2,), (2, 1)


@dataclass(frozen=True, slots=True)
class Mutation:
    """One function with one piece of its text replaced."""

    function: Callable[..., Any]
    old: str
    new: str
    breaks: tuple[VerificationPolicy, ...] = BOTH
    num_drafts: tuple[int, ...] = ONE_ROUND
    session: Mapping[str, Any] = field(default_factory=dict)  # fields of `make_spec`

    def apply(self, patch: pytest.MonkeyPatch) -> None:
        """Until `patch` is undone, whoever calls the function runs the changed text."""
        source = textwrap.dedent(inspect.getsource(self.function))
        assert source.count(self.old) == 1, f"{self.function.__qualname__} does not say {self.old!r} once"
        namespace = dict(self.function.__globals__)
        exec(compile(source.replace(self.old, self.new), inspect.getfile(self.function), "exec"), namespace)
        patch.setattr(self.function, "__code__", namespace[self.function.__name__].__code__)
        patch.setitem(self.function.__globals__, "unprocessed", unprocessed)


def unprocessed(row: Row) -> Row:
    """The row of a request that asked for nothing."""
    return Row(type(row.spec)((), 0, SamplingParams(), 1), row.committed_token_ids, row.draft_token_ids)


_POSITION = "request.row(index).position"
_RESIDUAL = f"Stream.RESIDUAL, {_POSITION}"
_OF_ROUND = f"{_POSITION}, request.row(index).committed_len"
_BOUND_STREAMS = "(Stream.ACCEPT, Stream.DRAFT)"
_UNIFORM = "uniform(_acceptance_key(request, index))"
_RECOVER = "return sample_weights(rest if rest.any() else p, key)"
_EVERY_ROW = "request.row(index)"

SHARED_STREAMS = {
    "residual draws use the draft's noise": Mutation(
        policies._residual_key, _RESIDUAL, f"Stream.DRAFT, {_OF_ROUND}"
    ),
    "residual draws use the acceptance noise": Mutation(
        policies._residual_key, _RESIDUAL, f"Stream.ACCEPT, {_OF_ROUND}"
    ),
    "acceptance draws use the draft's noise": Mutation(policies._acceptance_key, "Stream.ACCEPT", "Stream.DRAFT"),
}
WITHOUT_BASE = {
    "no key carries the round's base": Mutation(rng.stream_word, _BOUND_STREAMS, "()", (BLOCK,), TWO_ROUNDS),
    "acceptance keys lack the base": Mutation(
        rng.stream_word, _BOUND_STREAMS, "(Stream.DRAFT,)", (BLOCK,), TWO_ROUNDS
    ),
    "draft keys lack the base": Mutation(rng.stream_word, _BOUND_STREAMS, "(Stream.ACCEPT,)", (BLOCK,), TWO_ROUNDS),
}
DECISIONS = {
    "every draft passes": Mutation(policies._accept_block, _UNIFORM, "0.0", (BLOCK,)),
    "every draft passes the ratio test": Mutation(policies._reject_or_accept, _UNIFORM, "0.0", (REJECTION,)),
    "the search ends at the first failure": Mutation(
        block.verify_block, "index + 1, weight", "index + 1, weight\n        else:\n            break", (BLOCK,)
    ),
    "each draft is judged by its weight alone": Mutation(
        block.acceptance_steps, "rest / (rest + (1.0 - weight)) if rest > 0.0", "weight if rest >= 0.0", (BLOCK,)
    ),
    "weights are not carried on": Mutation(block.acceptance_steps, "weight * ratio", "ratio", (BLOCK,)),
}
RESIDUALS = {
    "the residual is the last row's": Mutation(
        policies._accept_block, "p[num_accepted], q[num_accepted]", "p[-1], q[-1]", (BLOCK,)
    ),
    "the residual is the first row's": Mutation(
        policies._reject_or_accept,
        "p, q, _residual",
        "probabilities(processed[0]), draft_q(request, 0), _residual",
        (REJECTION,),
    ),
    "the residual forgets the weight": Mutation(policies._accept_block, "key, weight)", "key)", (BLOCK,)),
    "rejected drafts are replaced from p": Mutation(
        rejection.sample_residual, _RECOVER, "return sample_weights(p, key)"
    ),
    "rejected drafts are replaced by the argmax": Mutation(
        rejection.sample_residual, _RECOVER, "return int(p.argmax())"
    ),
    "the residual knows part of q": Mutation(
        rejection.residual,
        "np.maximum(rest[token_ids] - probs, 0.0)",
        "np.maximum(rest[token_ids] - probs * (probs > 0.2), 0.0)",
    ),
}
ROWS = {
    "frequency penalties ignore the drafts before a row": Mutation(
        processors._History.output_counts,
        "_with_drafts(self._output, row)",
        "self._output",
        session={"frequency_penalty": 2.0},
    ),
    "repetition penalties ignore the drafts before a row": Mutation(
        processors._History.seen,
        "_with_drafts(self._committed, row)",
        "self._committed",
        session={"repetition_penalty": 2.0},
    ),
    "the bonus row is not processed": Mutation(
        policies.rows_of,
        _EVERY_ROW,
        f"{_EVERY_ROW} if index + 1 < request.num_rows else unprocessed({_EVERY_ROW})",
        session={"top_k": 2},
    ),
    "only the bonus row is processed": Mutation(
        policies.rows_of,
        _EVERY_ROW,
        f"{_EVERY_ROW} if index + 1 == request.num_rows else unprocessed({_EVERY_ROW})",
        session={"top_k": 2},
    ),
    "drafts that nothing drew come with a whole q": Mutation(
        draft_sampler._sample_draft,
        "gumbel_argmax(weights, draft_key(row), draft_probs.token_ids)",
        "int(select(processed))",
    ),
}
FAULTS = SHARED_STREAMS | WITHOUT_BASE | DECISIONS | RESIDUALS | ROWS
