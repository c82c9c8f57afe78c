"""What the sessions of a history should be: a model without blocks, queue or cache, which knows only plain decoding."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from tandem.types import ErrorCode, SessionSpec, Verdict
from target_service.answers import StreamId
from target_service.limits import Limits
from tests.target.harness import plain_decode, spec

MAX_TOKENS = 24
_LONG, _SHORT = tuple(range(1, 11)), tuple(range(1, 6))
PROMPTS = {1: _LONG, 2: _LONG, 3: (7, 8, 9), 4: _SHORT, 5: _SHORT}  # by session: equal ones, and one inside another
PLAIN = {number: [*prompt, *plain_decode(spec(prompt, MAX_TOKENS + 20))] for number, prompt in PROMPTS.items()}
LIMITS = Limits(
    max_sessions=4,
    max_waiting_sessions=2,
    max_draft_tokens=4,
    max_step_tokens=16,
    max_prefill_tokens=6,
    session_lease_s=1e6,  # longer than any number of shorter silences
)
NUM_BLOCKS, BLOCK_SIZE = 12, 4  # the longest session needs 9

seen: Counter[str] = Counter()  # what all histories together have met


def stream_of(session: int) -> StreamId:
    return StreamId(1 + session % 2)


def spec_of(session: int, tokens: Sequence[int] = ()) -> SessionSpec:
    """Session 5 has a higher priority than the others."""
    prompt = PROMPTS[session]
    return spec(
        prompt, MAX_TOKENS, token_ids=tuple(tokens) or prompt, prompt_len=len(prompt), priority=session // 5
    )


@dataclass
class Asked:
    """A round that was asked and not answered."""

    round: int
    base: list[int]
    drafts: list[int]


@dataclass
class Expected:
    """What one session should be."""

    session: int
    epoch: int
    tokens: list[int]
    is_open: bool = False
    last_round: int = 0
    last_base: list[int] = field(default_factory=list)  # that it was decided for
    verdict: object = None
    pending: Asked | None = None
    verifying: Asked | None = None
    num_cached_tokens: set[int] = field(default_factory=set)

    @property
    def newest(self) -> int:
        return max((asked.round for asked in (self.pending, self.verifying) if asked), default=0)

    def base_error(self, base: list[int]) -> ErrorCode | None:
        if self.tokens[: len(base)] != base:
            return ErrorCode.PREFIX_MISMATCH
        prompt_len = len(PROMPTS[self.session])
        return None if prompt_len <= len(base) < prompt_len + MAX_TOKENS else ErrorCode.INVALID_ARGUMENT

    def check_verdict(self, verdict: Verdict) -> None:
        """What plain decoding says of as many drafts as the target says it has verified."""
        assert self.verifying is not None
        base, drafts = self.verifying.base, self.verifying.drafts
        room = len(PROMPTS[self.session]) + MAX_TOKENS - len(base)
        most = min(len(drafts), room - 1, LIMITS.max_draft_tokens)
        assert 0 <= verdict.num_draft_tokens <= most
        seen["shrunk"] += most - verdict.num_draft_tokens
        drafts, right = drafts[: verdict.num_draft_tokens], PLAIN[self.session][len(base) :]
        num_accepted = 0
        while num_accepted < len(drafts) and drafts[num_accepted] == right[num_accepted]:
            num_accepted += 1
        assert (verdict.num_accepted, list(verdict.token_ids)) == (num_accepted, right[: num_accepted + 1])
        self.num_cached_tokens.add(verdict.num_cached_tokens)
        assert len(self.num_cached_tokens) == 1

    def decided(self, verdict: Verdict) -> None:
        assert self.verifying is not None
        self.check_verdict(verdict)
        self.tokens = [*self.verifying.base, *verdict.token_ids]
        self.last_round, self.last_base, self.verdict = self.verifying.round, self.verifying.base, verdict
        self.verifying = None

    def deferred(self) -> bool:
        """The round waits on, unless a newer one has come -> whether that is so."""
        asked, self.verifying = self.verifying, None
        is_pushed_out = asked is not None and self.pending is not None
        self.pending = self.pending or asked
        seen["deferred"] += asked is not None
        return is_pushed_out
