"""`jaxinfer plan`: what a model needs on target GPUs, in which layout, and how fast it would be."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

_PICTURES = (".png", ".pdf", ".svg")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The model, the target, the layouts and the workload."""
    flag = parser.add_argument
    flag("--model", metavar="NAME", help="a known shape, such as llama-3.1-8b, or a config.json")
    flag("--calibrate", action="store_true", help="first measure this machine's processor, for plans with the target cpu; takes minutes")
    flag("--target", metavar="NxCARD", help="such as 8xh100 or 2xh200; cpu: this machine, 4xcpu: cut into virtual devices")
    flag("--prefill-parallel", metavar="TEXT", help="layout of prefill, such as tp=2,pp=2; without any all layouts are ranked")
    flag("--decode-parallel", metavar="TEXT", help="layout of decode; if it is prefill's both share devices")
    flag(
        "--dtype", choices=("auto", "float32", "bfloat16"), default="auto", help="of weights on a CPU, as for serve (default: %(default)s)"
    )
    flag("--weights", choices=("auto", "lossless"), default="auto", help="matrices in memory, as for serve (default: %(default)s)")
    flag("--kv-dtype", choices=("auto", "fp8"), default="auto", help="of cached keys and values, as for serve (default: %(default)s)")
    flag("--context", type=int, metavar="N", help="tokens that one request may have (default: 8192, or the model's)")
    flag("--batch", type=int, metavar="N", help="sequences that decode at once (default: the power of two that has room, up to 256)")
    flag("--input-length", type=int, default=2048, metavar="N", help="tokens of a prompt, on average (default: %(default)s)")
    flag("--output-length", type=int, default=256, metavar="N", help="tokens of an answer, on average (default: %(default)s)")
    flag(
        "--trace",
        type=Path,
        metavar="FILE",
        help="requests instead: Mooncake's JSON lines (of which input_length and output_length are read), or Azure's CSV",
    )
    flag(
        "--compile", type=int, default=1, metavar="N", help="layouts to compile, the best first; 0: arithmetic alone (default: %(default)s)"
    )
    flag("--json", action="store_true", help="for programs")
    flag("--plot", type=Path, metavar="PNG", help="draw stages, memory and the timeline")


def run(arguments: argparse.Namespace) -> int:
    """Prints the plan, and plots it where requested."""
    from rich.console import Console

    from server.planning import calibrate_cpu, plan_from_arguments, show

    if arguments.plot is not None:
        _check_plot(arguments.plot)
    if arguments.calibrate:
        with Console(stderr=True).status("calibrating") as status:
            told = calibrate_cpu(arguments.target, status.update)
        print(told)
        if arguments.model is None:
            return 0
    with Console(stderr=True).status(f"planning {arguments.model} for {arguments.target}"):
        plan = plan_from_arguments(arguments)
    show(plan, is_json=arguments.json)
    if arguments.plot is not None:
        from jaxinfer.planner.plot import draw

        draw(plan, arguments.plot, arguments.model)
    return 0


def _check_plot(path: Path) -> None:
    """Raises `ConfigError` for a picture that can't be drawn or written: before the work, which may take minutes."""
    from importlib.util import find_spec

    from jaxinfer.config import ConfigError

    if find_spec("matplotlib") is None:
        raise ConfigError(f"plot is {path}, but matplotlib is not installed: pip install 'jaxinfer[bench]'")
    if path.suffix not in _PICTURES:
        raise ConfigError(f"plot is {path}: give a file that ends in {', '.join(_PICTURES)}")
    if not path.parent.is_dir():
        raise ConfigError(f"plot is {path}, but there is no folder {path.parent}: make it, or give a file in another")
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(f"plot is {path}, which can't be written: give another file")
