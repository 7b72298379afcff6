//! What Python sees: the module `te_patches._core`. Reads Python objects into plain data: those that are as they were by
//! their words (`again`), the others in full (`group`); turns faults into exceptions (`faults`) and drives plan and kernels
//! (`step`) and loader (`load`, `save`).

mod again;
mod build;
mod device;
mod faults;
mod group;
mod lists;
mod load;
mod moves;
mod options;
mod prefetch;
mod quantized;
mod ranges;
mod reader;
mod recall;
mod save;
mod shim;
mod step;
mod sweep;

use pyo3::prelude::*;

#[pymodule]
mod _core {
    #[cfg(feature = "tune")]
    #[pymodule_export]
    use super::build::tune;
    #[pymodule_export]
    use super::build::{compile_cast, compile_kernel, kernel_cache, kernel_casts, kernel_variants};
    #[pymodule_export]
    use super::device::{proofs, record_proof};
    #[pymodule_export]
    use super::lists::{adam_reference, multi_tensor_adam, multi_tensor_adam_capturable};
    #[pymodule_export]
    use super::load::Load;
    #[pymodule_export]
    use super::reader::tensors_read_by;
    #[pymodule_export]
    use super::save::save_states;
    #[pymodule_export]
    use super::step::Plan;
}
