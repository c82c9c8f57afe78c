"""`python -m training.train_head KIND`: train a head, measure it on held-out documents meanwhile, write it."""

import argparse
import math
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from rich.console import Console
from torch import nn

from engine.heads import eagle, mtp, shallow
from engine.heads.artefact import Artefact, load_artefact, save_artefact, target_identity
from engine.models.config import LoadedModel
from engine.models.loading import load_model
from tandem.models import resolve_model
from tandem.serving.options import make_parser
from training.corpus import Corpus
from training.distillation import (
    HeadModule,
    acceptance,
    batches,
    held_out,
    losses,
    mean_acceptance_length,
    read,
    reduced_vocabulary,
)
from training.eagle_head import EagleModule
from training.mtp_head import MtpModule
from training.shallow_model import ShallowModule
from training.target_parts import TargetParts

NUM_MEASURED = 4  # drafts in a row
_STEP_WEIGHT = 0.8  # of a step's loss against the one before
_WARM_UP = 50  # batches
_LEAST_RATE = 0.05  # of the learning rate, at the end


@dataclass(frozen=True, slots=True)
class Recipe:
    """All that decides the result, but corpus and target."""

    kind: str
    vocab: int = 12288  # ids that can be drafted
    softmax: int = 6144  # of them, the most frequent ones: a batch's loss is over these and its own answers' ids
    steps: int = 3  # drafts in a row that are trained
    single: float = 0.5  # of the batches, from the first on: one draft only, which is twice as fast
    inner: int = 1024  # of an eagle or mtp head
    depth: int = 3  # layers of a small model
    epochs: float = 1.0
    tokens: int = 1024  # of a batch
    lr: float = 1e-3
    bfloat16: int = 1  # products in it: twice as fast
    seed: int = 1
    held_out: int = 48  # documents


class Training:
    """One run."""

    def __init__(self, recipe: Recipe, target: LoadedModel, corpus: Corpus, begun: Artefact | None = None) -> None:
        """`begun`: a head of the kind that is trained further, instead of one that knows nothing."""
        torch.manual_seed(recipe.seed)
        self.recipe, self.target, self.corpus = recipe, target, corpus
        self._begun = begun
        self._rng = random.Random(recipe.seed)
        self.held_out, self._trained = held_out(corpus, recipe.held_out, self._rng)
        self.parts = TargetParts.of(target, reduced_vocabulary(corpus, self._trained, recipe.vocab))
        self._frequent = reduced_vocabulary(corpus, self._trained, recipe.softmax)
        self.head = make_module(recipe, target, corpus)
        assert isinstance(self.head, nn.Module)
        if begun is None:
            self.head.begin_as(target, self.parts)
        else:
            begun.check(recipe.kind, target, {name: tuple(one.shape) for name, one in self.head.tensors().items()})
            names = self.head.state_dict()
            self.head.load_state_dict({name: begun.tensors[name.removesuffix(".weight")] for name in names})
        per_epoch = sum(1 for _ in batches(corpus, self._trained, recipe.tokens, random.Random(0)))
        self.num_batches = max(1, math.ceil(recipe.epochs * per_epoch))
        self.num_done = 0
        self._parameters = list(self.head.parameters())
        self._optimizer = torch.optim.AdamW(self._parameters, lr=recipe.lr, betas=(0.9, 0.95), weight_decay=0.0)
        self._schedule = torch.optim.lr_scheduler.LambdaLR(self._optimizer, self._rate)
        self._waiting: list[list[int]] = []  # batches of this epoch

    def step(self) -> list[float]:
        """One batch -> the loss of each step."""
        if not self._waiting:
            self._waiting = list(batches(self.corpus, self._trained, self.recipe.tokens, self._rng))
        batch = read(self.corpus, self._waiting.pop())
        parts = self.parts.over(torch.cat([self._frequent, batch.token_ids[batch.is_answer]]))
        with torch.autocast("cpu", torch.bfloat16, enabled=bool(self.recipe.bfloat16)):
            entropies = list(losses(self.head, parts, batch, self._num_steps))
        loss = torch.stack([entropy * _STEP_WEIGHT**step for step, entropy in enumerate(entropies)]).sum()
        self._optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self._parameters, 1.0)
        self._optimizer.step()
        self._schedule.step()
        self.num_done += 1
        return [float(entropy.detach()) for entropy in entropies]

    def measure(self) -> list[float]:
        """Acceptance of greedy drafts on the held-out documents, by position."""
        return acceptance(self.head, self.parts, self.corpus, self.held_out, NUM_MEASURED)

    def artefact(self, rates: Sequence[float]) -> Artefact:
        """The head as it is now."""
        figures = {
            "held_out_acceptance": [round(rate, 4) for rate in rates],
            "held_out_mean_length": round(mean_acceptance_length(rates), 3),
            "batches": self.num_done,
            "corpus_tokens": len(self.corpus.token_ids),
        }
        recipe = {name: getattr(self.recipe, name) for name in self.recipe.__slots__}
        if self._begun is not None:
            recipe["begun"] = dict(self._begun.recipe)
        return Artefact(
            kind=self.recipe.kind,
            target=target_identity(self.target),
            layers=layers_of(self.recipe, self.target, self.corpus),
            token_ids=self.parts.ids,
            tensors=self.head.tensors(),
            recipe={**recipe, **figures},
        )

    @property
    def _num_steps(self) -> int:
        """Drafts in a row of the next batch."""
        return 1 if self.num_done < self.recipe.single * self.num_batches else self.recipe.steps

    def _rate(self, done: int) -> float:
        """Of the learning rate: a short warm-up, then half a cosine."""
        cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, done / self.num_batches)))
        return min(1.0, (done + 1) / _WARM_UP) * (_LEAST_RATE + (1 - _LEAST_RATE) * cosine)


