"""Turns a published PyTorch checkpoint into a workdir that evaluation and `fpr.load` accept.

    python -m experiments.import_torch --model=fprm|trm|hrm --checkpoint=FILE --workdir=DIR
        [--config=FILE[:VARIANT]] [--config.model.num_heads=8 ...] [--weights=ema|model]

Reads the state dicts of FPRM's, TRM's and HRM's authors (.pt, .pth or .safetensors) without running
code from the file. Sizes come from the arrays; the rest (heads, norms, solver, data) from --config,
by default the paper's config for the model and the checkpoint's vocabulary. What no array can show
is told afterwards, with the command that evaluates the import:

    python -m experiments.run --config=DIR/config.py --workdir=DIR --mode=eval
        [--config.task.path=DATA]
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import flags

from experiments import cli, torch_files
from experiments import config as configs
from experiments.errors import UserError, unknown
from experiments.run import apply_overrides, read_overrides
from experiments.torch_files import Tensors
from experiments.workdir import write_atomically, write_json, write_weights
from fpr import layers, registry

MODELS = ("fprm", "trm", "hrm")
WEIGHTS = ("ema", "model")
USAGE = (
    "usage: python -m experiments.import_torch --model=fprm|trm|hrm --checkpoint=FILE --workdir=DIR"
)
# Buffers that follow from the model's options.
BUFFERS = re.compile(
    r"(^|\.)(cos_cached|sin_cached|inv_freq|(causal_|attn_|attention_)?mask|local_weights|local_ids)$"
)
# (Model, vocabulary size) -> config of the paper; "trm_conv": TRM with a causal convolution.
PAPER_CONFIGS = {
    **{
        (model, vocab): f"{task}.py:{model}"
        for model in MODELS
        for vocab, task in ((11, "sudoku"), (6, "maze"), (12, "arc"))
    },
    **{
        (model, vocab): f"state_tracking.py:{model}_{group}_paper"
        for model in ("fprm", "trm", "trm_conv")
        for vocab, group in ((61, "a5"), (121, "s5"))
    },
}
# Options that decide what a model computes, but leave no trace in its arrays.
ASSUMED = ("num_heads", "num_registers", "h_cycles", "l_cycles")
CONFIG_PY = '''"""The config of an imported run: what stands in config.json beside this file."""

import json
import pathlib


def get_config():
    return json.loads(pathlib.Path(__file__).with_name("config.json").read_text())
'''


@dataclasses.dataclass(frozen=True)
class Mapped:
    """A state dict in our names.

    Attributes:
      params: {"layers_0/mlps_0/down_proj/kernel": array, ...}.
      options: model options that follow from the arrays.
      ignored: names that hold nothing that is learned.
      unmatched: names that we have no place for.
      starts: FPRM's "H_init" and "L_init", of which it is not known whether they are used.
    """

    params: Tensors
    options: dict[str, Any]
    ignored: list[str]
    unmatched: list[str]
    starts: Tensors = dataclasses.field(default_factory=dict)


def block_params(weights: Mapping[str, np.ndarray]) -> tuple[Tensors, list[str]]:
    """Our parameters for the released names of one network, and the names that have no place.

    Args:
      weights: "layers.0.mlp.down_proj.weight" and so on; linear weights are (out, in).
    """
    found: Tensors = {}
    left = []
    for name, value in weights.items():
        kind = {"weight": "kernel", "bias": "bias"}.get(name.rsplit(".", 1)[-1], "")
        layer = re.fullmatch(
            r"layers\.(\d+)\.(self_attn|mlp_t|mlp)\.(qkv_proj|o_proj|gate_up_proj|down_proj)\.weight",
            name,
        )
        if layer:
            number, block, matrix = layer.groups()
            ours = "mlps" if block == "mlp" else "token_mixers"
            found[f"{ours}_{number}/{matrix}/kernel"] = value.T
        elif name in ("alpha_1_param", "alpha_2_param"):
            found[name.removesuffix("_param")] = value
        elif re.fullmatch(r"alpha_[12]_layer\.(weight|bias)", name):
            found[f"{name[:7]}/{kind}"] = value.T
        elif name == "conv.weight" and value.ndim in (3, 4):
            found["conv/kernel"] = np.moveaxis(value[:, 0], 0, -1)  # (D, 1, taps...)
        elif name == "conv.bias":
            found["conv/bias"] = value
        else:
            left.append(name)
    return found, left


def map_names(model: str, tensors: Tensors) -> Mapped:
    """Finds a place for every array of a state dict.

    Raises:
      UserError: no embedding or no layers, so that it is no such model at all; or more networks
        than the model has.
    """
    ignored = sorted(name for name in tensors if BUFFERS.search(name))
    rest = {n: np.asarray(a, np.float32) for n, a in tensors.items() if n not in ignored}
    params: Tensors = {}
    ends = {
        "embed_tokens.embedding_weight": ("embedding", False),
        "puzzle_emb.weights": ("puzzle_embedding", False),
        "lm_head.weight": ("lm_head/kernel", True),
        "q_head.weight": ("q_head/kernel", True),
        "q_head.bias": ("q_head/bias", False),
    }
    if model == "fprm":  # Held only where the start is fixed.
        ends["L_optimizer.init_vec"] = ("layers_0/start", False)
    for name, (ours, transpose) in ends.items():
        if name in rest:
            value = rest.pop(name)
            params[ours] = value.T if transpose else value
    # The networks: what stands in front of "layers.0." names one.
    found = {n[: n.index("layers.0.")] for n in rest if re.search(r"(^|\.)layers\.0\.", n)}
    if "embedding" not in params or params["embedding"].ndim != 2 or not found:
        shown = ", ".join(sorted(tensors)[:6])
        raise UserError(
            f"this is not a state dict of {model}: it lacks embed_tokens.embedding_weight or "
            f"layers.0; its names begin with {shown}"
        )
    networks = {prefix: _network(model, prefix) for prefix in sorted(found)}
    if len(set(networks.values())) < len(networks):
        shown = " and ".join(f"{prefix}layers" for prefix in networks)
        raise UserError(f"{model} has one network, found {len(networks)}: {shown}")
    unmatched: list[str] = []
    block: Tensors = {}
    for prefix, ours in networks.items():
        mine = {n.removeprefix(prefix): rest.pop(n) for n in list(rest) if n.startswith(prefix)}
        if not prefix:  # No name in front: only a network's own names belong to it.
            strangers = {n: mine.pop(n) for n in list(mine) if n.endswith("_init")}
            rest |= strangers
        block, left = block_params(mine)
        params |= {f"layers_0/{ours}{name}": value for name, value in block.items()}
        unmatched += [prefix + name for name in left]
    starts: Tensors = {n: rest.pop(n).reshape(-1) for n in ("H_init", "L_init") if n in rest}
    if starts and model != "fprm":
        params["layers_0/start"] = np.stack(list(starts.values()))
    options = _options(model, params, block, len(starts))
    unknown_use = starts if model == "fprm" else {}
    return Mapped(params, options, ignored, sorted([*unmatched, *rest]), unknown_use)


def _network(model: str, prefix: str) -> str:
    """Our name of the network whose arrays have `prefix` in front, with a "/" behind."""
    if model == "hrm":
        names = {"L_level.": "low_net/", "H_level.": "high_net/"}
        if prefix not in names:
            raise UserError(f"hrm has the networks L_level and H_level, found {prefix!r}")
        return names[prefix]
    if prefix == "H_level.":
        raise UserError(f"{model} has one network, found H_level as well; is it --model=hrm?")
    return "net/" if model == "trm" else ""


def _options(model: str, params: Tensors, block: Tensors, starts: int) -> dict[str, Any]:
    """Model options that the arrays decide."""
    vocab, width = params["embedding"].shape
    options: dict[str, Any] = {"vocab_size": vocab, "hidden_size": width}
    numbers = {int(m[1]) for name in block if (m := re.match(r"mlps_(\d+)/", name))}
    options["num_layers"] = len(numbers) or 1
    down = block.get("mlps_0/down_proj/kernel")
    if down is not None:
        options["expansion"] = _expansion(width, down.shape[0])
    mixer = block.get("token_mixers_0/down_proj/kernel")
    options["mlp_t"] = mixer is not None
    if mixer is not None:
        options["tokens"] = mixer.shape[1]
    kernel = block.get("conv/kernel")
    options["conv"] = "none" if kernel is None else {2: "conv1d", 3: "conv2d"}[kernel.ndim]
    if kernel is not None:
        options["conv_kernel"] = kernel.shape[0]
        options["conv_bias"] = "conv/bias" in block
    if "puzzle_embedding" in params:
        options["num_puzzles"] = params["puzzle_embedding"].shape[0]
    if model == "fprm":
        scales = [n for n in block if n.startswith("alpha_")]
        if scales:
            logit = "alpha_2" in block
            options["residual_scale"] = "input_independent" if logit else "input_dependent"
            options["outer_only"] = not any(n.startswith("alpha_1") for n in scales)
        if "layers_0/start" in params:
            options["z0"] = "fixed"
    else:
        options["num_levels"] = max(0, starts - 1)
    if model == "hrm":  # As released: one token of puzzle embedding, and none without it.
        options["num_registers"] = int("puzzle_embedding" in params)
    return options


def _expansion(width: int, inner: int) -> float:
    """An expansion that gives this inner width of SwiGLU; the papers' 4 if it does."""
    for expansion in (4.0, *(i / 4 for i in range(1, 65))):
        if layers.swiglu_width(width, expansion) == inner:
            return expansion
    raise UserError(f"a SwiGLU of inner width {inner} at width {width} is none of these models'")


