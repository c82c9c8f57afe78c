"""Drafts on and off, timed end to end: what is compared, and where a round's time is said to go."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from loadtest.speculation import DifferentAnswerError, Pair, Round, measure, report
from tandem.client import GenerateOptions, GenerationResult, SyncTandemClient
from tandem.cluster_options import ClusterChoice
from tandem.processes import LocalCluster

TOY = "hashed:vocab=512,seed=3,blocks=300"
ASKED = GenerateOptions(max_tokens=24, temperature=0.0, seed=1, ignore_eos=True)


@pytest.fixture(scope="module")
def client() -> Iterator[SyncTandemClient]:
    plan = ClusterChoice("", "float32", f"{TOY},blend=0.2", False, 4, None, TOY).plan()
    with LocalCluster(plan, quiet=True) as cluster, SyncTandemClient(cluster.addresses["orchestrator"]) as client:
        yield client


@pytest.fixture(scope="module")
def pairs(client: SyncTandemClient) -> list[Pair]:
    return measure(client, ["one", "two"], ASKED, 2)


def test_every_prompt_has_its_pairs_and_parts_make_up_the_round(pairs: list[Pair]) -> None:
    assert len(pairs) == 4
    for pair in pairs:
        assert pair.plain.token_ids == pair.drafted.token_ids
        assert pair.plain.speculation.num_rounds == 24 > pair.drafted.speculation.num_rounds
        plain, drafted = Round.of(pair.plain), Round.of(pair.drafted)
        assert plain.draft_compute == plain.draft_queue == plain.draft_wire == 0
        for one in (plain, drafted):
            assert one.verify_compute > 0
            assert one.verify_wire > 0
            assert one.rest > 0
        assert drafted.draft_compute > 0
        assert drafted.draft_wire > 0
        assert pair.ratio > 0


def test_the_report_has_ratio_and_parts(pairs: list[Pair]) -> None:
    text = report("What ran.", pairs, ["Machine."])
    assert "median of 4 pairs" in text
    assert "| off |" in text
    assert "| on |" in text
    assert "verify, wire" in text


def test_an_answer_that_drafts_have_changed_ends_the_measurement(
    client: SyncTandemClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    complete = client.complete

    def lying(prompt: str, **options: Any) -> GenerationResult:
        result = complete(prompt, **options)
        return replace(result, token_ids=result.token_ids[:-1]) if options["speculation"] else result

    monkeypatch.setattr(client, "complete", lying)
    with pytest.raises(DifferentAnswerError, match="without drafts"):
        measure(client, ["one"], ASKED, 1)
