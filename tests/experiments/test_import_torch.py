"""State dicts with the authors' names and the golden arrays' block weights, in both formats."""

import dataclasses
import hashlib
import json
import os
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fpr
from experiments import config as configs
from experiments import import_torch, run, torch_files
from fpr.models import fprm, trm
from fpr.registry import flatten
from tests.experiments import torch_zip

safetensors = pytest.importorskip("safetensors.numpy")
ROOT = pathlib.Path(__file__).resolve().parents[2]
GOLDEN = pathlib.Path(os.environ.get("FPR_GOLDEN", ROOT.parent / "shared" / "golden"))
D, PUZZLES = 32, 3
RNG = np.random.default_rng(0)
SUDOKU = f"--config={configs.CONFIG_DIR / 'sudoku.py'}:fprm"


def random(*shape):
    return RNG.normal(size=shape).astype(np.float32)


def ends(vocab=11):
    """What is outside of the networks."""
    return {
        "embed_tokens.embedding_weight": random(vocab, D),
        "lm_head.weight": random(vocab, D),
        "q_head.weight": random(2, D),
        "q_head.bias": random(2),
        "puzzle_emb.weights": random(PUZZLES, D),
        "rotary_emb.cos_cached": random(25, 8),
        "rotary_emb.sin_cached": random(25, 8),
    }


def network(layers=2, inner=256):
    found = {}
    for i in range(layers):
        found |= {
            f"layers.{i}.self_attn.qkv_proj.weight": random(3 * D, D),
            f"layers.{i}.self_attn.o_proj.weight": random(D, D),
            f"layers.{i}.mlp.gate_up_proj.weight": random(2 * inner, D),
            f"layers.{i}.mlp.down_proj.weight": random(D, inner),
        }
    return found


def under(prefix, tensors):
    return {prefix + name: value for name, value in tensors.items()}


def command(checkpoint, workdir, model, *more):
    flags = [f"--model={model}", f"--checkpoint={checkpoint}", f"--workdir={workdir}"]
    return import_torch.main(["import_torch", *flags, *more])


def golden(name):
    file = GOLDEN / f"{name}.npz"
    if not file.exists():
        pytest.skip(f"waits for reference arrays: {file} is not there; set FPR_GOLDEN")
    with np.load(file) as arrays:
        arrays = dict(arrays)
    weights = {k.removeprefix("param/"): v for k, v in arrays.items() if k.startswith("param/")}
    return arrays, weights, json.loads(str(arrays["config"]))


def options_of(config):
    """Flags for what a state dict does not say."""
    temperature, eps = config["softmax_temp"], config["rms_norm_eps"]
    return [
        f"--config.model.num_heads={config['num_heads']}",
        f"--config.model.causal={config['causal']}",
        f"--config.model.rope={config['rope']}",
        f"--config.model.softmax_temp={temperature}",
        f"--config.model.norm_eps={eps}",
        f"--config.model.norm_type={config['norm_type'].removesuffix('-norm')}",
        f"--config.model.norm_placement={config['norm_placement']}",
        f"--config.model.normalize_input={config['normalize_input_injection']}",
        f"--config.model.num_registers={config['puzzle_emb_len']}",
        f"--config.model.seq_len={config['seq_len']}",
        "--config.model.dtype=float32",
    ]


