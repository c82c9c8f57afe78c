"""`python -m loadtest.churn`: the services on a small pool, answers recorded alone, then the load and its verdict.

Exit code 0 only when every call gave what it should, nothing is in use afterwards, and every kind of ending was seen.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from engine.backends.options import parse_bytes
from engine.models.loading import load_model
from loadtest.churn.judge import Outcome, verdict
from loadtest.churn.load import PRESSURE, LoadSettings, run_load
from loadtest.churn.report import report, summary
from loadtest.churn.requests import MAX_DRAFT_TOKENS, make_requests, spec_bench_prompts
from loadtest.memory import MemorySeen, most_resident_bytes, plan_memory, resident_bytes
from loadtest.recorded import record
from tandem.client import SyncTandemClient
from tandem.cluster_options import ClusterChoice, PassedOptions
from tandem.defaults import NUM_DRAFT_TOKENS
from tandem.models import resolve_model
from tandem.processes import ClusterPlan, LocalCluster
from tandem.serving.options import make_parser, positive_int

_MIB = 1 << 20
_RESIDENT = "MiB resident in the target process"
_KV_MEMORY_BYTES = 48 * _MIB  # by default


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the whole test; the exit code."""
    options = build_parser().parse_args(arguments)
    if options.kv_memory is None and options.toy is None:
        options.kv_memory = _KV_MEMORY_BYTES
    with LocalCluster(cluster_plan(options), quiet=True) as cluster:
        outcome = run(options, cluster)
    text = report(outcome, describe(options)) if outcome.memory else "\n".join([*summary(outcome), ""])
    if options.out is not None:
        options.out.write_text(text)
    sys.stdout.write(text)
    return 1 if verdict(outcome) else 0


def build_parser() -> argparse.ArgumentParser:
    """Every option."""
    defaults = LoadSettings()
    parser = make_parser("python -m loadtest.churn", __doc__)
    parser.add_argument("--seconds", type=float, default=defaults.seconds, help="no call begins later")
    parser.add_argument("--max-calls", type=int, default=defaults.max_calls, help="most calls of all clients")
    parser.add_argument("--clients", type=int, default=defaults.num_clients, help="calls at a time")
    parser.add_argument(
        "--stall-seconds", type=float, default=defaults.stall_s, help="without a sign of life: the calls hang"
    )
    parser.add_argument("--requests", type=int, default=32, help="distinct requests")
    parser.add_argument("--seed", type=int, default=defaults.seed, help="of requests, picks and fates")
    parser.add_argument("--model", default="smollm2-135m", help="the target's: a name, a directory or a .gguf file")
    parser.add_argument("--dtype", default="float32", help="float32 or bfloat16")
    parser.add_argument("--toy", help="a toy engine instead of the model, e.g. hashed:vocab=512,seed=3,blocks=300")
    parser.add_argument("--draft-model", help="draft with this model (or toy engine) instead of prompt lookup")
    parser.add_argument(
        "--kv-memory",
        type=parse_bytes,
        help=f"pool of each model; not with --toy; default: {_KV_MEMORY_BYTES // _MIB}M",
    )
    parser.add_argument(
        "--block-size",
        type=positive_int,
        default=4,
        help="tokens a block; small ones are given out late, so they run out",
    )
    parser.add_argument("--threads", type=int, help="compute threads of each model service; default: all cores")
    parser.add_argument("--out", type=Path, help="also write the report to this file")
    return parser


def cluster_plan(options: argparse.Namespace) -> ClusterPlan:
    """The services, with small pools."""
    plan = ClusterChoice(
        model=options.model,
        dtype=options.dtype,
        draft_model=options.draft_model,
        prompt_lookup=True,
        num_draft_tokens=NUM_DRAFT_TOKENS,
        threads=options.threads,
        toy=options.toy,
        passed=PassedOptions(
            kv_memory=str(options.kv_memory) if options.kv_memory else None, block_size=options.block_size
        ),
    ).plan()
    # The target keeps room for a round of each session, so a shorter one lets more sessions in.
    return replace(plan, target=[*plan.target, "--max-draft-tokens", str(MAX_DRAFT_TOKENS)])


def run(options: argparse.Namespace, cluster: LocalCluster) -> Outcome:
    """Record, load, judge; the target's memory where it runs the native engine."""
    address, pid = cluster.addresses["orchestrator"], cluster.services[0].process.pid
    settings = LoadSettings(
        num_clients=options.clients,
        seconds=options.seconds,
        max_calls=options.max_calls,
        stall_s=options.stall_seconds,
        seed=options.seed,
    )
    before = resident_bytes(pid)
    with SyncTandemClient(address) as client:
        load = client.info().target_load
        recorded = record(client, make_requests(spec_bench_prompts(), options.requests, options.seed))
    figures = {**PRESSURE, _RESIDENT: lambda _: resident_bytes(pid) / _MIB}
    outcome = run_load(address, recorded, settings, figures)
    if options.toy is not None or load is None:
        return outcome
    after, peak = resident_bytes(pid), most_resident_bytes(pid)
    model = load_model(resolve_model(options.model))
    plan = plan_memory(model, options.dtype, load.total_blocks, options.block_size)
    most = round(outcome.most[_RESIDENT] * _MIB)
    return replace(outcome, memory=MemorySeen(plan, before, most, after, peak))


def describe(options: argparse.Namespace) -> str:
    """What ran, for the report."""
    drafts = f"by draft model {options.draft_model}" if options.draft_model else "by prompt lookup"
    pool = f"a pool of {options.kv_memory / _MIB:.0f} MiB in blocks of {options.block_size} tokens"
    return (
        f"Model: {options.model}, {options.dtype}; drafts {drafts}; {pool}; {options.clients} clients for "
        f"{options.seconds:.0f} s, {options.requests} distinct requests, seed {options.seed}."
    )


if __name__ == "__main__":
    sys.exit(main())
