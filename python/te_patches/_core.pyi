"""The native core: plans, kernels and the reading of tensors. `te_patches` is the public surface."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, final

import numpy as np
import numpy.typing as npt

__all__ = [
    "Load",
    "Plan",
    "adam_reference",
    "compile_cast",
    "compile_kernel",
    "kernel_cache",
    "kernel_casts",
    "kernel_variants",
    "multi_tensor_adam",
    "multi_tensor_adam_capturable",
    "proofs",
    "record_proof",
    "save_states",
    "tensors_read_by",
]

_Variant = tuple[str, str, str, str, str, str]
_Entry = Any | tuple[Any, ...]

@final
class Plan:
    """The plan of one optimizer's groups. Holds numbers only: no tensor, gradient or parameter is kept alive by it."""

    def __new__(cls) -> Plan: ...
    def step(
        self,
        optimizer: Any,
        mode: Literal["auto", "native", "te"],
        served: list[int],
        release: Any,
        live: list[tuple[Any, Any, Any]] | None,
    ) -> tuple[Literal["initialize", "prove", "lower"], list[Any]] | None:
        """Takes one step, or returns what has to be done first; the optimizer is then as it was.

        `release`: what the installed Transformer Engine does (`te_patches._releases.Release`).

        `live`: in capturable mode the (step, inv_scale, skip) of each group, one-element tensors; counters are then the
        caller's to advance.

        ("initialize", [(parameter, whether its master is a remainder)]), ("prove", [(device, kernel's names)]), or
        ("lower", [(group, tier)]): serve these groups in a lower tier, then name them in `served`.
        """

    def report(self) -> list[dict[str, Any]]:
        """Per group: index, tier, reason, kernels, tensors, elements, steps taken natively, launches, plans made,
        parameters that the last step found as they were."""

@final
class Load:
    """A checkpoint's states and the buffers they go to. `read` and `place` change nothing; `write_one` and `write` can
    fail for nothing but the device.
    """

    @staticmethod
    def read(optimizer: Any, ids: list[Any], states: dict[Any, Any], whole: bool, reuse: bool) -> Load:
        """Reads the states of a checkpoint whose groups match the optimizer's. `ids`: what the checkpoint calls each
        parameter, in the optimizer's order. `whole`: whether plain tensors of a DTensor's global shape are taken.
        `reuse`: whether buffers that the optimizer has are written in place.

        KeyError for a state that the optimizer does not keep, TypeError for what is no tensor, RuntimeError for another
        shape, AssertionError for a dtype that the optimizer's options do not take; each names group, index, state,
        expected and found.
        """

    def fresh(self) -> list[tuple[Any, str, bool]]:
        """States that need a buffer: (parameter, name, whether it is a remainder)."""

    def place(self, state: dict[Any, Any], scales: dict[Any, Any]) -> None:
        """Takes the buffers that were made for them. RuntimeError for one that does not fit."""

    def prepare(self) -> None:
        """Makes sure that every kernel this load takes can be launched. RuntimeError, saying why, if not."""

    @property
    def held(self) -> bool:
        """Whether something beside the optimizer holds buffers that will be written in place."""

    def sample(self) -> Any | None:
        """One tensor that will be written in place, if there is one."""

    def staged(self) -> list[tuple[int, Any, Any]]:
        """Sources that torch has to make plain tensors of: (index, source, tensor that holds the target's elements)."""

    def write_one(self, index: int, source: Any) -> None:
        """Writes one state from the plain tensor made of its source, on the target's device in its layout."""

    def write(self, progress: Callable[[int], None] | None) -> None:
        """Writes all states but those that are staged. `progress` is told the bytes of each portion of host memory."""

    def states(self) -> dict[Any, dict[str, Any]]:
        """The states as they will be, in the checkpoint's order."""

    def sources(self) -> list[tuple[Any, str, Any, bool]]:
        """(parameter, name, saved local tensor, whether it is a remainder) of every state."""

    def params(self) -> list[Any]:
        """Parameters that the checkpoint has an entry for."""

    def foreign(self) -> dict[Any, Any]:
        """Entries of the checkpoint that belong to no parameter."""

    def counts(self) -> tuple[int, int, int]:
        """(states, those that are their own source, bytes of host memory that will be copied to devices)."""

