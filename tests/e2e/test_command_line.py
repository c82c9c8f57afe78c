"""The `tandem` command against real processes: one seed one text, Ctrl-C frees, bad input is refused by name."""

import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from loadtest.up import tandem_up
from tandem.client import InvalidRequestError, SyncTandemClient
from tandem.cluster_options import ClusterChoice
from tandem.processes import LocalCluster
from tandem.vocabulary import Vocabulary

TOY = "hashed:vocab=512,seed=3"
HANG_S = 120
IDLE_WITHIN_S = 10  # a round of the toy services takes some 10 ms, the request they would go on with half a minute


def tandem(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command to its end."""
    command = [sys.executable, "-m", "tandem", *arguments]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=HANG_S)


def text_of(token_id: int) -> str | bytes:
    """A toy token's text; its bytes where they are no text."""
    token = Vocabulary.toy(512).token_bytes(token_id)
    try:
        return token.decode()
    except UnicodeDecodeError:
        return token


def hear_ctrl_c() -> None:
    """In the child: a suite that runs as a shell's background job hands down that Ctrl-C is ignored."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def wait_until_idle(client: SyncTandemClient) -> bool:
    """Whether both services come to hold no session and no block."""
    deadline = time.monotonic() + IDLE_WITHIN_S
    while time.monotonic() < deadline:
        info = client.info()
        loads = [load for load in (info.target_load, info.draft_load) if load is not None]
        if info.num_running_requests == 0 and not any(load.running or load.used_blocks for load in loads):
            return True
        time.sleep(0.01)
    return False


@pytest.fixture(scope="module")
def addresses() -> Iterator[dict[str, str]]:
    """Toy services that a user has started; slow enough to be interrupted."""
    with tandem_up(["--toy", f"{TOY},delay_ms=5", "--draft-model", TOY]) as running:
        yield running


def test_generate_three_times_with_one_seed_gives_one_text(addresses: dict[str, str]) -> None:
    options = ["--address", addresses["orchestrator"], "--seed", "7", "--temperature", "0.9", "--max-tokens", "24"]
    answers = [tandem("generate", "hello world", *options) for _ in range(3)]
    assert [answer.returncode for answer in answers] == [0, 0, 0]
    assert len({answer.stdout for answer in answers}) == 1
    other = tandem("generate", "hello world", *options[:2], "--seed", "8", *options[4:])
    assert other.stdout != answers[0].stdout


def test_several_answers_stand_under_their_sample_index_which_gives_each_alone_again(
    addresses: dict[str, str],
) -> None:
    options = ["--address", addresses["orchestrator"], "--seed", "7", "--max-tokens", "12", "--ignore-eos"]
    several = tandem("generate", "hello world", *options, "--n", "3", "--stats")
    alone = [tandem("generate", "hello world", *options, "--sample-index", str(index)) for index in range(3)]
    assert len({answer.stdout for answer in alone}) == 3
    assert several.stdout == "".join(f"answer {index}:\n{answer.stdout}" for index, answer in enumerate(alone))
    assert re.findall(r"^sample index +(\d)$", several.stderr, re.MULTILINE) == ["0", "1", "2"]


def test_stats_tell_tokens_passes_acceptance_speed_and_seed(addresses: dict[str, str]) -> None:
    options = [
        "--address",
        addresses["orchestrator"],
        "--seed",
        "7",
        "--max-tokens",
        "24",
        "--ignore-eos",
        "--stats",
    ]
    figures = tandem("generate", "hello world", *options).stderr
    assert re.search(r"^tokens +24 \(length\)$", figures, re.MULTILINE)
    assert re.search(r"^acceptance rate +100\.0% \(\d+ of \d+ drafts\)$", figures, re.MULTILINE)
    assert re.search(r"^generation tokens/s +[\d.]+$", figures, re.MULTILINE)
    assert re.search(r"^seed +7$", figures, re.MULTILINE)


def test_logprobs_are_a_line_a_token_on_standard_error(addresses: dict[str, str]) -> None:
    options = ["--address", addresses["orchestrator"], "--seed", "7", "--max-tokens", "6", "--ignore-eos"]
    plain = tandem("generate", "hello world", *options)
    answer = tandem("generate", "hello world", *options, "--logprobs", "2", "--logprobs-mode", "processed")
    assert answer.stdout == plain.stdout
    assert plain.stderr == ""
    header, *lines = answer.stderr.splitlines()
    assert header.split() == ["token", "id", "text", "logprob", "rank", "likeliest"]
    with SyncTandemClient(addresses["orchestrator"]) as client:
        result = client.complete(
            "hello world",
            seed=7,
            max_tokens=6,
            ignore_eos=True,
            logprobs=True,
            top_logprobs=2,
            logprobs_mode="processed",
        )
    texts = [repr(text_of(token_id)) for token_id in result.token_ids]
    for line, token_id, text, entry in zip(lines, result.token_ids, texts, result.logprobs, strict=True):
        likeliest = ", ".join(
            f"{top_id} {text_of(top_id)!r} {value:.4f}"
            for top_id, value in zip(entry.top_token_ids, entry.top_logprobs, strict=True)
        )
        row = f"{token_id:>8}  {text:<{max(map(len, texts))}}  {entry.logprob:>10.4f}  {entry.rank:>6}  {likeliest}"
        assert line == row


@pytest.mark.parametrize("policy", ["rejection", "block"])
def test_a_policy_and_a_transport_are_chosen_by_name(addresses: dict[str, str], policy: str) -> None:
    options = ["--verification-policy", policy, "--max-tokens", "8", "--ignore-eos", "--stats"]
    for given, used in (([], "sparse"), (["--draft-probs-transport", "full"], "full")):
        answer = tandem("generate", "hello", "--address", addresses["orchestrator"], *options, *given)
        assert f"policy                  {policy} (q: {used})" in answer.stderr
        assert "acceptance rate         100.0%" in answer.stderr


def test_ctrl_c_frees_both_services_sessions_within_a_round(addresses: dict[str, str]) -> None:
    command = [sys.executable, "-m", "tandem", "generate", "endless", "--address", addresses["orchestrator"]]
    process = subprocess.Popen(
        [*command, "--max-tokens", "3000", "--ignore-eos"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=hear_ctrl_c,
    )
    assert process.stdout is not None
    process.stdout.read(1)  # it streams
    with SyncTandemClient(addresses["orchestrator"]) as client:
        info = client.info()
        assert info.num_running_requests == 1
        assert info.target_load.running == 1
        assert info.draft_load is not None
        assert info.draft_load.running == 1
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=HANG_S)
        assert process.returncode == 130
        assert wait_until_idle(client)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--seed", "-1"], "seed: -1 is outside [0, 18446744073709551615]"),
        (["--timeout", "-1"], "timeout: -1.0 is outside [0, 1e+06]"),
        (["--max-tokens", "0"], "stopping.max_tokens: 0 is less than 1"),
        (["--temperature", "-1"], "sampling.temperature: -1.0 is outside [0, 100]"),
        (["--temperature", "nan"], "sampling.temperature: nan is outside [0, 100]"),
        (["--top-p", "0"], "sampling.top_p: 0.0 is outside (0, 1]"),
        (["--n", "17"], "n: 17 is outside [1, 16]"),
        (["--max-tokens", "5000"], "is more than the context of 4096 tokens"),
        (
            ["--verification-policy", "blocks"],
            "'blocks' is not offered; there are: greedy, coupled, rejection, block",
        ),
        (["--logprobs", "21"], "logprobs.num_top: 21 is outside [0, 20]"),
        (["--logprobs-mode", "raw"], "logprobs_mode: needs logprobs=True"),
        (["--draft-probs-transport", "fax"], "draft_probs_transport: 'fax' is not offered"),
        (["--draft-probs-transport", "full"], "'full' cannot be used under verification policy 'coupled'"),
        (["--stop", ""], "stopping.stop[0]: a stop string must have at least 1 character"),
    ],
)
def test_bad_options_are_refused_with_field_and_limit(
    addresses: dict[str, str], options: list[str], named: str
) -> None:
    answer = tandem("generate", "hello", "--address", addresses["orchestrator"], *options)
    assert answer.returncode == 2
    assert named in answer.stderr
    assert "Traceback" not in answer.stderr


def test_bad_prompts_are_refused_with_field_and_limit(addresses: dict[str, str]) -> None:
    with SyncTandemClient(addresses["orchestrator"]) as client:
        for prompt, named in (
            ("", "prompt"),
            ([], "prompt"),
            ([1, 512], r"prompt\[1\]: token id 512 is outside 0\.\.511"),
        ):
            with pytest.raises(InvalidRequestError, match=named):
                client.complete(prompt)
        assert client.complete("fine", max_tokens=3, ignore_eos=True).num_completion_tokens == 3


def test_a_killed_tandem_up_leaves_no_service_behind() -> None:
    command = [sys.executable, "-m", "tandem", "up", "--port", "0", "--toy", TOY]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    address = ""
    while not address.startswith("orchestrator"):
        address = process.stdout.readline()
    process.kill()
    process.wait(timeout=HANG_S)
    process.stdout.close()
    deadline = time.monotonic() + HANG_S
    while tandem("health", "--address", address.split()[1]).returncode == 0:
        assert time.monotonic() < deadline


def test_status_and_health_tell_what_is_served(addresses: dict[str, str]) -> None:
    status = tandem("status", "--address", addresses["orchestrator"])
    assert "0 running" in status.stdout
    assert "draft_model" in status.stdout
    for address in addresses.values():
        assert tandem("health", "--address", address).stdout == "SERVING\n"
    nobody = tandem("health", "--address", "127.0.0.1:1")
    assert nobody.returncode == 1
    assert "UNAVAILABLE: no Tandem service answers at 127.0.0.1:1: " in nobody.stderr


def test_a_taken_port_is_named(addresses: dict[str, str]) -> None:
    answer = tandem("serve", "target", "--toy", TOY, "--address", addresses["target"])
    assert answer.returncode == 2
    assert addresses["target"] in answer.stderr
    assert "Traceback" not in answer.stderr


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (
            ["serve", "draft", "--proposer", "medusa"],
            "unknown proposer 'medusa'; there are: draft_model, eagle, mtp, ngram, suffix, synthetic",
        ),
        (["up", "--port", "0", "--toy", TOY, "--proposer", "dflash"], "unknown proposer 'dflash'; there are: "),
        (["serve", "target", "--model", "no-such-model"], "no-such-model"),
        (["serve", "target", "--toy", TOY, "--address", "0.0.0.0:0"], "--insecure"),
        (["up", "--port", "0", "--model", "no-such-model"], "the target service ended with exit code 2"),
        (
            ["up", "--port", "0", "--toy", TOY, "--kv-memory", "1G"],
            "its pool is set in blocks: --toy hashed:blocks=",
        ),
        (["up", "--port", "0", "--toy", TOY, "--max-batch", "none"], "--max-batch"),
        (["generate", "x", "--address", "127.0.0.1:1", "--draft-model", "y"], "--draft-model"),
        (["generate", "x", "--address", "nowhere"], "HOST:PORT"),
        (["generate", "x", "--address", "127.0.0.1:1"], "no Tandem service answers at 127.0.0.1:1: "),
        (["status", "--address", "127.0.0.1:1"], "no Tandem service answers at 127.0.0.1:1: "),
        (["models", "pull", "gpt-9"], "smollm2-135m"),
    ],
)
def test_what_cannot_start_says_why_in_a_line(arguments: list[str], named: str) -> None:
    answer = tandem(*arguments)
    assert answer.returncode == 2
    assert named in answer.stderr
    assert "Traceback" not in answer.stderr


def test_a_prompt_from_a_standard_input_that_is_closed_is_refused_in_a_line() -> None:
    command = [sys.executable, "-m", "tandem", "generate", "-", "--address", "127.0.0.1:1"]
    shell = ["sh", "-c", 'exec "$@" <&-', "sh", *command]
    answer = subprocess.run(shell, check=False, capture_output=True, text=True, timeout=HANG_S)
    assert answer.returncode == 2
    assert answer.stderr.startswith("tandem: the prompt - reads standard input, which is closed: ")
    assert "Traceback" not in answer.stderr


def test_a_proposer_is_chosen_by_name_drafts_and_changes_no_text() -> None:
    options = ["ababababab", "--toy", TOY, "--seed", "7", "--max-tokens", "24", "--stats"]
    answers = [
        tandem("generate", *options, *drafts) for drafts in (["--proposer", "suffix"], ["--no-prompt-lookup"])
    ]
    assert [answer.returncode for answer in answers] == [0, 0]
    assert answers[0].stdout == answers[1].stdout
    drafted = [re.findall(r"of (\d+) drafts", answer.stderr) for answer in answers]
    assert int(drafted[0][0]) > 0
    assert drafted[1] == ["0"]


def test_services_with_different_vocabularies_do_not_meet(addresses: dict[str, str]) -> None:
    answer = tandem("serve", "orchestrator", "--target", addresses["target"], "--toy-vocab", "300")
    assert answer.returncode == 2
    assert "300" in answer.stderr
    assert "512" in answer.stderr


def test_status_says_which_service_is_gone_and_generation_goes_on_without_drafts() -> None:
    plan = ClusterChoice("", "float32", None, True, 4, None, toy=TOY).plan()
    with LocalCluster(plan, quiet=True) as cluster:
        address = cluster.addresses["orchestrator"]
        draft = next(service for service in cluster.services if service.service == "draft")
        draft.process.kill()
        draft.process.wait(timeout=HANG_S)
        deadline = time.monotonic() + HANG_S
        gone = f"draft        {cluster.addresses['draft']} ngram: NOT CONNECTED"
        while gone not in tandem("status", "--address", address).stdout:
            assert time.monotonic() < deadline
        assert tandem("generate", "hello", "--address", address, "--max-tokens", "4").returncode == 0
