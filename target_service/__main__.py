"""`tandem serve target`: load the target model, prove its numerics, verify for orchestrators."""

from tandem.interrupts import end_at_interrupt

if __name__ == "__main__":
    end_at_interrupt()  # what follows takes seconds

import argparse
import asyncio
import logging
import sys

import grpc

from engine.backends.base import EngineError
from engine.backends.options import add_engine_arguments, engine_settings
from engine.backends.registry import load_engine
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
from tandem.target.v1 import target_pb2_grpc
from tandem.types import ModelInfo
from target_service.limits import MAX_PREFILL_TOKENS, Limits
from target_service.scheduler import Scheduler
from target_service.server import SERVICE_NAME, TargetServicer, model_info

_log = logging.getLogger("target_service")


def build_parser() -> argparse.ArgumentParser:
    """Every option of the service."""
    limits = Limits()
    parser = make_parser("tandem serve target", __doc__)
    add_server_arguments(parser, "127.0.0.1:50051")
    group = parser.add_argument_group("limits")
    group.add_argument(
        "--max-sessions",
        type=positive_int,
        default=limits.max_sessions,
        metavar="N",
        help="most sessions running at once",
    )
    group.add_argument(
        "--max-waiting-sessions",
        type=int,
        default=limits.max_waiting_sessions,
        metavar="N",
        help="most sessions queued, dormant ones among them",
    )
    group.add_argument(
        "--max-draft-tokens",
        type=int,
        default=limits.max_draft_tokens,
        metavar="K",
        help="most drafts a round",
    )
    group.add_argument(
        "--max-prefill-tokens",
        type=positive_int,
        metavar="N",
        help=f"most prompt tokens of a forward while others decode; default: {MAX_PREFILL_TOKENS}, or what fits",
    )
    group.add_argument(
        "--max-batch",
        type=positive_int,
        metavar="N",
        help="most sessions of a forward; default: as many as it has tokens for",
    )
    group.add_argument(
        "--session-lease",
        type=seconds,
        default=limits.session_lease_s,
        metavar="S",
        help="a session without an item for so many seconds is freed",
    )
    add_freeze_argument(group)
    add_engine_arguments(parser)
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Serve until SIGTERM or SIGINT; 2 after one line on standard error when it cannot start."""
    options = build_parser().parse_args(arguments)
    return run_service("target_service", SERVICE_NAME, options, _load, _serve, (EngineError,))


def _load(options: argparse.Namespace) -> tuple[Scheduler, ModelInfo]:
    """The engine behind its scheduler, and what the handshake says of it."""
    limits = Limits(
        options.max_sessions,
        options.max_waiting_sessions,
        options.max_draft_tokens,
        options.max_step_tokens,
        options.max_prefill_tokens,
        options.max_batch,
        options.session_lease,
    )
    compute = ComputeThread("target-compute", options.freeze_timeout)
    loaded = compute.run_blocking(load_engine, engine_settings(options))
    scheduler = Scheduler(loaded.engine, limits, compute)
    capabilities = loaded.engine.capabilities
    _log.info(
        "serving %s on backend %s, numerics %s (%s)",
        loaded.model_id,
        capabilities.backend,
        capabilities.numerics_fingerprint,
        "deterministic" if capabilities.deterministic else "not deterministic",
    )
    info = model_info(capabilities, loaded.model_id, loaded.vocabulary.id_bytes_hash, limits.max_draft_tokens)
    return scheduler, info


async def _serve(
    options: argparse.Namespace, settings: ServerSettings, loaded: tuple[Scheduler, ModelInfo]
) -> None:
    """From bind to drain; a fault of the step loop ends the process too, for nobody would be answered any more."""
    scheduler, info = loaded

    def register(server: grpc.aio.Server) -> None:
        target_pb2_grpc.add_TargetServiceServicer_to_server(TargetServicer(scheduler, info), server)

    steps = asyncio.create_task(scheduler.run())

    async def serve() -> None:
        async with serving_metrics(scheduler.metrics.all, settings):
            await run_server(
                settings,
                register,
                on_drain=lambda: scheduler.drain(options.grace),
                is_healthy=lambda: not scheduler.is_frozen,
            )

    server = asyncio.create_task(serve())
    await asyncio.wait({steps, server}, return_when=asyncio.FIRST_COMPLETED)
    for task in (steps, server):
        task.cancel()  # whichever is left
    results = await asyncio.gather(steps, server, return_exceptions=True)
    scheduler.close()
    for result in results:
        if isinstance(result, Exception):
            raise result


if __name__ == "__main__":
    sys.exit(main())
