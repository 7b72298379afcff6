//! Where buckets run: the process's kernels per device, and what is known of them.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use anyhow::{Result, anyhow};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::cpu;
use crate::gpu::driver::Stream;
use crate::gpu::kernels::{Kernels, Proof};
use crate::options::Header;
use crate::plan::column::{Master, Variant};
use crate::plan::{Bucket, GroupPlan};
use crate::python::reader::Torch;
use crate::tensor::{Device, Dtype};

/// Kernels of each CUDA device, or why it has none. A failure is remembered: a missing library does not appear later.
static KERNELS: Mutex<Option<HashMap<u16, Result<Kernels, String>>>> = Mutex::new(None);

fn registry() -> MutexGuard<'static, Option<HashMap<u16, Result<Kernels, String>>>> {
    // A panic between two lookups leaves a map that is whole.
    KERNELS.lock().unwrap_or_else(PoisonError::into_inner)
}

fn with_kernels<T>(device: u16, action: impl FnOnce(&mut Kernels) -> Result<T>) -> Result<T> {
    let mut registry = registry();
    let entry = registry.get_or_insert_default().entry(device);
    let kernels = entry.or_insert_with(|| Kernels::new(device).map_err(|error| format!("{error:#}")));
    action(kernels.as_mut().map_err(|reason| anyhow!(reason.clone()))?)
}

/// Bytes of kernel parameters a launch on a device may use.
pub fn parameter_bytes(device: Device) -> usize {
    const HOST: usize = 1 << 15;
    match device {
        Device::Cuda(index) => with_kernels(index, |kernels| Ok(kernels.parameter_bytes())).unwrap_or(HOST),
        Device::Cpu | Device::Other => HOST,
    }
}

/// Whether a plan's kernels can run.
pub enum Readiness {
    /// All of them.
    Ready,
    /// These have to be compared with stock first.
    Unproven(Vec<(u16, Variant)>),
    /// One of them cannot or must not.
    Unusable(String),
}

/// Compiles and loads what a plan takes and asks whether it was shown equal to stock.
pub fn readiness(plan: &GroupPlan) -> Readiness {
    let mut unproven = Vec::new();
    for bucket in plan.buckets() {
        let Device::Cuda(device) = bucket.device else { continue };
        let known = with_kernels(device, |kernels| {
            for table in &bucket.tables {
                kernels.prepare(bucket.variant, table)?;
            }
            Ok(kernels.proof(bucket.variant).cloned())
        });
        match known {
            Ok(Some(Proof::Equal)) => {}
            Ok(Some(Proof::Unusable(reason))) => return Readiness::Unusable(reason),
            Ok(None) => unproven.push((device, bucket.variant)),
            Err(error) => return Readiness::Unusable(format!("{error:#}")),
        }
    }
    if unproven.is_empty() { Readiness::Ready } else { Readiness::Unproven(unproven) }
}

/// Launches a bucket; returns the number of launches.
///
/// # Safety
/// The addresses in the bucket's tables must be those of live tensors, read by the reader since Python last ran.
pub unsafe fn launch(py: Python<'_>, bucket: &Bucket, header: &Header) -> PyResult<u64> {
    let mut launches = 0;
    for table in bucket.tables.iter().filter(|table| table.has_work()) {
        match bucket.device {
            Device::Cuda(device) => {
                let stream = Stream(Torch::get(py)?.current_stream(py, device)?);
                with_kernels(device, |kernels| {
                    // SAFETY: the caller's promise; memory that torch frees later is reused in the order of this stream.
                    unsafe { kernels.launch(bucket.variant, table, header, stream) }
                })?;
            }
            Device::Cpu | Device::Other => {
                // SAFETY: the caller's promise. The interpreter stays locked, so no Python code can free or replace a
                // tensor meanwhile.
                unsafe { cpu::kernels::adam(table, bucket.variant, header) };
            }
        }
        launches += 1;
    }
    Ok(launches)
}

/// A variant as Python sees it: (gradient, parameter, moments, master, mode).
pub type VariantNames = (&'static str, &'static str, &'static str, &'static str, &'static str);
/// The same, coming back.
pub type OwnedNames = (String, String, String, String, String);

/// Names of a variant.
pub fn variant_names(variant: Variant) -> VariantNames {
    let master = match variant.master {
        Master::None => "none",
        Master::F32 => "float32",
        Master::Remainder => "remainder",
    };
    let mode = if variant.capturable { "capturable" } else { "host" };
    (variant.grad.torch_name(), variant.param.torch_name(), variant.moment.torch_name(), master, mode)
}

/// The variant of these names.
pub fn variant_from(names: OwnedNames) -> PyResult<Variant> {
    let dtype = |name: &str| {
        let known = [Dtype::F32, Dtype::F16, Dtype::BF16].into_iter().find(|dtype| dtype.torch_name() == name);
        known.ok_or_else(|| PyValueError::new_err(format!("no kernel takes {name}")))
    };
    let master = match names.3.as_str() {
        "none" => Master::None,
        "float32" => Master::F32,
        "remainder" => Master::Remainder,
        other => return Err(PyValueError::new_err(format!("no kind of master is called {other}"))),
    };
    let capturable = match names.4.as_str() {
        "host" => false,
        "capturable" => true,
        other => return Err(PyValueError::new_err(format!("no mode is called {other}"))),
    };
    Ok(Variant { grad: dtype(&names.0)?, param: dtype(&names.1)?, moment: dtype(&names.2)?, master, capturable })
}

/// Remembers whether a kernel gave stock's bits on a device: `reason` is None if it did.
#[pyfunction]
pub fn record_proof(device: u16, variant: OwnedNames, reason: Option<String>) -> PyResult<()> {
    let variant = variant_from(variant)?;
    with_kernels(device, |kernels| {
        kernels.record(variant, reason.map_or(Proof::Equal, Proof::Unusable));
        Ok(())
    })?;
    Ok(())
}

/// (device, kernel, equal, reason) of every kernel that was compared with stock in this process.
#[pyfunction]
pub fn proofs() -> Vec<(u16, String, bool, String)> {
    let mut rows = Vec::new();
    for (&device, kernels) in registry().iter().flatten() {
        let Ok(kernels) = kernels else { continue };
        for (variant, proof) in kernels.proofs() {
            let (equal, reason) = match proof {
                Proof::Equal => (true, String::new()),
                Proof::Unusable(reason) => (false, reason.clone()),
            };
            rows.push((device, variant.name(), equal, reason));
        }
    }
    rows.sort();
    rows
}
