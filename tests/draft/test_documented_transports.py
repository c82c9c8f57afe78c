"""What docs/proposers/README.md says of the weight of a draft token is what the messages weigh."""

import pytest
import torch

from engine.sampling.draft_sampler import sample_drafts
from engine.sampling.rows import Row
from tandem import codec
from tandem.draft.v1 import draft_pb2
from tandem.target.v1 import target_pb2
from tandem.types import DraftProbsTransport, Proposal, VerificationPolicy
from tests.draft.pages import table
from tests.draft.support import make_spec

MODEL_VOCAB = 49_152
NUM_PROPOSALS = 64
K = 4


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
    documented = int(table("README.md", "| transport | bytes")[transport][0].replace(",", ""))
    for num_bytes in total:
        assert num_bytes / (NUM_PROPOSALS * K) == pytest.approx(documented, abs=0.75)
