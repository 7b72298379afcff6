// Groups of VECTOR consecutive elements moved between global memory and registers.
// Knows storage types only. A group whose address is a multiple of its own size (at most 16 bytes) moves in 16-byte
// (or, when smaller, one) accesses; any other address moves element by element, which coalesces as well across a warp.
#pragma once
#include "convert.cuh"

template <typename T, int N>
struct Group {
  union {
    typename T::Bits element[N];
    u32 word[N * sizeof(typename T::Bits) / 4];
  };
};

// Largest access of a group: the group itself up to 16 bytes.
template <typename T>
__host__ __device__ constexpr u32 access_bytes() {
  return VECTOR * sizeof(typename T::Bits) < 16 ? VECTOR * sizeof(typename T::Bits) : 16;
}

template <typename T>
__device__ __forceinline__ bool is_aligned(u64 address) {
  return address % access_bytes<T>() == 0;
}

template <typename T>
__device__ __forceinline__ void load(Group<T, VECTOR>& group, u64 address, u64 first, bool aligned) {
  const typename T::Bits* source = reinterpret_cast<const typename T::Bits*>(address) + first;
  if (aligned) {
    if constexpr (access_bytes<T>() == 16) {
#pragma unroll
      for (int i = 0; i < VECTOR * sizeof(typename T::Bits) / 16; ++i) {
        const uint4 piece = reinterpret_cast<const uint4*>(source)[i];
        group.word[4 * i] = piece.x;
        group.word[4 * i + 1] = piece.y;
        group.word[4 * i + 2] = piece.z;
        group.word[4 * i + 3] = piece.w;
      }
    } else if constexpr (access_bytes<T>() == 8) {
      const uint2 piece = *reinterpret_cast<const uint2*>(source);
      group.word[0] = piece.x;
      group.word[1] = piece.y;
    } else {
      group.word[0] = *reinterpret_cast<const u32*>(source);
    }
  } else {
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) group.element[i] = source[i];
  }
}

template <typename T>
__device__ __forceinline__ void store(const Group<T, VECTOR>& group, u64 address, u64 first, bool aligned) {
  typename T::Bits* target = reinterpret_cast<typename T::Bits*>(address) + first;
  if (aligned) {
    if constexpr (access_bytes<T>() == 16) {
#pragma unroll
      for (int i = 0; i < VECTOR * sizeof(typename T::Bits) / 16; ++i) {
        reinterpret_cast<uint4*>(target)[i] =
            make_uint4(group.word[4 * i], group.word[4 * i + 1], group.word[4 * i + 2], group.word[4 * i + 3]);
      }
    } else if constexpr (access_bytes<T>() == 8) {
      *reinterpret_cast<uint2*>(target) = make_uint2(group.word[0], group.word[1]);
    } else {
      *reinterpret_cast<u32*>(target) = group.word[0];
    }
  } else {
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) target[i] = group.element[i];
  }
}
