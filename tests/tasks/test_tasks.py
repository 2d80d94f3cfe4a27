"""Sequences of the tasks against their definitions, read token by token, and how they are drawn."""

import math
from collections import Counter

import pytest
import torch
import torch.nn.functional as F

from path_backend import path_attention
from path_backend.tasks import IGNORE_INDEX, A5WordProblem, FlipFlop, Mqrar, S5Swaps, Stream
from path_backend.tasks.stream import HELD_OUT, _mix, below, is_held_out, random_words, uniform

CASES = [
    (FlipFlop(), 512),
    (FlipFlop(0.98), 64),
    (FlipFlop(0.1), 64),
    (FlipFlop(0), 10),
    (FlipFlop(1), 12),
    (A5WordProblem(), 3),
    (A5WordProblem(), 21),
    (A5WordProblem(), 512),
    (S5Swaps(), 4),
    (S5Swaps(), 21),
    (Mqrar(), 768),
    (Mqrar(n_back=2), 256),
    (Mqrar(n_back=3, pairs=5), 40),
    (Mqrar(n_back=4, pairs=2), 18),
]
EACH = pytest.mark.parametrize("task, length", CASES, ids=str)


def drawn(task, length, count=64, held_out=False, **options):
    """Tokens, by name, and labels, by name or None, of the first samples of a stream."""
    tokens, labels = Stream(task, length, "x", held_out, **options).samples(0, count)
    assert tokens.shape == labels.shape == (count, length)
    assert tokens.dtype == labels.dtype == torch.int64
    names = dict(enumerate(task.vocabulary)) | {IGNORE_INDEX: None}
    return (
        [[names[i] for i in row] for row in tokens.tolist()],
        [[names[i] for i in row] for row in labels.tolist()],
    )


def flip_flop_answers(tokens):
    """The bit after each r at the r; None elsewhere. Checks that a read repeats the last write."""
    assert tokens[0] == "w" and tokens[-2] == "r"
    memory, answers = None, []
    for instruction, bit in zip(tokens[0::2], tokens[1::2], strict=True):
        assert instruction in "wri" and bit in "01"
        if instruction == "w":
            memory = bit
        if instruction == "r":
            assert bit == memory
        answers += [bit if instruction == "r" else None, None]
    return answers


def products(tokens):
    """Where the objects 0..4 are after each permutation, moved one after the other."""
    assert tokens[0] == "start"
    objects, answers = "01234", [None]
    for token in tokens[1:]:
        assert sorted(token) == list("01234")
        objects = "".join(token[int(place)] for place in objects)
        answers.append(objects)
    return answers


def mqrar_answers(n_back):
    """The value that each variable was assigned n_back assignments before this one."""

    def answers(tokens):
        history, found = {}, []
        for variable, value in zip(tokens[0::2], tokens[1::2], strict=True):
            assert variable.startswith("variable") and value.startswith("value")
            values = history.setdefault(variable, [])
            found += [values[-n_back] if len(values) >= n_back else None, None]
            values.append(value)
        return found

    return answers


def checker(task):
    if isinstance(task, Mqrar):
        return mqrar_answers(task.n_back)
    return flip_flop_answers if isinstance(task, FlipFlop) else products


@EACH
@pytest.mark.parametrize("held_out", [False, True], ids=["training", "held out"])
def test_labels_follow_the_definition(task, length, held_out):
    """A label off by one place, of another variable, or of a product taken in another order."""
    for tokens, labels in zip(*drawn(task, length, held_out=held_out), strict=True):
        assert labels == checker(task)(tokens)
        assert any(labels)  # a batch without a label would divide by zero


def within(share, expected, trials):
    """Whether a share of trials is within five standard deviations of its probability."""
    return abs(share - expected) <= 5 * math.sqrt(expected * (1 - expected) / trials)


