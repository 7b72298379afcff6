// One Adam or AdamW step over a table of tensors: a block per chunk of CHUNK elements. Where states are stored scaled there
// are two, one that finds the largest new magnitudes and, once those of the whole tensor are known, one that updates.
// Compiled once per combination of: GRAD (F32, F16, BF16), PARAM (these, E4M3, E5M2), EXP_AVG and EXP_AVG_SQ (F32, F16,
// BF16, E4M3), MASTER (0 none, 1 fp32, 2 int16 remainder, 3 fp16, 4 fp16 that stock only rescales), their *_SCALING,
// CAPTURABLE (0, 1), CAPACITY (tensors a launch can hold), and the tuning THREADS, VECTOR, UNROLL, CHUNK.
#include "access.cuh"
#include "arithmetic.cuh"
#include "launch.cuh"
#include "scaling.cuh"
#include "turn.cuh"

#if MASTER == 2
typedef I16 Master;
#elif MASTER >= 3
typedef F16 Master;
#else
typedef F32 Master;
#endif
constexpr bool MASTER_SCALING = MASTER >= 3;

// What every element of a block shares.
struct Shared : Constants {
#if CAPTURABLE
  float inv_scale;
#endif
  float read[3], write[3];  // of exp_avg, exp_avg_sq, master, where these are scaled
  float param_scale;
  __device__ __forceinline__ explicit Shared(const Scalars& scalars) : Constants(scalars) {}
};

// The operands of one group of elements, in registers.
struct Operands {
  Group<GRAD, VECTOR> grad;
#if CAPTURABLE
  bool grad_changed;
#endif
  Group<PARAM, VECTOR> param;
  Group<EXP_AVG, VECTOR> exp_avg;
  Group<EXP_AVG_SQ, VECTOR> exp_avg_sq;
#if MASTER
  Group<Master, VECTOR> master;
#endif

  __device__ __forceinline__ void clear_values() {
    param = {};
#if MASTER
    master = {};
#endif
  }

  // New values of one element; `idle` is that of a master that the update does not use.
  __device__ __forceinline__ void compute(const Shared& shared, int i, float& p, float& m, float& v, float& idle) {
    m = read_state<EXP_AVG_SCALING>(EXP_AVG(), exp_avg.element[i], shared.read[0]);
    v = read_state<EXP_AVG_SQ_SCALING>(EXP_AVG_SQ(), exp_avg_sq.element[i], shared.read[1]);
    float g = widen(GRAD(), grad.element[i]);
#if CAPTURABLE
    g = mul(g, shared.inv_scale);
    const GRAD::Bits unscaled = narrow(GRAD(), g);
    grad_changed |= unscaled != grad.element[i];
    grad.element[i] = unscaled;
#endif
#if MASTER == 2
    p = merge_remainder(param.element[i], master.element[i]);
#elif MASTER == 1 || MASTER == 3
    p = read_state<MASTER_SCALING>(Master(), master.element[i], shared.read[2]);
#else
    p = widen(PARAM(), param.element[i]);
#endif
#if MASTER == 4
    idle = read_state<MASTER_SCALING>(Master(), master.element[i], shared.read[2]);
#endif
    adam_update(shared, g, p, m, v);
  }

  // The update of one element; returns the magnitude of the new fp32 value.
  __device__ __forceinline__ u32 update(const Shared& shared, int i) {
    float p, m, v, idle;
    compute(shared, i, p, m, v, idle);
    exp_avg.element[i] = write_state<EXP_AVG_SCALING>(EXP_AVG(), m, shared.write[0]);
    exp_avg_sq.element[i] = write_state<EXP_AVG_SQ_SCALING>(EXP_AVG_SQ(), v, shared.write[1]);
#if MASTER == 2
    split_remainder(p, param.element[i], master.element[i]);
#else
#if PARAM_SCALING
    param.element[i] = narrow(PARAM(), mul(p, shared.param_scale));
#else
    param.element[i] = narrow(PARAM(), p);
#endif
#if MASTER == 4
    master.element[i] = write_state<MASTER_SCALING>(Master(), idle, shared.write[2]);
#elif MASTER
    master.element[i] = write_state<MASTER_SCALING>(Master(), p, shared.write[2]);
#endif
#endif
    return magnitude(p);
  }
};

