"""Heads are trained as they will serve: the same drafts, from what their target computed, into an artefact."""

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine.backends.base import SequenceInput
from engine.backends.torch_backend import TorchEngine
from engine.heads.artefact import ArtefactError, load_artefact, save_artefact
from engine.heads.eagle import build_eagle
from engine.heads.mtp import build_mtp
from engine.heads.shallow import build_shallow
from engine.kernels.cpu_reference import TorchKernels
from engine.models.linear import PackedLinear
from tests.engine.engines import logits, tiny_engine
from tests.fixtures.tiny_models import tiny_model
from tests.heads import NaiveEagle, naive_mtp
from training.corpus import Corpus, write
from training.distillation import acceptance, batches, held_out, mean_acceptance_length, read, reduced_vocabulary
from training.target_parts import TargetParts
from training.train_head import Recipe, Training

TARGET = tiny_model("llama")
LAYERS = (1, 2)
RECIPE = Recipe("eagle", vocab=90, steps=3, inner=64, depth=2, tokens=128, lr=3e-3, held_out=2, single=0.0)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """What the target goes on with, greedily, after prompts of a few tokens."""
    directory = tmp_path_factory.mktemp("corpus")
    documents = []
    for number in range(24):
        tokens = [1 + number, 2 + number, *[3] * (number % 3)]
        prompt_len = len(tokens)
        engine = tiny_engine(TARGET)
        sequence, fed = engine.create(), list(tokens)
        while len(tokens) < 20 + number:
            fed = engine.forward_per_position_argmax([SequenceInput(sequence, fed, 1)]).tolist()
            tokens += fed
        documents.append((tokens, prompt_len))
    write(tiny_engine(TARGET), documents, directory, "tiny", LAYERS)
    return Corpus.open(directory)


def test_a_corpus_has_each_documents_tokens_and_states(corpus: Corpus) -> None:
    assert (len(corpus), corpus.layers) == (24, LAYERS)
    start, end = int(corpus.starts[3]), int(corpus.starts[4])
    assert end - start == 23
    assert corpus.token_ids[start : start + 2].tolist() == [4, 5]
    assert corpus.states(start, end).shape == (23, 2, 64)
    batch = read(corpus, [0, 3])
    assert batch.token_ids.shape == (2, 23)
    assert torch.equal(batch.states[1], corpus.states(start, end).float())
    assert batch.is_answer[0].tolist() == [False] * 2 + [True] * 18 + [False] * 3


def test_batches_hold_every_document_once_and_no_more_tokens_than_they_may(corpus: Corpus) -> None:
    made = list(batches(corpus, range(24), 64, random.Random(0)))
    assert sorted(number for batch in made for number in batch) == list(range(24))
    lengths = corpus.starts[1:] - corpus.starts[:-1]
    assert all(len(batch) * max(int(lengths[n]) for n in batch) <= 64 or len(batch) == 1 for batch in made)


def test_the_reduced_vocabulary_is_of_the_answers(corpus: Corpus) -> None:
    ids = reduced_vocabulary(corpus, range(24), 5).tolist()
    assert len(ids) == 5
    assert ids == sorted(ids)
    answers = corpus.token_ids.tolist()
    assert all(answers.count(token_id) > 1 for token_id in ids)


