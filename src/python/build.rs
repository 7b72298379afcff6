//! Compiling kernels without a device, for tests and for the curious.

use pyo3::prelude::*;

use crate::gpu::cache::Cache;
use crate::gpu::kernels::{self, LARGE_PARAMETERS, SMALL_PARAMETERS};
use crate::python::device::{OwnedNames, VariantNames, variant_from, variant_names};

/// Every combination of storage types that has a kernel: (gradient, parameter, exp_avg, exp_avg_sq, master, mode).
#[pyfunction]
pub fn kernel_variants() -> Vec<VariantNames> {
    kernels::all_variants().into_iter().map(variant_names).collect()
}

/// Compiles one kernel for compute capability `arch` (90 for sm_90) with NVRTC; returns (machine code, compiler's log).
/// Needs no GPU. RuntimeError without NVRTC or if the source does not compile.
#[pyfunction]
pub fn compile_kernel(py: Python<'_>, variant: OwnedNames, arch: i32, large: bool) -> PyResult<(Vec<u8>, String)> {
    let bytes = if large { LARGE_PARAMETERS } else { SMALL_PARAMETERS };
    let options = kernels::options(variant_from(variant)?, bytes, arch);
    let compiled = py.detach(|| kernels::compile(&options))?;
    Ok((compiled.cubin, compiled.log))
}

/// Folder of compiled kernels: $TE_PATCHES_CACHE, else `te_patches` in $XDG_CACHE_HOME or ~/.cache; None without any.
#[pyfunction]
pub fn kernel_cache() -> Option<std::path::PathBuf> {
    Cache::from_environment().folder().map(std::path::Path::to_owned)
}
