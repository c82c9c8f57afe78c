"""An answer's figures as text: what `tandem generate --stats` and `--logprobs` print."""

from tandem.client import GenerationResult


def describe(result: GenerationResult) -> str:
    """The figures of one answer, one a line."""
    figures = result.speculation
    rate = "n/a (nothing drafted)" if figures.acceptance_rate is None else f"{figures.acceptance_rate:.1%}"
    speed = "n/a (one round)" if result.tokens_per_second is None else f"{result.tokens_per_second:.1f}"
    per_pass = result.num_completion_tokens / figures.num_rounds if figures.num_rounds else 0.0
    per_pos = ", ".join(
        f"{accepted}/{drafted}"
        for accepted, drafted in zip(figures.num_accepted_per_pos, figures.num_draft_tokens_per_pos, strict=True)
    )
    return "\n".join(
        [
            f"prompt tokens           {result.num_prompt_tokens} ({result.num_cached_tokens} cached)",
            f"tokens                  {result.num_completion_tokens} ({result.finish_reason.name.lower()})",
            f"target passes           {figures.num_rounds}",
            f"tokens per target pass  {per_pass:.2f}",
            f"acceptance rate         {rate} ({figures.num_accepted} of {figures.num_draft_tokens} drafts)",
            f"accepted by position    {per_pos or 'n/a'}",
            f"generation tokens/s     {speed}",
            f"time to first token     {result.time_to_first_token_s * 1000:.0f} ms",
            f"fallback rounds         {figures.num_fallback_rounds}",
            f"policy                  {result.verification_policy} (q: {result.draft_probs_transport})",
            f"seed                    {result.seed}",
            f"sample index            {result.sample_index}",
        ]
    )


def describe_logprobs(result: GenerationResult) -> str:
    """A line a token: id, text, log-probability and rank, then the likeliest of its row: id, text, log-probability."""
    texts = [printable(entry.token_bytes) for entry in result.logprobs]
    width = max(map(len, texts), default=0)
    lines = [f"{'token id':>8}  {'text':<{width}}  {'logprob':>10}  {'rank':>6}  likeliest"]
    for token_id, text, entry in zip(result.token_ids, texts, result.logprobs, strict=True):
        likeliest = ", ".join(
            f"{top_id} {printable(token)} {logprob:.4f}"
            for top_id, token, logprob in zip(
                entry.top_token_ids, entry.top_token_bytes, entry.top_logprobs, strict=True
            )
        )
        line = f"{token_id:>8}  {text:<{width}}  {entry.logprob:>10.4f}  {entry.rank:>6}  {likeliest}"
        lines.append(line.rstrip())
    return "\n".join(lines)


def printable(token: bytes) -> str:
    """Quoted text with what cannot be printed escaped: '\\n'; b'\\xf0\\x9f' where it is not whole characters."""
    try:
        return repr(token.decode())
    except UnicodeDecodeError:
        return repr(token)
