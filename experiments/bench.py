"""Benchmarks on the machine at hand: `python -m experiments.bench scan|reasoner|models`.

Competitors run in one process in alternating rounds, after warm-up; figures are medians. Each
subcommand is a module with `add_options(parser)` and `run(args) -> figures`; `--output` writes the
figures as JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments import bench_models, bench_reasoner, bench_scan

# Subcommand -> (what it does, its module).
COMMANDS: dict[str, tuple[str, Any]] = {
    "scan": ("linear and selective scans on this machine", bench_scan),
    "reasoner": ("FPRM's train step and inference at the paper's size", bench_reasoner),
    "models": ("tokens per second and memory of every model", bench_models),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one subcommand; see `--help`."""
    parser = argparse.ArgumentParser(prog="experiments.bench", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, (text, module) in COMMANDS.items():
        command = commands.add_parser(name, help=text)
        module.add_options(command)
        command.add_argument("--output", type=Path, help="also write the figures to this file")
        command.add_argument(
            "--allocator", choices=["keep", "system"], default="keep",
            help="keep freed memory (experiments/memory.py) or leave the C library as it comes",
        )  # fmt: skip
    args = parser.parse_args(argv)
    if args.output and not args.output.resolve().parent.is_dir():
        parser.error(f"--output={args.output}: its folder does not exist")
    try:
        result = COMMANDS[args.command][1].run(args)
    except ValueError as error:  # Sizes and names that cannot work.
        print(f"error: {error}", file=sys.stderr)
        return 2
    if args.output:
        args.output.write_text(json.dumps(result, indent=1) + "\n")
        print(f"written: {args.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