@pytest.mark.parametrize("file", ["x.pt", "x.safetensors"])
@pytest.mark.parametrize(
    "name",
    [
        "fprm_block_pre_conv2d_rope",
        "fprm_block_peri_input_dependent",
        "fprm_block_outer_only",
        "fprm_block_mlp_t",
    ],
)
def test_an_imported_fprm_computes_the_golden_outputs(tmp_path, monkeypatch, capsys, name, file):
    arrays, weights, config = golden(name)
    tensors = under("_orig_mod.model.inner.", ends() | under("L_level.", weights))
    if file.endswith(".pt"):
        torch_zip.save(tmp_path / file, tensors, monkeypatch)
    else:
        safetensors.save_file(tensors, tmp_path / file)
    workdir = tmp_path / "run"
    assert command(tmp_path / file, workdir, "fprm", SUDOKU, *options_of(config)) == 0
    out = capsys.readouterr().out
    assert "imported" in out
    assert "rotary_emb.cos_cached" in out

    model, params = fpr.load(workdir)
    assert model["name"] == "fprm"
    layer = fprm.FPRMLayer(fpr.build(model).config)
    variables = {"params": params["layers_0"]}

    def step(z, x):
        x = layer.apply(variables, x, method="inject")
        return layer.apply(variables, x, z, method="step")

    ours = jax.jit(step)(arrays["z"], arrays["x"])
    scale = np.abs(arrays["out"]).max()
    assert np.abs(ours - arrays["out"]).max() < 1e-5 * scale

    embedded = (
        model["hidden_size"] ** 0.5 * tensors["_orig_mod.model.inner.embed_tokens.embedding_weight"]
    )
    tokens = jnp.ones((2, config["seq_len"]), jnp.int32)
    batch = {"tokens": tokens, "puzzle_ids": jnp.array([0, 2])}
    h = fpr.build(model).apply({"params": params}, batch, method="embed")
    np.testing.assert_allclose(h[0, -1], embedded[1], rtol=1e-5)
    assert not h[:, 1 : config["puzzle_emb_len"]].any()
    assert h[1, 0].any()


def test_ema_weights_buffers_and_other_types(tmp_path, monkeypatch, capsys):
    plain = ends() | under("L_level.", network()) | {"L_level.alpha_2_param": random(D)}
    plain |= {"L_level.alpha_1_param": random(D), "L_level.conv.weight": random(D, 1, 3, 3)}
    buffers = {"puzzle_emb.local_weights": random(4, D), "attn_mask": np.ones((3, 3), bool)}
    ema = {k: v + 1 for k, v in plain.items() if k != "puzzle_emb.weights" and "cached" not in k}
    wide = {k: torch_zip.bfloat16(v) if v.ndim == 2 else v for k, v in (plain | buffers).items()}
    content = {
        "model": under("_orig_mod.model.inner.", wide),
        "ema_helper": under("_orig_mod.model.inner.", ema),
        "optimizers": [{"state": {0: {"exp_avg": random(2)}}, "param_groups": [{"lr": 0.1}]}],
        "step": 5,
    }
    torch_zip.save(tmp_path / "x.pth", content, monkeypatch)
    flags = ["--config.model.num_heads=4", "--config.model.num_registers=2"]
    for weights in ("ema", "model"):
        more = (*flags, f"--weights={weights}")
        assert command(tmp_path / "x.pth", tmp_path / weights, "fprm", *more) == 0
        told = json.loads((tmp_path / weights / "imported.json").read_text())
        assert (told["file"], told["weights"]) == ("x.pth", weights)
        config = json.loads((tmp_path / weights / "config.json").read_text())
        assert (config["ema"] > 0) == (weights == "ema")
    assert "attn_mask" in capsys.readouterr().out
    averaged, plain_ = (fpr.load(tmp_path / weights)[1] for weights in ("ema", "model"))
    kernel = np.asarray(plain_["lm_head"]["kernel"])
    assert kernel.dtype == np.float32
    np.testing.assert_allclose(kernel, plain["lm_head.weight"].T, rtol=1e-2)
    np.testing.assert_allclose(averaged["lm_head"]["kernel"], plain["lm_head.weight"].T + 1, 1e-6)
    # The average has no row of puzzle embeddings: it is a buffer, kept from the model.
    np.testing.assert_array_equal(averaged["puzzle_embedding"], plain_["puzzle_embedding"])


@pytest.mark.parametrize("prefix", ["model.inner.", "module._orig_mod.model.inner."])
@pytest.mark.parametrize("model", ["trm", "hrm"])
def test_baselines(tmp_path, model, prefix):
    tensors = ends() | under("L_level.", network()) | {"H_init": random(D), "L_init": random(D)}
    if model == "hrm":
        tensors |= under("H_level.", network())
    safetensors.save_file(under(prefix, tensors), tmp_path / "x.safetensors")
    flags = ["--config.model.num_heads=4", "--config.model.num_registers=2"]
    assert command(tmp_path / "x.safetensors", tmp_path / "run", model, SUDOKU, *flags) == 0
    config, params = fpr.load(tmp_path / "run")
    flat = flatten(params)
    start = np.stack([tensors["H_init"], tensors["L_init"]])
    np.testing.assert_array_equal(flat["layers_0/start"], start)
    net = "net" if model == "trm" else "low_net"
    np.testing.assert_array_equal(
        flat[f"layers_0/{net}/mlps_1/down_proj/kernel"],
        tensors["L_level.layers.1.mlp.down_proj.weight"].T,
    )
    if model == "hrm":
        np.testing.assert_array_equal(
            flat["layers_0/high_net/mlps_0/down_proj/kernel"],
            tensors["H_level.layers.0.mlp.down_proj.weight"].T,
        )
    out = jax.eval_shape(
        lambda p: fpr.apply(config, p, {"tokens": jnp.ones((1, 81), jnp.int32)}), params
    )
    assert out.logits.shape == (1, 81, 11)


