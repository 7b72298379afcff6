//! Makes copies between storages wherever their tensors live: by kernels on a device, by threads in host memory, or
//! through the ring between them.

use std::collections::BTreeSet;

use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::cpu;
use crate::gpu::driver::Stream;
use crate::gpu::registry::with_kernels;
use crate::gpu::ring::{Ring, SLOT_BYTES, SLOTS, run};
use crate::loader::Copy;
use crate::python::reader::{Reader, Torch};
use crate::tensor::Device;

/// A copy and where it leads.
#[derive(Clone, Copy)]
pub struct Move {
    pub copy: Copy,
    pub from: Device,
    pub to: Device,
}

/// Makes copies whose tensors the caller holds. On devices they are ordered on torch's current stream; those that read
/// or write host memory are done when this returns. `progress` is told the bytes of each portion that went through the
/// ring.
pub fn make(py: Python<'_>, moves: &[Move], progress: Option<Py<PyAny>>) -> PyResult<()> {
    let between = |from: Device, to: Device| moves.iter().filter(move |each| (each.from, each.to) == (from, to));
    let host: Vec<Copy> = between(Device::Cpu, Device::Cpu).map(|each| each.copy).collect();
    if !host.is_empty() {
        // SAFETY: the addresses were read from tensors that the caller holds.
        py.detach(|| unsafe { cpu::casts::cast(&host) });
    }
    let cuda = |device: Device| if let Device::Cuda(index) = device { Some(index) } else { None };
    let devices: BTreeSet<u16> = moves.iter().filter_map(|each| cuda(each.to).or(cuda(each.from))).collect();
    for device in devices {
        let here = Device::Cuda(device);
        let stream = Stream(Torch::get(py)?.current_stream(py, device)?);
        let on = |from, to| between(from, to).map(|each| each.copy).collect::<Vec<Copy>>();
        let [mut inside, mut inward, outward] = [on(here, here), on(Device::Cpu, here), on(here, Device::Cpu)];
        let _scratch = find_room(py, device, inside.iter_mut().chain(&mut inward))?;
        if !inside.is_empty() {
            with_kernels(device, |kernels| {
                let bytes = kernels.parameter_bytes();
                let scaled = inside.iter().filter(|copy| copy.cast.two_passes()).copied();
                // SAFETY: the addresses were read from tensors that the caller holds, on this stream.
                unsafe {
                    run(kernels, scaled, bytes, true, stream)?;
                    run(kernels, inside.iter().copied(), bytes, false, stream)
                }
            })?;
        }
        if inward.is_empty() && outward.is_empty() {
            continue;
        }
        let buffers = [(SLOTS as u64 * SLOT_BYTES, None), (SLOT_BYTES, Some(here))];
        let [(_host, host), (_staging, staging)] = [buffer(py, buffers[0])?, buffer(py, buffers[1])?];
        let ring = Ring { device, stream, host, staging };
        let mut done = |bytes: u64| {
            if let Some(progress) = &progress {
                // A failing display must not stop a load half-way.
                Python::attach(|py| {
                    if let Err(error) = progress.call1(py, (bytes,)) {
                        error.write_unraisable(py, None);
                    }
                });
            }
        };
        py.detach(|| {
            // SAFETY: as above; the buffers are this call's own.
            unsafe {
                if !inward.is_empty() {
                    ring.load(&inward, &mut done)?;
                }
                if !outward.is_empty() {
                    ring.save(&outward, &mut done)?;
                }
            }
            anyhow::Ok(())
        })?;
    }
    Ok(())
}

/// Gives the copies that find a largest magnitude a place for it; returns what keeps it.
fn find_room<'py, 'a>(
    py: Python<'py>,
    device: u16,
    copies: impl Iterator<Item = &'a mut Copy>,
) -> PyResult<Option<Bound<'py, PyAny>>> {
    let scaled: Vec<&mut Copy> = copies.filter(|copy| copy.cast.two_passes()).collect();
    if scaled.is_empty() {
        return Ok(None);
    }
    let torch = py.import("torch")?;
    let arguments = PyDict::new(py);
    arguments.set_item("dtype", torch.getattr("int32")?)?;
    arguments.set_item("device", Device::Cuda(device).to_string())?;
    let room = torch.call_method("zeros", (scaled.len(),), Some(&arguments))?;
    let address = Reader::new(py)?.view(&room)?.address;
    for (at, copy) in scaled.into_iter().enumerate() {
        copy.absmax = address + 4 * at as u64;
    }
    Ok(Some(room))
}

/// A buffer of torch's, page-locked on the host if no device is given, and its address.
fn buffer<'py>(py: Python<'py>, (bytes, device): (u64, Option<Device>)) -> PyResult<(Bound<'py, PyAny>, u64)> {
    let torch = py.import("torch")?;
    let arguments = PyDict::new(py);
    arguments.set_item("dtype", torch.getattr("uint8")?)?;
    match device {
        Some(device) => arguments.set_item("device", device.to_string())?,
        None => {
            arguments.set_item("device", "cpu")?;
            arguments.set_item("pin_memory", true)?;
        }
    }
    let buffer = torch.call_method("empty", (bytes,), Some(&arguments))?;
    let address = Reader::new(py)?.view(&buffer)?.address;
    Ok((buffer, address))
}
