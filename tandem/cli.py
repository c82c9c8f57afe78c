"""The `tandem` command: up, serve, generate, status, health, doctor, models, bench."""

import importlib.metadata
import inspect
import os
import sys
from typing import Annotated

import typer

from tandem import cluster_options, generate_command, models, status_commands
from tandem.defaults import NUM_DRAFT_TOKENS
from tandem.doctor.command import doctor
from tandem.interrupts import INTERRUPTED, termination_as_interrupt
from tandem.processes import MODULES, LocalCluster, ServiceStartError, require_engine, service_command
from tandem.serving.channels import AddressError
from tandem.status_commands import fail

_PASS_THROUGH = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}

# Plain: the tables of rich cut the names of options at 80 columns.
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
models_app = typer.Typer(no_args_is_help=True, help="Model files on this machine.")
bench_app = typer.Typer(no_args_is_help=True, help="Measurements with their method.")
app.add_typer(models_app, name="models")
app.add_typer(bench_app, name="bench")
app.command("generate")(generate_command.generate)
app.command("status")(status_commands.status)
app.command("health")(status_commands.health)
app.command("doctor")(doctor)


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Say which version this is.")] = False,
) -> None:
    """Exact speculative decoding split across services."""
    if version:
        typer.echo(f"tandem {importlib.metadata.version('tandem')}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit(2)


@models_app.command("pull")
def models_pull(
    name: Annotated[str, typer.Argument(help="A name from `tandem models list`.")],
    verify: Annotated[bool, typer.Option("--verify", help="Hash the files again even when they are here.")] = False,
) -> None:
    """Bring a model's files here: download, check, convert the tokenizer."""
    try:
        directory = models.pull_model(name, report=models.PullProgressPrinter(sys.stderr), verify=verify)
    except (models.ModelNotFoundError, models.ModelPullError) as error:
        raise fail(str(error)) from error
    typer.echo(str(directory))


@models_app.command("list")
def models_list() -> None:
    """Names that can be pulled, and whether they are here."""
    for name, source in models.REGISTRY.items():
        state = "here" if models.is_pulled(models.default_models_dir() / name) else "not pulled"
        typer.echo(f"{name:<16} {source.num_bytes / 1e6:6.0f} MB  {source.license:<12} {state}")


@app.command(context_settings=_PASS_THROUGH)
def serve(
    context: typer.Context,
    service: Annotated[str, typer.Argument(help="draft, target or orchestrator")],
) -> None:
    """Run one service (draft, target or orchestrator); `tandem serve SERVICE --help` lists its options."""
    if service not in MODULES:
        usage = (
            f"usage: tandem serve {{{','.join(MODULES)}}} [OPTIONS]; tandem serve SERVICE --help lists the options"
        )
        if service == "--help":
            typer.echo(usage)
            raise typer.Exit
        raise fail(f"unknown service {service!r}; {usage}")
    run_in_place(service_command(service, context.args), needs_engine=service != "orchestrator")


def run_in_place(command: list[str], *, needs_engine: bool) -> None:
    """Become this command."""
    try:
        if needs_engine:
            require_engine()
    except ServiceStartError as error:
        raise fail(str(error)) from error
    os.execv(command[0], command)


@bench_app.command("engine", context_settings=_PASS_THROUGH)
def bench_engine(context: typer.Context) -> None:
    """The engine's step against a bare forward of the same model; `--help` lists its options."""
    run_in_place([sys.executable, "-m", "engine.bench", *context.args], needs_engine=True)


@bench_app.command("sampling", context_settings=_PASS_THROUGH)
def bench_sampling(context: typer.Context) -> None:
    """What deciding a verification costs beside its forward; `--help` lists its options."""
    run_in_place([sys.executable, "-m", "target_service.bench_sampling", *context.args], needs_engine=True)


@bench_app.command("target", context_settings=_PASS_THROUGH)
def bench_target(context: typer.Context) -> None:
    """What the target service costs over the bare engine; `--help` lists its options."""
    run_in_place([sys.executable, "-m", "target_service.bench_target", *context.args], needs_engine=True)


@bench_app.command("draft", context_settings=_PASS_THROUGH)
def bench_draft(context: typer.Context) -> None:
    """What a draft costs beside a forward of the target; `--help` lists its options."""
    run_in_place([sys.executable, "-m", "draft_service.bench_draft", *context.args], needs_engine=True)


@app.command()
def up(
    model: cluster_options.Model = "smollm2-135m",
    dtype: cluster_options.Dtype = "float32",
    proposer: cluster_options.ProposerName = None,
    draft_model: cluster_options.DraftModel = None,
    head: cluster_options.Head = None,
    prompt_lookup: cluster_options.PromptLookup = True,
    num_draft_tokens: cluster_options.NumDraftTokens = NUM_DRAFT_TOKENS,
    threads: cluster_options.Threads = None,
    toy: cluster_options.Toy = None,
    host: Annotated[str, typer.Option(help="Where all three services listen.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(help="The orchestrator's; target and draft take the next two. 0: free ones.")
    ] = (50050),
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Accept a host that is not loopback, in clear text.")
    ] = False,
    metrics_address: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="Where to serve the orchestrator's Prometheus metrics; target's and draft's: the next two ports. "
            "Port 0: free ones. Default: nowhere.",
        ),
    ] = None,
    kv_memory: cluster_options.KvMemory = None,
    block_size: cluster_options.BlockSize = None,
    prefix_cache: cluster_options.PrefixCache = None,
    max_context: cluster_options.MaxContext = None,
    max_step_tokens: cluster_options.MaxStepTokens = None,
    max_prefill_tokens: cluster_options.MaxPrefillTokens = None,
    max_batch: cluster_options.MaxBatch = None,
    max_sessions: cluster_options.MaxSessions = None,
    session_lease: cluster_options.SessionLease = None,
    max_requests: cluster_options.MaxRequests = None,
) -> None:
    """Start the three services, say when they are ready, stop them all at Ctrl-C or SIGTERM.

    That is its end as planned, with exit code 0; before they are ready it is 130.

    Options from --kv-memory on are passed on to the services: `tandem serve SERVICE --help` says their defaults. For
    other options of one service, start the three by hand with `tandem serve`.
    """
    passed = cluster_options.PassedOptions(
        kv_memory=kv_memory,
        block_size=block_size,
        prefix_cache=prefix_cache,
        max_context=max_context,
        max_step_tokens=max_step_tokens,
        max_prefill_tokens=max_prefill_tokens,
        max_batch=max_batch,
        max_sessions=max_sessions,
        session_lease=session_lease,
        max_requests=max_requests,
    )
    choice = cluster_options.ClusterChoice(
        model,
        dtype,
        draft_model,
        prompt_lookup,
        num_draft_tokens,
        threads,
        toy,
        insecure,
        passed,
        proposer,
        head,
        metrics_address,
    )
    is_ready = False
    try:
        plan = choice.plan(host, port)
        with LocalCluster(plan) as cluster:
            for service, address in cluster.addresses.items():
                typer.echo(f"{service:<12} {address}")
            is_ready = True
            typer.echo("ready")
            try:
                ended = cluster.wait_for_end()
            except KeyboardInterrupt:
                typer.echo("stopping: answers that run have their time to end")
                raise
            raise fail(f"the {ended.service} service ended with exit code {ended.process.returncode}")
    except (ServiceStartError, cluster_options.OptionError, AddressError) as error:
        raise fail(str(error)) from error
    except KeyboardInterrupt:
        typer.echo("stopped")
        raise typer.Exit(0 if is_ready else INTERRUPTED) from None


for group in (app, models_app, bench_app):
    for command in group.registered_commands:  # a list of commands would cut what is not said to be short
        command.short_help = (inspect.getdoc(command.callback) or "").partition("\n\n")[0]


def main() -> None:
    """Do what the command line says; interrupted, it has stopped what it started and ends with 130."""
    with termination_as_interrupt():
        app(prog_name="tandem")
