//! Loading a checkpoint's states into the buffers that the optimizer has. Everything is read and checked first (`read`,
//! `place`); then nothing can fail but the device (`write`).
//! Invariant: `read` and `place` change nothing; the objects in a `Load` keep all memory alive that its addresses name.

use std::collections::HashSet;

use pyo3::exceptions::{PyAssertionError, PyKeyError, PyRuntimeError, PyTypeError};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyString};

use crate::gpu::registry::with_kernels;
use crate::loader::overlap::{Extent, shared};
use crate::loader::{Cast, Copy};
use crate::plan::operands::{Scaled, Scaling};
use crate::python::faults::{Place, describe, name as name_of};
use crate::python::moves::{Move, make};
use crate::python::reader::{Kind, Reader, StateWalk, references};
use crate::tensor::{Device, Dtype, Layout, View};

/// Where a state is put.
struct Target {
    /// The state as the optimizer holds it.
    outer: Py<PyAny>,
    /// The tensor that holds the elements.
    inner: Py<PyAny>,
    view: View,
    scaling: Scaling,
    /// What else must live for the addresses to be right.
    _kept: Vec<Py<PyAny>>,
    /// An fp8 tensor with a transposed copy of its data, which a load makes stale.
    transposed: Option<Py<PyAny>>,
}

impl Target {
    fn mark_stale(&self, py: Python<'_>) -> PyResult<()> {
        match &self.transposed {
            Some(tensor) => tensor.bind(py).setattr(intern!(py, "_transpose_invalid"), true),
            None => Ok(()),
        }
    }
}

/// One state of one parameter.
struct Entry {
    param: Py<PyAny>,
    place: Place,
    name: Py<PyString>,
    /// The storage that the optimizer's options call for; int16 for a remainder.
    storage: Dtype,
    /// Layout and size of the parameter's local shard.
    shard: View,
    sharded: bool,
    source: Py<PyAny>,
    /// None: torch has to make a plain fp32 (or int16) tensor of the source first.
    source_view: Option<View>,
    target: Option<Target>,
    /// The source is the target itself.
    same: bool,
}

impl Entry {
    fn cast(&self, source: Dtype) -> Cast {
        let write = match self.storage {
            Dtype::F16 => Scaled::Factor,
            Dtype::E4M3 => Scaled::State,
            _ => Scaled::No,
        };
        Cast { source, target: self.storage, read: false, write }
    }

    fn staged_dtype(&self) -> Dtype {
        if self.storage == Dtype::I16 { Dtype::I16 } else { Dtype::F32 }
    }

    /// Whether the source can be copied as it lies.
    fn direct(&self, target: &View) -> Option<View> {
        self.source_view.filter(|view| {
            let reach = view.device == target.device || (view.device == Device::Cpu && target.device != Device::Cpu);
            view.layout == target.layout && view.layout != Layout::SCATTERED && reach
        })
    }
}

/// (index, source, the tensor that holds the target's elements)
type Staged<'py> = (usize, Bound<'py, PyAny>, Bound<'py, PyAny>);
/// (parameter, name, the saved tensor, whether it is a remainder)
type Source<'py> = (Bound<'py, PyAny>, Bound<'py, PyString>, Bound<'py, PyAny>, bool);

/// A checkpoint's states and where they go.
#[pyclass(module = "te_patches._core")]
pub struct Load {
    entries: Vec<Entry>,
    /// Parameters that the checkpoint has an entry for, in its order.
    params: Vec<Py<PyAny>>,
    foreign: Py<PyDict>,
    held: bool,
}

