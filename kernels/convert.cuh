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
struct E4M3 { typedef u8 Bits; };
struct E5M2 { typedef u8 Bits; };

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

// fp8: no infinity but in E5M2, which saturates too; NaN is 0x7f.
__device__ __forceinline__ float widen(E4M3, u8 bits) {
  // The bits as an fp32 whose exponent is 120 too small; the product is exact, subnormals included.
  const float x = __fmul_rn(__uint_as_float((bits & 0x7fu) << 20), 0x1p120f);
  const u32 magnitude = (bits & 0x7f) == 0x7f ? 0x7fffffff : __float_as_uint(x);
  return __uint_as_float(magnitude | (bits & 0x80u) << 24);
}

#if __CUDA_ARCH__ < 890
// Nearest even, saturating. MANTISSA bits are kept; SMALLEST is the exponent field, as fp32 has it, of the smallest
// normal; LARGEST the code of the largest finite value.
template <int MANTISSA, u32 SMALLEST, u32 LARGEST>
__device__ __forceinline__ u8 narrow_fp8(float x) {
  const u32 bits = __float_as_uint(x), magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) return 0x7f;
  constexpr int DROPPED = 23 - MANTISSA;
  u32 code;
  if (magnitude < SMALLEST << 23) {
    // Adding a power of two whose last place is the quantum of subnormals leaves their code in the low bits.
    const float anchor = __uint_as_float((SMALLEST + DROPPED) << 23);
    code = __float_as_uint(__fadd_rn(__uint_as_float(magnitude), anchor)) & 0xff;
  } else {
    const u32 rounded = magnitude + (1u << (DROPPED - 1)) - 1 + (magnitude >> DROPPED & 1);
    code = (rounded >> DROPPED) - ((SMALLEST - 1) << MANTISSA);
  }
  return static_cast<u8>((code < LARGEST ? code : LARGEST) | (bits >> 24 & 0x80));
}
__device__ __forceinline__ u8 narrow(E4M3, float x) { return narrow_fp8<3, 121, 0x7e>(x); }
__device__ __forceinline__ u8 narrow(E5M2, float x) { return narrow_fp8<2, 113, 0x7b>(x); }
#else
__device__ __forceinline__ u8 narrow(E4M3, float x) {
  u16 pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(0.0f), "f"(x));
  return static_cast<u8>(pair);
}
__device__ __forceinline__ u8 narrow(E5M2, float x) {
  u16 pair;
  asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(0.0f), "f"(x));
  return static_cast<u8>(pair);
}
#endif
