"""`tandem serve orchestrator`: connect to the replicas, agree with them, serve applications."""

from tandem.interrupts import end_at_interrupt

if __name__ == "__main__":
    end_at_interrupt()  # what follows takes seconds

import argparse
import asyncio
import contextlib
import os
import sys
from dataclasses import replace
from pathlib import Path

import grpc

from orchestrator.addresses import find_addresses, shared_host
from orchestrator.pools import DraftPool, PoolTimes, TargetPool, draft_dialer, draft_pool, target_pool
from orchestrator.replica_link import HandshakeError, LinkLostError
from orchestrator.replica_stream import StreamPatience
from orchestrator.server import SERVICE_NAME, OrchestratorServicer, OrchestratorSettings
from orchestrator.target_session import TargetPatience
from orchestrator.tracing import tracer_from_environment
from tandem.credentials import Credentials
from tandem.defaults import MAX_SESSIONS, NUM_DRAFT_TOKENS
from tandem.models.registry import ModelNotFoundError, resolve_model
from tandem.orchestrator.v1 import orchestrator_pb2_grpc
from tandem.prompt_lookup import PromptLookup
from tandem.serving.auth import TokenInterceptor
from tandem.serving.channels import MAX_APPLICATION_MESSAGE_BYTES, AddressError
from tandem.serving.dialer import Dialer
from tandem.serving.life import PortInUseError, run_server
from tandem.serving.logs import configure_logging, say_cannot_start
from tandem.serving.metrics_server import serving_metrics
from tandem.serving.options import (
    add_dialing_arguments,
    add_server_arguments,
    dialing_credentials,
    make_parser,
    natural_int,
    positive_int,
    seconds,
    server_settings,
)
from tandem.serving.pem import CredentialsError
from tandem.serving.tokens import TokensFile
from tandem.vocabulary import Vocabulary, VocabularyError

# Of prompt lookup in the draft service's place: a match of one token is right too seldom.
_MAX_NGRAM_SIZE, _MIN_NGRAM_SIZE = 5, 2
_DRAFT_WAIT_S = 3.0  # for a draft service that would have to be refused; one that is not there keeps nobody waiting


def main(arguments: list[str] | None = None) -> int:
    """Serve until a signal; 2 after one line on standard error when it cannot start."""
    options = build_parser().parse_args(arguments)
    configure_logging("orchestrator", options.log_level, options.log_format)
    try:
        asyncio.run(_serve(options))
    except (
        AddressError,
        CredentialsError,
        HandshakeError,
        LinkLostError,
        ModelNotFoundError,
        OSError,
        PortInUseError,
        VocabularyError,
    ) as error:
        say_cannot_start("orchestrator", error)
        return 2
    return 0


async def _serve(options: argparse.Namespace) -> None:
    listening = server_settings(options, SERVICE_NAME, MAX_APPLICATION_MESSAGE_BYTES)
    listening.check()
    interceptors = _interceptors(options)
    dial_targets = Dialer(_credentials(options, options.target))
    dial_drafts = draft_dialer(_credentials(options, options.draft or ""), trusts=not options.untrusted_draft)
    find_targets = find_addresses(options.target)
    find_drafts = None if options.draft is None else find_addresses(options.draft)
    vocabulary, name = _load_vocabulary(options)
    times = PoolTimes(options.lookup_interval, StreamPatience(options.silence_timeout, options.stall_timeout))
    targets = target_pool(find_targets, vocabulary, name, times, dial_targets)
    drafts = None if find_drafts is None else draft_pool(find_drafts, vocabulary, name, targets, times, dial_drafts)
    tracer = tracer_from_environment(os.environ)
    try:
        await _connect(targets, drafts, options.connect_timeout)
        settings = OrchestratorSettings(
            num_draft_tokens=options.num_draft_tokens,
            draft_timeout_s=options.draft_timeout,
            fallback=PromptLookup(_MAX_NGRAM_SIZE, _MIN_NGRAM_SIZE) if options.draft_fallback else None,
            max_requests=options.max_requests,
            target_patience=TargetPatience(options.target_timeout, options.reconnect_timeout),
            trusts_drafts=not options.untrusted_draft,
            backs_off=options.draft_back_off,
        )
        servicer = OrchestratorServicer(vocabulary, targets, drafts, settings, tracer)
        async with serving_metrics(servicer.metrics.all, listening):
            await run_server(
                listening,
                lambda server: orchestrator_pb2_grpc.add_OrchestratorServiceServicer_to_server(servicer, server),
                interceptors=interceptors,
            )
    finally:
        for pool in (targets, drafts):
            if pool is not None:
                await pool.close()
        await asyncio.to_thread(tracer.close)


