import re
import sys

import numpy as np
import pytest

from experiments.data import make_babi
from experiments.errors import UserError
from experiments.tasks import Scored, build, catbabi
from experiments.tasks.catbabi import CatBabi

# A miniature in bAbI's format, made up here: two tasks, another one for each split.
WHERE = {
    "train": """\
1 Ada sailed to the harbour.
2 Where is Ada? \tharbour\t1
3 Bo swam to the island.
4 Ada rowed to the island.
5 Where is Ada? \tisland\t4
1 Bo sailed to the lagoon.
2 Where is Bo? \tlagoon\t1
""",
    "valid": """\
1 Bo rowed to the harbour.
2 Where is Bo? \tharbour\t1
""",
    "test": """\
1 Ada swam to the lagoon.
2 Where is Ada? \tlagoon\t1
1 Bo sailed to the island.
2 Ada rowed to the island.
3 Where is Bo? \tisland\t1
""",
}
CARRIES = {
    "train": """\
1 Bo picked up the lamp.
2 Bo picked up the rope.
3 What does Bo carry?\tlamp,rope\t1 2
""",
    "valid": """\
1 Ada picked up the rope.
2 What does Ada carry?\trope\t1
""",
    "test": """\
1 Ada picked up the lamp.
2 What does Ada carry?\tlamp\t1
""",
}


@pytest.fixture
def folder(tmp_path):
    """The miniature as tasks 1 and 8, under both kinds of file names."""
    catbabi.load.cache_clear()
    for split in catbabi.SPLITS:
        (tmp_path / f"qa1_{split}.txt").write_text(WHERE[split])
        (tmp_path / f"qa8_lists-and-sets_{split}.txt").write_text(CARRIES[split])
    (tmp_path / "readme.txt").write_text("not a task")
    return tmp_path


def make(folder, **options):
    defaults = {"path": str(folder), "tasks": (1, 8), "length": 7, "vocab_size": 40}
    return CatBabi(**(defaults | options))


def words(task, tokens):
    return [task.corpus.words[t - 1] for t in tokens]


def test_stories(folder):
    stories = catbabi.read(folder / "qa1_train.txt")
    assert [len(story.asks) for story in stories] == [2, 1]
    assert " ".join(stories[0].words) == (
        "ada sailed to the harbour . where is ada ? harbour bo swam to the island . "
        "ada rowed to the island . where is ada ? island"
    )
    assert [stories[0].words[ask] for ask in stories[0].asks] == ["?", "?"]
    (carries,) = catbabi.read(folder / "qa8_lists-and-sets_train.txt")
    assert carries.words[-2:] == ("?", "lamp,rope")  # one answer, one word


def test_vocabulary_is_that_of_all_splits(folder):
    corpus = make(folder).corpus
    assert list(corpus.words) == sorted(set(corpus.words))
    assert {"ada", "lagoon", "lamp,rope", "?", ".", "carry"} <= set(corpus.words)
    assert not any(word != word.lower() for word in corpus.words)


def test_windows_of_an_epoch_hold_whole_stories_once(folder):
    task = make(folder)
    stream = task.corpus.streams["train"]
    size = len(stream.tokens) // 7
    want = sorted(" ".join(s.words) for name in ("qa1_train.txt", "qa8_lists-and-sets_train.txt")
                  for s in catbabi.read(folder / name))  # fmt: skip
    orders = set()
    for epoch in range(6):
        flat = words(task, catbabi._epoch(task, epoch).tokens)
        text = " ".join(flat)
        assert all(story in text for story in want)
        assert len(text) == len(" ".join(want))
        windows = [task.train_batch(epoch * size + i, 1)["tokens"] for i in range(size)]
        assert words(task, np.concatenate(windows).ravel()) == flat[: size * 7]
        orders.add(text)
    assert len(orders) > 1


