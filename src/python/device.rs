//! Where buckets run: readiness of their kernels, their scratch memory, their launches.

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::cpu;
use crate::gpu::driver::Stream;
use crate::gpu::kernels::{Proof, found_bytes};
use crate::gpu::registry::{registry, with_kernels};
use crate::options::Header;
use crate::plan::column::{Master, Variant};
use crate::plan::{Bucket, GroupPlan};
use crate::python::reader::{Reader, Torch};
use crate::tensor::{Device, Dtype};

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

/// A bucket's launches in one step, with the memory that they need for themselves.
pub struct Run<'py> {
    _scratch: Option<Bound<'py, PyAny>>,
    address: u64,
}

impl<'py> Run<'py> {
    /// Takes that memory from torch's allocator, on the current stream: what is freed there is reused in its order.
    pub fn new(reader: &Reader<'py>, py: Python<'py>, bucket: &Bucket) -> PyResult<Run<'py>> {
        if !matches!(bucket.device, Device::Cuda(_)) || !bucket.variant.two_passes() {
            return Ok(Run { _scratch: None, address: 0 });
        }
        let bytes: usize = bucket.tables.iter().map(found_bytes).sum();
        let torch = py.import("torch")?;
        let arguments = PyDict::new(py);
        arguments.set_item("dtype", torch.getattr("uint8")?)?;
        arguments.set_item("device", bucket.device.to_string())?;
        let tensor = torch.call_method("empty", (bytes,), Some(&arguments))?;
        Ok(Run { address: reader.view(&tensor)?.address, _scratch: Some(tensor) })
    }

    /// Updates the bucket's tensors; returns the number of launches.
    ///
    /// # Safety
    /// The addresses in the bucket's tables must be those of live tensors, read by the reader in this step.
    pub unsafe fn launch(self, py: Python<'_>, bucket: &Bucket, header: &Header) -> PyResult<u64> {
        let (mut found, mut launches) = (self.address, 0);
        for table in bucket.tables.iter().filter(|table| table.has_work()) {
            let header = Header { found, ..*header };
            match bucket.device {
                Device::Cuda(device) => {
                    let stream = Stream(Torch::get(py)?.current_stream(py, device)?);
                    with_kernels(device, |kernels| {
                        // SAFETY: the caller's promise; memory that torch frees later is reused in the order of this
                        // stream.
                        unsafe { kernels.launch(bucket.variant, table, &header, stream) }
                    })?;
                }
                // SAFETY: the caller's promise. The interpreter stays locked, so no Python code can free or replace a
                // tensor meanwhile.
                Device::Cpu | Device::Other => unsafe { cpu::kernels::adam(table, bucket.variant, &header) },
            }
            found += found_bytes(table) as u64;
            launches += 1;
        }
        Ok(launches)
    }
}

/// A variant as Python sees it: (gradient, parameter, exp_avg, exp_avg_sq, master, mode).
pub type VariantNames = (&'static str, &'static str, &'static str, &'static str, &'static str, &'static str);
/// The same, coming back.
pub type OwnedNames = (String, String, String, String, String, String);

const MASTERS: [(Master, &str); 5] = [
    (Master::None, "none"),
    (Master::F32, "float32"),
    (Master::F16, "float16"),
    (Master::F16Idle, "idle float16"),
    (Master::Remainder, "remainder"),
];

/// Names of a variant.
pub fn variant_names(variant: Variant) -> VariantNames {
    let master = MASTERS.iter().find(|(master, _)| *master == variant.master).map_or("", |(_, name)| name);
    let mode = if variant.capturable { "capturable" } else { "host" };
    let [grad, param, exp_avg, exp_avg_sq] =
        [variant.grad, variant.param, variant.exp_avg, variant.exp_avg_sq].map(Dtype::torch_name);
    (grad, param, exp_avg, exp_avg_sq, master, mode)
}

/// The kind of master of this name.
pub fn master_from(name: &str) -> PyResult<Master> {
    let found = MASTERS.iter().find(|(_, known)| *known == name);
    found.map(|(master, _)| *master).ok_or_else(|| PyValueError::new_err(format!("no kind of master is called {name}")))
}

/// The variant of these names.
pub fn variant_from(names: OwnedNames) -> PyResult<Variant> {
    let (grad, param, exp_avg, exp_avg_sq, master, mode) = names;
    let dtype = |name: String| {
        let known = [Dtype::F32, Dtype::F16, Dtype::BF16, Dtype::E4M3, Dtype::E5M2];
        let found = known.into_iter().find(|dtype| dtype.torch_name() == name);
        found.ok_or_else(|| PyValueError::new_err(format!("no kernel takes {name}")))
    };
    let master = master_from(&master)?;
    let capturable = match mode.as_str() {
        "host" => false,
        "capturable" => true,
        other => return Err(PyValueError::new_err(format!("no mode is called {other}"))),
    };
    let (exp_avg, exp_avg_sq) = (dtype(exp_avg)?, dtype(exp_avg_sq)?);
    Ok(Variant { grad: dtype(grad)?, param: dtype(param)?, exp_avg, exp_avg_sq, master, capturable })
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
