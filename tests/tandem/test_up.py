"""What `tandem up` passes on: every option to the services that have it, and to no other."""

from argparse import ArgumentParser
from dataclasses import fields, replace
from typing import Any

import pytest
from typer.testing import CliRunner

from draft_service.__main__ import build_parser as draft_parser
from orchestrator.__main__ import build_parser as orchestrator_parser
from tandem import cli
from tandem.cluster_options import ClusterChoice, OptionError, PassedOptions
from tandem.processes import ClusterPlan, ServiceStartError
from tandem.serving.channels import AddressError
from target_service.__main__ import build_parser as target_parser

TOY = "hashed:vocab=512"
PARSERS: dict[str, ArgumentParser] = {
    "target": target_parser(),
    "draft": draft_parser(),
    "orchestrator": orchestrator_parser(),
}
EVERY_OPTION = PassedOptions(
    kv_memory="3M",
    block_size=4,
    prefix_cache=False,
    max_context=99,
    max_step_tokens=64,
    max_prefill_tokens=32,
    max_batch=5,
    max_sessions=6,
    session_lease=7.5,
    max_requests=8,
)
EVERY_OPTION_IN_WORDS = (
    "--kv-memory 3M --block-size 4 --no-prefix-cache --max-context 99 --max-step-tokens 64 --max-prefill-tokens 32 "
    "--max-batch 5 --max-sessions 6 --session-lease 7.5 --max-requests 8"
)
ENGINE = {"kv_memory": 3 << 20, "block_size": 4, "prefix_cache": False, "max_step_tokens": 64}
BOTH = {"max_batch": 5, "session_lease": 7.5}
TARGET_ONLY = {"max_context": 99, "max_prefill_tokens": 32, "max_sessions": 6}


def changed(plan: ClusterPlan, service: str) -> dict[str, Any]:
    """The passed options that the service has from its command line, as its own parser understands them."""
    command = {"target": plan.target, "draft": plan.draft or [], "orchestrator": plan.orchestrator}[service]
    needed = ["--target", "127.0.0.1:1"] if service == "orchestrator" else []
    options = vars(PARSERS[service].parse_args([*command, *needed]))
    names = {field.name for field in fields(PassedOptions)} & options.keys()
    return {name: options[name] for name in names if options[name] != PARSERS[service].get_default(name)}


def choice(draft_model: str | None, passed: PassedOptions) -> ClusterChoice:
    return ClusterChoice("m", "float32", draft_model, True, 4, None, passed=passed)


def test_each_service_gets_its_own_options_in_words_that_it_understands() -> None:
    plan = choice("d", EVERY_OPTION).plan()
    assert changed(plan, "target") == ENGINE | BOTH | TARGET_ONLY
    assert changed(plan, "draft") == ENGINE | BOTH
    assert changed(plan, "orchestrator") == {"max_requests": 8}


def test_drafts_without_a_model_get_no_options_of_a_model() -> None:
    assert changed(choice(None, EVERY_OPTION).plan(), "draft") == BOTH


def test_what_is_not_said_is_left_to_the_services() -> None:
    plan = choice("d", PassedOptions()).plan()
    for service in PARSERS:
        assert changed(plan, service) == {}


def test_the_command_line_has_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    plans = []

    def started(plan: ClusterPlan) -> None:
        plans.append(plan)
        raise ServiceStartError("enough")

    monkeypatch.setattr(cli, "LocalCluster", started)
    named = ["--port", "0", "--model", "m", "--draft-model", "d", "--metrics-address", "127.0.0.1:9150"]
    answer = CliRunner().invoke(cli.app, ["up", *named, *EVERY_OPTION_IN_WORDS.split()])
    assert answer.exit_code == 2
    assert plans == [replace(choice("d", EVERY_OPTION), metrics_address="127.0.0.1:9150").plan()]


@pytest.mark.parametrize(("address", "ports"), [("127.0.0.1:9150", (9150, 9151, 9152)), ("127.0.0.1:0", (0, 0, 0))])
def test_the_three_services_metrics_are_at_consecutive_ports(address: str, ports: tuple[int, ...]) -> None:
    plan = replace(choice("d", PassedOptions()), metrics_address=address).plan()
    assert plan.draft is not None
    commands = {
        "orchestrator": [*plan.orchestrator, "--target", "127.0.0.1:1"],
        "target": plan.target,
        "draft": plan.draft,
    }
    told = [PARSERS[name].parse_args(command).metrics_address for name, command in commands.items()]
    assert told == [f"127.0.0.1:{port}" for port in ports]


def test_metrics_need_an_address_with_room_for_three_ports() -> None:
    with pytest.raises(OptionError, match="--metrics-address 65534 is outside"):
        replace(choice(None, PassedOptions()), metrics_address="127.0.0.1:65534").plan()
    with pytest.raises(AddressError, match="'9150' is not HOST:PORT"):
        replace(choice(None, PassedOptions()), metrics_address="9150").plan()
