"""The baseline: a plan kept in Python over Transformer Engine's own kernels, the idea of NeMo's patches in our words.

The lists of a group are built once, only gradients are read anew; whatever moves its tensors would break it.
"""

from __future__ import annotations

from typing import Any

from transformer_engine.pytorch.optimizers import fused_adam


def local(tensor: Any) -> Any:
    """The local shard of a DTensor, else the tensor."""
    return getattr(tensor, "_local_tensor", tensor)


class PythonPlan:
    """Steps one optimizer whose groups have parameters of one dtype, fp32 or bf16 moments and gradients everywhere."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer
        self.lists: list[list[list[Any]]] = []
        for group in optimizer.param_groups:
            params = group["params"]
            names = ["exp_avg", "exp_avg_sq"]
            if optimizer.master_weights and params[0].element_size() == 2:
                names.append("master_param")
            states = [[local(optimizer.state[p][name]) for p in params] for name in names]
            self.lists.append([[local(p).detach() for p in params], *states])

    def step(self) -> None:
        optimizer = self.optimizer
        remainder = optimizer.store_param_remainders
        function = optimizer.multi_tensor_adam_param_remainder if remainder else optimizer.multi_tensor_adam
        for group, lists in zip(optimizer.param_groups, self.lists, strict=True):
            group["step"] += 1
            gradients = [local(p.grad) for p in group["params"]]
            for start in range(0, len(gradients), 1024):
                stop = start + 1024
                fused_adam.multi_tensor_applier(
                    function,
                    optimizer._dummy_overflow_buf,
                    [gradients[start:stop], *[tensors[start:stop] for tensors in lists]],
                    group["lr"],
                    *group["betas"],
                    group["eps"],
                    group["step"],
                    optimizer.adam_w_mode,
                    1 if group["bias_correction"] else 0,
                    group["weight_decay"],
                )