def make_module(recipe: Recipe, target: LoadedModel, corpus: Corpus) -> HeadModule:
    """A head of the recipe's kind."""
    if recipe.kind == eagle.KIND:
        return EagleModule(target.config, len(corpus.layers), recipe.inner)
    if recipe.kind == shallow.KIND:
        return ShallowModule(target.config, layers_of(recipe, target, corpus))
    return MtpModule(target.config, recipe.steps, recipe.inner)


def layers_of(recipe: Recipe, target: LoadedModel, corpus: Corpus) -> tuple[int, ...]:
    """The layers of the target whose states a head reads; of a small model those that it begins as, evenly spread."""
    if recipe.kind == shallow.KIND:
        last = target.config.num_layers - 1
        return tuple(1 + round(last * index / max(1, recipe.depth - 1)) for index in range(recipe.depth))
    return corpus.layers if recipe.kind == eagle.KIND else corpus.layers[-1:]


def main(arguments: Sequence[str] | None = None) -> None:
    """Train; a head is written with every measurement, so that a run that is broken off leaves one."""
    options = build_parser().parse_args(arguments)
    names = set(Recipe.__slots__)
    recipe = replace(
        Recipe(options.kind), **{name: value for name, value in vars(options).items() if name in names}
    )
    console = Console()
    begun = None if options.begin is None else load_artefact(options.begin)
    training = Training(recipe, load_model(resolve_model(options.model)), Corpus.open(options.corpus), begun)
    started_s = time.monotonic()

    def measure() -> None:
        rates = training.measure()
        shown = " ".join(f"{rate:.3f}" for rate in rates)
        at = f"batch {training.num_done}/{training.num_batches}, {time.monotonic() - started_s:.0f} s"
        console.print(f"{at}: acceptance {shown}, mean length {mean_acceptance_length(rates):.3f}")
        save_artefact(training.artefact(rates), options.out)

    measure()
    while training.num_done < training.num_batches:
        shown = " ".join(f"{loss:.3f}" for loss in training.step())
        if training.num_done % 20 == 0:
            console.print(f"batch {training.num_done}/{training.num_batches}: loss {shown}")
        if training.num_done % options.every == 0 or training.num_done == training.num_batches:
            measure()


def build_parser() -> argparse.ArgumentParser:
    """Every option."""
    defaults = Recipe("")
    parser = make_parser("python -m training.train_head", __doc__)
    parser.add_argument("kind", choices=(eagle.KIND, mtp.KIND, shallow.KIND))
    parser.add_argument("--model", default="smollm2-135m", help="the target: a name, a directory or a .gguf file")
    parser.add_argument("--corpus", type=Path, required=True, help="directory of training.corpus")
    parser.add_argument("--out", type=Path, required=True, help="directory to write the head to")
    parser.add_argument("--begin", type=Path, help="directory of a head to train further")
    parser.add_argument("--every", type=int, default=100, help="batches between two measurements")
    for name, meaning in {
        "vocab": "ids of the reduced vocabulary",
        "softmax": "of them, the most frequent ones: a batch's loss is over these and its own answers' ids",
        "steps": "drafts in a row that are trained",
        "single": "of the batches, from the first on: one draft only",
        "inner": "inner size of an eagle or mtp head",
        "depth": "layers of a small model",
        "epochs": "passes over the corpus",
        "tokens": "of a batch",
        "lr": "learning rate at its highest",
        "bfloat16": "1: products in bfloat16, 0: in float32",
        "seed": "of order and initial weights",
        "held_out": "documents that are measured and not trained on",
    }.items():
        default = getattr(defaults, name)
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default, help=meaning)
    return parser


if __name__ == "__main__":
    main()
