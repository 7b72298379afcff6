// Who finds and who updates in a launch over scaled states, and how blocks wait for each other. Knows nothing of Adam.
#pragma once
#include "convert.cuh"

// What the block whose turn it is does where a chunk is worked on twice: first its largest magnitudes are found, then it
// is updated. The turns of the first kind go through all chunks in order. Chunk c is updated after LAG more than c of them,
// so that it is likely done and still in the cache, but never before all of its tensor's: after
// min(chunks, max(c + LAG, end of its tensor)). Whatever an update waits for has had its turn, then.
struct Turn {
  u32 chunk;
  bool update;

  template <typename Launch>
  __device__ __forceinline__ Turn(const Launch& launch, u32 turn) {
    const u32 chunks = launch.chunk_end[launch.tensors - 1];
    const auto turn_of_update = [&](u32 chunk, u32 end) { return chunk + min(chunks, max(chunk + LAG, end)); };
    // How many tensors' first update is no later than this turn.
    u32 low = 0, high = launch.tensors;
    while (low < high) {
      const u32 middle = (low + high) / 2;
      const u32 first_chunk = middle ? launch.chunk_end[middle - 1] : 0;
      if (turn_of_update(first_chunk, launch.chunk_end[middle]) <= turn) low = middle + 1;
      else high = middle;
    }
    u32 updates = 0;  // whose turn is no later than this
    update = false;
    if (low) {
      const u32 end = launch.chunk_end[low - 1];
      // The last c whose turn is no later: c + chunks <= turn, or both c + end and 2 c + LAG are.
      const auto less = [](u32 a, u32 b) { return static_cast<int>(a - b); };
      const int last = max(less(turn, chunks), min(less(turn, end), less(turn, LAG) >> 1));
      const u32 c = min(static_cast<u32>(last), end - 1);
      update = turn_of_update(c, end) == turn;
      chunk = c;
      updates = c + 1;
    }
    if (!update) chunk = turn - updates;
  }
};

// One more than the last block was given. All threads must call it.
__device__ __forceinline__ u32 next(u32& count) {
  __shared__ u32 number;
  if (threadIdx.x == 0) number = atomicAdd(&count, 1);
  __syncthreads();
  return number;
}

// Counts one, after all that this thread and those it has met at a barrier did before.
__device__ __forceinline__ void signal(u32& count) {
  asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(&count) : "memory");
}

// Waits until `count` is counted. All threads must call it.
__device__ __forceinline__ void await(const u32& count, u32 expected) {
  if (threadIdx.x == 0) {
    u32 seen;
    while (true) {
      asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(&count) : "memory");
      if (seen == expected) break;
      __nanosleep(64);
    }
  }
  __syncthreads();
}
