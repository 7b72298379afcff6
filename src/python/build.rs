//! Compiling kernels without a device, for tests and for the curious.

use pyo3::exceptions::PyIndexError;
use pyo3::prelude::*;

use crate::gpu::cache::Cache;
use crate::gpu::kernels::{self, LARGE_PARAMETERS, SMALL_PARAMETERS, Tuning};
use crate::loader::Cast;
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
    let variant = variant_from(variant)?;
    let options = kernels::options(variant, bytes, arch, Tuning::of(variant));
    let compiled = py.detach(|| kernels::compile(&options))?;
    Ok((compiled.cubin, compiled.log))
}

/// A cast as Python sees it: (source, target, whether the source is scaled, whether the target is).
pub type CastNames = (&'static str, &'static str, bool, bool);

/// Every copy between storages that has a kernel: (source, target, whether the source is scaled, whether the target is).
#[pyfunction]
pub fn kernel_casts() -> Vec<CastNames> {
    let names = |cast: Cast| (cast.source.torch_name(), cast.target.torch_name(), cast.read, cast.two_passes());
    Cast::all().into_iter().map(names).collect()
}

/// As `compile_kernel`, the kernel of the cast at this index of `kernel_casts()`. IndexError if there is none.
#[pyfunction]
pub fn compile_cast(py: Python<'_>, index: usize, arch: i32, large: bool) -> PyResult<(Vec<u8>, String)> {
    let bytes = if large { LARGE_PARAMETERS } else { SMALL_PARAMETERS };
    let all = Cast::all();
    let cast = *all.get(index).ok_or_else(|| PyIndexError::new_err(format!("there is no cast {index}")))?;
    let compiled = py.detach(|| kernels::compile_cast(&kernels::cast_options(cast, bytes, arch)))?;
    Ok((compiled.cubin, compiled.log))
}

/// Folder of compiled kernels: $TE_PATCHES_CACHE, else `te_patches` in $XDG_CACHE_HOME or ~/.cache; None without any.
#[pyfunction]
pub fn kernel_cache() -> Option<std::path::PathBuf> {
    Cache::from_environment().folder().map(std::path::Path::to_owned)
}

/// Builds the Adam kernels of a device anew with other constants; benches/tune.py sweeps them.
#[cfg(feature = "tune")]
#[pyfunction]
pub fn tune(device: u16, threads: u32, vector: u32, unroll: u32, lag: u32) -> PyResult<()> {
    crate::gpu::registry::with_kernels(device, |kernels| {
        kernels.tune(Tuning { threads, vector, unroll, lag });
        Ok(())
    })?;
    Ok(())
}
