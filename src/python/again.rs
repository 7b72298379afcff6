//! Reads the parameters whose tensors are all of the kinds that they were of when they were last checked: what was right of
//! those kinds then is right now, and only addresses are new.
//! Invariant: whatever is not as it was is left to the full reading, which raises what there is to raise.

use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};

use crate::plan::column::{Master, Role, Signature, Work};
use crate::plan::operands::{ROLES, Scaled, Scaling};
use crate::python::group::GroupReader;
use crate::python::prefetch::{AHEAD, Checked};
use crate::python::quantized::Insides;
use crate::python::reader::{borrowed_entries, borrowed_items};
use crate::python::sweep::{FACTORS, Found, INSIDES, Memory, Row, SCALED, Sight, Sweep, UNSCALED};
use crate::tensor::Dtype;

/// States in the order in which they are read.
const STATES: [Role; 3] = [Role::ExpAvg, Role::ExpAvgSq, Role::Master];

/// What a reading fills, kept from one step to the next.
#[derive(Default)]
pub struct Buffers {
    /// Per parameter its work, if it has any.
    pub works: Vec<Option<Work>>,
    /// Per parameter whether nothing is left to read.
    pub done: Vec<bool>,
    /// How many parameters were as they were.
    pub recalled: usize,
    rows: Memory<UNSCALED>,
    scaled_rows: Memory<SCALED>,
}

impl Buffers {
    /// Forgets everything and makes room.
    pub fn begin(&mut self, params: usize) {
        self.works.clear();
        self.works.resize(params, None);
        self.done.clear();
        self.done.resize(params, false);
        self.recalled = 0;
    }
}

