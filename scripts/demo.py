"""`make demo`: start the three services, continue a piece of code with speculation off and on, compare."""

import sys

from tandem.answer_figures import describe
from tandem.client import GenerateOptions, GenerationResult, SyncTandemClient
from tandem.cluster_options import ClusterChoice
from tandem.generate_command import stream
from tandem.interrupts import INTERRUPTED, termination_as_interrupt
from tandem.processes import LocalCluster

PROMPT = '''class Matrix:
    def __init__(self, rows):
        self.rows = rows

    def add(self, other):
        """Add two matrices element by element."""
        result = []
        for i in range(len(self.rows)):
            row = []
            for j in range(len(self.rows[i])):
                row.append(self.rows[i][j] + other.rows[i][j])
            result.append(row)
        return Matrix(result)

    def subtract(self, other):
        """Subtract two matrices element by element."""'''
OPTIONS = GenerateOptions(temperature=0.0, max_tokens=160)


def say(text: str) -> None:
    """Write a line at once."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def run(client: SyncTandemClient, title: str, *, speculation: bool) -> GenerationResult:
    """Stream one generation and print its figures."""
    say(f"\n--- speculation {title} " + "-" * 40)
    result = stream(client, PROMPT, GenerateOptions(**OPTIONS, speculation=speculation))
    say(describe(result))
    return result


def main() -> int:
    """0 when both token lists are equal."""
    choice = ClusterChoice("smollm2-135m", "float32", None, True, 4, None)
    say("starting target, draft and orchestrator ...")
    with termination_as_interrupt(), LocalCluster(choice.plan(), quiet=True) as cluster:
        for service, address in cluster.addresses.items():
            say(f"{service:<12} {address}")
        say("\nprompt:\n" + PROMPT)
        with SyncTandemClient(cluster.addresses["orchestrator"]) as client:
            # So that neither run pays for what the first of all computes, the prompt's rows among it.
            say("\nwarming up: the prompt once, so that both runs find it cached")
            client.complete(PROMPT, temperature=0.0, max_tokens=8)
            plain = run(client, "off", speculation=False)
            speculative = run(client, "on (prompt lookup, 4 drafts a round)", speculation=True)
    is_equal = plain.token_ids == speculative.token_ids
    say("\n--- comparison " + "-" * 50)
    if plain.tokens_per_second and speculative.tokens_per_second:
        off, on = plain.tokens_per_second, speculative.tokens_per_second
        say(f"generation tokens/s     {off:.1f} off, {on:.1f} on ({on / off:.2f} x)")
    say(f"token lists equal       {'yes' if is_equal else 'NO'} ({len(plain.token_ids)} tokens each)")
    return 0 if is_equal else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
