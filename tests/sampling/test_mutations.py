"""Each fault in the real code is seen by the checks that the real code passes."""

import pytest

from tandem.types import VerificationPolicy
from tests.sampling.mutations import BOTH, FAULTS, REJECTION, SHARED_STREAMS, TWO_ROUNDS, WITHOUT_BASE
from tests.sampling.test_draws import deviation as drawn_deviation
from tests.sampling.test_draws import two_rounds
from tests.sampling.test_rounds_exact import deviation

BROKEN = [(policy, name) for name, fault in FAULTS.items() for policy in fault.breaks]
NOISE_FAULTS = SHARED_STREAMS | WITHOUT_BASE
NUM_TRIALS = 300_000


@pytest.mark.parametrize(("policy", "name"), BROKEN)
def test_a_fault_bends_the_exact_distribution(
    policy: VerificationPolicy, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault = FAULTS[name]
    fault.apply(monkeypatch)
    assert deviation(policy, fault.num_drafts, **fault.session) > 1e-3


@pytest.mark.parametrize("policy", BOTH)
def test_the_same_rounds_without_a_fault_are_exact(policy: VerificationPolicy) -> None:
    for num_drafts, fields in {(fault.num_drafts, tuple(fault.session.items())) for fault in FAULTS.values()}:
        assert deviation(policy, num_drafts, **dict(fields)) < 1e-9


@pytest.mark.parametrize(("policy", "name"), [(policy, name) for policy, name in BROKEN if name in NOISE_FAULTS])
def test_a_fault_in_the_noise_shows_in_draws(
    policy: VerificationPolicy, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    NOISE_FAULTS[name].apply(monkeypatch)
    assert drawn_deviation(two_rounds(policy, NUM_TRIALS)) > 8


@pytest.mark.parametrize("policy", BOTH)
def test_as_many_draws_without_a_fault_stay_within_five_standard_errors(policy: VerificationPolicy) -> None:
    assert drawn_deviation(two_rounds(policy, NUM_TRIALS)) < 5


@pytest.mark.parametrize("name", WITHOUT_BASE)
def test_rejection_alone_would_not_need_the_base(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It looks at nothing past the draft where it stops, so what it saw of a position never comes back."""
    WITHOUT_BASE[name].apply(monkeypatch)
    assert deviation(REJECTION, TWO_ROUNDS) < 1e-9
