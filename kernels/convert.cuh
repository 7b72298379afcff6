// Storage types of the operands and their conversions to and from fp32.
// Knows nothing of Adam. Conversions are single PTX instructions, so NVRTC needs no CUDA headers.
// Invariant: widening is exact, narrowing rounds to nearest even once.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

struct F32 { typedef u32 Bits; };
struct F16 { typedef u16 Bits; };
struct BF16 { typedef u16 Bits; };
struct I16 { typedef u16 Bits; };

__device__ __forceinline__ float widen(F32, u32 bits) { return __uint_as_float(bits); }
__device__ __forceinline__ u32 narrow(F32, float x) { return __float_as_uint(x); }

__device__ __forceinline__ float widen(F16, u16 bits) {
  float x;
  asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
  return x;
}
__device__ __forceinline__ u16 narrow(F16, float x) {
  u16 bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
  return bits;
}

__device__ __forceinline__ float widen(BF16, u16 bits) { return __uint_as_float(static_cast<u32>(bits) << 16); }
__device__ __forceinline__ u16 narrow(BF16, float x) {
  u16 bits;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
  return bits;
}
