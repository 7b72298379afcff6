//! The step on CUDA devices: kernels compiled at first use by NVRTC, launched through the driver on the caller's
//! stream. Both libraries are found at run time; without them every call here is an error that says what is missing.

pub mod cache;
pub mod driver;
pub mod kernels;
pub mod nvrtc;
pub mod registry;
pub mod ring;
