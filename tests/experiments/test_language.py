import io

import jax
import numpy as np
import pytest
from rich.console import Console

import fpr
from experiments import config as configs
from experiments.context import Run
from experiments.errors import UserError
from experiments.evaluate import Evaluator
from experiments.progress import Progress
from experiments.tasks import Scored, build
from experiments.tasks.language import Language, open_tokens

TEXT = bytes(range(256)) * 4  # every byte, so that a shift by one would show


@pytest.fixture
def text_file(tmp_path):
    file = tmp_path / "a.txt"
    file.write_bytes(TEXT)
    return file


@pytest.mark.parametrize("kind", ["text", "uint16", "uint32", "npy"])
def test_windows_of_every_format(tmp_path, text_file, kind):
    ids = np.frombuffer(TEXT, np.uint8).astype(np.int64)
    options = {}
    file = text_file
    if kind == "npy":
        ids = ids * 3
        file = tmp_path / "a.npy"
        np.save(file, ids.astype(np.uint32))
    elif kind != "text":
        ids = ids * (3 if kind == "uint16" else 400)
        file = tmp_path / "a.bin"
        file.write_bytes(ids.astype(np.dtype(kind).newbyteorder("<")).tobytes())
        options = {"dtype": kind}
    task = Language(path=str(file), length=10, vocab_size=int(ids.max()) + 2, **options)
    assert isinstance(task._parts["train"], np.memmap)
    cut = 1024 - 103  # a tenth, rounded up, is kept
    assert task.eval_size == 102 // 10
    evaluation = task.eval_batch(10, 0, 99)
    assert evaluation["tokens"].dtype == evaluation["labels"].dtype == np.int32
    assert len(evaluation["tokens"]) == task.eval_size
    np.testing.assert_array_equal(evaluation["tokens"].ravel(), ids[cut : cut + 100] + 1)
    np.testing.assert_array_equal(evaluation["labels"].ravel(), ids[cut + 1 : cut + 101] + 1)
    train = task.train_batch(0, (cut - 1) // 10)
    assert len(train["tokens"]) == 92
    seen = {tuple(row) for row in train["tokens"].tolist()}
    whole = ids[: (cut - 1) // 10 * 10] + 1
    assert seen == {tuple(row) for row in whole.reshape(-1, 10).tolist()}
    for tokens, labels in zip(train["tokens"], train["labels"]):
        np.testing.assert_array_equal(tokens[1:], labels[:-1])


def test_batches_are_functions_of_seed_and_step(text_file):
    task = Language(path=str(text_file), length=10)
    whole = task.train_batch(20, 8)["tokens"]  # crosses into the second epoch
    np.testing.assert_array_equal(whole[4:], task.train_batch(41, 4)["tokens"])
    other = Language(path=str(text_file), length=10, seed=1).train_batch(20, 8)["tokens"]
    assert (whole != other).any()


def test_a_validation_file_of_its_own(tmp_path, text_file):
    other = tmp_path / "b.txt"
    other.write_bytes(b"abcdefghij" * 3)
    task = Language(path=str(text_file), eval_path=str(other), length=9)
    assert task.eval_size == 3
    assert bytes((task.eval_batch(9, 0, 1)["tokens"][0] - 1).tolist()) == b"abcdefghi"
    assert len(task._parts["train"]) == 1024
    assert task.identity("eval")["file"] == "b.txt"
    assert task.identity("train")["tokens"] == 1024


def test_identity_sees_both_ends(tmp_path):
    file, hashes = tmp_path / "big.txt", set()
    content = bytearray(3 * 2**20)
    for at in (None, 0, 2**20 + 5, 3 * 2**20 - 1):
        if at is not None:
            content[at] ^= 1
        file.write_bytes(content)
        hashes.add(Language(path=str(file)).identity("train")["sha256_of_both_ends"])
    assert len(hashes) == 3  # the middle does not count


def test_score(text_file):
    task = Language(path=str(text_file), length=10)
    assert isinstance(task, Scored)
    nll = 10 * np.log([4.0, 16.0])
    outcome = {"nll": nll, "layer_steps": np.array([[3, 5], [5, 9]])}
    score = task.score(outcome)
    assert score.pop("solver_steps_by_layer") == [4, 7]
    want = {"nats_per_token": np.log(8), "perplexity": 8, "perplexity_chance": 256}
    assert score == pytest.approx(want)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.bin", b"", "it is empty; expected a text file"),
        ("a.txt", b"", "it is empty"),
        ("a.bin", b"abc", "its 3 bytes are not a whole number of uint16 values: cut short"),
        ("a.npy", b"no array", "cannot be read"),
        ("a.npy", np.zeros((3, 4), np.uint16), r"shape \(3, 4\) and type uint16"),
        ("a.npy", np.zeros(9, np.int64), r"shape \(9,\) and type int64; expected"),
        ("a.npy", np.array([{}], object), "cannot be read"),
    ],
)
def test_files_of_another_format(tmp_path, name, content, message):
    file = tmp_path / name
    if isinstance(content, bytes):
        file.write_bytes(content)
    else:
        np.save(file, content)
    with pytest.raises(ValueError, match=message) as error:
        open_tokens(file, "uint16")
    assert str(file) in str(error.value)


