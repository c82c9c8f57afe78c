"""Running answers have places; who finds none is refused at once, and told when to come back."""

import grpc
import pytest

from orchestrator.admission import Admission
from tandem.serving.errors import ServiceError


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_places_are_given_back_however_an_answer_ends() -> None:
    admission = Admission(3)
    with admission.places(2), pytest.raises(ServiceError) as caught, admission.places(2):
        pytest.fail("there is no place for it")
    assert caught.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "1 of 3 places for running requests are free, 2 are needed" in str(caught.value)
    with pytest.raises(KeyError), admission.places(3):
        raise KeyError
    with admission.places(3):
        assert admission.num_running == 3
    assert (admission.num_running, admission.num_refused) == (0, 1)


def test_who_is_refused_learns_when_a_place_should_be_free() -> None:
    clock = Clock()
    admission = Admission(4, clock)
    for _ in range(100):  # a place is held for eight seconds
        with admission.places(4):
            clock.now_s += 8.0
    with admission.places(4):
        for num_answers, expected_s in ((1, 2.0), (4, 8.0)):
            with pytest.raises(ServiceError) as caught, admission.places(num_answers):
                pass
            assert caught.value.retry_after_s == pytest.approx(expected_s, rel=0.01)


@pytest.mark.parametrize(("held_s", "expected_s"), [(0.0, 0.1), (10_000.0, 30.0)])
def test_the_wait_has_bounds(held_s: float, expected_s: float) -> None:
    clock = Clock()
    admission = Admission(1, clock)
    for _ in range(100):
        with admission.places(1):
            clock.now_s += held_s
    with admission.places(1), pytest.raises(ServiceError) as caught, admission.places(1):
        pass
    assert caught.value.retry_after_s == expected_s
