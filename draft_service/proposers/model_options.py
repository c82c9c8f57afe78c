"""The options that proposers with a model share; free of torch, so that they can be read before it is loaded."""

from draft_service.proposers.kind import OptionGroup


def add_model_options(group: OptionGroup) -> None:
    """Add --min-confidence and --head."""
    group.add_argument(
        "--min-confidence",
        type=float,
        default=0.0,
        metavar="P",
        help="a session's drafts end where the model gives no token this probability; 0: never (the default)",
    )
    group.add_argument(
        "--head",
        metavar="NAME|DIR",
        help="a trained head (eagle, mtp) or draft model (draft_model), computed in bfloat16 whatever --dtype; "
        "--model names the target that it is for",
    )
