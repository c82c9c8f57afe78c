"""An interrupt comes between two looks at a service, never inside one."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tandem.cluster_options import termination_as_interrupt
from tandem.processes import ServiceProcess


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_look_at_a_service_is_finished_before_an_interrupt_is_heard(number: signal.Signals) -> None:
    class Interrupted:
        """A process; the signal comes while it is looked at."""

        is_locked = False

        def poll(self) -> None:
            self.is_locked = True
            os.kill(os.getpid(), number)
            self.is_locked = sum(range(1000)) < 0

    process: Any = Interrupted()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    with termination_as_interrupt(), pytest.raises(KeyboardInterrupt):
        ServiceProcess("target", process, Path("ready")).exit_code()
    assert not process.is_locked
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before
