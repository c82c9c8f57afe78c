"""`tandem serve draft`: load a proposer, draft for orchestrators."""

from tandem.interrupts import end_at_interrupt

if __name__ == "__main__":
    end_at_interrupt()  # what follows takes seconds

import argparse
import sys

import grpc

from draft_service.limits import DraftLimits
from draft_service.proposers.base import Proposer
from draft_service.proposers.kind import ProposerError, ProposerSettings
from draft_service.proposers.registry import add_proposer_arguments, load_proposer
from draft_service.server import SERVICE_NAME, DraftServicer
from draft_service.service import DraftService
from engine.backends.base import EngineError
from engine.backends.options import add_engine_arguments, engine_settings
from tandem.draft.v1 import draft_pb2_grpc
from tandem.serving.compute import ComputeThread
from tandem.serving.life import ServerSettings, run_server
from tandem.serving.metrics_server import serving_metrics
from tandem.serving.options import (
    add_freeze_argument,
    add_server_arguments,
    make_parser,
    positive_int,
    seconds,
)
from tandem.serving.start import run_service


def build_parser() -> argparse.ArgumentParser:
    """Every option of the service."""
    parser = make_parser("tandem serve draft", __doc__)
    add_server_arguments(parser, "127.0.0.1:50052")
    add_proposer_arguments(parser)
    limits = DraftLimits()
    group = parser.add_argument_group("limits")
    group.add_argument(
        "--max-draft-tokens",
        type=positive_int,
        default=limits.max_draft_tokens,
        metavar="K",
        help="most drafts a round",
    )
    group.add_argument(
        "--max-sessions", type=positive_int, default=limits.max_sessions, metavar="N", help="most open sessions"
    )
    group.add_argument(
        "--max-batch",
        type=positive_int,
        metavar="N",
        help="most sessions drafted for at a time; default: all of them, or as many as a step has tokens",
    )
    group.add_argument(
        "--session-lease",
        type=seconds,
        default=limits.session_lease_s,
        metavar="S",
        help="an open session that asks for nothing for so many seconds is forgotten",
    )
    add_freeze_argument(group)
    add_engine_arguments(parser)  # for proposers that have a model
    parser.set_defaults(model=None)
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Serve until SIGTERM or SIGINT; 2 after one line on standard error when it cannot start."""
    options = build_parser().parse_args(arguments)
    return run_service("draft_service", SERVICE_NAME, options, _load, _serve, (ProposerError, EngineError))


def _limits(options: argparse.Namespace) -> DraftLimits:
    """What the options grant."""
    return DraftLimits(
        options.max_draft_tokens,
        options.max_sessions,
        options.max_batch or min(options.max_sessions, options.max_step_tokens),
        options.session_lease,
    )


def _load(options: argparse.Namespace) -> tuple[Proposer, ComputeThread]:
    """The proposer, and the thread it was loaded on."""
    settings = ProposerSettings(
        _limits(options),
        engine_settings(options) if options.model or options.toy else None,
        options,
    )
    compute = ComputeThread("draft-compute", options.freeze_timeout)
    return compute.run_blocking(load_proposer, options.proposer, settings), compute


async def _serve(
    options: argparse.Namespace, settings: ServerSettings, loaded: tuple[Proposer, ComputeThread]
) -> None:
    """From bind to drain."""
    proposer, compute = loaded
    service = DraftService(proposer, _limits(options), compute)

    def register(server: grpc.aio.Server) -> None:
        draft_pb2_grpc.add_DraftServiceServicer_to_server(DraftServicer(service), server)

    try:
        async with serving_metrics(service.metrics.all, settings):
            await run_server(
                settings,
                register,
                on_drain=lambda: service.drain(options.grace),
                is_healthy=lambda: not service.batcher.is_frozen,
            )
    finally:
        await service.batcher.aclose()


if __name__ == "__main__":
    sys.exit(main())
