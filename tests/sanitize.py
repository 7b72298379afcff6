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
    copy_states()
    print(f"{len(variants)} kernels ran, and all that copy between storages")


class Stub:
    """As much of an optimizer as the loader reads."""

    capturable = False

    def __init__(self, storage: torch.dtype) -> None:
        self.params = [torch.zeros(size, device="cuda") for size in SIZES]
        self.param_groups = [{"params": self.params}]
        self.name_to_dtype_map = {"exp_avg": storage}
        self.store_param_remainders = False
        self.state = {param: {"exp_avg": torch.zeros_like(param, dtype=storage)} for param in self.params}
        self._scales = {param: {"exp_avg": number(1.0)} for param in self.params}


def copy_states() -> None:
    """Loads from the device and from the host, and back; fp8 needs Transformer Engine's tensors."""
    sources = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
    for storage in (torch.float32, torch.bfloat16, torch.float16):
        for device in ("cuda", "cpu"):
            for name in ("float32", "float16", "bfloat16"):
                optimizer = Stub(storage)
                values = [torch.rand(size, device=device).to(sources[name]) for size in SIZES]
                saved = {at: {"exp_avg": value} for at, value in enumerate(values)}
                load = _core.Load.read(optimizer, list(range(len(SIZES))), saved, False, True)
                load.prepare()
                load.write(None)
                rows = []
                for states, scales in zip(optimizer.state.values(), optimizer._scales.values(), strict=True):
                    state = states["exp_avg"]
                    factor = scales["exp_avg"] if storage == torch.float16 else None
                    rows.append((state, factor, torch.empty(state.shape, dtype=torch.float32)))
                _core.save_states(rows, None)
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()
