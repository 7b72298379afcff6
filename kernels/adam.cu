// One Adam or AdamW step over a table of tensors in one launch: a block per chunk of CHUNK elements.
// The table, every pointer in it included, is the kernel's parameter: nothing lives in device memory, so nothing can be
// stale, freed under a captured graph, or unmapped by a tool that pauses the allocator.
// Compiled once per combination of: GRAD, PARAM, MOMENT (F32, F16, BF16), MASTER (0 none, 1 fp32, 2 int16 remainder),
// CAPTURABLE (0, 1), CAPACITY (tensors a launch can hold), and the tuning THREADS, VECTOR, UNROLL, CHUNK.
#include "access.cuh"
#include "arithmetic.cuh"

// Mirrored by src/plan/table.rs, which checks the offsets.
struct Launch {
  Scalars scalars;
  Live live;
  u32 tensors;
  u32 bias_correction;  // capturable only: whether the corrections are computed on the device
  u64 grad[CAPACITY];  // 0: no gradient this step, the tensor makes no work
  u64 param[CAPACITY];
  u64 exp_avg[CAPACITY];
  u64 exp_avg_sq[CAPACITY];
#if MASTER
  u64 master[CAPACITY];
#endif
  u32 chunk_end[CAPACITY];  // chunks of the tensors up to and including this one
  u32 tail[CAPACITY];       // elements of the tensor's last chunk, 1 to CHUNK
};

#if MASTER == 2
typedef I16 Master;
#else
typedef F32 Master;
#endif

#if CAPTURABLE
struct LaunchConstants : Constants {
  float inv_scale;
  __device__ __forceinline__ LaunchConstants(const Scalars& scalars, float inv_scale)
      : Constants(scalars), inv_scale(inv_scale) {}
};
#else
typedef Constants LaunchConstants;
#endif

// The operands of one group of elements, in registers.
struct Operands {
  Group<GRAD, VECTOR> grad;
  Group<PARAM, VECTOR> param;
  Group<MOMENT, VECTOR> exp_avg, exp_avg_sq;
#if MASTER
  Group<Master, VECTOR> master;
#endif

  __device__ __forceinline__ void update(const LaunchConstants& constants, int i) {
    float m = widen(MOMENT(), exp_avg.element[i]);
    float v = widen(MOMENT(), exp_avg_sq.element[i]);
    float g = widen(GRAD(), grad.element[i]);
#if CAPTURABLE
    g = mul(g, constants.inv_scale);
    grad.element[i] = narrow(GRAD(), g);
#endif
#if MASTER == 2
    float p = merge_remainder(param.element[i], master.element[i]);
#elif MASTER == 1
    float p = widen(F32(), master.element[i]);
#else
    float p = widen(PARAM(), param.element[i]);
#endif
    adam_update(constants, g, p, m, v);
    exp_avg.element[i] = narrow(MOMENT(), m);
    exp_avg_sq.element[i] = narrow(MOMENT(), v);
#if MASTER == 2
    split_remainder(p, param.element[i], master.element[i]);
#else
    param.element[i] = narrow(PARAM(), p);
#if MASTER == 1
    master.element[i] = narrow(F32(), p);
#endif
#endif
  }
};

// Index of the tensor that owns a chunk: the first whose chunk_end lies beyond it.
__device__ __forceinline__ u32 find_tensor(const Launch& launch, u32 chunk) {
  u32 low = 0, high = launch.tensors - 1;
  while (low < high) {
    const u32 middle = (low + high) / 2;
    if (launch.chunk_end[middle] > chunk) high = middle;
    else low = middle + 1;
  }
  return low;
}

