"""What an orchestrator says of itself and of the replicas it uses."""

from dataclasses import dataclass

from tandem import codec
from tandem.orchestrator.v1 import orchestrator_pb2 as pb
from tandem.types import Load, ModelInfo


@dataclass(frozen=True, slots=True)
class ReplicaInfo:
    """One replica of the draft or the target service, as the orchestrator knows it."""

    role: str  # "target" or "draft"
    address: str
    is_connected: bool  # False: what is said of model and load is old, or was never heard
    model: ModelInfo
    load: Load
    proposer: str = ""  # of a draft replica
    num_sessions: int = 0  # of this orchestrator
    problem: str = ""  # why it is not connected


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """What is served, by whom, and how busy they are."""

    num_running_requests: int  # each answer of a request counts
    replicas: tuple[ReplicaInfo, ...]  # all that are named now, targets first

    @property
    def targets(self) -> tuple[ReplicaInfo, ...]:
        return tuple(one for one in self.replicas if one.role == "target")

    @property
    def drafts(self) -> tuple[ReplicaInfo, ...]:
        return tuple(one for one in self.replicas if one.role == "draft")

    @property
    def target_load(self) -> Load:
        """Of all connected targets together."""
        return Load.together(one.load for one in self.targets if one.is_connected)

    @property
    def draft_load(self) -> Load:
        """Of all connected draft services together."""
        return Load.together(one.load for one in self.drafts if one.is_connected)


def server_info(answer: pb.GetInfoResponse) -> ServerInfo:
    """The answer as a value."""
    return ServerInfo(
        num_running_requests=answer.num_running_requests,
        replicas=tuple(
            ReplicaInfo(
                role=one.role,
                address=one.address,
                is_connected=one.is_connected,
                model=codec.model_info_from_proto(one.model),
                load=codec.load_from_proto(one.load),
                proposer=one.proposer,
                num_sessions=one.num_sessions,
                problem=one.problem,
            )
            for one in answer.replicas
        ),
    )