def test_mlp_over_positions_tells_the_length(tmp_path):
    assert trm.TRMConfig(vocab_size=2, seq_len=3, mlp_t=True).mlp_t
    tensors = ends() | under("L_level.", network(layers=1))
    for name in list(tensors):
        if "self_attn" in name:
            del tensors[name]
    positions = 9 + 2
    tensors |= {
        "L_level.layers.0.mlp_t.gate_up_proj.weight": random(512, positions),
        "L_level.layers.0.mlp_t.down_proj.weight": random(positions, 256),
        "H_init": random(D),
        "L_init": random(D),
    }
    mapped = import_torch.map_names("trm", tensors)
    flags = ["--config.model.num_registers=2", "--config.model.num_heads=4"]
    overrides = run.read_overrides(flags)
    config = import_torch.make_config("trm", mapped, "", overrides, [*flags])
    assert config["model"]["mlp_t"]
    # The registers of the paper's config are 16; with 2, the length has to be given.
    assert config["model"]["seq_len"] == positions - 16


@pytest.fixture
def good():
    return ends() | under("L_level.", network()) | {"H_init": random(D), "L_init": random(D)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q_head.bias": None}, "the checkpoint lacks: q_head/bias"),
        ({"embed_pos.embedding_weight": (97, D)}, "no place for: embed_pos.embedding_weight"),
        ({"L_level.norm.weight": (D,)}, "no place for: L_level.norm.weight"),
        ({"lm_head.weight": (11, 7)}, r"lm_head/kernel has shape \(7, 11\), the model needs"),
        ({"embed_tokens.embedding_weight": None}, "not a state dict of trm.*H_init"),
        (
            {"embed_tokens.embedding_weight": (50, D)},
            "no config is known for trm with a vocabulary of 50",
        ),
        ({"H_level.layers.0.mlp.down_proj.weight": (D, 256)}, "is it --model=hrm"),
    ],
)
def test_an_unknown_layout_is_refused_by_name(tmp_path, capsys, good, change, message):
    for name, shape in change.items():
        if shape is None:
            del good[name]
        else:
            good[name] = random(*shape)
    safetensors.save_file(good, tmp_path / "x.safetensors")
    flags = ["--config.model.num_heads=4", "--config.model.num_registers=2"]
    code = command(tmp_path / "x.safetensors", tmp_path / "run", "trm", *flags)
    assert code == 2
    error = capsys.readouterr().err.strip()
    assert len(error.splitlines()) == 1
    assert re.search(message, error), error
    assert not (tmp_path / "run").exists()


def test_a_fixed_start_of_fprm_is_named_and_left_out(tmp_path, capsys, good):
    safetensors.save_file(good, tmp_path / "x.safetensors")
    flags = ["--config.model.num_heads=4", "--config.model.num_registers=2"]
    flags += ["--config.model.residual_scale=none", "--config.model.conv=none"]
    assert command(tmp_path / "x.safetensors", tmp_path / "run", "fprm", *flags) == 0
    out = capsys.readouterr().out
    assert "a fixed start of FPRM is not imported (H_init, L_init)" in out
    assert "--config.model.z0=fixed starts from H_init" in out
    assert "layers_0/start" not in flatten(fpr.load(tmp_path / "run")[1])


def test_one_start_is_the_single_state_variant(tmp_path, good):
    del good["L_init"]
    safetensors.save_file(good, tmp_path / "x.safetensors")
    flags = ["--config.model.num_heads=4", "--config.model.num_registers=2"]
    assert command(tmp_path / "x.safetensors", tmp_path / "run", "trm", *flags) == 0
    assert fpr.load(tmp_path / "run")[0]["num_levels"] == 0


