"""The two pools of replicas, and what each checks at every connect."""

from dataclasses import dataclass
from typing import TypeAlias

from orchestrator.addresses import Find
from orchestrator.breaker import Backoff
from orchestrator.handshake import draft_check, target_check
from orchestrator.replica_api import DRAFT_API, TARGET_API
from orchestrator.replica_link import DraftLink, ReplicaLink, TargetLink
from orchestrator.replica_pool import FIND_S, ReplicaPool
from orchestrator.replica_stream import PATIENCE, StreamPatience
from tandem.credentials import Credentials
from tandem.draft.v1 import draft_pb2
from tandem.serving.channels import MAX_UNTRUSTED_MESSAGE_BYTES
from tandem.serving.dialer import Dialer
from tandem.target.v1 import target_pb2
from tandem.vocabulary import Vocabulary

TargetPool: TypeAlias = ReplicaPool[target_pb2.VerifyItem, target_pb2.VerifyResult]
DraftPool: TypeAlias = ReplicaPool[draft_pb2.ProposeItem, draft_pb2.ProposeResult]


@dataclass(frozen=True, slots=True)
class PoolTimes:
    """How patient a pool is, in seconds."""

    find_s: float = FIND_S  # between two looks for addresses
    patience: StreamPatience = PATIENCE
    backoff: Backoff | None = None  # between attempts to connect


def target_pool(
    find: Find,
    vocabulary: Vocabulary,
    vocabulary_name: str,
    times: PoolTimes = PoolTimes(),
    dialer: Dialer | None = None,
) -> TargetPool:
    """Targets that know the vocabulary, and all compute the same.

    `dialer`: how they are called; None: in clear text.
    """

    def link_to(address: str) -> TargetLink:
        check = target_check(address, vocabulary, vocabulary_name, lambda: pool.infos_but(address))
        return ReplicaLink(TARGET_API, address, check, times.backoff, times.patience, dialer)

    pool: TargetPool = ReplicaPool("target", find, link_to, times.find_s)
    return pool


def draft_dialer(credentials: Credentials | None = None, *, trusts: bool = True) -> Dialer:
    """How draft services are called; those that nobody trusts may send no message that takes long to read.

    CredentialsError for credentials that cannot be used.
    """
    return Dialer(credentials, max_received_bytes=None if trusts else MAX_UNTRUSTED_MESSAGE_BYTES)


def draft_pool(
    find: Find,
    vocabulary: Vocabulary,
    vocabulary_name: str,
    targets: TargetPool,
    times: PoolTimes = PoolTimes(),
    dialer: Dialer | None = None,
) -> DraftPool:
    """Draft services that know the vocabulary, and get from the targets what they need."""

    def link_to(address: str) -> DraftLink:
        check = draft_check(address, vocabulary, vocabulary_name, lambda: targets.infos)
        return ReplicaLink(DRAFT_API, address, check, times.backoff, times.patience, dialer)

    return ReplicaPool("draft", find, link_to, times.find_s)
