"""The real server on a loopback port: outputs equal direct sampling, bad items stay alone, ends free everything."""

import asyncio
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence

import grpc
import numpy as np
import pytest
import torch

from engine.backends.toy_backend import ToyEngine
from engine.sampling.draft_sampler import sample_drafts
from engine.sampling.rows import Row
from tandem.serving.items import Closed, Opened
from tandem.target.v1 import target_pb2, target_pb2_grpc
from tandem.types import (
    MAX_DRAFT_PROBS_BYTES,
    DraftProbs,
    DraftProbsTransport,
    ErrorCode,
    ItemError,
    Proposal,
    SamplingParams,
    SessionSpec,
    Verdict,
    VerificationPolicy,
)
from target_service.limits import Limits
from tests.target.harness import (
    LOGITS,
    VOCAB,
    Client,
    Service,
    close_item,
    generate,
    open_item,
    plain_decode,
    serving,
    spec,
    stamp,
    toy,
    verify_item,
)

PROMPT = [1, 2, 3]


def run(
    scenario: Callable[[Service, Client], Awaitable[None]],
    engine: ToyEngine | None = None,
    limits: Limits | None = None,
) -> None:
    """A scenario with one client; at the end nothing may be left."""

    async def main() -> None:
        async with serving(engine or toy(), limits) as service:
            async with service.client() as client:
                await asyncio.wait_for(scenario(service, client), 20)
            await service.until_idle()

    asyncio.run(main())


def drafts_from(session: SessionSpec) -> Callable[[Sequence[int], int], Proposal]:
    """An honest draft model that is the target itself."""

    def drafts_of(tokens: Sequence[int], most: int) -> Proposal:
        drafts: list[int] = []
        probs: list[DraftProbs] = []
        for _ in range(most):
            row = Row(session, tuple(tokens), tuple(drafts))
            logits = torch.from_numpy(LOGITS([*tokens, *drafts]))[None].clone()
            (token_id,), (draft_probs,) = sample_drafts(logits, [row])
            drafts.append(token_id)
            probs += [draft_probs] if draft_probs is not None else []
        return Proposal(tuple(drafts), tuple(probs))

    return drafts_of


SAMPLED = SamplingParams(temperature=0.8, top_p=0.9, seed=11)


def sparse_spec(sampling: SamplingParams, max_tokens: int = 20) -> SessionSpec:
    """A session verified by rejection, whose drafts come with the distribution they were sampled from."""
    return spec(
        PROMPT,
        max_tokens,
        sampling,
        verification_policy=VerificationPolicy.REJECTION,
        draft_probs_transport=DraftProbsTransport.SPARSE,
    )


@pytest.mark.parametrize(
    "session",
    [
        spec(max_tokens=24),
        spec(max_tokens=24, sampling=SamplingParams(temperature=0.0, seed=1, repetition_penalty=1.3)),
        spec(max_tokens=24, sampling=SAMPLED),
        spec(
            max_tokens=24, sampling=SamplingParams(seed=5, frequency_penalty=1.0, logit_bias={4: 2.0}, min_p=0.02)
        ),
        spec(max_tokens=24, sampling=SAMPLED, eos_token_ids=frozenset({30}), min_tokens=9, sample_index=2),
    ],
    ids=["greedy", "greedy with penalty", "coupled", "coupled with processors", "coupled with ending"],
)
def test_greedy_and_coupled_outputs_equal_direct_sampling_whatever_the_drafts(session: SessionSpec) -> None:
    plain = plain_decode(session)

    async def scenario(service: Service, client: Client) -> None:
        outputs = await asyncio.gather(
            generate(client, session, lambda tokens, most: ()),
            generate(client, session, lambda tokens, most: [7] * most),
            generate(client, session, drafts_from(session), 4),
            generate(client, session, drafts_from(session), 16),
        )
        assert [tokens for tokens, _ in outputs] == [plain] * 4
        for verdict in outputs[2][1][:-1]:  # the target as its own draft: every draft of every round is right
            assert (verdict.num_accepted, len(verdict.token_ids)) == (4, 5)

    run(scenario)


