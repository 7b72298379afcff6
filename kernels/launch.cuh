// What one launch is told: hyperparameters and its table of tensors. The table, every pointer in it included, is the
// kernel's parameter: nothing lives in device memory, so nothing can be stale, freed under a captured graph, or unmapped
// by a tool that pauses the allocator. Knows nothing of arithmetic beyond the hyperparameters' names.
// Layout mirrored by src/plan/table.rs and src/plan/operands.rs.
#pragma once
#include "arithmetic.cuh"
#include "chunk.cuh"

// Scaling of a tensor, as a number for the preprocessor: 0 none; 1 a factor (fp16: value = stored * factor);
// 2 a quantizer (fp8 state: factor, scale, scale_inv, amax); 3 a quantizer that is given (fp8 parameter).
#define TWO_PASSES (EXP_AVG_SCALING || EXP_AVG_SQ_SCALING || MASTER >= 3)

// What blocks that find leave for those that update, per tensor; zeros before the launch.
struct Found {
  u32 absmax[3];  // bits of the largest new magnitude of exp_avg, exp_avg_sq, master; NaN if there is one
  float read[3];  // what stored values are multiplied by to read them
  u32 chunks;     // of the tensor, done; behind the last tensor: turns taken
};

struct Launch {
  Scalars scalars;
  Live live;
  Found* found;  // of each tensor, and one more
  u32 tensors;
  u32 bias_correction;  // capturable only: whether the corrections are computed on the device
  u64 grad[CAPACITY];   // 0: no gradient this step, the tensor makes no work
  u64 param[CAPACITY];
  u64 exp_avg[CAPACITY];
  u64 exp_avg_sq[CAPACITY];
#if MASTER
  u64 master[CAPACITY];
#endif
#if PARAM_SCALING
  const float* param_scale[CAPACITY];
  float* param_scale_inv[CAPACITY];
  float* param_amax[CAPACITY];
#endif
#if EXP_AVG_SCALING
  float* exp_avg_factor[CAPACITY];
#if EXP_AVG_SCALING == 2
  float* exp_avg_scale[CAPACITY];
  float* exp_avg_scale_inv[CAPACITY];
  float* exp_avg_amax[CAPACITY];
#endif
#endif
#if EXP_AVG_SQ_SCALING
  float* exp_avg_sq_factor[CAPACITY];
#if EXP_AVG_SQ_SCALING == 2
  float* exp_avg_sq_scale[CAPACITY];
  float* exp_avg_sq_scale_inv[CAPACITY];
  float* exp_avg_sq_amax[CAPACITY];
#endif
#endif
#if MASTER >= 3
  float* master_factor[CAPACITY];
#endif
  u32 chunk_end[CAPACITY];  // chunks of the tensors up to and including this one
  u32 tail[CAPACITY];       // elements of the tensor's last chunk, 1 to CHUNK
};
