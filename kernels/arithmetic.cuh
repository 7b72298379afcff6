// The Adam update of one element, operation for operation as Transformer Engine's kernels compute it once compiled
// with fast math: every operation is fp32, rounds to nearest even once and flushes subnormals; x / y is x times the
// approximate reciprocal of y. Written in PTX so that no compiler may contract, reassociate or refine it.
// Knows nothing of storage or launches. Source of the sequence: the machine code of adam.cu, releases 2.4 to 2.20.2.
#pragma once
#include "convert.cuh"

__device__ __forceinline__ float add(float x, float y) {
  float z;
  asm("add.rn.ftz.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
  return z;
}
__device__ __forceinline__ float mul(float x, float y) {
  float z;
  asm("mul.rn.ftz.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
  return z;
}
__device__ __forceinline__ float fma(float x, float y, float z) {
  float r;
  asm("fma.rn.ftz.f32 %0, %1, %2, %3;" : "=f"(r) : "f"(x), "f"(y), "f"(z));
  return r;
}
__device__ __forceinline__ float reciprocal(float x) {
  float z;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(z) : "f"(x));
  return z;
}
__device__ __forceinline__ float square_root(float x) {
  float z;
  asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(z) : "f"(x));
  return z;
}

// Scalars of one launch, as the host passes them.
struct Scalars {
  float lr, beta1, beta2, eps, weight_decay;
  float correction1, correction2;  // 1 - beta^step, or 1 without bias correction
  u32 adam_w;                      // 1: decoupled weight decay; 0: weight decay added to the gradient
};

// What a capturable launch reads on the device instead, so that a captured graph sees their values at each replay.
struct Live {
  const float* lr;
  const int* step;
  const float* inv_scale;  // gradients are multiplied by it, and written back
  const int* skip;         // 1: an overflow was found, nothing is updated
};

// The bias correction as the device computes it: the power in double, rounded once.
__device__ __forceinline__ float bias_correction(float beta, int step) {
  return static_cast<float>(1.0 - pow(static_cast<double>(beta), static_cast<double>(step)));
}

// What every element of a launch shares.
struct Constants {
  Scalars s;
  float one_minus_beta1, one_minus_beta2, inverse_correction1, inverse_correction2;
  __device__ __forceinline__ explicit Constants(const Scalars& scalars)
      : s(scalars),
        one_minus_beta1(add(1.0f, -scalars.beta1)),
        one_minus_beta2(add(1.0f, -scalars.beta2)),
        inverse_correction1(reciprocal(scalars.correction1)),
        inverse_correction2(reciprocal(scalars.correction2)) {}
};

// Updates p, m and v of one element from its gradient g.
__device__ __forceinline__ void adam_update(const Constants& c, float g, float& p, float& m, float& v) {
  if (!c.s.adam_w) g = fma(p, c.s.weight_decay, g);
  m = fma(m, c.s.beta1, mul(g, c.one_minus_beta1));
  v = fma(v, c.s.beta2, mul(mul(g, c.one_minus_beta2), g));
  const float denominator = add(square_root(mul(v, c.inverse_correction2)), c.s.eps);
  const float ratio = mul(mul(m, c.inverse_correction1), reciprocal(denominator));
  const float update = c.s.adam_w ? fma(p, c.s.weight_decay, ratio) : ratio;
#if CAPTURABLE && __CUDA_ARCH__ < 1000
  // Transformer Engine's capturable kernels are compiled without this contraction up to sm_90, and with it from sm_100.
  p = add(p, -mul(c.s.lr, update));
#else
  p = fma(-update, c.s.lr, p);
#endif
}

// An fp32 master kept as a bf16 parameter (its upper half, rounded half away from zero) and an int16 remainder.
__device__ __forceinline__ float merge_remainder(u16 high, u16 low) {
  if (low & 0x8000) high -= 1;
  return __uint_as_float(static_cast<u32>(high) << 16 | low);
}
__device__ __forceinline__ void split_remainder(float x, u16& high, u16& low) {
  const u32 bits = __float_as_uint(x);
  high = static_cast<u16>(bits >> 16);
  low = static_cast<u16>(bits);
  if ((bits & 0x7fffffff) > 0x7f800000) {
    // Rounded like a number, NaN would become -0.0: stock hides it so from everyone who reads the parameter.
    high |= 0x40;
    low &= 0x7fff;
  } else if (low & 0x8000) {
    high += 1;
  }
}
