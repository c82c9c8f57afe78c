"""`python -m loadtest.overload`: capacity, then four times as much; the excess must be refused at once and in time.

Exit code 0 only when every request gave its recorded answer or was refused with RetryInfo, no more sessions than places
were ever open, and nothing is held afterwards.
"""

import argparse
import asyncio
import sys
from collections.abc import Sequence

from loadtest.idle import wait_idle
from loadtest.open_loop import add_system_options, record_requests, system_of
from loadtest.overload.report import report, verdict
from loadtest.overload.run import measure
from tandem.client import SyncTandemClient
from tandem.processes import LocalCluster
from tandem.serving.options import make_parser, positive_int


def main(arguments: Sequence[str] | None = None) -> int:
    """Run and report; the exit code."""
    options = build_parser().parse_args(arguments)
    with system_of(options) as (_, cluster):
        assert cluster is not None
        return run(cluster, options)


def build_parser() -> argparse.ArgumentParser:
    """Every option."""
    parser = make_parser("python -m loadtest.overload", __doc__)
    add_system_options(parser)
    parser.add_argument("--seconds", type=float, default=30.0, help="for which requests arrive, of each step")
    parser.add_argument("--max-tokens", type=positive_int, default=32, help="of every answer")
    parser.add_argument(
        "--times", type=float, nargs="+", default=[1.0, 4.0], help="of capacity; the last is held against the first"
    )
    return parser


def run(cluster: LocalCluster, options: argparse.Namespace) -> int:
    """On services that run."""
    address = cluster.addresses["orchestrator"]
    recorded = record_requests(address, options.requests, options.seed, options.max_tokens)
    measured = asyncio.run(
        measure(cluster, recorded, options.max_requests, options.times, options.seconds, options.seed)
    )
    with SyncTandemClient(address) as client:
        held = wait_idle(client)
    what = (
        f"System: {options.toy or options.model}; {options.max_requests} places; {options.requests} distinct requests "
        f"of {options.max_tokens} tokens each; {options.seconds:g} s a step; seed {options.seed}."
    )
    text = report(measured, options.max_requests, held, what)
    if options.out is not None:
        options.out.write_text(text, encoding="utf-8")
    sys.stdout.write(text)
    return 1 if verdict(measured, options.max_requests, held) else 0


if __name__ == "__main__":
    sys.exit(main())
