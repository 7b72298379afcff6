"""The compiled part's fp8 casts on CPU tensors, in torch's arithmetic: for `te_patches.cpu`.

Only delayed scaling (Float8Quantizer): its scale is given, data, scale_inv and amax are written.
"""

from __future__ import annotations

import inspect
from typing import Any


def _torch_dtype(fp8: Any) -> Any:
    import torch

    return {"kFloat8E4M3": torch.float8_e4m3fn, "kFloat8E5M2": torch.float8_e5m2}[fp8.name]


def create_empty_quantized_tensor(quantizer: Any, shape: Any, dtype: Any, device: Any, pin_memory: bool) -> Any:
    """An uninitialised Float8Tensor. NotImplementedError for other quantizers."""
    import torch
    from transformer_engine.pytorch.tensor.float8_tensor import Float8Quantizer, Float8Tensor, QuantizedTensor

    if "device" not in inspect.signature(QuantizedTensor.__new__).parameters:
        raise NotImplementedError("this Transformer Engine (before 2.10) makes fp8 tensors on a GPU only")
    if not isinstance(quantizer, Float8Quantizer):
        raise NotImplementedError(f"{type(quantizer).__name__} needs Transformer Engine's compiled library")
    # On GPUs up to Hopper the compiled part keeps a transposed copy where the quantizer asks for columns.
    transpose = torch.empty((*shape[-1:], *shape[:-1]), dtype=torch.uint8) if quantizer.columnwise_usage else None
    return Float8Tensor(
        shape=torch.Size(shape),
        dtype=dtype,
        data=torch.empty(shape, dtype=torch.uint8),
        fp8_scale_inv=torch.ones(1, dtype=torch.float32),
        fp8_dtype=quantizer.dtype,
        requires_grad=False,
        data_transpose=transpose,
        quantizer=quantizer,
        device=torch.device("cpu"),
    )


def quantize(source: Any, quantizer: Any, target: Any = None, noop_flag: Any = None) -> Any:
    """Casts to fp8, nearest even and saturating; scale_inv and amax follow."""
    import torch

    if target is None:
        target = create_empty_quantized_tensor(quantizer, source.shape, source.dtype, source.device, False)
    if noop_flag is not None and float(noop_flag) != 0:
        return target
    dtype = _torch_dtype(quantizer.dtype)
    with torch.no_grad():
        values = source.detach().float()
        largest = torch.finfo(dtype).max
        scaled = (values * quantizer.scale).clamp(-largest, largest)
        target._data.copy_(scaled.to(dtype).view(torch.uint8))
        if target._transpose is not None and target._data.numel() > 0:
            rows = target._data.reshape(-1, target._data.shape[-1])
            target._transpose.copy_(rows.t().reshape(target._transpose.shape))
            target._transpose_invalid = False
        target._scale_inv.copy_(1 / quantizer.scale)
        finite = values[~values.isnan()].abs()
        if finite.numel():
            quantizer.amax.copy_(torch.maximum(quantizer.amax, finite.max()))
    return target


def dequantize(source: Any, dtype: Any) -> Any:
    """The fp32, fp16 or bf16 values of a Float8Tensor; `dtype` is of the compiled part's enum."""
    import torch

    kinds = {"kFloat32": torch.float32, "kFloat16": torch.float16, "kBFloat16": torch.bfloat16}
    values = source._data.view(_torch_dtype(source._fp8_dtype)).float() * source._scale_inv
    return values.to(kinds[dtype.name])
