"""A toy draft model for a toy target."""

from engine.backends.toy_options import parse_toy_options

_BLEND = 0.2  # how far the draft's logits are from the target's: about half of its drafts are accepted
_TIMES_QUICKER = 10  # are its steps, as a small model's would be


def toy_draft(toy: str) -> str:
    """The target's options with other logits and quicker steps; ValueError for options there are not."""
    delay_ms = parse_toy_options(toy).delay_ms / _TIMES_QUICKER
    return f"{toy},blend={_BLEND},delay_ms={delay_ms:g}"
