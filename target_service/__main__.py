"""`python -m target_service`: load the target model, prove its numerics, verify for orchestrators."""

import argparse
import asyncio
import logging
import sys

import grpc

from engine.backends.base import EngineError
from engine.backends.options import add_engine_arguments, engine_settings
from engine.backends.registry import LoadedEngine, load_engine
from tandem.serving.channels import MAX_INNER_MESSAGE_BYTES, AddressError, check_bind_address
from tandem.serving.compute import ComputeThread
from tandem.serving.life import PortInUseError, configure_logging, run_server
from tandem.serving.options import add_server_arguments, positive_int, server_settings
from tandem.target.v1 import target_pb2_grpc
from target_service.limits import Limits
from target_service.scheduler import Scheduler
from target_service.server import SERVICE_NAME, TargetServicer, model_info

_log = logging.getLogger(__name__)


def build_parser() -> argparse.ArgumentParser:
    """Every option of the service."""
    limits = Limits()
    parser = argparse.ArgumentParser(prog="python -m target_service", description=__doc__)
    add_server_arguments(parser, "127.0.0.1:50051")
    group = parser.add_argument_group("limits")
    group.add_argument(
        "--max-sessions", type=positive_int, default=limits.max_sessions, help="most sessions running at once"
    )
    group.add_argument(
        "--max-waiting-sessions",
        type=int,
        default=limits.max_waiting_sessions,
        help="most sessions queued",
    )
    group.add_argument(
        "--max-draft-tokens",
        type=int,
        default=limits.max_draft_tokens,
        help="most drafts a round",
    )
    add_engine_arguments(parser)
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Serve until SIGTERM or SIGINT; 2 after one line on standard error when it cannot start."""
    options = build_parser().parse_args(arguments)
    configure_logging("target", options.log_level)
    compute = ComputeThread("target-compute")
    try:
        check_bind_address(options.address, insecure=options.insecure)
        limits = Limits(
            options.max_sessions, options.max_waiting_sessions, options.max_draft_tokens, options.max_step_tokens
        )
        loaded = compute.run_blocking(load_engine, engine_settings(options))
        scheduler = Scheduler(loaded.engine, limits, compute)
    except (AddressError, EngineError, OSError, ValueError) as error:
        return _cannot_start(error)
    capabilities = loaded.engine.capabilities
    _log.info(
        "serving %s on backend %s, numerics %s (%s)",
        loaded.model_id,
        capabilities.backend,
        capabilities.numerics_fingerprint,
        "deterministic" if capabilities.deterministic else "not deterministic",
    )
    try:
        asyncio.run(_serve(options, loaded, scheduler, limits))
    except (AddressError, PortInUseError) as error:
        return _cannot_start(error)
    finally:
        scheduler.close()
    return 0


def _cannot_start(error: Exception) -> int:
    sys.stderr.write(f"target_service: cannot start: {error}\n")
    return 2


async def _serve(options: argparse.Namespace, loaded: LoadedEngine, scheduler: Scheduler, limits: Limits) -> None:
    """From bind to drain; a fault of the step loop ends the process too, for nobody would be answered any more."""
    info = model_info(
        loaded.engine.capabilities, loaded.model_id, loaded.vocabulary.id_bytes_hash, limits.max_draft_tokens
    )

    def register(server: grpc.aio.Server) -> None:
        target_pb2_grpc.add_TargetServiceServicer_to_server(TargetServicer(scheduler, info), server)

    settings = server_settings(options, SERVICE_NAME, MAX_INNER_MESSAGE_BYTES)
    steps = asyncio.create_task(scheduler.run())
    server = asyncio.create_task(run_server(settings, register, on_drain=lambda: scheduler.drain(options.grace)))
    await asyncio.wait({steps, server}, return_when=asyncio.FIRST_COMPLETED)
    for task in (steps, server):
        task.cancel()  # whichever is left
    for result in await asyncio.gather(steps, server, return_exceptions=True):
        if isinstance(result, Exception):
            raise result


if __name__ == "__main__":
    sys.exit(main())
