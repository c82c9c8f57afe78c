"""The toy engine in one line of text, for command lines: `hashed:vocab=512,seed=3,blend=0.2,delay_ms=5`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from engine.backends.toy_backend import ToyEngine
from engine.backends.toy_logits import LogitsOf, hashed_logits, scripted_logits

DEFAULT_TOY = "hashed"
_KINDS = ("hashed", "scripted")


@dataclass(frozen=True, slots=True)
class ToyOptions:
    """What the text can set; the names are the text's."""

    kind: str = "hashed"
    vocab: int = 512
    seed: int = 0  # hashed
    scale: float = 2.0  # hashed
    blend: float = 0.0  # hashed
    blend_seed: int | None = None  # hashed; None: the next seed
    script: tuple[int, ...] = (0,)  # scripted: token ids joined by "-"
    start: int = 0  # scripted: the position of its first token
    blocks: int = 4096  # of key-value memory
    delay_ms: float = 0.0  # a forward
    token_delay_ms: float = 0.0  # a token of a forward

    @property
    def name(self) -> str:
        """Equal for engines with the same logits, whatever their speed and memory."""
        if self.kind == "scripted":
            return f"toy-scripted-{self.vocab}-{'.'.join(map(str, self.script))}-{self.start}"
        blend = f"-{self.blend:g}of{self.blend_seed}" if self.blend else ""
        return f"toy-hashed-{self.vocab}-{self.seed}-{self.scale:g}{blend}"


_PARSERS: Mapping[str, Callable[[str], object]] = {
    "script": lambda text: tuple(int(token_id) for token_id in text.split("-")),
    **dict.fromkeys(("vocab", "seed", "blend_seed", "start", "blocks"), int),
    **dict.fromkeys(("scale", "blend", "delay_ms", "token_delay_ms"), float),
}


def parse_toy_options(text: str) -> ToyOptions:
    """`kind` or `kind:name=value,...`; ValueError names what is unknown or out of range and lists what exists."""
    kind, _, settings = text.partition(":")
    if kind not in _KINDS:
        raise ValueError(f"toy engine {kind!r} is unknown; there are: {', '.join(_KINDS)}")
    values: dict[str, object] = {}
    for setting in filter(None, settings.split(",")):
        name, _, value = setting.partition("=")
        if name not in _PARSERS:
            raise ValueError(f"toy option {name!r} is unknown; there are: {', '.join(sorted(_PARSERS))}")
        try:
            values[name] = _PARSERS[name](value)
        except ValueError as error:
            raise ValueError(f"toy option {name}={value!r} is not what it should be: {error}") from error
    options = ToyOptions(kind=kind, **values)  # type: ignore[arg-type]
    _check(options)
    return options


def build_toy_engine(
    options: ToyOptions, block_size: int, max_context: int, *, prefix_cache: bool = False
) -> ToyEngine:
    """The engine the options describe."""
    return ToyEngine(
        _logits_of(options),
        options.vocab,
        max_context=max_context,
        num_blocks=options.blocks,
        block_size=block_size,
        step_delay_s=options.delay_ms / 1000,
        token_delay_s=options.token_delay_ms / 1000,
        fingerprint=options.name,
        prefix_cache=prefix_cache,
    )


def _logits_of(options: ToyOptions) -> LogitsOf:
    if options.kind == "scripted":
        return scripted_logits(options.script, options.vocab, options.start)
    return hashed_logits(options.vocab, options.seed, options.scale, options.blend_seed, options.blend)


_LIMITS: Mapping[str, tuple[float, float]] = {
    "vocab": (2, 1 << 24),
    "seed": (0, (1 << 63) - 1),
    "scale": (0, 100),
    "blend": (0, 1),
    "blocks": (1, 1 << 20),
    "delay_ms": (0, 60_000),
    "token_delay_ms": (0, 60_000),
}


def _check(options: ToyOptions) -> None:
    """ValueError for a value that no engine can have."""
    for name, (low, high) in _LIMITS.items():
        value = getattr(options, name)
        if not low <= value <= high:
            raise ValueError(f"toy option {name}={value} is outside {low}..{high}")
    for token_id in options.script:
        if not 0 <= token_id < options.vocab:
            raise ValueError(f"toy option script: token id {token_id} is outside 0..{options.vocab - 1}")
