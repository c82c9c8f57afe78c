"""Where trained drafts are: a directory of the user's, or one of those that come with the package."""

from pathlib import Path

from draft_service.proposers.kind import ProposerError

BUNDLED = Path(__file__).parents[1] / "trained"


def bundled_names() -> list[str]:
    """Of the trained drafts that come with the package, sorted."""
    return sorted(path.parent.name for path in BUNDLED.glob("*/head.json"))


def resolve_head(head: str) -> Path:
    """The directory of that path or bundled name; ProposerError, naming what there is, when it is neither."""
    path = Path(head)
    if head and path.is_dir():
        return path
    if head in bundled_names():
        return BUNDLED / head
    raise ProposerError(
        f"--head {head!r}: neither a directory nor one of those that come with tandem "
        f"({', '.join(bundled_names()) or 'none'})"
    )