#[pymethods]
impl Load {
    /// Reads the states of a checkpoint whose groups match the optimizer's. `ids`: what the checkpoint calls each
    /// parameter, in the optimizer's order. `whole`: whether plain tensors of a DTensor's global shape are taken.
    /// `reuse`: whether buffers that the optimizer has are written in place.
    #[staticmethod]
    fn read<'py>(
        optimizer: &Bound<'py, PyAny>,
        ids: Vec<Bound<'py, PyAny>>,
        states: &Bound<'py, PyDict>,
        whole: bool,
        reuse: bool,
    ) -> PyResult<Load> {
        let py = optimizer.py();
        let mut reader = Reader::new(py)?;
        let params = parameters(optimizer)?;
        let index_of = PyDict::new(py);
        for (index, id) in ids.iter().enumerate() {
            index_of.set_item(id, index)?;
        }
        let storages = optimizer.getattr(intern!(py, "name_to_dtype_map"))?;
        let remainders: bool = optimizer.getattr(intern!(py, "store_param_remainders"))?.is_truthy()?;
        let mut load = Load { entries: Vec::new(), params: Vec::new(), foreign: PyDict::new(py).unbind(), held: false };
        // Memory of parameters, which no load may touch.
        let (mut fixed, mut seen) = (Vec::with_capacity(params.len()), vec![false; params.len()]);
        for (id, values) in states.iter() {
            let Some(index) = index_of.get_item(&id)? else {
                load.foreign.bind(py).set_item(id, values)?;
                continue;
            };
            let index: usize = index.extract()?;
            let (param, place) = &params[index];
            let values = values.cast_into::<PyDict>().map_err(|_| {
                PyTypeError::new_err(format!("FusedAdam: the saved state of {} is no dict", name_of(*place, param)))
            })?;
            load.params.push(param.clone().unbind());
            let (shard, sharded, nominal) = shard_of(&mut reader, param, *place)?;
            seen[index] = true;
            fixed.extend(Extent::of(&shard));
            for (name, value) in values.iter() {
                if value.is_none() {
                    continue;
                }
                let name = name.cast_into::<PyString>().map_err(PyErr::from)?;
                let Ok(dtype) = storages.get_item(&name) else {
                    return Err(PyKeyError::new_err(format!(
                        "FusedAdam: the saved state of {} has an entry {name}, which the optimizer does not keep",
                        name_of(*place, param)
                    )));
                };
                let storage = match reader.dtype(&dtype) {
                    Dtype::F32 if remainders && name == "master_param" && nominal == Dtype::BF16 => Dtype::I16,
                    Dtype::U8 => Dtype::E4M3,
                    dtype => dtype,
                };
                let mut entry = Entry {
                    param: param.clone().unbind(),
                    place: *place,
                    name: name.unbind(),
                    storage,
                    shard,
                    sharded,
                    source: value.clone().unbind(),
                    source_view: None,
                    target: None,
                    same: false,
                };
                entry.read_source(&mut reader, value, param, whole)?;
                load.entries.push(entry);
            }
        }
        if reuse {
            for (index, (param, place)) in params.iter().enumerate() {
                if !seen[index] {
                    fixed.extend(Extent::of(&shard_of(&mut reader, param, *place)?.0));
                }
            }
            load.find_targets(&mut reader, optimizer, &fixed)?;
        }
        Ok(load)
    }

    /// States that need a buffer: (parameter, name, whether it is a remainder).
    fn fresh<'py>(&self, py: Python<'py>) -> Vec<(Bound<'py, PyAny>, Bound<'py, PyString>, bool)> {
        let fresh = self.entries.iter().filter(|entry| entry.target.is_none());
        fresh.map(|e| (e.param.bind(py).clone(), e.name.bind(py).clone(), e.storage == Dtype::I16)).collect()
    }

    /// Takes the buffers that were made for them. RuntimeError for one that cannot be written.
    fn place(&mut self, state: &Bound<'_, PyDict>, scales: &Bound<'_, PyDict>) -> PyResult<()> {
        let py = state.py();
        let mut reader = Reader::new(py)?;
        for entry in self.entries.iter_mut().filter(|entry| entry.target.is_none()) {
            let (param, name) = (entry.param.bind(py), entry.name.bind(py));
            let made = match state.get_item(param)? {
                Some(states) => states.cast::<PyDict>()?.get_item(name)?,
                None => None,
            };
            let scales = scales.get_item(param)?;
            let target = match made {
                Some(made) => read_target(&mut reader, entry, made, scales)?,
                None => None,
            };
            entry.target = Some(target.ok_or_else(|| {
                PyRuntimeError::new_err(format!(
                    "FusedAdam: the {name} that was made for {} does not fit it",
                    name_of(entry.place, param)
                ))
            })?);
        }
        Ok(())
    }

    /// Makes sure that every kernel this load takes can be launched. RuntimeError, saying why, if not.
    fn prepare(&self) -> PyResult<()> {
        let mut casts = HashSet::new();
        for entry in &self.entries {
            if let Some(Target { view: View { device: Device::Cuda(device), .. }, .. }) = &entry.target {
                casts.insert((*device, entry.cast(entry.source_view.map_or(entry.staged_dtype(), |view| view.dtype))));
                casts.insert((*device, entry.cast(entry.staged_dtype())));
            }
        }
        for (device, cast) in casts {
            with_kernels(device, |kernels| kernels.prepare_cast(cast))?;
        }
        Ok(())
    }

    /// Whether something beside the optimizer holds buffers that will be written in place.
    #[getter]
    fn held(&self) -> bool {
        self.held
    }

    /// One tensor that will be written in place, if there is one.
    fn sample<'py>(&self, py: Python<'py>) -> Option<Bound<'py, PyAny>> {
        let written = self.entries.iter().filter(|entry| !entry.same && entry.shard.numel > 0);
        written.filter_map(|entry| entry.target.as_ref()).map(|target| target.inner.bind(py).clone()).next()
    }

    /// Sources that torch has to make plain tensors of: (index, source, the tensor that holds the target's elements).
    fn staged<'py>(&self, py: Python<'py>) -> Vec<Staged<'py>> {
        let mut staged = Vec::new();
        for (index, entry) in self.entries.iter().enumerate() {
            if let Some(target) = &entry.target
                && !entry.same
                && entry.shard.numel > 0
                && entry.direct(&target.view).is_none()
            {
                let bind = |object: &Py<PyAny>| object.bind(py).clone();
                staged.push((index, bind(&entry.source), bind(&target.inner)));
            }
        }
        staged
    }

    /// Writes one state from the plain tensor that was made of its source, on the target's device in its layout.
    fn write_one(&self, py: Python<'_>, index: usize, source: &Bound<'_, PyAny>) -> PyResult<()> {
        let entry = &self.entries[index];
        let view = Reader::new(py)?.view(source)?;
        let target = entry.target.as_ref().filter(|target| {
            let fits = (view.numel, view.layout, view.device, view.dtype);
            fits == (target.view.numel, target.view.layout, target.view.device, entry.staged_dtype())
        });
        let target = target.ok_or_else(|| PyRuntimeError::new_err("the tensor does not stand in for the source"))?;
        // SAFETY of the addresses: `self` holds the target, the caller the source.
        target.mark_stale(py)?;
        make(py, &[Move { copy: copy(entry, &view, target), from: view.device, to: target.view.device }], None)
    }

    /// Writes all states but those that are staged. `progress` is told the bytes of each portion of host memory.
    fn write(&self, py: Python<'_>, progress: Option<Py<PyAny>>) -> PyResult<()> {
        let mut moves = Vec::new();
        for entry in &self.entries {
            if let Some(target) = &entry.target
                && !entry.same
                && entry.shard.numel > 0
                && let Some(view) = entry.direct(&target.view)
            {
                target.mark_stale(py)?;
                moves.push(Move { copy: copy(entry, &view, target), from: view.device, to: target.view.device });
            }
        }
        make(py, &moves, progress)
    }

    /// The states as they will be: {parameter: {name: tensor}}, in the checkpoint's order.
    fn states<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let states = PyDict::new(py);
        let mut entries = self.entries.iter().peekable();
        for param in &self.params {
            let own = PyDict::new(py);
            while let Some(entry) = entries.next_if(|entry| entry.param.is(param)) {
                if let Some(target) = &entry.target {
                    own.set_item(entry.name.bind(py), target.outer.bind(py))?;
                }
            }
            states.set_item(param.bind(py), own)?;
        }
        Ok(states)
    }

    /// (parameter, name, the saved tensor itself) of every state, for optimizers that write states by themselves.
    fn sources<'py>(&self, py: Python<'py>) -> Vec<Source<'py>> {
        let bind = |object: &Py<PyAny>| object.bind(py).clone();
        let row = |e: &Entry| (bind(&e.param), e.name.bind(py).clone(), bind(&e.source), e.storage == Dtype::I16);
        self.entries.iter().map(row).collect()
    }

    /// Parameters that the checkpoint has an entry for.
    fn params<'py>(&self, py: Python<'py>) -> Vec<Bound<'py, PyAny>> {
        self.params.iter().map(|param| param.bind(py).clone()).collect()
    }

    /// Entries of the checkpoint that belong to no parameter.
    fn foreign<'py>(&self, py: Python<'py>) -> Bound<'py, PyDict> {
        self.foreign.bind(py).clone()
    }

    /// (states, those that are their own source, bytes of host memory that will be copied to devices).
    fn counts(&self) -> (usize, usize, u64) {
        let same = self.entries.iter().filter(|entry| entry.same).count();
        let host = self.entries.iter().filter_map(|entry| match (&entry.source_view, entry.shard.device) {
            (Some(view), Device::Cuda(_)) if view.device == Device::Cpu => Some(view.numel * view.dtype.bytes()),
            _ => None,
        });
        (self.entries.len(), same, host.sum())
    }
}

