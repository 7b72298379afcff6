"""Sweeps the kernel's tuning constants on one GPU: threads, elements per access,
accesses in flight, elements per block.

    python benches/tune.py [--quick]

Needs torch and cuda-bindings. Compiles kernels/adam.cu itself, so that any constants can be tried; prints, per case,
the milliseconds of an update of 1,000 tensors of 1,048,576 elements and the share of this GPU's copy rate it reaches.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import struct
from pathlib import Path

import torch
from cuda.bindings import driver, nvrtc

KERNELS = Path(__file__).parent.parent / "kernels"
TENSORS, ELEMENTS = 1000, 1 << 20
CASES = {
    # gradient, parameter, moments, master, bytes an element moves
    "bf16 + remainder": ("BF16", "BF16", "F32", 2, 26),
    "bf16 + master": ("BF16", "BF16", "F32", 1, 28),
    "fp32": ("F32", "F32", "F32", 0, 28),
    "bf16 + remainder, bf16 moments": ("BF16", "BF16", "BF16", 2, 18),
}
DTYPES = {"BF16": torch.bfloat16, "F32": torch.float32}


def check(result):
    error, *values = result
    if int(error) != 0:
        raise RuntimeError(str(error))
    return values[0] if len(values) == 1 else values


def build(case, threads, vector, unroll, chunk):
    grad, param, moment, master, _ = CASES[case]
    headers = [path.read_bytes() for path in sorted(KERNELS.glob("*.cuh"))]
    names = [path.name.encode() for path in sorted(KERNELS.glob("*.cuh"))]
    source = (KERNELS / "adam.cu").read_bytes()
    program = check(nvrtc.nvrtcCreateProgram(source, b"adam.cu", len(names), headers, names))
    capacity = (32764 - 40) // ((5 if master else 4) * 8 + 8) & ~1
    defines = {"GRAD": grad, "PARAM": param, "MOMENT": moment, "MASTER": master, "CAPACITY": capacity}
    defines |= {"THREADS": threads, "VECTOR": vector, "UNROLL": unroll, "CHUNK": chunk}
    major, minor = torch.cuda.get_device_capability()
    options = [f"--gpu-architecture=sm_{major}{minor}", "--std=c++17", *[f"-D{k}={v}" for k, v in defines.items()]]
    check((*nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options]), None))
    cubin = bytes(check(nvrtc.nvrtcGetCUBINSize(program)))
    check((*nvrtc.nvrtcGetCUBIN(program, cubin), None))
    module = check(driver.cuModuleLoadData(cubin))
    return check(driver.cuModuleGetFunction(module, b"adam")), capacity


def parameters(columns, capacity, chunk):
    """The kernel's parameter for each launch: scalars, count, addresses, chunk ends, tails."""
    for start in range(0, TENSORS, capacity):
        part = [column[start : start + capacity] for column in columns]
        count = len(part[0])
        data = struct.pack("<7fIII", 1e-3, 0.9, 0.95, 1e-8, 0.1, 0.5, 0.5, 1, count, 0)
        for column in part:
            data += struct.pack(f"<{capacity}Q", *[t.data_ptr() for t in column], *[0] * (capacity - count))
        chunks = -(-ELEMENTS // chunk)
        ends = [chunks * (i + 1) for i in range(count)] + [0] * (capacity - count)
        data += struct.pack(f"<{2 * capacity}I", *ends, *[ELEMENTS - (chunks - 1) * chunk] * capacity)
        yield ctypes.create_string_buffer(data, len(data)), chunks * count


def median_ms(action, repeats=7):
    times = []
    for _ in range(repeats + 2):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        action()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return sorted(times[2:])[repeats // 2]


def copy_rate():
    source = torch.randn(1 << 30, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() * 4 / median_ms(lambda: target.copy_(source)) / 1e6


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer combinations")
    quick = parser.parse_args().quick
    rate = copy_rate()
    print(f"{torch.cuda.get_device_name()}: copy {rate:.0f} GB/s")
    torch.cuda.empty_cache()
    grid = itertools.product((256,) if quick else (128, 256, 512), (4, 8), (1, 2), (4096, 8192, 32768))
    grid = list(grid)
    for case, (grad, param, moment, master, moved) in CASES.items():

        def tensors(dtype):
            return [torch.randn(ELEMENTS, device="cuda").to(dtype) for _ in range(TENSORS)]

        columns = [tensors(DTYPES[grad]), tensors(DTYPES[param]), tensors(DTYPES[moment])]
        columns.append([t.abs() for t in tensors(DTYPES[moment])])
        if master == 1:
            columns.append([t.float() for t in columns[1]])
        elif master == 2:
            random = torch.randint(-(1 << 15), 1 << 15, (ELEMENTS,), dtype=torch.int16, device="cuda")
            columns.append([random.clone() for _ in range(TENSORS)])
        floor = moved * TENSORS * ELEMENTS / rate / 1e6
        rows = []
        for threads, vector, unroll, chunk in grid:
            function, capacity = build(case, threads, vector, unroll, chunk)
            launches = list(parameters(columns, capacity, chunk))
            stream = torch.cuda.current_stream().cuda_stream

            def run(function=function, launches=launches, threads=threads, stream=stream):
                for data, blocks in launches:
                    pointer = (ctypes.c_void_p * 1)(ctypes.addressof(data))
                    address = ctypes.addressof(pointer)
                    check((*driver.cuLaunchKernel(function, blocks, 1, 1, threads, 1, 1, 0, stream, address, 0), None))

            rows.append((median_ms(run), threads, vector, unroll, chunk))
        rows.sort()
        print(f"{case}: floor {floor:.3f} ms")
        for ms, threads, vector, unroll, chunk in [*rows[:8], *rows[-2:]]:
            print(
                f"  {ms:.3f} ms  {ms / floor:.3f} of floor  threads {threads} vector {vector} unroll {unroll} "
                f"chunk {chunk}"
            )
        del columns
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
