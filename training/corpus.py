"""Training text with what the target has computed for it: tokens, hidden states after some layers, and the parts.

A directory of plain arrays, so that a training run maps them instead of reading them.
Letters: T tokens of all documents, N documents, L layers kept, E hidden size.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.progress import track

from engine.backends.base import HiddenCapture, SequenceInput, SpeculativeEngine
from engine.backends.torch_loading import load_torch_engine
from engine.models.loading import load_model
from tandem.models import resolve_model
from tandem.serving.options import make_parser

_BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class Corpus:
    """What lies in the directory."""

    token_ids: NDArray[np.int32]  # [T]
    hidden: NDArray[np.int16]  # [T, L, E], the bits of bfloat16
    starts: NDArray[np.int64]  # [N + 1]
    prompt_lens: NDArray[np.int64]  # [N]
    layers: tuple[int, ...]  # numbers of layers run before each kept state

    def __len__(self) -> int:
        return len(self.prompt_lens)

    @classmethod
    def open(cls, directory: Path) -> "Corpus":
        """Map the arrays of a finished directory."""
        meta = json.loads((directory / "meta.json").read_text())
        token_ids = np.load(directory / "token_ids.npy")
        shape = (len(token_ids), len(meta["layers"]), meta["hidden_size"])
        return cls(
            token_ids,
            np.memmap(directory / "hidden.bin", np.int16, "r", shape=shape),
            np.load(directory / "starts.npy"),
            np.load(directory / "prompt_lens.npy"),
            tuple(meta["layers"]),
        )

    def prompt(self, number: int) -> tuple[int, ...]:
        """Token ids of a document's prompt."""
        start = int(self.starts[number])
        return tuple(self.token_ids[start : start + int(self.prompt_lens[number])].tolist())

    def states(self, start: int, end: int) -> torch.Tensor:
        """Hidden states of these tokens, bfloat16 [tokens, L, E]."""
        return torch.from_numpy(self.hidden[start:end].copy()).view(torch.bfloat16)


def documents(path: Path, max_tokens: int) -> Iterator[tuple[list[int], int]]:
    """Token ids, prompt first, cut to `max_tokens`, and the prompt's length; those without an answer are left out."""
    for line in path.read_text().splitlines():
        example: dict[str, Any] = json.loads(line)
        prompt, answer = example["prompt_token_ids"], example["token_ids"]
        if answer and len(prompt) < max_tokens:
            yield [*prompt, *answer][:max_tokens], len(prompt)


def states_of(engine: SpeculativeEngine, token_ids: Sequence[int], layers: Sequence[int]) -> torch.Tensor:
    """Hidden states of a document's tokens, bfloat16 [tokens, L, E]."""
    sequence, capture = engine.create(), HiddenCapture(tuple(layers))
    engine.advance([SequenceInput(sequence, token_ids)], capture)
    engine.release(sequence)
    assert capture.states is not None
    return capture.states.bfloat16()


def write(
    engine: SpeculativeEngine,
    documents: Sequence[tuple[Sequence[int], int]],
    directory: Path,
    model: str,
    layers: Sequence[int],
) -> None:
    """Run the target over documents (token ids, prompt length) and write the directory.

    Documents that it holds already, from a shorter text, are kept; ValueError when they are of another model or layers.
    """
    hidden_size = engine.capabilities.hidden_size
    meta = {"model": model, "layers": list(layers), "hidden_size": hidden_size}
    token_ids: list[int] = []
    starts, prompt_lens = [0], []
    if (directory / "meta.json").exists():
        if (found := json.loads((directory / "meta.json").read_text())) != meta:
            raise ValueError(f"{directory} holds states of {found}, not of {meta}")
        done = Corpus.open(directory)
        token_ids, starts, prompt_lens = done.token_ids.tolist(), done.starts.tolist(), done.prompt_lens.tolist()
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / "hidden.bin").open("ab") as file:
        file.truncate(len(token_ids) * len(layers) * hidden_size * 2)  # what a broken-off run has left
        for ids, prompt_len in track(documents[len(prompt_lens) :], "hidden states"):
            file.write(states_of(engine, ids, layers).view(torch.int16).numpy().tobytes())
            token_ids += ids
            starts.append(len(token_ids))
            prompt_lens.append(prompt_len)
    np.save(directory / "token_ids.npy", np.asarray(token_ids, np.int32))
    np.save(directory / "starts.npy", np.asarray(starts, np.int64))
    np.save(directory / "prompt_lens.npy", np.asarray(prompt_lens, np.int64))
    (directory / "meta.json").write_text(json.dumps(meta))


def main(arguments: Sequence[str] | None = None) -> None:
    """`python -m training.corpus`: hidden states for a text of training/generate.py."""
    parser = make_parser("python -m training.corpus", __doc__)
    parser.add_argument("--model", default="smollm2-135m", help="the target: a name, a directory or a .gguf file")
    parser.add_argument("--dtype", default="bfloat16", help="float32 or bfloat16")
    parser.add_argument("--text", type=Path, required=True, help="JSON lines of training.generate")
    parser.add_argument("--out", type=Path, required=True, help="directory to write")
    parser.add_argument("--threads", type=int, help="default: all cores")
    parser.add_argument("--layers", type=int, nargs="+", default=[10, 20, 30], help="states after so many layers")
    parser.add_argument("--max-tokens", type=int, default=768, help="of one document")
    options = parser.parse_args(arguments)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    engine = load_torch_engine(
        load_model(resolve_model(options.model)),
        options.dtype,
        num_blocks=-(-options.max_tokens // _BLOCK_SIZE),
        block_size=_BLOCK_SIZE,
        max_step_tokens=options.max_tokens,
    )
    write(engine, list(documents(options.text, options.max_tokens)), options.out, options.model, options.layers)


if __name__ == "__main__":
    main()