impl Load {
    /// Finds the buffers that can be written in place.
    fn find_targets<'py>(
        &mut self,
        reader: &mut Reader<'py>,
        optimizer: &Bound<'py, PyAny>,
        fixed: &[Extent],
    ) -> PyResult<()> {
        let py = optimizer.py();
        let mut walk = StateWalk::new(optimizer.getattr(intern!(py, "state"))?.cast_into::<PyDict>()?);
        let mut scale_walk = StateWalk::new(optimizer.getattr(intern!(py, "_scales"))?.cast_into::<PyDict>()?);
        let mut held = Vec::with_capacity(self.entries.len());
        for entry in &mut self.entries {
            held.push(false);
            let param = entry.param.bind(py);
            let Some(states) = walk.get(param)? else { continue };
            let Ok(states) = states.cast::<PyDict>() else { continue };
            let Some(outer) = states.get_item(entry.name.bind(py))? else { continue };
            // The dict's reference, and ours.
            let others = references(&outer) > 2;
            let scales = match entry.storage {
                Dtype::F32 | Dtype::I16 => None,
                _ => scale_walk.get(param)?,
            };
            // What cannot be read cannot be written in place: a released storage, a tensor of another kind.
            if let Ok(target) = read_target(reader, entry, outer, scales) {
                entry.target = target;
                held.pop();
                held.push(others);
            }
        }
        let target = |entry: &Entry| entry.target.as_ref().and_then(|target| Extent::of(&target.view));
        let buffers: Vec<_> = self.entries.iter().map(target).collect();
        let sources: Vec<_> =
            self.entries.iter().map(|entry| entry.source_extent(reader, py)).collect::<PyResult<_>>()?;
        for (at, overlaps) in shared(&buffers, &sources, fixed).into_iter().enumerate() {
            let entry = &mut self.entries[at];
            if overlaps {
                entry.target = None;
            } else if let (Some(target), Some(view)) = (&entry.target, &entry.source_view) {
                let alike = |view: &View| (view.address, view.layout, view.dtype, view.device);
                entry.same = alike(&target.view) == alike(view) && entry.shard.numel > 0;
            }
            self.held |= held[at] && entry.target.is_some() && !entry.same && entry.shard.numel > 0;
        }
        Ok(())
    }
}

