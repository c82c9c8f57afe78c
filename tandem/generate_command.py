"""`tandem generate`: one prompt, streamed to standard output, with its speculation figures when asked."""

import contextlib
import sys
from collections.abc import Iterator, Sequence
from typing import Annotated

import typer

from tandem import cluster_options, connection_options
from tandem.answer_figures import describe, describe_logprobs
from tandem.client import (
    GenerateOptions,
    GenerationResult,
    Prompt,
    SyncTandemClient,
    TandemError,
    UnauthenticatedError,
)
from tandem.client_request import build_request
from tandem.credentials import Credentials
from tandem.defaults import MAX_TOKENS, NUM_DRAFT_TOKENS, ORCHESTRATOR_ADDRESS
from tandem.interrupts import INTERRUPTED
from tandem.processes import LocalCluster, ServiceStartError
from tandem.serving.channels import AddressError
from tandem.serving.pem import CredentialsError
from tandem.status_commands import fail

_PROBE_TIMEOUT_S = 1.0
_OWN_SERVICES = ("model", "dtype", "proposer", "draft_model", "head", "prompt_lookup", "threads", "toy")
_RUNNING_SERVICES = ("tls_ca", "tls_client_cert", "tls_client_key", "tls_server_name", "token_file", "insecure")


def generate(
    context: typer.Context,
    prompt: Annotated[str, typer.Argument(help="The text to continue; - reads standard input.")],
    address: Annotated[
        str | None,
        typer.Option(
            help=f"A running orchestrator. Default: {ORCHESTRATOR_ADDRESS} if it answers, else own services."
        ),
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Send the prompt as a user's message.")] = False,
    max_tokens: Annotated[
        int | None, typer.Option(help=f"Most tokens to generate. Default {MAX_TOKENS}, or what the context leaves.")
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="The same seed gives the same text. Default: drawn; --stats shows it.")
    ] = None,
    temperature: Annotated[float | None, typer.Option(help="0 to 100; 0: greedy. Default 1.")] = None,
    top_p: Annotated[
        float | None, typer.Option(help="Likeliest tokens that sum to this, in (0, 1]. Default 1: all.")
    ] = None,
    top_k: Annotated[int | None, typer.Option(help="This many likeliest tokens. Default 0: all.")] = None,
    min_p: Annotated[
        float | None,
        typer.Option(help="Tokens with this share of the likeliest's probability, in [0, 1]. Default 0: all."),
    ] = None,
    repetition_penalty: Annotated[
        float | None, typer.Option(help="Above 1: repeat less; in [0.01, 10]. Default 1: off.")
    ] = None,
    min_tokens: Annotated[int | None, typer.Option(help="No end before this many tokens. Default 0.")] = None,
    n: Annotated[int, typer.Option("--n", help="This many answers, 1 to 16, each under its sample index.")] = 1,
    sample_index: Annotated[
        int | None,
        typer.Option(help="Of the first answer: with the seed it gives one of several again. Default 0."),
    ] = None,
    priority: Annotated[
        int | None, typer.Option(help="-100 to 100; under load a higher one is served sooner. Default 0.")
    ] = None,
    timeout: Annotated[float | None, typer.Option(help="Seconds for the whole call. Default: no limit.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="End before this text; may be repeated.")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on past the end token.")] = False,
    speculation: Annotated[bool, typer.Option(help="Use drafts.")] = True,
    verification_policy: Annotated[
        str | None,
        typer.Option(help="coupled (default when sampling), rejection or block; greedy at temperature 0."),
    ] = None,
    draft_probs_transport: Annotated[
        str | None,
        typer.Option(
            help="How the draft's probabilities travel: sparse (default), one_hot or full for rejection and block."
        ),
    ] = None,
    logprobs: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Print every token's text, log-probability and N likeliest, to standard error; 0 to 20.",
        ),
    ] = None,
    logprobs_mode: Annotated[
        str | None, typer.Option(help="raw (default): the model's own; processed: what the token was chosen from.")
    ] = None,
    stats: Annotated[
        bool, typer.Option("--stats", help="Print the speculation figures to standard error.")
    ] = False,
    num_draft_tokens: cluster_options.NumDraftTokens = NUM_DRAFT_TOKENS,
    model: cluster_options.Model = "smollm2-135m",
    dtype: cluster_options.Dtype = "float32",
    proposer: cluster_options.ProposerName = None,
    draft_model: cluster_options.DraftModel = None,
    head: cluster_options.Head = None,
    prompt_lookup: cluster_options.PromptLookup = True,
    threads: cluster_options.Threads = None,
    toy: cluster_options.Toy = None,
    tls_ca: connection_options.TlsCa = None,
    tls_client_cert: connection_options.TlsClientCert = None,
    tls_client_key: connection_options.TlsClientKey = None,
    tls_server_name: connection_options.TlsServerName = None,
    token_file: connection_options.TokenFile = None,
    insecure: connection_options.Insecure = False,
) -> None:
    """Generate from PROMPT and stream the text.

    Choosing models or drafts (--model, --dtype, --proposer, --draft-model, --head, --prompt-lookup, --threads, --toy)
    starts services for this one call; what reaches a service over a network is for running ones.
    """
    own, reaching = _given(context, _OWN_SERVICES), _given(context, _RUNNING_SERVICES)
    choice = cluster_options.ClusterChoice(
        model, dtype, draft_model, prompt_lookup, num_draft_tokens, threads, toy, proposer=proposer, head=head
    )
    options = GenerateOptions(
        max_tokens=max_tokens,
        seed=seed,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        min_tokens=min_tokens,
        n=n,
        sample_index=sample_index,
        priority=priority,
        timeout=timeout,
        stop=stop,
        ignore_eos=ignore_eos,
        logprobs=None if logprobs is None else True,
        top_logprobs=logprobs,
        logprobs_mode=logprobs_mode,
        speculation=speculation,
        verification_policy=verification_policy,
        draft_probs_transport=draft_probs_transport,
        num_draft_tokens=num_draft_tokens if _is_given(context, "num_draft_tokens") else None,
    )
    if prompt == "-" and sys.stdin is None:
        raise fail(
            "the prompt - reads standard input, which is closed: give it the text, or the text as the prompt"
        )
    text = sys.stdin.read() if prompt == "-" else prompt
    sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]  # a terminal may lack a character
    try:
        build_request(text, **options)  # what cannot be asked is refused before services are started
        shown = connection_options.credentials(
            tls_ca, tls_client_cert, tls_client_key, tls_server_name, token_file, insecure
        )
        with (
            services(address, own, reaching, choice, shown) as serving,
            SyncTandemClient(serving, credentials=shown) as client,
        ):
            asked: Prompt = [{"role": "user", "content": text}] if chat else text
            results = gather(client, asked, options) if n > 1 else [stream(client, asked, options)]
    except (TandemError, ServiceStartError, AddressError, CredentialsError, cluster_options.OptionError) as error:
        raise fail(str(error)) from error
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    for result in results:
        if n > 1 and (stats or logprobs is not None):
            typer.echo(f"answer {result.sample_index}:", err=True)
        if logprobs is not None:
            typer.echo(describe_logprobs(result), err=True)
        if stats:
            typer.echo(describe(result), err=True)


