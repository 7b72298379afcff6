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

// Whether a launch comes back to the memory that it moves: what it uses for the last time leaves the cache first.
enum Use { ONCE, AGAIN, LAST };

template <Use USE>
__device__ __forceinline__ void load_words(u32* word, const void* source, u32 bytes) {
  if (bytes == 16) {
    if (USE == LAST) {
      asm volatile("ld.global.cs.v4.u32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(word[0]), "=r"(word[1]), "=r"(word[2]), "=r"(word[3]) : "l"(source) : "memory");
    } else {
      const uint4 piece = *static_cast<const uint4*>(source);
      word[0] = piece.x;
      word[1] = piece.y;
      word[2] = piece.z;
      word[3] = piece.w;
    }
  } else if (bytes == 8) {
    if (USE == LAST) {
      asm volatile("ld.global.cs.v2.u32 {%0, %1}, [%2];" : "=r"(word[0]), "=r"(word[1]) : "l"(source) : "memory");
    } else {
      const uint2 piece = *static_cast<const uint2*>(source);
      word[0] = piece.x;
      word[1] = piece.y;
    }
  } else if (USE == LAST) {
    asm volatile("ld.global.cs.u32 %0, [%1];" : "=r"(word[0]) : "l"(source) : "memory");
  } else {
    word[0] = *static_cast<const u32*>(source);
  }
}

template <Use USE>
__device__ __forceinline__ void store_words(void* target, const u32* word, u32 bytes) {
  if (bytes == 16) {
    if (USE == LAST) {
      asm volatile("st.global.cs.v4.u32 [%0], {%1, %2, %3, %4};"
                   ::"l"(target), "r"(word[0]), "r"(word[1]), "r"(word[2]), "r"(word[3]) : "memory");
    } else {
      *static_cast<uint4*>(target) = make_uint4(word[0], word[1], word[2], word[3]);
    }
  } else if (bytes == 8) {
    if (USE == LAST) {
      asm volatile("st.global.cs.v2.u32 [%0], {%1, %2};" ::"l"(target), "r"(word[0]), "r"(word[1]) : "memory");
    } else {
      *static_cast<uint2*>(target) = make_uint2(word[0], word[1]);
    }
  } else if (USE == LAST) {
    asm volatile("st.global.cs.u32 [%0], %1;" ::"l"(target), "r"(word[0]) : "memory");
  } else {
    *static_cast<u32*>(target) = word[0];
  }
}

template <Use USE = ONCE, typename T>
__device__ __forceinline__ void load(Group<T, VECTOR>& group, u64 address, u64 first, bool aligned) {
  const typename T::Bits* source = reinterpret_cast<const typename T::Bits*>(address) + first;
  if (aligned) {
    constexpr u32 BYTES = access_bytes<T>(), PER_ACCESS = BYTES / sizeof(typename T::Bits);
#pragma unroll
    for (u32 i = 0; i < VECTOR / PER_ACCESS; ++i) {
      load_words<USE>(group.word + i * BYTES / 4, source + i * PER_ACCESS, BYTES);
    }
  } else {
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) group.element[i] = source[i];
  }
}

template <Use USE = ONCE, typename T>
__device__ __forceinline__ void store(const Group<T, VECTOR>& group, u64 address, u64 first, bool aligned) {
  typename T::Bits* target = reinterpret_cast<typename T::Bits*>(address) + first;
  if (aligned) {
    constexpr u32 BYTES = access_bytes<T>(), PER_ACCESS = BYTES / sizeof(typename T::Bits);
#pragma unroll
    for (u32 i = 0; i < VECTOR / PER_ACCESS; ++i) {
      store_words<USE>(target + i * PER_ACCESS, group.word + i * BYTES / 4, BYTES);
    }
  } else {
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) target[i] = group.element[i];
  }
}