def save_states(rows: list[tuple[Any, Any | None, Any]], progress: Callable[[int], None] | None) -> None:
    """Copies states to host memory: each row is (state, its factor for fp16 or None, target). States: fp32, bf16, fp16
    with a one-element fp32 factor, int16 remainders, Float8Tensors. Targets: CPU tensors of the same shape and layout,
    int16 for remainders and else fp32. Done when this returns. `progress` is told the bytes of each portion.
    RuntimeError for tensors that do not belong together, before anything is written.
    """

def multi_tensor_adam(
    tensor_lists: list[list[_Entry]],
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    step: int,
    mode: int,
    bias_correction: int,
    weight_decay: float,
    master: str,
) -> None:
    """Adam on lists of plain tensors: [gradients, parameters, exp_avg, exp_avg_sq] and, as a fifth, masters or
    remainders as `master` says ("none", "float32", "float16", "idle float16", "remainder"). `mode` is 1 for AdamW, 0
    for L2; `step` counts from 1.

    Gradients: float32, float16, bfloat16; parameters also float8; moments float32, bfloat16, scaled float16 and float8.
    A scaled tensor is a tuple with one-element float32 tensors: (float16, factor); a float8 state (data, factor, scale,
    scale_inv, amax); a float8 parameter (data, scale, scale_inv, amax). Runs on the tensors' own device, on torch's
    current stream. RuntimeError for lists of unequal lengths and tensors that do not belong together, ValueError for
    an unknown `master`; nothing has changed then.
    """

def multi_tensor_adam_capturable(
    tensor_lists: list[list[_Entry]],
    lr: Any,
    beta1: float,
    beta2: float,
    eps: float,
    step: Any,
    mode: int,
    bias_correction: int,
    weight_decay: float,
    inv_scale: Any,
    skip: Any,
) -> None:
    """As `multi_tensor_adam`, with hyperparameters that are read on the device: `lr` and `inv_scale` fp32, `step` and
    `skip` int32, one element each. Gradients are multiplied by `inv_scale` and written back; nothing is written if
    `skip` is 1. TypeError for anything else.
    """

def adam_reference(
    grad: npt.NDArray[np.float32],
    param: npt.NDArray[np.float32],
    exp_avg: npt.NDArray[np.float32],
    exp_avg_sq: npt.NDArray[np.float32],
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    step: int,
    bias_correction: bool = True,
    adam_w: bool = True,
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Updated (param, exp_avg, exp_avg_sq) of float32 arrays of equal length: the kernels' sequence of operations in
    IEEE fp32 on the CPU, with exact reciprocals and square roots. ValueError for unequal lengths.
    """

def kernel_variants() -> list[_Variant]:
    """Every combination of storage types with a kernel: (gradient, parameter, exp_avg, exp_avg_sq, master, mode)."""

def compile_kernel(variant: _Variant, arch: int, large: bool) -> tuple[bytes, str]:
    """Compiles one kernel for compute capability `arch` (90 for sm_90) with NVRTC; returns (machine code, log).

    Needs no GPU. RuntimeError without NVRTC or if the source does not compile.
    """

def kernel_casts() -> list[tuple[str, str, bool, bool]]:
    """Every copy between storages that has a kernel: (source, target, whether the source is scaled, whether the target
    is).
    """

def compile_cast(index: int, arch: int, large: bool) -> tuple[bytes, str]:
    """As `compile_kernel`, the kernel of the cast at this index of `kernel_casts()`. IndexError if there is none."""

def kernel_cache() -> Path | None:
    """Folder of compiled kernels: $TE_PATCHES_CACHE, else `te_patches` in $XDG_CACHE_HOME or ~/.cache; else None."""

def tensors_read_by() -> Literal["records", "functions", "dlpack", "attributes"]:
    """How this torch's tensors are read: by the words of its "records", which is fastest; else in full by its stable C
    "functions", through "dlpack", or by their "attributes".
    """

def record_proof(device: int, variant: _Variant, reason: str | None) -> None:
    """Remembers whether a kernel gave stock's bits on a device: `reason` is None if it did."""

def proofs() -> list[tuple[int, str, bool, str]]:
    """(device, kernel, equal, reason) of every kernel that was compared with stock in this process."""
