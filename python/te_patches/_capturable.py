"""What a capturable step does around its launches: counters, overflow flag and inverse scale, all on the device.

Every operation here may be captured in a CUDA graph. Nothing of the optimizer changes before `commit`, so that a step
that is refused leaves it as it was. The order of reads is stock's: a group's counter sees the flag that the group
before it left.
"""

from __future__ import annotations

from typing import Any

Live = tuple[Any, Any, Any]
"""(step int32, inv_scale fp32, skip int32) of a group: tensors of shape [1] on the group's device."""


def capturing() -> bool:
    """Whether torch's current stream is being captured in a CUDA graph."""
    import torch

    return bool(torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())


class Counters:
    """The counters and flags of one step, computed aside until it has been launched."""

    def __init__(self, optimizer: Any, grad_scaler: Any, count_empty: bool) -> None:
        import torch

        self._optimizer = optimizer
        self._steps: list[tuple[dict[str, Any], Any]] = []
        self.live: list[Live] = []
        flag = optimizer._dummy_overflow_buf
        for group in optimizer.param_groups:
            params = group["params"]
            if not params and not count_empty:
                self.live.append((None, None, None))
                continue
            device = params[0].device if params else flag.device
            if "step" not in group:
                step = torch.ones(1, dtype=torch.int32, device=device)
            elif isinstance(group["step"], torch.Tensor) and flag.device == device:
                step = group["step"] + (flag != 1)
            else:
                # A checkpoint may have made it an int; the sum is a tensor again.
                step = group["step"] + (flag != 1).to(device=device, dtype=torch.int32)
            self._steps.append((group, step))
            if not params:
                self.live.append((None, None, None))
                continue
            if grad_scaler is None:
                found = torch.zeros(1, dtype=torch.int32, device=device)
                inv_scale = torch.ones(1, dtype=torch.float32, device=device)
            else:
                found = grad_scaler._check_inf_per_device(optimizer)[device].to(torch.int32)
                inv_scale = grad_scaler._get_scale_async().double().reciprocal().float()
            flag = found
            self.live.append((step, inv_scale, flag))
        self._flag = flag

    def commit_empty(self) -> None:
        """Advances the counters of groups without parameters, which a release that steps the others leaves out."""
        for group, step in self._steps:
            if not group["params"]:
                group["step"] = step

    def commit(self) -> None:
        """Advances the counters and leaves the flag, in place: captured graphs and users hold these tensors."""
        import torch

        for group, step in self._steps:
            if isinstance(group.get("step"), torch.Tensor):
                group["step"].copy_(step)
            else:
                group["step"] = step
        if self._flag is not self._optimizer._dummy_overflow_buf:
            self._optimizer._dummy_overflow_buf.copy_(self._flag)