// Whether the update reads the parameter itself rather than a master.
constexpr bool READS_PARAM = MASTER == 0 || MASTER == 2 || MASTER == 4;

// How the pass that updates uses memory: what it touches is not touched again, and makes room for what is.
constexpr Use LAST_USE = TWO_PASSES ? LAST : ONCE;

// A block's tensors.
struct Tensors {
  u64 grad, param, exp_avg, exp_avg_sq;
  bool grad_aligned, param_aligned, exp_avg_aligned, exp_avg_sq_aligned;
#if MASTER
  u64 master;
  bool master_aligned;
#endif

  __device__ __forceinline__ Tensors(const Launch& launch, u32 tensor)
      : grad(launch.grad[tensor]), param(launch.param[tensor]), exp_avg(launch.exp_avg[tensor]),
        exp_avg_sq(launch.exp_avg_sq[tensor]), grad_aligned(is_aligned<GRAD>(grad)),
        param_aligned(is_aligned<PARAM>(param)), exp_avg_aligned(is_aligned<EXP_AVG>(exp_avg)),
        exp_avg_sq_aligned(is_aligned<EXP_AVG_SQ>(exp_avg_sq)) {
#if MASTER
    master = launch.master[tensor];
    master_aligned = is_aligned<Master>(master);
#endif
  }

  // Without `values`, parameter and master are left unread, and taken as zeros.
  template <Use USE>
  __device__ __forceinline__ void load(Operands& operands, u64 at, bool values) const {
#if CAPTURABLE
    operands.grad_changed = false;
#endif
    ::load<USE>(operands.grad, grad, at, grad_aligned);
    ::load<USE>(operands.exp_avg, exp_avg, at, exp_avg_aligned);
    ::load<USE>(operands.exp_avg_sq, exp_avg_sq, at, exp_avg_sq_aligned);
    if (!values) return operands.clear_values();
    if (READS_PARAM) ::load<USE>(operands.param, param, at, param_aligned);
#if MASTER
    ::load<USE>(operands.master, master, at, master_aligned);
#endif
  }

  __device__ __forceinline__ void store(const Operands& operands, u64 at) const {
#if CAPTURABLE
    // Without loss scaling nothing changes, and 2 or 4 bytes an element need not move.
    if (operands.grad_changed) ::store<LAST_USE>(operands.grad, grad, at, grad_aligned);
#endif
    ::store<LAST_USE>(operands.param, param, at, param_aligned);
    ::store<LAST_USE>(operands.exp_avg, exp_avg, at, exp_avg_aligned);
    ::store<LAST_USE>(operands.exp_avg_sq, exp_avg_sq, at, exp_avg_sq_aligned);
#if MASTER
    ::store<LAST_USE>(operands.master, master, at, master_aligned);
#endif
  }

  __device__ __forceinline__ void load_one(Operands& operands, u64 at, bool values) const {
#if CAPTURABLE
    operands.grad_changed = false;
#endif
    operands.grad.element[0] = reinterpret_cast<const GRAD::Bits*>(grad)[at];
    operands.exp_avg.element[0] = reinterpret_cast<const EXP_AVG::Bits*>(exp_avg)[at];
    operands.exp_avg_sq.element[0] = reinterpret_cast<const EXP_AVG_SQ::Bits*>(exp_avg_sq)[at];
    if (!values) return operands.clear_values();
    if (READS_PARAM) operands.param.element[0] = reinterpret_cast<const PARAM::Bits*>(param)[at];
#if MASTER
    operands.master.element[0] = reinterpret_cast<const Master::Bits*>(master)[at];
#endif
  }

  __device__ __forceinline__ void store_one(const Operands& operands, u64 at) const {
#if CAPTURABLE
    if (operands.grad_changed) reinterpret_cast<GRAD::Bits*>(grad)[at] = operands.grad.element[0];
#endif
    reinterpret_cast<PARAM::Bits*>(param)[at] = operands.param.element[0];
    reinterpret_cast<EXP_AVG::Bits*>(exp_avg)[at] = operands.exp_avg.element[0];
    reinterpret_cast<EXP_AVG_SQ::Bits*>(exp_avg_sq)[at] = operands.exp_avg_sq.element[0];
#if MASTER
    reinterpret_cast<Master::Bits*>(master)[at] = operands.master.element[0];
#endif
  }
};