def test_no_document_is_trained_on_whose_prompt_is_held_out(tmp_path: Path) -> None:
    documents = [([1 + number // 3, 9, 5 + number, 6], 2) for number in range(12)]  # three answers to each prompt
    write(tiny_engine(TARGET), documents, tmp_path, "tiny", LAYERS)
    asked_thrice = Corpus.open(tmp_path)
    measured, trained = held_out(asked_thrice, 2, random.Random(1))
    assert len(measured) == 2
    prompts = {asked_thrice.prompt(number) for number in measured}
    assert sorted(trained) == [number for number in range(12) if asked_thrice.prompt(number) not in prompts]


def test_a_loss_over_fewer_ids_has_the_targets_distribution_among_them(corpus: Corpus) -> None:
    parts = TargetParts.of(TARGET, torch.tensor([2, 3, 5, 7, 11]))
    fewer = parts.over(torch.tensor([11, 4, 3, 3]))
    states = corpus.states(0, 6)[:, -1].float()
    probs = parts.probs(states)[:, [1, 4]]
    assert fewer.ids.tolist() == [3, 11]
    assert torch.allclose(fewer.probs(states), probs / probs.sum(dim=-1, keepdim=True))


@pytest.mark.parametrize("kind", ["eagle", "mtp", "shallow"])
def test_the_loss_falls_and_what_was_trained_on_is_drafted_right(corpus: Corpus, kind: str) -> None:
    """A random target's text has no pattern that held-out documents could share, so acceptance is of the others."""
    training = Training(replace(RECIPE, kind=kind, epochs=15, lr=1e-2, depth=1), TARGET, corpus)
    seen = [number for number in range(len(corpus)) if number not in training.held_out]
    before = acceptance(training.head, training.parts, corpus, seen, 3)
    losses = [training.step() for _ in range(training.num_batches)]
    assert all(last < first - 0.5 for first, last in zip(losses[0], losses[-1], strict=True))
    after = acceptance(training.head, training.parts, corpus, seen, 3)
    assert mean_acceptance_length(after) > mean_acceptance_length(before) + 0.1


def test_what_serves_drafts_what_was_trained(corpus: Corpus, tmp_path: Path) -> None:
    for kind, build in (("eagle", build_eagle), ("mtp", build_mtp)):
        training = Training(replace(RECIPE, kind=kind), TARGET, corpus)
        for _ in range(3):
            training.step()
        artefact = training.artefact(training.measure())
        save_artefact(artefact, tmp_path / kind)
        loaded = load_artefact(tmp_path / kind)
        assert loaded.recipe["held_out_mean_length"] >= 1.0
        build(loaded, TARGET, torch.float32, PackedLinear, 64)  # it fits its target
        batch = read(corpus, [5])
        tokens, states = batch.token_ids[0].tolist(), batch.states[0]
        with torch.no_grad():
            steps = list(training.head.unroll(training.parts, batch, 2))
        for anchor in (4, 11):
            given = tokens[: anchor + 2]
            if kind == "eagle":
                drafts = NaiveEagle(artefact, TARGET).greedy(given, states[: anchor + 1], 1)
            else:
                drafts = naive_mtp(artefact, TARGET, given, states[anchor, -1], 1)
            trained = [int(training.parts.ids[training.parts.logits(step[0, anchor]).argmax()]) for step in steps]
            assert drafts == trained[:1]


def test_a_run_with_the_same_seed_gives_the_same_head(corpus: Corpus) -> None:
    tensors = []
    for _ in range(2):
        training = Training(RECIPE, TARGET, corpus)
        training.step()
        tensors.append(training.head.tensors())
    assert all(torch.equal(tensors[0][name], tensors[1][name]) for name in tensors[0])


def test_a_small_model_serves_what_was_trained(corpus: Corpus) -> None:
    training = Training(replace(RECIPE, kind="shallow"), TARGET, corpus)
    training.step()
    artefact = training.artefact(training.measure())
    assert artefact.layers == (1, 2)
    built = build_shallow(artefact, TARGET, torch.float32, PackedLinear, 64)
    engine = TorchEngine(built.model, TorchKernels(), num_blocks=16, block_size=4)
    batch = read(corpus, [5])
    tokens = batch.token_ids[0].tolist()
    served = logits(engine, engine.create(), tokens)
    with torch.no_grad():
        steps = list(training.head.unroll(training.parts, batch, 2))
    for step, normed in enumerate(steps):
        trained = training.parts.logits(normed[0])
        torch.testing.assert_close(served[4 + step], trained[3], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["eagle", "mtp", "shallow"])
def test_a_head_is_trained_further_from_where_it_was(corpus: Corpus, tmp_path: Path, kind: str) -> None:
    training = Training(replace(RECIPE, kind=kind, lr=1e-2, epochs=5), TARGET, corpus)
    for _ in range(training.num_batches):
        training.step()
    save_artefact(training.artefact(training.measure()), tmp_path)
    begun = load_artefact(tmp_path)
    again = Training(replace(RECIPE, kind=kind), TARGET, corpus, begun)
    for name, tensor in again.head.tensors().items():
        assert torch.equal(tensor, begun.tensors[name])
    assert again.artefact([0.0]).recipe["begun"] == begun.recipe
    other = "mtp" if kind == "eagle" else "eagle"
    with pytest.raises(ArtefactError, match=f"of kind '{kind}', not '{other}'"):
        Training(replace(RECIPE, kind=other), TARGET, corpus, begun)
