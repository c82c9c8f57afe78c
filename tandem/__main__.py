"""The `tandem` command, also as `python -m tandem`."""

import signal

from tandem.interrupts import end_at_interrupt


def main() -> None:
    """The console script. Ctrl-C ends it quietly while it imports, and is the command's own to hear afterwards."""
    previous = signal.getsignal(signal.SIGINT)
    end_at_interrupt()
    from tandem import cli  # takes long enough to be interrupted

    signal.signal(signal.SIGINT, previous)
    cli.main()


if __name__ == "__main__":
    main()