def test_a_cut_npy_file(tmp_path):
    np.save(tmp_path / "a.npy", np.zeros(1000, np.uint16))
    whole = (tmp_path / "a.npy").read_bytes()
    (tmp_path / "a.npy").write_bytes(whole[:-500])
    with pytest.raises(ValueError, match=r"a.npy cannot be read"):
        open_tokens(tmp_path / "a.npy", "uint16")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"path": ""}, "task.path is empty; expected a text file"),
        ({"path": "nowhere.bin"}, "nowhere.bin is not a file; expected"),
        ({"eval_path": "nowhere.txt"}, "nowhere.txt is not a file"),
        ({"dtype": "int8"}, "task.dtype must be uint16 or uint32, got 'int8'"),
        ({"length": 0}, "task.length must be at least 1, got 0"),
        ({"length": 103}, r"eval part of .*a.txt has 103 tokens, but .* task.length\+1 = 104"),
        ({"eval_fraction": 1.0}, "task.eval_fraction must be between 0 and 1, got 1.0"),
        ({"vocab_size": 1}, "task.vocab_size must be at least 2, got 1"),
        ({"vocab_size": 50}, "has the token id .*, but task.vocab_size=50 allows ids up to 48"),
    ],
)
def test_bad_options(text_file, change, message):
    section = {"name": "language", "path": str(text_file), "length": 100}
    with pytest.raises(UserError, match=message):
        build(section | change, seed=0)


def test_another_length_is_refused(text_file):
    with pytest.raises(ValueError, match=r"task.length=10 tokens, not 20"):
        Language(path=str(text_file), length=10).eval_batch(20, 0, 1)


def test_perplexity_of_a_model(tmp_path, text_file):
    config = configs.complete(
        {
            "model": {
                "name": "mamba", "vocab_size": 257, "seq_len": 6, "hidden_size": 8, "state_size": 2,
            },
            "task": {"name": "language", "path": str(text_file), "length": 6},
            "eval": {"lengths": (6,), "max_examples": 5, "batch_size": 2},
        }
    )  # fmt: skip
    run = Run(config, configs.validate(config), tmp_path, Progress(Console(file=io.StringIO())))
    batch = run.task.eval_batch(6, 0, 5)
    params = fpr.init(config["model"], jax.random.key(0), batch)
    result = Evaluator(run)(params)[6]
    logits = np.asarray(fpr.apply(config["model"], params, batch).logits, np.float64)
    total = np.log(np.exp(logits).sum(axis=-1))
    nll = total - np.take_along_axis(logits, batch["labels"][..., None], axis=-1)[..., 0]
    assert result["perplexity"] == pytest.approx(np.exp(nll.mean()), rel=1e-5)
    assert result["perplexity_chance"] == 256
    assert result["solver_steps_by_layer"] == []