impl Entry {
    /// Checks a saved tensor and finds out how it can be read.
    fn read_source<'py>(
        &mut self,
        reader: &mut Reader<'py>,
        value: Bound<'py, PyAny>,
        param: &Bound<'py, PyAny>,
        whole: bool,
    ) -> PyResult<()> {
        let py = param.py();
        let name = self.name.bind(py).clone();
        let what = |found: &str| format!("FusedAdam: the saved {name} of {} {found}", name_of(self.place, param));
        if reader.kind(&value)? == Kind::Wrapped && !reader.is_tensor(&value)? {
            return Err(PyTypeError::new_err(what(&format!("is a {}, no tensor", value.get_type()))));
        }
        let (local, kind, inner) = reader.local(value.clone())?;
        if local.is_none() {
            return Err(PyTypeError::new_err(what("is a DTensor without a local tensor")));
        }
        let view = match inner {
            Kind::Plain => reader.view(&local).map_err(|error| {
                PyRuntimeError::new_err(what(&format!("({}) cannot be read: {}", describe(&local), error.value(py))))
            })?,
            _ => reader.wrapper_view(&local)?,
        };
        self.source = local.clone().unbind();
        let mut plain = inner == Kind::Plain;
        if (view.shape, view.numel) != (self.shard.shape, self.shard.numel) {
            // Releases that lose the sharding saved plain tensors of the global shape, of which the first elements
            // count.
            let first = self.sharded && kind != Kind::Sharded && whole && {
                let shape = |tensor: &Bound<'py, PyAny>| tensor.getattr(intern!(py, "shape"));
                shape(&local)?.eq(shape(param)?)?
            };
            if !first {
                return Err(PyRuntimeError::new_err(what(&format!(
                    "has another shape ({}); it must be that of the parameter's local shard",
                    describe(&local)
                ))));
            }
            plain = false;
        }
        let remainder = self.storage == Dtype::I16;
        let accepted = match view.dtype {
            Dtype::I16 => remainder,
            Dtype::F32 | Dtype::F16 | Dtype::BF16 => !remainder,
            Dtype::I32 | Dtype::U8 => false,
            _ => {
                plain = false;
                !remainder && local.call_method0(intern!(py, "is_floating_point"))?.is_truthy()?
            }
        };
        if !accepted {
            let expected = if remainder {
                "but the optimizer keeps int16 remainders of bf16 parameters (store_param_remainders=True); \
                 load it with the options it was saved with"
            } else if view.dtype == Dtype::I16 {
                "an int16 remainder, but the optimizer keeps whole masters (store_param_remainders=False); \
                 load it with the options it was saved with"
            } else {
                "but a floating dtype is needed"
            };
            return Err(PyAssertionError::new_err(what(&format!("is {}, {expected}", describe(&local)))));
        }
        self.source_view = plain.then_some(view);
        Ok(())
    }

    /// Memory that is read, for what can be another's buffer.
    fn source_extent<'py>(&self, reader: &mut Reader<'py>, py: Python<'py>) -> PyResult<Option<Extent>> {
        if let Some(view) = &self.source_view {
            return Ok(Extent::of(view));
        }
        let source = self.source.bind(py);
        if reader.kind(source)? == Kind::Plain {
            return Ok(Extent::of(&reader.view(source)?));
        }
        // A quantized tensor that somebody took from the live state.
        match reader.fp8(source) {
            Ok(Some(fp8)) => Ok(Extent::of(&reader.view(&fp8.data)?)),
            _ => Ok(None),
        }
    }
}