// Calls visit(operands, i) for every element of a chunk, after a group was loaded and, with WRITE, before it is stored.
// All threads call ready() before the first visit, while the first groups are on their way.
template <bool WRITE, typename Ready, typename Visit>
__device__ __forceinline__ void walk(
    const Tensors& tensors, const Chunk& chunk, bool values, Ready ready, Visit visit
) {
  const u32 body = chunk.count - chunk.count % VECTOR;
  Operands operands[UNROLL];
  const auto load = [&](u32 base) {
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
      const u32 at = base + u * THREADS * VECTOR;
      if (at < body) tensors.load<WRITE ? LAST_USE : AGAIN>(operands[u], chunk.start + at, values);
    }
  };
  u32 base = threadIdx.x * VECTOR;
  load(base);
  ready();
  while (base < body) {
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
      const u32 at = base + u * THREADS * VECTOR;
      if (at < body) {
#pragma unroll
        for (int i = 0; i < VECTOR; ++i) visit(operands[u], i);
        if (WRITE) tensors.store(operands[u], chunk.start + at);
      }
    }
    base += THREADS * VECTOR * UNROLL;
    load(base);
  }
  // The last elements of a tensor, fewer than a group: a thread each.
  if (body + threadIdx.x < chunk.count) {
    const u64 at = chunk.start + body + threadIdx.x;
    tensors.load_one(operands[0], at, values);
    visit(operands[0], 0);
    if (WRITE) tensors.store_one(operands[0], at);
  }
}

#if TWO_PASSES
// What stored values are multiplied by to read them, from where stock keeps it.
__device__ __forceinline__ void read_factors(const Launch& launch, u32 tensor, float (&read)[3]) {
#if EXP_AVG_SCALING == 2
  read[0] = *launch.exp_avg_scale_inv[tensor];
#elif EXP_AVG_SCALING
  read[0] = *launch.exp_avg_factor[tensor];
#endif
#if EXP_AVG_SQ_SCALING == 2
  read[1] = *launch.exp_avg_sq_scale_inv[tensor];
#elif EXP_AVG_SQ_SCALING
  read[1] = *launch.exp_avg_sq_factor[tensor];
#endif
#if MASTER >= 3
  read[2] = *launch.master_factor[tensor];
#endif
}

// Finds the largest new magnitudes of one chunk.
__device__ __forceinline__ void find(const Launch& launch, const Chunk& chunk, const Tensors& tensors) {
  Shared shared(launch.scalars);
  read_factors(launch, chunk.tensor, shared.read);
  // Of exp_avg, exp_avg_sq and master; of the moments without NaN.
  u32 largest[5] = {};
  // Decoupled weight decay keeps the value out of the moments: then it is only read if it is scaled itself.
  const bool values = MASTER_SCALING || !launch.scalars.adam_w;
  walk<false>(tensors, chunk, values, [] {}, [&](Operands& operands, int i) {
    float p, m, v, idle = 0.0f;
    operands.compute(shared, i, p, m, v, idle);
    if (EXP_AVG_SCALING) largest[0] = max(largest[0], magnitude(m));
    if (EXP_AVG_SCALING == 2) record(largest[3], magnitude(m));
    if (EXP_AVG_SQ_SCALING) largest[1] = max(largest[1], magnitude(v));
    if (EXP_AVG_SQ_SCALING == 2) record(largest[4], magnitude(v));
    if (MASTER_SCALING) largest[2] = max(largest[2], magnitude(MASTER == 4 ? idle : p));
  });
  block_max(largest);
  // From here on no thread reads this chunk.
  if (threadIdx.x != 0) return;
#if EXP_AVG_SCALING == 2
  raise_amax(launch.exp_avg_amax[chunk.tensor], largest[3]);
#endif
#if EXP_AVG_SQ_SCALING == 2
  raise_amax(launch.exp_avg_sq_amax[chunk.tensor], largest[4]);
#endif
  Found& found = launch.found[chunk.tensor];
#pragma unroll
  for (int state = 0; state < 3; ++state) {
    if (state == 0 ? !EXP_AVG_SCALING : state == 1 ? !EXP_AVG_SQ_SCALING : !MASTER_SCALING) continue;
    atomicMax(&found.absmax[state], largest[state]);
    // The update replaces the factors that it also reads with.
    if (chunk.first) found.read[state] = shared.read[state];
  }
  signal(found.chunks);
}