def test_rejection_accepts_an_honest_draft_that_equals_the_target_and_bonus_tokens_are_the_samplers() -> None:
    session = sparse_spec(SamplingParams(temperature=0.8, seed=3), max_tokens=24)

    async def scenario(service: Service, client: Client) -> None:
        tokens, verdicts = await generate(client, session, drafts_from(session))
        assert len(tokens) == 24
        done = 0
        for verdict in verdicts:
            assert verdict.num_accepted == verdict.num_draft_tokens
            done += len(verdict.token_ids)
            last = tuple(PROMPT + tokens[: done - 1])
            at_last = spec(
                session.token_ids, max_tokens=24, sampling=session.sampling, token_ids=last, prompt_len=3
            )
            assert tokens[done - 1] == plain_decode(at_last, most=1)[0]

    run(scenario)


def test_rejection_keeps_the_targets_distribution_through_the_stream() -> None:
    num_seeds, draft = 2000, int(np.argsort(LOGITS(PROMPT))[-2])  # a likely token, but not the likeliest
    probs = torch.softmax(torch.from_numpy(LOGITS(PROMPT)).double(), dim=0).numpy()

    async def scenario(service: Service, client: Client) -> None:
        counts: Counter[int] = Counter()
        num_accepted = 0
        for start in range(0, num_seeds, 200):
            seeds = range(start, start + 200)
            sessions = [
                spec(sampling=SamplingParams(seed=seed), verification_policy=VerificationPolicy.REJECTION)
                for seed in seeds
            ]
            await client.ask(*(open_item(s, seed) for s, seed in zip(sessions, seeds, strict=True)))
            verdicts = await client.ask(*(verify_item(stamp(PROMPT, 1, seed), [draft]) for seed in seeds))
            for verdict in verdicts:
                assert isinstance(verdict, Verdict)
                counts[verdict.token_ids[0]] += 1
                num_accepted += verdict.num_accepted
            await client.ask(*(close_item(stamp(PROMPT, 0, seed)) for seed in seeds))
        # Every bound is 4.5 standard deviations of a binomial count.
        spread = 4.5 * np.sqrt(probs * (1 - probs) * num_seeds) + 1
        observed = np.array([counts[token] for token in range(VOCAB)])
        assert (np.abs(observed - probs * num_seeds) <= spread).all()
        assert abs(num_accepted - probs[draft] * num_seeds) <= spread[draft]

    run(scenario, toy(num_blocks=4096))


def test_a_message_of_rounds_with_different_numbers_of_drafts_is_one_forward() -> None:
    engine = toy()

    async def scenario(service: Service, client: Client) -> None:
        await client.ask(*(open_item(spec((number, 2, 3)), number) for number in range(1, 9)))
        tokens = {number: [number, 2, 3] for number in range(1, 9)}
        for number in tokens:  # the prompts are in, whatever the number of their steps
            (verdict,) = await client.ask(verify_item(stamp(tokens[number], 1, number)))
            tokens[number] += verdict.token_ids  # type: ignore[attr-defined]
        num_calls = len(engine.calls)
        await client.ask(*(verify_item(stamp(tokens[number], 2, number), [0] * number) for number in tokens))
        assert len(engine.calls) == num_calls + 1
        assert (engine.calls[-1].num_sequences, engine.calls[-1].num_rows) == (8, sum(range(2, 10)))

    run(scenario, engine)


def test_a_prompt_of_many_chunks_needs_no_further_message_to_be_finished() -> None:
    session = spec(tuple(number % 30 for number in range(100)))

    async def scenario(service: Service, client: Client) -> None:
        _, verdict = await client.ask(open_item(session), verify_item(stamp(session.token_ids, 1)))
        assert isinstance(verdict, Verdict)
        assert list(verdict.token_ids) == plain_decode(session, most=1)

    run(scenario, limits=Limits(max_step_tokens=17))