@pytest.mark.parametrize("split", ["train", "valid", "test"])
def test_labels_are_the_answers_and_nothing_else(folder, split):
    task = make(folder, eval_split="test" if split == "test" else "valid")
    if split == "train":
        batch = task.train_batch(0, len(task.corpus.streams["train"].tokens) // 7)
    else:
        batch = task.eval_batch(7, 0, task.eval_size)
    tokens, labels = batch["tokens"].ravel(), batch["labels"].ravel()
    assert tokens.dtype == labels.dtype == np.int32
    ask = np.array(words(task, tokens)) == "?"
    np.testing.assert_array_equal(labels != -100, ask)
    inside = ask[:-1]  # the last window may end with a question mark
    np.testing.assert_array_equal(labels[:-1][inside], tokens[1:][inside])
    assert ask.any()


def test_batches_are_functions_of_seed_and_step(folder):
    task = make(folder)
    whole = task.train_batch(1, 6)["tokens"]  # spans epochs
    np.testing.assert_array_equal(whole, make(folder).train_batch(1, 6)["tokens"])
    np.testing.assert_array_equal(whole[:3], task.train_batch(2, 3)["tokens"])
    other = [make(folder, seed=s).train_batch(0, 7)["tokens"] for s in range(4)]
    assert any((o != other[0]).any() for o in other)
    evaluations = [make(folder, seed=s).eval_batch(7, 0, 2)["tokens"] for s in range(4)]
    assert all((e == evaluations[0]).all() for e in evaluations)
    np.testing.assert_array_equal(evaluations[0][1:], task.eval_batch(7, 1, 1)["tokens"])


def test_score(folder):
    task = make(folder, eval_split="test", length=5)
    assert isinstance(task, Scored)
    batch = task.eval_batch(5, 0, task.eval_size)
    asked = batch["labels"] != -100
    assert asked.sum() == 3
    names = {task.corpus.words[label - 1] for label in batch["labels"][asked]}
    assert names == {"lagoon", "island", "lamp"}
    correct = asked & (batch["labels"] == task.corpus.words.index("lamp") + 1)
    score = task.score({"correct": correct})
    assert score["qa_accuracy"] == pytest.approx(1 / 3)
    assert score["task_accuracy"] == {"1": 0.0, "8": 1.0}
    assert score["chance"] == 1 / 4  # harbour, island, lagoon, "lamp,rope" in training
    assert score["majority_accuracy"] in (0, 1 / 3)


def test_identity(folder):
    task = make(folder, seed=4)
    train, evaluation = task.identity("train"), task.identity("eval")
    assert (train["stories"], train["questions"], train["seed"]) == (3, 4, 4)
    assert (evaluation["split"], evaluation["stories"]) == ("valid", 2)
    assert train["sha256"] != evaluation["sha256"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no stories; expected the folder en-valid-10k"),
        ("\n\n", "has no stories"),
        ("1 Ada slept.\n2 Where is Ad", r":2: expected a sentence ending in '\.', or a question"),
        ("1 Ada slept.\n2 Where is Ada?", ":2: expected a sentence ending"),
        ("1 Ada slept.\n2 Where is Ada?\t\t1", ":2: expected a sentence ending"),
        ("1 Ada slept.\n2 Bo slept.\n", ":2: the story does not end with a question: cut short"),
        ("1 Ada slept.\n1 Bo slept.\n2 Where is Bo?\tbed\t1\n", ":1: the story does not end"),
        ("1 Ada slept.\n3 Where is Ada?\tbed\t1\n", ":2: expected a line that begins with the "
         "number 2 or 1, got '3 Where is Ada"),
        ("Ada slept.\n", ":1: expected a line that begins with the number 1, got 'Ada slept"),
        ('{"story": 1}', ":1: expected a line that begins with the number 1"),
    ],
)  # fmt: skip
def test_files_of_another_form(folder, text, message):
    (folder / "qa1_train.txt").write_text(text)
    with pytest.raises(ValueError, match=message) as error:
        make(folder)
    assert str(folder / "qa1_train.txt") in str(error.value)


