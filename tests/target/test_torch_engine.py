"""The target on the native engine with a tiny random model: batched rounds equal token-by-token decoding."""

from collections.abc import Sequence
from typing import cast

import pytest

from engine.backends.toy_backend import ToyEngine
from tandem.rng import F32
from tandem.serving.items import Closed
from tandem.types import SamplingParams, Verdict
from target_service.limits import Limits
from tests.engine.engines import logits_of, random_tokens, tiny_engine
from tests.target.harness import GREEDY, Bench, plain_decode, spec, stamp


@pytest.mark.parametrize("sampling", [GREEDY, SamplingParams(temperature=0.8, top_p=0.9, seed=7)])
def test_rounds_of_a_mixed_batch_with_chunked_prompts_equal_plain_decoding(sampling: SamplingParams) -> None:
    engine = tiny_engine()

    def next_logits(token_ids: Sequence[int]) -> F32:
        return logits_of(engine, token_ids)[-1].clone().numpy()

    sessions = {
        number: spec(random_tokens(20 * number, seed=number), 8, sampling, sample_index=number)
        for number in range(1, 4)
    }
    plain = {number: plain_decode(session, next_logits) for number, session in sessions.items()}
    bench = Bench(cast("ToyEngine", engine), Limits(max_step_tokens=24))
    tokens = {number: list(session.token_ids) for number, session in sessions.items()}
    for number, session in sessions.items():
        bench.open(session, number)
    active, round_number = set(sessions), 0
    while active:
        round_number += 1
        for number in active:
            done = len(tokens[number]) - sessions[number].prompt_len
            drafts = [*plain[number][done : done + round_number % (number + 1)], 0]
            bench.submit(stamp(tokens[number], round_number, number), drafts)
        for answer in bench.settle():
            verdict, number = answer.outcome, int(answer.stamp.session_id)
            if verdict == Closed():
                continue
            assert isinstance(verdict, Verdict)
            tokens[number] += verdict.token_ids
            if verdict.finish_reason is not None:
                active.remove(number)
                bench.close(stamp(tokens[number], 0, number))
    assert {number: tokens[number][session.prompt_len :] for number, session in sessions.items()} == plain
    bench.settle()
    assert engine.kv_usage().used_blocks == 0