def bad_items() -> list[tuple[str, target_pb2.VerifyItem, ErrorCode, str]]:
    """Items for session 2 (greedy) and 3 (sparse rejection), each wrong in one way."""
    greedy, sparse = stamp(PROMPT, 1, 2), stamp(PROMPT, 1, 3)
    tree = verify_item(greedy, [1, 2])
    tree.verify.proposal.parents.extend([-1, 0])
    ragged = verify_item(sparse, [1])
    ragged.verify.proposal.draft_probs.add(token_ids_u32=b"123", probs_f32=b"1234")
    too_large = verify_item(sparse, [1])
    too_large.verify.proposal.draft_probs.add(probs_f32=bytes(MAX_DRAFT_PROBS_BYTES + 4))
    unknown = open_item(spec(), 4)
    unknown.open.verification_policy = 77
    unset = open_item(spec(), 5)
    unset.open.ClearField("verification_policy")
    seedless = open_item(spec(), 6)
    seedless.open.sampling.ClearField("seed")

    def probs(*values: float) -> Proposal:
        return Proposal((1,), (DraftProbs(np.arange(len(values), dtype=np.uint32), np.array(values, np.float32)),))

    invalid, unimplemented = ErrorCode.INVALID_ARGUMENT, ErrorCode.UNIMPLEMENTED
    return [
        ("tree", tree, unimplemented, "parents"),
        ("draft outside the vocabulary", verify_item(greedy, [1, VOCAB]), invalid, "draft_token_ids"),
        ("probabilities that do not sum to 1", verify_item(sparse, probs(0.5, 0.4)), invalid, "sum to"),
        ("NaN probability", verify_item(sparse, probs(float("nan"), 1.0)), invalid, "draft_probs"),
        ("missing probabilities", verify_item(sparse, [1]), invalid, "draft_probs"),
        ("ragged bytes", ragged, invalid, "draft_probs"),
        ("probabilities past the limit", too_large, invalid, "16777220 bytes are more than the limit of 16777216"),
        ("unknown policy", unknown, unimplemented, "verification_policy 77"),
        ("policy unset", unset, invalid, "verification_policy"),
        ("seed unset", seedless, invalid, "seed"),
        ("empty prompt", open_item(spec(()), 7), invalid, "prompt"),
        ("prompt over the context", open_item(spec((1,) * 600), 8), invalid, "512"),
        ("prompt outside the vocabulary", open_item(spec((VOCAB,)), 9), invalid, "prompt"),
        ("no tokens to generate", open_item(spec(max_tokens=0), 10), invalid, "max_tokens"),
        ("NaN temperature", open_item(spec(sampling=SamplingParams(float("nan"), seed=1)), 11), invalid, "temper"),
        ("nothing left", open_item(spec(max_tokens=1, token_ids=(1, 2, 3, 4)), 12), invalid, "token_ids"),
        ("no operation", target_pb2.VerifyItem(stamp=close_item(stamp(PROMPT, 0, 13)).stamp), invalid, "op"),
        ("unknown session", verify_item(stamp(PROMPT, 1, 14)), ErrorCode.UNKNOWN_SESSION, "14"),
    ]


def test_every_bad_item_gets_its_own_typed_error_and_its_neighbours_do_not_notice() -> None:
    cases = bad_items()

    async def scenario(service: Service, client: Client) -> None:
        await client.ask(open_item(spec(), 1), open_item(spec(), 2))
        await client.ask(open_item(sparse_spec(SAMPLED), 3))
        tokens = list(PROMPT)
        for number, (name, item, code, text) in enumerate(cases, 1):
            good = verify_item(stamp(tokens, number, 1))
            verdict, error = await client.ask(good, item)
            assert isinstance(error, ItemError), name
            assert error.code is code, name
            assert text in error.message, name
            tokens += verdict.token_ids  # type: ignore[attr-defined]
        assert tokens[3:] == plain_decode(spec(), most=len(cases))
        for session_id in (2, 3):  # a refused round was never decided
            (verdict,) = await client.ask(verify_item(stamp(PROMPT, 1, session_id)))
            assert isinstance(verdict, Verdict)

    run(scenario)


class BlockedEngine(ToyEngine):
    """A toy whose forwards wait until `go` is set; `entered` tells that one has begun."""

    def __init__(self) -> None:
        super().__init__(LOGITS, VOCAB, num_blocks=64, block_size=4)
        self.go, self.entered = threading.Event(), threading.Event()
        self.go.set()

    def _delay(self, num_tokens: int) -> None:
        self.entered.set()
        assert self.go.wait(20)

    async def until_entered(self) -> None:
        assert await asyncio.to_thread(self.entered.wait, 20)


async def begin_blocked(engine: BlockedEngine, client: Client) -> "asyncio.Future[object]":
    """Session 1 with a round whose step is being computed."""
    await client.ask(open_item(spec()))
    (verdict,) = await client.ask(verify_item(stamp(PROMPT, 1)))
    tokens = [*PROMPT, *verdict.token_ids]  # type: ignore[attr-defined]
    engine.go.clear()
    engine.entered.clear()
    (future,) = await client.send(verify_item(stamp(tokens, 2), [0, 0]))
    await engine.until_entered()
    return future


