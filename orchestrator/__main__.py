"""`tandem serve orchestrator`: connect to the replicas, agree with them, serve applications."""

import argparse
import asyncio
import contextlib
import sys

from orchestrator.handshake import draft_check, vocabulary_check
from orchestrator.replica_api import DRAFT_API, TARGET_API
from orchestrator.replica_link import HandshakeError, LinkLostError, ReplicaLink
from orchestrator.server import (
    SERVICE_NAME,
    DraftLink,
    OrchestratorServicer,
    OrchestratorSettings,
    TargetLink,
)
from orchestrator.target_session import TargetPatience
from tandem.defaults import MAX_SESSIONS, NUM_DRAFT_TOKENS
from tandem.models.registry import ModelNotFoundError, resolve_model
from tandem.orchestrator.v1 import orchestrator_pb2_grpc
from tandem.serving.channels import (
    MAX_APPLICATION_MESSAGE_BYTES,
    AddressError,
    check_bind_address,
    parse_address,
)
from tandem.serving.life import PortInUseError, configure_logging, run_server
from tandem.serving.options import (
    add_server_arguments,
    make_parser,
    natural_int,
    positive_int,
    seconds,
    server_settings,
)
from tandem.vocabulary import Vocabulary, VocabularyError

_DRAFT_WAIT_S = 3.0  # for a draft service that would have to be refused; one that is not there keeps nobody waiting


def main(arguments: list[str] | None = None) -> int:
    """Serve until a signal; 2 after one line on standard error when it cannot start."""
    options = build_parser().parse_args(arguments)
    configure_logging("orchestrator", options.log_level)
    try:
        asyncio.run(_serve(options))
    except (
        AddressError,
        HandshakeError,
        LinkLostError,
        ModelNotFoundError,
        OSError,
        PortInUseError,
        VocabularyError,
    ) as error:
        sys.stderr.write(f"orchestrator: cannot start: {error}\n")
        return 2
    return 0


async def _serve(options: argparse.Namespace) -> None:
    check_bind_address(options.address, insecure=options.insecure)
    parse_address(options.target)
    vocabulary, name = _load_vocabulary(options)
    target: TargetLink = ReplicaLink(
        TARGET_API, options.target, vocabulary_check("target", options.target, vocabulary, name)
    )
    draft: DraftLink | None = None
    if options.draft is not None:
        parse_address(options.draft)
        draft = ReplicaLink(
            DRAFT_API, options.draft, draft_check(options.draft, vocabulary, name, lambda: target.info)
        )
    try:
        await _connect(target, draft, options.connect_timeout)
        settings = OrchestratorSettings(
            num_draft_tokens=options.num_draft_tokens,
            draft_timeout_s=options.draft_timeout,
            max_requests=options.max_requests,
            target_patience=TargetPatience(options.target_timeout, options.reconnect_timeout),
        )
        servicer = OrchestratorServicer(vocabulary, target, draft, settings)
        await run_server(
            server_settings(options, SERVICE_NAME, MAX_APPLICATION_MESSAGE_BYTES),
            lambda server: orchestrator_pb2_grpc.add_OrchestratorServiceServicer_to_server(servicer, server),
        )
    finally:
        for link in (target, draft):
            if link is not None:
                await link.close()


async def _connect(target: TargetLink, draft: DraftLink | None, timeout_s: float) -> None:
    """Both handshakes. The target must be there; a draft service that is not may come later.

    HandshakeError when either must not be used, LinkLostError when the target cannot be reached in time.
    """
    target.start()
    await target.wait_checked(timeout_s)
    if draft is not None:
        draft.start()  # it is checked against the target
        with contextlib.suppress(LinkLostError):
            await draft.wait_checked(min(timeout_s, _DRAFT_WAIT_S))


def _load_vocabulary(options: argparse.Namespace) -> tuple[Vocabulary, str]:
    """The tokenizer, and what messages call it."""
    if options.toy_vocab is not None:
        return Vocabulary.toy(options.toy_vocab), f"toy:{options.toy_vocab}"
    return Vocabulary.load(resolve_model(options.model)), options.model


def build_parser() -> argparse.ArgumentParser:
    """Every option of the service."""
    parser = make_parser("tandem serve orchestrator", __doc__)
    add_server_arguments(parser, "127.0.0.1:50050")
    parser.add_argument("--target", required=True, metavar="HOST:PORT", help="the target service")
    parser.add_argument("--draft", metavar="HOST:PORT", help="the draft service; without one nothing is drafted")
    tokenizer = parser.add_mutually_exclusive_group(required=True)
    tokenizer.add_argument("--model", metavar="NAME|PATH", help="whose tokenizer to use: the target's model")
    tokenizer.add_argument("--toy-vocab", type=positive_int, metavar="N", help="the built-in vocabulary of N ids")
    parser.add_argument(
        "--num-draft-tokens", type=natural_int, default=NUM_DRAFT_TOKENS, metavar="K", help="most drafts a round"
    )
    parser.add_argument(
        "--draft-timeout",
        type=seconds,
        default=5.0,
        metavar="S",
        help="longest wait of a round for drafts, in seconds",
    )
    parser.add_argument(
        "--target-timeout", type=seconds, default=60.0, metavar="S", help="seconds before a round is asked again"
    )
    parser.add_argument(
        "--reconnect-timeout",
        type=seconds,
        default=60.0,
        metavar="S",
        help="longest wait for a lost target, in seconds",
    )
    parser.add_argument(
        "--connect-timeout",
        type=seconds,
        default=30.0,
        metavar="S",
        help="longest wait for the services at start, in seconds",
    )
    parser.add_argument(
        "--max-requests",
        type=positive_int,
        default=MAX_SESSIONS,
        metavar="N",
        help="most running requests; each answer of a request counts",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