async def _connect(targets: TargetPool, drafts: DraftPool | None, timeout_s: float) -> None:
    """The handshakes. A target must be there; draft services that are not may come later.

    HandshakeError when all of a kind must not be used, LinkLostError when no target can be reached in time.
    """
    await targets.start()
    await targets.wait_checked(timeout_s)
    if drafts is not None:
        await drafts.start()  # they are checked against the targets
        with contextlib.suppress(LinkLostError):
            await drafts.wait_checked(min(timeout_s, _DRAFT_WAIT_S))


def _interceptors(options: argparse.Namespace) -> list[grpc.aio.ServerInterceptor]:
    """Of applications' calls; CredentialsError for tokens that cannot be used."""
    return [] if options.tokens_file is None else [TokenInterceptor(TokensFile(options.tokens_file))]


def _credentials(options: argparse.Namespace, text: str) -> Credentials:
    """For replicas found as `text` says: by dns:HOST:PORT it is HOST that their certificates must name."""
    shown = dialing_credentials(options)
    if shown.tls_ca is not None and shown.tls_server_name is None:
        shown = replace(shown, tls_server_name=shared_host(text))
    return shown


def _load_vocabulary(options: argparse.Namespace) -> tuple[Vocabulary, str]:
    """The tokenizer, and what messages call it."""
    if options.toy_vocab is not None:
        return Vocabulary.toy(options.toy_vocab), f"toy:{options.toy_vocab}"
    return Vocabulary.load(resolve_model(options.model)), options.model


def build_parser() -> argparse.ArgumentParser:
    """Every option of the service."""
    parser = make_parser("tandem serve orchestrator", __doc__)
    add_server_arguments(parser, "127.0.0.1:50050")
    add_dialing_arguments(parser)
    _add_trust_arguments(parser)
    parser.add_argument(
        "--target",
        required=True,
        metavar="ADDRESSES",
        help="the target services: HOST:PORT,... or dns:HOST:PORT (every address HOST has) or file:PATH (an address a "
        "line); the latter two are looked up again and again",
    )
    parser.add_argument(
        "--draft", metavar="ADDRESSES", help="the draft services, as --target; without any nothing is drafted"
    )
    tokenizer = parser.add_mutually_exclusive_group(required=True)
    tokenizer.add_argument("--model", metavar="NAME|PATH", help="whose tokenizer to use: the target's model")
    tokenizer.add_argument("--toy-vocab", type=positive_int, metavar="N", help="the built-in vocabulary of N ids")
    parser.add_argument(
        "--num-draft-tokens", type=natural_int, default=NUM_DRAFT_TOKENS, metavar="K", help="most drafts a round"
    )
    parser.add_argument(
        "--draft-timeout",
        type=seconds,
        metavar="S",
        help="longest wait of a round for drafts, in seconds; default: what rounds have taken so far says how long",
    )
    defaults = PoolTimes()
    parser.add_argument(
        "--lookup-interval",
        type=seconds,
        default=defaults.find_s,
        metavar="S",
        help="between two looks for addresses",
    )
    parser.add_argument(
        "--silence-timeout",
        type=seconds,
        default=defaults.patience.silence_s,
        metavar="S",
        help="a replica that says nothing for so long is lost; it says something every second",
    )
    parser.add_argument(
        "--draft-fallback",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="copy drafts from the sequence itself while no draft service makes any",
    )
    parser.add_argument(
        "--draft-back-off",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="draft less, down to nothing, while so many sessions share a target's steps that drafts would slow them; "
        "not for requests that say how many drafts, nor under rejection and block, whose answers depend on them",
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


def _add_trust_arguments(parser: argparse.ArgumentParser) -> None:
    """Add --tokens-file and --untrusted-draft."""
    group = parser.add_argument_group("trust")
    group.add_argument(
        "--tokens-file",
        type=Path,
        default=os.environ.get("TANDEM_TOKENS_FILE") or None,
        metavar="FILE",
        help="let in only applications with one of these bearer tokens: lines of NAME TOKEN [EXPIRES], the latter as "
        "2030-01-31T12:00:00Z; read again when it changes; default: what TANDEM_TOKENS_FILE names, else all may call",
    )
    group.add_argument(
        "--untrusted-draft",
        action="store_true",
        help="refuse policies whose answers depend on what the draft services say of their drafts: rejection and block",
    )


if __name__ == "__main__":
    sys.exit(main())
