"""Tables and pictures of the experiments, from results written out by hand."""

import pytest
from trainer import ROOT

from path_backend.integration.commands import pictures, report, scores
from path_backend.integration.commands import results as store
from path_backend.integration.commands.experiments import RESULTS


def result(attention, **content):
    return {
        "device": "card",
        "versions": {"torch": "2.11"},
        "date": "2026-11-29 22:00 UTC",
        "attention": attention,
        "layers": 2,
        "seed": 0,
        "steps": 4000,
        "job": {"seq_len": 4},
        **content,
    }


def score(wrong, predictions=1000, **content):
    return {"wrong": wrong, "predictions": predictions, "error": wrong / predictions, **content}


def flip_flop(attention, *wrong):
    names = ("flip_flop_validation", "flip_flop_sparse", "flip_flop_dense")
    return result(attention, sets={n: score(w) for n, w in zip(names, wrong, strict=True)})


def a5(attention, depth, errors, seed=0):
    values = {"error_by_position": [None, *errors]}  # nothing is asked at the first token
    run = result(attention, sets={"a5_word_problem_validation": values})
    return run | {"layers": depth, "seed": seed, "job": {"seq_len": len(errors) + 1}}


def test_flip_flop():
    """Catches seeds averaged per sequence, a zero without bound, or another row's paper."""
    runs = [flip_flop("default", 100, 400, 0), flip_flop("default", 200, 420, 1)]
    lines = report.flip_flop([*runs, flip_flop("path", 0, 0, 0)]).splitlines()
    assert lines[3] == (
        "| `path` | 1 | 0 (below 0.38) | 0 (below 0.38) | 0 (below 0.38) | 0 / 0.0001 / 0 |"
    )
    assert lines[2] == (
        "| RoPE (`default`) | 2 | 15.0 (10.0 to 20.0) | 41.0 (40.0 to 42.0) | 0.05 (0 to 0.1) "
        "| 6.9 / 40.3 / 0.01 |"
    )


def test_smallest_depths():
    """Catches a length read off a shorter run, off by one, or solved by the deeper of two."""
    runs = [
        a5("path", 1, [0.0, 0.05, 0.5, 0.9]),
        a5("path", 2, [0.0, 0.0, 0.1, 0.2]),
        a5("path", 1, [0.0, 0.0, 0.08]),
        a5("fox", 2, [0.0, 0.3]),
    ]
    depths = scores.smallest_depths(runs)
    assert depths == {"path": {2: 1, 3: 1, 4: None}, "fox": {2: None}}


def test_word_problem():
    """Catches a bound of one attention taken from depths or lengths that only another one ran."""
    runs = [a5("path", 1, [0.0, 0.0, 0.5, 0.5]), a5("fox", 3, [0.0, 0.0])]
    rows = report.word_problem(runs).split("\n\n")[0].splitlines()[2:]
    assert rows[0].startswith("| `path` | 1 | 1 | > 1 | > 1 | not run |")
    assert rows[1].startswith("| `fox` | 1 | <= 3 | not run |")


def test_longest_words():
    """Catches a length counted beyond one that the run fails, or seeds in the order of lines."""
    runs = [
        a5("path", 1, [0.0, 0.0, 0.5, 0.0], seed=2),
        a5("path", 1, [0.0, 0.05, 0.1, 0.1], seed=0),
        a5("path", 3, [0.2, 0.0, 0.0, 0.0], seed=0),
        a5("fox", 3, [0.0, 0.0, 0.0, 0.0], seed=0),
    ]
    header, _, *rows = report.longest_words(runs).splitlines()
    assert header == "| longest word of each seed, by layers | 1 | 3 |"
    assert rows == ["| `path` | 4, 2 | 0 |", "| `fox` | not run | 4 |"]


def test_seeds():
    """Catches runs of all depths counted as seeds of one."""
    runs = [a5("path", depth, [0.0, 0.0]) for depth in (1, 1, 1, 2)]
    assert report._seeds(runs) == "1 to 3"
    assert report._seeds(runs[:3]) == "3"


def test_mqrar():
    """Catches accuracies of one N under another, or errors in their place."""
    run = result("fox", n_back=2, sets={"mqrar_validation": score(250)})
    other = {**run, "sets": {"mqrar_validation": score(750)}}
    (row,) = report.mqrar([run, other]).splitlines()[2:]
    assert row == "| `fox` | not run | 50.0 (25.0 to 75.0) | not run | not run |"