@pytest.mark.parametrize("p_ignore", [0.0, 0.1, 0.8, 0.98, 1.0])
@pytest.mark.parametrize("held_out", [False, True], ids=["training", "held out"])
def test_flip_flop_shares(p_ignore, held_out):
    """Instructions at other rates than asked, a biased bit, or a part that differs in either."""
    rows, _ = drawn(FlipFlop(p_ignore), 64, count=2000, held_out=held_out)
    instructions = Counter(name for row in rows for name in row[2:-2:2])
    total = instructions.total()
    for name, expected in (("i", p_ignore), ("w", (1 - p_ignore) / 2), ("r", (1 - p_ignore) / 2)):
        assert within(instructions[name] / total, expected, total), name
    for place in (0, 16, 61):  # each place on its own: first write, middle, last before the read
        bits = [row[place // 2 * 2 + 1] for row in rows if row[place // 2 * 2] != "r"]
        assert within(bits.count("1") / len(bits), 0.5, len(bits)), place


def is_swap(name):
    return sum(image != place for image, place in zip(name, "01234", strict=True)) == 2


@pytest.mark.parametrize("task", [A5WordProblem(), S5Swaps(), Mqrar(pairs=6)], ids=str)
def test_symbols_are_uniform(task):
    """An element, variable or value that never comes, or comes too often, at any place."""
    rows, labels = drawn(task, 14, count=6000)
    kinds = {name: name.rstrip("0123456789") for name in task.vocabulary}
    for place in (0, 1, 6, 13):
        counts = Counter(row[place] for row in rows)
        kind = kinds[rows[0][place]]
        alphabet = [name for name in task.vocabulary if kinds[name] == kind]
        if isinstance(task, S5Swaps) and place:
            alphabet = [name for name in alphabet if is_swap(name)]
        assert counts.keys() == set(alphabet)
        assert all(within(counts[n] / len(rows), 1 / len(alphabet), len(rows)) for n in alphabet)
    if isinstance(task, S5Swaps):  # an odd number of swaps is an odd permutation
        return
    answers = Counter(name for row in labels for name in row if name)
    share = 1 / len(answers)
    assert all(within(count / answers.total(), share, 6000) for count in answers.values())


def test_queries_of_mqrar_are_everything_that_exists():
    """Queries left out, or asked at values: at every variable token but its first n_back."""
    task = Mqrar(n_back=2, pairs=8)
    _, labels = drawn(task, 128, count=200)
    for row in labels:
        assert not any(row[1::2])
        assert 64 - 2 * 8 <= sum(map(bool, row)) <= 64 - 2


def test_a5_is_the_group():
    """Elements missing or odd, a table that is no group, or an identity out of place."""
    task = A5WordProblem()
    *names, start = task.vocabulary
    assert len(set(names)) == 60 and names[0] == "01234" and start == "start"
    for name in names:
        assert sum(a > b for i, a in enumerate(name) for b in name[i:]) % 2 == 0
    assert {products([start, a, b])[-1] for a in names for b in names} == set(names)


def test_s5_is_the_group():
    """Products that are no permutation, or fewer than the swaps generate."""
    *names, start = S5Swaps().vocabulary
    assert len(set(names)) == 120 and names[0] == "01234" and start == "start"
    assert sum(map(is_swap, names)) == 10
    assert all(sorted(name) == list("01234") for name in names)


def test_one_layer_of_path_solves_swaps():
    """Reflections in another order than the task's products, or a first token that is not seen.

    The paper's construction: w of the swap of a and b is (e_a - e_b) / sqrt(2), beta is 2, and only
    the first token has a key, (0, 1, 2, 3, 4). For the query e_x its logit is the object at x.
    """
    length = 200
    tokens, labels = Stream(S5Swaps(), length, "x", False).samples(0, 4)
    images = torch.tensor([[int(c) for c in name] for name in S5Swaps().vocabulary[:-1]])
    products = images[labels[:, 1:]]  # [B, T - 1, 5]: where each object is
    moved = images[tokens[:, 1:]] - torch.arange(5)  # b - a at a, a - b at b
    w = F.pad(F.normalize(moved.double(), dim=-1), (0, 0, 1, 0)).unsqueeze(2)  # start has none
    q = torch.eye(5).double().expand(4, length, 5, 5)  # a head for each x
    k, v = torch.zeros(4, length, 1, 5).double(), torch.zeros(4, length, 1, 1).double()
    k[:, 0], v[:, 0] = torch.arange(5).double(), 1
    beta = torch.full((4, length, 1), 2.0).double()
    share = path_attention(q, k, v, w, beta, scale=1.0)[:, 1:, :, 0]  # of the first token
    others = torch.arange(1, length)[:, None]
    objects = (share * others / (1 - share)).log()
    assert torch.allclose(objects, products.argsort(-1).double(), atol=1e-6)


def test_words_are_those_of_splitmix64():
    """A shift that keeps the sign, or a wrong constant: streams would not be random."""
    state = 1234567 + torch.arange(1, 6) * (0x9E3779B97F4A7C15 - 2**64)
    published = [
        *(6457827717110365317, 3203168211198807973, 9817491932198370423),
        *(4593380528125082431, 16408922859458223821),
    ]
    assert [word % 2**64 for word in _mix(state).tolist()] == published


def test_words_are_random_over_samples_places_and_draws():
    """A counter used twice: equal words in two samples, places, draws or keys."""
    index = torch.arange(500)
    words = torch.cat([random_words(key, index, draw, 40) for key in (7, 8) for draw in (0, 1)])
    assert len(words.unique()) == words.numel()
    for bit in range(64):
        ones = ((words >> bit) & 1).double()
        assert within(ones.mean(), 0.5, words.numel()), bit
        neighbours = (ones[:, 1:] == ones[:, :-1]).double()
        assert within(neighbours.mean(), 0.5, neighbours.numel()), bit
    assert 0 <= uniform(words).min() < 1e-4 and 1 - 1e-4 < uniform(words).max() < 1
    assert below(words, 3).unique().tolist() == [0, 1, 2]


def test_a_sample_is_a_function_of_its_number():
    """Samples that depend on what was drawn before, or on how many at once."""
    for held_out in (False, True):
        stream = Stream(FlipFlop(), 32, "x", held_out)
        tokens, labels = stream.samples(0, 20)
        for first, count in ((0, 7), (7, 1), (8, 12)):
            part = stream.samples(first, count)
            assert torch.equal(part[0], tokens[first : first + count])
            assert torch.equal(part[1], labels[first : first + count])


def test_streams_differ_by_name_and_seed():
    """Another seed or set that gives the same sequences."""
    tokens = [
        Stream(FlipFlop(), 64, name, False, seed).samples(0, 8)[0]
        for name in ("x", "y")
        for seed in (0, 1, -1, 2**64)
    ]
    assert len(torch.cat(tokens).unique(dim=0)) == 8 * len(tokens)


@pytest.mark.parametrize(
    "task, length, sequences", [(A5WordProblem(), 3, 60**2), (FlipFlop(1), 14, 2**6)], ids=str
)
def test_parts_are_disjoint_and_complete(task, length, sequences):
    """Evaluation on sequences that were trained on: there are few, and each stream saw its all."""
    training, evaluation = (
        set(map(tuple, Stream(task, length, name, held_out).samples(0, 40_000)[0].tolist()))
        for name, held_out in (("x", False), ("y", True))
    )
    assert not training & evaluation
    assert len(training | evaluation) == sequences
    assert within(len(evaluation) / sequences, 1 / HELD_OUT, sequences)


def test_the_part_is_decided_by_the_whole_sequence():
    """A hash that misses places or values: whole kinds of sequence would be held out."""
    tokens = Stream(FlipFlop(), 512, "x", False).samples(0, 1)[0]
    changed = tokens.repeat(512, 1)
    changed.diagonal().add_(1)
    assert within(is_held_out(changed).double().mean(), 1 / HELD_OUT, 512)


class Constant:
    """A task of a single sequence, which is in one part or the other."""

    vocabulary = ("0",)

    def check_length(self, length):
        pass

    def sequences(self, words):
        return torch.zeros_like(words), torch.zeros_like(words)


def test_a_part_without_sequences_is_refused():
    """A search that never ends, for a part of which there is no sequence."""
    part = bool(is_held_out(torch.zeros(1, 4, dtype=torch.int64)))
    assert Stream(Constant(), 4, "x", part).samples(0, 2)[0].tolist() == [[0] * 4] * 2
    message = "x must have sequences to draw, got none in 1000 draws of 4 tokens .*: a longer one"
    with pytest.raises(ValueError, match=message):
        Stream(Constant(), 4, "x", not part).samples(0, 2)


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: FlipFlop(1.5), r"flip_flop.p_ignore must be a number in \[0, 1\], got 1.5"),
        (lambda: FlipFlop("0.8"), r"flip_flop.p_ignore must be a number in \[0, 1\], got '0.8'"),
        (lambda: FlipFlop(math.nan), r"flip_flop.p_ignore must be a number in \[0, 1\], got nan"),
        (lambda: Mqrar(n_back=0), "mqrar.n_back must be an integer >= 1, got 0"),
        (lambda: Mqrar(n_back=2.0), "mqrar.n_back must be an integer >= 1, got 2.0"),
        (lambda: Mqrar(pairs=1), "mqrar.pairs must be an integer >= 2, got 1"),
        (lambda: FlipFlop().check_length(5), "an even length of at least 4 tokens, got 5"),
        (lambda: FlipFlop().check_length(2), "an even length of at least 4 tokens, got 2"),
        (
            lambda: A5WordProblem().check_length(2),
            "a5_word_problem needs .* 3 tokens, got 2",
        ),
        (lambda: S5Swaps().check_length(2), "s5_swaps needs a length of at least 3 tokens, got 2"),
        (lambda: Mqrar().check_length(64), "pairs = 32 needs an even length of at least 66 .* 64"),
        (lambda: Mqrar().check_length(67), "an even length of at least 66 tokens, got 67"),
        (lambda: Stream(FlipFlop(), 5, "x", False), "an even length of at least 4 tokens, got 5"),
    ],
)
def test_refusals(make, message):
    """A wrong difficulty or length drawn as something else."""
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.gpu
@EACH
def test_devices_draw_the_same(task, length):
    """Evaluation on other sequences because they were drawn on a GPU."""
    for held_out in (False, True):
        stream = Stream(task, length, "x", held_out)
        for on_cpu, on_gpu in zip(
            stream.samples(3, 50), stream.samples(3, 50, device="cuda"), strict=True
        ):
            assert torch.equal(on_cpu, on_gpu.cpu())
