"""How the rows of one step are split between sequences that all have much to compute."""

from collections.abc import Sequence


def even_shares(num_wanted: Sequence[int], num_rows: int) -> list[int]:
    """Rows for each who wants some: as many for all, and what some leave is shared by the others.

    So who wants few gets them all, and nobody is left out as long as `num_rows >= len(num_wanted)`.
    """
    shares = [0] * len(num_wanted)
    fewest_first = sorted(range(len(num_wanted)), key=num_wanted.__getitem__)
    for num_served, index in enumerate(fewest_first):
        shares[index] = min(num_wanted[index], num_rows // (len(num_wanted) - num_served))
        num_rows -= shares[index]
    return shares