def test_a_stream_cancelled_during_a_step_frees_its_sessions_and_blocks() -> None:
    engine = BlockedEngine()

    async def main() -> None:
        async with serving(engine) as service:
            async with service.client() as client:
                await begin_blocked(engine, client)
                await client.ask(open_item(spec(), 2))
            while len(service.scheduler.table):
                await asyncio.sleep(0.005)
            assert engine.kv_usage().used_blocks > 0
            engine.go.set()
            await service.until_idle()
            assert not service.scheduler._outboxes

    asyncio.run(main())
    assert not engine.sequence_ids


def test_a_close_during_a_step_is_answered_with_an_idle_load_and_its_round_never() -> None:
    engine = BlockedEngine()

    async def scenario(service: Service, client: Client) -> None:
        future = await begin_blocked(engine, client)
        (closed,) = await client.send(close_item(stamp(PROMPT, 0)))
        while len(service.scheduler.table):
            await asyncio.sleep(0.001)
        engine.go.set()
        assert await closed == Closed()
        load = client.responses[-1].load
        assert (load.running, load.used_blocks) == (0, 0)
        assert await client.ask(open_item(spec(), 1, epoch=2)) == [Opened()]
        assert not future.done()

    run(scenario, engine)


def test_a_round_whose_deadline_passes_while_it_queues_is_answered_so_and_can_be_asked_again() -> None:
    engine = BlockedEngine()

    async def scenario(service: Service, client: Client) -> None:
        await client.ask(open_item(spec(), 2))
        (first,) = await client.ask(verify_item(stamp(PROMPT, 1, 2)))
        running = await begin_blocked(engine, client)
        tokens = [*PROMPT, *first.token_ids]  # type: ignore[attr-defined]
        (late,) = await client.send(verify_item(stamp(tokens, 2, 2), deadline_ms=1))
        (probe,) = await client.send(close_item(stamp(PROMPT, 0, 99)))
        await probe  # the round has arrived
        deadline_s = service.scheduler.table.next_deadline_s()
        assert deadline_s is not None
        while asyncio.get_running_loop().time() <= deadline_s:
            await asyncio.sleep(0.001)
        engine.go.set()
        error = await late
        assert isinstance(error, ItemError)
        assert error.code is ErrorCode.DEADLINE_EXCEEDED
        assert isinstance(await running, Verdict)
        (again,) = await client.ask(verify_item(stamp(tokens, 2, 2)))
        assert isinstance(again, Verdict)

    run(scenario, engine)


def test_an_open_that_waits_for_room_is_ended_by_its_deadline_without_any_other_event() -> None:
    async def scenario(service: Service, client: Client) -> None:
        await client.ask(open_item(spec(), 1))
        (error,) = await client.ask(open_item(spec(), 2, deadline_ms=1))
        assert isinstance(error, ItemError)
        assert error.code is ErrorCode.DEADLINE_EXCEEDED

    run(scenario, limits=Limits(max_sessions=1))


def test_an_engine_that_raises_costs_only_the_sessions_of_that_step(caplog: pytest.LogCaptureFixture) -> None:
    class Faulty(ToyEngine):
        is_broken = False

        def _delay(self, num_tokens: int) -> None:
            if self.is_broken:
                self.is_broken = False
                raise RuntimeError("secret detail")

    engine = Faulty(LOGITS, VOCAB)

    async def scenario(service: Service, client: Client) -> None:
        await client.ask(open_item(spec(), 1), open_item(spec(), 2))
        await client.ask(verify_item(stamp(PROMPT, 1, 1)), verify_item(stamp(PROMPT, 1, 2)))
        first = PROMPT + plain_decode(spec(), most=1)
        engine.is_broken = True
        (error,) = await client.ask(verify_item(stamp(first, 2, 1)))
        assert str(error) == "INTERNAL: internal error"
        lost, alive = await client.ask(verify_item(stamp(first, 3, 1)), verify_item(stamp(first, 2, 2)))
        assert isinstance(lost, ItemError)
        assert lost.code is ErrorCode.UNKNOWN_SESSION
        assert isinstance(alive, Verdict)
        reopened = spec(token_ids=tuple(first), prompt_len=3)
        assert await client.ask(open_item(reopened, 1, epoch=2)) == [Opened()]

    run(scenario, engine)
    assert "secret detail" in caplog.text


def test_a_peer_that_sends_no_more_still_gets_every_answer_and_then_the_end() -> None:
    async def scenario(service: Service, client: Client) -> None:
        futures = await client.send(open_item(spec(), 1), verify_item(stamp(PROMPT, 1), [0, 0]))
        await client.call.done_writing()
        opened, verdict = await asyncio.gather(*futures)
        assert opened == Opened()
        assert isinstance(verdict, Verdict)
        assert await client.call.code() is grpc.StatusCode.OK

    run(scenario)