impl<'py> GroupReader<'_, 'py> {
    /// Reads the parameters that are as they were; the others are left.
    pub fn read_again(&mut self, params: &Bound<'py, PyList>) -> PyResult<()> {
        if self.switches.scales_states() || self.reader.met_wrapped() {
            self.read_rows(params, |buffers| &mut buffers.scaled_rows)
        } else {
            self.read_rows(params, |buffers| &mut buffers.rows)
        }
    }

    /// The same with rows of one length.
    fn read_rows<const PLACES: usize>(
        &mut self,
        params: &Bound<'py, PyList>,
        memory: fn(&mut Buffers) -> &mut Memory<PLACES>,
    ) -> PyResult<()> {
        let Some(recall) = self.reader.recall().filter(|_| self.trails.any_checked()) else { return Ok(()) };
        let grads = recall.grads().filter(|_| !self.switches.decoupled_grad);
        // Where torch or the user has to be asked for gradients, that comes first: it may run code of Python's.
        let given = if grads.is_none() { Some(self.given_grads(params)?) } else { None };
        let fp8 = self.switches.moments.contains(&Dtype::E4M3) || self.reader.met_wrapped();
        let insides = if fp8 { self.reader.insides(params.py())? } else { None };
        let sight = Sight { recall, grads, classes: self.reader.known_classes(), palette: self.kinds.palette() };
        let count = self.buffers.done.len();
        let mut sweep = Sweep::new(sight, count, memory(self.buffers));
        for (index, param) in borrowed_items(params).enumerate().take(count) {
            self.trails.prefetch_dicts(index + 2 * AHEAD);
            let address = |grad: &Bound<'py, PyAny>| grad.as_ptr() as u64;
            let grad = given.as_ref().map(|grads| grads.get(index).and_then(Option::as_ref).map_or(0, address));
            if grad == Some(0) {
                self.buffers.done[index] = self.state(param).is_some();
                continue;
            }
            if let Some(row) = self.row(index, param, insides.as_ref()) {
                // SAFETY: the objects are held by the list, by `given` and by the dicts of the optimizer; from the first
                // row to the last no code of Python's runs.
                unsafe { sweep.push(Row { grad: grad.unwrap_or(0), ..row }) };
            }
        }
        let mut rows = std::mem::take(memory(self.buffers));
        let (Buffers { works, done, recalled, .. }, trails) = (&mut *self.buffers, &*self.trails);
        sweep.finish(&mut rows, |row| {
            let index = row.index as usize;
            works[index] = match (row.found, trails.checked(index)) {
                (Found::Idle, _) => None,
                (Found::Known, Some(checked)) => work(row, checked.signature),
                _ => return,
            };
            done[index] = true;
            *recalled += 1;
        });
        *memory(self.buffers) = rows;
        Ok(())
    }

    /// Every parameter's gradient.
    fn given_grads(&mut self, params: &Bound<'py, PyList>) -> PyResult<Vec<Option<Bound<'py, PyAny>>>> {
        params.iter().map(|param| self.reader.grad(&param, self.switches.decoupled_grad)).collect()
    }

    /// A parameter's state, if it has any and that is found without asking it for its hash.
    fn state(&mut self, param: u64) -> Option<Bound<'py, PyDict>> {
        self.walk.step(param)?.cast_into::<PyDict>().ok().filter(|state| !state.is_empty())
    }

    /// The objects of a parameter and the kinds that they should be of; `None` if it is to be read in full.
    fn row<const PLACES: usize>(
        &mut self,
        index: usize,
        param: u64,
        insides: Option<&Insides<'py>>,
    ) -> Option<Row<PLACES>> {
        let state = self.state(param)?;
        let mut row = Row { index: index as u32, param, ..Row::EMPTY };
        let Some(Checked { signature, sharded, grad_sharded }) = self.trails.checked(index) else {
            // It had no gradient; if it still has none, nothing is left to read.
            return Some(row);
        };
        let variant = signature.variant;
        // A master that stock only scales may have been missing and have come back.
        if variant.master == Master::None && self.switches.master(variant.param) != Master::None {
            return None;
        }
        let mut dicts = [const { None }; 2 + 2 + 4];
        dicts[2] = Some([0, state.as_ptr() as u64]);
        let states = borrowed_entries(&state);
        let mut factors = [None; 3];
        if variant.two_passes() {
            let scales = self.scales.step(param)?.cast_into::<PyDict>().ok()?;
            dicts[3] = Some([0, scales.as_ptr() as u64]);
            factors = borrowed_entries(&scales);
        }
        row.grad_sharded = grad_sharded;
        row.kinds[Role::Grad as usize] = self.trails.grad_kind(index);
        let mut kinds = self.trails.kinds(index);
        let mut expect = |place: usize, object, sharded: bool| {
            (*row.words.get_mut(place)?, *row.kinds.get_mut(place)?) = (object, kinds.next()?);
            row.sharded |= u32::from(sharded) << place;
            Some(())
        };
        if variant.scaled(Role::Param) == Scaled::Param {
            // SAFETY: the list of parameters holds it, and no code of Python's has run.
            let inside = unsafe { insides?.of(param, sharded) }.filter(|inside| inside.dtype == variant.param)?;
            dicts[..2].copy_from_slice(&inside.dicts.map(Some));
            expect(Role::Param as usize, inside.data, false)?;
            let words = [inside.scale, inside.scale_inv, inside.amax];
            (inside_of(Role::Param)..).zip(words).try_for_each(|(place, word)| expect(place, word, false))?;
        } else {
            expect(Role::Param as usize, param, sharded)?;
        }
        for (at, role) in STATES.into_iter().enumerate() {
            if role == Role::Master && variant.master == Master::None {
                continue;
            }
            let (state, scaled) = (states[at]?, variant.scaled(role));
            if scaled == Scaled::State {
                // SAFETY: the state's dict holds it, and no code of Python's has run.
                let inside = unsafe { insides?.of(state, sharded) }?;
                // That a transposed copy is out of date is for the full reading to see to.
                (inside.dtype == Dtype::E4M3 && !inside.transposed).then_some(())?;
                dicts[4 + 2 * at..][..2].copy_from_slice(&inside.dicts.map(Some));
                let of = inside_of(role);
                let words = [inside.data, factors[at]?, inside.scale, inside.scale_inv, inside.amax];
                let places = [role as usize, FACTORS + at, of, of + 1, of + 2];
                places.into_iter().zip(words).try_for_each(|(place, word)| expect(place, word, false))?;
                continue;
            }
            expect(role as usize, state, sharded)?;
            if scaled == Scaled::Factor {
                expect(FACTORS + at, factors[at]?, false)?;
            }
        }
        drop(kinds);
        self.trails.note_dicts_anew(index, dicts.into_iter().flatten());
        Some(row)
    }
}

/// Where a row has what scales an fp8 tensor.
const fn inside_of(role: Role) -> usize {
    INSIDES + 3 * (role as usize - Role::Param as usize)
}

/// The work of a row that is known; none without elements.
fn work<const PLACES: usize>(row: &Row<PLACES>, signature: Signature) -> Option<Work> {
    let mut scaling: Option<Box<[Scaling; ROLES]>> = None;
    let variant = signature.variant;
    for role in Role::ALL.into_iter().filter(|&role| variant.scaled(role) != Scaled::No) {
        let at = STATES.iter().position(|&state| state == role);
        let factor = at.and_then(|at| row.words.get(FACTORS + at)).copied().unwrap_or_default();
        let inside = row.words.get(inside_of(role)..).and_then(|words| words.first_chunk()).copied();
        let [scale, scale_inv, amax] = inside.unwrap_or_default();
        scaling.get_or_insert_default()[role as usize] = Scaling { factor, scale, scale_inv, amax };
    }
    let tensors = std::array::from_fn(|role| row.words[role]);
    (signature.numel > 0).then_some(Work { signature, tensors, scaling })
}
