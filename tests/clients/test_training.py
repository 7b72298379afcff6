"""What training loops do between steps: gradients that come and go, schedulers, hooks, wrappers, scalers, graphs."""

from __future__ import annotations

import copy
import inspect
import pickle
import random
import types

import pytest
import torch
from client import RELEASE, compare, everywhere, states
from transformer_engine.pytorch.optimizers import FusedAdam
from twin import DEVICE

REMAINDERS = {"lr": 1e-2, "master_weights": True, "store_param_remainders": True}


@everywhere
@pytest.mark.parametrize("set_to_none", [True, False])
def test_experts_without_tokens_and_layers_unfrozen_half_way(machine, set_to_none):
    def sequence(run):
        params = run.params((16, 8), (8,), (5, 5), (300,), (65,))
        for param in params[:2]:
            param.requires_grad_(False)
        optimizer = FusedAdam(params, weight_decay=0.1, **REMAINDERS)
        choice = random.Random(3)
        for step in range(12):
            if step == 6:
                for param in params[:2]:
                    param.requires_grad_(True)
            live = [step >= 6 or at >= 2 for at in range(len(params))]
            mask = [live[at] and choice.random() < 0.6 for at in range(len(params))]
            previous = [param.grad for param in params]
            run.fill(params, lambda at, mask=mask: mask[at])
            if not set_to_none:
                # Zeros that the last zero_grad left behind are gradients.
                for param, grad in zip(params, previous, strict=True):
                    param.grad = grad if param.grad is None else param.grad
            optimizer.step()
            run.note(optimizer)
            optimizer.zero_grad(set_to_none=set_to_none)
        return optimizer

    compare(sequence)


@everywhere
def test_flags_and_numbers_change_between_steps(machine):
    def sequence(run):
        params = run.params((33,), (8, 8))
        optimizer = FusedAdam(params, master_weights=True)

        def step(attribute="grad", dtype=None):
            run.step(optimizer, params, attribute=attribute, dtype=dtype)

        step()
        # Megatron-FSDP flips these after construction.
        optimizer.master_weights, optimizer.use_decoupled_grad = False, True
        step("decoupled_grad", torch.float32)
        optimizer.master_weights, optimizer.use_decoupled_grad = True, False
        step()
        for at in range(4):
            for group in optimizer.param_groups:
                group["lr"], group["weight_decay"] = 0.1 / (at + 1), 0.01 * at
                group["betas"], group["eps"] = [0.8, 0.9 + at / 100], 10.0 ** -(6 + at)
            step()
        params += run.params((65,))
        optimizer.add_param_group({"params": [params[-1]], "lr": 0.3})
        step()
        for group in optimizer.param_groups:
            group["step"] = 5  # equalised, as Megatron's ChainedOptimizer does
        step()
        optimizer.param_groups[1]["params"] = []
        params.pop()
        step()
        return optimizer

    compare(sequence)


@everywhere
def test_hooks_schedulers_and_wrappers_with_patches_that_come_and_go(machine):
    def sequence(run):
        params = run.params((33,), (8, 8))
        calls = []
        optimizer = FusedAdam(params, **REMAINDERS)
        optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
        optimizer.register_step_post_hook(lambda *_: calls.append("after"))

        def step(action):
            run.fill(params)
            action()
            run.note(optimizer, tuple(calls))

        step(optimizer.step)
        # Megatron-FSDP captures the class's function and installs a method of the instance.
        captured = type(optimizer).step
        optimizer.step = types.MethodType(lambda self, *args, **kwargs: captured(self, *args, **kwargs), optimizer)
        step(optimizer.step)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        for _ in range(2):
            step(optimizer.step)
            scheduler.step()
        run.off()
        step(optimizer.step)
        second = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        step(optimizer.step)
        second.step()
        run.on()
        step(optimizer.step)
        del optimizer.step
        step(optimizer.step)
        return optimizer

    compare(sequence)