def length_result(attention, losses, perplexity=2.5):
    row = {"documents": 3, "bucket": 2, "loss_by_position": losses}
    rows = [
        {**row, "length": 4, "perplexity": perplexity},
        {**row, "length": 16, "documents": 0, "perplexity": None},
    ]
    return result(attention, perplexity={"python_stdlib_validation": rows})


def test_length_extrapolation():
    """Catches a length that no document fills shown with a number, or one seed for all."""
    seeds = [length_result("path", [1, 2]), length_result("path", [1, 2], perplexity=3.5)]
    runs = [*seeds, length_result("fox", [1, 2])]
    header, _, *rows = report.length_extrapolation(runs).splitlines()
    assert header == "| perplexity | seeds | 4 (3 documents) | 16 (0 documents) |"
    assert rows == [
        "| `path` | 2 | 3.00 (2.50 to 3.50) | none |",
        "| `fox` | 1 | 2.50 | none |",
    ]


@pytest.mark.parametrize(
    "share, text",
    [(0.403, "40.3"), (0.0123, "1.2"), (0.00456, "0.46"), (1e-6, "0.0001"), (3.8e-8, "0.000004")],
)
def test_percent(share, text):
    """Catches a small error shown as 0 or in an exponent."""
    assert report._percent(share) == text


def write(folder, experiment, *runs):
    for number, run in enumerate(runs):
        store.save(folder, run | {"experiment": experiment, "name": f"{experiment}/{number}"}, {})


def marks(experiment, old="old"):
    return f"{report.BEGIN.format(experiment)}\n{old}\n{report.END}\n"


def test_document_and_pictures(tmp_path):
    """Catches text outside the marks lost, a table of another's place, or no picture."""
    pytest.importorskip("matplotlib")
    write(tmp_path, "flip_flop", flip_flop("path", 0, 0, 0))
    write(tmp_path, "a5_word_problem", a5("path", 1, [0.0, 0.0, 0.5]))
    write(tmp_path, "s5_swaps", *(a5("path", 1, [0.0, e, 0.5]) for e in (0.0, 0.1)))
    write(tmp_path, "length_extrapolation", *(length_result("path", [n, 2]) for n in (1, 2)))
    failure = {"name": "mqrar/path", "experiment": "mqrar", "failure": "exit 1", "log": []}
    store.save_failure(tmp_path, failure)
    document = tmp_path / "RESULTS.md"
    names = ["mqrar", "a5_word_problem", "flip_flop", "s5_swaps", "length_extrapolation"]
    document.write_text("".join(f"before {name}\n{marks(name)}" for name in names) + "after\n")
    for _ in range(2):
        report.main([f"--results={tmp_path}", f"--into={document}"])
    text = document.read_text()
    assert text.endswith(f"{report.END}\nafter\n") and "old" not in text
    assert [line for line in text.splitlines() if line.startswith("before")] == [
        f"before {name}" for name in names
    ]
    mqrar, words, *_ = text.split(f"{report.END}\n")
    assert mqrar.endswith("Without a result: mqrar/path (exit 1).\n")
    assert words.count("**Word problem of A5: ") == 1
    assert "Runs: 1 of 4,000 steps, on card, torch 2.11, 2026-11-29." in text
    for experiment in pictures.PICTURES:
        assert (tmp_path / f"{experiment}.png").stat().st_size > 5000


@pytest.mark.parametrize(
    "text",
    [
        marks("mqrar"),
        report.BEGIN.format("flip_flop"),
        f"{report.BEGIN.format('flip_flop')}\n{marks('mqrar')}",
    ],
)
def test_document_without_marks(tmp_path, text):
    """Catches a file without a place for a table overwritten, or refused without its name."""
    write(tmp_path, "flip_flop", flip_flop("path", 0, 0, 0))
    document = tmp_path / "RESULTS.md"
    document.write_text(text)
    expected = r"--into .*RESULTS.md: expected the lines <!-- .* begin flip_flop --> and <!-- "
    with pytest.raises(ValueError, match=expected):
        report.main([f"--results={tmp_path}", f"--into={document}"])
    assert document.read_text() == text


@pytest.mark.skipif(not (ROOT / RESULTS).is_dir(), reason="results are not in the sdist")
def test_committed_tables_are_those_of_the_results():
    """Catches a number of RESULTS.md that was edited by hand, and a result without its table."""
    text = (ROOT / "RESULTS.md").read_text()
    assert report.insert(text, report.sections(ROOT / RESULTS)) == text


def test_nothing_to_report(tmp_path):
    """Catches tables of a wrong folder written as empty ones."""
    with pytest.raises(ValueError, match="--results must hold results of experiments, got "):
        report.main([f"--results={tmp_path}"])
