"""The two pools of replicas, and what each checks at every connect."""

from typing import TypeAlias

from orchestrator.addresses import Find
from orchestrator.breaker import Backoff
from orchestrator.handshake import draft_check, target_check
from orchestrator.replica_api import DRAFT_API, TARGET_API
from orchestrator.replica_link import DraftLink, ReplicaLink, TargetLink
from orchestrator.replica_pool import FIND_S, ReplicaPool
from tandem.draft.v1 import draft_pb2
from tandem.target.v1 import target_pb2
from tandem.vocabulary import Vocabulary

TargetPool: TypeAlias = ReplicaPool[target_pb2.VerifyItem, target_pb2.VerifyResult]
DraftPool: TypeAlias = ReplicaPool[draft_pb2.ProposeItem, draft_pb2.ProposeResult]


def target_pool(
    find: Find,
    vocabulary: Vocabulary,
    vocabulary_name: str,
    backoff: Backoff | None = None,
    find_s: float = FIND_S,
) -> TargetPool:
    """Targets that know the vocabulary, and all compute the same.

    `backoff`: between attempts to connect; `find_s`: seconds between two looks for addresses.
    """

    def link_to(address: str) -> TargetLink:
        check = target_check(address, vocabulary, vocabulary_name, lambda: pool.infos_but(address))
        return ReplicaLink(TARGET_API, address, check, backoff)

    pool: TargetPool = ReplicaPool("target", find, link_to, find_s)
    return pool


def draft_pool(
    find: Find,
    vocabulary: Vocabulary,
    vocabulary_name: str,
    targets: TargetPool,
    backoff: Backoff | None = None,
    find_s: float = FIND_S,
) -> DraftPool:
    """Draft services that know the vocabulary, and get from the targets what they need."""

    def link_to(address: str) -> DraftLink:
        check = draft_check(address, vocabulary, vocabulary_name, lambda: targets.infos)
        return ReplicaLink(DRAFT_API, address, check, backoff)

    return ReplicaPool("draft", find, link_to, find_s)