def make_config(
    model: str, mapped: Mapped, spec: str, overrides: Mapping[str, str], rest: Sequence[str]
) -> dict[str, Any]:
    """The complete experiment config of the imported model.

    Raises:
      UserError: no config for this model and vocabulary, or a mistake in the overrides.
    """
    options = dict(mapped.options)
    if not spec:
        vocab, convolved = options["vocab_size"], options["conv"] != "none"
        known = (f"{model}_conv" if convolved else model, vocab)
        known = known if known in PAPER_CONFIGS else (model, vocab)
        if known not in PAPER_CONFIGS:
            raise UserError(
                f"no config is known for {model} with a vocabulary of {vocab}; give one with "
                "--config=FILE[:VARIANT]"
            )
        spec = str(configs.CONFIG_DIR / PAPER_CONFIGS[known])
    config = configs.load(spec)
    base = config["model"]
    tokens = options.pop("tokens", None)
    kept = {"seq_len": base["seq_len"], "num_registers": base.get("num_registers", 0)}
    if tokens is not None:
        kept["seq_len"] = tokens - options.get("num_registers", kept["num_registers"])
    for name in ("num_heads", "dtype", "causal", "rope"):
        if name in base:
            kept[name] = base[name]
    same = base if base["name"] == model else {}
    config["model"] = {**same, **kept, **options, "name": model}
    config = configs.complete(config, overrides)
    configs.check_overrides(config, overrides)
    return apply_overrides(config, rest)