@pytest.mark.parametrize("with_conv", [False, True])
@pytest.mark.parametrize(("vocab", "group"), [(61, "A5"), (121, "S5")])
def test_state_tracking_takes_the_baselines_own_config(tmp_path, capsys, with_conv, vocab, group):
    tensors = {k: v for k, v in ends(vocab).items() if k != "puzzle_emb.weights"}
    block = network() | ({"conv.weight": random(D, 1, 4)} if with_conv else {})
    tensors |= under("L_level.", block) | {"H_init": random(D), "L_init": random(D)}
    safetensors.save_file(tensors, tmp_path / "x.safetensors")
    workdir, flag = tmp_path / "run", "--config.model.num_heads=4"
    assert command(tmp_path / "x.safetensors", workdir, "trm", flag) == 0
    config = json.loads((workdir / "config.json").read_text())
    model, own = config["model"], "trm_conv" if with_conv else "trm"
    ours = configs.load(
        f"{configs.CONFIG_DIR / 'state_tracking.py'}:{own}_{group.lower()}_paper"
    )  # fmt: skip
    assert config["task"] == ours["task"]
    assert (config["task"]["group"], model["h_cycles"], model["l_cycles"]) == (group, 2, 4)
    assert (model["causal"], model["rope"], model["num_registers"]) == (True, False, 0)
    assert model["conv"] == ("conv1d" if with_conv else "none")
    assert model["solver"] == ours["model"]["solver"]
    assert config["q_loss_weight"] == 0.5
    out = capsys.readouterr().out
    assumed = "--config.model.num_registers=0 --config.model.h_cycles=2 --config.model.l_cycles=4\n"
    assert f"assumed, as no array shows it: {assumed}" in out
    assert out.endswith("--mode=eval\n")  # the task has no path


@pytest.mark.parametrize("puzzles", [True, False])
def test_hrm_has_one_token_of_puzzle_embedding(tmp_path, capsys, good, puzzles):
    good |= under("H_level.", network())
    if not puzzles:
        del good["puzzle_emb.weights"]
    safetensors.save_file(good, tmp_path / "x.safetensors")
    flag = "--config.model.num_heads=4"
    assert command(tmp_path / "x.safetensors", tmp_path / "run", "hrm", flag) == 0
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["model"]["num_registers"] == int(puzzles)
    assert (config["model"]["h_cycles"], config["q_loss_weight"]) == (2, 0.5)
    out = capsys.readouterr().out
    assert f"--config.model.num_registers={int(puzzles)} --config.model.h_cycles=2" in out
    assert out.endswith("--config.task.path=DATA\n")

    good["embed_tokens.embedding_weight"] = random(61, D)
    safetensors.save_file(good, tmp_path / "y.safetensors")
    assert command(tmp_path / "y.safetensors", tmp_path / "other", "hrm", flag) == 2
    assert "no config is known for hrm with a vocabulary of 61" in capsys.readouterr().err


@pytest.mark.parametrize("model", ["trm", "hrm"])
def test_the_baselines_compute_the_golden_outputs(tmp_path, model):
    """The arrays of a post-norm block without scales, which is the network of both."""
    arrays, weights, config = golden("fprm_block_post_plain")
    networks = ("L_level.", "H_level.") if model == "hrm" else ("L_level.",)
    tensors = ends() | {"H_init": random(D), "L_init": random(D)}
    for prefix in networks:
        tensors |= under(prefix, weights)
    safetensors.save_file(under("module.model.inner.", tensors), tmp_path / "x.safetensors")
    flags = options_of(config)
    assert command(tmp_path / "x.safetensors", tmp_path / "run", model, *flags) == 0
    options, params = fpr.load(tmp_path / "run")
    net = fprm.FPRMLayer(dataclasses.replace(fpr.build(options).config, z0="random"))
    names = ("low_net", "high_net") if model == "hrm" else ("net",)
    assert set(params["layers_0"]) == {*names, "start"}
    for name in names:
        held = {"params": params["layers_0"][name]}
        ours = net.apply(held, arrays["x"], arrays["z"], method="step")
        assert np.abs(ours - arrays["out"]).max() < 1e-5 * np.abs(arrays["out"]).max()


