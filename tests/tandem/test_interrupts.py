"""An interrupt comes between two looks at a service, never inside one, whichever thread is given the signal."""

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from tandem.interrupts import held_back, termination_as_interrupt
from tandem.processes import ServiceProcess

NUMBERS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]


@pytest.mark.parametrize("number", NUMBERS)
def test_a_look_at_a_service_is_finished_before_an_interrupt_is_heard(number: signal.Signals) -> None:
    class Interrupted:
        """A process; the signal comes while it is looked at."""

        is_locked = False

        def poll(self) -> None:
            self.is_locked = True
            os.kill(os.getpid(), number)
            self.is_locked = sum(range(1000)) < 0

    process: Any = Interrupted()
    over = threading.Event()
    other = threading.Thread(target=over.wait)  # the kernel may give it the signal
    other.start()
    try:
        with termination_as_interrupt(), pytest.raises(KeyboardInterrupt):
            ServiceProcess("target", process, Path("ready")).exit_code()
    finally:
        over.set()
        other.join()
    assert not process.is_locked


def signalled_twice_where_it_is_held_back(number: signal.Signals) -> None:
    with held_back():
        os.kill(os.getpid(), number)
        os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", NUMBERS)
def test_an_interrupt_is_raised_at_once_where_nothing_holds_it_back_and_only_once(number: signal.Signals) -> None:
    handlers = [signal.getsignal(one) for one in NUMBERS]
    with termination_as_interrupt():
        with held_back(), held_back():
            pass
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), number)
        with held_back():
            pass
        with pytest.raises(KeyboardInterrupt):
            signalled_twice_where_it_is_held_back(number)
        with held_back():
            pass
    assert [signal.getsignal(one) for one in NUMBERS] == handlers
