// Which part of which tensor a block works on. Integer arithmetic only. The arrays are those of src/plan/table.rs.
#pragma once
#include "convert.cuh"

// The part of a tensor that a block works on.
struct Chunk {
  u32 tensor;
  u64 start;
  u32 count;
  u32 chunks;  // of the tensor
  bool first;

  // `launch` has tensors, chunk_end (chunks of the tensors up to and including each) and tail (elements of its last
  // chunk).
  template <typename Launch>
  __device__ __forceinline__ Chunk(const Launch& launch, u32 block) {
    // The first tensor whose chunk_end lies beyond the block.
    u32 low = 0, high = launch.tensors - 1;
    while (low < high) {
      const u32 middle = (low + high) / 2;
      if (launch.chunk_end[middle] > block) high = middle;
      else low = middle + 1;
    }
    tensor = low;
    const u32 first_chunk = tensor ? launch.chunk_end[tensor - 1] : 0;
    chunks = launch.chunk_end[tensor] - first_chunk;
    start = static_cast<u64>(block - first_chunk) * CHUNK;
    count = block + 1 == launch.chunk_end[tensor] ? launch.tail[tensor] : CHUNK;
    first = block == first_chunk;
  }
};
