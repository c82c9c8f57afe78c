"""The tables of docs/proposers/README.md are what the code does and what its messages weigh."""

import re
from pathlib import Path

import pytest
import torch

from draft_service.proposers.base import Proposer
from draft_service.proposers.draft_model import DraftModelProposer
from draft_service.proposers.ngram import NgramProposer
from draft_service.proposers.registry import proposer_names
from draft_service.proposers.synthetic import SyntheticProposer
from engine.backends.toy_backend import ToyEngine, hashed_logits
from engine.sampling.draft_sampler import sample_drafts
from engine.sampling.rows import Row
from tandem import codec
from tandem.draft.v1 import draft_pb2
from tandem.prompt_lookup import PromptLookup
from tandem.target.v1 import target_pb2
from tandem.types import DraftProbsTransport, Proposal, VerificationPolicy
from tests.draft.support import VOCAB, make_spec

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "proposers"
PAGE = (FOLDER / "README.md").read_text()
MODEL_VOCAB = 49_152
NUM_PROPOSALS = 64
K = 4


def table(header: str) -> dict[str, list[str]]:
    """The rows of the table with this header, by their first cell."""
    lines = PAGE[PAGE.index(header) :].splitlines()[2:]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[: lines.index("")]]
    return {row[0].strip("`"): row[1:] for row in rows}


def draft_model() -> DraftModelProposer:
    return DraftModelProposer(ToyEngine(hashed_logits(VOCAB), VOCAB))


PROPOSERS: dict[str, Proposer] = {
    "draft_model": draft_model(),
    "ngram": NgramProposer(PromptLookup()),
    "synthetic": SyntheticProposer(draft_model(), VOCAB, [0.5]),
}


def test_every_proposer_has_a_page_and_its_row_of_the_matrix_says_what_it_serves() -> None:
    matrix = table("| proposer | `one_hot`")
    assert set(matrix) == set(PROPOSERS) == set(proposer_names()) == set(table("| proposer | drafts come from"))
    for name, proposer in PROPOSERS.items():
        assert (FOLDER / f"{name}.md").exists()
        capabilities = proposer.capabilities
        assert capabilities.name == name
        *transports, policies = matrix[name]
        assert transports == [
            "yes" if transport in capabilities.transports else "no" for transport in DraftProbsTransport
        ]
        assert set(re.findall(r"`(\w+)`", policies)) == set(capabilities.policies)


def message_bytes(proposal: Proposal) -> list[int]:
    """Of the message from the draft, and of the one to the target."""
    message = codec.proposal_to_proto(proposal)
    result = draft_pb2.ProposeResult(proposal=message)
    item = target_pb2.VerifyItem(verify=target_pb2.VerifyStep(proposal=message))
    return [
        draft_pb2.ProposeResponse(results=[result]).ByteSize(),
        target_pb2.VerifyRequest(items=[item]).ByteSize(),
    ]


@pytest.mark.parametrize("transport", DraftProbsTransport)
def test_a_draft_token_takes_the_documented_bytes_on_the_wire(transport: DraftProbsTransport) -> None:
    is_coupled = transport is DraftProbsTransport.COUPLED
    policy = VerificationPolicy.COUPLED if is_coupled else VerificationPolicy.REJECTION
    spec = make_spec(policy=policy, transport=transport, temperature=1.0)
    generator = torch.Generator().manual_seed(4)
    total = [0, 0]
    for _ in range(NUM_PROPOSALS):
        logits = torch.randn((K, MODEL_VOCAB), generator=generator) * 2
        drafts, probs = sample_drafts(logits, [Row(spec, (1, 2, 3), (5,) * index) for index in range(K)])
        proposal = Proposal(tuple(drafts), tuple(entry for entry in probs if entry is not None))
        sizes = zip(message_bytes(proposal), message_bytes(Proposal()), strict=True)
        total = [sum_ + with_drafts - without for sum_, (with_drafts, without) in zip(total, sizes, strict=True)]
    documented = int(table("| transport | bytes")[transport][0].replace(",", ""))
    for num_bytes in total:
        assert num_bytes / (NUM_PROPOSALS * K) == pytest.approx(documented, abs=0.75)