fn copy(entry: &Entry, source: &View, target: &Target) -> Copy {
    let cast = entry.cast(source.dtype);
    let (from, to) = (source.address, target.view.address);
    Copy { cast, numel: source.numel, source: from, target: to, read: 0, scaling: target.scaling, absmax: 0 }
}

/// An optimizer's parameters in order.
fn parameters<'py>(optimizer: &Bound<'py, PyAny>) -> PyResult<Vec<(Bound<'py, PyAny>, Place)>> {
    let py = optimizer.py();
    let mut params = Vec::new();
    for (group, options) in optimizer.getattr(intern!(py, "param_groups"))?.try_iter()?.enumerate() {
        for (index, param) in options?.get_item(intern!(py, "params"))?.try_iter()?.enumerate() {
            params.push((param?, Place { group, index }));
        }
    }
    Ok(params)
}

/// Layout and size of a parameter's local shard, whether it is one, and the dtype it shows.
fn shard_of<'py>(reader: &mut Reader<'py>, param: &Bound<'py, PyAny>, place: Place) -> PyResult<(View, bool, Dtype)> {
    let (local, kind, inner) = reader.local(param.clone())?;
    let unreadable = |error: PyErr| {
        let reason = error.value(param.py()).to_string();
        PyRuntimeError::new_err(format!("FusedAdam: {} cannot be read: {reason}", name_of(place, param)))
    };
    if inner == Kind::Plain {
        let view = reader.shape_view(&local).map_err(unreadable)?;
        return Ok((view, kind == Kind::Sharded, view.dtype));
    }
    let nominal = reader.dtype(&param.getattr(intern!(param.py(), "dtype"))?);
    Ok((reader.wrapper_view(&local).map_err(unreadable)?, kind == Kind::Sharded, nominal))
}

