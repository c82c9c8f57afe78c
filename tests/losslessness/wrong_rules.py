"""Rules that are wrong on purpose: what the chi-square must find."""

import contextlib
from collections.abc import Iterator, Mapping
from types import MappingProxyType

import pytest

from engine.sampling import policies
from tandem.types import VerificationPolicy
from tests.sampling.mutations import FAULTS, Mutation

_FRESH_DRAW = (
    "Decision(index, sample_residual(probabilities(processed[index]), ([], 0.0), _residual_key(request, index)))"
)

WRONG_RULES: Mapping[str, Mutation] = MappingProxyType(
    {
        "a draft that differs is followed by a fresh draw": Mutation(
            policies._accept_while_equal, "Decision(index, token_id)", _FRESH_DRAW, (VerificationPolicy.COUPLED,)
        ),
        **FAULTS,
    }
)


@contextlib.contextmanager
def in_force(name: str | None) -> Iterator[None]:
    """Inside, targets and drafts of this process follow the rule of this name; for None the right ones."""
    with pytest.MonkeyPatch.context() as patch:
        if name is not None:
            WRONG_RULES[name].apply(patch)
        yield
