"""The proposer of docs/proposers/writing.md: its file as it stands there, one registration, and it serves."""

import asyncio
import re
from pathlib import Path

import pytest

from draft_service.proposers import registry
from draft_service.proposers.kind import ProposerError
from draft_service.proposers.registry import load_proposer, proposer_names
from tandem.types import Proposal
from tests.draft.pages import page
from tests.draft.support import make_spec
from tests.draft.wire import Peer, open_item, proposal_of, propose_item, running
from tests.every_proposer import own_options
from tests.orchestrator.services import all_services, token_lists

PROMPTS = ["once", "upon a time", "ab" * 20]


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The page's file in a folder of its own, and the page's registration of it; both gone after the test."""
    file, registration = re.findall(r"```python\n(.*?)```", page("writing.md"), re.DOTALL)
    (tmp_path / "repeat.py").write_text(file)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(registry, "_KINDS", dict(registry._KINDS))
    exec(registration, {})


def test_it_is_there_by_its_name_with_its_option_and_drafts_over_the_wire() -> None:
    assert "repeat" in proposer_names()

    async def scenario() -> Proposal:
        async with running(load_proposer("repeat", own_options("--max-repeats", "3"))) as server:
            peer = Peer(server.stub.Propose())
            await peer.ask(open_item(make_spec([1, 2])))
            proposal = proposal_of(await peer.ask(propose_item((1, 2), 1, 2, num_draft_tokens=8)))
            peer.call.cancel()
            return proposal

    assert asyncio.run(asyncio.wait_for(scenario(), 20)) == Proposal((2, 2, 2))


def test_behind_the_three_services_it_changes_no_token() -> None:
    async def scenario() -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
        async with all_services(lambda: load_proposer("repeat", own_options())) as stack:
            return (
                await token_lists(stack, PROMPTS, temperature=0.0, max_tokens=20),
                await token_lists(stack, PROMPTS, temperature=0.0, max_tokens=20, speculation=False),
            )

    drafted, plain = asyncio.run(asyncio.wait_for(scenario(), 30))
    assert drafted == plain


def test_what_it_cannot_be_told_is_refused_under_its_name() -> None:
    with pytest.raises(ProposerError, match="proposer 'repeat': --max-repeats 0 is less than 1"):
        load_proposer("repeat", own_options("--max-repeats", "0"))