@contextlib.contextmanager
def services(
    address: str | None, own: str, reaching: str, choice: cluster_options.ClusterChoice, shown: Credentials
) -> Iterator[str]:
    """The address of an orchestrator: a running one, or one started for as long as the context lasts.

    `own`, `reaching`: the given options that make sense for the latter or the former only; OptionError for both kinds.
    """
    if address is not None:
        if own:
            raise cluster_options.OptionError(f"--address uses running services, so {own} cannot be chosen")
        yield address
    elif not own and is_serving(ORCHESTRATOR_ADDRESS, shown):
        yield ORCHESTRATOR_ADDRESS
    else:
        if reaching:
            why = f"{own} asks for that" if own else f"none answers at {ORCHESTRATOR_ADDRESS}"
            raise cluster_options.OptionError(
                f"{reaching} can only be used with running services, and this call would start its own: {why}; "
                "name a running orchestrator by --address"
            )
        typer.echo("starting services for this call; `tandem up` keeps them running", err=True)
        with LocalCluster(choice.plan(), quiet=True) as cluster:
            yield cluster.addresses["orchestrator"]


def is_serving(address: str, shown: Credentials) -> bool:
    """Whether an orchestrator answers there at once."""
    with SyncTandemClient(address, credentials=shown) as client:
        try:
            client.info(timeout=_PROBE_TIMEOUT_S)
        except UnauthenticatedError:
            return True  # it says so again, to whoever asked
        except TandemError:
            return False
    return True


def stream(client: SyncTandemClient, prompt: Prompt, options: GenerateOptions) -> GenerationResult:
    """Write the text as it comes; leaving early cancels the call on the server."""
    generation = client.generate(prompt, **options)
    with contextlib.closing(iter(generation)) as chunks:
        try:
            for chunk in chunks:
                sys.stdout.write(chunk.text)
                sys.stdout.flush()
        finally:
            sys.stdout.write("\n")
    return generation.result


def gather(client: SyncTandemClient, prompt: Prompt, options: GenerateOptions) -> list[GenerationResult]:
    """Write each answer under its sample index once all have ended; after an error, what has come of them."""
    generation = client.generate(prompt, **options)
    with contextlib.closing(iter(generation)) as chunks:
        try:
            for _ in chunks:
                pass
        finally:
            for answer in generation.answers:
                sys.stdout.write(f"answer {answer.sample_index}:\n{answer.text}\n")
    return generation.results


def _given(context: typer.Context, names: Sequence[str]) -> str:
    """Those of these options that are on the command line, as they are written there; empty for none."""
    return ", ".join(f"--{name.replace('_', '-')}" for name in names if _is_given(context, name))


def _is_given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name not in ("DEFAULT", "DEFAULT_MAP")
