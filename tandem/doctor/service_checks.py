"""What an orchestrator says of itself and of its replicas: who is up, what they compute, whether they fit."""

from collections.abc import Iterator, Sequence

from tandem.client_info import ReplicaInfo, ServerInfo
from tandem.doctor.findings import Finding, ok, problem, warning
from tandem.types import PROTOCOL_VERSION

_FULL = 0.95  # of the key-value memory


def check_server(info: ServerInfo) -> Iterator[Finding]:
    """Everything that can be known without a request."""
    yield ok("orchestrator", f"{info.num_running_requests} requests are running")
    yield from _check_role("target", info.targets)
    yield from _check_role("draft", info.drafts)
    connected = [replica for replica in info.replicas if replica.is_connected]
    yield from map(_check_replica, connected)
    yield from _check_numerics([replica for replica in connected if replica.role == "target"])
    yield from _check_vocabulary(connected)
    yield from _check_protocol(connected)


def _check_role(role: str, replicas: Sequence[ReplicaInfo]) -> Iterator[Finding]:
    up = [replica for replica in replicas if replica.is_connected]
    for replica in replicas:
        if not replica.is_connected:
            found = warning if up or role == "draft" else problem
            yield found(_name(replica), replica.problem or "is not connected", f"is the {role} service up there?")
    if not replicas:
        if role == "target":
            yield problem("targets", "none is named", "start the orchestrator with --target")
        else:
            yield warning("drafts", "none is named, so nothing is drafted", "start the orchestrator with --draft")
    else:
        found_up = f"{len(up)} of {len(replicas)} up"
        yield ok(f"{role}s", found_up) if up else warning(f"{role}s", found_up, "see the lines above")


def _check_replica(replica: ReplicaInfo) -> Finding:
    model, load, name = replica.model, replica.load, _name(replica)
    text = f"{replica.proposer or model.model_id} on {model.backend or 'no backend'} {model.dtype}".rstrip()
    if load.frozen:
        return problem(name, "its engine has not ended a step for too long", "look at its log, and start it again")
    if load.draining:
        return warning(name, "it is shutting down", "its sessions move; start another one if there is none")
    if load.total_blocks and load.waiting and load.kv_usage > _FULL:
        usage = f"{load.used_blocks} of {load.total_blocks} blocks are in use and {load.waiting} requests wait"
        return warning(name, usage, "give it more --kv-memory, or add a replica")
    return ok(name, text)


def _check_numerics(targets: Sequence[ReplicaInfo]) -> Iterator[Finding]:
    if not targets:
        return
    fingerprints = {(one.model.model_id, one.model.numerics_fingerprint) for one in targets}
    if len(fingerprints) > 1:
        text = ", ".join(f"{_name(one)} {one.model.model_id} ({one.model.numerics_fingerprint})" for one in targets)
        yield problem(
            "numerics", f"targets compute differently: {text}", "give all of them one model, dtype and backend"
        )
        return
    ((model_id, fingerprint),) = fingerprints
    text = f"every target computes {model_id} as {fingerprint or 'nobody has tested'}"
    if all(one.model.deterministic for one in targets):
        yield ok("numerics", text)
    else:
        advice = "texts may depend on the batch; the target's log says which test failed"
        yield warning("numerics", f"{text}, not deterministically", advice)


def _check_vocabulary(replicas: Sequence[ReplicaInfo]) -> Iterator[Finding]:
    having = [one for one in replicas if one.model.vocab_hash]
    hashes = {one.model.vocab_hash for one in having}
    if len(hashes) > 1:
        text = ", ".join(f"{_name(one)} {one.model.vocab_size} ids, {one.model.vocab_hash[:16]}" for one in having)
        yield problem("vocabulary", f"tables differ: {text}", "draft and target need one tokenizer")
    elif hashes:
        yield ok("vocabulary", f"one table, hash {hashes.pop()[:16]}, at {len(having)} of {len(replicas)} replicas")


def _check_protocol(replicas: Sequence[ReplicaInfo]) -> Iterator[Finding]:
    for replica in replicas:
        version = replica.model.protocol_version
        if version != PROTOCOL_VERSION:
            advice = "run one version of Tandem everywhere"
            yield problem(_name(replica), f"speaks protocol {version}, this command {PROTOCOL_VERSION}", advice)


def _name(replica: ReplicaInfo) -> str:
    return f"{replica.role} {replica.address}"
