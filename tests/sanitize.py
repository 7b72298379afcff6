"""Small launches of the kernels, for compute-sanitizer:

    compute-sanitizer --tool memcheck python tests/sanitize.py
    compute-sanitizer --tool racecheck python tests/sanitize.py --stride 29

Needs torch and this project's wheel, not Transformer Engine.
"""

from __future__ import annotations

import argparse

import torch
from te_patches import _core, _nvrtc

SIZES = (1, 7, 4096, 4099, 3 * 4096 + 5)


def number(value: float) -> torch.Tensor:
    return torch.full((1,), value, device="cuda")


def tensor(size: int, dtype: str) -> torch.Tensor:
    """Random, one element past alignment for every second size, with nothing behind it that belongs to torch."""
    kind = getattr(torch, dtype)
    values = torch.rand(size + size % 2, device="cuda").to(kind)
    return values[size % 2 :]


def state(size: int, dtype: str) -> object:
    values = tensor(size, dtype)
    if dtype == "float16":
        return values, number(0.5)
    if dtype == "float8_e4m3fn":
        return values, number(1.0), number(1.0), number(1.0), number(0.0)
    return values


def param(size: int, dtype: str) -> object:
    values = tensor(size, dtype)
    return (values, number(1.0), number(1.0), number(0.0)) if dtype.startswith("float8") else values


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stride", type=int, default=7, help="every how many kernels")
    _nvrtc.preload()
    variants = _core.kernel_variants()[:: parser.parse_args().stride]
    for names in variants:
        grad, value, exp_avg, exp_avg_sq, master, mode = names
        lists = [[tensor(n, grad) for n in SIZES], [param(n, value) for n in SIZES]]
        lists += [[state(n, dtype) for n in SIZES] for dtype in (exp_avg, exp_avg_sq)]
        kept = {"float32": "float32", "float16": "float16", "idle float16": "float16", "remainder": "int16"}
        if master in kept:
            lists.append([state(n, kept[master]) for n in SIZES])
        if mode == "capturable":
            step, skip = (torch.full((1,), x, dtype=torch.int32, device="cuda") for x in (3, 0))
            live = (number(0.1), 0.9, 0.95, 1e-8, step, 1, 1, 0.1, number(1.0), skip)
            _core.multi_tensor_adam_capturable(lists, *live)
        else:
            for adam_w in (0, 1):
                _core.multi_tensor_adam(lists, 0.1, 0.9, 0.95, 1e-8, 3, adam_w, 1, 0.1, master)
        torch.cuda.synchronize()
    print(f"{len(variants)} kernels ran")


if __name__ == "__main__":
    main()