/// A buffer, if it is one that this entry can be written to.
fn read_target<'py>(
    reader: &mut Reader<'py>,
    entry: &Entry,
    outer: Bound<'py, PyAny>,
    scales: Option<Bound<'py, PyAny>>,
) -> PyResult<Option<Target>> {
    let py = outer.py();
    let (inner, kind, inside) = reader.local(outer.clone())?;
    if (kind == Kind::Sharded) != entry.sharded {
        return Ok(None);
    }
    let factor = match &scales {
        Some(scales) => scales.cast::<PyDict>()?.get_item(entry.name.bind(py))?,
        None => None,
    };
    let mut transposed = None;
    let (inner, view, scaling, kept) = match entry.storage {
        Dtype::E4M3 => {
            let (Some(fp8), Some(factor)) = (reader.fp8(&inner)?, factor) else { return Ok(None) };
            transposed = fp8.transposed.then(|| inner.unbind());
            let view = reader.view(&fp8.data)?;
            let one = |tensor: &Bound<'py, PyAny>| reader.one("an fp8 scale", tensor, Dtype::F32, view.device);
            let scaling = Scaling {
                factor: one(&factor)?.address,
                scale: one(&fp8.scale)?.address,
                scale_inv: one(&fp8.scale_inv)?.address,
                amax: one(&fp8.amax)?.address,
            };
            if view.dtype != Dtype::U8 {
                return Ok(None);
            }
            let kept = vec![factor.unbind(), fp8.scale.unbind(), fp8.scale_inv.unbind(), fp8.amax.unbind()];
            (fp8.data, View { dtype: fp8.dtype, ..view }, scaling, kept)
        }
        _ if inside != Kind::Plain => return Ok(None),
        Dtype::F16 => {
            let Some(factor) = factor else { return Ok(None) };
            let view = reader.view(&inner)?;
            let address = reader.one("a scale", &factor, Dtype::F32, view.device)?.address;
            (inner, view, Scaling { factor: address, ..Scaling::default() }, vec![factor.unbind()])
        }
        // Stock gives bf16 states a scale too, which is always 1.
        Dtype::BF16 if factor.is_none() => return Ok(None),
        _ => {
            let view = reader.view(&inner)?;
            (inner, view, Scaling::default(), Vec::new())
        }
    };
    let fits = view.dtype == entry.storage
        && (view.shape, view.numel) == (entry.shard.shape, entry.shard.numel)
        && view.device == entry.shard.device
        && view.layout != Layout::SCATTERED
        && matches!(view.device, Device::Cpu | Device::Cuda(_));
    let (outer, inner) = (outer.unbind(), inner.unbind());
    Ok(fits.then_some(Target { outer, inner, view, scaling, _kept: kept, transposed }))
}
