"""How a part that is not installed is had. Package indexes know another project by this name, so never from there."""


def how_to_install(extra: str = "") -> str:
    """The command, for an extra of pyproject.toml or without any."""
    what = f'".[{extra}]"' if extra else "."
    return f"pip install {what} in the folder of Tandem's source"