// What the update reads and writes one state with.
template <int SCALING>
__device__ __forceinline__ float exchange(const Found& found, int state, Shared& shared) {
  const float factor = new_factor<SCALING>(__uint_as_float(found.absmax[state]));
  shared.read[state] = found.read[state];
  shared.write[state] = write_factor<SCALING>(factor);
  return factor;
}

// Factors of the update; the first chunk's block puts the new ones where stock keeps them.
__device__ __forceinline__ void exchange_factors(const Launch& launch, const Chunk& chunk, Shared& shared) {
  const Found& found = launch.found[chunk.tensor];
  const bool write = chunk.first && threadIdx.x == 0;
#if EXP_AVG_SCALING
  const float exp_avg_factor = exchange<EXP_AVG_SCALING>(found, 0, shared);
  if (write) *launch.exp_avg_factor[chunk.tensor] = exp_avg_factor;
#endif
#if EXP_AVG_SCALING == 2
  if (write) {
    *launch.exp_avg_scale[chunk.tensor] = shared.write[0];
    *launch.exp_avg_scale_inv[chunk.tensor] = __frcp_rn(shared.write[0]);
  }
#endif
#if EXP_AVG_SQ_SCALING
  const float exp_avg_sq_factor = exchange<EXP_AVG_SQ_SCALING>(found, 1, shared);
  if (write) *launch.exp_avg_sq_factor[chunk.tensor] = exp_avg_sq_factor;
#endif
#if EXP_AVG_SQ_SCALING == 2
  if (write) {
    *launch.exp_avg_sq_scale[chunk.tensor] = shared.write[1];
    *launch.exp_avg_sq_scale_inv[chunk.tensor] = __frcp_rn(shared.write[1]);
  }
#endif
#if MASTER >= 3
  const float master_factor = exchange<MASTER_SCALING>(found, 2, shared);
  if (write) *launch.master_factor[chunk.tensor] = master_factor;
#endif
}
#endif

extern "C" __global__ void __launch_bounds__(THREADS) adam(const __grid_constant__ Launch launch) {
#if TWO_PASSES
  // Turns are taken in the order in which blocks start, so that whoever waits waits for blocks that run.
  const Turn turn(launch, next(launch.found[launch.tensors].chunks));
  const Chunk chunk(launch, turn.chunk);
#else
  const Chunk chunk(launch, blockIdx.x);
#endif
  const Tensors tensors(launch, chunk.tensor);
  if (tensors.grad == 0) return;
#if TWO_PASSES
  if (!turn.update) return find(launch, chunk, tensors);
#endif
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
  Shared shared(scalars);
  shared.inv_scale = *launch.live.inv_scale;
#else
  Shared shared(launch.scalars);
#endif
#if PARAM_SCALING
  shared.param_scale = *launch.param_scale[chunk.tensor];
#endif
  const auto ready = [&] {
#if TWO_PASSES
    await(launch.found[chunk.tensor].chunks, chunk.chunks);
    exchange_factors(launch, chunk, shared);
#endif
  };
  u32 amax[1] = {};
  walk<true>(tensors, chunk, true, ready, [&](Operands& operands, int i) {
    const u32 p = operands.update(shared, i);
    if (PARAM_SCALING) record(amax[0], p);
  });
#if PARAM_SCALING
  block_max(amax);
  raise_amax(launch.param_amax[chunk.tensor], amax[0]);
  if (chunk.first && threadIdx.x == 0) *launch.param_scale_inv[chunk.tensor] = __frcp_rn(shared.param_scale);
#endif
}
