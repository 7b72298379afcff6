//! Reads a parameter whose tensors are all of the kinds that they were of when it was last checked: what was right of those
//! kinds then is right now, and only addresses are new.
//! Invariant: whatever is not as it was is left to the full reading, which raises what there is to raise.

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::plan::column::{Master, Role, Work};
use crate::plan::operands::{ROLES, Scaling};
use crate::python::faults::Place;
use crate::python::group::{Grad, GroupReader};
use crate::python::reader::{Kind, state_entries};
use crate::tensor::Dtype;

impl<'py> GroupReader<'_, 'py> {
    /// The work of a parameter with a gradient; `None` if it has to be read in full.
    pub fn read_again(
        &mut self,
        place: Place,
        param: &Bound<'py, PyAny>,
        local: &Bound<'py, PyAny>,
        outer: Kind,
        grad: &Grad<'py>,
    ) -> PyResult<Option<Work>> {
        let py = param.py();
        let sharded = outer == Kind::Sharded;
        let Some(signature) = self.trails.checked() else { return Ok(None) };
        let variant = signature.variant;
        // A master that stock only scales may have been missing and have come back.
        let master_missed = variant.master == Master::None && self.switches.master(variant.param) != Master::None;
        if master_missed || self.release.strict_parity && grad.sharded != sharded {
            return Ok(None);
        }
        let mut tensors = [0; ROLES];
        let mut scaling = None;
        let Some(&kind) = self.grad_kinds.get(place.index) else { return Ok(None) };
        let Some(view) = self.reader.recalled(&grad.local, self.kinds, kind) else { return Ok(None) };
        tensors[Role::Grad as usize] = view.address;
        let Some(address) = self.address_again(param.as_ptr() as u64, local) else { return Ok(None) };
        tensors[Role::Param as usize] = address;

        let names = [intern!(py, "exp_avg"), intern!(py, "exp_avg_sq"), intern!(py, "master_param")];
        let Some(state) = self.walk.get(param)? else { return Ok(None) };
        let Ok(state) = state.cast_into::<PyDict>() else { return Ok(None) };
        self.trails.note_dict(state.as_ptr() as u64);
        let mut factors = [const { None }; 3];
        if variant.is_scaled() {
            let Some(scales) = self.scales.get(param)? else { return Ok(None) };
            let Ok(scales) = scales.cast_into::<PyDict>() else { return Ok(None) };
            self.trails.note_dict(scales.as_ptr() as u64);
            factors = state_entries(&scales, names)?;
        }
        let master = matches!(variant.master, Master::F16 | Master::F16Idle);
        let halves = [variant.exp_avg == Dtype::F16, variant.exp_avg_sq == Dtype::F16, master];
        let states = state_entries(&state, names)?.into_iter().zip(factors).zip(halves);
        for (role, ((tensor, factor), half)) in [Role::ExpAvg, Role::ExpAvgSq, Role::Master].into_iter().zip(states) {
            if role == Role::Master && variant.master == Master::None {
                continue;
            }
            let Some(tensor) = tensor else { return Ok(None) };
            let object = tensor.as_ptr() as u64;
            let (tensor, outer_state, inner) = self.reader.local(tensor)?;
            if inner != Kind::Plain || (outer_state == Kind::Sharded) != sharded {
                return Ok(None);
            }
            let Some(address) = self.address_again(object, &tensor) else { return Ok(None) };
            tensors[role as usize] = address;
            if half {
                let Some(factor) = factor else { return Ok(None) };
                if self.reader.kind(&factor)? != Kind::Plain {
                    return Ok(None);
                }
                let Some(factor) = self.address_again(factor.as_ptr() as u64, &factor) else { return Ok(None) };
                let parts: &mut [Scaling; ROLES] = scaling.get_or_insert_with(Box::default);
                parts[role as usize].factor = factor;
            }
        }
        self.trails.note_checked(signature);
        Ok(Some(Work { signature, tensors, scaling }))
    }

    /// Address of the next tensor if it is of the kind that was noted in its place.
    fn address_again(&mut self, outer: u64, local: &Bound<'py, PyAny>) -> Option<u64> {
        let kind = self.trails.kind();
        let view = self.reader.recalled(local, self.kinds, kind)?;
        self.trails.note(outer, local.as_ptr() as u64, view.record, self.reader.record_at(), kind);
        Some(view.address)
    }
}
