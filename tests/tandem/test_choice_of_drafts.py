"""`tandem up` and `tandem generate` start the draft service with the proposer that was named, or that follows."""

import pytest
from typer.testing import CliRunner

from draft_service.proposers.registry import proposer_names
from tandem import cli
from tandem.cluster_options import ClusterChoice, OptionError
from tandem.processes import ClusterPlan, ServiceStartError


def draft_arguments(
    proposer: str | None, draft_model: str | None = None, prompt_lookup: bool = True
) -> list[str] | None:
    choice = ClusterChoice("m", "float32", draft_model, prompt_lookup, 4, None, proposer=proposer)
    draft = choice.plan().draft
    return None if draft is None else list(draft)


def test_without_a_name_it_follows_from_the_other_options() -> None:
    assert draft_arguments(None) == ["--proposer", "ngram"]
    assert draft_arguments(None, "d") == ["--proposer", "draft_model", "--model", "d", "--dtype", "float32"]
    assert draft_arguments(None, "d", prompt_lookup=False) == draft_arguments(None, "d")
    assert draft_arguments(None, prompt_lookup=False) is None


def test_a_name_is_passed_on_with_the_draft_model_if_there_is_one() -> None:
    assert draft_arguments("suffix") == ["--proposer", "suffix"]
    assert draft_arguments("draft_model", "d") == draft_arguments(None, "d")


def test_a_head_is_passed_on_with_the_target_it_was_trained_for() -> None:
    choice = ClusterChoice("m", "float32", None, True, 4, None, proposer="eagle", head="h")
    assert choice.plan().draft == ["--proposer", "eagle", "--model", "m", "--dtype", "float32", "--head", "h"]
    with pytest.raises(OptionError, match="--head h needs --proposer: eagle, mtp or draft_model"):
        ClusterChoice("m", "float32", None, True, 4, None, head="h").plan()


def test_a_proposer_and_no_drafts_contradict_each_other() -> None:
    with pytest.raises(OptionError, match="--no-prompt-lookup means no drafts, and --proposer suffix means drafts"):
        draft_arguments("suffix", prompt_lookup=False)
    assert draft_arguments("draft_model", "d", prompt_lookup=False) == draft_arguments("draft_model", "d")


@pytest.mark.parametrize("command", [["up", "--port", "0"], ["generate", "x"]])
@pytest.mark.parametrize("name", proposer_names())
def test_the_command_line_takes_every_name(command: list[str], name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plans: list[ClusterPlan] = []

    def started(plan: ClusterPlan, quiet: bool = False) -> None:
        plans.append(plan)
        raise ServiceStartError("enough")

    monkeypatch.setattr("tandem.cli.LocalCluster", started)
    monkeypatch.setattr("tandem.generate_command.LocalCluster", started)
    answer = CliRunner().invoke(cli.app, [*command, "--proposer", name])
    assert answer.exit_code == 2
    assert [plan.draft for plan in plans] == [["--proposer", name]]


@pytest.mark.parametrize("command", [["up"], ["generate"]])
def test_help_names_every_proposer(command: list[str]) -> None:
    answer = CliRunner().invoke(cli.app, [*command, "--help"], env={"COLUMNS": "200"})
    assert [name for name in proposer_names() if name not in answer.output] == []
