"""The rows of a step are shared evenly, and none is left over that somebody wants."""

from hypothesis import given
from hypothesis import strategies as st

from engine.row_shares import even_shares


@given(st.lists(st.integers(1, 60), min_size=1, max_size=12), st.integers(1, 80))
def test_a_share_of_the_step_is_what_is_wanted_or_as_much_as_anybody_gets(wanted: list[int], num_rows: int) -> None:
    shares = even_shares(wanted, num_rows)
    assert sum(shares) == min(sum(wanted), num_rows)
    most = max(shares)
    for share, want in zip(shares, wanted, strict=True):
        assert share <= want
        assert share == want or share >= most - 1
    assert num_rows < len(wanted) or all(shares)
