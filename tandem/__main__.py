"""The `tandem` command, also as `python -m tandem`."""

from tandem.interrupts import end_at_interrupt


def main() -> None:
    """The console script."""
    end_at_interrupt()
    from tandem import cli  # takes long enough to be interrupted

    cli.main()


if __name__ == "__main__":
    main()
