"""`tandem up` as a child process, as an operator would start it."""

import contextlib
import subprocess
import sys
from collections.abc import Iterator, Sequence

STOP_WITHIN_S = 60


class UpError(Exception):
    """`tandem up` ended before it was ready, or did not stop cleanly; the message holds what it printed."""


@contextlib.contextmanager
def tandem_up(options: Sequence[str]) -> Iterator[dict[str, str]]:
    """Run `tandem up` on free ports -> HOST:PORT by service; SIGTERM at the end must stop it with exit code 0."""
    command = [sys.executable, "-m", "tandem", "up", "--port", "0", *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    addresses: dict[str, str] = {}
    printed = []
    try:
        for line in process.stdout:
            printed.append(line)
            if line.strip() == "ready":
                break
            service, address = line.split()
            addresses[service] = address
        else:
            raise UpError(
                f"`tandem up` ended with exit code {process.wait()} before it was ready: {''.join(printed)}"
            )
        yield addresses
    finally:
        code = stop(process)
        process.stdout.close()
    if code != 0:
        raise UpError(f"`tandem up` ended with exit code {code} after SIGTERM")


def stop(process: subprocess.Popen[str]) -> int:
    """SIGTERM (a shell's background job ignores Ctrl-C), then SIGKILL; the exit code."""
    process.terminate()
    try:
        return process.wait(timeout=STOP_WITHIN_S)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()
