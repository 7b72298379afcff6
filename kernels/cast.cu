// Copies tensors from one storage to another, scaled or not: loading states, and reading them for a checkpoint. States
// that are stored scaled take two launches, `cast_absmax` to find the largest magnitudes and `cast` to write.
// Compiled once per combination of: SOURCE (F32, F16, BF16, E4M3, I16), TARGET (the same), SOURCE_SCALING (0 none, 1
// the value is stored * factor), TARGET_SCALING (0 none, 1 fp16 state, 2 fp8 state), CAPACITY, THREADS, VECTOR, UNROLL,
// CHUNK. Arithmetic is torch's, IEEE fp32 with subnormals. A table may hold parts of a tensor: all of them find the
// same absmax.
#include "access.cuh"
#include "chunk.cuh"
#include "scaling.cuh"

struct Cast {
  u64 hyperparameters[9];  // of an Adam launch, whose table this is
  u32 tensors;
  u32 unused;
  u64 source[CAPACITY];
  u64 target[CAPACITY];
#if SOURCE_SCALING
  const float* source_factor[CAPACITY];
#endif
#if TARGET_SCALING
  u32* absmax[CAPACITY];  // bits of the largest magnitude, NaN if there is one; 0 before the first launch
  float* factor[CAPACITY];
#if TARGET_SCALING == 2
  float* scale[CAPACITY];
  float* scale_inv[CAPACITY];
  float* amax[CAPACITY];
#endif
#endif
  u32 chunk_end[CAPACITY];
  u32 tail[CAPACITY];
};

template <typename A, typename B> struct Same { static constexpr bool value = false; };
template <typename A> struct Same<A, A> { static constexpr bool value = true; };
// Bits that no arithmetic may touch: remainders, and fp32 that stays fp32.
constexpr bool VERBATIM =
    !SOURCE_SCALING && !TARGET_SCALING && Same<SOURCE, TARGET>::value && !Same<SOURCE, BF16>::value;

template <typename From, typename To>
__device__ __forceinline__ typename To::Bits convert(typename From::Bits bits, float read, float write) {
  if constexpr (VERBATIM) return bits;
  else return write_state<TARGET_SCALING>(To(), read_state<SOURCE_SCALING>(From(), bits, read), write);
}

// Calls visit(group, at, whole) for every group of elements of a chunk; a group that is not whole has one element.
template <typename Visit>
__device__ __forceinline__ void walk(u64 source, const Chunk& chunk, Visit visit) {
  const bool aligned = is_aligned<SOURCE>(source);
  const u32 body = chunk.count - chunk.count % VECTOR;
  for (u32 base = threadIdx.x * VECTOR; base < body; base += THREADS * VECTOR * UNROLL) {
    Group<SOURCE, VECTOR> groups[UNROLL];
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
      const u32 at = base + u * THREADS * VECTOR;
      if (at < body) load(groups[u], source, chunk.start + at, aligned);
    }
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
      const u32 at = base + u * THREADS * VECTOR;
      if (at < body) visit(groups[u], chunk.start + at, true);
    }
  }
  // The last elements of a tensor, fewer than a group: a thread each.
  if (body + threadIdx.x < chunk.count) {
    const u64 at = chunk.start + body + threadIdx.x;
    Group<SOURCE, VECTOR> group = {};
    group.element[0] = reinterpret_cast<const SOURCE::Bits*>(source)[at];
    visit(group, at, false);
  }
}

__device__ __forceinline__ float source_factor(const Cast& launch, u32 tensor) {
#if SOURCE_SCALING
  return *launch.source_factor[tensor];
#else
  return 1.0f;
#endif
}

#if TARGET_SCALING
extern "C" __global__ void __launch_bounds__(THREADS) cast_absmax(const __grid_constant__ Cast launch) {
  const Chunk chunk(launch, blockIdx.x);
  const float factor = source_factor(launch, chunk.tensor);
  u32 largest[2] = {};  // of all, and of those that are no NaN
  walk(launch.source[chunk.tensor], chunk, [&](const Group<SOURCE, VECTOR>& group, u64, bool) {
    // Elements beyond a group that is not whole are zeros.
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) {
      const u32 found = magnitude(read_state<SOURCE_SCALING>(SOURCE(), group.element[i], factor));
      largest[0] = max(largest[0], found);
      record(largest[1], found);
    }
  });
  block_max(largest);
  if (threadIdx.x == 0) atomicMax(launch.absmax[chunk.tensor], largest[0]);
#if TARGET_SCALING == 2
  raise_amax(launch.amax[chunk.tensor], largest[1]);
#endif
}
#endif

extern "C" __global__ void __launch_bounds__(THREADS) cast(const __grid_constant__ Cast launch) {
  const Chunk chunk(launch, blockIdx.x);
  const float read = source_factor(launch, chunk.tensor);
  float write = 1.0f;
#if TARGET_SCALING
  const float factor = new_factor<TARGET_SCALING>(__uint_as_float(*launch.absmax[chunk.tensor]));
  write = write_factor<TARGET_SCALING>(factor);
  if (chunk.first && threadIdx.x == 0) {
    *launch.factor[chunk.tensor] = factor;
#if TARGET_SCALING == 2
    *launch.scale[chunk.tensor] = write;
    *launch.scale_inv[chunk.tensor] = __frcp_rn(write);
#endif
  }
#endif
  const u64 target = launch.target[chunk.tensor];
  const bool aligned = is_aligned<TARGET>(target);
  walk(launch.source[chunk.tensor], chunk, [&](const Group<SOURCE, VECTOR>& group, u64 at, bool whole) {
    Group<TARGET, VECTOR> out;
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) out.element[i] = convert<SOURCE, TARGET>(group.element[i], read, write);
    if (whole) store(out, target, at, aligned);
    else reinterpret_cast<TARGET::Bits*>(target)[at] = out.element[0];
  });
}
