"""`python -m draft_service`: one draft service process."""

import argparse
import asyncio
import sys

import grpc

from draft_service.proposers.base import Proposer
from draft_service.proposers.registry import ProposerError, ProposerSettings, load_proposer, proposer_names
from draft_service.server import SERVICE_NAME, DraftServicer
from draft_service.service import DraftLimits, DraftService
from engine.backends.base import EngineError
from engine.backends.options import add_engine_arguments, engine_settings
from tandem.draft.v1 import draft_pb2_grpc
from tandem.serving.channels import MAX_INNER_MESSAGE_BYTES, AddressError
from tandem.serving.compute import ComputeThread
from tandem.serving.life import PortInUseError, configure_logging, run_server
from tandem.serving.options import add_server_arguments, positive_int, server_settings


def build_parser() -> argparse.ArgumentParser:
    """Every option of the service."""
    parser = argparse.ArgumentParser(prog="draft_service", description="Propose draft tokens to orchestrators.")
    add_server_arguments(parser, "127.0.0.1:50052")
    parser.add_argument("--proposer", default="ngram", help=f"one of: {', '.join(proposer_names())}")
    parser.add_argument("--max-ngram-size", type=int, default=5, help="ngram: most tokens to match")
    parser.add_argument("--min-ngram-size", type=int, default=1, help="ngram: fewest tokens to match")
    parser.add_argument("--max-draft-tokens", type=positive_int, default=16, help="most drafts a round")
    parser.add_argument("--max-sessions", type=positive_int, default=256, help="most open sessions")
    add_engine_arguments(parser)  # for draft_model
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run until SIGTERM or SIGINT; 2 when the service cannot start, after one line on standard error."""
    args = build_parser().parse_args(argv)
    configure_logging("draft", args.log_level)
    settings = ProposerSettings(args.max_ngram_size, args.min_ngram_size, args.max_sessions, engine_settings(args))
    compute = ComputeThread("draft-compute")
    try:
        proposer = compute.run_blocking(load_proposer, args.proposer, settings)
    except (ProposerError, EngineError, ValueError, OSError) as error:
        return _refuse(error)
    try:
        asyncio.run(serve(args, proposer, compute))
    except (AddressError, PortInUseError, OSError) as error:
        return _refuse(error)
    return 0


def _refuse(error: Exception) -> int:
    """Say on one line why the service does not start -> the exit code."""
    sys.stderr.write(f"draft_service: {error}\n")
    return 2


async def serve(args: argparse.Namespace, proposer: Proposer, compute: ComputeThread) -> None:
    """One service on one event loop, from bind to drain."""
    service = DraftService(proposer, DraftLimits(args.max_draft_tokens, args.max_sessions), compute)
    settings = server_settings(args, SERVICE_NAME, MAX_INNER_MESSAGE_BYTES)

    def register(server: grpc.aio.Server) -> None:
        draft_pb2_grpc.add_DraftServiceServicer_to_server(DraftServicer(service), server)

    try:
        await run_server(settings, register, on_drain=lambda: service.drain(args.grace))
    finally:
        await service.batcher.aclose()


if __name__ == "__main__":
    sys.exit(main())
