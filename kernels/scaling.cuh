// How scaled states are read and written. fp16: value = stored * factor; fp8: value = stored * scale_inv. Both factors
// follow from the largest magnitude of the values that are written, so writing takes a pass of its own.
// Arithmetic is torch's, IEEE fp32 with subnormals, unlike Adam's. Source of the rules: FusedAdam._apply_scale and
// FusedAdam.get_unscaled_state; the fp8 cast is that of Float8Quantizer.
#pragma once
#include "convert.cuh"

// Half of the largest fp16, and the largest E4M3.
template <int SCALING>
__device__ __forceinline__ float range() { return SCALING == 2 ? 448.0f : 32752.0f; }

// The factor of values up to `absmax`. Where its reciprocal overflows, stock writes NaN or infinity; here the smallest
// power of two takes its place whose reciprocal is finite.
template <int SCALING>
__device__ __forceinline__ float new_factor(float absmax) {
  const float factor = __fdiv_rn(absmax, range<SCALING>());
  return factor > 0.0f && __frcp_rn(factor) > 0x1.fffffep127f ? 0x1p-127f : factor;
}

// What a value is multiplied by to store it. Zeros have factor 0: fp16 stores 0, and fp8 keeps its scale finite.
template <int SCALING>
__device__ __forceinline__ float write_factor(float factor) {
  if (SCALING == 2) return __frcp_rn(factor == 0.0f ? 0x1p-127f : factor);
  return factor > 0.0f ? __frcp_rn(factor) : 0.0f;
}

template <int SCALING, typename T>
__device__ __forceinline__ float read_state(T type, typename T::Bits bits, float factor) {
  const float x = widen(type, bits);
  return SCALING ? __fmul_rn(x, factor) : x;
}

template <int SCALING, typename T>
__device__ __forceinline__ typename T::Bits write_state(T type, float x, float factor) {
  return narrow(type, SCALING ? __fmul_rn(x, factor) : x);
}

__device__ __forceinline__ u32 magnitude(float x) { return __float_as_uint(x) & 0x7fffffff; }

// Replaces each value by the largest of the block's, in its first thread. All threads must call it, once in a kernel.
template <int N>
__device__ __forceinline__ void block_max(u32 (&values)[N]) {
  __shared__ u32 largest[N];
  if (threadIdx.x < N) largest[threadIdx.x] = 0;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const u32 warp = __reduce_max_sync(0xffffffff, values[i]);
    if (threadIdx.x % 32 == 0) atomicMax(&largest[i], warp);
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < N; ++i) values[i] = largest[i];
}

// Keeps the largest magnitude that is no NaN.
__device__ __forceinline__ void record(u32& largest, u32 value) {
  if (value <= 0x7f800000) largest = max(largest, value);
}

// Raises a quantizer's amax, whose bits order as integers do.
__device__ __forceinline__ void raise_amax(float* amax, u32 largest) {
  if (threadIdx.x == 0) atomicMax(reinterpret_cast<int*>(amax), static_cast<int>(largest));
}