@pytest.mark.parametrize(
    ("model", "tensors", "message"),
    [
        (
            "fprm",
            lambda good: under("encoder.", network()) | under("decoder.", network()),
            "fprm has one network, found 2: decoder.layers and encoder.layers",
        ),
        (
            "trm",
            lambda good: under("L_level.", network()) | under("other.", network()),
            "trm has one network, found 2: L_level.layers and other.layers",
        ),
        (
            "trm",
            lambda good: good | {"module.lm_head.weight": random(11, D)},
            "lm_head.weight and module.lm_head.weight are both lm_head.weight",
        ),
    ],
    ids=["encoder and decoder", "a second network", "two names"],
)
def test_two_arrays_never_share_a_place(tmp_path, capsys, good, model, tensors, message):
    ours = {k: v for k, v in good.items() if not k.startswith("L_level.")}
    safetensors.save_file(ours | tensors(good), tmp_path / "x.safetensors")
    assert command(tmp_path / "x.safetensors", tmp_path / "run", model) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


AVERAGES = {
    "nested": lambda plain, ema: {"model": plain, "ema": {"module": ema}},
    "deep": lambda plain, ema: {"model": plain, "ema": {"decay": 0.9, "shadow": {"model": ema}}},
    "beside": lambda plain, ema: {"model": plain, "shadow": ema},
    "counted": lambda plain, ema: {
        "model": plain, "ema": under("module.", ema) | {"n_averaged": np.array(7)},
    },
    "alone": lambda plain, ema: under("module.", ema) | {"n_averaged": np.array(7)},
}  # fmt: skip


@pytest.mark.parametrize("form", AVERAGES)
def test_an_average_is_found_wherever_it_lies(tmp_path, monkeypatch, good, form):
    ema = {name: value + 1 for name, value in good.items()}
    torch_zip.save(tmp_path / "x.pt", AVERAGES[form](good, ema), monkeypatch)
    held = torch_files.read(tmp_path / "x.pt")
    tensors, kind = torch_files.state_dict(held, "ema", tmp_path)
    assert kind == "ema"
    assert set(tensors) == set(good)
    np.testing.assert_array_equal(tensors["H_init"], ema["H_init"])
    if form != "alone":
        tensors, kind = torch_files.state_dict(held, "model", tmp_path)
        assert kind == "model" or kind == "unnamed"
        np.testing.assert_array_equal(tensors["H_init"], good["H_init"])


def test_an_average_that_cannot_be_read_is_no_reason_for_other_weights(tmp_path, good):
    for held in ([np.ones(3)], {"shadow_params": [np.ones(3)]}):
        with pytest.raises(ValueError, match=r"averaged weights under 'ema'.*--weights=model"):
            torch_files.state_dict({"model": good, "ema": held}, "ema", tmp_path)
        assert torch_files.state_dict({"model": good, "ema": held}, "model", tmp_path)[0]
    for held in (None, False, 0.999, {}):  # an option, or nothing
        kind = torch_files.state_dict({"model": good, "ema": held}, "ema", tmp_path)[1]
        assert kind == "unnamed"


def test_a_fixed_start_of_fprm_is_used_where_it_is_one(tmp_path, capsys, good):
    flags = ["--config.model.num_heads=4", "--config.model.residual_scale=none"]
    safetensors.save_file(good, tmp_path / "x.safetensors")
    more = [*flags, "--config.model.z0=fixed"]
    assert command(tmp_path / "x.safetensors", tmp_path / "asked", "fprm", *more) == 0
    assert "not imported (L_init)" in capsys.readouterr().out
    config, params = fpr.load(tmp_path / "asked")
    np.testing.assert_array_equal(params["layers_0"]["start"], good["H_init"])

    # The released optimiser holds a vector where, and only where, its start is fixed.
    named = {k: v for k, v in good.items() if not k.endswith("_init")}
    named["L_optimizer.init_vec"] = random(D)
    safetensors.save_file(named, tmp_path / "y.safetensors")
    assert command(tmp_path / "y.safetensors", tmp_path / "named", "fprm", *flags) == 0
    config, params = fpr.load(tmp_path / "named")
    assert config["z0"] == "fixed"
    batch = {"tokens": jnp.ones((1, 81), jnp.int32)}
    z = fpr.apply(config, params, batch, key=jax.random.key(0), max_steps=0).state[0].z
    np.testing.assert_array_equal(z[0, 5], named["L_optimizer.init_vec"])