extern "C" __global__ void __launch_bounds__(THREADS) adam(const __grid_constant__ Launch launch) {
  const u32 tensor = find_tensor(launch, blockIdx.x);
  const u64 grad = launch.grad[tensor];
  if (grad == 0) return;
  const u64 param = launch.param[tensor];
  const u64 exp_avg = launch.exp_avg[tensor];
  const u64 exp_avg_sq = launch.exp_avg_sq[tensor];
#if MASTER
  const u64 master = launch.master[tensor];
  const bool master_aligned = is_aligned<Master>(master);
#endif
  const bool grad_aligned = is_aligned<GRAD>(grad), param_aligned = is_aligned<PARAM>(param);
  const bool exp_avg_aligned = is_aligned<MOMENT>(exp_avg), exp_avg_sq_aligned = is_aligned<MOMENT>(exp_avg_sq);

  const u32 first_chunk = tensor ? launch.chunk_end[tensor - 1] : 0;
  const u64 start = static_cast<u64>(blockIdx.x - first_chunk) * CHUNK;
  const u32 count = blockIdx.x + 1 == launch.chunk_end[tensor] ? launch.tail[tensor] : CHUNK;
  const u32 body = count - count % VECTOR;
#if CAPTURABLE
  if (*launch.live.skip == 1) return;
  // Two powers in double: once per block.
  __shared__ float corrections[2];
  Scalars scalars = launch.scalars;
  if (launch.bias_correction) {
    if (threadIdx.x < 2) {
      corrections[threadIdx.x] = bias_correction(threadIdx.x ? scalars.beta2 : scalars.beta1, *launch.live.step);
    }
    __syncthreads();
    scalars.correction1 = corrections[0];
    scalars.correction2 = corrections[1];
  }
  scalars.lr = *launch.live.lr;
  const LaunchConstants constants(scalars, *launch.live.inv_scale);
#else
  const LaunchConstants constants(launch.scalars);
#endif

  for (u32 base = threadIdx.x * VECTOR; base < body; base += THREADS * VECTOR * UNROLL) {
    Operands operands[UNROLL];
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
      const u32 at = base + u * THREADS * VECTOR;
      if (at < body) {
        load(operands[u].grad, grad, start + at, grad_aligned);
#if MASTER != 1
        load(operands[u].param, param, start + at, param_aligned);
#endif
        load(operands[u].exp_avg, exp_avg, start + at, exp_avg_aligned);
        load(operands[u].exp_avg_sq, exp_avg_sq, start + at, exp_avg_sq_aligned);
#if MASTER
        load(operands[u].master, master, start + at, master_aligned);
#endif
      }
    }
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
      const u32 at = base + u * THREADS * VECTOR;
      if (at < body) {
#pragma unroll
        for (int i = 0; i < VECTOR; ++i) operands[u].update(constants, i);
#if CAPTURABLE
        store(operands[u].grad, grad, start + at, grad_aligned);
#endif
        store(operands[u].param, param, start + at, param_aligned);
        store(operands[u].exp_avg, exp_avg, start + at, exp_avg_aligned);
        store(operands[u].exp_avg_sq, exp_avg_sq, start + at, exp_avg_sq_aligned);
#if MASTER
        store(operands[u].master, master, start + at, master_aligned);
#endif
      }
    }
  }

  // The last elements of a tensor, fewer than a group: a thread each.
  const u64 at = start + body + threadIdx.x;
  if (body + threadIdx.x < count) {
    Operands operand;
    operand.grad.element[0] = reinterpret_cast<const GRAD::Bits*>(grad)[at];
    operand.param.element[0] = reinterpret_cast<const PARAM::Bits*>(param)[at];
    operand.exp_avg.element[0] = reinterpret_cast<const MOMENT::Bits*>(exp_avg)[at];
    operand.exp_avg_sq.element[0] = reinterpret_cast<const MOMENT::Bits*>(exp_avg_sq)[at];
#if MASTER
    operand.master.element[0] = reinterpret_cast<const Master::Bits*>(master)[at];
#endif
    operand.update(constants, 0);
#if CAPTURABLE
    reinterpret_cast<GRAD::Bits*>(grad)[at] = operand.grad.element[0];
#endif
    reinterpret_cast<PARAM::Bits*>(param)[at] = operand.param.element[0];
    reinterpret_cast<MOMENT::Bits*>(exp_avg)[at] = operand.exp_avg.element[0];
    reinterpret_cast<MOMENT::Bits*>(exp_avg_sq)[at] = operand.exp_avg_sq.element[0];
#if MASTER
    reinterpret_cast<Master::Bits*>(master)[at] = operand.master.element[0];
#endif
  }
}