def check_shapes(config: Mapping[str, Any], mapped: Mapped) -> None:
    """Raises UserError unless every parameter of the model has its array, and the other way round.

    The message names what is missing, left over, or of another shape.
    """
    try:
        shapes = registry.flatten(
            jax.eval_shape(lambda: registry.init(config["model"], jax.random.key(0)))
        )
    except (TypeError, ValueError) as error:
        raise UserError(str(error)) from error
    troubles = []
    missing = sorted(set(shapes) - set(mapped.params))
    extra = sorted(set(mapped.params) - set(shapes))
    if missing:
        troubles.append(f"the model has, but the checkpoint lacks: {', '.join(missing)}")
    if extra or mapped.unmatched:
        left = ", ".join([*mapped.unmatched, *extra])
        troubles.append(f"the checkpoint has, but the model has no place for: {left}")
    for name in sorted(set(shapes) & set(mapped.params)):
        got, want = mapped.params[name].shape, shapes[name].shape
        if got != want:
            troubles.append(f"{name} has shape {got}, the model needs {want}")
    if troubles:
        raise UserError("unknown checkpoint layout: " + "; ".join(troubles))


def import_checkpoint(argv: Sequence[str]) -> str:
    """Does what the command line (program name first) says; returns what to tell the user.

    Raises:
      UserError: a mistake that the user can fix; the workdir is then not written.
    """
    values = flags.FlagValues()
    for name in ("model", "checkpoint", "workdir", "config", "weights"):
        flags.DEFINE_string(name, "ema" if name == "weights" else "", "", flag_values=values)
    values.set_gnu_getopt(True)
    try:
        rest = values(list(argv), known_only=True)[1:]
    except flags.Error as error:
        raise UserError(" ".join(str(error).split())) from error
    given = {n: str(values[n].value or "") for n in ("model", "checkpoint", "workdir", "weights")}
    for name, value in given.items():
        if not value:
            raise UserError(f"--{name} is missing; {USAGE}")
    if given["model"] not in MODELS:
        raise unknown("--model", given["model"], MODELS)
    if given["weights"] not in WEIGHTS:
        raise unknown("--weights", given["weights"], WEIGHTS)
    overrides = read_overrides(rest)
    folder, checkpoint = Path(given["workdir"]), Path(given["checkpoint"])
    if folder.exists() and any(folder.iterdir()):
        raise UserError(f"--workdir={folder} is not empty; give a new directory")
    tensors, kind = torch_files.state_dict(
        torch_files.read(checkpoint), given["weights"], checkpoint
    )
    mapped = map_names(given["model"], tensors)
    spec = str(values["config"].value or "")
    config = make_config(given["model"], mapped, spec, overrides, rest)
    params, starts = mapped.params, dict(mapped.starts)
    fixed = config["model"].get("z0") == "fixed"
    if fixed and "H_init" in starts and "layers_0/start" not in params:
        params = params | {"layers_0/start": starts.pop("H_init")}
    check_shapes(config, dataclasses.replace(mapped, params=params))
    if kind != "ema":
        config["ema"] = 0.0  # These weights are not known to be an average.
    with checkpoint.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    folder.mkdir(parents=True, exist_ok=True)
    write_weights(folder / "weights.npz", registry.unflatten(params))
    write_json(folder / "config.json", config)
    source = {"file": checkpoint.name, "sha256": digest, "weights": kind}
    write_json(folder / "imported.json", source)
    write_atomically(folder / "config.py", lambda p: p.write_text(CONFIG_PY))
    size = sum(a.size for a in params.values())
    told = [f"imported {size:,} parameters of {given['model']} from {checkpoint} into {folder}"]
    if mapped.ignored:
        told.append(f"not needed here: {', '.join(mapped.ignored)}")
    if starts:
        told.append(
            f"a fixed start of FPRM is not imported ({', '.join(starts)})"
            + (
                ": the solver draws the start anew for each example; --config.model.z0=fixed "
                "starts from H_init"
                if "H_init" in starts and not fixed
                else ""
            )
        )
    guessed = {n: config["model"][n] for n in ASSUMED if n in config["model"]}
    guessed = {n: v for n, v in guessed.items() if f"model.{n}" not in overrides}
    if guessed:
        flags_of = " ".join(f"--config.model.{n}={v}" for n, v in guessed.items())
        told.append(f"assumed, as no array shows it: {flags_of}")
    if config["task"]["name"] == "arc":
        told.append(
            "the rows of the puzzle embedding keep the authors' numbering of tasks, which is not "
            "that of task.name='arc', so --mode=eval refuses them: read them with fpr.load"
        )
        return "\n".join(told)
    command = f"python -m experiments.run --config={folder / 'config.py'} --workdir={folder}"
    data = " --config.task.path=DATA" if "path" in config["task"] else ""
    told.append(f"evaluate it: {command} --mode=eval{data}")
    return "\n".join(told)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    argv = list(sys.argv if argv is None else argv)
    if any(word in ("--help", "-h", "-help") for word in argv):
        print(__doc__)
        return 0

    def command() -> int:
        print(import_checkpoint(argv))
        return 0

    return cli.exit_code(command)


if __name__ == "__main__":
    sys.exit(main())