def test_a_value_of_the_wrong_type_is_one_line(tmp_path, capsys, good):
    safetensors.save_file(good, tmp_path / "x.safetensors")
    flag = "--config.model.num_heads=abc"
    assert command(tmp_path / "x.safetensors", tmp_path / "run", "trm", flag) == 2
    error = capsys.readouterr().err.strip()
    assert len(error.splitlines()) == 1
    assert "config.model.num_heads" in error


def test_mistakes_in_the_command(tmp_path, capsys, good):
    assert command("x", tmp_path / "run", "fpm") == 2
    assert "unknown --model 'fpm'; did you mean 'fprm'" in capsys.readouterr().err
    assert import_torch.main(["import_torch", "--model=trm", "--workdir=x"]) == 2
    assert "--checkpoint is missing; usage:" in capsys.readouterr().err
    assert import_torch.main(["import_torch", "--help"]) == 0
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("mine")
    safetensors.save_file(good, tmp_path / "x.safetensors")
    assert command(tmp_path / "x.safetensors", tmp_path / "full", "trm") == 2
    assert "is not empty" in capsys.readouterr().err


def test_a_file_without_a_state_dict(tmp_path, monkeypatch, capsys):
    torch_zip.save(tmp_path / "x.pt", {"epoch": 3, "weights": [1, 2]}, monkeypatch)
    assert command(tmp_path / "x.pt", tmp_path / "run", "trm") == 2
    assert "has no state dict; it holds epoch, weights" in capsys.readouterr().err


def test_an_imported_run_can_be_evaluated(tmp_path, capsys, fast_compile):
    block = network() | {"conv.weight": random(D, 1, 3, 3)}
    block |= {"alpha_1_param": random(D), "alpha_2_param": random(D)}
    tensors = {k: v for k, v in ends(vocab=6).items() if k != "puzzle_emb.weights"}
    tensors |= under("L_level.", block)
    safetensors.save_file(under("model.inner.", tensors), tmp_path / "x.safetensors")
    workdir = tmp_path / "run"
    flags = ["--config.model.solver.eval.max_steps=4", "--config.eval.max_examples=4"]
    cpu4 = f"--config={configs.CONFIG_DIR / 'sudoku.py'}:cpu4"
    assert command(tmp_path / "x.safetensors", workdir, "fprm", cpu4, *flags) == 0
    spec = [f"--config={workdir / 'config.py'}", f"--workdir={workdir}", "--mode=eval"]
    assert run.main(["run", *spec]) == 0
    result = json.loads((workdir / "result.json").read_text())
    assert result["examples"] == {"16": 4}
    assert result["data"]["eval"]["file"] == "sudoku4.csv.gz"
    assert result["data"]["train"] is None
    # One set of weights in the file: nothing says whether it is an average.
    digest = hashlib.sha256((tmp_path / "x.safetensors").read_bytes()).hexdigest()
    assert result["imported"] == {
        "file": "x.safetensors", "sha256": digest, "weights": "unnamed",
    }  # fmt: skip
    assert result["weights"] == "the only ones in the imported file"
    assert json.loads((workdir / "config.json").read_text())["ema"] == 0.0
    printed = " ".join(capsys.readouterr().out.split())
    assert "data: sudoku4.csv.gz n=4 of 471" in printed
    assert "training data unknown (imported weights)" in printed
    said = [line for line in printed.split("length 16: ") if line.startswith("puzzle accuracy")]
    assert ", cell accuracy " in said[0]
    assert ", valid solution " in said[0]
    assert result["solver_steps_max"]["16"] <= 4
    assert 0 <= result["blank_accuracy"]["16"] <= 1
    assert result["budget"]["16"]["iterations"] == [1, 2, 3, 4]


def test_arc_is_for_fpr_load_only(tmp_path, capsys, good):
    good |= {"embed_tokens.embedding_weight": random(12, D), "lm_head.weight": random(12, D)}
    safetensors.save_file(good, tmp_path / "x.safetensors")
    flag = "--config.model.num_heads=4"
    assert command(tmp_path / "x.safetensors", tmp_path / "run", "trm", flag) == 0
    assert capsys.readouterr().out.endswith("read them with fpr.load\n")
    assert fpr.load(tmp_path / "run")[1]["puzzle_embedding"].shape[1] == D