def test_a_peer_that_sends_no_more_leaves_no_idle_session_open() -> None:
    async def scenario(service: Service, client: Client) -> None:
        await client.ask(*(open_item(spec(), number) for number in (1, 2, 3)))
        await client.ask(verify_item(stamp(PROMPT, 1, 1)))
        (future,) = await client.send(verify_item(stamp(PROMPT, 1, 3)))
        await client.call.done_writing()
        assert isinstance(await future, Verdict)
        assert await client.call.code() is grpc.StatusCode.OK
        assert len(service.scheduler.table) == 0

    run(scenario)


def test_what_a_peer_that_sends_no_more_has_asked_gets_the_memory_of_its_idle_sessions() -> None:
    idle, asks = spec((1,) * 17, 2), spec((7,) * 9, 15)

    async def scenario(service: Service, client: Client) -> None:
        await client.ask(open_item(idle, 1), verify_item(stamp(idle.token_ids, 1, 1)))
        futures = await client.send(open_item(asks, 2), verify_item(stamp(asks.token_ids, 1, 2)))
        await client.call.done_writing()
        opened, verdict = await asyncio.gather(*futures)
        assert opened == Opened()
        assert isinstance(verdict, Verdict)
        assert list(verdict.token_ids) == plain_decode(asks, most=1)
        assert await client.call.code() is grpc.StatusCode.OK

    run(scenario, toy(num_blocks=7), Limits(max_draft_tokens=0))


def test_two_streams_share_steps_but_not_sessions() -> None:
    async def scenario(service: Service, client: Client) -> None:
        async with service.client() as other:
            await client.ask(open_item(spec(), 1))
            (error,) = await other.ask(verify_item(stamp(PROMPT, 1)))
            assert isinstance(error, ItemError)
            assert error.code is ErrorCode.UNKNOWN_SESSION
            await other.ask(open_item(spec((4, 5)), 1))
            assert client.responses[-1].load.running == 1
            assert other.responses[-1].load.running == 2
        (verdict,) = await client.ask(verify_item(stamp(PROMPT, 1)))
        assert isinstance(verdict, Verdict)

    run(scenario)


def test_draining_waits_for_open_sessions_then_ends_the_streams() -> None:
    async def scenario(service: Service, client: Client) -> None:
        await client.ask(open_item(spec(), 1))
        draining = asyncio.create_task(service.scheduler.drain(20))
        await asyncio.sleep(0)
        (verdict,) = await client.ask(verify_item(stamp(PROMPT, 1)))
        assert isinstance(verdict, Verdict)
        assert client.responses[-1].load.draining
        assert not draining.done()
        await client.ask(close_item(stamp(PROMPT, 0)))
        await draining
        assert await client.call.code() is grpc.StatusCode.OK

    run(scenario)


def test_the_handshake_names_the_model_and_the_load() -> None:
    async def scenario(service: Service, client: Client) -> None:
        await client.ask(open_item(spec(), 1))
        stub = target_pb2_grpc.TargetServiceStub(service.channel)
        info = await stub.GetInfo(target_pb2.GetInfoRequest(), timeout=10)
        model = info.model
        assert (model.model_id, model.vocab_size, model.vocab_hash) == ("toy", VOCAB, "hash")
        assert (model.backend, model.dtype, model.max_context, model.max_draft_tokens) == (
            "toy",
            "float32",
            512,
            16,
        )
        assert (model.numerics_fingerprint, model.deterministic, model.protocol_version) == ("toy", True, 1)
        assert (info.load.running, info.load.total_blocks) == (1, 256)

    run(scenario)


def test_an_engine_that_cannot_roll_back_is_refused_by_name_unless_no_drafts_are_verified() -> None:
    engine = ToyEngine(LOGITS, VOCAB, can_truncate=False)
    with pytest.raises(Exception, match=r"'toy' cannot speculate"):
        run(lambda service, client: asyncio.sleep(0), engine)

    async def scenario(service: Service, client: Client) -> None:
        tokens, verdicts = await generate(client, spec(), lambda tokens, most: [0] * most)
        assert tokens == plain_decode(spec())
        assert {verdict.num_draft_tokens for verdict in verdicts} == {0}

    run(scenario, engine, Limits(max_draft_tokens=0))
