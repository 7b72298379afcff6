//! The process's kernels per device.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use anyhow::{Result, anyhow};

use crate::gpu::kernels::Kernels;

/// Kernels of each CUDA device, or why it has none.
type Devices = Option<HashMap<u16, Result<Kernels, String>>>;

/// A failure is remembered: a missing library does not appear later.
static KERNELS: Mutex<Devices> = Mutex::new(None);

/// All devices asked for so far.
pub fn registry() -> MutexGuard<'static, Devices> {
    // A panic between two lookups leaves a map that is whole.
    KERNELS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Does something with a device's kernels. `action` must be short and must not wait for the interpreter: whoever holds
/// that may be waiting here.
pub fn with_kernels<T>(device: u16, action: impl FnOnce(&mut Kernels) -> Result<T>) -> Result<T> {
    let mut registry = registry();
    let entry = registry.get_or_insert_default().entry(device);
    let kernels = entry.or_insert_with(|| Kernels::new(device).map_err(|error| format!("{error:#}")));
    action(kernels.as_mut().map_err(|reason| anyhow!(reason.clone()))?)
}
