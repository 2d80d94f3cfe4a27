"""Tables and pictures of the experiments, from results written out by hand."""

import json

import pytest

from path_backend.integration.commands import report


def result(attention, **content):
    return {
        "device": "card",
        "versions": {"torch": "2.11"},
        "date": "2026-11-29 22:00 UTC",
        "step": 4000,
        "job": {"attention": attention, "seq_len": 4, "model": "llama3 task_2x128"},
        **content,
    }


def score(wrong, predictions=1000, **content):
    return {"wrong": wrong, "predictions": predictions, "error": wrong / predictions, **content}


def flip_flop(attention, *wrong):
    names = ("flip_flop_validation", "flip_flop_sparse", "flip_flop_dense")
    return result(attention, sets={n: score(w) for n, w in zip(names, wrong, strict=True)})


def a5(attention, depth, errors):
    scores = {"error_by_position": [None, *errors]}  # nothing is asked at the first token
    run = result(attention, sets={"a5_word_problem_validation": scores})
    run["job"] |= {"model": f"llama3 task_{depth}x128x4", "seq_len": len(errors) + 1}
    return run


def test_flip_flop():
    """Seeds averaged per sequence, a zero without its bound, or rows beside the wrong paper's."""
    runs = [flip_flop("default", 100, 400, 0), flip_flop("default", 200, 420, 1)]
    lines = report.flip_flop([*runs, flip_flop("path", 0, 0, 0)]).splitlines()
    assert lines[2] == (
        "| `path` | 1 | 0 (below 0.38) | 0 (below 0.38) | 0 (below 0.38) | 0 / 0.0001 / 0 |"
    )
    assert lines[3] == (
        "| RoPE (`default`) | 2 | 15.0 (10.0 to 20.0) | 41.0 (40.0 to 42.0) | 0.05 (0 to 0.1) "
        "| 6.9 / 40.3 / 0.01 |"
    )


def test_smallest_depths():
    """A length read off a shorter run, off by one, or solved by the deeper of two."""
    runs = [
        a5("path", 1, [0.0, 0.05, 0.5, 0.9]),
        a5("path", 2, [0.0, 0.0, 0.1, 0.2]),
        a5("path", 1, [0.0, 0.0, 0.08]),
        a5("fox", 2, [0.0, 0.3]),
    ]
    depths = report.smallest_depths(runs)
    assert depths == {"path": {2: 1, 3: 1, 4: None}, "fox": {2: None}}


def test_word_problem():
    """A bound of one attention taken from depths or lengths that only another one ran."""
    runs = [a5("path", 1, [0.0, 0.0, 0.5, 0.5]), a5("fox", 3, [0.0, 0.0])]
    rows = report.word_problem(runs).splitlines()[2:]
    assert rows[0].startswith("| `path` | 1 | 1 | > 1 | > 1 | not run |")
    assert rows[1].startswith("| `fox` | 1 | <= 3 | not run |")


def test_seeds():
    """Runs of all depths counted as seeds of one."""
    runs = [a5("path", depth, [0.0, 0.0]) for depth in (1, 1, 1, 2)]
    assert report._seeds(runs) == "1 to 3"
    assert report._seeds(runs[:3]) == "3"


def test_mqrar():
    """Accuracies of one N under another, or errors in their place."""
    run = result("fox", trainer="--task.mqrar.n_back=2 --x", sets={"mqrar_validation": score(250)})
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
    """A length that no document fills shown with a number, or one seed for all."""
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
    """A small error shown as 0 or in an exponent."""
    assert report._percent(share) == text


def test_readme_and_pictures(tmp_path):
    """Text outside the marks lost, a failure passed over, or a picture not made."""
    pytest.importorskip("matplotlib")
    for name, content in {
        "flip_flop/path_0": flip_flop("path", 0, 0, 0),
        "a5_word_problem/path": a5("path", 1, [0.0, 0.0, 0.5]),
        "s5_swaps/path_0": a5("path", 1, [0.0, 0.0, 0.5]),
        "s5_swaps/path_1": a5("path", 1, [0.0, 0.1, 0.5]),
        "length_extrapolation/path_0": length_result("path", [1, 2]),
        "length_extrapolation/path_1": length_result("path", [2, 2]),
        "mqrar/path.failed": {"experiment": "mqrar/path", "failure": "exit 1"},
    }.items():
        path = tmp_path / f"{name}.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(content))
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{report.BEGIN}\nold\n{report.END}\nafter\n")
    for _ in range(2):
        report.main([f"--results={tmp_path}", f"--readme={readme}"])
    text = readme.read_text()
    assert text.startswith("before\n") and text.endswith(f"{report.END}\nafter\n")
    assert "old" not in text and text.count("**Word problem of A5: ") == 1
    assert "Runs: 1 of 4,000 steps, on card, torch 2.11, 2026-11-29." in text
    assert "Without a result: mqrar/path (exit 1)." in text
    for group in report.PLOTS:
        assert (tmp_path / f"{group}.png").stat().st_size > 5000


def test_readme_without_marks(tmp_path):
    """A file without a place for the tables overwritten, or refused without its name."""
    pytest.importorskip("matplotlib")
    (tmp_path / "flip_flop").mkdir()
    (tmp_path / "flip_flop/path.json").write_text(json.dumps(flip_flop("path", 0, 0, 0)))
    readme = tmp_path / "README.md"
    readme.write_text(f"{report.BEGIN}\n")
    with pytest.raises(ValueError, match="--readme must hold the lines .*, got .*README.md"):
        report.main([f"--results={tmp_path}", f"--readme={readme}"])
    assert readme.read_text() == f"{report.BEGIN}\n"


def test_broken_result(tmp_path):
    """A file that was cut off, refused without its name."""
    (tmp_path / "flip_flop").mkdir()
    (tmp_path / "flip_flop/path_0.json").write_text("{")
    with pytest.raises(ValueError, match="expected a result in JSON, got .*flip_flop/path_0.json"):
        report.main([f"--results={tmp_path}"])


def test_nothing_to_report(tmp_path):
    """Tables of a wrong folder written as empty ones."""
    with pytest.raises(ValueError, match="--results must hold results of experiments, got "):
        report.main([f"--results={tmp_path}"])
