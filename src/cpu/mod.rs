//! The step on host memory: for tensors on the CPU, for machines without a GPU, and for tests.
//! The arithmetic follows the GPU's operation for operation in IEEE fp32, with exact reciprocals and square roots and
//! subnormals kept, where the GPU approximates the former and flushes the latter.

pub mod arithmetic;
pub mod casts;
pub mod fp8;
pub mod kernels;
pub mod scaling;