def test_unreadable_files(folder):
    (folder / "qa1_valid.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match=r"qa1_valid.txt cannot be read: .*en-valid-10k"):
        make(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"path": ""}, "task.path is empty; expected the folder en-valid-10k of bAbI v1.2"),
        ({"path": "nowhere"}, "task.path='nowhere' is not a folder; expected .* unpack tasks_1-20"),
        ({"tasks": (1, 2)}, "has no file qa2_train.txt; expected"),
        ({"tasks": (0,)}, r"task.tasks must be different numbers from 1 to 20, got \(0,\)"),
        ({"tasks": (1, 1)}, "different numbers"),
        ({"tasks": ()}, "different numbers"),
        ({"eval_split": "dev"}, "task.eval_split must be valid or test, got 'dev'"),
        ({"length": 0}, "task.length must be at least 1"),
        ({"length": 24}, "23 tokens in its valid files, less than one window of task.length=24"),
        ({"vocab_size": 9}, "task.vocab_size and model.vocab_size must be at least 2"),
    ],
)
def test_bad_options(folder, change, message):
    section = {"name": "catbabi", "path": str(folder), "tasks": (1, 8), "length": 7}
    with pytest.raises(UserError, match=message):
        build(section | change, seed=0)


def test_two_files_of_one_task_and_another_length(folder):
    with pytest.raises(ValueError, match=r"windows have task.length=7 tokens, not 8"):
        make(folder).eval_batch(8, 0, 1)
    catbabi.load.cache_clear()
    (folder / "qa1_where_train.txt").write_text(WHERE["train"])
    with pytest.raises(ValueError, match=r"has 2 files qa1_train.txt"):
        make(folder)


def told_so(lines):
    """Answers of a made-up story, from its sentences alone."""
    place, holder, lies = {}, {}, {}
    for line in lines:
        text = line.split(" ", 1)[1].split("\t")[0].strip()
        if match := re.fullmatch(r"(\w+) (?:walked|sailed|hurried) to the (\w+)\.", text):
            place[match[1]] = match[2]
        elif match := re.fullmatch(r"(\w+) took the (\w+)\.", text):
            assert match[2] not in holder
            assert lies.pop(match[2], place[match[1]]) == place[match[1]]
            holder[match[2]] = match[1]
        elif match := re.fullmatch(r"(\w+) put down the (\w+)\.", text):
            assert holder.pop(match[2]) == match[1]
            lies[match[2]] = place[match[1]]
        elif match := re.fullmatch(r"Where is (\w+)\?", text):
            yield place[match[1]]
        elif match := re.fullmatch(r"Where is the (\w+)\?", text):
            yield place[holder[match[1]]] if match[1] in holder else lies[match[1]]
        else:
            match = re.fullmatch(r"Is (\w+) in the (\w+)\?", text)
            yield "yes" if place[match[1]] == match[2] else "no"


@pytest.mark.parametrize("kind", make_babi.KINDS)
def test_made_up_stories_are_consistent(kind):
    rng = np.random.default_rng(kind)
    for _ in range(100):
        lines = make_babi.story(kind, rng)
        answers = [line.split("\t")[1] for line in lines if "\t" in line]
        assert answers == list(told_so(lines))
        assert len(answers) == 5
        for number, line in enumerate(lines, 1):
            assert line.startswith(f"{number} ")
            if "\t" in line:  # the lines that an answer follows from come before it
                assert all(1 <= int(n) < number for n in line.split("\t")[2].split())


def test_made_up_stories_are_files_of_this_format(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["make_babi", f"--out={tmp_path}", "--train=9", "--test=4"])
    assert make_babi.main() == 0
    task = make(tmp_path, tasks=make_babi.KINDS, length=50)
    assert task.identity("train")["stories"] == 27
    assert task.identity("eval")["questions"] == 3 * 4 * 5
    assert {"yes", "no", "kettle"} <= set(task.corpus.words)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--train=0",), "--train=0, allowed: at least 1"),
        (("--test=-1",), "--test=-1, allowed: at least 1"),
        (("--seed=-1",), "--seed=-1, allowed: at least 0"),
        (("--trian=3",), "did you mean '--train'"),
        (("--train=1", "--test=1"), "file cannot be written: "),
    ],
)
def test_made_up_stories_that_cannot_be_written(options, message, tmp_path, capsys):
    (tmp_path / "file").touch()
    assert make_babi.main([f"--out={tmp_path / 'file'}", *options]) == 2
    error = capsys.readouterr().err.strip()
    assert message in error
    assert len(error.splitlines()) == 1
