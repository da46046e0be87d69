"""Parity, even pairs and cycle navigation at a size for a CPU (spec 1 section 6).

    python -m experiments.run --config=experiments/configs/formal.py:VARIANT --workdir=DIR

Variants are LANGUAGE_MODEL, with the models of experiments/configs/arithmetic.py, one layer each.
Trained on lengths 3 to 16. fp_mamba has width 32; the rivals are wide enough to have no fewer
parameters.

Measured on one core of a shared AMD EPYC, busy with other work, seed 0, accuracy at lengths 16, 32
and 64 (chance 0.5):
  parity_fp_mamba (47,576 parameters, 69 s of training): 0.996, 0.996, 0.858, with 25, 44 and 50
    median iterations; at 64 one solve in eight met the cap of 200.
  parity_mamba (49,600 parameters, 50 s): 0.582, 0.485, 0.521.
The other variants have not been run.
"""

from __future__ import annotations

from ml_collections import ConfigDict

from experiments.configs import arithmetic
from experiments.errors import unknown

LANGUAGES = {"parity": 4, "even_pairs": 4, "cycle_navigation": 10}  # and their vocabularies
# Widths that give the rivals no fewer parameters than fp_mamba of width 32.
WIDTHS = {
    "transformer": 56,
    "mlstm": 88,
    "slstm": 88,
    "mamba": 80,
    "deltanet": 112,
    "gated_deltaproduct": 80,
}
VARIANTS = tuple(f"{name}_{model}" for name in LANGUAGES for model in arithmetic.MODELS)


def get_config(variant: str = "parity_fp_mamba") -> ConfigDict:
    """The config of a variant.

    Raises:
      UserError: unknown variant.
    """
    if variant not in VARIANTS:
        raise unknown("variant", variant, VARIANTS)
    language = next(name for name in LANGUAGES if variant.startswith(f"{name}_"))
    model = variant.removeprefix(f"{language}_")
    sizes = {"vocab_size": LANGUAGES[language], "seq_len": 16, "num_layers": 1}
    sizes["hidden_size"] = WIDTHS.get(model, 32)
    return ConfigDict(
        {
            "model": arithmetic.small_model(model, **sizes),
            "task": {"name": "formal", "language": language, "length": 16, "min_length": 3},
            **arithmetic.small_training(1000),
            "eval": {
                "lengths": (16, 32, 64),
                "max_examples": 1024,
                "batch_size": 256,
                "budget_examples": 0,
            },
        }
    )
