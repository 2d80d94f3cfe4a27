"""Lines of results: replaced by name, whole whenever read, written by several processes at once."""

import multiprocessing

import pytest

from path_backend.integration.commands import results as store


def record(name, **content):
    return {"experiment": "words", "name": name, **content}


def test_a_rerun_replaces_its_line_and_drops_its_failure(tmp_path):
    """Catches two lines of one run, another's line lost, or a failure that outlives its result."""
    for name in ("words/b", "words/a"):
        store.save_failure(tmp_path, record(name, failure="exit 1", log=[]))
        store.save(tmp_path, record(name, value=1), {"loss": {1: 2.0}})
    store.save(tmp_path, record("words/a", value=2), {"loss": {1: 3.0}})
    assert [(r["name"], r["value"]) for r in store.load(tmp_path, "words")] == [
        ("words/a", 2),
        ("words/b", 1),
    ]
    curves = [line["curves"] for line in store.load_curves(tmp_path, "words")]
    assert curves == [[{"steps": [1], "values": {"loss": [x]}}] for x in (3.0, 2.0)]
    assert store.failures(tmp_path) == []


def write_many(folder, process):
    for number in range(20):
        store.save(folder, record(f"words/{process}_{number}"), {})


def test_writers_take_turns(tmp_path):
    """Catches a line lost or torn where several jobs finish at once."""
    start = multiprocessing.get_context("fork").Process
    processes = [start(target=write_many, args=(tmp_path, number)) for number in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    assert len(store.load(tmp_path, "words")) == 80
    assert len(store.load_curves(tmp_path, "words")) == 80


def test_a_killed_writer_leaves_the_old_file(tmp_path, monkeypatch):
    """Catches half a file, or a lock that nobody gives back."""
    store.save(tmp_path, record("words/a"), {})
    before = (tmp_path / "words.jsonl").read_bytes()

    def killed(path, target):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(store.Path, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            store.save(tmp_path, record("words/b"), {})
    assert (tmp_path / "words.jsonl").read_bytes() == before
    store.save(tmp_path, record("words/b"), {})
    assert len(store.load(tmp_path, "words")) == 2


@pytest.mark.parametrize("line", ['{"name": "words/a", "val', "[1]", '{"value": 1}'])
def test_a_broken_line_is_named(tmp_path, line):
    """Catches a file that was cut off or edited wrongly, refused without its name."""
    (tmp_path / "words.jsonl").write_text(f'{{"name": "words/0"}}\n{line}\n')
    with pytest.raises(ValueError, match=r"JSON object with a name, got line 2 of .*words.jsonl"):
        store.load(tmp_path, "words")


def test_a_name_that_comes_twice_is_refused(tmp_path):
    """Catches a merge that kept both sides, which would count a seed twice."""
    (tmp_path / "words.jsonl").write_text('{"name": "words/0"}\n' * 2)
    with pytest.raises(ValueError, match="one line for each name, got 'words/0' twice in .*words"):
        store.load(tmp_path, "words")


def test_curves_keep_their_ends(tmp_path):
    """Catches a curve thinned without its first or last step, or values of other steps."""
    long = {step: float(step) for step in range(1, 2002)}
    short = {1: 0.123456, 2000: 1.0}
    by_length = {len(group["steps"]): group for group in store.columns({"a": long, "b": short})}
    steps = by_length[store.CURVE_POINTS]["steps"]
    assert (steps[0], steps[1], steps[-1]) == (1, 51, 2001)
    assert by_length[store.CURVE_POINTS]["values"] == {"a": [float(step) for step in steps]}
    (layers,) = store.columns({"path/beta_mean/layer_0": long})
    assert layers["steps"] == [1 + 200 * i for i in range(store.STATISTIC_POINTS)]
    assert by_length[2] == {"steps": [1, 2000], "values": {"b": [0.1235, 1.0]}}


def test_numbers_are_rounded_and_counts_are_not():
    """Catches counts in an exponent, or a score without its digits."""
    content = {"wrong": 123456789, "error": [0.123456789, None], "on": True}
    assert store.rounded(content) == {"wrong": 123456789, "error": [0.123457, None], "on": True}