@pytest.mark.parametrize("scheduled", ["before", "after"])
def test_accelerate_wraps_the_optimizer(scheduled):
    """Its optimizer loads its own state dict when it is made, and with a scaler swaps `step` at every call."""
    accelerate = pytest.importorskip("accelerate")

    def sequence(run):
        accelerate.state.AcceleratorState._reset_state(True)
        accelerator = accelerate.Accelerator(cpu=DEVICE == "cpu")
        model = torch.nn.Linear(16, 4, device=DEVICE)
        with torch.no_grad():
            for param in model.parameters():
                param.copy_(run.random(param.shape))
        optimizer = FusedAdam(model.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        if scheduled == "before":
            model, wrapped, scheduler = accelerator.prepare(model, optimizer, scheduler)
        else:
            model, wrapped = accelerator.prepare(model, optimizer)
        for _ in range(4):
            loss = model(run.random((8, 16))).square().mean()
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            wrapped.step()
            scheduler.step()
            wrapped.zero_grad()
            run.note(optimizer, wrapped.step_was_skipped)
        return optimizer

    compare(sequence)


@everywhere
@pytest.mark.parametrize("capturable", [False, True])
def test_a_scaler_behind_a_wrapper_that_hides_it(machine, capturable):
    """accelerate's patched step takes any arguments, so torch's scaler no longer finds `grad_scaler` in it."""

    def sequence(run):
        params = run.params((33,), (8, 8), dtype=torch.float32)
        optimizer = FusedAdam(params, lr=1e-2, capturable=capturable)
        scaler = torch.amp.GradScaler(DEVICE, init_scale=64.0)
        scaler.scale(torch.ones(1, device=DEVICE))
        for at, hidden in enumerate((False, False, True, True, False)):
            run.fill(params)
            for param in params:
                param.grad *= 64.0
            if at in (1, 3):
                params[0].grad[2] = float("inf")
            if hidden:
                bound = type(optimizer).step.__get__(optimizer)
                optimizer.step = lambda *args, bound=bound, **kwargs: bound(*args, **kwargs)
            with_scaler = run.attempt(lambda: scaler.step(optimizer))
            if with_scaler:
                scaler.update()
            if hidden:
                del optimizer.step
            if optimizer.state:
                run.note(optimizer, scaler.get_scale())
        return optimizer

    compare(sequence)


@pytest.mark.gpu
@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("master", [False, True])
def test_gpu_a_captured_step_with_a_scheduler_and_a_new_capture_after_a_load(moments, master):
    if moments == torch.bfloat16 and not RELEASE.bf16_moments_in_kernel:
        pytest.skip("stock takes no bf16 moments in capturable mode before 2.13")

    def sequence(run):
        dtype = torch.bfloat16 if master else torch.float32
        params = run.params((33, 64), (4097,), dtype=dtype)
        options = {"exp_avg_dtype": moments, "exp_avg_sq_dtype": moments, "master_weights": master}
        optimizer = FusedAdam(params, lr=1e-2, capturable=True, **options)
        run.fill(params)
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(2):
                optimizer.step()
        torch.cuda.current_stream().wait_stream(stream)
        saved = copy.deepcopy(optimizer.state_dict())
        for _ in range(2):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                optimizer.step()
            for replay in range(20):
                for param in params:
                    param.grad.copy_(run.random(param.shape))
                optimizer.param_groups[0]["lr"].fill_(1e-2 / (1 + replay))
                graph.replay()
                run.note(optimizer)
            optimizer.step()
            run.note(optimizer)
            optimizer.load_state_dict(copy.deepcopy(saved))
            optimizer.step()
        return optimizer

    compare(sequence)


@everywhere
@pytest.mark.parametrize("storage", ["fp16 moments", "fp16 master", "bf16 moments"])
def test_scaled_states_are_saved_loaded_into_fresh_optimizers_and_cleared(machine, storage):
    options = {
        "fp16 moments": {"exp_avg_dtype": torch.float16, "exp_avg_sq_dtype": torch.float16},
        "fp16 master": {"master_weight_dtype": torch.float16, "exp_avg_dtype": torch.float16},
        "bf16 moments": {"exp_avg_dtype": torch.bfloat16, "exp_avg_sq_dtype": torch.bfloat16},
    }[storage]

    def sequence(run):
        params = run.params((33, 64), (7,), (4097,))
        optimizer = FusedAdam(params, lr=1e-2, master_weights=True, **options)
        for _ in range(5):
            run.step(optimizer, params)
        saved = copy.deepcopy(optimizer.state_dict())
        fresh = FusedAdam(params, lr=1e-2, master_weights=True, **options)
        fresh.load_state_dict(saved)
        run.note(fresh)
        run.step(fresh, params)
        fresh.state.clear()
        run.step(fresh, params)
        return fresh

    compare(sequence)


@everywhere
@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")
def test_chaos(machine):
    """1,100 tensors in one group, more than a launch of stock's takes, and a random one of everything at each turn."""

    def sequence(run):
        choice = random.Random(17)
        params = run.params(*[(choice.randint(1, 40),) for _ in range(1100)])
        optimizer = FusedAdam(params, weight_decay=0.1, **REMAINDERS)

        def offload():
            for slots, name in states(optimizer):
                slots[name] = slots[name].to("cpu", copy=True).to(DEVICE)

        def revive():
            for slots, name in states(optimizer):
                tensor = slots[name]
                values, size = tensor.clone(), tensor.untyped_storage().nbytes()
                tensor.untyped_storage().resize_(0)
                tensor.untyped_storage().resize_(size)
                tensor.copy_(values)

        def swap_data():
            for param in params:
                param.data = param.data.clone()

        def rebind():
            optimizer.param_groups = [dict(group) for group in optimizer.param_groups]

        def numbers():
            group = optimizer.param_groups[0]
            group["lr"], group["betas"] = choice.random() / 10, (0.8, 0.99)

        def copies():
            copy.deepcopy(optimizer)
            pickle.loads(pickle.dumps(optimizer))

        def reload():
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))

        def sparse():
            one = torch.ones(1, dtype=torch.bfloat16, device=DEVICE)
            index = torch.zeros(1, 1, dtype=torch.int64, device=DEVICE)
            params[3].grad = torch.sparse_coo_tensor(index, one, params[3].shape)

        actions = [offload, revive, swap_data, rebind, numbers, copies, reload, sparse]
        for turn in range(16):
            # Each at least once.
            action = actions[turn] if turn < len(actions) else choice.choice(actions)
            mask = [choice.random() < 0.8 for _ in params]
            run.fill(params, lambda at, mask=mask: mask[at])
            action()
            if not run.attempt(optimizer.step):
                # What stock counts before it refuses is put back, so that both go on from one place.
                optimizer.param_groups[0]["step"] = turn
                optimizer.zero_grad()
            run.note(optimizer)
        return optimizer

    compare(sequence)


def test_the_functions_beneath_wrappers_are_stocks_after_all():
    """The comparison above would prove nothing if its stock runs were patched."""
    assert inspect.unwrap(FusedAdam.step).__module__ == FusedAdam.__module__
